package broker

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/muster-io/muster/registry"
)

// A topic with many partitions is opened a slice at a time: meanwhile others are
// served, and it may go, or come back as another, before its turn has come.
func TestLargeTopicHoldsUpNothing(t *testing.T) {
	follows := follower(t)
	follows.d.metrics = newMetrics(follows.d)
	defer func() {
		if err := follows.close(); err != nil {
			t.Error(err)
		}
	}()
	rev := int64(1)
	put := func(topic string, partitions, id int) {
		rev++
		var list []string
		for p := range partitions {
			list = append(list, fmt.Sprintf(`"%d":[9]`, p))
		}
		value := fmt.Sprintf(`{"version":1,"partitions":{%s},"topic_id":"5f8a21f0-0000-4000-8000-%012x"}`, strings.Join(list, ","), id)
		follows.update(follows.catalog.apply([]registry.Event{{KV: registry.KV{Key: "/brokers/topics/" + topic, Value: []byte(value), CreateRevision: rev, ModRevision: rev}}}))
	}
	serves := func(topic string, number int32, want error) {
		t.Helper()
		if _, err := follows.Partition(topic, number); !errors.Is(err, want) {
			t.Errorf("%s-%d: %v, want %v", topic, number, err, want)
		}
	}
	drain := func() {
		for len(follows.line) > 0 {
			follows.openSome()
		}
	}
	put("large", 3*openSlice, 1)
	serves("large", 3*openSlice-1, kerr.NotLeaderForPartition)
	put("large", 3*openSlice, 1) // nobody gets in line twice
	if len(follows.line) != 3*openSlice {
		t.Fatalf("%d in line", len(follows.line))
	}
	follows.openSome()
	serves("large", openSlice-1, nil)
	serves("large", openSlice, kerr.NotLeaderForPartition)
	put("large", 2*openSlice, 2)
	drain()
	serves("large", 0, nil)
	serves("large", 2*openSlice-1, nil)
	serves("large", 2*openSlice, kerr.UnknownTopicOrPartition)
	put("other", 2*openSlice, 3)
	follows.update(follows.catalog.apply([]registry.Event{{KV: registry.KV{Key: "/brokers/topics/other", ModRevision: rev}, Deleted: true}}))
	drain()
	serves("other", 0, kerr.UnknownTopicOrPartition)
	put("small", 2, 4)
	serves("small", 1, nil)
	if n := len(follows.locals()); n != 2*openSlice+2 || len(follows.waiting) != 0 {
		t.Errorf("%d are open, %d wait", n, len(follows.waiting))
	}
}

// A start that is broken off does not open all logs before.
func TestLoadCanBeBrokenOff(t *testing.T) {
	follows := follower(t)
	follows.d.metrics = newMetrics(follows.d)
	defer func() {
		if err := follows.close(); err != nil {
			t.Error(err)
		}
	}()
	var list []string
	for p := range 3 * openSlice {
		list = append(list, fmt.Sprintf(`"%d":[9]`, p))
	}
	value := fmt.Sprintf(`{"version":1,"partitions":{%s},"topic_id":"5f8a21f0-0000-4000-8000-000000000001"}`, strings.Join(list, ","))
	follows.enqueue(registry.Snapshot{}, []registry.Event{{KV: registry.KV{Key: "/brokers/topics/t", Value: []byte(value), CreateRevision: 2, ModRevision: 2}}})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := follows.load(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if n := len(follows.locals()); n >= 3*openSlice {
		t.Errorf("%d logs were opened", n)
	}
}
