package registry_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

// eventLog keeps events of one kind.
type eventLog[E fmt.Stringer] struct {
	mu     sync.Mutex
	events []E
}

func (l *eventLog[E]) note(e E) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = append(l.events, e)
}

// take returns the events so far and forgets them.
func (l *eventLog[E]) take() []E {
	l.mu.Lock()
	defer l.mu.Unlock()
	events := l.events
	l.events = nil
	return events
}

func announceKinds(events []registry.AnnounceEvent) string {
	names := map[registry.AnnounceEventKind]string{registry.AnnounceRegistered: "registered", registry.AnnounceLost: "lost",
		registry.AnnounceHeld: "held", registry.AnnounceFailed: "failed", registry.AnnounceClosed: "closed"}
	var kinds []string
	for _, e := range events {
		if kind := names[e.Kind]; len(kinds) == 0 || kinds[len(kinds)-1] != kind {
			kinds = append(kinds, kind)
		}
	}
	return strings.Join(kinds, " ")
}

func sessionKinds(events []registry.SessionEvent) string {
	names := map[registry.SessionEventKind]string{registry.SessionOpened: "opened", registry.SessionStalled: "stalled",
		registry.SessionResumed: "resumed", registry.SessionLost: "lost", registry.SessionClosed: "closed"}
	var kinds []string
	for _, e := range events {
		kinds = append(kinds, names[e.Kind])
	}
	return strings.Join(kinds, " ")
}

func getKey(t *testing.T, st registry.Store, key string) *registry.KV {
	t.Helper()
	kv, _, err := registry.GetKey(t.Context(), st, key)
	if err != nil {
		t.Fatal(err)
	}
	return kv
}

func TestAnnounceRegistersAgainAfterEveryLoss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		var events eventLog[registry.AnnounceEvent]
		var sessions eventLog[registry.SessionEvent]
		a, err := registry.Announce(t.Context(), st, registry.AnnounceOptions{Key: "/ids/a",
			ValueFunc: func(lease registry.LeaseID) ([]byte, error) { return []byte(registry.LeaseText(lease)), nil },
			Listener:  events.note, SessionListener: sessions.note})
		if err != nil {
			t.Fatal(err)
		}
		losses := map[string]func(){
			"lease expired in the store": func() { st.Expire(a.Session().Lease()) },
			"lease revoked by hand": func() {
				if err := st.Revoke(t.Context(), a.Session().Lease()); err != nil {
					t.Error(err)
				}
			},
			"key deleted by hand": func() { txn(t, st, registry.Delete("/ids/a")) },
			"key made permanent":  func() { put(t, st, "/ids/a", "by hand") },
		}
		wants := map[string]error{"lease expired in the store": registry.ErrLeaseGone, "lease revoked by hand": registry.ErrLeaseGone,
			"key deleted by hand": registry.ErrTakenAway, "key made permanent": registry.ErrTakenAway}
		for name, lose := range losses {
			time.Sleep(time.Minute)
			former, _ := a.Registration()
			session := a.Session()
			events.take()
			sessions.take()
			if !a.Alive() {
				t.Fatalf("before %s: not alive", name)
			}
			lose()
			began := time.Now()
			<-session.Done()
			if took := time.Since(began); took > 100*time.Millisecond {
				t.Errorf("%s: noticed after %s", name, took)
			}
			if name == "key made permanent" {
				time.Sleep(time.Second)
				got := events.take()
				if announceKinds(got) != "lost held" || a.Alive() || !strings.Contains(got[len(got)-1].String(), "by hand") {
					t.Errorf("%s: %v, alive %t", name, got, a.Alive())
				}
				txn(t, st, registry.Delete("/ids/a"))
				time.Sleep(100 * time.Millisecond)
				want(t, name, announceKinds(events.take()), "registered")
				sessions.take()
			} else {
				time.Sleep(100 * time.Millisecond)
				got := events.take()
				want(t, name, announceKinds(got), "lost registered")
				if got[0].Registration != former || !errors.Is(got[0].Err, wants[name]) {
					t.Errorf("%s: %+v", name, got[0])
				}
				want(t, name, sessionKinds(sessions.take()), "lost opened")
			}
			kv := getKey(t, st, "/ids/a")
			now, ok := a.Registration()
			if !ok || kv == nil || kv.Lease == session.Lease() || kv.Lease != a.Session().Lease() || now.Revision != kv.CreateRevision ||
				now.Revision <= former.Revision || string(kv.Value) != registry.LeaseText(kv.Lease) {
				t.Fatalf("%s: %+v, registration %+v %t", name, kv, now, ok)
			}
			if st.Leases() != 1 {
				t.Errorf("%s: %d leases", name, st.Leases())
			}
		}
		if err := a.Close(t.Context()); err != nil {
			t.Error(err)
		}
		want(t, "at the end", announceKinds(events.take()), "closed")
		want(t, "at the end", sessionKinds(sessions.take()), "closed")
		if kv := getKey(t, st, "/ids/a"); kv != nil || st.Leases() != 0 || a.Alive() {
			t.Errorf("after Close: %+v, %d leases, alive %t", kv, st.Leases(), a.Alive())
		}
		if err := a.Close(t.Context()); err != nil || len(events.take()) != 0 {
			t.Errorf("closed again: %v", err)
		}
	})
}

