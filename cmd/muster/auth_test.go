package main

import (
	"bytes"
	"context"
	"encoding/json"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"

	"github.com/muster-io/muster/internal/freeport"
	"github.com/muster-io/muster/registry/etcd"
)

// guarded is an etcd that wants users: alice may read and write under /kc/prod/, bob
// may read there, and neither may do anything elsewhere.
type guarded struct {
	t        *testing.T
	endpoint string
	dir      string
}

func newGuarded(t *testing.T) *guarded {
	t.Helper()
	g := &guarded{t: t, dir: t.TempDir()}
	g.endpoint = startGuarded(t, filepath.Join(g.dir, "etcd"))
	st, err := etcd.Open(t.Context(), etcd.Options{Endpoints: []string{g.endpoint}})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	c := st.Client()
	must := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	ctx := t.Context()
	must(c.UserAdd(ctx, "root", "root"))
	must(c.UserGrantRole(ctx, "root", "root"))
	for user, kind := range map[string]clientv3.PermissionType{"alice": clientv3.PermissionType(clientv3.PermReadWrite), "bob": clientv3.PermissionType(clientv3.PermRead)} {
		must(c.RoleAdd(ctx, user))
		must(c.RoleGrantPermission(ctx, user, "/kc/prod/", "/kc/prod0", kind))
		must(c.UserAdd(ctx, user, user+"'s"))
		must(c.UserGrantRole(ctx, user, user))
		write(t, filepath.Join(g.dir, user), user+"'s\n")
	}
	must(c.AuthEnable(ctx))
	return g
}

// startGuarded starts an etcd in which passwords cost little: each command here is
// another client, and under the race detector a check takes seconds otherwise.
func startGuarded(t *testing.T, dir string) (endpoint string) {
	t.Helper()
	client, peer := url.URL{Scheme: "http", Host: freeport.Must()}, url.URL{Scheme: "http", Host: freeport.Must()}
	cfg := embed.NewConfig()
	cfg.Name, cfg.Dir, cfg.BcryptCost = "guarded", dir, 4
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	cfg.InitialCluster = "guarded=" + peer.String()
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	select {
	case <-e.Server.ReadyNotify():
	case <-time.After(time.Minute):
		t.Fatal("etcd is not ready")
	}
	return client.String()
}

// as adds a user to a command line.
func (g *guarded) as(user string, args ...string) []string {
	flag := "--etcd-endpoints"
	if args[0] == "server" {
		flag = "--etcd-external"
	}
	return append(args, flag, g.endpoint, "--etcd-user", user, "--etcd-password-file", filepath.Join(g.dir, user), "--registry-root", "/kc/prod")
}

// output is what a command that goes on has printed so far.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

// start runs a command until the test ends and waits until it has printed something.
// What it returns waits for more.
func (g *guarded) start(prints string, args ...string) (await func(prints string)) {
	g.t.Helper()
	var out, errOut output
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan int, 1)
	go func() { ended <- run(ctx, append([]string{"muster"}, args...), strings.NewReader(""), &out, &errOut) }()
	g.t.Cleanup(func() {
		cancel()
		if status := <-ended; status != 0 {
			g.t.Errorf("%s: status %d: %s", args[0], status, errOut.String())
		}
	})
	await = func(prints string) {
		g.t.Helper()
		for deadline := time.Now().Add(time.Minute); !strings.Contains(out.String()+errOut.String(), prints); time.Sleep(20 * time.Millisecond) {
			if time.Now().After(deadline) {
				g.t.Fatalf("%s has not printed %q: %s%s", args[0], prints, out.String(), errOut.String())
			}
		}
	}
	await(prints)
	return await
}

// callSoon is call for what is to be refused at once and not after some tries. A machine
// that stands still may need a second attempt for that.
func callSoon(t *testing.T, soon time.Duration, args ...string) (status int, stderr string, took time.Duration) {
	t.Helper()
	for range 5 {
		began := time.Now()
		status, _, stderr = call(t, args...)
		if took = time.Since(began); took <= soon {
			break
		}
	}
	return status, stderr, took
}

