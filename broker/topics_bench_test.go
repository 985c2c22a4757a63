package broker

import (
	"fmt"
	"log/slog"
	"testing"

	"github.com/muster-io/muster/registry"
)

// following is a daemon as far as it follows the registry, with n topics of three
// partitions that others lead.
func following(b testing.TB, n int) (*topics, []registry.Event) {
	b.Helper()
	d := &Daemon{cfg: Config{ID: 9, DataDir: b.TempDir()}, log: slog.New(slog.DiscardHandler)}
	d.members = newMembership(d)
	t := newTopics(d)
	d.topics = t
	root := registry.Root("")
	var events []registry.Event
	put := func(key, value string) {
		rev := int64(len(events) + 2)
		events = append(events, registry.Event{KV: registry.KV{Key: key, Value: []byte(value), CreateRevision: rev, ModRevision: rev}})
	}
	for i := range n {
		name := fmt.Sprint("topic-", i)
		put(root.Topic(name), fmt.Sprintf(`{"version":1,"partitions":{"0":[1],"1":[2],"2":[3]},"topic_id":"5f8a21f0-0000-4000-8000-%012x"}`, i))
		for p := range int32(3) {
			put(root.PartitionState(name, p), fmt.Sprintf(`{"controller_epoch":0,"leader":%d,"version":1,"leader_epoch":0,"isr":[%d]}`, p+1, p+1))
		}
	}
	t.enqueue(registry.Snapshot{}, events)
	if err := t.load(b.Context()); err != nil {
		b.Fatal(err)
	}
	return t, events
}

// What one change costs does not depend on how many topics there are.
func BenchmarkOneChangeAmongTopics(b *testing.B) {
	for _, n := range []int{100, 10_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			t, events := following(b, n)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				t.update(t.catalog.apply(events[4*(i%n)+1:][:1]))
			}
		})
	}
}
