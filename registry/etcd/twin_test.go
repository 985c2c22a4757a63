package etcd

import (
	"flag"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/muster-io/muster/registry/memory"
	"github.com/muster-io/muster/registry/storetest"
)

var (
	storeSeed  = flag.Uint64("store.seed", 0, "seed of the comparison of the twin in memory with etcd; 0 takes another each time")
	storeSteps = flag.Int("store.steps", 1000, "steps of that comparison")
)

// ownServer starts an etcd that only this test uses, and a Store on it.
func ownServer(t *testing.T) (*Server, *testStore) {
	t.Helper()
	server, err := StartServer(t.Context(), freePorts(t, t.TempDir()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Close)
	st, err := Open(t.Context(), Options{Endpoints: []string{server.Endpoint}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	return server, &testStore{st}
}

// The twin in memory gives the answers that etcd gives.
func TestTwin(t *testing.T) {
	t.Parallel()
	seed := *storeSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	_, st := ownServer(t)
	for range 3 { // so that the same revision is another number
		put(t, st, "/before", "")
	}
	began := time.Now()
	done, err := storetest.Compare(t.Context(), memory.New(), st, storetest.CompareOptions{Seed: seed, Steps: *storeSteps, Prefix: "/twin/"})
	if err != nil {
		t.Fatalf("store a is the twin, b is etcd; again with -store.seed=%d -store.steps=%d\n%v", seed, *storeSteps, err)
	}
	t.Logf("seed %d: %d steps in %s: %+v", seed, *storeSteps, time.Since(began).Round(time.Millisecond), done)
	if *storeSteps >= 1000 && (done.Revisions < 100 || done.Events < 300 || done.Refused < 50 || done.Compacted < 2 || done.Expired < 1) {
		t.Error("that proves little")
	}
}