// field case 59: with a role for one prefix only everything works under that root;
// without the right to write what reads works, and what writes fails at once, saying
// what and why.
func TestLeastPrivilege(t *testing.T) {
	g := newGuarded(t)
	g.start("ready", append(g.as("alice", "server"), "--data-dir", filepath.Join(g.dir, "data"), "--listen", "127.0.0.1:0")...)
	does := func(user string, args ...string) string {
		t.Helper()
		status, out, stderr := call(t, g.as(user, args...)...)
		if status != 0 {
			t.Errorf("%s: %v: status %d: %s", user, args, status, stderr)
		}
		return out
	}
	does("alice", "topics", "create", "orders", "--partitions", "120")
	write(t, filepath.Join(g.dir, "record"), "hello")
	var out bytes.Buffer
	if status := run(t.Context(), append([]string{"muster"}, g.as("alice", "produce", "--topic", "orders")...), strings.NewReader("hello\n"), &out, &out); status != 0 {
		t.Fatalf("produce: %s", out.String())
	}
	g.start("hello", g.as("alice", "consume", "--group", "g", "--topic", "orders", "--from-beginning", "--format", "%s\n")...)

	for _, user := range []string{"alice", "bob"} {
		for _, args := range [][]string{
			{"topics", "list"}, {"topics", "describe", "orders"},
			{"groups", "list"}, {"groups", "describe", "g"},
			{"registry", "tree"}, {"registry", "ls"}, {"registry", "ls", "/consumers/g"}, {"registry", "get", "/brokers/ids/1"},
			{"brokers", "list"}, {"brokers", "describe", "1"}, {"registry", "doctor"}, {"registry", "backup"},
		} {
			if does(user, args...) == "" {
				t.Errorf("%s: %v prints nothing", user, args)
			}
		}
		var rows struct {
			Partitions []struct{ Partition int }
		}
		text := does(user, "topics", "describe", "orders", "-o", "json")
		if err := json.Unmarshal([]byte(text), &rows); err != nil || len(rows.Partitions) != 120 {
			t.Errorf("%s: describe lists %d partitions of 120, error %v: %.200s", user, len(rows.Partitions), err, text)
		}
	}

	// A group that nobody is in, for its deletion.
	idle, stop := context.WithTimeout(t.Context(), 2*time.Minute)
	defer stop()
	var said output
	ended := make(chan int, 1)
	go func() {
		ended <- run(idle, append([]string{"muster"}, g.as("alice", "consume", "--group", "idle", "--topic", "orders")...), strings.NewReader(""), &said, &said)
	}()
	// Its first commits, of where it begins, are what makes the group last.
	for !strings.Contains(said.String(), "no offset was committed") && idle.Err() == nil {
		time.Sleep(20 * time.Millisecond)
	}
	stop()
	if status := <-ended; status != 0 {
		t.Errorf("consume: status %d: %s", status, said.String())
	}
	refused := func(user, says string, args ...string) {
		t.Helper()
		status, stderr, took := callSoon(t, 5*time.Second, g.as(user, args...)...)
		t.Logf("%s: %s: after %s: %s", user, strings.Join(args, " "), took.Round(time.Millisecond), stderr)
		if status != 1 || !strings.Contains(stderr, "permission denied") || !strings.Contains(stderr, says) || took > 5*time.Second {
			t.Errorf("%s: %v: status %d after %s, want 1 and %q: %s", user, args, status, took, says, stderr)
		}
	}
	refused("bob", "create topic other", "topics", "create", "other", "--partitions", "1")
	refused("bob", "delete group g0", "groups", "delete", "g0")
	refused("bob", "orders", "topics", "alter", "orders", "--partitions", "121")
	refused("bob", "orders", "topics", "alter", "orders", "--config", "retention.ms=1000")
	refused("bob", "orders", "topics", "delete", "orders")
	refused("bob", "idle", "groups", "delete", "idle")
	refused("bob", "register", "consume", "--group", "g2", "--topic", "orders")
	refused("bob", "cluster id", "server", "--data-dir", filepath.Join(g.dir, "data2"), "--listen", "127.0.0.1:0", "--broker-id", "2")
	backup := filepath.Join(g.dir, "backup")
	does("bob", "registry", "backup", "--file", backup)
	refused("bob", "restore to /kc/prod", "registry", "restore", backup)
	status, _, stderr := call(t, g.as("alice", "registry", "restore", backup)...)
	if status != 1 || !strings.Contains(stderr, "is not empty") {
		t.Errorf("restore onto a live registry: status %d: %s", status, stderr)
	}
	await := g.start("watching", g.as("bob", "registry", "watch")...)
	does("alice", "topics", "create", "brief", "--partitions", "2")
	does("alice", "topics", "alter", "brief", "--partitions", "3", "--config", "retention.ms=100000")
	await("brief")
	does("alice", "topics", "delete", "brief")
	does("alice", "groups", "delete", "idle")
	outside := func(args []string) []string { return append(args, "--registry-root", "/kc") }
	status, _, stderr = call(t, outside(g.as("alice", "topics", "list"))...)
	if status != 1 || !strings.Contains(stderr, "permission denied") {
		t.Errorf("outside the role: status %d: %s", status, stderr)
	}
}

// A wrong password, or none where one is wanted, is said at once.
func TestWrongPassword(t *testing.T) {
	g := newGuarded(t)
	wrong := filepath.Join(g.dir, "wrong")
	write(t, wrong, "wrong")
	for name, c := range map[string]struct {
		args []string
		says string
	}{
		"wrong password": {[]string{"--etcd-user", "alice", "--etcd-password-file", wrong}, `user "alice" is refused`},
		"unknown user":   {[]string{"--etcd-user", "nobody", "--etcd-password-file", wrong}, `user "nobody" is refused`},
		"no user":        {nil, "it wants a user"},
		"no password":    {[]string{"--etcd-user", "alice"}, "--etcd-password-file"},
	} {
		const soon = 4 * time.Second
		status, stderr, took := callSoon(t, soon, append([]string{"topics", "list", "--etcd-endpoints", g.endpoint, "--registry-root", "/kc/prod"}, c.args...)...)
		t.Logf("%s: after %s: %s", name, took.Round(time.Millisecond), stderr)
		if status != 1 || !strings.Contains(stderr, c.says) || took > soon {
			t.Errorf("%s: status %d after %s, want %q: %s", name, status, took, c.says, stderr)
		}
	}
}
