package groups_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/rebalance/groups"
	"github.com/muster-io/muster/registry"
)

// bigGroup is the keys of a stable group.
func bigGroup(members, partitions int) (keys, topics []registry.KV) {
	paths := root.Group("g")
	rec := registry.TopicRecord{Version: 1, Partitions: map[int32][]int32{}}
	for p := range partitions {
		rec.Partitions[int32(p)] = []int32{int32(p % 3)}
	}
	value, err := registry.Encode(rec)
	if err != nil {
		panic(err)
	}
	topics = []registry.KV{{Key: root.Topic("t"), Value: value, CreateRevision: 1, ModRevision: 1}}
	for m := range members {
		keys = append(keys, registry.KV{Key: paths.ID(fmt.Sprintf("m%05d", m)), Lease: 7, CreateRevision: 2, ModRevision: 2,
			Value: []byte(`{"version":1,"subscription":{"t":1},"pattern":"static","timestamp":"1","strategy":["range"]}`)})
	}
	p, _ := groups.NewPainter(root, "g").Paint(3, keys, topics)
	for partition, thread := range p.Due.All() {
		keys = append(keys, registry.KV{Key: paths.Owner(partition), Lease: 7, CreateRevision: 4, ModRevision: 4, Value: []byte(thread)})
	}
	return keys, topics
}

// What one change of a group costs whoever follows it.
func BenchmarkStep(b *testing.B) {
	for _, size := range []struct{ members, partitions int }{{10, 100}, {500, 5000}} {
		b.Run(fmt.Sprintf("members=%d/partitions=%d", size.members, size.partitions), func(b *testing.B) {
			keys, topics := bigGroup(size.members, size.partitions)
			painter := groups.NewPainter(root, "g")
			var tracker groups.Tracker
			now := time.Now()
			b.ReportAllocs()
			for b.Loop() {
				p, _ := painter.Paint(5, keys, topics)
				tracker.Step(now, now, p)
			}
		})
	}
}

func TestBigGroupIsStable(t *testing.T) {
	keys, topics := bigGroup(500, 5000)
	p, bad := groups.NewPainter(root, "g").Paint(5, keys, topics)
	if s := p.State(p.Places()); s != groups.StateStable || len(bad) > 0 || p.Strategy() != rebalance.StrategyRange {
		t.Error(s, bad)
	}
}
