package membership

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/vigil"
)

// close ends whatever the membership started, and waits for it.
func (m *Membership) close() {
	m.cancel()
	for _, o := range m.owned {
		o.cancel() // a Drain that goes on would be waited for
	}
	m.tasks.Wait()
	m.meter.closed()
	m.timer.Stop()
}

// post runs f in the loop; false if the membership closes before.
func (m *Membership) post(f func()) bool {
	select {
	case m.posts <- f:
		return true
	case <-m.ctx.Done():
		return false
	}
}

func (m *Membership) run(ctx context.Context) error {
	// Registration steps 2 to 4: watch the group, the brokers and the topics. Topics are
	// watched whether or not a filter is used, for they get partitions, come and go.
	// All of it before step 1, so that what the registration sets off is seen.
	view := m.cfg.View
	if view == nil {
		var err error
		view, err = OpenView(ctx, m.store, m.cfg.Root, m.cfg.Group, registry.ViewOptions{Stall: m.cfg.SessionTimeout / 2, Logger: m.log})
		switch {
		case err == nil:
			defer view.Close()
		case ctx.Err() != nil:
			return nil // stopped before it was anybody
		default:
			return err
		}
	}
	m.seat = view.sit(m.cfg.ID)
	defer m.seat.rise()
	if err := m.admissible(); err != nil {
		return err
	}
	if m.cfg.Watched {
		m.vigil = view.watcher(ctx, m)
	}
	m.takeSnapshot()
	m.join(nil)
	stop := ctx.Done()
	var patience <-chan time.Time
	overdue := time.NewTicker(m.cfg.SessionTimeout)
	defer overdue.Stop()
	m.looping.Store(true)
	defer m.looping.Store(false)
	for !m.finished {
		var lost <-chan struct{}
		if m.session != nil {
			lost = m.session.Done()
		}
		select {
		case f := <-m.posts:
			f()
		case <-m.seat.changed:
			m.takeSnapshot()
		case <-m.seat.trouble:
			m.warnOfSilence()
		case <-lost:
			m.sessionLost()
		case <-m.timer.C:
			m.step(rebalance.Tick{})
		case <-overdue.C:
			m.warnOfWaits()
			if m.seat.view.Heard() > m.cfg.SessionTimeout {
				m.warnOfSilence()
			}
		case <-stop:
			stop = nil
			m.leave(nil)
		case <-patience:
			m.giveUp()
		}
		if m.leaving && patience == nil {
			patience = time.After(m.cfg.LeaveTimeout)
		}
	}
	return m.err
}

// admissible refuses to join where the group could not be divided any more, before
// anybody has given anything up for it.
func (m *Membership) admissible() error {
	if !slices.Contains(m.cfg.Strategies, rebalance.StrategyRoundRobin) {
		return nil // then the group agrees on another, and all others divide any group
	}
	value, err := m.record(vigil.Secret{})
	if err != nil {
		return err
	}
	if _, err := rebalance.Assign(m.seat.with(value)); err != nil {
		return fmt.Errorf("not joining group %s, which could not be divided with member %s in it: %w", m.cfg.Group, m.cfg.ID, err)
	}
	return nil
}

// takeSnapshot tells the member, and the work, what the registry looks like now.
func (m *Membership) takeSnapshot() {
	keys, snapshot, bad := m.seat.read()
	m.complain(bad)
	m.brokersKnown(keys)
	m.work.Snapshot(snapshot, keys)
	m.step(snapshot)
}

// maxReported bounds what is remembered of bad records.
const maxReported = 1000

// complain logs bad records once each.
func (m *Membership) complain(bad []error) {
	for _, err := range bad {
		if text := err.Error(); !m.reported[text] && len(m.reported) < maxReported {
			m.reported[text] = true
			m.log.Warn("record skipped", "error", err)
		}
	}
}

func (m *Membership) step(e rebalance.Event) {
	var begun []*Ownership
	begin := func() {
		if len(begun) > 0 {
			m.work.Begin(begun)
			begun = nil
		}
	}
	for _, a := range m.member.Step(m.store.Now(), e) {
		switch a.(type) {
		case rebalance.Revoke, rebalance.Lose:
			begin() // it may be of what this very step has delivered
		}
		if o := m.act(a); o != nil {
			begun = append(begun, o)
		}
	}
	begin()
	m.meter.stepped(m.store.Now(), m.owned)
	if at, ok := m.member.Wake(); ok {
		m.timer.Reset(max(at-m.store.Now(), 0))
	}
}

