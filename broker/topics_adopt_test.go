package broker_test

import (
	"testing"

	"github.com/muster-io/muster/registry"
)

// A tool that writes records without ids does so while the daemons are down: the logs
// still say whose they are, and the topic goes on with all its records. The daemon that
// has none of them does not make up another id before.
func TestTopicWithoutIDIsAdoptedByItsLogs(t *testing.T) {
	outer := start(t, config(t, t.TempDir()))
	st := openStore(t, outer)
	dirs := map[int32]string{7: t.TempDir(), 8: t.TempDir()}
	run := func(id int32) (stop func()) {
		cfg := config(t, dirs[id])
		cfg.ID, cfg.Etcd.Endpoints, cfg.AutoCreateTopics = id, outer.EtcdEndpoints(), false
		d := start(t, cfg)
		return func() { must(t, d.Close()) }
	}
	record := func() registry.TopicRecord {
		kv := keys(t, st, "/brokers/topics/old")["/brokers/topics/old"]
		_, rec, _, err := registry.Root("").ParseTopic(kv)
		must(t, err)
		return rec
	}
	stop := run(7)
	create(t, st, "old", 1, 7)
	if at := produce(t, producer(t, outer), "old", 0, "a"); at != 0 {
		t.Errorf("offset %d", at)
	}
	stop()
	first := record().TopicID
	put(t, st, "/brokers/topics/old", `{"version":1,"partitions":{"0":[7],"1":[8]}}`)
	stop = run(8) // has nothing of it
	defer stop()
	if id := record().TopicID; id != "" {
		t.Errorf("got the id %s before anybody could know better", id)
	}
	defer run(7)()
	if at := produce(t, producer(t, outer), "old", 0, "b"); at != 1 {
		t.Errorf("offset %d", at)
	}
	if at := produce(t, producer(t, outer), "old", 1, "b"); at != 0 {
		t.Errorf("offset %d", at)
	}
	if id := record().TopicID; id != first {
		t.Errorf("id %s, it was %s", id, first)
	}
	for _, dir := range dirs {
		if names := logDirs(t, dir, "stray"); len(names) > 0 {
			t.Errorf("put aside: %v", names)
		}
	}
}
