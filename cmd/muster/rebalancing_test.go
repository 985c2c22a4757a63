package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/muster-io/muster/inspect"
	"github.com/muster-io/muster/rebalance/consumer"
	"github.com/muster-io/muster/registry"
)

// On real etcd, with records that flow: a group that rebalances a hundred times,
// and a doctor that looks all the while, finds nothing.
func TestDoctorOfAGroupThatRebalances(t *testing.T) {
	st := openLive(t)
	var root registry.Root
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	if _, err := registry.CreateTopic(ctx, st, root, registry.TopicSpec{Name: "busy", Partitions: 8, ReplicationFactor: 1}, []int32{1}); err != nil {
		t.Fatal(err)
	}
	awaitTopic(t, st, root, "busy", 8)
	over, stopAll := context.WithCancel(ctx)
	produced := make(chan error, 1)
	go func() { produced <- produceUntil(over, "busy") }()
	examined := make(chan struct{})
	var examinations atomic.Int32
	unsettled := 0
	go func() {
		defer close(examined)
		for over.Err() == nil {
			d := &inspect.Doctor{Store: st, Root: root, Ask: inspect.Network, Settle: 5 * time.Second}
			r, err := d.Examine(ctx)
			if errors.Is(err, inspect.ErrSilent) {
				t.Log("an examination was given up: ", err)
				continue
			}
			if err != nil {
				t.Error(err)
				break
			}
			unsettled += r.Unsettled
			for _, f := range r.Findings {
				t.Errorf("false alarm at revision %d: %s %s: %s", r.Revision, f.Code, f.Key, f.What)
			}
			examinations.Add(1)
		}
	}()
	const seed = 7
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	type member struct {
		stop context.CancelFunc
		done chan error
	}
	var members []member
	end := func(m member) {
		m.stop()
		if err := <-m.done; err != nil {
			t.Error(err)
		}
	}
	for n := 0; n < 100 || examinations.Load() < 2 && ctx.Err() == nil && !t.Failed(); n++ {
		if len(members) < 2 || len(members) < 5 && rnd.IntN(2) == 0 {
			c, err := consumer.New(consumer.Config{Store: st, Group: "busy", Topics: map[string]int32{"busy": 2}, CommitInterval: 50 * time.Millisecond,
				SessionTimeout: registry.MinTTL, Reset: consumer.Smallest}, func(context.Context, *consumer.Record) error { return nil })
			if err != nil {
				t.Fatal(err)
			}
			running, stop := context.WithCancel(ctx)
			m := member{stop, make(chan error, 1)}
			go func() { m.done <- c.Run(running) }()
			members = append(members, m)
		} else {
			i := rnd.IntN(len(members))
			end(members[i])
			members = append(members[:i], members[i+1:]...)
		}
		time.Sleep(time.Duration(rnd.IntN(200)) * time.Millisecond)
	}
	stopAll()
	<-examined
	t.Logf("%d examinations; %d suspicions passed", examinations.Load(), unsettled)
	if ctx.Err() != nil {
		t.Errorf("only %d examinations", examinations.Load())
	}
	for _, m := range members {
		end(m)
	}
	if err := <-produced; err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// produceUntil writes records to all partitions until ctx ends.
func produceUntil(ctx context.Context, topic string) error {
	k, err := kgo.NewClient(kgo.SeedBrokers(live.daemon.Address()), kgo.RecordPartitioner(kgo.RoundRobinPartitioner()))
	if err != nil {
		return err
	}
	defer k.Close()
	for ctx.Err() == nil {
		for range 8 {
			k.Produce(ctx, &kgo.Record{Topic: topic, Value: []byte("x")}, nil)
		}
		if err := k.Flush(ctx); err != nil {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
	return nil
}
