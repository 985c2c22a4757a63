package registry_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

func own(t *testing.T, s *registry.Session, key, value string) *registry.Ownership {
	t.Helper()
	o, err := registry.Own(t.Context(), s, key, []byte(value))
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func release(t *testing.T, o *registry.Ownership) {
	t.Helper()
	if err := o.Release(context.Background()); err != nil {
		t.Errorf("release: %v", err)
	}
}

func TestOwnPassesFromHandToHand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		const owners = 5
		var mu sync.Mutex
		var tokens []int64
		inside := 0
		var all sync.WaitGroup
		for i := range owners {
			all.Go(func() {
				s := openSession(t, st)
				for range 10 {
					o := own(t, s, "/jobs/1", fmt.Sprint(i))
					mu.Lock()
					if inside++; inside > 1 {
						t.Error("two own the key")
					}
					if n := len(tokens); n > 0 && tokens[n-1] >= o.Token {
						t.Errorf("token %d after %d", o.Token, tokens[n-1])
					}
					tokens = append(tokens, o.Token)
					mu.Unlock()
					if kv := getKey(t, st, "/jobs/1"); kv == nil || kv.CreateRevision != o.Token || kv.Lease != s.Lease() || string(kv.Value) != fmt.Sprint(i) {
						t.Errorf("%+v, token %d", kv, o.Token)
					}
					time.Sleep(time.Duration(i) * time.Second)
					if !o.Alive() || o.Err() != nil {
						t.Errorf("lost: %v", o.Err())
					}
					mu.Lock()
					inside--
					mu.Unlock()
					release(t, o)
					if o.Alive() || !errors.Is(o.Err(), registry.ErrReleased) || !errors.Is(context.Cause(o.Context()), registry.ErrReleased) {
						t.Errorf("after release: %v", o.Err())
					}
				}
				closeSession(t, s)
			})
		}
		all.Wait()
		if len(tokens) != 10*owners || getKey(t, st, "/jobs/1") != nil {
			t.Errorf("%d tokens", len(tokens))
		}
	})
}

// Waiting costs nothing, and ends when the key is free.
func TestOwnWaitsByWatching(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		a, b := openSession(t, st), openSession(t, st)
		first := own(t, a, "/k", "a")
		calls := 0
		st.SetHooks(memory.Hooks{Before: func(_ context.Context, op string) error {
			if op == "txn" || op == "range" {
				calls++
			}
			return nil
		}})
		began := time.Now()
		var second *registry.Ownership
		var waiter sync.WaitGroup
		waiter.Go(func() { second = own(t, b, "/k", "b") })
		time.Sleep(time.Hour)
		if synctest.Wait(); calls != 1 {
			t.Errorf("%d calls in an hour", calls)
		}
		st.SetHooks(memory.Hooks{})
		release(t, first)
		waiter.Wait()
		if took := time.Since(began); took != time.Hour {
			t.Errorf("owned after %s", took)
		}
		// The next holder dies without a word.
		waiter.Go(func() {
			third := own(t, a, "/k", "a again")
			if third.Token <= second.Token {
				t.Errorf("token %d after %d", third.Token, second.Token)
			}
		})
		time.Sleep(time.Second)
		st.Expire(b.Lease())
		waiter.Wait()
		<-second.Done()
		closeSession(t, b)
		closeSession(t, a) // with an ownership that nobody released
	})
}

// deletes the key between the look at it and the watch.
type hasty struct {
	*memory.Store
	once sync.Once
	do   func()
}

func (h *hasty) WatchKey(ctx context.Context, key string, from int64) <-chan registry.WatchResponse {
	h.once.Do(h.do)
	return h.Store.WatchKey(ctx, key, from)
}

func TestOwnMissesNoDeletionBeforeItsWatch(t *testing.T) {
	for name, compact := range map[string]bool{"history is there": false, "history is compacted": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				st := &hasty{Store: memory.New()}
				put(t, st, "/k", "somebody")
				st.do = func() {
					rev := txn(t, st, registry.Delete("/k"))
					if compact {
						st.Compact(rev + 1)
						put(t, st, "/else", "")
						st.Compact(rev + 1)
					}
				}
				s := openSession(t, st)
				began := time.Now()
				own(t, s, "/k", "me")
				if took := time.Since(began); took > 100*time.Millisecond {
					t.Errorf("took %s", took)
				}
				closeSession(t, s)
			})
		})
	}
}

