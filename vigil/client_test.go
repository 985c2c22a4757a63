//go:build linux

package vigil

import (
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/muster-io/muster/registry"
)

// asks is a client of this process, and what it was told.
func (f *fixture) asks(t *testing.T, o ClientOptions) (*Client, <-chan ClientEvent) {
	t.Helper()
	events := make(chan ClientEvent, 100)
	o.ClusterID, o.Listener = f.id, func(e ClientEvent) { events <- e }
	c := Ask(o)
	t.Cleanup(c.Close)
	c.Brokers([]int32{3, 1})
	return c, events
}

func told(t *testing.T, events <-chan ClientEvent, lease registry.LeaseID, watched bool) {
	t.Helper()
	if e := toldOf(t, events, lease); e.Watched != watched {
		t.Fatalf("%+v", e)
	}
}

func toldOf(t *testing.T, events <-chan ClientEvent, lease registry.LeaseID) ClientEvent {
	t.Helper()
	select {
	case e := <-events:
		if e.Lease != lease || e.Watched != (e.Reason == "") {
			t.Fatalf("%+v", e)
		}
		return e
	case <-deadline(t):
		t.Fatal("nothing is told")
	}
	return ClientEvent{}
}

// A session that is named before its registration stands is named again; one that is
// taken back is forgotten at once, and so are all with the client.
func TestClient(t *testing.T) {
	f := newFixture(t)
	s := f.serve()
	sessions := func(want int) {
		t.Helper()
		eventually(t, func() string {
			if s.Sessions() != want {
				return "the sessions are others"
			}
			return ""
		})
	}
	c, events := f.asks(t, ClientOptions{})
	a, lease := f.registered("a")
	b := wish{key("b"), NewSecret()}
	lb, err := f.st.Grant(t.Context(), lasting)
	must(t, err)
	c.Add(lease, a.key, a.secret)
	told(t, events, lease, true) // which keeps the connection
	c.Add(lb.ID, b.key, b.secret)
	told(t, events, lb.ID, false)
	must(t, putRegistration(t.Context(), f.st, b.key, lb.ID, b.secret))
	for { // it may have been named again before the registration stood
		e := toldOf(t, events, lb.ID)
		if e.Watched {
			if e.Broker != 1 {
				t.Errorf("%+v", e)
			}
			break
		}
	}
	sessions(2)
	c.Remove(lb.ID)
	sessions(1)
	c.Remove(lease)
	sessions(0)
	eventually(t, func() string {
		if s.Connections() != 0 {
			return "connected for nothing"
		}
		return ""
	})
	long := key(strings.Repeat("x", maxMessage))
	c.Add(lb.ID, long, b.secret)
	told(t, events, lb.ID, false)
	c.Add(lease, a.key, a.secret)
	told(t, events, lease, true)
	c.Close()
	told(t, events, lease, false)
	sessions(0)
	if !f.stands("a") || !f.stands("b") || len(f.results()) != 0 {
		t.Error("something was revoked")
	}
}

// A daemon of another cluster, or of another version, is not told a secret; nor is any other socket, where a
// file is given.
func TestClientOfAnotherCluster(t *testing.T) {
	f := newFixture(t)
	s := f.serve()
	path := filepath.Join(t.TempDir(), "socket")
	ln, err := net.Listen("unix", path)
	must(t, err)
	defer ln.Close()
	t.Setenv(PathVariable, path)
	c, _ := f.asks(t, ClientOptions{})
	a, lease := f.registered("a")
	c.Add(lease, a.key, a.secret)
	for _, g := range []greeting{{protocolVersion, "other", 1}, {protocolVersion, "", 1}, {protocolVersion + 1, f.id, 1}} {
		conn, err := ln.Accept()
		must(t, err)
		line, err := encodeLine(g)
		must(t, err)
		_, err = conn.Write(line)
		must(t, err)
		must(t, conn.SetReadDeadline(time.Now().Add(patience)))
		if said, err := io.ReadAll(conn); len(said) != 0 || err != nil {
			t.Errorf("it says %q, %v", said, err)
		}
		must(t, conn.Close())
	}
	if s.Connections() != 0 {
		t.Error("the usual socket is tried too")
	}
}

// failing is a Store whose calls fail for a while.
type failing struct {
	registry.Store
	mu     sync.Mutex
	txns   []error // of the next calls
	revoke []error
}

func take(mu *sync.Mutex, list *[]error) error {
	mu.Lock()
	defer mu.Unlock()
	if len(*list) == 0 {
		return nil
	}
	err := (*list)[0]
	*list = (*list)[1:]
	return err
}

func (s *failing) Txn(ctx context.Context, t registry.Txn) (registry.TxnResult, error) {
	if err := take(&s.mu, &s.txns); err != nil {
		return registry.TxnResult{}, err
	}
	return s.Store.Txn(ctx, t)
}

func (s *failing) Revoke(ctx context.Context, id registry.LeaseID) error {
	if err := take(&s.mu, &s.revoke); err != nil {
		return err
	}
	return s.Store.Revoke(ctx, id)
}

// What fails is tried again, unless it is not allowed.
func TestRevocationIsTriedAgain(t *testing.T) {
	f := newFixture(t)
	st := &failing{Store: f.st}
	s := f.serve(func(o *ServerOptions) { o.Store = st })
	a, lease := f.registered("a")
	b, leaseB := f.registered("b")
	away := errors.New("etcd is away")
	st.txns, st.revoke = []error{away}, []error{away, away}
	c := f.greeted(t)
	if c.add(lease, a.key, a.secret) || f.countRefused(RefusedStore) != 1 {
		t.Error("watched without a proof")
	}
	st.mu.Lock()
	st.txns = []error{away, away}
	st.mu.Unlock()
	s.settle([]session{{lease, a.key, a.secret.Notice()}}, &process{})
	f.gone("a")
	st.mu.Lock()
	st.revoke = []error{registry.ErrPermission}
	st.mu.Unlock()
	s.settle([]session{{leaseB, b.key, b.secret.Notice()}}, &process{})
	eventually(t, func() string {
		if n := f.results(); n[DeathFailed] != 1 || n[DeathRevoked] != 1 {
			return "not settled"
		}
		return ""
	})
	if !f.stands("b") {
		t.Error("revoked without a permission")
	}
}

// Whoever listens there and says nothing does not keep a client from its end.
func TestClientOfASilentDaemon(t *testing.T) {
	if !supported {
		t.Skip("only Linux can do it")
	}
	path := filepath.Join(t.TempDir(), "s")
	ln, err := net.Listen("unix", path)
	must(t, err)
	defer ln.Close()
	for range 20 {
		c := Ask(ClientOptions{ClusterID: "c", Path: path})
		c.Add(1, key("c"), NewSecret())
		conn, err := ln.Accept()
		must(t, err)
		began := time.Now()
		c.Close()
		if took := time.Since(began); took > greetLimit/2 {
			t.Fatalf("it took %s", took)
		}
		must(t, conn.Close())
	}
}
