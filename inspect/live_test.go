package inspect_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-io/muster/inspect"
	"github.com/muster-io/muster/rebalance/consumer"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

// cuttable is the store as one process sees it; once cut off, that process can do
// nothing more, as if it were killed: its keys stay until its lease runs out.
type cuttable struct {
	registry.Store
	cut atomic.Bool
}

var errKilled = errors.New("killed")

func (c *cuttable) Txn(ctx context.Context, t registry.Txn) (registry.TxnResult, error) {
	if c.cut.Load() {
		return registry.TxnResult{}, errKilled
	}
	return c.Store.Txn(ctx, t)
}

func (c *cuttable) Revoke(ctx context.Context, id registry.LeaseID) error {
	if c.cut.Load() {
		return errKilled
	}
	return c.Store.Revoke(ctx, id)
}

func (c *cuttable) KeepAlive(ctx context.Context, id registry.LeaseID) (registry.KeepAliver, error) {
	if c.cut.Load() {
		return nil, errKilled
	}
	k, err := c.Store.KeepAlive(ctx, id)
	return cuttableKeepAlive{k, c}, err
}

type cuttableKeepAlive struct {
	registry.KeepAliver
	c *cuttable
}

func (k cuttableKeepAlive) Send() error {
	if k.c.cut.Load() {
		return errKilled
	}
	return k.KeepAliver.Send()
}

// process is a real consumer.
type process struct {
	store *cuttable
	lease atomic.Int64
	stop  context.CancelFunc
	done  chan struct{}
}

func startProcess(t *testing.T, st registry.Store, ttl time.Duration, topics map[string]int32) *process {
	p := &process{store: &cuttable{Store: st}, done: make(chan struct{})}
	c, err := consumer.New(consumer.Config{Store: p.store, Root: root, Group: "shop", Topics: topics, SessionTimeout: ttl,
		Listener: consumer.Listener{Registered: func(_ string, l registry.LeaseID) { p.lease.Store(int64(l)) }}},
		func(context.Context, *consumer.Record) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	p.stop = cancel
	go func() {
		defer close(p.done)
		_ = c.Run(ctx) // killed ones cannot leave in order
	}()
	return p
}

// A group that rebalances a hundred times, by members that come, leave, lose their
// session or are killed, while a topic comes, grows and goes: nothing is wrong with
// it at any time, though it often looks so. No broker is registered, so that no
// records flow; the members claim and release all the same.
func TestNoFalseAlarm(t *testing.T) {
	for seed := range uint64(3) {
		t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { rebalanceAndExamine(t, seed, 100) })
		})
	}
}

func rebalanceAndExamine(t *testing.T, seed uint64, rounds int) {
	rnd := rand.New(rand.NewPCG(seed, 1))
	st := memory.New()
	create(t, st, "t0", 16)
	create(t, st, "t1", 7)
	d := &inspect.Doctor{Store: st, Root: root, Ask: func(context.Context, inspect.Questions) inspect.Probes { return inspect.Probes{} }}
	d.Settle = 5 * time.Second // harder than the default
	// Each call takes its time, so that there is something to see in between.
	var mu sync.Mutex
	slow := rand.New(rand.NewPCG(seed, 2))
	st.SetHooks(memory.Hooks{Before: func(ctx context.Context, _ string) error {
		mu.Lock()
		pause := time.Duration(slow.IntN(200)) * time.Millisecond
		mu.Unlock()
		time.Sleep(pause)
		return ctx.Err()
	}})
	suspected := 0
	over, examined := make(chan struct{}), make(chan int)
	go func() {
		n := 0
		for ; ; n++ {
			select {
			case <-over:
				examined <- n
				return
			default:
			}
			suspected += noAlarm(t, d)
			time.Sleep(37 * time.Millisecond)
		}
	}()
	var running []*process
	start := func() {
		topics := map[string]int32{"t0": 1 + rnd.Int32N(2), "t1": 1, "later": 1}
		ttl := registry.MinTTL + time.Duration(rnd.IntN(8))*time.Second
		running = append(running, startProcess(t, st, ttl, topics))
	}
	end := func() *process {
		i := rnd.IntN(len(running))
		p := running[i]
		running = append(running[:i], running[i+1:]...)
		return p
	}
	var gone []*process
	for i := range rounds {
		switch n := rnd.IntN(10); {
		case i%10 == 9:
			changeTopic(t, st, rnd)
		case len(running) < 2 || n < 4 && len(running) < 6:
			start()
		case n < 7:
			p := end()
			p.stop()
			gone = append(gone, p)
		case n < 8:
			p := end()
			p.store.cut.Store(true)
			p.stop()
			gone = append(gone, p)
		default:
			st.Expire(registry.LeaseID(running[rnd.IntN(len(running))].lease.Load()))
		}
		// Sometimes longer than it takes a doctor to be sure.
		time.Sleep([]time.Duration{0, 50 * time.Millisecond, time.Second, 4 * time.Second, 13 * time.Second}[rnd.IntN(5)])
	}
	close(over)
	if n := <-examined; n < 20 || suspected < 10 {
		t.Errorf("only %d examinations, %d suspicions that passed", n, suspected)
	}
	for _, p := range append(gone, running...) {
		p.stop()
		<-p.done
	}
	time.Sleep(registry.MaxTTL)
	noAlarm(t, d)
}

// noAlarm examines. That no broker lives is so in this world. It returns how much
// looked wrong and was moving.
func noAlarm(t *testing.T, d *inspect.Doctor) int {
	t.Helper()
	r, err := d.Examine(t.Context())
	if err != nil {
		t.Error(err)
		return 0
	}
	for _, f := range r.Findings {
		if f.Code != inspect.CodeLeaderNotAlive {
			t.Errorf("revision %d: false alarm: %s %s: %s", r.Revision, f.Code, f.Key, f.What)
		}
	}
	return r.Unsettled
}

// changeTopic creates a topic that the members wait for, adds partitions to it, or
// deletes it.
func changeTopic(t *testing.T, st registry.Store, rnd *rand.Rand) {
	kv, _, err := registry.GetKey(t.Context(), st, root.Topic("later"))
	if err != nil {
		t.Fatal(err)
	}
	if kv == nil {
		create(t, st, "later", 150)
		return
	}
	_, rec, _, err := root.ParseTopic(*kv)
	if err == nil {
		if n := int32(len(rec.Partitions)); n < 300 && rnd.IntN(2) == 0 {
			_, err = registry.AddPartitions(t.Context(), st, root, "later", n+140, []int32{1})
		} else {
			_, err = registry.DeleteTopic(t.Context(), st, root, "later", registry.DeleteOptions{})
		}
	}
	if err != nil {
		t.Fatal(err)
	}
}

func create(t *testing.T, st registry.Store, topic string, partitions int32) {
	t.Helper()
	spec := registry.TopicSpec{Name: topic, Partitions: partitions, ReplicationFactor: 1}
	if _, err := registry.CreateTopic(t.Context(), st, root, spec, []int32{1}); err != nil {
		t.Fatal(err)
	}
}
