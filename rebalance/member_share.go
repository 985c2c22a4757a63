package rebalance

import (
	"slices"
	"time"

	"github.com/muster-io/muster/registry"
)

// take looks at a new snapshot: nothing is computed anew unless it differs in
// substance.
func (m *Member) take(now time.Duration, s Snapshot) []Action {
	if m.snapshot != nil && s.Revision < m.snapshot.Revision {
		return nil
	}
	if m.adopted != nil && s.Revision < m.adopted.Record {
		s.Target, s.TargetRecord = m.adopted, m.adopted.Record // it has not seen our own record yet
	}
	before := m.snapshot
	m.snapshot = &s
	// A stale claim waits for this: it need not sit out its pause.
	m.retryAt = 0
	if before == nil {
		return m.divide(now)
	}
	target, rest := before.differs(&s)
	if !target && !rest && m.considered == before {
		m.considered = m.snapshot
		if m.refused == "" {
			m.expectTarget(now) // one that was stale may be proposed from this
		}
		return nil
	}
	var out []Action
	if !sameMap(before.Incarnations, s.Incarnations) {
		out = m.outlive()
	}
	switch {
	case !rest && m.storm.divideAt != 0:
		return out // what was put off is still to come
	case !rest || m.registration == nil || m.storm.change(now, len(s.Members)):
		return append(out, m.divide(now)...)
	}
	return out
}

// outlive drops what is held of topics that were deleted and created again: the
// position reached in the former one means nothing in the new one, so that the
// owner key is given up without a commit, and claimed anew if due.
func (m *Member) outlive() []Action {
	var old []registry.Partition
	for p, pt := range m.parts {
		if (pt.state == owned || pt.state == draining) && m.outlived(p, pt.token) {
			old = append(old, p)
		}
	}
	slices.SortFunc(old, registry.ComparePartitions)
	var out []Action
	for _, p := range old {
		pt := m.parts[p]
		pt.state, pt.why = releasing, "topic "+name(p.Topic)+" was deleted and created again"
		m.touch(p)
		out = append(out, Lose{p, pt.token, "topic was deleted and created again"})
	}
	return out
}

// outlived tells whether an owner key is older than the topic it names.
func (m *Member) outlived(p registry.Partition, token int64) bool {
	return token < m.snapshot.Incarnations[p.Topic] && !m.off.Outlived
}

// divide is the rebalancing algorithm, up to what this member is due. Rebalancing
// steps 1 to 7 (1 for each topic that I subscribe to, 2 its partitions, 3 its
// consumers, 4 and 5 both sorted, 6 my place among them and the number N for each, 7
// my slice) are those of Assign, by a strategy that all agree on; here they are done
// for one snapshot, in which partitions and consumers are of one moment.
func (m *Member) divide(now time.Duration) []Action {
	if m.leaving || m.registration == nil {
		return nil
	}
	s := m.snapshot
	if s.Registered != m.registration.Revision && !m.off.Registration {
		// Older than the registration: a newer snapshot is on its way. Newer: somebody
		// deleted the registration. What is held stays, for it stands under a lease that
		// lives; nothing is claimed until the registration is back.
		if s.Revision > m.registration.Revision && !m.asked {
			m.asked = true
			return []Action{Reregister{}}
		}
		return nil
	}
	m.considered = s
	if !slices.ContainsFunc(s.Members, func(x MemberInfo) bool { return x.ID == m.id }) {
		// The registration stands but cannot be read: nobody counts on us.
		m.frozen, m.outdated, m.expecting = false, false, false
		out := m.refuse("")
		m.setShare(nil, "registration cannot be read")
		m.shared = s
		return out
	}
	sticky := Agree(s.Members) == StrategySticky
	m.outdated = sticky && !s.Target.Current(*s)
	if m.frozen = m.outdated; m.outdated {
		// What is held goes on as the former target has it, until there is a new one.
		m.expectTarget(now)
		return nil // perhaps it cannot be written
	}
	m.expecting = false
	var assignment *Assignment
	var err error
	if sticky {
		assignment = s.Target.Assignment // Assign would look anew whether it is current
	} else {
		assignment, err = Assign(*s)
	}
	if err != nil && m.off.Refusal {
		assignment, err = assignRange(*s, StrategyRangeNumeric), nil
	}
	if err != nil {
		m.frozen = true
		return m.refuse(err.Error())
	}
	out := m.refuse("")
	reason, kind := "joined", CauseJoined
	if m.shared != nil {
		reason, kind = Cause(*m.shared, *s), KindOfCause(*m.shared, *s)
	}
	m.setShare(assignment.Of(m.id), reason)
	m.shared = s
	return append(out, Rebalanced{Revision: s.Revision, Strategy: assignment.Strategy,
		Members: len(s.Members), Share: len(m.share), Reason: reason, Kind: kind})
}

// refuse notes why the group cannot be divided, or with an empty reason that it can.
func (m *Member) refuse(reason string) []Action {
	if reason == m.refused {
		return nil
	}
	m.refused = reason
	return []Action{Refused{Reason: reason}}
}

// setShare notes what is due from now on, and why what is different is so.
func (m *Member) setShare(share map[registry.Partition]int32, why string) {
	for p := range m.share {
		if _, still := share[p]; !still {
			m.changed(p, why)
		}
	}
	for p, stream := range share {
		if before, was := m.share[p]; !was || before != stream {
			if m.parts[p] == nil {
				m.parts[p] = &part{}
			}
			m.changed(p, why)
		}
	}
	m.share = share
}

func (m *Member) changed(p registry.Partition, why string) {
	if pt := m.parts[p]; pt != nil {
		pt.why = why
	}
	m.touch(p)
}

// leave has everything given up.
func (m *Member) leave() {
	m.leaving = true
	m.storm.divideAt, m.expecting, m.frozen = 0, false, false
	// A stop does not sit out the pause after what failed before it.
	m.retryAt, m.retrying = 0, minRetryPause
	m.setShare(nil, "leaving")
	for p := range m.parts {
		m.touch(p)
	}
}

// isMember tells whether a thread is one of a member of the newest snapshot.
func (m *Member) isMember(thread string) bool {
	_, _, ok := ParseThread(thread, func(id string) bool {
		// Of hand-made snapshots the members may be in any order.
		return slices.ContainsFunc(m.snapshot.Members, func(x MemberInfo) bool { return x.ID == id })
	})
	return ok
}
