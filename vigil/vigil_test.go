//go:build linux

package vigil

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/registrytest"
)

const (
	patience = time.Minute
	// lasting is for leases, which nobody renews here, and for limits of the server that a
	// test is not about.
	lasting = time.Hour
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func deadline(t testing.TB) <-chan struct{} {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx.Done()
}

func eventually(t testing.TB, missing func() string) {
	t.Helper()
	end := time.Now().Add(patience)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for what := missing(); what != ""; what = missing() {
		if time.Now().After(end) {
			t.Fatalf("after %s: %s", patience, what)
		}
		<-tick.C
	}
}

// fixture is an etcd and what is known of the deaths that a server has settled.
type fixture struct {
	t  testing.TB
	st *registrytest.Server
	id string // of the cluster: a socket of another test must not be found

	mu      sync.Mutex
	deaths  []DeathInfo
	refused map[RefusalReason]int
}

func newFixture(t testing.TB) *fixture {
	return &fixture{t: t, st: registrytest.Start(t), id: fmt.Sprintf("test-%d-%s", os.Getpid(), NewSecret().Notice()[:16]), refused: map[RefusalReason]int{}}
}

func (f *fixture) serve(change ...func(*ServerOptions)) *Server {
	f.t.Helper()
	o := ServerOptions{Store: f.st, ClusterID: f.id, Broker: 1, idle: lasting, linger: lasting, call: patience, Hooks: Hooks{
		OnDeath: func(i DeathInfo) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.deaths = append(f.deaths, i)
		},
		OnRefused: func(r RefusalReason) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.refused[r]++
		},
	}}
	if testing.Verbose() {
		o.Logger = slog.New(slog.NewTextHandler(f.t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	for _, c := range change {
		c(&o)
	}
	s, err := Serve(o)
	must(f.t, err)
	f.t.Cleanup(func() {
		if err := s.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			f.t.Error(err)
		}
	})
	return s
}

func (f *fixture) child(t *testing.T, id string, change ...func(*childConfig)) *child {
	cfg := childConfig{Endpoint: f.st.Endpoint, Cluster: f.id, Brokers: []int32{7, 1, 2}, ID: id}
	for _, c := range change {
		c(&cfg)
	}
	return startChild(t, cfg)
}

func key(id string) string { return registry.Root("").Group("g").ID(id) }

// stands tells whether a registration is there.
func (f *fixture) stands(id string) bool {
	f.t.Helper()
	kv, _, err := registry.GetKey(f.t.Context(), f.st, key(id))
	must(f.t, err)
	return kv != nil
}

// gone waits until a registration that was there is not, which its lease alone would take
// an hour to bring about, and tells how long that took.
func (f *fixture) gone(id string) time.Duration {
	f.t.Helper()
	began := time.Now()
	ctx, cancel := context.WithTimeout(f.t.Context(), patience)
	defer cancel()
	kv, revision, err := registry.GetKey(ctx, f.st, key(id))
	must(f.t, err)
	if kv == nil {
		return time.Since(began)
	}
	for r := range f.st.WatchKey(ctx, key(id), revision+1) {
		must(f.t, r.Err)
		for _, e := range r.Events {
			if e.Deleted {
				return time.Since(began)
			}
		}
	}
	f.t.Fatalf("%s still stands after %s", id, time.Since(began))
	return 0
}

func (f *fixture) results() map[DeathResult]int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := map[DeathResult]int{}
	for _, d := range f.deaths {
		n[d.Result]++
	}
	return n
}

func (f *fixture) countRefused(r RefusalReason) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.refused[r]
}

// registered makes a registration under a lease of its own.
func (f *fixture) registered(id string) (session wish, lease registry.LeaseID) {
	f.t.Helper()
	l, err := f.st.Grant(f.t.Context(), lasting)
	must(f.t, err)
	w := wish{key(id), NewSecret()}
	must(f.t, putRegistration(f.t.Context(), f.st, w.key, l.ID, w.secret))
	return w, l.ID
}

// The lease of a process that was killed is revoked, whichever way the process was
// found and whichever thread of it ended last.
func TestKilled(t *testing.T) {
	f := newFixture(t)
	path := filepath.Join(t.TempDir(), "socket")
	for name, c := range map[string]struct {
		peer  func(*net.UnixConn) (*process, error)
		child func(*childConfig)
	}{
		"pidfd of the kernel":  {peerProcess, func(*childConfig) {}},
		"by number":            {peerProcessByNumber, func(*childConfig) {}},
		"by path":              {peerProcess, func(c *childConfig) { c.Path, c.Brokers = path, nil }},
		"first thread is gone": {peerProcess, func(c *childConfig) { c.Leaderless = true }},
		"by number, likewise":  {peerProcessByNumber, func(c *childConfig) { c.Leaderless = true }},
	} {
		t.Run(name, func(t *testing.T) {
			s := f.serve(func(o *ServerOptions) { o.peer, o.Path = c.peer, path })
			defer s.Close()
			one, two := f.child(t, "one", c.child), f.child(t, "two", c.child)
			for _, c := range []*child{one, two} {
				c.says("watched by 1")
			}
			two.signal(syscall.SIGKILL)
			took := f.gone("two0")
			t.Logf("revoked after %s", took)
			if !f.stands("one0") {
				t.Error("the lease of a process that lives was revoked")
			}
			one.tell("exit") // without a word to the daemon
			f.gone("one0")
		})
	}
}

