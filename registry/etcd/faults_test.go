package etcd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/storetest"
)

// mirror is a View, and a copy that is kept by its events alone.
type mirror struct {
	t        *testing.T
	st       registry.Store
	view     *registry.View
	prefixes []string

	mu     sync.Mutex
	copied map[string]registry.KV
	events []registry.Event
	each   func(registry.Event) // sees every event as it comes
}

func newMirror(t *testing.T, st registry.Store, o registry.ViewOptions, prefixes ...string) *mirror {
	t.Helper()
	m := &mirror{t: t, st: st, prefixes: prefixes, copied: map[string]registry.KV{}}
	v, err := registry.OpenView(within(t, longEnough), st, prefixes, o, m.apply)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(v.Close)
	m.view = v
	return m
}

func (m *mirror) apply(_ registry.Snapshot, events []registry.Event) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range events {
		if m.each != nil {
			m.each(e)
		}
		was, there := m.copied[e.Key]
		switch {
		case there != (e.Previous != nil) || there && e.Previous.ModRevision != was.ModRevision:
			m.t.Errorf("event %+v says that there was %+v, and there was %+v (%t)", e, e.Previous, was, there)
		case e.Deleted && !there:
			m.t.Errorf("%s is deleted, and was not there", e.Key)
		case e.Deleted:
			delete(m.copied, e.Key)
			m.events = append(m.events, e)
			continue
		}
		m.copied[e.Key] = e.KV
		m.events = append(m.events, e)
	}
}

// keys is the newest snapshot.
func (m *mirror) keys() map[string]registry.KV {
	all := map[string]registry.KV{}
	snap := m.view.Snapshot()
	for i := range m.prefixes {
		for _, kv := range snap.Under(i) {
			all[kv.Key] = kv
		}
	}
	return all
}

// take returns the events since the last call.
func (m *mirror) take() []registry.Event {
	m.mu.Lock()
	defer m.mu.Unlock()
	events := m.events
	m.events = nil
	return events
}

// reaches waits until the View has come to a revision, which it need not be told by a
// change, and returns how long that took.
func (m *mirror) reaches(d time.Duration, revision int64) time.Duration {
	m.t.Helper()
	began := time.Now()
	for m.view.Revision() < revision {
		if time.Since(began) > d {
			m.t.Fatalf("the view is at revision %d after %s, not at %d; it heard of the store %s ago", m.view.Revision(), d, revision, m.view.Heard())
		}
		time.Sleep(100 * time.Microsecond)
	}
	return time.Since(began)
}

// equalsList wants the View, and what its events have made, to be what a fresh list at
// the same revision finds.
func (m *mirror) equalsList() {
	m.t.Helper()
	snap := m.view.Snapshot()
	var listed, viewed []registry.KV
	for i, prefix := range m.prefixes {
		kvs, _, err := registry.List(within(m.t, longEnough), m.st, prefix, snap.Revision)
		if err != nil {
			m.t.Fatal(err)
		}
		listed = append(listed, kvs...)
		viewed = append(viewed, snap.Under(i)...)
	}
	same := func(a, b registry.KV) bool {
		return a.Key == b.Key && bytes.Equal(a.Value, b.Value) && a.CreateRevision == b.CreateRevision && a.ModRevision == b.ModRevision && a.Lease == b.Lease
	}
	if !slices.EqualFunc(listed, viewed, same) {
		m.t.Errorf("at revision %d the view has %d keys, a list %d, and they differ", snap.Revision, len(viewed), len(listed))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.copied) != len(listed) {
		m.t.Errorf("the events have made %d keys of %d", len(m.copied), len(listed))
	}
	for _, kv := range listed {
		if !same(m.copied[kv.Key], kv) {
			m.t.Errorf("the events have made %+v of %+v", m.copied[kv.Key], kv)
		}
	}
}

