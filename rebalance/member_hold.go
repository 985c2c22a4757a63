package rebalance

import (
	"slices"

	"github.com/muster-io/muster/registry"
)

// reconcile compares what is due with what is held, of the partitions that were
// touched: first it gives up what it must (rebalancing step 8), then it claims what
// it lacks (rebalancing step 9). What stays is not touched.
func (m *Member) reconcile() []Action {
	touched := m.touched
	m.touched = nil
	if m.registration == nil {
		return nil
	}
	var out []Action
	slices.SortFunc(touched, registry.ComparePartitions)
	for _, p := range slices.Compact(touched) {
		delete(m.wanting, p)
		delete(m.giving, p)
		pt := m.parts[p]
		if pt == nil {
			continue
		}
		stream, due := m.share[p]
		switch {
		case pt.state == owned && (!due || stream != pt.stream):
			// Another stream of our own counts as another owner: the key names the thread.
			pt.state = draining
			out = append(out, Revoke{p, pt.token})
		case pt.state == releasing:
			m.giving[p] = struct{}{}
		case pt.state == idle && due:
			m.wanting[p] = struct{}{}
		case pt.state == idle && !due && pt.doubt:
			// Claimed with unknown outcome, and not due any more: take it back.
			pt.state, pt.token = releasing, 0
			m.giving[p] = struct{}{}
		case (pt.state == idle || pt.state == waiting) && !due && !pt.suspect:
			out = append(out, m.forget(p, pt)...)
		}
	}
	out = append(out, m.sendRelease()...)
	out = append(out, m.sendClaim()...)
	return append(out, m.sayLeft()...)
}

// sendRelease is rebalancing step 8: my entries that are due to others are removed,
// now that nothing of them is delivered any more.
func (m *Member) sendRelease() []Action {
	if len(m.giving) == 0 || m.release != nil || m.retryAt != 0 {
		return nil
	}
	m.number++
	m.release = &Release{Number: m.number}
	var why reasons
	for p := range m.giving {
		m.release.Held = append(m.release.Held, Held{p, m.parts[p].token})
	}
	clear(m.giving)
	slices.SortFunc(m.release.Held, func(a, b Held) int { return registry.ComparePartitions(a.Partition, b.Partition) })
	for _, h := range m.release.Held {
		why.add(m.parts[h.Partition].why)
	}
	m.release.Reason = why.String()
	return []Action{*m.release}
}

// sendClaim is rebalancing step 9: my new entries are added, each as soon as its
// former owner has released it. It waits while the share may be another one a
// moment later: a newer snapshot is not looked at yet, or a target is awaited.
func (m *Member) sendClaim() []Action {
	if len(m.wanting) == 0 || m.claim != nil || m.retryAt != 0 || m.claimAt != 0 ||
		m.frozen || m.snapshot == nil || m.considered != m.snapshot {
		return nil
	}
	m.number++
	m.claim = &Claim{Number: m.number, Registration: *m.registration, Snapshot: m.snapshot.Revision,
		Incarnations: m.snapshot.Incarnations}
	if Agree(m.snapshot.Members) == StrategySticky && !m.off.Target {
		m.claim.Target = m.snapshot.Target.Record
	}
	for p := range m.wanting {
		m.claim.Wants = append(m.claim.Wants, Want{p, m.share[p]})
	}
	clear(m.wanting)
	slices.SortFunc(m.claim.Wants, func(a, b Want) int { return registry.ComparePartitions(a.Partition, b.Partition) })
	var why reasons
	for _, w := range m.claim.Wants {
		pt := m.parts[w.Partition]
		pt.state, pt.stream = claiming, w.Stream
		why.add(pt.why)
	}
	m.claim.Reason = why.String()
	return []Action{*m.claim}
}

// sayLeft says Left once nothing is held and nothing is under way.
func (m *Member) sayLeft() []Action {
	if !m.leaving || m.left || m.claim != nil || m.release != nil {
		return nil
	}
	for _, pt := range m.parts {
		if pt.held() || pt.state == claiming || pt.doubt {
			return nil
		}
	}
	m.left = true
	return []Action{Left{}}
}

func (m *Member) drained(e Drained) []Action {
	pt := m.parts[e.Partition]
	if pt == nil || pt.state != draining || pt.token != e.Token && !m.off.Token {
		return nil
	}
	if stream, due := m.share[e.Partition]; due && stream == pt.stream && !m.leaving {
		// Due again before it was given up: the key still stands, so go on under it.
		pt.state = owned
		return []Action{Deliver{Want{e.Partition, stream}, pt.token}}
	}
	pt.state = releasing
	m.touch(e.Partition)
	return nil
}

func (m *Member) watch(p registry.Partition, pt *part, after int64) []Action {
	if pt.watched {
		return nil
	}
	pt.watched = true
	return []Action{Watch{p, after}}
}

func (m *Member) forget(p registry.Partition, pt *part) []Action {
	delete(m.parts, p)
	if pt.watched {
		return []Action{Unwatch{p}}
	}
	return nil
}

// reasons are those of the partitions of one action, each once.
type reasons struct{ list []string }

func (r *reasons) add(why string) {
	const most = 3 // with more the text says less
	if why != "" && len(r.list) < most && !slices.Contains(r.list, why) {
		r.list = append(r.list, why)
	}
}

func (r *reasons) String() string { return bounded(r.list) }

// gone tells, for people, how the owner key of what was waited for came to be free.
func (m *Member) gone(holder string, revision int64) string {
	switch {
	case holder == "":
		return "its owner let go of it"
	case !m.isMember(holder):
		return "owner " + name(holder) + " is gone"
	case m.snapshot.Revision >= revision:
		return "owner " + name(holder) + " released it"
	}
	return "the owner key of " + name(holder) + " was deleted" // perhaps with its session
}
