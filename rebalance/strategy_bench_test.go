package rebalance_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// largeGroup is one of topics with partitions each on so many brokers, and of members, in any order.
func largeGroup(strategy string, topics, partitions, members int, subscribes func(member int) map[string]int32) rebalance.Snapshot {
	r := rand.New(rand.NewPCG(1, 1))
	s := rebalance.Snapshot{Revision: 1, Topology: rebalance.Topology{}, Incarnations: map[string]int64{}}
	for i := range topics {
		topic := fmt.Sprintf("topic-%d", i)
		s.Incarnations[topic] = int64(i)
		for n := range partitions {
			s.Topology[topic] = append(s.Topology[topic], registry.Partition{Topic: topic, Home: int32(1 + r.IntN(100)), Number: int32(n)})
		}
		list := s.Topology[topic]
		r.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	}
	for i := range members {
		id := fmt.Sprintf("node-%d.example.org:%08x-0b0c-4d0e-8f10-%012x", r.IntN(1000), r.Uint32(), r.Uint64N(1<<48))
		s.Members = append(s.Members, rebalance.MemberInfo{ID: id, Strategies: []string{strategy, "range"}, Subscription: subscribes(i)})
	}
	return s
}

func subscribeAll(topics int) func(int) map[string]int32 {
	return func(int) map[string]int32 {
		all := map[string]int32{}
		for i := range topics {
			all[fmt.Sprintf("topic-%d", i)] = 1
		}
		return all
	}
}

// shared is one map for all: what a reader makes of one filter's text.
func shared(topics int) func(int) map[string]int32 {
	all := subscribeAll(topics)(0)
	return func(int) map[string]int32 { return all }
}

func benchmarkAssign(b *testing.B, s rebalance.Snapshot) {
	b.ReportAllocs()
	for b.Loop() {
		if _, err := rebalance.Assign(s); err != nil {
			b.Fatal(err)
		}
	}
}

// 100,000 partitions among 10,000 members; many topics among 100.
func BenchmarkAssign(b *testing.B) {
	for _, strategy := range []string{"range", "range-numeric", "roundrobin", "sticky"} {
		b.Run(strategy+"/large", func(b *testing.B) {
			benchmarkAssign(b, largeGroup(strategy, 1, 100_000, 10_000, shared(1)))
		})
		b.Run(strategy+"/large-unshared", func(b *testing.B) {
			benchmarkAssign(b, largeGroup(strategy, 1, 100_000, 10_000, subscribeAll(1)))
		})
		b.Run(strategy+"/topics", func(b *testing.B) {
			benchmarkAssign(b, largeGroup(strategy, 10_000, 10, 100, shared(10_000)))
		})
		b.Run(strategy+"/topics-unshared", func(b *testing.B) {
			benchmarkAssign(b, largeGroup(strategy, 10_000, 10, 100, subscribeAll(10_000)))
		})
	}
}

// One member leaves, or joins, or nothing changes.
func BenchmarkStickyChange(b *testing.B) {
	for name, s := range map[string]rebalance.Snapshot{
		"large":  largeGroup("sticky", 1, 100_000, 10_000, shared(1)),
		"topics": largeGroup("sticky", 10_000, 10, 100, shared(10_000)),
	} {
		left := s
		left.Members = slices.Clone(s.Members)[1:]
		all := s
		left.Target, all.Target = rebalance.NextTarget(s), rebalance.NextTarget(left)
		current := s
		current.Target = left.Target
		b.Run("leave/"+name, func(b *testing.B) { benchmarkAssign(b, left) })
		b.Run("join/"+name, func(b *testing.B) { benchmarkAssign(b, all) })
		b.Run("current/"+name, func(b *testing.B) { benchmarkAssign(b, current) })
	}
}

// Members that subscribe to different topics: each to some of them, with 1 or 2 streams.
func BenchmarkStickyDifferent(b *testing.B) {
	for _, c := range []struct{ topics, partitions, members, each int }{{20, 100, 200, 5}, {3, 30_000, 10_000, 2}, {1000, 10, 500, 500}} {
		r := rand.New(rand.NewPCG(1, 1))
		s := largeGroup("sticky", c.topics, c.partitions, c.members, func(int) map[string]int32 {
			sub := map[string]int32{}
			for len(sub) < c.each {
				sub[fmt.Sprintf("topic-%d", r.IntN(c.topics))] = int32(1 + r.IntN(2))
			}
			return sub
		})
		left := s
		left.Members = slices.Clone(s.Members)[1:]
		left.Target = rebalance.NextTarget(s)
		name := fmt.Sprintf("%d-of-%d-topics-%d-members", c.each, c.topics, c.members)
		b.Run("full/"+name, func(b *testing.B) { benchmarkAssign(b, s) })
		b.Run("leave/"+name, func(b *testing.B) { benchmarkAssign(b, left) })
	}
}

// The share of one member.
func BenchmarkOf(b *testing.B) {
	for name, s := range map[string]rebalance.Snapshot{
		"large":  largeGroup("range", 1, 100_000, 10_000, shared(1)),
		"topics": largeGroup("range", 10_000, 10, 100, shared(10_000)),
	} {
		a := assign(s.Topology, s.Members)
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				a.Of(s.Members[0].ID)
			}
		})
	}
}

func BenchmarkTargetRecord(b *testing.B) {
	t := rebalance.NextTarget(largeGroup("sticky", 1, 100_000, 1000, shared(1)))
	value, err := t.Encode()
	if err != nil {
		b.Fatal(err)
	}
	b.Run("encode", func(b *testing.B) {
		for b.Loop() {
			_, _ = t.Encode()
		}
	})
	b.Run("read", func(b *testing.B) {
		for b.Loop() {
			_, _ = rebalance.ReadTarget(registry.KV{Value: value})
		}
	})
}
