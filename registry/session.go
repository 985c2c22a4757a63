package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"
)

// Why a session ended.
var (
	// ErrSessionExpired: no renewal was answered before the session's own deadline.
	ErrSessionExpired = errors.New("session passed its deadline")
	// ErrLeaseGone: the store said that the lease does not exist any more.
	ErrLeaseGone = errors.New("session lease is gone")
	// ErrSessionClosed: Close was called.
	ErrSessionClosed = errors.New("session closed")
)

// SessionOptions are the settings of a session.
type SessionOptions struct {
	// TTL is how long the store keeps the session's keys after the last renewal.
	// Zero means 6 s, ZooKeeper's default.
	TTL    time.Duration
	Logger *slog.Logger // nil discards
}

// Limits of SessionOptions.TTL, those of zookeeper.session.timeout.ms.
const (
	DefaultTTL = 6 * time.Second
	MinTTL     = 2 * time.Second
	MaxTTL     = 60 * time.Second
)

// A Session is one lease, kept alive until Close or loss. It has a deadline of
// its own, earlier than the store's: once past it the session is dead for good,
// though the store may still carry its keys. All that a process does in the name
// of its keys must be preceded by a look at Alive.
type Session struct {
	store    Store
	lease    Lease
	log      *slog.Logger
	deadline atomic.Int64 // on the store's clock; 0 once dead
	ctx      context.Context
	end      context.CancelCauseFunc
	stopped  chan struct{} // closed when the goroutine of the session has ended
}

// OpenSession grants a lease and keeps it alive in a goroutine that Close, or
// the loss of the session, ends. ctx bounds only the opening.
func OpenSession(ctx context.Context, st Store, o SessionOptions) (*Session, error) {
	if o.TTL == 0 {
		o.TTL = DefaultTTL
	}
	if o.TTL < MinTTL || o.TTL > MaxTTL {
		return nil, fmt.Errorf("session timeout %s: want %s to %s", o.TTL, MinTTL, MaxTTL)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	asked := st.Now()
	lease, err := st.Grant(ctx, o.TTL)
	if err != nil {
		return nil, fmt.Errorf("grant a lease of %s: %w", o.TTL, err)
	}
	s := &Session{store: st, lease: lease, stopped: make(chan struct{})}
	s.log = o.Logger.With("lease", LeaseText(lease.ID))
	s.ctx, s.end = context.WithCancelCause(context.Background())
	m := newRenewal(asked, lease.TTL)
	s.deadline.Store(int64(m.deadline))
	s.log.Debug("session opened", "ttl", lease.TTL)
	go s.keepAlive(m)
	return s, nil
}

// LeaseText spells a lease as etcdctl does.
func LeaseText(id LeaseID) string { return fmt.Sprintf("%x", int64(id)) }

// Lease is what the session's keys are bound to.
func (s *Session) Lease() LeaseID { return s.lease.ID }

// TTL is the time to live that the store granted.
func (s *Session) TTL() time.Duration { return s.lease.TTL }

// Alive tells whether the session is before its deadline. Once false it stays false.
func (s *Session) Alive() bool { return s.Left() > 0 }

// Left is the time until the deadline, 0 once the session is dead.
func (s *Session) Left() time.Duration {
	for {
		d := s.deadline.Load()
		if d == 0 {
			return 0
		}
		if left := time.Duration(d) - s.store.Now(); left > 0 {
			return left
		}
		// Fixing death here, not in the session's goroutine, is what makes it final:
		// after a stop of the whole process an answer that waited in a socket could
		// otherwise bring the session back between two looks of one caller.
		if s.deadline.CompareAndSwap(d, 0) {
			s.end(ErrSessionExpired)
			return 0
		}
	}
}

// extend moves the deadline unless the session is dead.
func (s *Session) extend(to time.Duration) {
	for {
		d := s.deadline.Load()
		if d == 0 || int64(to) <= d || s.deadline.CompareAndSwap(d, int64(to)) {
			return
		}
	}
}

// Done is closed when the session is over; Err tells why.
func (s *Session) Done() <-chan struct{} { return s.ctx.Done() }

// Err is nil until the session is over.
func (s *Session) Err() error { return context.Cause(s.ctx) }

// Context ends with the session, and with parent. Its cause is Err.
func (s *Session) Context(parent context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(parent)
	if err := s.Err(); err != nil {
		cancel(err) // now, not soon
	}
	stop := context.AfterFunc(s.ctx, func() { cancel(s.Err()) })
	return ctx, func() { stop(); cancel(context.Canceled) }
}

// Abandon declares the session dead at once, for whoever learns by other ways
// than renewal that its lease is gone. Close is still to be called.
func (s *Session) Abandon(reason error) {
	s.deadline.Store(0)
	s.end(reason)
}

// Close ends the session and revokes its lease, so that its keys are gone at
// once, also after a loss. ctx bounds the revocation; if that fails, the keys
// live until the lease runs out.
func (s *Session) Close(ctx context.Context) error {
	s.deadline.Store(0)
	s.end(ErrSessionClosed)
	<-s.stopped
	err := s.store.Revoke(ctx, s.lease.ID)
	if err != nil && !errors.Is(err, ErrLeaseNotFound) {
		return fmt.Errorf("revoke lease %s: %w", LeaseText(s.lease.ID), err)
	}
	return nil
}

// keepAlive drives the renewal machine: it owns the stream and the timer.
func (s *Session) keepAlive(m *renewal) {
	defer close(s.stopped)
	defer s.deadline.Store(0)
	d := streamDriver{store: s.store, lease: s.lease.ID, answers: make(chan streamAnswer)}
	defer d.close()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		var in renewalInput
		select {
		case <-s.ctx.Done():
			if errors.Is(s.Err(), ErrSessionExpired) {
				s.log.Warn("session lost", "reason", s.Err())
			}
			return
		case <-timer.C:
		case a := <-d.answers:
			if a.stream != d.current {
				continue
			}
			in = renewalInput{answered: a.err == nil, ttl: a.ttl, broken: a.err != nil}
			if a.err != nil {
				s.log.Debug("keep-alive stream broke", "error", a.err)
			}
		}
		act := m.step(s.store.Now(), in)
		if act.lost != nil {
			s.deadline.Store(0)
			s.end(act.lost)
			s.log.Warn("session lost", "reason", act.lost)
			return
		}
		s.extend(m.deadline)
		if act.reopen {
			d.open(s.ctx)
		}
		if act.send {
			d.send()
		}
		timer.Reset(act.wake)
	}
}