// Field case 63: the waiter's session ends while it waits; then the key becomes free.
func TestOwnStopsWaitingWhenTheSessionEnds(t *testing.T) {
	ends := map[string]func(st *memory.Store, s *registry.Session){
		"expired": func(st *memory.Store, _ *registry.Session) {
			st.SetHooks(memory.Hooks{KeepAlive: func(ctx context.Context, _ registry.LeaseID) error { <-ctx.Done(); return ctx.Err() }})
		},
		"abandoned": func(_ *memory.Store, s *registry.Session) { s.Abandon(registry.ErrLeaseGone) },
		"closed":    func(_ *memory.Store, s *registry.Session) { s.Close(context.Background()) },
	}
	for name, end := range ends {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				st := memory.New()
				put(t, st, "/k", "a holder without a lease")
				b := openSession(t, st)
				var err error
				var waited time.Time
				var waiter sync.WaitGroup
				waiter.Go(func() {
					_, err = registry.Own(t.Context(), b, "/k", []byte("b"))
					waited = time.Now()
				})
				time.Sleep(10 * time.Second)
				end(st, b)
				<-b.Done()
				over := time.Now()
				waiter.Wait()
				if err == nil || !errors.Is(err, b.Err()) || !waited.Equal(over) {
					t.Errorf("error %v (%v), %s after the end", err, b.Err(), waited.Sub(over))
				}
				rev := txn(t, st, registry.Delete("/k"))
				time.Sleep(time.Minute)
				if kv := getKey(t, st, "/k"); kv != nil || st.Revision() != rev {
					t.Errorf("claimed all the same: %+v", kv)
				}
				if _, err := registry.Own(t.Context(), b, "/k", []byte("b")); !errors.Is(err, b.Err()) {
					t.Errorf("error %v", err)
				}
				closeSession(t, b)
			})
		})
	}
}

func TestOwnershipEndsWhenTheKeyIsTakenAway(t *testing.T) {
	takes := map[string]func(t *testing.T, st *memory.Store, o *registry.Ownership, s *registry.Session){
		"deleted": func(t *testing.T, st *memory.Store, o *registry.Ownership, _ *registry.Session) {
			txn(t, st, registry.Delete(o.Key))
		},
		"replaced": func(t *testing.T, st *memory.Store, o *registry.Ownership, _ *registry.Session) {
			st.HoldWatches(true)
			txn(t, st, registry.Delete(o.Key))
			st.Compact(put(t, st, o.Key, "thief"))
			st.HoldWatches(false)
		},
		"created anew under our own lease": func(t *testing.T, st *memory.Store, o *registry.Ownership, s *registry.Session) {
			st.HoldWatches(true)
			txn(t, st, registry.Delete(o.Key))
			st.Compact(txn(t, st, registry.Put(o.Key, []byte("me"), s.Lease())))
			st.HoldWatches(false)
		},
		"made permanent": func(t *testing.T, st *memory.Store, o *registry.Ownership, _ *registry.Session) {
			put(t, st, o.Key, "no lease")
		},
		"revoked": func(t *testing.T, st *memory.Store, _ *registry.Ownership, s *registry.Session) { st.Expire(s.Lease()) },
	}
	for name, take := range takes {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				st := memory.New()
				s := openSession(t, st)
				o := own(t, s, "/k", "me")
				time.Sleep(time.Minute + 500*time.Millisecond)
				take(t, st, o, s)
				began := time.Now()
				<-o.Done()
				if took := time.Since(began); took > 100*time.Millisecond || !errors.Is(o.Err(), registry.ErrTakenAway) || o.Alive() {
					t.Errorf("after %s: %v, alive %t", took, o.Err(), o.Alive())
				}
				synctest.Wait()
				if revoked := name == "revoked"; s.Alive() == revoked {
					t.Errorf("session alive: %t", s.Alive())
				}
				before := st.Revision()
				release(t, o)
				if name != "made permanent" && st.Revision() != before {
					t.Error("the release touched what is not ours any more")
				}
				if name == "deleted" { // and can be owned again, also with the old one about
					again := own(t, s, "/k", "me again")
					release(t, o)
					if _, err := registry.Own(t.Context(), s, "/k", []byte("me too")); !errors.Is(err, registry.ErrAlreadyOwned) {
						t.Errorf("twice in one session: %v", err)
					}
					if !again.Alive() || getKey(t, st, "/k") == nil {
						t.Error("released what was owned later")
					}
				}
				closeSession(t, s)
			})
		})
	}
}

