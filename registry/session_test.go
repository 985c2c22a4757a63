package registry_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

const ttl = registry.DefaultTTL

func openSession(t *testing.T, st registry.Store) *registry.Session {
	t.Helper()
	s, err := registry.OpenSession(t.Context(), st, registry.SessionOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func closeSession(t *testing.T, s *registry.Session) {
	t.Helper()
	if err := s.Close(context.Background()); err != nil {
		t.Errorf("close: %v", err)
	}
}

// ended waits for the session's end and returns how long that took.
func ended(t *testing.T, s *registry.Session, want error) time.Duration {
	t.Helper()
	began := time.Now()
	select {
	case <-s.Done():
	case <-time.After(time.Minute):
		t.Fatal("the session does not end")
	}
	if !errors.Is(s.Err(), want) {
		t.Errorf("ended with %v, want %v", s.Err(), want)
	}
	if s.Alive() || s.Left() != 0 {
		t.Error("done, and yet alive")
	}
	return time.Since(began)
}

func TestSessionIsKeptAliveForAnHour(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		var renewals atomic.Int64
		st.SetHooks(memory.Hooks{KeepAlive: func(context.Context, registry.LeaseID) error { renewals.Add(1); return nil }})
		s := openSession(t, st)
		r, err := registry.Register(t.Context(), st, s, "/k", []byte("v"))
		if err != nil {
			t.Fatal(err)
		}
		for range 3600 {
			time.Sleep(time.Second)
			if !s.Alive() {
				t.Fatalf("dead: %v", s.Err())
			}
		}
		if kv, _, err := registry.GetKey(t.Context(), st, "/k"); err != nil || kv == nil || kv.ModRevision != r.Revision {
			t.Errorf("the key is %+v, error %v", kv, err)
		}
		if n := renewals.Load(); n < 1790 || n > 1810 {
			t.Errorf("%d renewals in an hour, want three in each %s", n, ttl)
		}
		closeSession(t, s)
	})
}

func TestSessionDiesBeforeTheStoreLetsGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		s := openSession(t, st)
		if _, err := registry.Register(t.Context(), st, s, "/k", nil); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10*time.Second + ttl/3/2) // a renewal was answered two seconds ago at most
		stalled := time.Now()
		st.SetHooks(memory.Hooks{KeepAlive: func(ctx context.Context, _ registry.LeaseID) error {
			<-ctx.Done()
			return ctx.Err()
		}})
		events := st.Watch(t.Context(), "/k", st.Revision()+1)
		ended(t, s, registry.ErrSessionExpired)
		dead := time.Since(stalled)
		if dead < ttl/2 || dead > ttl {
			t.Errorf("dead %s after the stall", dead)
		}
		if st.Leases() != 1 {
			t.Error("the store let go first")
		}
		if e := (<-events).Events; len(e) != 1 || !e[0].Deleted {
			t.Errorf("got %+v", e)
		}
		if margin := time.Since(stalled) - dead; margin < ttl/10 {
			t.Errorf("the store let go only %s after the session's death", margin)
		}
		closeSession(t, s)
	})
}

// A store that does not even let go of a stream that it was told to end.
func TestSessionDiesInTimeWhateverTheStreamDoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		release := make(chan struct{})
		st.SetHooks(memory.Hooks{KeepAlive: func(context.Context, registry.LeaseID) error { <-release; return nil }})
		s := openSession(t, st)
		if took := ended(t, s, registry.ErrSessionExpired); took >= ttl {
			t.Errorf("ended after %s", took)
		}
		close(release)
		closeSession(t, s)
	})
}

func TestSessionLearnsThatItsLeaseIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		s := openSession(t, st)
		time.Sleep(time.Minute + 100*time.Millisecond)
		st.Expire(s.Lease())
		if took := ended(t, s, registry.ErrLeaseGone); took > ttl/3 {
			t.Errorf("learned of it after %s", took)
		}
		closeSession(t, s)
	})
}

func TestSessionReopensStreamsThatBreak(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		var n, opened atomic.Int64
		st.SetHooks(memory.Hooks{
			KeepAlive: func(context.Context, registry.LeaseID) error {
				if n.Add(1)%3 != 0 {
					return errors.New("broken")
				}
				return nil
			},
			Before: func(_ context.Context, op string) error {
				if op == "keepalive" && opened.Add(1)%2 == 0 {
					return errors.New("no connection")
				}
				return nil
			},
		})
		s := openSession(t, st)
		time.Sleep(10 * time.Minute)
		if !s.Alive() {
			t.Fatalf("dead: %v", s.Err())
		}
		if tried := opened.Load(); tried < 600 || tried > 2000 {
			t.Errorf("%d streams opened", tried)
		}
		closeSession(t, s)
	})
}

func TestSessionCloseDeletesKeysAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // which also fails if a goroutine is left
		st := memory.New()
		for _, age := range []time.Duration{0, time.Second, ttl/3 + time.Millisecond, time.Minute} {
			s := openSession(t, st)
			if _, err := registry.Register(t.Context(), st, s, "/k", nil); err != nil {
				t.Fatal(err)
			}
			time.Sleep(age)
			closeSession(t, s)
			if kv, _, err := registry.GetKey(t.Context(), st, "/k"); err != nil || kv != nil || st.Leases() != 0 {
				t.Errorf("after Close at %s: key %+v, %d leases, error %v", age, kv, st.Leases(), err)
			}
			ended(t, s, registry.ErrSessionClosed)
			closeSession(t, s) // again is fine
		}
		// Where the store cannot be reached Close says so, and the keys live on until the lease ends.
		s := openSession(t, st)
		st.SetHooks(memory.Hooks{Before: func(context.Context, string) error { return errors.New("unreachable") }})
		if err := s.Close(t.Context()); err == nil {
			t.Error("Close hides that the lease was not revoked")
		}
		st.SetHooks(memory.Hooks{})
		closeSession(t, s)
	})
}

