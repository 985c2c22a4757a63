package consumer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// Joining is tried again after a pause that doubles between these bounds.
const (
	minJoinPause = 100 * time.Millisecond
	maxJoinPause = 2 * time.Second
)

// join opens a session and registers, in a goroutine that keeps trying, once the
// former session, if there was one, is revoked: its keys would be in the way.
func (d *driver) join(former *registry.Session) {
	d.work.Go(func() {
		for pause := minJoinPause; ; pause = min(2*pause, maxJoinPause) {
			s, err := d.open(former)
			if err == nil {
				if d.post(func() { d.session = s }) {
					d.register(s)
				} else {
					if err := d.drop(s); err != nil {
						d.log.Warn("lease is left to run out", "error", err)
					}
				}
				return
			}
			if d.ctx.Err() != nil {
				return
			}
			d.log.Warn("cannot join, trying again", "error", err)
			if !sleep(d.ctx, pause) {
				return
			}
		}
	})
}

// drop ends a session that nobody wants any more.
func (d *driver) drop(s *registry.Session) error {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	return s.Close(ctx)
}

func (d *driver) open(former *registry.Session) (*registry.Session, error) {
	ctx, cancel := context.WithTimeout(d.ctx, callLimit)
	defer cancel()
	if former != nil {
		if err := former.Close(ctx); err != nil {
			return nil, err
		}
	}
	return registry.OpenSession(ctx, d.store, registry.SessionOptions{TTL: d.c.cfg.SessionTimeout, Logger: d.log})
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

// register puts this consumer into the group: registration first, and the
// rebalance that follows is the first one. An id that another process lives under
// ends a consumer that has not been registered yet, rather than both waiting for ever.
func (d *driver) register(s *registry.Session) {
	var other conflict
	for pause := minJoinPause; d.ctx.Err() == nil && s.Alive(); pause = min(2*pause, maxJoinPause) {
		value, err := registry.Encode(registry.ConsumerRecord{Version: 1, Subscription: d.c.cfg.Topics,
			Pattern: registry.PatternStatic, Timestamp: strconv.FormatInt(time.Now().UnixMilli(), 10),
			Strategy: []string{d.c.cfg.Strategy}})
		if err != nil {
			d.post(func() { d.leave(err) })
			return
		}
		ctx, cancel := context.WithTimeout(d.ctx, callLimit)
		reg, err := registry.Register(ctx, d.store, s, d.c.group.ID(d.c.cfg.ID), value)
		cancel()
		if err == nil {
			d.log.Info("registered", "lease", registry.LeaseText(s.Lease()), "rev", reg.Revision)
			d.wasRegistered.Store(true)
			if f := d.c.cfg.Listener.Registered; f != nil {
				f(d.c.cfg.ID, s.Lease())
			}
			d.post(func() {
				if d.session == s {
					d.registered = true
					d.step(rebalance.Registered{Registration: reg})
				}
			})
			return
		}
		if d.ctx.Err() != nil {
			return
		}
		if errors.Is(err, registry.ErrPermission) {
			d.post(func() { d.leave(err) }) // trying again is in vain
			return
		}
		var held *registry.HeldError
		if errors.As(err, &held) {
			err = fmt.Errorf("another process has this consumer id: %w", err)
			if !d.wasRegistered.Load() && other.alive(d.store.Now(), held) {
				d.post(func() { d.leave(err) })
				return
			}
		}
		d.log.Warn("cannot register, trying again", "error", err)
		d.doubt(s, err)
		sleep(d.ctx, pause)
	}
}

// sessionLost stops everything that hung on the session, before anything else is
// done about it.
func (d *driver) sessionLost() {
	former := d.session
	d.session, d.registered = nil, false
	clear(d.waits)
	d.step(rebalance.SessionLost{})
	if d.leaving {
		d.work.Go(func() {
			err := d.drop(former)
			d.post(func() { d.finish(err) })
		})
		return
	}
	d.join(former)
}

// unregister deletes the registration, which tells the group, and then ends the
// session. By now no owner key is left.
func (d *driver) unregister(s *registry.Session) error {
	ctx, cancel := context.WithTimeout(d.ctx, callLimit)
	defer cancel()
	key := d.c.group.ID(d.c.cfg.ID)
	res, err := d.store.Txn(ctx, registry.Txn{
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

// brokerAddresses lists where the live brokers listen.
func (d *driver) brokerAddresses(kvs []registry.KV) []string {
	var list []string
	var bad []error
	for _, kv := range kvs {
		_, rec, err := d.c.cfg.Root.ParseBroker(kv)
		if err != nil {
			bad = append(bad, err)
			continue
		}
		list = append(list, net.JoinHostPort(rec.Host, strconv.Itoa(int(rec.Port))))
	}
	d.complain(bad)
	return list
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