// The fence: what a former owner still sends is refused.
func TestOwnershipFencesWrites(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		a, b := openSession(t, st), openSession(t, st)
		first := own(t, a, "/k", "a")
		write := func(o *registry.Ownership, value string) bool {
			res, err := st.Txn(t.Context(), registry.Txn{If: []registry.Cond{o.Fence()}, Then: []registry.Op{registry.Put("/data", []byte(value), 0)}})
			return err == nil && res.Succeeded
		}
		if !write(first, "1") {
			t.Error("the owner cannot write")
		}
		st.HoldWatches(true) // the first owner hears nothing
		st.Expire(a.Lease())
		second := own(t, b, "/k", "b")
		if write(first, "2") || !write(second, "3") {
			t.Error("the fence does not hold")
		}
		want(t, "data", string(getKey(t, st, "/data").Value), "3")
		release(t, first) // F-10: by its token
		if kv := getKey(t, st, "/k"); kv == nil || kv.CreateRevision != second.Token {
			t.Errorf("the successor's key was deleted: %+v", kv)
		}
		st.HoldWatches(false)
		closeSession(t, a)
		closeSession(t, b)
	})
}

func TestOwnGivesUpWithItsCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		put(t, st, "/held", "x")
		s := openSession(t, st)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := registry.Own(ctx, s, "/held", []byte("me")); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v", err)
		}
		// A caller who gives up while the claim is under way: it is taken back.
		ctx, cancel = context.WithCancel(t.Context())
		st.SetHooks(memory.Hooks{After: func(_ context.Context, op string) error {
			if op == "txn" {
				cancel()
			}
			return nil
		}})
		if _, err := registry.Own(ctx, s, "/k", []byte("me")); !errors.Is(err, context.Canceled) {
			t.Errorf("error %v", err)
		}
		st.SetHooks(memory.Hooks{})
		if kv := getKey(t, st, "/k"); kv != nil {
			t.Errorf("left behind: %+v", kv)
		}
		// Likewise where the reply of the claim was lost.
		ctx, cancel = context.WithCancel(t.Context())
		st.SetHooks(memory.Hooks{After: func(_ context.Context, op string) error {
			if op == "txn" && ctx.Err() == nil {
				cancel()
				return errors.New("connection reset")
			}
			return nil
		}})
		if _, err := registry.Own(ctx, s, "/k", []byte("me")); !errors.Is(err, context.Canceled) {
			t.Errorf("error %v", err)
		}
		if kv := getKey(t, st, "/k"); kv != nil {
			t.Errorf("left behind: %+v", kv)
		}
		// A lost reply is made good.
		lost := 0
		st.SetHooks(memory.Hooks{After: func(_ context.Context, op string) error {
			if lost++; lost < 3 && op == "txn" {
				return errors.New("connection reset")
			}
			return nil
		}})
		o := own(t, s, "/k", "me")
		if kv := getKey(t, st, "/k"); kv == nil || kv.CreateRevision != o.Token {
			t.Errorf("%+v, token %d", kv, o.Token)
		}
		if _, err := registry.Own(t.Context(), s, "/k", []byte("me too")); !errors.Is(err, registry.ErrAlreadyOwned) {
			t.Errorf("twice in one session: %v", err)
		}
		release(t, o)
		// What fails for good is said in a few seconds.
		denied := errors.New("permission denied")
		st.SetHooks(memory.Hooks{Before: func(_ context.Context, op string) error {
			if op == "txn" {
				return denied
			}
			return nil
		}})
		began := time.Now()
		if _, err := registry.Own(t.Context(), s, "/k", []byte("me")); !errors.Is(err, denied) || time.Since(began) > 5*time.Second {
			t.Errorf("error %v after %s", err, time.Since(began))
		}
		st.SetHooks(memory.Hooks{})
		for _, bad := range [][2]string{{"", "v"}, {"/k", ""}} {
			if _, err := registry.Own(t.Context(), s, bad[0], []byte(bad[1])); err == nil {
				t.Errorf("%q was accepted", bad)
			}
		}
		closeSession(t, s)
	})
}

// Owners that come and go under faults: never two at a time, as the fence sees it,
// and nothing is left that nobody knows of.
func TestOwnUnderRandomFaults(t *testing.T) {
	for seed := range uint64(40) {
		synctest.Test(t, func(t *testing.T) { ownFaults(t, seed) })
	}
}