func TestSessionContextAndOptions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		s := openSession(t, st)
		before, cancel := s.Context(t.Context())
		defer cancel()
		other, stop := s.Context(t.Context())
		stop()
		if !errors.Is(context.Cause(other), context.Canceled) || before.Err() != nil {
			t.Errorf("cancelled: %v; other: %v", context.Cause(other), before.Err())
		}
		closeSession(t, s)
		<-before.Done()
		after, cancel := s.Context(t.Context())
		defer cancel()
		for _, ctx := range []context.Context{before, after} {
			if ctx.Err() == nil || !errors.Is(context.Cause(ctx), registry.ErrSessionClosed) {
				t.Errorf("context of a closed session: %v, cause %v", ctx.Err(), context.Cause(ctx))
			}
		}
		for _, ttl := range []time.Duration{time.Second, registry.MinTTL - 1, registry.MaxTTL + 1, -time.Second} {
			if _, err := registry.OpenSession(t.Context(), st, registry.SessionOptions{TTL: ttl}); err == nil {
				t.Errorf("time to live %s was accepted", ttl)
			}
		}
		st.SetHooks(memory.Hooks{Before: func(context.Context, string) error { return errors.New("unreachable") }})
		if _, err := registry.OpenSession(t.Context(), st, registry.SessionOptions{}); err == nil || st.Leases() != 0 {
			t.Errorf("opened without a store: %v", err)
		}
	})
}

func TestSessionAbandoned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		s := openSession(t, st)
		s.Abandon(registry.ErrLeaseGone)
		ended(t, s, registry.ErrLeaseGone)
		closeSession(t, s)
	})
}

// stoppable is a store whose clock can jump, as it does for a process that was
// stopped, and whose answers can be kept in the socket.
type stoppable struct {
	*memory.Store
	jumped atomic.Int64
	gate   chan struct{} // answers pass when it is closed
	came   chan struct{}
}

func (s *stoppable) Now() time.Duration { return s.Store.Now() + time.Duration(s.jumped.Load()) }

func (s *stoppable) KeepAlive(ctx context.Context, id registry.LeaseID) (registry.KeepAliver, error) {
	ka, err := s.Store.KeepAlive(ctx, id)
	return gated{ka, s}, err
}

type gated struct {
	registry.KeepAliver
	s *stoppable
}

func (g gated) Recv() (time.Duration, error) {
	ttl, err := g.KeepAliver.Recv()
	g.s.came <- struct{}{}
	<-g.s.gate
	return ttl, err
}

// case 03, the part of the session: an answer that waited in the socket while the
// process was stopped for three times the time to live.
func TestSessionStaysDeadAfterAStop(t *testing.T) {
	for _, looks := range []bool{true, false} {
		for _, sinceSent := range []time.Duration{0, time.Second} {
			t.Run(fmt.Sprintf("looks=%t,after=%s", looks, sinceSent), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					st := &stoppable{Store: memory.New(), gate: make(chan struct{}), came: make(chan struct{}, 10)}
					s := openSession(t, st)
					<-st.came // the store has renewed the lease; its answer is in the socket
					time.Sleep(sinceSent)
					if !s.Alive() {
						t.Fatal("dead before the stop")
					}
					st.jumped.Store(int64(3 * ttl))
					if looks && s.Alive() {
						t.Error("alive right after the stop")
					}
					close(st.gate)
					synctest.Wait()
					if s.Alive() {
						t.Error("the answer made it alive again")
					}
					ended(t, s, registry.ErrSessionExpired)
					time.Sleep(time.Minute)
					if s.Alive() {
						t.Error("alive a minute later")
					}
					closeSession(t, s)
				})
			})
		}
	}
}

// Many look at one session while it is lost: none sees it alive after another saw it dead.
func TestSessionDeathIsSeenByAll(t *testing.T) {
	st := &stoppable{Store: memory.New(), gate: make(chan struct{}), came: make(chan struct{}, 1000)}
	close(st.gate)
	s, err := registry.OpenSession(t.Context(), st, registry.SessionOptions{TTL: registry.MinTTL})
	if err != nil {
		t.Fatal(err)
	}
	defer closeSession(t, s)
	var dead atomic.Bool
	done := make(chan bool)
	const lookers = 4
	for range lookers {
		go func() {
			back := false
			for range 20_000 {
				was := dead.Load()
				if alive := s.Alive(); !alive {
					dead.Store(true)
				} else if was {
					back = true
				}
			}
			done <- back
		}()
	}
	st.jumped.Store(int64(registry.MinTTL))
	for range lookers {
		if <-done {
			t.Error("a session was alive after it had been seen dead")
		}
	}
}

// Whoever sees that a session is over can be told why, also when another one has seen
// it a moment ago and the reason is not there yet.
func TestSessionErrOfTheDead(t *testing.T) {
	for range 300 {
		st := &stoppable{Store: memory.New(), gate: make(chan struct{}), came: make(chan struct{}, 1000)}
		close(st.gate) // a renewal is due if this is slow
		s := openSession(t, st)
		st.jumped.Store(int64(2 * ttl))
		var group sync.WaitGroup
		for range 8 {
			group.Go(func() {
				if !s.Alive() && s.Err() == nil {
					t.Error("over, and nobody knows why")
				}
			})
		}
		group.Wait()
		closeSession(t, s)
	}
}
