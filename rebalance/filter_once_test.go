package rebalance

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/muster-io/muster/registry"
)

// F-36 of docs/kafka-0.8.2.md: however many members state a filter, it is compiled once
// and looks at each topic's name once, not again at each change of the group.
func TestF36(t *testing.T) {
	group := registry.Root("").Group("g")
	register := func(id string, revision int64, filter string) registry.KV {
		return registry.KV{Key: group.ID(id), Value: fmt.Appendf(nil, `{"version":1,"subscription":{%q:1},"pattern":"white_list"}`, filter),
			CreateRevision: revision, ModRevision: revision, Lease: 1}
	}
	topic := func(name string, revision int64) registry.KV {
		return registry.KV{Key: registry.Root("").Topic(name), Value: []byte(`{"version":1,"partitions":{"0":[1]}}`), CreateRevision: 1, ModRevision: revision}
	}
	var ids, topics []registry.KV
	for i := range 100 {
		ids = append(ids, register(fmt.Sprintf("c%03d", i), 2, []string{"t0.*", "t.*5(?!0)"}[i%2]))
		topics = append(topics, topic(fmt.Sprintf("t%03d", i), 1))
	}
	reader := NewReader("", group, "")
	revision := int64(10)
	read := func(members int) Snapshot {
		t.Helper()
		revision++
		s, bad := reader.Read(revision, ids, topics, nil)
		if len(s.Members) != members || len(bad) > 0 {
			t.Fatalf("read %d members, %v", len(s.Members), bad)
		}
		return s
	}
	read(100)
	compiled := slices.Collect(maps.Values(reader.filters))
	if len(compiled) != 2 {
		t.Fatalf("%d filters", len(compiled))
	}
	asked := 0
	for _, x := range compiled {
		matches := x.filter.matches
		x.filter.matches = func(topic string) (bool, error) { asked++; return matches(topic) }
	}
	ids = append(ids, register("c100", 11, "t0.*"))
	if s := read(101); len(s.Members[100].Subscription) != 100 {
		t.Errorf("the new member subscribes to %d topics", len(s.Members[100].Subscription))
	}
	ids = ids[1:]
	ids[7].ModRevision = 13
	topics[5] = topic("t005", 13)
	read(100)
	if asked != 0 {
		t.Errorf("asked %d times for topics that were there, as members came and went", asked)
	}
	topics = append(topics, topic("t05x", 14))
	slices.SortFunc(topics, func(a, b registry.KV) int { return strings.Compare(a.Key, b.Key) })
	if s := read(100); s.Members[99].Subscription["t05x"] != 1 || asked != 2 {
		t.Errorf("asked %d times for a topic that came", asked)
	}
}