// A process that is stopped has not ended.
func TestStopped(t *testing.T) {
	f := newFixture(t)
	s := f.serve()
	one, two := f.child(t, "one"), f.child(t, "two")
	one.says("watched by 1")
	two.says("watched by 1")
	one.signal(syscall.SIGSTOP)
	eventually(t, func() string {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", one.cmd.Process.Pid))
		must(t, err)
		if !strings.Contains(string(stat), ") T ") {
			return "the child has not stopped"
		}
		return ""
	})
	two.signal(syscall.SIGKILL)
	f.gone("two0")
	if !f.stands("one0") || s.Sessions() != 1 {
		t.Error("a process that was stopped is taken for dead")
	}
	one.signal(syscall.SIGKILL) // which ends a stopped one too
	f.gone("one0")
}

// The sessions of one process are settled together, those removed before are not.
func TestManySessionsOfOneProcess(t *testing.T) {
	const many = 500
	f := newFixture(t)
	s := f.serve()
	c := f.child(t, "c", func(c *childConfig) { c.Sessions = many })
	c.says("watched by 1")
	if n := s.Sessions(); n != many || s.Connections() != 1 {
		t.Errorf("%d sessions of %d processes", n, s.Connections())
	}
	c.tell("remove")
	eventually(t, func() string {
		if n := s.Sessions(); n != many-1 {
			return fmt.Sprintf("%d sessions", n)
		}
		return ""
	})
	began := time.Now()
	c.signal(syscall.SIGKILL)
	eventually(t, func() string {
		if n := f.results()[DeathRevoked]; n != many-1 {
			return fmt.Sprintf("%d revoked", n)
		}
		return ""
	})
	t.Logf("%d leases revoked in %s", many-1, time.Since(began))
	kvs, _, err := registry.List(t.Context(), f.st, registry.Root("").Group("g").IDs(), 0)
	must(t, err)
	if len(kvs) != 1 || kvs[0].Key != key("c0") {
		t.Errorf("%d registrations stand", len(kvs))
	}
}

// A consumer finds a daemon that comes later, and another when its own is gone.
func TestDaemonRestart(t *testing.T) {
	f := newFixture(t)
	c := f.child(t, "c")
	first := f.serve()
	c.says("watched by 1")
	must(t, first.Close())
	second := f.serve(func(o *ServerOptions) { o.Broker = 2 })
	c.says("watched by 2")
	must(t, second.Close())
	f.serve()
	c.says("watched by 1")
	if !f.stands("c0") {
		t.Error("a daemon that left has revoked a lease")
	}
	c.signal(syscall.SIGKILL)
	f.gone("c0")
}

// A process dies while etcd is away.
func TestRegistryAway(t *testing.T) {
	f := newFixture(t)
	s := f.serve(func(o *ServerOptions) { o.call = callLimit })
	c := f.child(t, "c")
	c.says("watched by 1")
	f.st.StopServer()
	c.signal(syscall.SIGKILL)
	eventually(t, func() string {
		if s.Sessions() != 0 {
			return "the death was not noticed"
		}
		return ""
	})
	must(t, f.st.StartServer(t.Context()))
	f.gone("c0")
}

// Whose session is over already leaves nothing to revoke; and a registration that
// another session has made meanwhile is left alone.
func TestSessionOverBeforeTheProcess(t *testing.T) {
	f := newFixture(t)
	f.serve()
	c := f.child(t, "c", func(c *childConfig) { c.Sessions = 2 })
	c.says("watched by 1")
	kv, _, err := registry.GetKey(t.Context(), f.st, key("c0"))
	must(t, err)
	must(t, f.st.Revoke(t.Context(), kv.Lease))
	kv, _, err = registry.GetKey(t.Context(), f.st, key("c1"))
	must(t, err)
	_, err = f.st.Txn(t.Context(), registry.Txn{Then: []registry.Op{registry.Delete(key("c1"))}})
	must(t, err)
	f.registered("c1") // somebody else's
	c.signal(syscall.SIGKILL)
	eventually(t, func() string {
		if n := f.results(); n[DeathOver] != 2 {
			return fmt.Sprint(n)
		}
		return ""
	})
	if !f.stands("c1") {
		t.Error("the registration of another session is gone")
	}
	if _, err := f.st.Remaining(t.Context(), kv.Lease); err != nil {
		t.Errorf("a lease was revoked whose registration stood no more: %v", err)
	}
}

