package consumer_test

import (
	"context"
	"fmt"
	"log"

	"github.com/muster-io/muster/rebalance/consumer"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/etcd"
)

// These are the examples of the README.

func ExampleNew() {
	ctx := context.Background()
	store, err := etcd.Open(ctx, etcd.Options{Endpoints: []string{"http://127.0.0.1:2379"}})
	if err != nil {
		log.Fatal(err)
	}
	defer store.Close()
	c, err := consumer.New(consumer.Config{
		Store:  store,
		Group:  "shop",
		Topics: map[string]int32{"orders": 1},
	}, func(ctx context.Context, r *consumer.Record) error {
		// One record at a time of each stream. Its offset is committed only after
		// this returned nil; ctx ends if the partition is lost meanwhile.
		return handle(ctx, r.Partition, r.Offset, r.Value)
	})
	if err != nil {
		log.Fatal(err)
	}
	err = c.Run(ctx) // until ctx ends; then it finishes, commits, releases and leaves
	if err != nil {
		log.Fatal(err)
	}
}

func handle(context.Context, registry.Partition, int64, []byte) error { return nil }

func ExampleConsumer_Streams() {
	ctx := context.Background()
	store, err := etcd.Open(ctx, etcd.Options{Endpoints: []string{"http://127.0.0.1:2379"}})
	if err != nil {
		log.Fatal(err)
	}
	defer store.Close()
	c, err := consumer.New(consumer.Config{Store: store, Group: "shop", Topics: map[string]int32{"orders": 1}}, nil)
	if err != nil {
		log.Fatal(err)
	}
	stopped := make(chan error, 1)
	go func() { stopped <- c.Run(ctx) }()
	for r := range c.Streams()[0].All(context.Background()) { // until the consumer has stopped
		fmt.Println(r.Partition, r.Offset, string(r.Value))
	}
	if err := <-stopped; err != nil {
		log.Fatal(err)
	}
}
