package broker_test

import (
	"strings"
	"testing"

	"github.com/muster-io/muster/registry"
)

// The longest name that Kafka allows fills a file name together with the number of a
// partition. Its log can be put aside, is told from that of its neighbour, and comes
// back like any other.
func TestLogsOfTheLongestNames(t *testing.T) {
	outer := start(t, config(t, t.TempDir()))
	st := openStore(t, outer)
	dir := t.TempDir()
	cfg := config(t, dir)
	cfg.ID, cfg.Etcd.Endpoints, cfg.AutoCreateTopics = 7, outer.EtcdEndpoints(), false
	name := strings.Repeat("n", registry.MaxTopicName)
	d := start(t, cfg)
	create(t, st, name, 2, 7)
	k := producer(t, d)
	produce(t, k, name, 0, "a")
	produce(t, k, name, 1, "a")
	produce(t, k, name, 1, "b")
	before := keys(t, st, "/brokers/topics/n")
	remove := func() {
		t.Helper()
		_, err := st.Txn(t.Context(), registry.Txn{Then: []registry.Op{{Kind: registry.OpDelete, Key: "/brokers/topics/n", Prefix: true}}})
		must(t, err)
	}
	back := func() {
		t.Helper()
		for key, kv := range before {
			if kv.Lease == 0 {
				put(t, st, key, string(kv.Value))
			}
		}
	}
	remove() // while it runs
	without(t, dir, "logs", "n")
	back()
	if at := produce(t, producer(t, d), name, 1, "c"); at != 2 {
		t.Errorf("what came back ends at %d", at)
	}
	must(t, d.Close())
	remove() // while it is down
	d = start(t, cfg)
	without(t, dir, "logs", "n")
	back()
	k = producer(t, d)
	if at := produce(t, k, name, 0, "b"); at != 1 {
		t.Errorf("what came back ends at %d", at)
	}
	if at := produce(t, k, name, 1, "d"); at != 3 {
		t.Errorf("what came back ends at %d", at)
	}
	deleteTopic(t, st, name)
	without(t, dir, "logs", "n")
	without(t, dir, "deleting", "n")
	without(t, dir, "stray", "n")
}
