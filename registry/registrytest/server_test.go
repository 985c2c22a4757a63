package registrytest_test

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/registrytest"
)

func put(ctx context.Context, st registry.Store, value string) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	_, err := st.Txn(ctx, registry.Txn{Then: []registry.Op{registry.Put("/k", []byte(value), 0)}})
	return err
}

func want(t *testing.T, st registry.Store, value string) {
	t.Helper()
	kv, _, err := registry.GetKey(t.Context(), st, "/k")
	if err != nil || kv == nil || string(kv.Value) != value {
		t.Errorf("got %+v, error %v; want %q", kv, err, value)
	}
}

// Each has a registry of its own, and data survive a stop of the server.
func TestStart(t *testing.T) {
	a, b := registrytest.Start(t), registrytest.Start(t)
	for st, value := range map[*registrytest.Server]string{a: "a", b: "b"} {
		if err := put(t.Context(), st, value); err != nil {
			t.Fatal(err)
		}
	}
	a.StopServer()
	a.StopServer()
	limited, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, _, err := registry.GetKey(limited, a, "/k"); err == nil {
		t.Error("a stopped server answers")
	}
	for range 2 {
		if err := a.StartServer(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	want(t, a, "a")
	want(t, b, "b")
	if a.Endpoint == b.Endpoint {
		t.Error("one server for both")
	}
}

// Without a test: nothing is left after Close.
func TestOpenCleansUp(t *testing.T) {
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	st, err := registrytest.Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := put(t.Context(), st, "x"); err != nil {
		t.Error(err)
	}
	want(t, st, "x")
	if err := st.Close(); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(tmp); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, error %v", left, err)
	}
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := registrytest.Open(cancelled); err == nil {
		t.Error("opened under a context that had ended")
	}
	if left, err := os.ReadDir(tmp); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, error %v", left, err)
	}
}
