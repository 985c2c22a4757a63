package etcd

import (
	"context"
	"errors"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"

	"github.com/muster-io/muster/registry"
)

// enableAuth makes a server ask for users: root, and alice with her password "alice"
// who may read and write under /kc/.
func enableAuth(t *testing.T, endpoint string) {
	t.Helper()
	st, err := Open(t.Context(), Options{Endpoints: []string{endpoint}})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	c := st.Client()
	for _, f := range []func(ctx context.Context) error{
		func(ctx context.Context) error { _, err := c.UserAdd(ctx, "root", "root"); return err },
		func(ctx context.Context) error { _, err := c.UserGrantRole(ctx, "root", "root"); return err },
		func(ctx context.Context) error { _, err := c.RoleAdd(ctx, "kc"); return err },
		func(ctx context.Context) error {
			_, err := c.RoleGrantPermission(ctx, "kc", "/kc/", "/kc0", clientv3.PermissionType(clientv3.PermReadWrite))
			return err
		},
		func(ctx context.Context) error { _, err := c.UserAdd(ctx, "alice", "alice"); return err },
		func(ctx context.Context) error { _, err := c.UserGrantRole(ctx, "alice", "kc"); return err },
		func(ctx context.Context) error { _, err := c.AuthEnable(ctx); return err },
	} {
		if err := f(within(t, longEnough)); err != nil {
			t.Fatal(err)
		}
	}
}

// cheapBcrypt is the least cost: passwords are checked for each stream, and with the
// race detector each takes seconds.
const cheapBcrypt = 4

func openAs(t *testing.T, endpoint, user string) *Store {
	t.Helper()
	st, err := Open(t.Context(), Options{Endpoints: []string{endpoint}, User: user, Password: user})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	return st
}

// A restarted etcd knows no token any more: session, View and calls take new ones.
func TestRestartWithUsers(t *testing.T) {
	t.Parallel()
	const ttl = 20 * time.Second // a busy machine takes seconds for the restart
	o := freePorts(t, t.TempDir())
	o.bcryptCost = cheapBcrypt
	server, err := StartServer(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { server.Close() }()
	enableAuth(t, server.Endpoint)
	st := openAs(t, server.Endpoint, "alice")
	s, err := registry.OpenSession(t.Context(), st, registry.SessionOptions{TTL: ttl})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := registry.Register(t.Context(), st, s, "/kc/ids/a", []byte("1")); err != nil {
		t.Fatal(err)
	}
	v := openView(t, st, registry.ViewOptions{}, "/kc/ids/", "/kc/topics/")
	keys := st.WatchKey(t.Context(), "/kc/owner", v.Snapshot().Revision+1)
	for range 2 {
		server.Close()
		if server, err = StartServer(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		quiet := time.NewTimer(ttl + time.Second) // past the session's time to live
		select {
		case <-s.Done():
			t.Fatalf("session: %v", s.Err())
		case <-quiet.C:
		}
		put(t, st, "/kc/owner", "x")
		until(t, v, longEnough, at(put(t, st, "/kc/topics/t", "2")))
		select {
		case r := <-keys:
			if r.Err != nil {
				t.Fatalf("watch of a key: %v", r.Err)
			}
		case <-time.After(longEnough):
			t.Fatal("watch of a key is silent")
		}
	}
	if err := s.Close(within(t, longEnough)); err != nil {
		t.Error(err)
	}
	if _, err := st.Range(t.Context(), registry.RangeRequest{Key: "/other"}); !errors.Is(err, registry.ErrPermission) {
		t.Errorf("outside of the role: %v", err)
	}
	r, ok := <-st.Watch(within(t, longEnough), "/other/", 1)
	if !ok || !errors.Is(r.Err, registry.ErrPermission) {
		t.Errorf("watch outside of the role: %+v, %v", r, ok)
	}
}

// etcd forgets tokens that nobody uses, and asks a stream for the one it was opened
// with when a watch is added to it.
func TestTokenRunsOut(t *testing.T) {
	t.Parallel()
	o := freePorts(t, t.TempDir())
	o.bcryptCost = cheapBcrypt
	cfg, err := serverConfig(o)
	if err != nil {
		t.Fatal(err)
	}
	cfg.AuthTokenTTL = 1 // s
	cfg.LogLevel = "fatal"
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	<-e.Server.ReadyNotify()
	endpoint := cfg.AdvertiseClientUrls[0].String()
	enableAuth(t, endpoint)
	st := openAs(t, endpoint, "alice")
	first := st.Watch(t.Context(), "/kc/a", 1)
	firstKey := st.WatchKey(t.Context(), "/kc/a", 1)
	time.Sleep(3 * time.Second) // past the token; alone, the Store asks nothing meanwhile
	second := st.Watch(t.Context(), "/kc/b", 1)
	secondKey := st.WatchKey(t.Context(), "/kc/b", 1)
	txn(t, st, registry.Put("/kc/a", nil, 0), registry.Put("/kc/b", nil, 0))
	for name, ch := range map[string]<-chan registry.WatchResponse{"first": first, "second": second, "first of a key": firstKey, "second of a key": secondKey} {
		for seen := false; !seen; {
			select {
			case r := <-ch:
				if r.Err != nil {
					t.Fatalf("%s watch: %v", name, r.Err)
				}
				for _, e := range r.Events {
					seen = seen || !e.Deleted
				}
			case <-time.After(longEnough):
				t.Fatalf("%s watch is silent", name)
			}
		}
	}
}
