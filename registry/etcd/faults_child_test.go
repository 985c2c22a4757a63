//go:build unix

package etcd

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/storetest"
)

// childVariable makes the test binary play a part that has to be killed or stopped:
// the name of the part, a blank, and its options as JSON.
const childVariable = "MUSTER_TEST_CHILD"

// TestChild is no test, but what such a process does.
func TestChild(t *testing.T) {
	part, options, ok := strings.Cut(os.Getenv(childVariable), " ")
	if !ok {
		return
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		io.Copy(io.Discard, os.Stdin) // whoever started it is gone
		cancel()
	}()
	if err := map[string]func(context.Context, []byte) error{"server": childServer, "holder": childHolder}[part](ctx, []byte(options)); err != nil {
		report("failed: %v", err)
	}
}

func report(format string, args ...any) { fmt.Printf("child: "+format+"\n", args...) }

func childServer(ctx context.Context, options []byte) error {
	var o ServerOptions
	if err := json.Unmarshal(options, &o); err != nil {
		return err
	}
	server, err := StartServer(ctx, o)
	if err != nil {
		return err
	}
	defer server.Close()
	report("ready")
	<-ctx.Done()
	return nil
}

// child is such a process, seen from the test.
type child struct {
	t     *testing.T
	cmd   *exec.Cmd
	lines chan string
}

func startChild(t *testing.T, part string, options any) *child {
	t.Helper()
	data, err := json.Marshal(options)
	if err != nil {
		t.Fatal(err)
	}
	c := &child{t: t, cmd: exec.Command(os.Args[0], "-test.run=^TestChild$", "-test.timeout=10m"), lines: make(chan string, 100)}
	c.cmd.Env = append(os.Environ(), childVariable+"="+part+" "+string(data))
	c.cmd.Stderr = os.Stderr
	if _, err := c.cmd.StdinPipe(); err != nil { // closed by Wait, or with this process
		t.Fatal(err)
	}
	stdout, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(c.lines)
		for s := bufio.NewScanner(stdout); s.Scan(); {
			if line, ok := strings.CutPrefix(s.Text(), "child: "); ok {
				c.lines <- line
			}
		}
	}()
	t.Cleanup(c.kill)
	return c
}

// expect waits for a line that begins so, and returns the rest of it.
func (c *child) expect(d time.Duration, begin string) string {
	c.t.Helper()
	select {
	case line, ok := <-c.lines:
		rest, is := strings.CutPrefix(line, begin)
		if !ok || !is {
			c.t.Fatalf("the child says %q, want %q", line, begin)
		}
		return strings.TrimSpace(rest)
	case <-time.After(d):
		c.t.Fatalf("the child does not say %q within %s", begin, d)
	}
	return ""
}

func (c *child) signal(s syscall.Signal) {
	c.t.Helper()
	if err := c.cmd.Process.Signal(s); err != nil {
		c.t.Fatal(err)
	}
}

func (c *child) kill() {
	if c.cmd.ProcessState != nil {
		return
	}
	c.cmd.Process.Kill()
	for range c.lines {
	}
	c.cmd.Wait()
}

// tryPut is one write that may take so long.
func tryPut(t *testing.T, st registry.Store, d time.Duration, key, value string) (int64, error) {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	res, err := st.Txn(ctx, registry.Txn{Then: []registry.Op{registry.Put(key, []byte(value), 0)}})
	return res.Revision, err
}