func ownFaults(t *testing.T, seed uint64) {
	st := memory.New()
	var mu sync.Mutex
	r := rand.New(rand.NewPCG(seed, 4))
	draw := func(n int) int { mu.Lock(); defer mu.Unlock(); return r.IntN(n) }
	fault := func(ctx context.Context, op string) error {
		switch draw(10) {
		case 0:
			return errors.New("connection reset")
		case 1:
			return pauseFor(ctx, time.Duration(draw(1000))*time.Millisecond)
		}
		return nil
	}
	var sessions []*registry.Session
	for range 4 {
		sessions = append(sessions, openSession(t, st))
	}
	st.SetHooks(memory.Hooks{Before: fault, After: fault})
	var last int64 // token that wrote last
	var all sync.WaitGroup
	for i, s := range sessions {
		all.Go(func() {
			for range 15 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(draw(5000))*time.Millisecond)
				o, err := registry.Own(ctx, s, "/k", fmt.Append(nil, i))
				cancel()
				if err != nil {
					continue
				}
				pauseFor(t.Context(), time.Duration(draw(500))*time.Millisecond)
				res, err := st.Txn(t.Context(), registry.Txn{If: []registry.Cond{o.Fence()}, Then: []registry.Op{registry.Put("/data", fmt.Append(nil, o.Token), 0)}})
				mu.Lock()
				if err == nil && res.Succeeded {
					if o.Token < last {
						t.Errorf("seed %d: token %d wrote after %d", seed, o.Token, last)
					}
					last = o.Token
				}
				mu.Unlock()
				for o.Release(t.Context()) != nil {
					time.Sleep(10 * time.Millisecond)
				}
			}
		})
	}
	all.Wait()
	st.SetHooks(memory.Hooks{})
	if kv := getKey(t, st, "/k"); kv != nil {
		t.Errorf("seed %d: left behind %+v", seed, kv)
	}
	for _, s := range sessions {
		closeSession(t, s)
	}
}

// A key that was taken away can be owned again, without a release of what is over.
func TestOwnAgainAfterALoss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		s := openSession(t, st)
		o := own(t, s, "/k", "me")
		txn(t, st, registry.Delete("/k"))
		<-o.Done()
		synctest.Wait()
		again := own(t, s, "/k", "me")
		if again.Token <= o.Token || !again.Alive() {
			t.Errorf("token %d after %d, alive %t", again.Token, o.Token, again.Alive())
		}
		release(t, again)
		closeSession(t, s)
	})
}

// An ownership is over at the session's deadline, also where the goroutine that renews
// the session is held up.
func TestOwnershipEndsAtTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		held := make(chan struct{})
		s, err := registry.OpenSession(t.Context(), st, registry.SessionOptions{TTL: ttl, Listener: func(e registry.SessionEvent) {
			if e.Kind == registry.SessionStalled {
				<-held
			}
		}})
		if err != nil {
			t.Fatal(err)
		}
		o := own(t, s, "/k", "me")
		st.SetHooks(memory.Hooks{KeepAlive: func(ctx context.Context, _ registry.LeaseID) error {
			<-ctx.Done()
			return ctx.Err()
		}})
		for s.Renewed() < ttl*19/20 { // the deadline is at nine tenths
			time.Sleep(10 * time.Millisecond)
		}
		if o.Alive() {
			t.Error("alive past the deadline")
		}
		close(held)
		closeSession(t, s)
	})
}

// Failures are in a row: one after a long wait is as passing as the first.
func TestOwnIsPatientAfterALongWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		first, second := openSession(t, st), openSession(t, st)
		o := own(t, first, "/k", "first")
		owned := make(chan *registry.Ownership, 1)
		go func() {
			o, err := registry.Own(t.Context(), second, "/k", []byte("second"))
			if err != nil {
				t.Errorf("own: %v", err)
			}
			owned <- o
		}()
		time.Sleep(time.Minute)
		fails := 1
		st.SetHooks(memory.Hooks{Before: func(_ context.Context, op string) error {
			if op == "txn" {
				if fails--; fails == 0 {
					return errors.New("not now")
				}
			}
			return nil
		}})
		txn := registry.Txn{Then: []registry.Op{registry.Delete("/k")}}
		fails = 2 // the deletion goes through, and the attempt that follows fails
		if _, err := st.Txn(t.Context(), txn); err != nil {
			t.Fatal(err)
		}
		if o := <-owned; o != nil {
			release(t, o)
		}
		<-o.Done()
		closeSession(t, first)
		closeSession(t, second)
	})
}
