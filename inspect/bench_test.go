package inspect_test

import (
	"fmt"
	"testing"

	"github.com/muster-io/muster/inspect"
	"github.com/muster-io/muster/registry"
)

// BenchmarkCheck examines 100,000 keys: 1,000 groups of 100 partitions.
func BenchmarkCheck(b *testing.B) {
	tree := inspect.Tree{Root: root, Revision: 1}
	add := func(path, value string, lease registry.LeaseID) {
		tree.Keys = append(tree.Keys, registry.KV{Key: root.Key(path), Value: []byte(value), CreateRevision: 1, ModRevision: 1, Lease: lease})
	}
	rec := registry.TopicRecord{Version: 1, Partitions: map[int32][]int32{}}
	for n := range int32(50) {
		rec.Partitions[n] = []int32{1}
		add(fmt.Sprintf("/brokers/topics/t/partitions/%d/state", n), `{"version":1,"leader":1,"isr":[1]}`, 0)
	}
	value, err := registry.Encode(rec)
	if err != nil {
		b.Fatal(err)
	}
	add("/brokers/topics/t", string(value), 0)
	add("/brokers/topics/t/1", "50", 9)
	add("/brokers/ids/1", `{"version":1,"host":"h","port":9092}`, 9)
	for g := range 1000 {
		group := fmt.Sprintf("/consumers/g%d", g)
		add(group+"/ids/c", `{"version":1,"subscription":{"t":1},"pattern":"static","timestamp":"1"}`, 9)
		for n := range 50 {
			add(fmt.Sprintf("%s/owners/t/1-%d", group, n), "c-0", 9)
			add(fmt.Sprintf("%s/offsets/t/1-%d", group, n), "12", 0)
		}
	}
	for b.Loop() {
		tree.Questions()
		if list := inspect.Check(tree, inspect.Probes{}); len(list) > 0 {
			b.Fatal(list[0])
		}
	}
}