// A view of 10,000 keys is, after 2,000 random changes, what a fresh list finds.
func TestBigView(t *testing.T) {
	t.Parallel()
	const keys, changes = 10_000, 2_000
	seed := *storeSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	r := rand.New(rand.NewPCG(seed, 0))
	_, st := ownServer(t) // history that another test compacts could not be listed
	p := storetest.Prefix(t)
	name := func(n int) string { return fmt.Sprintf("%s%05d", p, n) }
	for from := 0; from < keys; from += registry.MaxTxnOps {
		var ops []registry.Op
		for n := from; n < min(from+registry.MaxTxnOps, keys); n++ {
			ops = append(ops, registry.Put(name(n), []byte("0"), 0))
		}
		txn(t, st, ops...)
	}
	began := time.Now()
	m := newMirror(t, st, registry.ViewOptions{}, p)
	opened := time.Since(began)
	if n := len(m.keys()); n != keys {
		t.Fatalf("%d keys, want %d", n, keys)
	}
	began = time.Now()
	var rev int64
	for n := 0; n < changes; {
		var ops []registry.Op
		for _, i := range r.Perm(keys + 500)[:1+r.IntN(20)] { // some that are new
			if r.IntN(3) == 0 {
				ops = append(ops, registry.Delete(name(i)))
			} else {
				ops = append(ops, registry.Put(name(i), fmt.Append(nil, n), 0))
			}
		}
		n += len(ops)
		rev = txn(t, st, ops...)
	}
	changed := time.Since(began)
	t.Logf("seed %d: opened in %s, changed in %s, the last change seen %s later", seed, opened.Round(time.Millisecond),
		changed.Round(time.Millisecond), m.reaches(longEnough, rev).Round(time.Microsecond))
	m.equalsList()
}

// Field case 57: history is compacted while a watch lags. What has changed meanwhile is
// delivered as the difference, deletions included, and nothing else is.
func TestCompactionUnderALaggingWatch(t *testing.T) {
	t.Parallel()
	server, direct := ownServer(t)
	k := newLink(t, server.Endpoint)
	far, err := Open(t.Context(), Options{Endpoints: []string{"http://" + k.listener.Addr().String()}})
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	p := storetest.Prefix(t)
	name := func(kind string, n int) string { return fmt.Sprintf("%s%s/%02d", p, kind, n) }
	const each = 30
	for _, kind := range []string{"stays", "changes", "goes", "anew"} {
		var ops []registry.Op
		for n := range each {
			ops = append(ops, registry.Put(name(kind, n), []byte("1"), 0))
		}
		txn(t, direct, ops...)
	}
	m := newMirror(t, far, registry.ViewOptions{}, p)
	m.take()

	k.set(true)
	var rev int64
	for n := range each {
		txn(t, direct, registry.Put(name("changes", n), []byte("2"), 0))
		txn(t, direct, registry.Put(name("passes", n), []byte("1"), 0), registry.Delete(name("anew", n)))
		rev = txn(t, direct, registry.Put(name("changes", n), []byte("3"), 0), registry.Delete(name("goes", n)),
			registry.Put(name("comes", n), []byte("1"), 0), registry.Delete(name("passes", n)), registry.Put(name("anew", n), []byte("2"), 0))
	}
	direct.Compact(rev)
	k.drop()
	k.set(false)
	t.Logf("%d changes, compacted: the difference is there after %s", each*8, m.reaches(longEnough, rev).Round(time.Millisecond))
	m.equalsList()
	got := map[string]int{}
	for _, e := range m.take() {
		kind := strings.Split(strings.TrimPrefix(e.Key, p), "/")[0]
		switch {
		case e.Deleted:
			kind += " deleted"
		case e.Previous == nil:
			kind += " created"
		case e.Previous.CreateRevision != e.CreateRevision:
			kind += " replaced"
		}
		got[kind]++
	}
	if want := map[string]int{"changes": each, "goes deleted": each, "comes created": each, "anew replaced": each}; fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("events %v, want %v", got, want)
	}
	rev = txn(t, direct, registry.Delete(name("stays", 0)))
	m.reaches(longEnough, rev)
	if events := m.take(); len(events) != 1 || !events[0].Deleted {
		t.Errorf("events after that: %+v", events)
	}
	m.equalsList()
}

