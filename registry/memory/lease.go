package memory

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/muster-io/muster/registry"
)

// minTTL is the shortest time to live that an etcd of one member grants.
const minTTL = time.Second

// Grant implements registry.Store. Like etcd it gives whole seconds.
func (s *Store) Grant(ctx context.Context, ttl time.Duration) (granted registry.Lease, err error) {
	ttl = max((ttl + time.Second - 1).Truncate(time.Second), minTTL)
	err = s.around(ctx, "grant", func() error {
		s.lastLease++
		id := s.lastLease
		l := &lease{ttl: ttl, ends: s.clock() + ttl, keys: make(map[string]struct{})}
		if !s.manual {
			l.expiry = time.AfterFunc(ttl, func() { s.expire(id) })
		}
		s.leases[id] = l
		granted = registry.Lease{ID: id, TTL: ttl}
		return nil
	})
	return granted, err
}

// expire ends a lease unless a renewal came first.
func (s *Store) expire(id registry.LeaseID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.leases[id]; l != nil && s.clock() >= l.ends {
		s.drop(id)
	}
}

// Expire ends a lease at once, as if it had run out.
func (s *Store) Expire(id registry.LeaseID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.leases[id] != nil {
		s.drop(id)
	}
}

// ExpireDue ends all leases whose time has come, in the order of their ends, and
// returns when the next one is due; 0 if none lives.
func (s *Store) ExpireDue() (next time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		var first registry.LeaseID
		for id, l := range s.leases {
			if o := s.leases[first]; o == nil || l.ends < o.ends || l.ends == o.ends && id < first {
				first = id
			}
		}
		switch l := s.leases[first]; {
		case l == nil:
			return 0
		case l.ends > s.clock():
			return l.ends
		}
		s.drop(first)
	}
}

func (s *Store) drop(id registry.LeaseID) {
	l := s.leases[id]
	if l.expiry != nil {
		l.expiry.Stop()
	}
	var events []registry.Event
	for _, key := range slices.Sorted(maps.Keys(l.keys)) {
		events = append(events, s.remove(key, s.revision+1))
	}
	delete(s.leases, id)
	if len(events) > 0 {
		s.revision++
		s.publish(events)
	}
}

// Leases counts the leases that live.
func (s *Store) Leases() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.leases)
}

// Revoke implements registry.Store.
func (s *Store) Revoke(ctx context.Context, id registry.LeaseID) error {
	return s.around(ctx, "revoke", func() error {
		if s.leases[id] == nil {
			return registry.ErrLeaseNotFound
		}
		s.drop(id)
		return nil
	})
}

// Remaining implements registry.Store.
func (s *Store) Remaining(ctx context.Context, id registry.LeaseID) (left time.Duration, err error) {
	err = s.around(ctx, "remaining", func() error {
		l := s.leases[id]
		if l == nil {
			return registry.ErrLeaseNotFound
		}
		left = l.ends - s.clock()
		return nil
	})
	return left, err
}

// KeepAlive implements registry.Store.
func (s *Store) KeepAlive(ctx context.Context, id registry.LeaseID) (registry.KeepAliver, error) {
	if err := s.around(ctx, "keepalive", func() error { return nil }); err != nil {
		return nil, err
	}
	return &keepAliver{s: s, ctx: ctx, id: id, answers: make(chan time.Duration, 16)}, nil
}

type keepAliver struct {
	s       *Store
	ctx     context.Context
	id      registry.LeaseID
	answers chan time.Duration
}

func (k *keepAliver) Send() error {
	k.s.mu.Lock()
	hook := k.s.hooks.KeepAlive
	k.s.mu.Unlock()
	if hook != nil {
		if err := hook(k.ctx, k.id); err != nil {
			return err
		}
	}
	k.s.mu.Lock()
	var ttl time.Duration
	if l := k.s.leases[k.id]; l != nil {
		ttl = l.ttl
		l.ends = k.s.clock() + ttl
		if l.expiry != nil {
			l.expiry.Reset(ttl)
		}
	}
	k.s.mu.Unlock()
	select {
	case k.answers <- ttl:
		return nil
	case <-k.ctx.Done():
		return k.ctx.Err()
	}
}

func (k *keepAliver) Recv() (time.Duration, error) {
	select {
	case ttl := <-k.answers:
		return ttl, nil
	case <-k.ctx.Done():
		return 0, k.ctx.Err()
	}
}
