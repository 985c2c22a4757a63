package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/rebalance/consumer"
	"github.com/muster-io/muster/registry"
)

// Streams of a consumer without a handler hand over each record once, in the order of
// its partition, and a stop commits what was consumed.
func TestStreams(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	ps := createTopic(t, topic, 4)
	produce(t, topic, 4, 0, 100)
	c := start(t, consumer.Config{Group: group, Topics: map[string]int32{topic: 2}, Reset: consumer.Smallest}, nil)
	s := newSequence(t)
	var readers sync.WaitGroup
	for _, stream := range c.Streams() {
		readers.Go(func() {
			for r := range stream.All(context.Background()) {
				if err := s.handle(context.Background(), r); err != nil {
					t.Error(err)
				}
			}
			if _, err := stream.Next(context.Background()); err != io.EOF {
				t.Errorf("after the end: %v", err)
			}
		})
	}
	s.reach(ps, 100)
	c.stop(t)
	must(t, c.err)
	readers.Wait()
	committedAs(t, group, ps, "100")
}

// A filter reads the topics that it chooses, those that come later from their start,
// and all share its streams; what is excluded is left alone.
func TestIncludeAndExclude(t *testing.T) {
	prefix, group := name(t, "t"), name(t, "g")
	first, left := createTopic(t, prefix+".a", 2), createTopic(t, prefix+".left", 2)
	produce(t, prefix+".a", 2, 0, 5)
	produce(t, prefix+".left", 2, 0, 5)
	s := newSequence(t)
	c := start(t, consumer.Config{ID: "c", Group: group, Include: prefix + ".*," + name(t, "none"), Exclude: `"` + prefix + `.l.*,x"`, Streams: 2,
		Reset: consumer.Smallest, CommitInterval: 20 * time.Millisecond}, s.handle)
	s.reach(first, 5)
	later := createTopic(t, prefix+".b", 2)
	served(t, prefix+".b")
	produce(t, prefix+".b", 2, 0, 3)
	s.reach(later, 3)
	committedAs(t, group, later, "3")
	committedAs(t, group, left, "none")
	ownedAs(t, group, prefix+".left", "")
	c.stop(t)
	must(t, c.err)
}

// Back to an offset: the records from there on come again, and the commit follows.
func TestSeekBack(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	ps := createTopic(t, topic, 1)
	produce(t, topic, 1, 0, 50)
	var mu sync.Mutex
	var got []int64
	c := start(t, consumer.Config{ID: "c", Group: group, Topics: map[string]int32{topic: 1}, Reset: consumer.Smallest,
		CommitInterval: 20 * time.Millisecond}, func(_ context.Context, r *consumer.Record) error {
		mu.Lock()
		defer mu.Unlock()
		got = append(got, r.Offset)
		return nil
	})
	committedAs(t, group, ps, "50")
	must(t, c.Pause(ps...))
	must(t, c.Seek(ps[0], 20))
	committedAs(t, group, ps, "20")
	must(t, c.Resume(ps...))
	committedAs(t, group, ps, "50")
	// Not in the log: the reset policy decides.
	must(t, c.Seek(ps[0], 1000))
	eventually(t, func() string {
		mu.Lock()
		defer mu.Unlock()
		if n := len(got); n < 130 {
			return fmt.Sprintf("%d records", n)
		}
		return ""
	})
	c.stop(t)
	must(t, c.err)
	for i, offset := range got {
		want := int64(i)
		switch {
		case i >= 80:
			want = int64(i - 80)
		case i >= 50:
			want = int64(i - 30)
		}
		if offset != want {
			t.Fatalf("record %d is %d, want %d", i, offset, want)
		}
	}
}

// With auto-commit off nothing is written but what is ordered; where nothing is
// ordered the next owner begins by the reset policy again.
func TestAutoCommitOff(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	ps := createTopic(t, topic, 2)
	produce(t, topic, 2, 0, 10)
	run := func(then func(c *running)) {
		s := newSequence(t)
		c := start(t, consumer.Config{ID: "c", Group: group, Topics: map[string]int32{topic: 2}, Reset: consumer.Smallest,
			ManualCommit: true, CommitInterval: 10 * time.Millisecond}, s.handle)
		s.reach(ps, 10)
		then(c)
		c.stop(t)
		must(t, c.err)
	}
	run(func(*running) {})
	committedAs(t, group, ps, "none")
	run(func(c *running) {
		for p, err := range c.Commit(t.Context(), map[registry.Partition]int64{ps[0]: 4, ps[1]: 4}) {
			if err != nil {
				t.Errorf("%s: %v", p, err)
			}
		}
	})
	committedAs(t, group, ps, "4")
	if err := (&consumer.Consumer{}).Seek(ps[0], 0); !errors.Is(err, consumer.ErrNotOwned) {
		t.Errorf("a consumer that never ran: %v", err)
	}
}