// A lease that ends between its grant and the registration costs an attempt, not the
// time until a renewal tells.
func TestAnnounceWhenTheNewLeaseIsGoneToo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		var events eventLog[registry.AnnounceEvent]
		a, err := registry.Announce(t.Context(), st, registry.AnnounceOptions{Key: "/ids/a", Value: []byte("a"), Listener: events.note})
		if err != nil {
			t.Fatal(err)
		}
		lease := a.Session().Lease()
		next := lease + 1 // as the twin counts
		st.SetHooks(memory.Hooks{Before: func(_ context.Context, op string) error {
			if op == "txn" && next <= lease+3 {
				st.Expire(next)
				next++
			}
			return nil
		}})
		st.Expire(lease)
		began := time.Now()
		for registered := 0; registered < 2; {
			time.Sleep(time.Millisecond)
			registered = 0
			events.mu.Lock()
			for _, e := range events.events {
				if e.Kind == registry.AnnounceRegistered {
					registered++
				}
			}
			events.mu.Unlock()
		}
		want(t, "events", announceKinds(events.take()), "registered lost failed registered")
		if took := time.Since(began); took > ttl/6 || a.Session().Lease() != lease+4 {
			t.Errorf("registered after %s under lease %d", took, a.Session().Lease())
		}
		if err := a.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// The three outcomes: free, held by another, ours from before.
func TestAnnounceTellsWhoHoldsTheKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		first, err := registry.Announce(t.Context(), st, registry.AnnounceOptions{Key: "/ids/a", Value: []byte("first")})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		o := registry.AnnounceOptions{Key: "/ids/a", Value: []byte("second")}
		_, err = registry.Announce(t.Context(), st, o)
		held, ok := errors.AsType[*registry.HeldError](err)
		if !ok || string(held.KV.Value) != "first" || held.Left <= 0 || held.Left > ttl || st.Leases() != 1 {
			t.Errorf("error %v, %d leases", err, st.Leases())
		}
		// A lease that is not the holder's is not revoked, nor is the holder.
		third := openSession(t, st)
		if _, err := registry.Register(t.Context(), st, third, "/third/key", nil); err != nil {
			t.Fatal(err)
		}
		o.Former = third.Lease()
		if _, err = registry.Announce(t.Context(), st, o); err == nil || !first.Alive() || getKey(t, st, "/ids/a") == nil || getKey(t, st, "/third/key") == nil {
			t.Errorf("error %v, first alive %t", err, first.Alive())
		}
		closeSession(t, third)
		// The lease of our own former run is, and nothing is waited for.
		former, err := st.Grant(t.Context(), registry.DefaultTTL)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := st.Txn(t.Context(), registry.Txn{Then: []registry.Op{registry.Put("/ids/b", []byte("former"), former.ID)}}); err != nil {
			t.Fatal(err)
		}
		o.Key, o.Former = "/ids/b", former.ID
		began := time.Now()
		second, err := registry.Announce(t.Context(), st, o)
		if err != nil || time.Since(began) > 0 {
			t.Fatalf("error %v after %s", err, time.Since(began))
		}
		want(t, "value", string(getKey(t, st, "/ids/b").Value), "second")
		if err := errors.Join(first.Close(t.Context()), second.Close(t.Context())); err != nil {
			t.Error(err)
		}
		for _, bad := range []registry.AnnounceOptions{{}, {Key: "/x", TTL: time.Second},
			{Key: "/x", ValueFunc: func(registry.LeaseID) ([]byte, error) { return nil, errors.New("no address") }}} {
			if _, err := registry.Announce(t.Context(), st, bad); err == nil || st.Leases() != 0 {
				t.Errorf("%+v: error %v, %d leases", bad, err, st.Leases())
			}
		}
	})
}

