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
	TTL time.Duration
	// Listener, which may be nil, is told of the session's life: of its opening
	// before OpenSession returns, of the rest by the session's goroutine. It must
	// not block, for that goroutine renews the lease, nor call Close.
	Listener func(SessionEvent)
	Logger   *slog.Logger // nil discards
}

// SessionEventKind tells what happened to a session.
type SessionEventKind int

const (
	// SessionOpened: a lease was granted, for TTL.
	SessionOpened SessionEventKind = iota
	// SessionStalled: half of the time to live has passed without a renewal. The
	// session ends in Left, unless one is answered before.
	SessionStalled
	// SessionResumed: the renewal that was overdue was answered.
	SessionResumed
	// SessionLost: the session is over, for the reason Err. The last event.
	SessionLost
	// SessionClosed: Close was called on a living session. The last event.
	SessionClosed
)

// SessionEvent is told to SessionOptions.Listener. Renewals are too many to be
// told: see Session.Renewed and Session.Left.
type SessionEvent struct {
	Kind  SessionEventKind
	Lease LeaseID
	TTL   time.Duration // as granted
	Left  time.Duration // until the session's own deadline
	Err   error         // with SessionLost
}

func (e SessionEvent) String() string {
	lease := LeaseText(e.Lease)
	switch e.Kind {
	case SessionOpened:
		return fmt.Sprintf("session opened (lease %s, time to live %s)", lease, e.TTL)
	case SessionStalled:
		return fmt.Sprintf("session is not renewed (lease %s, %.1f s left)", lease, e.Left.Seconds())
	case SessionResumed:
		return fmt.Sprintf("session is renewed again (lease %s, %.1f s left)", lease, e.Left.Seconds())
	case SessionLost:
		return fmt.Sprintf("session lost (lease %s): %v", lease, e.Err)
	}
	return fmt.Sprintf("session closed (lease %s)", lease)
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
	lease    LeaseID
	log      *slog.Logger
	listener func(SessionEvent)
	ttl      atomic.Int64 // as the store granted it last
	renewed  atomic.Int64 // when the renewal that was answered last was sent
	deadline atomic.Int64 // on the store's clock; 0 once dead
	ctx      context.Context
	end      context.CancelCauseFunc
	checks   chan struct{} // holds a token if a renewal is wanted at once
	stopped  chan struct{} // closed when the goroutine of the session has ended

	mu     sync.Mutex
	owns   map[string]*Ownership // by key: those that last or are waited for
	closed bool
	work   sync.WaitGroup // goroutines of its Ownerships
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
	s := &Session{store: st, lease: lease.ID, listener: o.Listener, checks: make(chan struct{}, 1),
		stopped: make(chan struct{}), owns: map[string]*Ownership{}}
	s.log = o.Logger.With("lease", LeaseText(lease.ID))
	s.ctx, s.end = context.WithCancelCause(context.Background())
	m := newRenewal(asked, lease.TTL)
	s.note(m)
	s.deadline.Store(int64(m.deadline))
	s.log.Debug("session opened", "ttl", lease.TTL)
	s.tell(SessionOpened, nil)
	go s.keepAlive(m)
	return s, nil
}

// LeaseText spells a lease as etcdctl does.
func LeaseText(id LeaseID) string { return fmt.Sprintf("%x", int64(id)) }

// Lease is what the session's keys are bound to.
func (s *Session) Lease() LeaseID { return s.lease }

// TTL is the time to live that the store granted, which may be more than was asked
// for.
func (s *Session) TTL() time.Duration { return time.Duration(s.ttl.Load()) }

// Renewed is how long ago the renewal that was answered last was sent.
func (s *Session) Renewed() time.Duration { return s.store.Now() - time.Duration(s.renewed.Load()) }

// Check makes the session ask the store at once, on a new stream, how it stands:
// for whoever has reason to doubt it, such as a View in trouble. It does not wait;
// where the lease is gone, Done is closed with the answer.
func (s *Session) Check() { notify(s.checks) }

// note keeps what the machine knows where all can read it.
func (s *Session) note(m *renewal) {
	s.ttl.Store(int64(m.ttl))
	s.renewed.Store(int64(m.renewed))
}

// tell logs an event and tells the listener.
func (s *Session) tell(kind SessionEventKind, reason error) {
	left := s.Left()
	switch kind {
	case SessionStalled:
		s.log.Warn("session is not renewed", "left", left)
	case SessionResumed:
		s.log.Info("session is renewed again", "left", left)
	case SessionLost:
		s.log.Warn("session lost", "reason", reason)
	}
	if s.listener != nil {
		s.listener(SessionEvent{Kind: kind, Lease: s.lease, TTL: s.TTL(), Left: left, Err: reason})
	}
}

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

// Err is nil as long as the session is alive.
func (s *Session) Err() error {
	if s.deadline.Load() == 0 {
		<-s.ctx.Done() // it is over, and the reason comes in a moment
	}
	return context.Cause(s.ctx)
}

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
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	<-s.stopped
	s.work.Wait()
	err := s.store.Revoke(ctx, s.lease)
	if err != nil && !errors.Is(err, ErrLeaseNotFound) {
		return fmt.Errorf("revoke lease %s: %w", LeaseText(s.lease), err)
	}
	return nil
}

// keepAlive drives the renewal machine until the session is over, and tells of that
// before anything that could keep it waiting.
func (s *Session) keepAlive(m *renewal) {
	defer close(s.stopped)
	d := streamDriver{store: s.store, lease: s.lease, answers: make(chan streamAnswer)}
	defer d.close()
	s.end(s.renew(m, &d)) // the first reason holds
	s.deadline.Store(0)
	if reason := s.Err(); errors.Is(reason, ErrSessionClosed) {
		s.tell(SessionClosed, nil)
	} else {
		s.tell(SessionLost, reason)
	}
}

// renew owns the stream and the timer. It returns why the session is over.
func (s *Session) renew(m *renewal, d *streamDriver) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		var in renewalInput
		select {
		case <-s.ctx.Done():
			return s.Err()
		case <-timer.C:
		case <-s.checks:
			in = renewalInput{check: true}
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
			return act.lost
		}
		s.extend(m.deadline)
		s.note(m)
		if act.reopen {
			d.open(s.ctx)
		}
		if act.send {
			d.send()
		}
		timer.Reset(act.wake)
		switch {
		case act.resumed:
			s.tell(SessionResumed, nil)
		case act.stalled:
			s.tell(SessionStalled, nil)
		}
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
