package consumer_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/rebalance/consumer"
	"github.com/muster-io/muster/registry"
)

// served waits until the daemon shows the topic with the id of its record.
func served(t *testing.T, topic string) {
	t.Helper()
	kv, _, err := registry.GetKey(t.Context(), shared.store, root.Topic(topic))
	must(t, err)
	_, rec, _, err := root.ParseTopic(*kv)
	must(t, err)
	eventually(t, func() string {
		req := kmsg.NewPtrMetadataRequest()
		one := kmsg.NewMetadataRequestTopic()
		one.Topic = kmsg.StringPtr(topic)
		req.Topics = append(req.Topics, one)
		res, err := req.RequestWith(t.Context(), newProducer(t))
		must(t, err)
		if id := res.Topics[0].TopicID; id != [16]byte(rec.ID()) {
			return fmt.Sprintf("the daemon shows topic id %x, error %d", id, res.Topics[0].ErrorCode)
		}
		return ""
	})
}

// A topic is deleted and made again under a group: the new one is read from its
// start by whoever is due, and nothing of the former one's offsets is applied to it,
// or committed for it.
func TestTopicDeletedAndMadeAnew(t *testing.T) {
	for _, noticed := range []bool{false, true} {
		t.Run(fmt.Sprintf("noticed in between %v", noticed), func(t *testing.T) {
			topic, group := name(t, "t"), name(t, "g")
			partitions := createTopic(t, topic, 4)
			produce(t, topic, 4, 1000, 20)
			var mu sync.Mutex
			read := map[string][]int64{}
			cfg := consumer.Config{Group: group, Topics: map[string]int32{topic: 1}, Reset: consumer.Smallest, CommitInterval: 50 * time.Millisecond}
			handle := func(_ context.Context, r *consumer.Record) error {
				mu.Lock()
				defer mu.Unlock()
				if len(r.Value) < 4 { // of the new topic
					read[string(r.Value)] = append(read[string(r.Value)], r.Offset)
				}
				return nil
			}
			var members []*running
			for _, id := range []string{"c1", "c2"} {
				cfg.ID = id
				members = append(members, start(t, cfg, handle))
			}
			ownedAs(t, group, topic, "0:c1 1:c1 2:c2 3:c2")
			committedAs(t, group, partitions, "20")

			d, err := registry.DeleteTopic(t.Context(), shared.store, root, topic, registry.DeleteOptions{})
			must(t, err)
			if d.Offsets != 4 {
				t.Errorf("deletion: %+v", d)
			}
			if noticed {
				eventually(t, func() string { // the owner keys are gone with the topic
					for _, m := range members {
						if list := m.Assigned(); len(list) > 0 {
							return fmt.Sprintf("%s reads a topic that is deleted: %v", m.ID(), list)
						}
					}
					return ""
				})
			}
			createTopic(t, topic, 4)
			served(t, topic)
			for p, kv := range owners(t, group) {
				if kv.CreateRevision < created(t, topic) {
					t.Errorf("%s is owned since %d, before its topic", p, kv.CreateRevision)
				}
			}
			produce(t, topic, 4, 0, 5)
			committedAs(t, group, partitions, "5")
			ownedAs(t, group, topic, "0:c1 1:c1 2:c2 3:c2")
			mu.Lock()
			defer mu.Unlock()
			for i := range 5 {
				got := read[fmt.Sprint(i)]
				if want := slices.Repeat([]int64{int64(i)}, 4); !slices.Equal(got, want) {
					t.Errorf("record %d was read at offsets %v, want %v", i, got, want)
				}
			}
		})
	}
}

func created(t *testing.T, topic string) int64 {
	t.Helper()
	kv, _, err := registry.GetKey(t.Context(), shared.store, root.Topic(topic))
	must(t, err)
	return kv.CreateRevision
}
