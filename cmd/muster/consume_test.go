package main

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/muster-io/muster/rebalance/consumer"
	"github.com/muster-io/muster/registry"
)

// printed collects what a command prints, and tells when a line is there.
type printed struct {
	mu   sync.Mutex
	text strings.Builder
	more chan struct{}
}

func (p *printed) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case p.more <- struct{}{}:
	default:
	}
	return p.text.Write(b)
}

func (p *printed) String() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.text.String()
}

// muster consume with expressions reads what they choose, under Kafka's settings; with
// auto-commit off nothing of it is committed.
func TestConsumeIncludeExclude(t *testing.T) {
	st := openLive(t)
	var root registry.Root
	for _, topic := range []string{"inc.a", "inc.b", "inc.skip"} {
		if _, err := registry.CreateTopic(t.Context(), st, root, registry.TopicSpec{Name: topic, Partitions: 1, ReplicationFactor: 1}, []int32{1}); err != nil {
			t.Fatal(err)
		}
		awaitTopic(t, st, root, topic, 1)
		if status, _, stderr := ask(t, topic+"\n", "produce", "--topic", topic); status != 0 {
			t.Fatal(stderr)
		}
	}
	ctx, stop := context.WithTimeout(t.Context(), 2*time.Minute)
	defer stop()
	out, log := &printed{more: make(chan struct{}, 1)}, &printed{more: make(chan struct{}, 1)}
	done := make(chan int, 1)
	args := strings.Fields("muster consume --group inc --include inc\\..* --exclude .*skip --from-beginning --strategy sticky,range --streams 2" +
		" --set auto.commit.enable=false --set fetch.message.max.bytes=65536 --set queued.max.message.chunks=2 --set rebalance.max.retries=3 --etcd-endpoints " +
		live.daemon.EtcdEndpoints()[0])
	go func() { done <- run(ctx, args, strings.NewReader(""), out, log) }()
	for strings.Count(out.String(), "\n") < 2 {
		select {
		case <-out.more:
		case <-done:
			t.Fatalf("it has ended: %s", log)
		}
	}
	kvs, _, err := registry.List(t.Context(), st, root.Group("inc").IDs(), 0)
	if err != nil || len(kvs) != 1 {
		t.Fatalf("%d members: %v", len(kvs), err)
	}
	rec, err := registry.ParseConsumer(kvs[0])
	if want := `(?!(?:.*skip)$)(?:inc\..*)`; err != nil || rec.Pattern != registry.PatternWhiteList || rec.Subscription[want] != 2 ||
		strings.Join(rec.Strategy, " ") != "sticky range" {
		t.Errorf("registered as %+v: %v", rec, err)
	}
	stop()
	if status := <-done; status != 0 {
		t.Errorf("status %d: %s", status, log)
	}
	for _, line := range []string{"inc.a\n", "inc.b\n"} {
		if !strings.Contains(out.String(), line) {
			t.Errorf("printed %q", out)
		}
	}
	if strings.Contains(out.String(), "skip") {
		t.Errorf("printed what is excluded: %q", out)
	}
	kvs, _, err = registry.List(t.Context(), st, root.Group("inc").Offsets(), 0)
	if err != nil || len(kvs) != 0 {
		t.Errorf("%d offsets are committed: %v", len(kvs), err)
	}
}

// What Kafka's settings mean here.
func TestConsumerSettings(t *testing.T) {
	var cfg consumer.Config
	s := consumerSettings{cfg: &cfg, streams: 1}
	err := s.apply([]string{"rebalance.backoff.ms=500", "queued.max.message.chunks=3", "num.streams=4", "exclude.internal.topics=false",
		"partition.assignment.strategy=roundrobin, range", "auto.commit.enable=true", "auto.offset.reset=smallest", "consumer.id=x"})
	if err != nil || cfg.ComplaintPause != 2*time.Second || cfg.MaxBufferedBytes != 3<<20 || s.streams != 4 || !cfg.IncludeInternal ||
		len(cfg.Strategies) != 2 || cfg.ManualCommit || cfg.Reset != consumer.Smallest || cfg.ID != "x" {
		t.Errorf("%+v, %d streams: %v", cfg, s.streams, err)
	}
}