// putAgain writes until it succeeds and returns how long that took.
func putAgain(t *testing.T, st registry.Store, key, value string) (revision int64, took time.Duration) {
	t.Helper()
	began := time.Now()
	for {
		revision, err := tryPut(t, st, 2*time.Second, key, value)
		if err == nil {
			return revision, time.Since(began)
		}
		if time.Since(began) > 20*time.Second {
			t.Fatalf("no write succeeds again: %v", err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// failsInTime wants a write to fail within its deadline.
func failsInTime(t *testing.T, st registry.Store, d time.Duration, key string) {
	t.Helper()
	began := time.Now()
	_, err := tryPut(t, st, d, key, "")
	took := time.Since(began)
	if err == nil || took > d+500*time.Millisecond || !strings.Contains(err.Error(), "etcd") {
		t.Errorf("a write with a deadline of %s ended after %s: %v", d, took, err)
	}
	t.Logf("a write with a deadline of %s fails after %s: %v", d, took.Round(time.Millisecond), err)
}

// announced is a key that is kept registered, and what is told of that.
type announced struct {
	*registry.Announcement
	t      *testing.T
	events chan registry.AnnounceEvent
}

func announce(t *testing.T, st registry.Store, key string, ttl time.Duration) *announced {
	t.Helper()
	a := &announced{t: t, events: make(chan registry.AnnounceEvent, 1000)}
	var err error
	a.Announcement, err = registry.Announce(within(t, 10*time.Second), st, registry.AnnounceOptions{
		Key: key, Value: []byte("a"), TTL: ttl, Listener: func(e registry.AnnounceEvent) { a.events <- e }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := a.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	a.next(registry.AnnounceRegistered, time.Second)
	return a
}

// next waits for an event of that kind, and returns how long that took. Attempts that
// failed may come before it.
func (a *announced) next(kind registry.AnnounceEventKind, d time.Duration) (registry.AnnounceEvent, time.Duration) {
	a.t.Helper()
	began := time.Now()
	late := time.After(d)
	for {
		select {
		case e := <-a.events:
			if e.Kind == kind {
				return e, time.Since(began).Round(time.Millisecond)
			}
			if e.Kind != registry.AnnounceFailed {
				a.t.Fatalf("told of %s", e)
			}
		case <-late:
			a.t.Fatalf("event %d does not come within %s", kind, d)
		}
	}
}

func endSession(t *testing.T, s *registry.Session) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := s.Close(ctx); err != nil {
		t.Errorf("close the session: %v", err)
	}
}

// lost waits for the end of a session and returns how long that took.
func lost(t *testing.T, s *registry.Session, d time.Duration, want error) time.Duration {
	t.Helper()
	began := time.Now()
	select {
	case <-s.Done():
	case <-time.After(d):
		t.Fatalf("the session is not lost within %s", d)
	}
	if !errors.Is(s.Err(), want) || s.Alive() {
		t.Errorf("the session ended with %v, want %v; alive: %t", s.Err(), want, s.Alive())
	}
	return time.Since(began)
}

// The only etcd is killed while it is written to, and started again within the time to
// live: nothing that was acknowledged is lost, the session survives, views go on.
func TestEtcdKilledAndStarted(t *testing.T) {
	t.Parallel()
	o := freePorts(t, t.TempDir())
	server := startChild(t, "server", o)
	server.expect(20*time.Second, "ready")
	st, err := Open(t.Context(), Options{Endpoints: []string{o.ListenClient}})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	s, err := registry.OpenSession(t.Context(), st, registry.SessionOptions{TTL: 10 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer endSession(t, s)
	reg, err := registry.Register(t.Context(), st, s, "/k/ids/a", nil)
	if err != nil {
		t.Fatal(err)
	}
	m := newMirror(t, st, registry.ViewOptions{}, "/k/")

	acknowledged := make(chan int)
	kill := make(chan struct{})
	go func() {
		for n := 0; ; n++ {
			if n == 200 {
				close(kill)
			}
			if _, err := tryPut(t, st, 2*time.Second, fmt.Sprintf("/k/n/%05d", n), ""); err != nil {
				acknowledged <- n
				return
			}
		}
	}()
	<-kill
	server.kill()
	down := time.Now()
	n := <-acknowledged
	failsInTime(t, st, time.Second, "/k/down")
	server = startChild(t, "server", o)
	server.expect(20*time.Second, "ready")
	t.Logf("killed after %d acknowledged writes; ready again %s later", n, time.Since(down).Round(time.Millisecond))
	rev, took := putAgain(t, st, "/k/up", "")
	t.Logf("written to again %s after that; in the view %s later", took.Round(time.Millisecond), m.reaches(10*time.Second, rev).Round(time.Millisecond))
	m.equalsList()
	for i := range n {
		if _, there := m.keys()[fmt.Sprintf("/k/n/%05d", i)]; !there {
			t.Fatalf("write %d of %d acknowledged ones is lost", i, n)
		}
	}
	if kv := m.keys()[reg.Key]; !s.Alive() || kv.CreateRevision != reg.Revision {
		t.Errorf("the session is alive: %t (%v), its key %+v; registered at %d", s.Alive(), s.Err(), kv, reg.Revision)
	}
}

// The only etcd is stopped for three times the time to live, then goes on: the session
// is declared lost before that by its own deadline, the process registers again under
// the same key, and views are right.
func TestEtcdPausedForThreeLeases(t *testing.T) {
	t.Parallel()
	o := freePorts(t, t.TempDir())
	server := startChild(t, "server", o)
	server.expect(20*time.Second, "ready")
	st, err := Open(t.Context(), Options{Endpoints: []string{o.ListenClient}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	key := "/p/ids/a"
	a := announce(t, st, key, registry.MinTTL)
	old, _ := a.Registration()
	ttl := a.Session().TTL()
	put(t, st, "/p/topics/t", "1")
	m := newMirror(t, st, registry.ViewOptions{}, "/p/ids/", "/p/topics/")
	for troubled(m.view) {
	}

	server.signal(syscall.SIGSTOP)
	stopped := time.Now()
	e, took := a.next(registry.AnnounceLost, ttl)
	t.Logf("lost %s after the stop, time to live %s: %v", took, ttl, e.Err)
	if !errors.Is(e.Err, registry.ErrSessionExpired) || a.Alive() {
		t.Errorf("lost for %v; alive: %t", e.Err, a.Alive())
	}
	failsInTime(t, st, time.Second, "/p/topics/x")
	select {
	case <-m.view.Trouble():
		t.Logf("the view says that it hears nothing %s after the stop", time.Since(stopped).Round(time.Millisecond))
	case <-time.After(5 * time.Second):
		t.Error("the view does not say that it hears nothing")
	}
	time.Sleep(time.Until(stopped.Add(3 * ttl)))
	server.signal(syscall.SIGCONT)

	e, took = a.next(registry.AnnounceRegistered, 10*time.Second)
	t.Logf("registered again %s after it went on", took)
	rev, _ := putAgain(t, st, "/p/topics/u", "2")
	m.reaches(5*time.Second, max(rev, e.Registration.Revision))
	m.equalsList()
	if kv := m.keys()[key]; kv.Lease != e.Lease || kv.CreateRevision != e.Registration.Revision || kv.CreateRevision <= old.Revision || !a.Alive() {
		t.Errorf("the key is %+v, registered as %+v, before as %+v; alive: %t", kv, e, old, a.Alive())
	}
}

// holderOptions are those of a process that holds partitions 0 to 3 of topic t.
type holderOptions struct {
	Endpoint, Root string
	TTL            time.Duration
}

// childHolder holds, until its session is over. Then it does all that a process does
// that has not understood what happened, and after that what it should do.
func childHolder(ctx context.Context, options []byte) error {
	var o holderOptions
	if err := json.Unmarshal(options, &o); err != nil {
		return err
	}
	st, err := Open(ctx, Options{Endpoints: []string{o.Endpoint}})
	if err != nil {
		return err
	}
	defer st.Close()
	g := registry.Root(o.Root).Group("g")
	s, reg, err := joinGroup(ctx, st, g, "a", o.TTL)
	if err != nil {
		return err
	}
	results, guard, err := claimFour(ctx, st, s, reg, g, "a")
	if err != nil {
		return err
	}
	var releases, byLease []registry.OwnerRelease
	for n, r := range results {
		if r.Holder != nil {
			return r.Holder
		}
		releases = append(releases, registry.OwnerRelease{Key: four(g)[n], Token: r.Token})
		byLease = append(byLease, registry.OwnerRelease{Key: four(g)[n]})
	}
	report("claimed")
	for s.Alive() {
		time.Sleep(2 * time.Millisecond)
	}
	report("lost: %v", s.Err())
	for _, r := range [][]registry.OwnerRelease{releases, byLease} {
		if _, err := registry.Release(ctx, st, s.Lease(), r); err != nil {
			return err
		}
	}
	_, _, err = registry.Claim(ctx, st, s.Lease(), guard, claimsOf(g, "a"))
	report("claimed again under the old guard: %v", err)
	_, err = registry.Register(ctx, st, s, reg.Key, []byte("a"))
	report("registered again in the old session: %v", err)
	if err := s.Close(ctx); err != nil {
		return err
	}
	again, reg, err := joinGroup(ctx, st, g, "a", o.TTL)
	if err != nil {
		return err
	}
	defer again.Close(context.WithoutCancel(ctx))
	results, _, err = claimFour(ctx, st, again, reg, g, "a")
	if err != nil {
		return err
	}
	var holders []string
	for _, r := range results {
		if r.Holder == nil {
			holders = append(holders, "a")
			continue
		}
		holders = append(holders, string(r.Holder.KV.Value))
	}
	report("back, held by %s", strings.Join(holders, " "))
	<-ctx.Done()
	return nil
}

func four(g registry.GroupPaths) (keys []string) {
	for n := range int32(4) {
		keys = append(keys, g.Owner(registry.Partition{Topic: "t", Home: 1, Number: n}))
	}
	return keys
}

func claimsOf(g registry.GroupPaths, id string) (claims []registry.OwnerClaim) {
	for _, key := range four(g) {
		claims = append(claims, registry.OwnerClaim{Key: key, Value: []byte(id + "-0")})
	}
	return claims
}

func joinGroup(ctx context.Context, st registry.Store, g registry.GroupPaths, id string, ttl time.Duration) (*registry.Session, registry.Registration, error) {
	s, err := registry.OpenSession(ctx, st, registry.SessionOptions{TTL: ttl})
	if err != nil {
		return nil, registry.Registration{}, err
	}
	reg, err := registry.Register(ctx, st, s, g.ID(id), []byte(id))
	return s, reg, err
}

func claimFour(ctx context.Context, st registry.Store, s *registry.Session, reg registry.Registration, g registry.GroupPaths, id string) ([]registry.ClaimResult, registry.Guard, error) {
	_, rev, err := registry.List(ctx, st, g.IDs(), 0)
	if err != nil {
		return nil, registry.Guard{}, err
	}
	guard := registry.Guard{Registration: reg, IDs: g.IDs(), Snapshot: rev}
	results, _, err := registry.Claim(ctx, st, s.Lease(), guard, claimsOf(g, id))
	return results, guard, err
}

// Field case 03, the part of the registry: a holder is stopped for three times the time
// to live. Awake again, it neither deletes nor overwrites what another one holds by then.
func TestFrozenHolder(t *testing.T) {
	t.Parallel()
	const ttl = registry.MinTTL
	st := open(t)
	root := strings.TrimSuffix(storetest.Prefix(t), "/")
	g := registry.Root(root).Group("g")
	holder := startChild(t, "holder", holderOptions{Endpoint: shared.server.Endpoint, Root: root, TTL: ttl})
	holder.expect(20*time.Second, "claimed")
	owners := newMirror(t, st, registry.ViewOptions{}, g.Owners(), g.IDs())
	if n := len(owners.keys()); n != 5 {
		t.Fatalf("%d keys, want 4 owners and a registration", n)
	}

	holder.signal(syscall.SIGSTOP)
	stopped := time.Now()
	s, reg, err := joinGroup(t.Context(), st, g, "b", ttl)
	if err != nil {
		t.Fatal(err)
	}
	defer endSession(t, s)
	until(t, owners.view, 3*ttl, func(snap registry.Snapshot) bool { return len(snap.Under(0)) == 0 && len(snap.Under(1)) == 1 })
	t.Logf("its keys are gone %s after the stop, time to live %s", time.Since(stopped).Round(time.Millisecond), ttl)
	results, _, err := claimFour(t.Context(), st, s, reg, g, "b")
	if err != nil {
		t.Fatal(err)
	}
	_, mine, err := registry.List(t.Context(), st, g.Owners(), 0)
	if err != nil {
		t.Fatal(err)
	}
	owners.reaches(5*time.Second, mine)
	owners.take()
	time.Sleep(time.Until(stopped.Add(3 * ttl)))
	holder.signal(syscall.SIGCONT)
	awake := time.Now()

	holder.expect(5*time.Second, "lost: "+registry.ErrSessionExpired.Error())
	if text := holder.expect(5*time.Second, "claimed again under the old guard:"); !strings.Contains(text, registry.ErrStale.Error()) {
		t.Errorf("its late claim: %s", text)
	}
	if text := holder.expect(5*time.Second, "registered again in the old session:"); text == "<nil>" {
		t.Error("it registered in a session that is over")
	}
	holder.expect(10*time.Second, "back, held by b-0 b-0 b-0 b-0")
	t.Logf("registered again %s after it went on", time.Since(awake).Round(time.Millisecond))
	owners.reaches(5*time.Second, put(t, st, g.Owners()+"end", ""))
	var own int
	for _, e := range owners.take() {
		switch {
		case e.Key == g.ID("a") && !e.Deleted:
			own++
		case e.Key != g.Owners()+"end":
			t.Errorf("it changed %s: %+v", e.Key, e)
		}
	}
	if own != 1 {
		t.Errorf("it registered %d times", own)
	}
	for n, r := range results {
		if kv := owners.keys()[four(g)[n]]; r.Holder != nil || kv.CreateRevision != r.Token || kv.ModRevision != r.Token || kv.Lease != s.Lease() {
			t.Errorf("partition %d: claimed %+v, the key is %+v", n, r, kv)
		}
	}
}