// The key was taken by another in the meantime: it is waited for, and the holder named.
func TestAnnounceWaitsForAKeyLostToAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		other := openSession(t, st)
		var events eventLog[registry.AnnounceEvent]
		a, err := registry.Announce(t.Context(), st, registry.AnnounceOptions{Key: "/ids/a", Value: []byte("a"), Listener: events.note})
		if err != nil {
			t.Fatal(err)
		}
		events.take()
		txn(t, st, registry.Delete("/ids/a"), registry.Put("/other", nil, 0))
		if _, err := registry.Register(t.Context(), st, other, "/ids/a", []byte("thief")); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5*time.Minute + 10*time.Second)
		got := events.take()
		want(t, "while held", announceKinds(got), "lost held")
		if n := len(got); n > 12 {
			t.Errorf("%d events in five minutes", n)
		}
		if h := got[1].Held; string(h.KV.Value) != "thief" || h.Left <= 0 || h.KV.Lease != other.Lease() {
			t.Errorf("held: %+v", h)
		}
		if a.Alive() || string(getKey(t, st, "/ids/a").Value) != "thief" {
			t.Error("the holder's key was touched")
		}
		closeSession(t, other)
		synctest.Wait()
		want(t, "afterwards", announceKinds(events.take()), "registered")
		if err := a.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// Whatever fails, in whatever order: there is never a second lease for long, never
// two registrations, and once the store is well the key stands under the session
// that the announcement shows, and after Close nothing is left.
func TestAnnounceUnderRandomFaults(t *testing.T) {
	for seed := range uint64(60) {
		synctest.Test(t, func(t *testing.T) { announceFaults(t, seed) })
	}
}

func announceFaults(t *testing.T, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 3))
	var mu sync.Mutex
	bad := 0
	fault := func(ctx context.Context, _ string) error {
		mu.Lock()
		n, slow := r.IntN(100), time.Duration(r.IntN(3000))*time.Millisecond
		hit := n < bad
		mu.Unlock()
		if !hit {
			return nil
		}
		if n%2 == 0 {
			return errors.New("connection reset")
		}
		return pauseFor(ctx, slow)
	}
	st := memory.New()
	var events eventLog[registry.AnnounceEvent]
	a, err := registry.Announce(t.Context(), st, registry.AnnounceOptions{Key: "/ids/a", Value: []byte("a"), Listener: events.note})
	if err != nil {
		t.Fatal(err)
	}
	st.SetHooks(memory.Hooks{Before: fault, After: fault, KeepAlive: func(ctx context.Context, _ registry.LeaseID) error { return fault(ctx, "") }})
	draw := func(n int) int { mu.Lock(); defer mu.Unlock(); return r.IntN(n) }
	setBad := func(n int) { mu.Lock(); defer mu.Unlock(); bad = n }
	for range 20 {
		setBad([]int{0, 30, 90}[draw(3)])
		switch draw(4) {
		case 0:
			st.Expire(a.Session().Lease())
		case 1:
			st.HoldWatches(true)
		case 2:
			st.HoldWatches(false)
		}
		time.Sleep(time.Duration(draw(20000)) * time.Millisecond)
		// One that lives, one that waits for its expiry since its grant's reply was lost.
		if n := st.Leases(); n > 8 {
			t.Fatalf("seed %d: %d leases", seed, n)
		}
	}
	setBad(0)
	st.HoldWatches(false)
	time.Sleep(time.Minute)
	kv := getKey(t, st, "/ids/a")
	reg, ok := a.Registration()
	if !ok || kv == nil || kv.Lease != a.Session().Lease() || kv.CreateRevision != reg.Revision || st.Leases() != 1 {
		t.Fatalf("seed %d: key %+v, registration %+v %t, %d leases", seed, kv, reg, ok, st.Leases())
	}
	got := events.take()
	balance := 0
	for _, e := range got {
		switch e.Kind {
		case registry.AnnounceRegistered:
			balance++
		case registry.AnnounceLost:
			balance--
		}
		if balance < 0 || balance > 1 {
			t.Fatalf("seed %d: events out of order: %v", seed, got)
		}
	}
	// Close also in the middle of an attempt.
	if draw(2) == 0 {
		st.Expire(a.Session().Lease())
		setBad(50)
		time.Sleep(time.Duration(draw(1000)) * time.Millisecond)
		setBad(0)
	}
	if err := a.Close(t.Context()); err != nil {
		t.Fatalf("seed %d: %v", seed, err)
	}
	time.Sleep(ttl + time.Second) // a lease whose grant's reply was lost
	if kv := getKey(t, st, "/ids/a"); kv != nil || st.Leases() != 0 {
		t.Fatalf("seed %d: after Close %+v, %d leases", seed, kv, st.Leases())
	}
}

