package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/etcd"
)

// observer follows all keys of the group, over a connection of its own. An event
// counts from when it arrives; what it means is looked at later.
type observer struct {
	st         *etcd.Store
	root       registry.Root
	group      registry.GroupPaths
	topic      registry.KV
	partitions int
	cancel     context.CancelFunc
	work       sync.WaitGroup
	arrived    chan arrival
	settled    chan moments

	mu      sync.Mutex
	members map[string]bool // who is to share the partitions; nil: nothing is measured
	seen    moments

	// of the goroutine that looks
	revision int64
	ids      map[string]registry.KV
	owners   map[string]string
	target   *registry.KV
	due      map[string]string // owner key -> thread, as the strategy says; nil if not computed
}

type arrival struct {
	at time.Time
	registry.WatchResponse
}

// moments of one measurement.
type moments struct {
	registered     time.Time // the first registration
	lastRegistered time.Time
	settled        time.Time
	err            error
}

func openObserver(ctx context.Context, o options) (*observer, error) {
	st, err := open(ctx, o)
	if err != nil {
		return nil, err
	}
	w := &observer{st: st, group: registry.Root("").Group(o.group), arrived: make(chan arrival, 1<<16), settled: make(chan moments, 1),
		ids: map[string]registry.KV{}, owners: map[string]string{}}
	kv, revision, err := registry.GetKey(ctx, st, w.root.Topic(o.topic))
	if err == nil && kv == nil {
		err = fmt.Errorf("there is no topic %s", o.topic)
	}
	if err != nil {
		st.Close()
		return nil, err
	}
	w.topic = *kv
	name, rec, _, err := w.root.ParseTopic(*kv)
	if err != nil {
		st.Close()
		return nil, err
	}
	w.partitions = len(rec.List(name))
	old, _, err := registry.List(ctx, st, w.group.Prefix(), 0)
	if err == nil && len(old) > 0 {
		err = fmt.Errorf("group %s has %d keys already", o.group, len(old))
	}
	if err != nil {
		st.Close()
		return nil, err
	}
	ctx, w.cancel = context.WithCancel(context.WithoutCancel(ctx))
	events := st.Watch(ctx, w.group.Prefix(), revision+1)
	w.work.Go(func() {
		defer close(w.arrived)
		for r := range events {
			w.arrived <- arrival{time.Now(), r}
		}
	})
	w.work.Go(func() {
		for a := range w.arrived {
			w.look(a)
		}
	})
	return w, nil
}

// close ends the sessions of the members, whose processes are gone by now, so that
// they do not run out while something else is measured.
func (w *observer) close() error {
	w.cancel()
	w.work.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	leases := make(chan registry.LeaseID)
	errs := make([]error, 16)
	var revoking sync.WaitGroup
	for i := range errs {
		revoking.Go(func() {
			for lease := range leases {
				if err := w.st.Revoke(ctx, lease); err != nil && !errors.Is(err, registry.ErrLeaseNotFound) {
					errs[i] = err
				}
			}
		})
	}
	for _, kv := range w.ids {
		leases <- kv.Lease
	}
	close(leases)
	revoking.Wait()
	w.st.Close()
	return errors.Join(errs...)
}

// expect begins a measurement, which ends when these members share all partitions as
// their strategy says. It must be called before the change that is measured.
func (w *observer) expect(members map[string]bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.members, w.seen = maps.Clone(members), moments{}
}

// await returns what was seen by the end of the measurement.
func (w *observer) await(ctx context.Context, limit time.Duration, trouble <-chan error) (moments, error) {
	select {
	case m := <-w.settled:
		return m, m.err
	case err := <-trouble:
		return moments{}, err
	case <-time.After(limit):
		w.mu.Lock()
		defer w.mu.Unlock()
		return moments{}, fmt.Errorf("the group of %d has not settled after %s", len(w.members), limit)
	case <-ctx.Done():
		return moments{}, context.Cause(ctx)
	}
}

func (w *observer) look(a arrival) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if a.Err != nil {
		w.end(moments{err: fmt.Errorf("watch of the group: %w", a.Err)})
		return
	}
	for _, e := range a.Events {
		w.enter(a.at, e)
	}
	if len(a.Events) == 0 || w.members == nil || len(w.owners) != w.partitions || len(w.ids) != len(w.members) {
		return
	}
	ok, err := w.asDue()
	if err != nil {
		w.end(moments{err: err})
	} else if ok {
		w.seen.settled = a.at
		w.end(w.seen)
	}
}

func (w *observer) end(m moments) {
	if w.members == nil {
		return
	}
	w.members = nil
	w.settled <- m
}

// enter takes note of one event.
func (w *observer) enter(at time.Time, e registry.Event) {
	w.revision = e.ModRevision
	switch key := e.Key; {
	case strings.HasPrefix(key, w.group.Owners()):
		if e.Deleted {
			delete(w.owners, key)
		} else {
			w.owners[key] = string(e.Value)
		}
	case strings.HasPrefix(key, w.group.IDs()):
		w.due = nil
		if e.Deleted {
			delete(w.ids, key)
			return
		}
		w.ids[key] = e.KV
		if w.seen.registered.IsZero() {
			w.seen.registered = at
		}
		w.seen.lastRegistered = at
	case key == w.group.Target():
		w.due, w.target = nil, nil
		if !e.Deleted {
			w.target = &e.KV
		}
	}
}

// asDue tells whether all owner keys are those that the strategy says for the members
// that are expected.
func (w *observer) asDue() (bool, error) {
	for id := range w.members {
		if _, ok := w.ids[w.group.ID(id)]; !ok {
			return false, nil
		}
	}
	if w.due == nil {
		ids := slices.SortedFunc(maps.Values(w.ids), func(a, b registry.KV) int { return strings.Compare(a.Key, b.Key) })
		s, bad := rebalance.NewReader(w.root, w.group, "").Read(w.revision, ids, []registry.KV{w.topic}, w.target)
		a, err := rebalance.Assign(s)
		if err = errors.Join(append(bad, err)...); err != nil {
			return false, err
		}
		w.due = make(map[string]string, w.partitions)
		for p, thread := range a.All() {
			w.due[w.group.Owner(p)] = thread
		}
	}
	return maps.Equal(w.due, w.owners), nil
}
