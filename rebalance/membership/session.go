package membership

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/vigil"
)

// Joining is tried again after a pause that doubles between these bounds.
const (
	minJoinPause = 100 * time.Millisecond
	maxJoinPause = 2 * time.Second
)

// join opens a session and registers, in a goroutine that keeps trying, once the
// former session, if there was one, is revoked: its keys would be in the way.
func (m *Membership) join(former *registry.Session) {
	m.tasks.Go(func() {
		m.seat.await(m.ctx)
		for pause := minJoinPause; ; pause = min(2*pause, maxJoinPause) {
			s, err := m.open(former)
			if err == nil {
				if m.post(func() { m.session = s }) {
					m.register(s, false)
				} else {
					if err := m.drop(s); err != nil {
						m.log.Warn("lease is left to run out", "error", err)
					}
				}
				return
			}
			if m.ctx.Err() != nil {
				return
			}
			m.log.Warn("cannot join, trying again", "error", err)
			if !sleep(m.ctx, pause) {
				return
			}
		}
	})
}

// drop ends a session that nobody wants any more.
func (m *Membership) drop(s *registry.Session) error {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	return s.Close(ctx)
}

func (m *Membership) open(former *registry.Session) (*registry.Session, error) {
	ctx, cancel := context.WithTimeout(m.ctx, callLimit)
	defer cancel()
	if former != nil {
		if err := former.Close(ctx); err != nil {
			return nil, err
		}
	}
	return registry.OpenSession(ctx, m.store, registry.SessionOptions{TTL: m.cfg.SessionTimeout, Logger: m.log})
}

// holderGrace is how much longer than its lease a former process's registration is
// waited for: etcd lets a lease go a little late.
const holderGrace = 2 * time.Second

// conflict is a registration under our id that another session has.
type conflict struct {
	lease registry.LeaseID
	until time.Duration // by then it is gone, unless somebody renews it
}

// alive tells whether whoever holds the id must be a living process, not one that
// died a moment ago: its lease has outlasted what it had left when first seen.
func (c *conflict) alive(now time.Duration, held *registry.HeldError) bool {
	if held.KV.Lease == 0 || held.Left == 0 {
		return false
	}
	if c.lease != held.KV.Lease {
		*c = conflict{lease: held.KV.Lease, until: now + held.Left + holderGrace}
	}
	return now > c.until
}

// register puts this member into the group, or with again back into it. Registration
// step 1: register. An id that another process lives under ends a member that has not
// been registered yet, rather than both waiting for ever.
func (m *Membership) register(s *registry.Session, again bool) {
	var other conflict
	secret := vigil.NewSecret() // one for all attempts: any of them may have taken effect
	for pause := minJoinPause; m.ctx.Err() == nil && s.Alive(); pause = min(2*pause, maxJoinPause) {
		value, err := m.record(secret)
		if err != nil {
			m.post(func() { m.leave(err) })
			return
		}
		ctx, cancel := context.WithTimeout(m.ctx, callLimit)
		reg, err := registry.Register(ctx, m.store, s, m.group.ID(m.cfg.ID), value)
		cancel()
		if err == nil {
			m.log.Info("registered", "lease", registry.LeaseText(s.Lease()), "rev", reg.Revision)
			m.wasRegistered.Store(true)
			if f := m.cfg.Listener.Registered; f != nil {
				f(m.cfg.ID, s.Lease())
			}
			m.post(func() {
				if m.session == s {
					m.registered = true
					m.watchMe(s, reg, secret)
					// Registration step 5: force a first rebalance.
					m.step(rebalance.Registered{Registration: reg})
				}
			})
			return
		}
		if m.ctx.Err() != nil {
			return
		}
		if errors.Is(err, registry.ErrPermission) {
			m.post(func() { m.leave(err) }) // trying again is in vain
			return
		}
		var held *registry.HeldError
		if errors.As(err, &held) {
			err = fmt.Errorf("another process has this consumer id: %w", err)
			if again && held.KV.Lease != 0 {
				m.post(func() { m.displaced(s, err) })
				return
			}
			if !m.wasRegistered.Load() && other.alive(m.store.Now(), held) {
				m.post(func() { m.leave(err) })
				return
			}
		}
		m.log.Warn("cannot register, trying again", "error", err)
		m.doubt(s, err)
		sleep(m.ctx, pause)
	}
}

// displaced gives up what is owned where another process has taken the id of this
// member: the group counts the other, and would wait for our owner keys without end. From
// here on this member is one that starts while the id is in use.
func (m *Membership) displaced(s *registry.Session, err error) {
	m.log.Warn("registration was deleted, and its id is in use; what is owned is given up", "error", err)
	if m.session != s || m.leaving {
		return // all is given up as it is
	}
	m.wasRegistered.Store(false)
	s.Abandon(err)
}

// record is the value of the registration.
func (m *Membership) record(secret vigil.Secret) ([]byte, error) {
	sub := m.cfg.Subscription
	rec := registry.ConsumerRecord{Version: 1, Subscription: sub.Topics, Pattern: registry.PatternStatic,
		Timestamp: strconv.FormatInt(time.Now().UnixMilli(), 10), Strategy: m.cfg.Strategies}
	if m.vigil != nil {
		rec.Notice = secret.Notice()
	}
	if sub.Pattern != "" {
		rec.Subscription, rec.Pattern = map[string]int32{sub.Filter: sub.Streams}, sub.Pattern
		if sub.IncludeInternal {
			rec.ExcludeInternalTopics = new(bool)
		}
	}
	return registry.Encode(rec)
}

// sessionLost stops everything that hung on the session, before anything else is
// done about it.
func (m *Membership) sessionLost() {
	former := m.session
	m.watchNoMore(former)
	m.session, m.registered = nil, false
	clear(m.waits)
	m.step(rebalance.SessionLost{})
	if m.leaving {
		m.tasks.Go(func() {
			err := m.drop(former)
			m.post(func() { m.finish(err) })
		})
		return
	}
	m.join(former)
}

// unregister deletes the registration, which tells the group, and then ends the
// session. By now no owner key is left.
func (m *Membership) unregister(s *registry.Session) error {
	m.watchNoMore(s)
	ctx, cancel := context.WithTimeout(m.ctx, callLimit)
	defer cancel()
	key := m.group.ID(m.cfg.ID)
	res, err := m.store.Txn(ctx, registry.Txn{
		If:   []registry.Cond{registry.HeldBy(key, s.Lease())},
		Then: []registry.Op{registry.Delete(key)},
		Else: []registry.Op{registry.Get(key)},
	})
	switch {
	case err != nil:
		err = fmt.Errorf("unregister: %w", err)
	case !res.Succeeded && len(res.Items[0].KVs) > 0:
		err = fmt.Errorf("the registration is not ours any more and stays: %w", &registry.HeldError{KV: res.Items[0].KVs[0]})
	}
	return errors.Join(err, s.Close(ctx))
}
