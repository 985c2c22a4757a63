package broker

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/uuid"

	"github.com/muster-io/muster/broker/storage"
	"github.com/muster-io/muster/registry"
)

const someID = "5f8a21f0-0000-4000-8000-000000000001"

func record(rev, created int64, value string) registry.Event {
	return registry.Event{KV: registry.KV{Key: "/brokers/topics/t", Value: []byte(value), CreateRevision: created, ModRevision: rev}}
}

// A record without an id is that of the topic that was there only if it was written
// over that one; after a gap in the watch another may stand there.
func TestIDOfARecordWithoutOne(t *testing.T) {
	named, unnamed := `{"version":1,"partitions":{"0":[9]},"topic_id":"`+someID+`"}`, `{"version":1,"partitions":{"0":[9]}}`
	for _, c := range []struct {
		created int64
		want    string
	}{{2, someID}, {7, ""}} {
		follows := follower(t)
		follows.catalog.apply([]registry.Event{record(2, 2, named)})
		follows.catalog.apply([]registry.Event{record(8, c.created, unnamed)})
		id, adopt, first := follows.toAdopt("t")
		if id != c.want || !adopt || !first {
			t.Errorf("created at %d: id %q, %v, %v", c.created, id, adopt, first)
		}
		follows.catalog.apply([]registry.Event{record(9, c.created, "{")})
		if _, adopt, _ := follows.toAdopt("t"); adopt {
			t.Error("what cannot be read is to be adopted")
		}
	}
}

// Settings are brought into the range that a log can do, and what cannot be read is
// left out and reported.
func TestSettingsWithinLimits(t *testing.T) {
	for _, c := range []struct {
		name, value string
		want        logSettings
		bad         bool
	}{
		{"segment.bytes", "14", logSettings{segmentBytes: minSegmentBytes}, false},
		{"segment.bytes", "99999999999999", logSettings{segmentBytes: maxSegmentBytes}, false},
		{"segment.bytes", "3000000", logSettings{segmentBytes: 3_000_000}, false},
		{"max.message.bytes", "0", logSettings{maxBatch: minBatchBytes}, false},
		{"index.interval.bytes", "0", logSettings{indexInterval: 1}, false},
		{"max.message.bytes", "-1", logSettings{}, true},
		{"segment.bytes", "1G", logSettings{}, true},
		{"retention.ms", "x", logSettings{}, false},
	} {
		got, err := (&topicEntry{config: map[string]string{c.name: c.value}}).settings()
		if got != c.want || (err != nil) != c.bad {
			t.Errorf("%s=%s: %+v, %v", c.name, c.value, got, err)
		}
	}
}

// At a start only those logs go aside that are known to be of no topic.
func TestWhatIsPutAsideAtAStart(t *testing.T) {
	follows := follower(t)
	follows.catalog.apply([]registry.Event{record(2, 2, `{"version":1,"partitions":{"0":[9],"1":[9],"2":[9],"4":[9]},"topic_id":"`+someID+`"}`),
		{KV: registry.KV{Key: "/brokers/topics/bad", Value: []byte("{"), CreateRevision: 2, ModRevision: 2}},
		{KV: registry.KV{Key: "/brokers/topics/unnamed", Value: []byte(`{"version":1,"partitions":{"0":[9]}}`), CreateRevision: 2, ModRevision: 2}}})
	d := follows.dirs
	own, other := follows.catalog.topics["t"].record.ID(), storage.TopicID{1}
	stays := map[string]bool{}
	log := func(topic string, number int32, id storage.TopicID, stay bool) {
		t.Helper()
		dir := d.partition(topic, number)
		stays[filepath.Base(dir)] = stay
		err := os.MkdirAll(dir, 0o750)
		if err == nil && id != (storage.TopicID{}) {
			err = storage.EnsureIdentity(storage.OS{}, dir, id)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	log("t", 0, storage.TopicID(own), true)
	log("t", 1, other, false)
	log("t", 2, storage.TopicID{}, true) // a crash came before its name
	log("t", 3, storage.TopicID(own), false)
	log("t", 4, other, true)
	log("bad", 0, other, true)
	log("unnamed", 0, other, true)
	log("gone", 0, other, false)
	log("gone", 1, storage.TopicID{}, false)
	log("gone", 2, other, true)
	for _, name := range []string{"t-4", "gone-2"} { // cannot be told whose they are
		if err := os.WriteFile(filepath.Join(d.logs(), name, "partition.metadata"), []byte("?"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.settle(follows.catalog); err != nil {
		t.Fatal(err)
	}
	for name, stay := range stays {
		if _, err := os.Stat(filepath.Join(d.logs(), name)); (err == nil) != stay {
			t.Errorf("%s: %v, is to stay: %v", name, err, stay)
		}
	}
	strays, err := readNames(d.stray())
	if err != nil || len(strays) != 4 {
		t.Errorf("put aside: %v, %v", strays, err)
	}
}

// A topic that is another one within one step of the daemon begins with a new log; the
// old one is removed if it was to be deleted, and else kept. So it is where only the
// log tells that it is of another topic.
func TestAnotherTopicInOneStep(t *testing.T) {
	const other = "5f8a21f0-0000-4000-8000-000000000002"
	value := func(id string) string { return `{"version":1,"partitions":{"0":[9]},"topic_id":"` + id + `"}` }
	marker := registry.Event{KV: registry.KV{Key: "/admin/delete_topics/t", Value: []byte(`{"version":1,"topic_id":"` + someID + `"}`), CreateRevision: 3, ModRevision: 3}}
	deleted := func(e registry.Event, rev int64) registry.Event {
		return registry.Event{KV: registry.KV{Key: e.Key, ModRevision: rev}, Deleted: true}
	}
	first, second := record(2, 2, value(someID)), record(5, 5, value(other))
	for name, c := range map[string]struct {
		seen  bool // the first topic, by this very run
		step  []registry.Event
		stray int
	}{
		"deleted":         {true, []registry.Event{deleted(first, 3), marker, deleted(marker, 4), second}, 0},
		"record replaced": {true, []registry.Event{second}, 1},
		"while down":      {false, []registry.Event{second}, 1},
	} {
		follows := follower(t)
		follows.d.metrics = newMetrics(follows.d)
		if c.seen {
			follows.update(follows.catalog.apply([]registry.Event{first}))
		} else if err := storage.EnsureIdentity(storage.OS{}, follows.dirs.partition("t", 0), storage.TopicID(uuid.MustParse(someID))); err != nil {
			t.Fatal(err)
		}
		follows.update(follows.catalog.apply(c.step))
		if id := follows.dirs.topicID("t", 0); id != other {
			t.Errorf("%s: the log is that of %q", name, id)
		}
		if _, err := follows.Partition("t", 0); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		strays, err := readNames(follows.dirs.stray())
		condemned, errDeleting := readNames(follows.dirs.deleting())
		if err != nil || errDeleting != nil || len(strays) != c.stray || len(condemned) != 1-c.stray {
			t.Errorf("%s: kept %v, to be removed %v, %v, %v", name, strays, condemned, err, errDeleting)
		}
		if err := follows.close(); err != nil {
			t.Error(err)
		}
	}
}
