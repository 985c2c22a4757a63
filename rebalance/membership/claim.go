package membership

import (
	"context"
	"errors"
	"time"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// callLimit bounds one call to the registry, so that a call into nowhere is
// noticed and made again; the session's deadline comes before harm does.
const callLimit = 5 * time.Second

// claim is rebalancing step 9: add my new entries; what the former owner has
// not released yet is waited for, by the watch that the member asks for.
func (m *Membership) claim(s *registry.Session, a rebalance.Claim, note registry.Note) {
	ctx, cancel := context.WithTimeout(m.ctx, callLimit)
	defer cancel()
	claims := make([]registry.OwnerClaim, len(a.Wants))
	for i, w := range a.Wants {
		claims[i] = registry.OwnerClaim{Key: m.group.Owner(w.Partition), Value: []byte(rebalance.ThreadID(m.cfg.ID, w.Stream)),
			Topic: m.cfg.Root.Topic(w.Partition.Topic), Incarnation: a.Incarnations[w.Partition.Topic]}
	}
	guard := registry.Guard{Registration: a.Registration, IDs: m.group.IDs(), Snapshot: a.Snapshot}
	if a.Target != 0 {
		// The share is what the target record says, whoever has registered since. To look
		// for those too would make etcd read all registrations for the claim of each member.
		guard.IDs = ""
		guard.Target, guard.TargetRevision = m.group.Target(), a.Target
	}
	results, revision, err := registry.Claim(ctx, m.store, s.Lease(), guard, claims, note)
	answer := rebalance.ClaimAnswered{Number: a.Number, Revision: revision, Stale: errors.Is(err, registry.ErrStale)}
	answer.Unknown = err != nil && !answer.Stale
	m.meter.claimed(len(claims), results, answer)
	for i, r := range results {
		o := rebalance.ClaimOutcome{Mine: r.Holder == nil, Token: r.Token, Stream: a.Wants[i].Stream, Revision: r.Revision}
		if string(r.Value) != string(claims[i].Value) {
			o.Stream = -1
		}
		if r.Holder != nil {
			o.Holder = string(r.Holder.KV.Value)
		}
		answer.Outcomes = append(answer.Outcomes, o)
	}
	if answer.Unknown && m.ctx.Err() == nil {
		m.log.Warn("claim failed, trying again", "error", err)
		m.doubt(s, err)
	}
	m.post(func() {
		if m.session != s {
			return
		}
		for i, r := range results {
			m.noteWait(a.Wants[i].Partition, r.Holder)
		}
		if answer.Stale {
			m.log.Debug("claim was stale", "rev", a.Snapshot)
		}
		m.step(answer)
	})
	m.prune()
}

// propose writes the group's target record.
func (m *Membership) propose(s *registry.Session, a rebalance.Propose) {
	answer := m.writeTarget(a)
	m.post(func() {
		if m.session == s {
			m.step(answer)
		}
	})
}

func (m *Membership) writeTarget(a rebalance.Propose) rebalance.ProposeAnswered {
	ctx, cancel := context.WithTimeout(m.ctx, callLimit)
	defer cancel()
	guard := registry.Guard{Registration: a.Registration, IDs: m.group.IDs(), Snapshot: a.Snapshot}
	revision, err := registry.WriteTarget(ctx, m.store, guard, m.group.Target(), a.Value, a.Replace)
	stale := errors.Is(err, registry.ErrStale)
	if err != nil && !stale && m.ctx.Err() == nil {
		m.log.Warn("target was not written, trying again", "error", err)
	}
	return rebalance.ProposeAnswered{Number: a.Number, Revision: revision, Stale: stale, Unknown: err != nil && !stale}
}

// doubt ends the session when the store says that its lease is gone: the next
// renewal would say the same, only later.
func (m *Membership) doubt(s *registry.Session, err error) {
	if errors.Is(err, registry.ErrLeaseNotFound) {
		s.Abandon(registry.ErrLeaseGone)
	}
}

// release is rebalancing step 8: remove my old entries.
func (m *Membership) release(s *registry.Session, a rebalance.Release, note registry.Note) {
	ctx, cancel := context.WithTimeout(m.ctx, callLimit)
	defer cancel()
	list := make([]registry.OwnerRelease, len(a.Held))
	for i, h := range a.Held {
		list[i] = registry.OwnerRelease{Key: m.group.Owner(h.Partition), Token: h.Token}
	}
	_, err := registry.Release(ctx, m.store, s.Lease(), list, note)
	if err != nil && m.ctx.Err() == nil {
		m.log.Warn("release failed, trying again", "error", err)
	}
	m.post(func() {
		if m.session == s {
			m.step(rebalance.ReleaseAnswered{Number: a.Number, Failed: err != nil})
		}
	})
	m.prune()
}

// wait is a partition that this member is due and somebody else holds.
type wait struct {
	since  time.Duration
	holder *registry.HeldError
	warned time.Duration
}

// noteWait remembers since when a partition is waited for; holder is nil if it is
// waited for no more.
func (m *Membership) noteWait(p registry.Partition, holder *registry.HeldError) {
	w := m.waits[p]
	switch {
	case holder == nil:
		delete(m.waits, p)
		return
	case w == nil:
		w = &wait{since: m.store.Now()}
		m.waits[p] = w
	}
	w.holder = holder
	m.log.Debug("waiting for the owner to release", "topic", p.Topic, "partition", p.Name(), "owner", string(holder.KV.Value))
	if f := m.cfg.Listener.Waiting; f != nil {
		f(p, string(holder.KV.Value))
	}
}

// warnOfWaits says what has been waited for longer than a dead owner's lease
// would have lasted. The waiting goes on: there is no giving up.
func (m *Membership) warnOfWaits() {
	now := m.store.Now()
	for p, w := range m.waits {
		if now-w.since < m.cfg.SessionTimeout || w.warned != 0 && now-w.warned < m.cfg.ComplaintPause {
			continue
		}
		w.warned = now
		m.log.Warn("partition is due and not released", "topic", p.Topic, "partition", p.Name(),
			"since", (now - w.since).Round(time.Second), "holder", w.holder)
	}
}
