package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"
)

// AnnounceOptions say what is announced, and how.
type AnnounceOptions struct {
	// Key is where the announcement stands. It is required.
	Key string
	// Value is what it says. ValueFunc, if set, makes it anew for each registration,
	// just before that is sent; lease is what the key will be bound to. An error of
	// ValueFunc is one of the attempt.
	Value     []byte
	ValueFunc func(lease LeaseID) ([]byte, error)
	// TTL is that of SessionOptions.
	TTL time.Duration
	// Former, if not 0, is the lease of an earlier run that nobody else can be
	// using. If the key is still bound to it, Announce revokes it first and does not
	// wait until it runs out.
	Former LeaseID
	// Listener, which may be nil, is told of the registration: of the first one
	// before Announce returns, of the rest by the announcement's goroutine. It must
	// not call Close.
	Listener func(AnnounceEvent)
	// SessionListener is that of SessionOptions, for each session in turn.
	SessionListener func(SessionEvent)
	Logger          *slog.Logger // nil discards
}

// AnnounceEventKind tells what happened to an announcement.
type AnnounceEventKind int

const (
	// AnnounceRegistered: the key stands, under Lease since revision
	// Registration.Revision.
	AnnounceRegistered AnnounceEventKind = iota
	// AnnounceLost: the registration of that lease is over, for the reason Err. It
	// is tried to register again until the next Registered, or Close.
	AnnounceLost
	// AnnounceHeld: somebody else has taken the key meanwhile. It is waited for.
	AnnounceHeld
	// AnnounceFailed: an attempt failed with Err; the next is in Pause.
	AnnounceFailed
	// AnnounceClosed: Close took the key out of the registry. The last event.
	AnnounceClosed
)

// AnnounceEvent is told to AnnounceOptions.Listener.
type AnnounceEvent struct {
	Kind         AnnounceEventKind
	Registration Registration // with Registered: the new one; with Lost: that which is over
	Lease        LeaseID      // likewise
	TTL          time.Duration
	Held         *HeldError // with Held: by whom, and for how long at most unless renewed
	Pause        time.Duration
	Err          error
}

func (e AnnounceEvent) String() string {
	switch e.Kind {
	case AnnounceRegistered:
		return fmt.Sprintf("registered %s at revision %d (lease %s)", e.Registration.Key, e.Registration.Revision, LeaseText(e.Lease))
	case AnnounceLost:
		return fmt.Sprintf("registration %s of revision %d is lost (lease %s): %v", e.Registration.Key, e.Registration.Revision, LeaseText(e.Lease), e.Err)
	case AnnounceHeld:
		return "cannot register: " + e.Held.Error()
	case AnnounceFailed:
		return fmt.Sprintf("cannot register, trying again in %s: %v", e.Pause, e.Err)
	}
	return "registration closed"
}

// An Announcement is a registration that is made again whenever it was lost: after
// an expiry, a lease revoked by hand, or a key deleted by hand, it revokes the old
// lease, takes a new one, and registers under the same key, for as long as it takes.
type Announcement struct {
	store   Store
	o       AnnounceOptions
	ctx     context.Context // ends with Close
	cancel  context.CancelFunc
	stopped chan struct{}
	last    *Session // that Close is to close; of the goroutine until stopped is closed
	closed  sync.Once

	mu           sync.Mutex
	session      *Session     // of the newest registration; it may be dead
	registration Registration // no Key while there is none
}

const (
	announceCallLimit = 5 * time.Second
	minAnnouncePause  = 50 * time.Millisecond
	maxAnnouncePause  = 2 * time.Second
	// heldRecheck is how often a key that another holds is looked at though the
	// watch on it says nothing.
	heldRecheck = 30 * time.Second
)