func pauseFor(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Field case 03, the part of a registration: the process was stopped for three times
// its time to live. It comes back under the same key with another lease, unless
// somebody else has the key by then.
func TestAnnounceAfterAStop(t *testing.T) {
	for _, taken := range []bool{false, true} {
		t.Run(fmt.Sprintf("taken=%t", taken), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				st := &stoppable{Store: memory.New(), gate: make(chan struct{}), came: make(chan struct{}, 1000)}
				close(st.gate)
				var events eventLog[registry.AnnounceEvent]
				a, err := registry.Announce(t.Context(), st, registry.AnnounceOptions{Key: "/ids/a", Value: []byte("a"), Listener: events.note})
				if err != nil {
					t.Fatal(err)
				}
				former := a.Session()
				var other *registry.Session
				// Between two renewals: nothing of the process runs before the other came.
				time.Sleep(10*time.Second + 500*time.Millisecond)
				synctest.Wait()
				st.jumped.Store(int64(3 * ttl))
				if taken {
					st.HoldWatches(true) // what is on its way waits in the socket
					st.Expire(former.Lease())
					other = openSession(t, st)
					if _, err := registry.Register(t.Context(), st, other, "/ids/a", []byte("other")); err != nil {
						t.Fatal(err)
					}
				}
				if a.Alive() || former.Alive() {
					t.Error("alive right after the stop")
				}
				st.HoldWatches(false)
				time.Sleep(5 * time.Second)
				got := events.take()
				if !errors.Is(got[1].Err, registry.ErrSessionExpired) {
					t.Errorf("lost: %v", got[1])
				}
				kv := getKey(t, st, "/ids/a")
				if taken {
					want(t, "events", announceKinds(got), "registered lost held")
					if a.Alive() || string(kv.Value) != "other" {
						t.Errorf("alive %t, key %+v", a.Alive(), kv)
					}
					closeSession(t, other)
					synctest.Wait()
				} else {
					want(t, "events", announceKinds(got), "registered lost registered")
				}
				if kv := getKey(t, st, "/ids/a"); !a.Alive() || kv.Lease != a.Session().Lease() || kv.Lease == former.Lease() || st.Leases() != 1 {
					t.Errorf("alive %t, key %+v, %d leases", a.Alive(), kv, st.Leases())
				}
				if err := a.Close(t.Context()); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// Close while the store cannot be reached says so, and can be repeated.
func TestAnnounceCloseWithoutAStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		var events eventLog[registry.AnnounceEvent]
		a, err := registry.Announce(t.Context(), st, registry.AnnounceOptions{Key: "/ids/a", Value: []byte("a"), Listener: events.note})
		if err != nil {
			t.Fatal(err)
		}
		st.SetHooks(memory.Hooks{Before: func(context.Context, string) error { return errors.New("unreachable") }})
		if err := a.Close(t.Context()); err == nil || !strings.Contains(err.Error(), "/ids/a") || !strings.Contains(err.Error(), "unreachable") {
			t.Errorf("error %v", err)
		}
		want(t, "events", announceKinds(events.take()), "registered")
		st.SetHooks(memory.Hooks{})
		if err := a.Close(t.Context()); err != nil || st.Leases() != 0 {
			t.Errorf("error %v, %d leases", err, st.Leases())
		}
		want(t, "events", announceKinds(events.take()), "closed")
	})
}

// A session tells when a renewal is overdue, with the time left, and how it ends.
func TestSessionTellsItsLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		var events eventLog[registry.SessionEvent]
		o := registry.SessionOptions{Listener: events.note}
		s, err := registry.OpenSession(t.Context(), st, o)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if got := events.take(); len(got) != 1 || got[0].Kind != registry.SessionOpened || got[0].TTL != ttl || got[0].Lease != s.Lease() {
			t.Errorf("at first: %v", got)
		}
		if s.Renewed() > ttl/3 {
			t.Errorf("renewed %s ago", s.Renewed())
		}
		// Short trouble: stalled at half of the time to live, resumed.
		stop := memory.Hooks{KeepAlive: func(ctx context.Context, _ registry.LeaseID) error { <-ctx.Done(); return ctx.Err() }}
		st.SetHooks(stop)
		var stalled []registry.SessionEvent
		for len(stalled) == 0 {
			time.Sleep(10 * time.Millisecond)
			stalled = events.take()
		}
		if e := stalled[0]; e.Kind != registry.SessionStalled || e.Left < ttl/3 || e.Left > ttl/2 || s.Renewed() < ttl/2 {
			t.Errorf("stalled: %v, renewed %s ago", stalled, s.Renewed())
		}
		st.SetHooks(memory.Hooks{})
		time.Sleep(ttl / 3)
		if got := events.take(); sessionKinds(got) != "resumed" || got[0].Left < ttl/2 {
			t.Errorf("resumed: %v", got)
		}
		// Long trouble.
		st.SetHooks(stop)
		ended(t, s, registry.ErrSessionExpired)
		synctest.Wait()
		got := events.take()
		want(t, "long trouble", sessionKinds(got), "stalled lost")
		if e := got[1]; !errors.Is(e.Err, registry.ErrSessionExpired) || e.Left != 0 {
			t.Errorf("lost: %+v", e)
		}
		closeSession(t, s)
		want(t, "after Close", sessionKinds(events.take()), "")
		st.SetHooks(memory.Hooks{})

		if s, err = registry.OpenSession(t.Context(), st, o); err != nil {
			t.Fatal(err)
		}
		s.Abandon(registry.ErrLeaseGone)
		synctest.Wait()
		want(t, "abandoned", sessionKinds(events.take()), "opened lost")
		closeSession(t, s)
		if s, err = registry.OpenSession(t.Context(), st, o); err != nil {
			t.Fatal(err)
		}
		closeSession(t, s)
		want(t, "closed", sessionKinds(events.take()), "opened closed")
	})
}

