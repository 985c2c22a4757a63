package membership_test

import (
	"context"
	"fmt"
	"log"
	"sync"
	"time"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/rebalance/membership"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

// crawler is a Work: a goroutine for each partition that is owned.
type crawler struct {
	mu      sync.Mutex
	stopped map[*membership.Ownership]chan struct{}
	began   chan struct{}
}

func (c *crawler) Snapshot(rebalance.Snapshot, registry.Snapshot) {}

func (c *crawler) Begin(list []*membership.Ownership) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, o := range list {
		done := make(chan struct{})
		c.stopped[o] = done
		go func() {
			defer close(done)
			c.crawl(o)
		}()
	}
}

func (c *crawler) crawl(o *membership.Ownership) {
	fmt.Printf("working on %s of %s\n", o.Partition.Name(), o.Partition.Topic)
	close(c.began)
	for o.Alive() { // looked at before each effect that must not happen twice
		select {
		case <-o.Revoked(): // the step in hand was the last
			return
		case <-o.Context().Done():
			return
		case <-time.After(time.Millisecond):
		}
	}
}

func (c *crawler) Drain(o *membership.Ownership) bool {
	c.mu.Lock()
	done := c.stopped[o]
	c.mu.Unlock()
	select {
	case <-done:
		return true
	case <-o.Context().Done():
		return false
	}
}

func (c *crawler) Revoked(o *membership.Ownership) {
	c.forget(o)
	fmt.Println("given up", o.Partition.Name())
}

func (c *crawler) Lost(o *membership.Ownership, reason string) {
	c.forget(o)
	fmt.Println("lost", o.Partition.Name(), reason)
}

func (c *crawler) forget(o *membership.Ownership) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.stopped, o)
}

// The partitions of a topic without a log are divided among whatever processes join.
func Example() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	st := memory.New() // etcd.Open, in a real program
	var root registry.Root
	if _, err := registry.CreateTopic(ctx, st, root, registry.TopicSpec{Name: "shards", Partitions: 1, NoLog: true}, nil); err != nil {
		log.Fatal(err)
	}
	m, err := membership.New(membership.Config{Store: st, Root: root, Group: "crawl",
		Subscription: membership.Subscription{Topics: map[string]int32{"shards": 1}}})
	if err != nil {
		log.Fatal(err)
	}
	c := &crawler{stopped: map[*membership.Ownership]chan struct{}{}, began: make(chan struct{})}
	go func() {
		<-c.began
		cancel() // as a signal does
	}()
	fmt.Println(m.Run(ctx, c))
	// Output:
	// working on 0-0 of shards
	// given up 0-0
	// <nil>
}
