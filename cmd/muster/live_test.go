package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/muster-io/muster/broker"
	"github.com/muster-io/muster/internal/freeport"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/etcd"
)

// live is a daemon with its etcd, both real, shared by the tests that need one;
// each has a root of its own where it plants something.
var live struct {
	once   sync.Once
	daemon *broker.Daemon
	store  *etcd.Store
	err    error
}

func TestMain(m *testing.M) {
	if os.Getenv(asMuster) != "" {
		main()
		return
	}
	dir, err := os.MkdirTemp("", "muster-cmd-")
	if err != nil {
		panic(err)
	}
	liveDir = dir
	code := m.Run()
	if live.store != nil {
		live.store.Close()
	}
	if live.daemon != nil {
		live.daemon.Close()
	}
	os.RemoveAll(dir)
	os.Exit(code)
}

// asMuster in the environment has the test binary be the command itself, for tests
// with processes that are stopped and killed.
const asMuster = "MUSTER_TEST_AS_MUSTER"

var liveDir string

func openLive(t *testing.T) registry.Store {
	t.Helper()
	live.once.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		live.daemon, live.err = broker.Start(ctx, broker.Config{ID: 1, DataDir: liveDir, Listen: "127.0.0.1:0", SessionTimeout: registry.MaxTTL,
			EtcdListenClient: "http://" + freeport.Must(), EtcdListenPeer: "http://" + freeport.Must()})
		if live.err == nil {
			live.store, live.err = etcd.Open(ctx, etcd.Options{Endpoints: live.daemon.EtcdEndpoints()})
		}
	})
	if live.err != nil {
		t.Fatal(live.err)
	}
	return live.store
}

// ask runs a client command against the live daemon's etcd.
func ask(t *testing.T, stdin string, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, errOut bytes.Buffer
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	args = append([]string{"muster"}, append(args, "--etcd-endpoints", live.daemon.EtcdEndpoints()[0])...)
	status = run(ctx, args, strings.NewReader(stdin), &out, &errOut)
	return status, out.String(), errOut.String()
}

func parse[T any](t *testing.T, text string) (v T) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatalf("%v in %q", err, text)
	}
	return v
}

func plant(t *testing.T, st registry.Store, key, value string, lease registry.LeaseID) {
	t.Helper()
	if _, err := st.Txn(t.Context(), registry.Txn{Then: []registry.Op{registry.Put(key, []byte(value), lease)}}); err != nil {
		t.Fatal(err)
	}
}

// keptAlive is a lease of a process that lives and does nothing. No pause of the machine
// ends it.
func keptAlive(t *testing.T, st registry.Store) *registry.Session {
	t.Helper()
	return keptAliveFor(t, st, registry.MaxTTL)
}

// keptAliveFor is keptAlive for a test that waits until a lease would have run out.
func keptAliveFor(t *testing.T, st registry.Store, ttl time.Duration) *registry.Session {
	t.Helper()
	s, err := registry.OpenSession(t.Context(), st, registry.SessionOptions{TTL: ttl})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if err := s.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return s
}