// When all is over, no file is open and no goroutine runs that was not before.
func TestNothingIsLeftBehind(t *testing.T) {
	f := newFixture(t)
	s := f.serve()
	count := func() (files, goroutines int) {
		dir, err := os.ReadDir("/proc/self/fd")
		must(t, err)
		return len(dir), runtime.NumGoroutine()
	}
	round := func() {
		children := make([]*child, 4)
		for i := range children {
			children[i] = f.child(t, fmt.Sprint("c", i, "-"))
		}
		for i, c := range children {
			c.says("watched by 1")
			if i%2 == 0 {
				c.signal(syscall.SIGKILL)
			} else {
				c.tell("close")
				eventually(t, func() string {
					if s.Connections() != len(children)-i && s.Connections() != len(children)-i-1 {
						return fmt.Sprintf("%d connections", s.Connections())
					}
					return ""
				})
				_ = c.in.Close()
			}
			for range c.lines {
			}
			_ = c.cmd.Wait()
		}
		eventually(t, func() string {
			if s.Connections() != 0 || s.Sessions() != 0 {
				return fmt.Sprintf("%d connections, %d sessions", s.Connections(), s.Sessions())
			}
			return ""
		})
	}
	round()
	files, goroutines := count()
	for range 3 {
		round()
	}
	eventually(t, func() string {
		if a, b := count(); a > files || b > goroutines {
			return fmt.Sprintf("%d files, %d goroutines; before: %d, %d", a, b, files, goroutines)
		}
		return ""
	})
}

// A socket file of a daemon that is gone is replaced; one of a daemon that lives is
// not, nor is anything else.
func TestSocketFile(t *testing.T) {
	f := newFixture(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "socket")
	stale := func() {
		ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		must(t, err)
		ln.SetUnlinkOnClose(false) // as if killed
		must(t, ln.Close())
	}
	at := func(path string) ServerOptions {
		return ServerOptions{Store: f.st, ClusterID: f.id, Broker: 9, Path: path}
	}
	// Of many that come at once, one has it.
	for range 100 {
		stale()
		var mu sync.Mutex
		var got []*net.UnixListener
		var work sync.WaitGroup
		for range 8 {
			work.Go(func() {
				if ln, err := listenPath(path); err == nil {
					mu.Lock()
					defer mu.Unlock()
					got = append(got, ln)
				} else if !strings.Contains(err.Error(), "it is in use") {
					t.Error(err)
				}
			})
		}
		work.Wait()
		if len(got) != 1 {
			t.Fatalf("%d daemons have the socket", len(got))
		}
		must(t, got[0].Close())
	}
	stale()
	served, err := Serve(at(path))
	must(t, err)
	if _, err := Serve(at(path)); err == nil || !strings.Contains(err.Error(), "it is in use") {
		t.Errorf("the socket of a daemon that lives: %v", err)
	}
	info, err := os.Stat(path)
	must(t, err)
	if info.Mode() != fs0660 {
		t.Errorf("mode %s", info.Mode())
	}
	c, err := net.Dial("unix", path)
	must(t, err)
	must(t, c.Close())
	must(t, served.Close())
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left behind: %v", err)
	}
	must(t, os.WriteFile(path, []byte("precious"), 0o600))
	if _, err := Serve(at(path)); err == nil || !strings.Contains(err.Error(), "no socket") {
		t.Errorf("a file was taken for a socket: %v", err)
	}
	if _, err := Serve(at(filepath.Join(dir, "none", "socket"))); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("no directory: %v", err)
	}
	if _, err := Serve(at(filepath.Join(dir, strings.Repeat("x", 108)))); err == nil {
		t.Error("a name too long for a socket was taken")
	}
}

const fs0660 = os.ModeSocket | 0o660

// Without the abstract socket the daemon goes on, and says so.
func TestAbstractSocketTaken(t *testing.T) {
	f := newFixture(t)
	taken, err := net.Listen("unix", SocketName(f.id, 1))
	must(t, err)
	defer taken.Close()
	var log strings.Builder
	s := f.serve(func(o *ServerOptions) { o.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
	must(t, s.Close())
	if !strings.Contains(log.String(), "level=WARN") || !strings.Contains(log.String(), SocketName(f.id, 1)) {
		t.Errorf("the log says %q", log.String())
	}
}
