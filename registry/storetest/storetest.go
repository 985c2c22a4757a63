// Package storetest holds every registry.Store to the same contract: what package
// registry relies on, and so what the twin in memory must share with etcd.
package storetest

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/muster-io/muster/registry"
)

// A Case is one part of the contract. Test may use keys below prefix only, and
// takes time only by waiting on the store, so it can run in a synctest bubble.
type Case struct {
	Name string
	Test func(t *testing.T, st registry.Store, prefix string)
}

// Compacter is what a Store under test has besides, so that history can be cut.
type Compacter interface{ Compact(revision int64) }

// Cases returns the whole suite: first what a Store does, then what package
// registry makes of it.
func Cases() []Case {
	return append(append(append(txnCases(), rangeCases()...), append(watchCases(), leaseCases()...)...), append(claimCases(), historyCases()...)...)
}

// Run runs the suite, each case on a store from open and below a prefix of its own.
func Run(t *testing.T, open func(t *testing.T) registry.Store) {
	for _, c := range Cases() {
		t.Run(c.Name, func(t *testing.T) { c.Test(t, open(t), Prefix(t)) })
	}
}

var prefixes atomic.Int64

// Prefix is a part of the key space that only this run of the test uses.
func Prefix(t *testing.T) string { return fmt.Sprintf("/%s/%d/", t.Name(), prefixes.Add(1)) }

// patience bounds every wait; no case needs more than a lease's time to live, on a
// machine that does not stand still.
const patience = time.Minute

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

func must(t *testing.T, st registry.Store, txn registry.Txn) registry.TxnResult {
	t.Helper()
	res, err := st.Txn(within(t), txn)
	if err != nil {
		t.Fatalf("transaction: %v", err)
	}
	return res
}

// do runs operations without condition.
func do(t *testing.T, st registry.Store, ops ...registry.Op) registry.TxnResult {
	t.Helper()
	return must(t, st, registry.Txn{Then: ops})
}

func put(t *testing.T, st registry.Store, key, value string) int64 {
	t.Helper()
	return do(t, st, registry.Put(key, []byte(value), 0)).Revision
}

func get(t *testing.T, st registry.Store, key string) *registry.KV {
	t.Helper()
	kv, _, err := registry.GetKey(within(t), st, key)
	if err != nil {
		t.Fatal(err)
	}
	return kv
}

func grant(t *testing.T, st registry.Store, ttl time.Duration) registry.LeaseID {
	t.Helper()
	l, err := st.Grant(within(t), ttl)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_ = st.Revoke(ctx, l.ID) // mostly gone by now
	})
	return l.ID
}

func wantErr(t *testing.T, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("got error %v, want %v", err, want)
	}
}

func wantRefused(t *testing.T, st registry.Store, txn registry.Txn, why string) {
	t.Helper()
	if _, err := st.Txn(within(t), txn); err == nil {
		t.Fatalf("%s: the transaction was accepted", why)
	}
}

// watching is a watch read response by response.
type watching struct {
	t    *testing.T
	st   registry.Store
	ch   <-chan registry.WatchResponse
	ends context.CancelFunc
}

func watch(t *testing.T, st registry.Store, prefix string, from int64) *watching {
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	return &watching{t: t, st: st, ch: st.Watch(ctx, prefix, from), ends: cancel}
}

// next is the next response that is not progress.
func (w *watching) next() registry.WatchResponse {
	w.t.Helper()
	late := time.NewTimer(patience)
	defer late.Stop()
	for {
		select {
		case r, ok := <-w.ch:
			if !ok {
				w.t.Fatal("watch was closed")
			}
			if !r.Progress {
				return r
			}
		case <-late.C:
			w.t.Fatal("watch brings nothing")
		}
	}
}

// events reads until n events have come. None may be split from its revision.
func (w *watching) events(n int) []registry.Event {
	w.t.Helper()
	var all []registry.Event
	for len(all) < n {
		r := w.next()
		if r.Err != nil {
			w.t.Fatalf("watch: %v", r.Err)
		}
		if len(all) > 0 && len(r.Events) > 0 && all[len(all)-1].ModRevision >= r.Events[0].ModRevision {
			w.t.Fatalf("revision %d came in two responses, or out of order", r.Events[0].ModRevision)
		}
		all = append(all, r.Events...)
		if last := all[len(all)-1].ModRevision; r.Revision < last {
			w.t.Fatalf("response of revision %d has an event of %d", r.Revision, last)
		}
	}
	if len(all) != n {
		w.t.Fatalf("%d events, want %d: %v", len(all), n, spell(all))
	}
	return all
}

// closed waits until the watch has been closed.
func (w *watching) closed() {
	w.t.Helper()
	late := time.NewTimer(patience)
	defer late.Stop()
	for {
		select {
		case _, ok := <-w.ch:
			if !ok {
				return
			}
		case <-late.C:
			w.t.Fatal("watch was not closed")
		}
	}
}

// reaches asks for progress until the watch has said that it has come to revision.
func (w *watching) reaches(revision int64) {
	w.t.Helper()
	late := time.NewTimer(patience)
	defer late.Stop()
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	for {
		select {
		case r, ok := <-w.ch:
			if !ok || r.Err != nil {
				w.t.Fatalf("watch ended: %v", r.Err)
			}
			if r.Progress && r.Revision >= revision {
				return
			}
		case <-again.C:
			if err := w.st.RequestProgress(within(w.t)); err != nil {
				w.t.Fatal(err)
			}
		case <-late.C:
			w.t.Fatalf("no progress to revision %d", revision)
		}
	}
}

func spell(events []registry.Event) (out []string) {
	for _, e := range events {
		if e.Deleted {
			out = append(out, fmt.Sprintf("%d -%s", e.ModRevision, e.Key))
			continue
		}
		out = append(out, fmt.Sprintf("%d %s=%s", e.ModRevision, e.Key, e.Value))
	}
	return out
}