// Announce opens a session and registers a key under it; from then on a goroutine
// keeps it registered until Close. ctx bounds only the first attempt, whose error is
// returned and not retried: a *HeldError means that somebody else lives under the
// key, and names the holder and the time left to its lease. "Ours from before" is
// told by the lease alone: see Register, and AnnounceOptions.Former.
func Announce(ctx context.Context, st Store, o AnnounceOptions) (*Announcement, error) {
	if o.Key == "" {
		return nil, errors.New("announce: no key")
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	a := &Announcement{store: st, o: o, stopped: make(chan struct{})}
	if err := a.revokeFormer(ctx); err != nil {
		return nil, fmt.Errorf("announce %s: %w", o.Key, err)
	}
	s, reg, err := a.attempt(ctx, nil)
	if err != nil {
		if s != nil {
			err = errors.Join(err, closeWithin(s))
		}
		return nil, fmt.Errorf("announce: %w", err)
	}
	a.ctx, a.cancel = context.WithCancel(context.Background())
	a.registered(s, reg)
	go a.run(s, reg)
	return a, nil
}

// closeWithin closes a session that nobody wants any more.
func closeWithin(s *Session) error {
	ctx, cancel := context.WithTimeout(context.Background(), announceCallLimit)
	defer cancel()
	return s.Close(ctx)
}

// Registration is the present one; false while there is none.
func (a *Announcement) Registration() (Registration, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.registration, a.registration.Key != "" && a.session.Alive()
}

// Session is that of the newest registration, under which more keys may be created;
// they are lost with it. It may be dead: then another follows, with the next
// AnnounceRegistered.
func (a *Announcement) Session() *Session {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.session
}

// Alive tells whether the key is registered and its session before the deadline.
func (a *Announcement) Alive() bool {
	_, ok := a.Registration()
	return ok
}

// Close ends the announcement and takes the key out of the registry at once. ctx
// bounds that; if it fails, the key lives until its lease runs out, and Close may be
// called again.
func (a *Announcement) Close(ctx context.Context) error {
	a.cancel()
	<-a.stopped
	a.set(nil, Registration{})
	if a.last != nil {
		if err := a.last.Close(ctx); err != nil {
			return fmt.Errorf("take back %s: %w", a.o.Key, err)
		}
	}
	a.closed.Do(func() { a.tell(AnnounceEvent{Kind: AnnounceClosed}) })
	return nil
}

func (a *Announcement) tell(e AnnounceEvent) {
	switch e.Kind {
	case AnnounceRegistered:
		a.o.Logger.Info("registered", "key", e.Registration.Key, "rev", e.Registration.Revision, "lease", LeaseText(e.Lease), "ttl", e.TTL)
	case AnnounceHeld:
		a.o.Logger.Warn("cannot register, waiting for the key", "error", e.Held)
	case AnnounceFailed:
		a.o.Logger.Warn("cannot register, trying again", "pause", e.Pause, "error", e.Err)
	}
	if a.o.Listener != nil {
		a.o.Listener(e)
	}
}

// set keeps what Registration and Session return; without a session the present one
// stays.
func (a *Announcement) set(s *Session, reg Registration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.registration = reg
	if s != nil {
		a.session = s
	}
}

func (a *Announcement) registered(s *Session, reg Registration) {
	a.set(s, reg)
	a.tell(AnnounceEvent{Kind: AnnounceRegistered, Registration: reg, Lease: s.Lease(), TTL: s.TTL()})
}

func (a *Announcement) revokeFormer(ctx context.Context) error {
	if a.o.Former == 0 {
		return nil
	}
	kv, _, err := GetKey(ctx, a.store, a.o.Key)
	if err != nil {
		return fmt.Errorf("look for the former registration: %w", err)
	}
	if kv == nil || kv.Lease != a.o.Former {
		return nil
	}
	if err := a.store.Revoke(ctx, a.o.Former); err != nil && !errors.Is(err, ErrLeaseNotFound) {
		return fmt.Errorf("revoke the former lease %s: %w", LeaseText(a.o.Former), err)
	}
	return nil
}

// attempt goes as far towards a registration as it comes. s is the session left by
// the attempt before, if any; the one that is left now is returned with an error too.
func (a *Announcement) attempt(ctx context.Context, s *Session) (*Session, Registration, error) {
	if s != nil && !s.Alive() {
		// Its key would be in the way of the next one's, and an attempt whose reply
		// was lost may have left one too: nothing goes on before it is revoked.
		if err := s.Close(ctx); err != nil {
			return s, Registration{}, err
		}
		s = nil
	}
	if s == nil {
		var err error
		s, err = OpenSession(ctx, a.store, SessionOptions{TTL: a.o.TTL, Listener: a.o.SessionListener, Logger: a.o.Logger})
		if err != nil {
			return nil, Registration{}, err
		}
	}
	value := a.o.Value
	if a.o.ValueFunc != nil {
		var err error
		if value, err = a.o.ValueFunc(s.Lease()); err != nil {
			return s, Registration{}, fmt.Errorf("value of %s: %w", a.o.Key, err)
		}
	}
	reg, err := Register(ctx, a.store, s, a.o.Key, value)
	if errors.Is(err, ErrLeaseNotFound) {
		s.Abandon(ErrLeaseGone)
	}
	return s, reg, err
}

func (a *Announcement) run(s *Session, reg Registration) {
	defer close(a.stopped)
	for {
		err := a.hold(s, reg)
		if a.ctx.Err() != nil {
			a.last = s
			return
		}
		a.set(nil, Registration{})
		a.tell(AnnounceEvent{Kind: AnnounceLost, Registration: reg, Lease: s.Lease(), TTL: s.TTL(), Err: err})
		var ok bool
		if s, reg, ok = a.again(s); !ok {
			a.last = s
			return
		}
		a.registered(s, reg)
	}
}

// hold waits until the registration is over, and returns why.
func (a *Announcement) hold(s *Session, reg Registration) error {
	ctx, cancel := s.Context(a.ctx)
	defer cancel()
	err := watchHeld(ctx, a.store, reg.Key, reg.Revision, s.Lease())
	if a.ctx.Err() == nil && errors.Is(err, ErrTakenAway) {
		// The store deletes the keys of a lease that was revoked, and that is known
		// sooner than by the next renewal.
		if _, gone := a.store.Remaining(ctx, s.Lease()); errors.Is(gone, ErrLeaseNotFound) {
			err = ErrLeaseGone
		}
		s.Abandon(err)
		return s.Err() // which is older if the session was over by then
	}
	return err
}

// again registers anew, as long as it takes; false when Close came before. It returns
// the session that is left in either case.
func (a *Announcement) again(s *Session) (*Session, Registration, bool) {
	for pause := minAnnouncePause; ; pause = min(2*pause, maxAnnouncePause) {
		ctx, cancel := context.WithTimeout(a.ctx, announceCallLimit)
		var reg Registration
		var err error
		s, reg, err = a.attempt(ctx, s)
		cancel()
		held, isHeld := errors.AsType[*HeldError](err)
		switch {
		case a.ctx.Err() != nil:
			return s, reg, false
		case err == nil:
			return s, reg, true
		case isHeld:
			a.tell(AnnounceEvent{Kind: AnnounceHeld, Held: held})
			a.waitHeld(s, held)
		default:
			a.tell(AnnounceEvent{Kind: AnnounceFailed, Err: err, Pause: pause})
			sleep(a.ctx, pause)
		}
	}
}

func (a *Announcement) waitHeld(s *Session, held *HeldError) {
	ctx, cancel := s.Context(a.ctx)
	defer cancel()
	limited, cancel := context.WithTimeout(ctx, heldRecheck)
	defer cancel()
	waitFree(limited, a.store, held.KV)
}
