package registry_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
	"github.com/muster-io/muster/registry/storetest"
)

// measuredTwin is the twin as a measured Store, with what the contract's tests ask
// of it besides.
type measuredTwin struct {
	registry.Store
	twin *memory.Store
}

func (m measuredTwin) Compact(revision int64) { m.twin.Compact(revision) }

func measuredMemory(observe func(registry.Call)) measuredTwin {
	twin := memory.New()
	return measuredTwin{registry.Measured(twin, observe), twin}
}

// A Store that is measured is still a Store.
func TestMeasuredKeepsTheContract(t *testing.T) {
	for _, c := range storetest.Cases() {
		t.Run(c.Name, func(t *testing.T) {
			prefix := storetest.Prefix(t)
			synctest.Test(t, func(t *testing.T) { c.Test(t, measuredMemory(func(registry.Call) {}), prefix) })
		})
	}
}

// Every call is told of once, with its outcome.
func TestMeasuredTellsOfEveryCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var calls []string
		st := measuredMemory(func(c registry.Call) {
			mu.Lock()
			defer mu.Unlock()
			calls = append(calls, fmt.Sprint(c.Kind, " refused=", c.Refused, " err=", c.Err, " ", c.Duration))
		})
		ctx, cancel := context.WithCancel(t.Context())
		check := func(want ...string) {
			t.Helper()
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			slices.Sort(calls)
			if !slices.Equal(calls, want) {
				t.Errorf("got %q, want %q", calls, want)
			}
			calls = nil
		}
		create := registry.Txn{If: []registry.Cond{registry.Absent("/k")}, Then: []registry.Op{registry.Put("/k", nil, 0)}}
		for range 2 {
			if _, err := st.Txn(ctx, create); err != nil {
				t.Fatal(err)
			}
		}
		check("txn refused=false err=<nil> 0s", "txn refused=true err=<nil> 0s")
		if _, _, err := registry.GetKey(ctx, st, "/k"); err != nil {
			t.Fatal(err)
		}
		if err := st.RequestProgress(ctx); err != nil {
			t.Fatal(err)
		}
		check("progress refused=false err=<nil> 0s", "range refused=false err=<nil> 0s")
		lease, err := st.Grant(ctx, 5*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := st.Remaining(ctx, lease.ID); err != nil {
			t.Fatal(err)
		}
		if _, err := st.KeepAlive(ctx, lease.ID); err != nil {
			t.Fatal(err)
		}
		if err := st.Revoke(ctx, lease.ID); err != nil {
			t.Fatal(err)
		}
		if err := st.Revoke(ctx, lease.ID); !errors.Is(err, registry.ErrLeaseNotFound) {
			t.Fatal(err)
		}
		check("grant refused=false err=<nil> 0s", "keepalive refused=false err=<nil> 0s", "remaining refused=false err=<nil> 0s",
			"revoke refused=false err=<nil> 0s", "revoke refused=false err=lease not found 0s")
		st.WatchKey(ctx, "/k", 1)
		st.Compact(2)
		for range st.Watch(ctx, "/", 1) {
		}
		check("watch refused=false err=revision is compacted 0s")
		time.Sleep(3 * time.Second)
		cancel()
		check("watch refused=false err=context canceled 3s")
	})
}
