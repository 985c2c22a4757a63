package etcd

import (
	"context"
	"flag"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/muster-io/muster/internal/freeport"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/storetest"
)

// shared is one server for all tests of the package that do not stop it.
var shared struct {
	once   sync.Once
	server *Server
	store  *testStore
	err    error
}

func TestMain(m *testing.M) {
	if options := os.Getenv(memberVariable); options != "" {
		os.Exit(serveMember(options))
	}
	beSideBySide()
	dir, err := os.MkdirTemp("", "muster-etcd-")
	if err != nil {
		panic(err)
	}
	sharedDir = dir
	code := m.Run()
	if shared.store != nil {
		shared.store.Close()
	}
	if shared.server != nil {
		shared.server.Close()
	}
	os.RemoveAll(dir)
	os.Exit(code)
}

var sharedDir string

// beSideBySide lets more tests run at a time than there are processors, unless that was
// chosen: most of them wait for members to be missed and for leases to run out.
func beSideBySide() {
	flag.Parse()
	chosen := false
	flag.Visit(func(f *flag.Flag) { chosen = chosen || f.Name == "test.parallel" })
	if !chosen {
		flag.Set("test.parallel", "4")
	}
}

// testStore is the Store with what storetest wants besides.
type testStore struct{ *Store }

func (s *testStore) Compact(revision int64) {
	if _, err := s.Client().Compact(context.Background(), revision); err != nil {
		panic(err)
	}
}

func open(t *testing.T) *testStore {
	t.Helper()
	shared.once.Do(func() {
		shared.server, shared.err = StartServer(t.Context(), freePorts(t, sharedDir))
		if shared.err != nil {
			return
		}
		var st *Store
		st, shared.err = Open(t.Context(), Options{Endpoints: []string{shared.server.Endpoint}})
		shared.store = &testStore{st}
	})
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return shared.store
}

func freePorts(t *testing.T, dir string) ServerOptions {
	t.Helper()
	return ServerOptions{Name: "test", Dir: dir, ListenClient: "http://" + freeport.Must(), ListenPeer: "http://" + freeport.Must()}
}

// longEnough bounds a wait for what is sure to come, on a machine that stands still for
// seconds too.
const longEnough = time.Minute

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func TestContract(t *testing.T) {
	storetest.Run(t, func(t *testing.T) registry.Store { return open(t) })
}