// Somebody revokes a lease with etcdctl: the session learns of it within a renewal
// interval, and the process registers again under the same key.
func TestLeaseRevokedByHand(t *testing.T) {
	t.Parallel()
	_, st := ownServer(t) // history that another test compacts could not be listed
	p := storetest.Prefix(t)
	key := p + "ids/a"
	const ttl = 15 * time.Second
	a := announce(t, st, key, ttl)
	renewal := a.Session().TTL() / 3
	const limit = 4 * time.Second // without a renewal it would be as much again until the deadline
	alone, err := registry.OpenSession(t.Context(), st, registry.SessionOptions{TTL: ttl})
	if err != nil {
		t.Fatal(err)
	}
	defer endSession(t, alone)
	m := newMirror(t, st, registry.ViewOptions{}, p)
	m.take()
	time.Sleep(renewal + 100*time.Millisecond) // one was just answered
	if _, err := st.Client().Revoke(t.Context(), clientv3.LeaseID(a.Session().Lease())); err != nil {
		t.Fatal(err)
	}
	e, took := a.next(registry.AnnounceLost, longEnough)
	t.Logf("lost %s after the revocation; renewed every %s: %v", took, renewal, e.Err)
	// By a renewal, or sooner by what happens to the key.
	if took > renewal+limit || !errors.Is(e.Err, registry.ErrLeaseGone) && !errors.Is(e.Err, registry.ErrTakenAway) {
		t.Errorf("lost after %s for %v, a renewal is due every %s", took, e.Err, renewal)
	}
	e, took = a.next(registry.AnnounceRegistered, longEnough)
	t.Logf("registered again %s later", took)
	if _, err := st.Client().Revoke(t.Context(), clientv3.LeaseID(alone.Lease())); err != nil {
		t.Fatal(err)
	}
	took = lost(t, alone, longEnough, registry.ErrLeaseGone).Round(time.Millisecond)
	t.Logf("a session without keys is lost %s after the revocation", took)
	if took > renewal+limit {
		t.Errorf("lost after %s", took)
	}
	m.reaches(longEnough, e.Registration.Revision)
	if events := m.take(); len(events) != 2 || !events[0].Deleted || events[1].CreateRevision != e.Registration.Revision || events[1].Lease != e.Lease {
		t.Errorf("events %+v", events)
	}
	m.equalsList()
}

// A thousand sessions end at once, since their process is cut off: each knows by its own
// deadline before etcd lets go of its key, and whoever watches sees a thousand deletions.
func TestThousandSessionsExpire(t *testing.T) {
	sessions := 1000
	if raced {
		sessions = 100
	}
	server, direct := ownServer(t)
	k := newLink(t, server.Endpoint)
	far, err := Open(t.Context(), Options{Endpoints: []string{"http://" + k.listener.Addr().String()}})
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	before := memoryInUse()
	began := time.Now()
	all := make([]*registry.Session, sessions)
	var opening sync.WaitGroup
	for worker := range 50 {
		opening.Go(func() {
			for n := worker; n < sessions; n += 50 {
				s, err := registry.OpenSession(t.Context(), far, registry.SessionOptions{TTL: 12 * time.Second})
				if err != nil {
					t.Errorf("session %d: %v", n, err)
					return
				}
				all[n] = s
				if _, err := registry.Register(t.Context(), far, s, fmt.Sprintf("/s/ids/%04d", n), nil); err != nil {
					t.Errorf("session %d: %v", n, err)
				}
			}
		})
	}
	opening.Wait()
	if t.Failed() {
		t.FailNow()
	}
	t.Logf("%d sessions opened in %s; memory in use by client and server %.1f MB, before %.1f MB", sessions, time.Since(began).Round(time.Millisecond), memoryInUse(), before)
	m := newMirror(t, direct, registry.ViewOptions{}, "/s/")
	if n := len(m.take()); n != sessions {
		t.Fatalf("%d keys, want %d", n, sessions)
	}
	byKey := map[string]*registry.Session{}
	for n, s := range all {
		if !s.Alive() {
			t.Fatalf("session %d did not live to see it: %v", n, s.Err())
		}
		byKey[fmt.Sprintf("/s/ids/%04d", n)] = s
	}
	m.mu.Lock()
	m.each = func(e registry.Event) {
		if byKey[e.Key].Alive() {
			t.Errorf("etcd let go of %s before its session's own deadline", e.Key)
		}
	}
	m.mu.Unlock()

	k.set(true)
	cut := time.Now()
	for _, s := range all {
		lost(t, s, longEnough, registry.ErrSessionExpired)
	}
	t.Logf("all knew it %s after the cut", time.Since(cut).Round(time.Millisecond))
	until(t, m.view, longEnough, func(s registry.Snapshot) bool { return len(s.Under(0)) == 0 })
	t.Logf("all keys were gone %s after the cut; memory %.1f MB", time.Since(cut).Round(time.Millisecond), memoryInUse())
	seen := map[string]bool{}
	for _, e := range m.take() {
		if !e.Deleted || seen[e.Key] {
			t.Errorf("event %+v", e)
		}
		seen[e.Key] = true
	}
	if len(seen) != sessions {
		t.Errorf("%d deletions, want %d", len(seen), sessions)
	}
	m.equalsList()
	k.drop()
	k.set(false)
	for _, s := range all {
		opening.Go(func() { endSession(t, s) })
	}
	opening.Wait()
}

func memoryInUse() float64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapInuse+m.StackInuse) / 1e6
}

