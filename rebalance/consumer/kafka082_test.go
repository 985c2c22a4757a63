package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/muster-io/muster/rebalance/consumer"
	"github.com/muster-io/muster/registry"
)

// What Kafka 0.8.2 did wrong and a consumer of ours must not do; the numbers are the
// rows of docs/kafka-0.8.2.md.

// A last commit that cannot be made bounds a stop by LeaveTimeout and does not keep it
// from leaving: no key and no lease stay behind though the process lives, and Run says so.
func TestF12(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	ps := createTopic(t, topic, 2)
	produce(t, topic, 2, 0, 5)
	st := &failing{Store: shared.store, prefix: root.Group(group).Offsets()}
	s := newSequence(t)
	var lease registry.LeaseID
	c := start(t, consumer.Config{ID: "c", Group: group, Store: st, Topics: map[string]int32{topic: 1}, Reset: consumer.Smallest,
		SessionTimeout: time.Minute, LeaveTimeout: 300 * time.Millisecond,
		Listener: consumer.Listener{Registered: func(_ string, l registry.LeaseID) { lease = l }}}, s.handle)
	committedAs(t, group, ps, "5")
	st.fail.Store(true)
	produce(t, topic, 2, 5, 5)
	s.reach(ps, 10)
	eventually(t, func() string { // at the interval; the stop may be too short for another attempt
		if st.failed.Load() == 0 {
			return "no commit has failed"
		}
		return ""
	})
	c.stop(t)
	if c.err == nil {
		t.Error("stopped without a word of what is not committed")
	}
	kvs, _, err := registry.List(t.Context(), shared.store, root.Group(group).IDs(), 0)
	must(t, err)
	if n := len(owners(t, group)); n != 0 || len(kvs) != 0 {
		t.Errorf("left behind: %d owner keys, registrations %v", n, kvs)
	}
	if left, err := shared.store.Remaining(t.Context(), lease); !errors.Is(err, registry.ErrLeaseNotFound) {
		t.Errorf("the lease has %s left: %v", left, err)
	}
}

// While a partition that is to move cannot yet, those that do not move are handed over
// as before: none is given up, begun anew, or read again.
func TestF14(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	ps := createTopic(t, topic, 4)
	s := newSequence(t)
	var mu sync.Mutex
	told := map[string]int{}
	note := func(what string, p registry.Partition) {
		mu.Lock()
		defer mu.Unlock()
		told[fmt.Sprint(what, " ", p.Number)]++
	}
	inHand, finish := make(chan struct{}), make(chan struct{})
	a := start(t, consumer.Config{ID: "a", Group: group, Topics: map[string]int32{topic: 2}, Reset: consumer.Smallest, Listener: consumer.Listener{
		Assigned: func(_ context.Context, a consumer.Assignment) { note("assigned", a.Partition) },
		Revoked:  func(p registry.Partition, _ int64) { note("revoked", p) },
		Lost:     func(p registry.Partition, _ string) { note("lost", p) },
	}}, func(ctx context.Context, r *consumer.Record) error {
		if r.Partition == ps[3] && r.Offset == 9 {
			close(inHand)
			<-finish
		}
		return s.handle(ctx, r)
	})
	produce(t, topic, 4, 0, 10)
	<-inHand
	// Streams a-0 and a-1 have two partitions each; then a-0 has 0 and 1, a-1 has 2, b-0 has 3.
	waits := make(chan string, 10)
	b := start(t, consumer.Config{ID: "b", Group: group, Topics: map[string]int32{topic: 1}, Reset: consumer.Smallest,
		Listener: consumer.Listener{Waiting: func(p registry.Partition, holder string) { waits <- fmt.Sprint(p.Number, " held by ", holder) }}}, s.handle)
	if got := <-waits; got != "3 held by a-1" {
		t.Errorf("b waits for %s", got)
	}
	produce(t, topic, 4, 10, 500)
	s.reach(ps[:2], 510)
	close(finish)
	s.reach(ps, 510)
	mu.Lock()
	if got := fmt.Sprint(told); got != "map[assigned 0:1 assigned 1:1 assigned 2:1 assigned 3:1 revoked 3:1]" {
		t.Errorf("a was told: %s", got)
	}
	mu.Unlock()
	a.stop(t)
	b.stop(t)
	must(t, a.err)
	must(t, b.err)
	committedAs(t, group, ps, "510")
}

// A partition that a topic gets while nobody of the group is there to see it: what was
// written to it before its first fetch is read, though the policy is largest.
func TestF38(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	createTopic(t, topic, 1)
	produce(t, topic, 1, 0, 5)
	cfg := consumer.Config{ID: "c", Group: group, Topics: map[string]int32{topic: 1}, Reset: consumer.Largest}
	begun := make(chan int64, 10)
	cfg.Listener.Assigned = func(_ context.Context, a consumer.Assignment) { begun <- a.Offset }
	c := start(t, cfg, func(context.Context, *consumer.Record) error { return nil })
	if at := <-begun; at != 5 {
		t.Errorf("the first partition begins at %d", at)
	}
	c.stop(t)
	must(t, c.err)
	rec, err := registry.AddPartitions(t.Context(), shared.store, root, topic, 2, []int32{1})
	must(t, err)
	eventually(t, func() string { // the daemon shows it a moment later
		if err := newProducer(t).ProduceSync(t.Context(), &kgo.Record{Topic: topic, Partition: 1, Value: []byte("0")}).FirstErr(); err != nil {
			return err.Error()
		}
		return ""
	})
	produce(t, topic, 2, 1, 6)
	s := newSequence(t)
	ps := rec.List(topic)
	s.from(ps[0], 5)
	cfg.Listener = consumer.Listener{}
	start(t, cfg, func(ctx context.Context, r *consumer.Record) error {
		if r.Partition == ps[0] {
			return nil
		}
		return s.handle(ctx, r)
	})
	s.reach(ps[1:], 7)
}
