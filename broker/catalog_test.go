package broker

import (
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/muster-io/muster/broker/api"
	"github.com/muster-io/muster/registry"
)

func follower(t testing.TB) *topics {
	d := &Daemon{cfg: Config{ID: 9, DataDir: t.TempDir()}, log: slog.New(slog.DiscardHandler)}
	d.members = newMembership(d)
	d.topics = newTopics(d)
	return d.topics
}

// However the registry came to be as it is, and however its changes were cut into
// steps: what clients are shown is what a daemon shows that has just started.
func TestEventsGiveWhatAListGives(t *testing.T) {
	for range 300 {
		seed := rand.Uint64()
		r := rand.New(rand.NewPCG(seed, 3))
		follows := follower(t)
		keys := map[string]registry.KV{}
		for rev := int64(2); rev < 60; {
			var events []registry.Event
			for range 1 + r.IntN(5) {
				events = append(events, randomEvent(r, keys, rev))
				rev++
			}
			follows.update(follows.catalog.apply(events))
		}
		fresh := follower(t)
		var events []registry.Event
		for _, key := range slices.Sorted(maps.Keys(keys)) {
			events = append(events, registry.Event{KV: keys[key]})
		}
		fresh.update(fresh.catalog.apply(events))
		if got, want := shown(follows), shown(fresh); !reflect.DeepEqual(got, want) {
			t.Fatalf("seed %d:\n got  %+v\n want %+v", seed, got, want)
		}
		if got, want := follows.d.members.counts, fresh.d.members.counts; !maps.Equal(got, want) {
			t.Fatalf("seed %d: counts %v, want %v", seed, got, want)
		}
		if got, want := slices.Sorted(maps.Keys(follows.errands.adopt)), slices.Sorted(maps.Keys(fresh.errands.adopt)); !slices.Equal(got, want) {
			t.Fatalf("seed %d: to adopt %v, want %v", seed, got, want)
		}
		if got, want := slices.Sorted(maps.Keys(follows.errands.deletions)), slices.Sorted(maps.Keys(fresh.errands.deletions)); !slices.Equal(got, want) {
			t.Fatalf("seed %d: deletions %v, want %v", seed, got, want)
		}
	}
}

func shown(t *topics) []any {
	s := t.Snapshot()
	return []any{append([]api.Broker{}, s.Brokers...), s.Controller, slices.Collect(s.Topics.All()), slices.Sorted(maps.Keys(t.catalog.topics))}
}

// randomEvent changes one key of a small registry, most of it about four topics.
func randomEvent(r *rand.Rand, keys map[string]registry.KV, rev int64) registry.Event {
	root := registry.Root("")
	topic := []string{"a", "a.b", "__consumer_offsets", "old"}[r.IntN(4)]
	key, value := "", ""
	switch r.IntN(8) {
	case 0:
		id := 1 + r.IntN(3)
		key, value = root.Broker(int32(id)), fmt.Sprintf(`{"version":1,"host":"h%d","port":%d}`, id, 1+r.IntN(9))
	case 1, 2:
		id := fmt.Sprintf(`"5f8a21f0-0000-4000-8000-%012x"`, rev)
		if old, there := keys[root.Topic(topic)]; there {
			_, rec, _, _ := root.ParseTopic(old) // a change keeps the id
			id = `"` + rec.TopicID + `"`
		}
		key, value = root.Topic(topic), fmt.Sprintf(`{"version":1,"partitions":{"0":[%d],"1":[1,9]},"topic_id":%s}`, r.IntN(4), id)
		if topic == "old" { // never has an id, and so never a log
			value = `{"version":1,"partitions":{"0":[9]}}`
		}
	case 3, 4:
		key = root.PartitionState(topic, int32(r.IntN(3)))
		value = fmt.Sprintf(`{"controller_epoch":0,"leader":%d,"version":1,"leader_epoch":%d,"isr":[1]}`, r.IntN(4), r.IntN(5))
	case 5:
		key, value = root.TopicConfig(topic), `{"version":1,"config":{"segment.bytes":"2000000"}}`
	case 6:
		key, value = root.TopicBroker(topic, 1), "3"
	case 7:
		key, value = root.DeletedTopic(topic), ""
	}
	old, there := keys[key]
	if there && r.IntN(2) == 0 {
		delete(keys, key)
		return registry.Event{KV: registry.KV{Key: key, ModRevision: rev}, Deleted: true, Previous: &old}
	}
	kv := registry.KV{Key: key, Value: []byte(value), CreateRevision: rev, ModRevision: rev}
	if there {
		kv.CreateRevision = old.CreateRevision
	}
	keys[key] = kv
	return registry.Event{KV: kv}
}

// A record that cannot be read, or a broker's, is no deletion: what was known stays.
func TestUnreadableRecordIsNoDeletion(t *testing.T) {
	follows := follower(t)
	put := func(key, value string, rev int64) catalogChange {
		ch := follows.catalog.apply([]registry.Event{{KV: registry.KV{Key: key, Value: []byte(value), CreateRevision: 2, ModRevision: rev}}})
		follows.update(ch)
		return ch
	}
	put("/brokers/topics/t", `{"version":1,"partitions":{"0":[1]},"topic_id":"5f8a21f0-0000-4000-8000-000000000001"}`, 2)
	put("/brokers/topics/t/partitions/0/state", `{"controller_epoch":0,"leader":4,"version":1,"leader_epoch":2,"isr":[4]}`, 3)
	want := shown(follows)
	for key, value := range map[string]string{
		"/brokers/topics/t":                    `{"version":1`,
		"/brokers/topics/t/partitions/0/state": "none",
		"/brokers/topics/%zz":                  "{}",
		"/config/topics/t":                     "[]",
		"/brokers/ids/x":                       "{}",
	} {
		if ch := put(key, value, 4); len(ch.bad) != 1 {
			t.Errorf("%s: complaints %v", key, ch.bad)
		}
		if got := shown(follows); !reflect.DeepEqual(got[2], want[2]) {
			t.Errorf("%s: shown %+v, want %+v", key, got[2], want[2])
		}
	}
	if topic, _ := follows.Snapshot().Topics.Get("t"); topic.Partitions[0].Leader != 4 || topic.Internal {
		t.Errorf("%+v", topic)
	}
	var none []api.Topic
	follows.update(follows.catalog.apply([]registry.Event{{KV: registry.KV{Key: "/brokers/topics/t", ModRevision: 9}, Deleted: true}}))
	if got := slices.Collect(follows.Snapshot().Topics.All()); !reflect.DeepEqual(got, none) {
		t.Errorf("after its deletion %+v is shown", got)
	}
}