// Who doubts a session makes it ask at once.
func TestSessionCheckFindsALeaseThatIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		s := openSession(t, st)
		time.Sleep(time.Minute + 300*time.Millisecond)
		for range 100 { // harmless, and no more than a renewal each time
			s.Check()
			time.Sleep(time.Millisecond)
		}
		st.Expire(s.Lease())
		time.Sleep(300 * time.Millisecond)
		s.Check()
		if took := ended(t, s, registry.ErrLeaseGone); took > 10*time.Millisecond {
			t.Errorf("found after %s", took)
		}
		s.Check()
		closeSession(t, s)
	})
}

// The store grants more than was asked for: all times follow what was granted.
func TestSessionGoesByTheGrantedTimeToLive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := raising{memory.New()}
		s := openSession(t, st)
		if s.TTL() != 3*ttl {
			t.Errorf("time to live %s", s.TTL())
		}
		st.SetHooks(memory.Hooks{KeepAlive: func(ctx context.Context, _ registry.LeaseID) error { <-ctx.Done(); return ctx.Err() }})
		if took := ended(t, s, registry.ErrSessionExpired); took < 2*ttl || took >= 3*ttl {
			t.Errorf("ended after %s", took)
		}
		closeSession(t, s)
	})
}

type raising struct{ *memory.Store }

func (r raising) Grant(ctx context.Context, ttl time.Duration) (registry.Lease, error) {
	return r.Store.Grant(ctx, 3*ttl)
}

// The session that was lost is revoked before the next one registers: its key is not
// taken for that of another, and waited for.
func TestAnnounceRevokesBeforeItRegisters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		var events eventLog[registry.AnnounceEvent]
		a, err := registry.Announce(t.Context(), st, registry.AnnounceOptions{Key: "/ids/a", Value: []byte("a"), TTL: registry.MaxTTL, Listener: events.note})
		if err != nil {
			t.Fatal(err)
		}
		events.take()
		fails := 3
		st.SetHooks(memory.Hooks{Before: func(_ context.Context, op string) error {
			if op == "revoke" && fails > 0 {
				fails--
				return errors.New("not now")
			}
			return nil
		}})
		a.Session().Abandon(registry.ErrSessionExpired) // its lease has a minute to live
		time.Sleep(5 * time.Second)
		want(t, "told", announceKinds(events.take()), "lost failed registered")
		if fails != 0 || !a.Alive() {
			t.Errorf("%d failures left, alive %t", fails, a.Alive())
		}
		if err := a.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// A key that another holds is looked at now and then, though the watch on it is silent.
func TestAnnounceLooksAgainWithoutAWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		a, err := registry.Announce(t.Context(), st, registry.AnnounceOptions{Key: "/ids/a", Value: []byte("a")})
		if err != nil {
			t.Fatal(err)
		}
		txn(t, st, registry.Delete("/ids/a"), registry.Put("/other", nil, 0))
		put(t, st, "/ids/a", "thief")
		time.Sleep(time.Second)
		st.HoldWatches(true)
		txn(t, st, registry.Delete("/ids/a"))
		time.Sleep(31 * time.Second)
		if !a.Alive() {
			t.Error("the key has been free for 31 s, and is not registered")
		}
		if err := a.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}