// act carries out one action; an ownership that begins is returned, so that those
// of one step can begin together.
func (m *Membership) act(a rebalance.Action) *Ownership {
	switch a := a.(type) {
	case rebalance.Claim:
		s, note := m.session, m.note(registry.ActionClaimed, a.Reason, m.strategy, a.Snapshot)
		m.tasks.Go(func() { m.claim(s, a, note) })
	case rebalance.Release:
		s, note := m.session, m.note(registry.ActionReleased, a.Reason, m.strategy, m.revision)
		m.tasks.Go(func() { m.release(s, a, note) })
	case rebalance.Propose:
		s := m.session
		m.tasks.Go(func() { m.propose(s, a) })
	case rebalance.Deliver:
		return m.own(a)
	case rebalance.Revoke:
		if o := m.owned[a.Partition]; o != nil && o.Token == a.Token {
			o.revoke()
			m.tasks.Go(func() { m.drain(o) })
		}
	case rebalance.Lose:
		m.lose(a)
	case rebalance.Watch:
		m.watch(a)
	case rebalance.Unwatch:
		delete(m.waits, a.Partition)
		m.watches[a.Partition]()
		delete(m.watches, a.Partition)
	case rebalance.Reregister:
		s := m.session
		m.log.Warn("registration was deleted by somebody; registering again")
		m.tasks.Go(func() { m.register(s, true) })
	case rebalance.Rebalanced:
		m.strategy, m.revision = a.Strategy, a.Revision
		m.log.Debug("rebalanced", "rev", a.Revision, "strategy", a.Strategy, "members", a.Members, "share", a.Share, "reason", a.Reason)
		m.meter.rebalanced(m.store.Now(), a)
		if f := m.cfg.Listener.Rebalanced; f != nil {
			f(a)
		}
	case rebalance.Refused:
		if a.Reason != "" {
			m.log.Warn("the group cannot be divided; what is owned stays, nothing more is claimed", "reason", a.Reason)
		} else {
			m.log.Info("the group can be divided again")
		}
		if f := m.cfg.Listener.Refused; f != nil {
			f(a.Reason)
		}
	case rebalance.Left:
		s := m.session
		m.tasks.Go(func() {
			err := m.unregister(s)
			m.post(func() { m.finish(err) })
		})
	}
	return nil
}

func (m *Membership) own(a rebalance.Deliver) *Ownership {
	o := newOwnership(m.session, a.Want, a.Token)
	o.fenced = func() {
		m.post(func() { m.step(rebalance.Fenced{Partition: o.Partition, Token: o.Token}) })
	}
	m.owned[o.Partition] = o
	return o
}

func (m *Membership) lose(a rebalance.Lose) {
	o := m.owned[a.Partition]
	if o == nil || o.Token != a.Token {
		return
	}
	o.cancel()
	delete(m.owned, o.Partition)
	m.log.Warn("partition lost", "topic", a.Partition.Topic, "partition", a.Partition.Name(), "reason", a.Reason)
	m.meter.lost()
	m.work.Lost(o, a.Reason)
}

// drain waits until the work is done with the partition, and only then lets it go:
// ownership outlives the last effect.
func (m *Membership) drain(o *Ownership) {
	if !m.work.Drain(o) {
		return // lost meanwhile; the member knows
	}
	m.post(func() {
		if !o.Alive() {
			return
		}
		delete(m.owned, o.Partition)
		m.work.Revoked(o)
		o.cancel()
		m.step(rebalance.Drained{Partition: o.Partition, Token: o.Token})
	})
}

// warnOfSilence says that the registry does not answer. Nothing else follows from
// it: what is owned is owned as long as the session lives, and no longer.
func (m *Membership) warnOfSilence() {
	now := m.store.Now()
	if m.silence != 0 && now-m.silence < m.cfg.ComplaintPause {
		return
	}
	m.silence = now
	m.log.Warn("registry does not answer; what is owned stays so until the session ends")
}

// leave begins an orderly stop.
func (m *Membership) leave(err error) {
	if m.err == nil {
		m.err = err
	}
	if m.leaving {
		return
	}
	m.leaving = true
	m.log.Info("leaving the group")
	switch {
	case m.session == nil:
		m.finished = true // nothing is owned without a session
	case !m.registered:
		// Nothing is owned without a registration either, which may never come: the
		// id may be another's.
		m.session.Abandon(registry.ErrSessionClosed)
		m.sessionLost()
	default:
		m.step(rebalance.Leaving{})
	}
}

// giveUp ends a stop that has taken too long: the partitions are lost, not
// released, so that the work knows that what it still does is another's.
func (m *Membership) giveUp() {
	m.log.Warn("work did not come to its end in time; leaving without it", "timeout", m.cfg.LeaveTimeout)
	s := m.session
	if s != nil {
		s.Abandon(registry.ErrSessionClosed)
		m.sessionLost()
	}
	m.finish(ErrLeftBehind)
}

func (m *Membership) finish(err error) {
	if m.err == nil {
		m.err = err
	}
	m.finished = true
}

func sleep(ctx context.Context, pause time.Duration) bool {
	t := time.NewTimer(pause)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
