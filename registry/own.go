package registry

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// An Ownership is a key that this process owns exclusively. Token, the revision at
// which the key was created, grows from owner to owner and is the fencing token: who
// is given something in the name of the key can refuse what comes with an older one.
type Ownership struct {
	Key   string
	Token int64

	session  *Session
	ctx      context.Context
	end      context.CancelCauseFunc
	stop     context.CancelFunc // releases what Session.Context holds
	watching sync.WaitGroup
}

// Why an ownership is over, or cannot begin.
var (
	// ErrReleased ends an ownership that was given up by Release.
	ErrReleased = errors.New("ownership was released")
	// ErrAlreadyOwned refuses to own a key twice in one session.
	ErrAlreadyOwned = errors.New("this session owns the key already, or waits for it")
)

const (
	// A claim that was sent is waited for, so that none takes effect behind the back
	// of a caller who has given up; no longer than this.
	ownCallLimit = 3 * time.Second
	// ownPatience is how long failures in a row are taken for passing ones, and
	// giveBackLimit how long it is then tried to undo what they may have done.
	ownPatience   = 2 * time.Second
	giveBackLimit = 2 * time.Second
	minOwnPause   = 20 * time.Millisecond
	maxOwnPause   = 500 * time.Millisecond
)

// Own waits until nobody has the key, creates it under the session's lease with a
// value that must not be empty, and returns the ownership. It waits by watching that
// key; when it becomes free all who wait try, and one succeeds. The waiting ends with
// ctx, and at once when the session ends: the error is then the session's.
//
// Ownership ends at the latest with the session. A holder cannot know it at the very
// moment, however often it looks; so what is written in the name of the key must be
// conditional on Ownership.Fence, or carry the Token to where it is checked.
func Own(ctx context.Context, s *Session, key string, value []byte) (*Ownership, error) {
	if key == "" || len(value) == 0 {
		return nil, fmt.Errorf("own %q: a key and a value are needed", key)
	}
	o := &Ownership{Key: key, session: s}
	if err := s.beginOwn(o); err != nil {
		return nil, fmt.Errorf("own %s: %w", key, err)
	}
	var err error
	if o.Token, err = s.claimOne(ctx, key, value); err != nil {
		s.endOwn(o)
		s.work.Done()
		return nil, fmt.Errorf("own %s: %w", key, err)
	}
	session, stop := s.Context(context.Background())
	o.ctx, o.end = context.WithCancelCause(session)
	o.stop = stop
	o.watching.Add(1)
	go func() {
		defer s.work.Done()
		defer o.watching.Done()
		o.watch()
	}()
	return o, nil
}

// beginOwn enters an ownership that is to be, and makes Close wait for it.
func (s *Session) beginOwn(o *Ownership) error {
	if !s.Alive() {
		return s.Err()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return s.Err()
	case s.owns[o.Key] != nil:
		return ErrAlreadyOwned
	}
	s.owns[o.Key] = o
	s.work.Add(1)
	return nil
}

func (s *Session) endOwn(o *Ownership) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.owns[o.Key] == o {
		delete(s.owns, o.Key)
	}
}

// claimOne waits for a key and creates it. It returns the token.
func (s *Session) claimOne(ctx context.Context, key string, value []byte) (int64, error) {
	waiting, cancel := s.Context(ctx)
	defer cancel()
	began, pause := s.store.Now(), minOwnPause
	for waiting.Err() == nil {
		kv, mine, err := s.tryOwn(key, value)
		switch {
		case errors.Is(err, ErrLeaseNotFound):
			s.Abandon(ErrLeaseGone)
			return 0, ErrLeaseGone
		case err != nil:
			if waiting.Err() == nil && s.store.Now()-began < ownPatience {
				sleep(waiting, pause)
				pause = min(2*pause, maxOwnPause)
			}
			if waiting.Err() != nil || s.store.Now()-began >= ownPatience {
				s.giveBack(key, 0) // the reply may be what was lost
				if cause := context.Cause(waiting); cause != nil {
					return 0, cause
				}
				return 0, err
			}
			continue
		case mine && (waiting.Err() != nil || !s.Alive()):
			s.giveBack(key, kv.CreateRevision)
		case mine:
			return kv.CreateRevision, nil
		default:
			waitFree(waiting, s.store, kv)
		}
		began, pause = s.store.Now(), minOwnPause
	}
	return 0, context.Cause(waiting)
}

func (s *Session) tryOwn(key string, value []byte) (kv KV, mine bool, err error) {
	session, cancel := s.Context(context.Background())
	defer cancel()
	ctx, cancelLimit := context.WithTimeout(session, ownCallLimit)
	defer cancelLimit()
	res, err := s.store.Txn(ctx, createOwned(key, value, s.lease))
	if err != nil {
		return KV{}, false, err
	}
	kv, mine = createdOrFound(key, s.lease, &res)
	return kv, mine, nil
}

// giveBack takes away a claim that came too late to be of use, or may have.
func (s *Session) giveBack(key string, token int64) {
	if !s.Alive() {
		return // it goes with the lease
	}
	session, cancel := s.Context(context.Background())
	defer cancel()
	ctx, cancelLimit := context.WithTimeout(session, giveBackLimit)
	defer cancelLimit()
	for pause := minOwnPause; ; pause = min(2*pause, maxOwnPause) {
		_, err := Release(ctx, s.store, s.lease, []OwnerRelease{{Key: key, Token: token}}, nil)
		if err == nil {
			return
		}
		if !sleep(ctx, pause) {
			s.log.Warn("a claim that came late may stay until the session ends", "key", key, "error", err)
			return
		}
	}
}

// watch ends the ownership when the key is taken away.
func (o *Ownership) watch() {
	err := watchHeld(o.ctx, o.session.store, o.Key, o.Token, o.session.lease)
	if !errors.Is(err, ErrTakenAway) {
		return
	}
	o.end(err)
	o.stop()
	o.session.endOwn(o)
	o.session.Check() // a lease that was revoked takes its keys along
}

// Context ends with the ownership; its cause is Err. What is done in the name of the
// key is best done under it.
func (o *Ownership) Context() context.Context { return o.ctx }

// Done is closed when the ownership is over; Err tells why.
func (o *Ownership) Done() <-chan struct{} { return o.ctx.Done() }

// Err is nil as long as the ownership lasts; then ErrTakenAway, ErrReleased, or what
// ended the session.
func (o *Ownership) Err() error { return context.Cause(o.ctx) }

// Alive tells whether the key is owned and the session before its deadline. Once
// false it stays false.
func (o *Ownership) Alive() bool { return o.session.Alive() && o.ctx.Err() == nil }

// Fence is the condition that the key is still owned by this very ownership, for
// transactions on the same store: one that has it writes nothing once the key was
// lost, though its sender may not know yet.
func (o *Ownership) Fence() Cond { return CreatedAt(o.Key, o.Token) }

// Release ends the ownership and deletes the key, if that is still the one that was
// created at Token. ctx bounds that; if it fails, the key lives until the session
// ends, and Release may be called again.
func (o *Ownership) Release(ctx context.Context) error {
	o.end(ErrReleased)
	o.stop()
	o.watching.Wait()
	if _, err := Release(ctx, o.session.store, o.session.lease, []OwnerRelease{{Key: o.Key, Token: o.Token}}, nil); err != nil {
		return fmt.Errorf("release %s: %w", o.Key, err)
	}
	o.session.endOwn(o)
	return nil
}