// streamDriver holds the one keep-alive stream in use. Opening, sending and
// receiving block, so each stream has a goroutine, which ends with the stream's
// context. Nobody waits for it before the session is over: a store that is slow to
// let go of one stream must not keep the session from its timer.
type streamDriver struct {
	store   Store
	lease   LeaseID
	answers chan streamAnswer
	current *keepAliveStream
	streams sync.WaitGroup
}

type keepAliveStream struct {
	cancel context.CancelFunc
	sends  chan struct{}
}

type streamAnswer struct {
	stream *keepAliveStream
	ttl    time.Duration
	err    error
}

func (d *streamDriver) close() {
	if d.current != nil {
		d.current.cancel()
	}
	d.streams.Wait()
}

func (d *streamDriver) open(parent context.Context) {
	if d.current != nil {
		d.current.cancel()
	}
	ctx, cancel := context.WithCancel(parent)
	st := &keepAliveStream{cancel: cancel, sends: make(chan struct{}, maxUnanswered)}
	d.current = st
	d.streams.Go(func() {
		report := func(ttl time.Duration, err error) bool {
			select {
			case d.answers <- streamAnswer{st, ttl, err}:
				return err == nil
			case <-ctx.Done():
				return false
			}
		}
		ka, err := d.store.KeepAlive(ctx, d.lease)
		if err != nil {
			report(0, err)
			return
		}
		for {
			select {
			case <-ctx.Done():
				return
			case <-st.sends:
			}
			if err := ka.Send(); err != nil {
				report(0, err)
				return
			}
			ttl, err := ka.Recv()
			if !report(ttl, err) {
				return
			}
		}
	})
}

func (d *streamDriver) send() {
	// The machine never has more than maxUnanswered requests under way.
	d.current.sends <- struct{}{}
}