// plainServer is an etcd with settings of the test's own.
func plainServer(t *testing.T, change func(*embed.Config)) string {
	t.Helper()
	o := freePorts(t, t.TempDir())
	cfg := embed.NewConfig()
	cfg.Name, cfg.Dir = o.Name, o.Dir
	cfg.TickMs, cfg.ElectionMs = 50, 250
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	parse := func(text string) []url.URL {
		u, err := url.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		return []url.URL{*u}
	}
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = parse(o.ListenClient), parse(o.ListenClient)
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = parse(o.ListenPeer), parse(o.ListenPeer)
	cfg.InitialCluster = o.Name + "=" + o.ListenPeer
	change(cfg)
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	select {
	case <-e.Server.ReadyNotify():
	case <-time.After(longEnough):
		t.Fatal("etcd is not ready")
	}
	return o.ListenClient
}

// Field case 05, the part of etcd: it listens and is reached where an address of IPv6 says.
func TestIPv6(t *testing.T) {
	o := freePorts(t, t.TempDir())
	// The number is kept for us, whatever the address: see freeport.
	address := strings.Replace(strings.TrimPrefix(o.ListenClient, "http://"), "127.0.0.1", "[::1]", 1)
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Skipf("no IPv6 here: %v", err)
	}
	l.Close()
	o.ListenClient = "http://" + address
	server, err := StartServer(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	if server.Endpoint != o.ListenClient || !strings.HasPrefix(server.Endpoint, "http://[::1]:") {
		t.Errorf("endpoint %s", server.Endpoint)
	}
	st, err := Open(t.Context(), Options{Endpoints: []string{o.ListenClient}})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	put(t, st, "/x", "")
}

// A wrong password is refused at once and said so; one that is changed under a session
// makes calls fail, in place of trying for ever.
func TestWrongPassword(t *testing.T) {
	t.Parallel()
	endpoint := plainServer(t, func(c *embed.Config) { c.BcryptCost = 4 }) // etcd's own takes seconds under the race detector
	admin, err := Open(t.Context(), Options{Endpoints: []string{endpoint}})
	if err != nil {
		t.Fatal(err)
	}
	c := admin.Client()
	ctx := within(t, longEnough)
	for _, call := range []func() error{
		func() error { _, err := c.RoleAdd(ctx, "root"); return err },
		func() error { _, err := c.UserAdd(ctx, "root", "secret-r"); return err },
		func() error { _, err := c.UserGrantRole(ctx, "root", "root"); return err },
		func() error { _, err := c.UserAdd(ctx, "muster", "secret-m"); return err },
		func() error { _, err := c.UserGrantRole(ctx, "muster", "root"); return err },
		func() error { _, err := c.AuthEnable(ctx); return err },
	} {
		if err := call(); err != nil {
			t.Fatal(err)
		}
	}
	admin.Close()
	for _, o := range []Options{{User: "muster", Password: "wrong"}, {User: "nobody", Password: "secret-m"}, {}} {
		o.Endpoints, o.DialTimeout = []string{endpoint}, longEnough // with half of it for trying again
		began := time.Now()
		st, err := Open(t.Context(), o)
		took := time.Since(began)
		if err == nil {
			_, err = st.Range(within(t, longEnough), registry.RangeRequest{Key: "/x"})
			took = time.Since(began)
			st.Close()
		}
		if err == nil || took > longEnough/3 || !strings.Contains(err.Error(), "user") {
			t.Errorf("user %q, password %q: after %s: %v", o.User, o.Password, took, err)
		}
		t.Logf("user %q, password %q: after %s: %v", o.User, o.Password, took.Round(time.Millisecond), err)
	}
	st, err := Open(t.Context(), Options{Endpoints: []string{endpoint}, User: "muster", Password: "secret-m"})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	put(t, st, "/x", "")
	if _, err := st.Client().UserChangePassword(t.Context(), "muster", "secret-n"); err != nil {
		t.Fatal(err)
	}
	for name, call := range map[string]func(ctx context.Context) error{
		"read": func(ctx context.Context) error {
			_, err := st.Range(ctx, registry.RangeRequest{Key: "/x"})
			return err
		},
		"write": func(ctx context.Context) error {
			_, err := st.Txn(ctx, registry.Txn{Then: []registry.Op{registry.Put("/x", nil, 0)}})
			return err
		},
		"lease": func(ctx context.Context) error { _, err := st.Grant(ctx, time.Minute); return err },
	} {
		began := time.Now()
		err := call(within(t, longEnough))
		took := time.Since(began)
		t.Logf("after the password was changed, %s: after %s: %v", name, took.Round(time.Millisecond), err)
		if err == nil || took > longEnough/3 || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: after %s: %v", name, took, err)
		}
	}
}
