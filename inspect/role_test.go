package inspect_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-io/muster/inspect"
	"github.com/muster-io/muster/rebalance/groups"
	"github.com/muster-io/muster/registry"
)

// within notes every key that is asked for outside the root, as a role that is
// limited to the root would refuse it.
type within struct {
	registry.Store
	mu      sync.Mutex
	outside []string
}

func (w *within) see(key string) {
	if !strings.HasPrefix(key, root.Prefix()) {
		w.mu.Lock()
		w.outside = append(w.outside, key)
		w.mu.Unlock()
	}
}

func (w *within) Range(ctx context.Context, r registry.RangeRequest) (registry.RangeResult, error) {
	w.see(r.Key)
	return w.Store.Range(ctx, r)
}

func (w *within) Watch(ctx context.Context, prefix string, from int64) <-chan registry.WatchResponse {
	w.see(prefix)
	return w.Store.Watch(ctx, prefix, from)
}

func (w *within) Txn(ctx context.Context, t registry.Txn) (registry.TxnResult, error) {
	for _, c := range t.If {
		w.see(c.Key)
	}
	for _, o := range append(t.Then, t.Else...) {
		w.see(o.Key)
	}
	return w.Store.Txn(ctx, t)
}

// Field case 59: whoever looks inside stays within the root.
func TestCase59(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		st := &within{Store: w.st}
		w.put("/consumers/shop/owners/orders/1-0", "ghost-0", w.grant())
		d := w.doctor()
		d.Store = st
		r := w.examine(d)
		if errs := d.Repair(t.Context(), r, inspect.Repairable(r.Findings, nil)); len(errs) > 0 || len(r.Findings) == 0 {
			t.Fatal(errs, found(r))
		}
		for _, path := range []string{"", "/consumers/shop"} {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			f := inspect.Follower{Store: st, Root: root, Path: path}
			if err := f.Follow(ctx, func(time.Time, inspect.Line) bool { return true }); err != nil {
				t.Error(err)
			}
			cancel()
		}
		if _, err := inspect.BrokerTopics(t.Context(), st, root, 1); err != nil {
			t.Error(err)
		}
		if _, err := groups.Delete(t.Context(), st, root, "nosuch"); err == nil {
			t.Error("deleted")
		}
		if len(st.outside) > 0 {
			t.Errorf("asked for %q", st.outside)
		}
	})
}
