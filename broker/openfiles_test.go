package broker

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/muster-io/muster/registry"
)

// Logs take half of the files that may be open, and what does not fit waits until there
// is room: etcd would end the process.
func TestLogsLeaveFilesForOthers(t *testing.T) {
	follows := follower(t)
	follows.d.metrics = newMetrics(follows.d)
	defer func() {
		if err := follows.close(); err != nil {
			t.Error(err)
		}
	}()
	follows.maxLogs = 3
	rev := int64(1)
	put := func(topic string, partitions int) {
		rev++
		var list []string
		for p := range partitions {
			list = append(list, fmt.Sprintf(`"%d":[9]`, p))
		}
		value := fmt.Sprintf(`{"version":1,"partitions":{%s},"topic_id":"5f8a21f0-0000-4000-8000-%012x"}`, strings.Join(list, ","), topic[0])
		follows.update(follows.catalog.apply([]registry.Event{{KV: registry.KV{Key: "/brokers/topics/" + topic, Value: []byte(value), CreateRevision: rev, ModRevision: rev}}}))
	}
	served := func(topic string, partitions, want int) {
		t.Helper()
		n := 0
		for p := range partitions {
			switch _, err := follows.Partition(topic, int32(p)); {
			case err == nil:
				n++
			case !errors.Is(err, kerr.KafkaStorageError) || !errors.Is(err, errOpenFiles):
				t.Errorf("%s-%d: %v", topic, p, err)
			}
		}
		if n != want {
			t.Errorf("%d of %s are served, want %d", n, topic, want)
		}
	}
	put("a", 2)
	put("b", 3)
	served("a", 2, 2)
	served("b", 3, 1)
	put("a", 1)
	for tn := range follows.failing {
		follows.failing[tn] = time.Now()
	}
	follows.retry()
	served("b", 3, 2)
	put("a", 1)
	served("a", 1, 1)
	put("b", 1)
	put("c", 4)
	served("c", 4, 1)

	for limit, want := range map[int][3]int{1024: {512, 256, 64}, 1 << 20: {1 << 19, 10_000, 4096}, 3: {1, 1, 1}} {
		if logs, connections, watched := shareOpenFiles(limit); [3]int{logs, connections, watched} != want {
			t.Errorf("of %d: %d logs, %d connections, %d processes", limit, logs, connections, watched)
		}
	}
	if n := openFileLimit(); n < 64 {
		t.Errorf("limit %d", n)
	}
}