// A consumer of a topic without a log ends with an error that says so.
func TestTopicWithoutLog(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	_, err := registry.CreateTopic(t.Context(), shared.store, root,
		registry.TopicSpec{Name: topic, Partitions: 2, NoLog: true}, nil)
	must(t, err)
	c := start(t, consumer.Config{Group: group, Topics: map[string]int32{topic: 1}}, func(context.Context, *consumer.Record) error { return nil })
	c.wait(t)
	if !errors.Is(c.err, consumer.ErrNoLog) {
		t.Errorf("ended with %v", c.err)
	}
	if left := owners(t, group); len(left) != 0 {
		t.Errorf("owner keys left behind: %v", left)
	}
}

// Where a filter chooses such a topic among others, those are read all the same, and
// it is only owned.
func TestFilterWithATopicWithoutLog(t *testing.T) {
	prefix, group := name(t, "t"), name(t, "g")
	_, err := registry.CreateTopic(t.Context(), shared.store, root,
		registry.TopicSpec{Name: prefix + ".none", Partitions: 1, NoLog: true}, nil)
	must(t, err)
	ps := createTopic(t, prefix+".a", 1)
	produce(t, prefix+".a", 1, 0, 3)
	s := newSequence(t)
	var log logged
	c := start(t, consumer.Config{ID: "c", Group: group, Include: prefix + ".*", Reset: consumer.Smallest, Logger: log.logger()}, s.handle)
	s.reach(ps, 3)
	ownedAs(t, group, prefix+".none", "0:c")
	eventually(t, func() string { // the owner key comes first
		if !log.says("its topic has no log", prefix+".none") {
			return "no word of the topic that is not read"
		}
		return ""
	})
	c.stop(t)
	must(t, c.err)
	if left := owners(t, group); len(left) != 0 {
		t.Errorf("owner keys left behind: %v", left)
	}
}

// Ownership is told as it goes: assigned with a context and a token, revoked before
// the context ends, lost after.
func TestAssignedRevokedLost(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	p := createTopic(t, topic, 1)[0]
	type told struct {
		what string
		over bool // the context had ended by then
	}
	events := make(chan told, 10)
	var mu sync.Mutex
	var last context.Context
	var tokens []int64
	note := func(what string) {
		mu.Lock()
		defer mu.Unlock()
		events <- told{what, last.Err() != nil}
	}
	c := start(t, consumer.Config{ID: "c", Group: group, Topics: map[string]int32{topic: 1}, Listener: consumer.Listener{
		Assigned: func(ctx context.Context, a consumer.Assignment) {
			mu.Lock()
			last, tokens = ctx, append(tokens, a.Token)
			mu.Unlock()
			note("assigned")
		},
		Revoked: func(registry.Partition, int64) { note("revoked") },
		Lost:    func(registry.Partition, string) { note("lost") },
	}}, func(context.Context, *consumer.Record) error { return nil })
	expect := func(want told) {
		t.Helper()
		select {
		case got := <-events:
			if got != want {
				t.Errorf("told %+v, want %+v", got, want)
			}
		case <-time.After(patience):
			t.Fatalf("not told: %+v", want)
		}
	}
	expect(told{"assigned", false})
	if got := owners(t, group)[p].CreateRevision; got != tokens[0] {
		t.Errorf("token %d, the owner key is of %d", tokens[0], got)
	}
	must(t, shared.store.Revoke(t.Context(), owners(t, group)[p].Lease))
	expect(told{"lost", true})
	expect(told{"assigned", false})
	c.stop(t)
	expect(told{"revoked", false})
	if last.Err() == nil || tokens[1] <= tokens[0] {
		t.Errorf("in the end the context is %v, the tokens %v", last.Err(), tokens)
	}
}

func TestRefusedConfigs(t *testing.T) {
	good := consumer.Config{Store: shared.store, Group: "g", Topics: map[string]int32{"t": 1}}
	for name, spoil := range map[string]func(*consumer.Config){
		"topics and a filter":  func(c *consumer.Config) { c.Include = "t" },
		"neither":              func(c *consumer.Config) { c.Topics = nil },
		"half an expression":   func(c *consumer.Config) { c.Topics, c.Include, c.Exclude = nil, "a)(", "b" },
		"other half":           func(c *consumer.Config) { c.Topics, c.Include, c.Exclude = nil, "a", "b(" },
		"too many streams":     func(c *consumer.Config) { c.Topics, c.Include, c.Streams = nil, "a", registry.MaxStreams+1 },
		"strategy":             func(c *consumer.Config) { c.Strategies = []string{rebalance.StrategyRange, "best"} },
		"negative bytes":       func(c *consumer.Config) { c.MaxTotalBytes = -1 },
		"fetch of 2 GiB":       func(c *consumer.Config) { c.FetchBytes = 1 << 31 },
		"reset":                func(c *consumer.Config) { c.Reset = "earliest" },
		"negative leave":       func(c *consumer.Config) { c.LeaveTimeout = -1 },
		"session out of range": func(c *consumer.Config) { c.SessionTimeout = time.Hour },
	} {
		cfg := good
		spoil(&cfg)
		if _, err := consumer.New(cfg, nil); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if _, err := consumer.New(good, nil); err != nil {
		t.Error(err)
	}
}
