package memory_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
	"github.com/muster-io/muster/registry/storetest"
)

// wrong is a store with one fault.
type wrong struct {
	*memory.Store
	txn      func(*registry.Txn)
	result   func(*registry.TxnResult)
	scan     func(*registry.RangeRequest)
	scanned  func(*registry.RangeResult)
	response func(*registry.WatchResponse)
	from     int64
	fromKey  int64
	ttl      time.Duration
	revoke   error
}

func (w *wrong) Txn(ctx context.Context, t registry.Txn) (registry.TxnResult, error) {
	if w.txn != nil {
		w.txn(&t)
	}
	res, err := w.Store.Txn(ctx, t)
	if w.result != nil {
		w.result(&res)
	}
	return res, err
}

func (w *wrong) Range(ctx context.Context, r registry.RangeRequest) (registry.RangeResult, error) {
	if w.scan != nil {
		w.scan(&r)
	}
	res, err := w.Store.Range(ctx, r)
	if w.scanned != nil {
		w.scanned(&res)
	}
	return res, err
}

func (w *wrong) Watch(ctx context.Context, prefix string, from int64) <-chan registry.WatchResponse {
	return w.pass(w.Store.Watch(ctx, prefix, from+w.from))
}

func (w *wrong) WatchKey(ctx context.Context, key string, from int64) <-chan registry.WatchResponse {
	return w.pass(w.Store.WatchKey(ctx, key, from+w.fromKey))
}

func (w *wrong) pass(in <-chan registry.WatchResponse) <-chan registry.WatchResponse {
	out := make(chan registry.WatchResponse, 100_000) // never full: Compare ends before that
	go func() {
		defer close(out)
		for r := range in {
			if w.response != nil {
				w.response(&r)
			}
			out <- r
		}
	}()
	return out
}

func (w *wrong) Grant(ctx context.Context, ttl time.Duration) (registry.Lease, error) {
	l, err := w.Store.Grant(ctx, ttl)
	l.TTL += w.ttl
	return l, err
}

func (w *wrong) Revoke(ctx context.Context, id registry.LeaseID) error {
	if err := w.Store.Revoke(ctx, id); w.revoke == nil || err == nil {
		return err
	}
	return w.revoke
}

// A store with any one of these faults is found out.
func TestCompareFindsDifferences(t *testing.T) {
	faults := map[string]*wrong{
		"a put loses its lease": {txn: func(t *registry.Txn) {
			for i := range t.Then {
				t.Then[i].Lease = 0
			}
		}},
		"conditions are inclusive": {txn: func(t *registry.Txn) {
			for i := range t.If {
				if t.If[i].Relation == registry.Less {
					t.If[i].Number++
				}
			}
		}},
		"the second condition is not looked at": {txn: func(t *registry.Txn) { t.If = t.If[:min(len(t.If), 1)] }},
		"an old result":                         {result: func(r *registry.TxnResult) { r.Revision -= min(r.Revision, 1) }},
		"always the present is read":            {scan: func(r *registry.RangeRequest) { r.Revision = 0 }},
		"a limit is one too high":               {scan: func(r *registry.RangeRequest) { r.Limit += min(r.Limit, 1) }},
		"after is not heeded":                   {scan: func(r *registry.RangeRequest) { r.After = "" }},
		"more is not told":                      {scanned: func(r *registry.RangeResult) { r.More = false }},
		"events without what was before": {response: func(r *registry.WatchResponse) {
			for i := range r.Events {
				r.Events[i].Previous = nil
			}
		}},
		"the first event of two is lost": {response: func(r *registry.WatchResponse) {
			if len(r.Events) > 1 {
				r.Events = r.Events[1:]
			}
		}},
		"a watch begins late":          {from: 1},
		"a watch begins early":         {from: -1},
		"a watch of a key begins late": {fromKey: 1},
		"a lease lives longer":         {ttl: time.Second},
		"an unknown error":             {revoke: context.DeadlineExceeded},
		"progress overtakes events":    {response: func(r *registry.WatchResponse) { r.Revision += int64(len(r.Events)) }},
	}
	compare := func(t *testing.T, st registry.Store) (err error) {
		synctest.Test(t, func(t *testing.T) {
			_, err = storetest.Compare(t.Context(), memory.New(), st, storetest.CompareOptions{Seed: 1, Steps: 800, Prefix: "/c/"})
		})
		return err
	}
	if err := compare(t, memory.New()); err != nil {
		t.Errorf("two of a kind: %v", err)
	}
	for name, st := range faults {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				st.Store = memory.New()
				_, err := storetest.Compare(t.Context(), memory.New(), st, storetest.CompareOptions{Seed: 1, Steps: 800, Prefix: "/c/"})
				if err == nil {
					t.Error("not found")
				}
			})
		})
	}
}
