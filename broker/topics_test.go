package broker_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"

	"github.com/muster-io/muster/broker"
	"github.com/muster-io/muster/registry"
)

// logged is what a daemon has said.
type logged struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logged) has(text string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.b.String(), text)
}

// elsewhere is for a daemon whose etcd another one uses, under another root: clients
// of the one do not hear of the other, which may be behind.
func elsewhere(t *testing.T) broker.Config {
	cfg := config(t, t.TempDir())
	cfg.ID, cfg.Root = 9, "/elsewhere"
	return cfg
}

func create(t *testing.T, st registry.Store, name string, partitions int32, brokers ...int32) registry.TopicRecord {
	t.Helper()
	rec, err := registry.CreateTopic(t.Context(), st, "", registry.TopicSpec{Name: name, Partitions: partitions, ReplicationFactor: 1}, brokers)
	must(t, err)
	return rec
}

func deleteTopic(t *testing.T, st registry.Store, name string) {
	t.Helper()
	_, err := registry.DeleteTopic(t.Context(), st, "", name, registry.DeleteOptions{})
	must(t, err)
}

func put(t *testing.T, st registry.Store, key, value string) {
	t.Helper()
	_, err := st.Txn(t.Context(), registry.Txn{Then: []registry.Op{registry.Put(key, []byte(value), 0)}})
	must(t, err)
}

func produce(t *testing.T, k *kgo.Client, topic string, partition int32, value string) int64 {
	t.Helper()
	r := &kgo.Record{Topic: topic, Partition: partition, Value: []byte(value)}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	must(t, k.ProduceSync(ctx, r).FirstErr())
	return r.Offset
}

func producer(t *testing.T, d *broker.Daemon) *kgo.Client {
	return newClient(t, d, kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.UnknownTopicRetries(-1), kgo.MetadataMaxAge(100*time.Millisecond),
		kgo.ProducerBatchCompression(kgo.NoCompression()))
}

// logDirs are the directories under one of the data directory's own.
func logDirs(t *testing.T, dir, under string) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(dir, under))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	must(t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func without(t *testing.T, dir, under, prefix string) {
	t.Helper()
	eventually(t, func() string {
		for _, name := range logDirs(t, dir, under) {
			if strings.HasPrefix(name, prefix) {
				return under + "/" + name + " is there"
			}
		}
		return ""
	})
}

// fetchCode asks for one partition and waits for more of it.
func fetchCode(t *testing.T, k *kgo.Client, topic string, offset int64, wait time.Duration) error {
	t.Helper()
	return fetchCodeOf(t, k, 1, topic, offset, wait)
}

func fetchCodeOf(t *testing.T, k *kgo.Client, broker int, topic string, offset int64, wait time.Duration) error {
	t.Helper()
	req := kmsg.NewPtrFetchRequest()
	req.Version, req.MaxWaitMillis, req.MinBytes, req.MaxBytes = 11, int32(wait.Milliseconds()), 1, 1<<20
	req.SessionEpoch = -1
	p := kmsg.NewFetchRequestTopicPartition()
	p.FetchOffset, p.PartitionMaxBytes = offset, 1<<20
	rt := kmsg.NewFetchRequestTopic()
	rt.Topic, rt.Partitions = topic, append(rt.Partitions, p)
	req.Topics = append(req.Topics, rt)
	res, err := k.Broker(broker).Request(t.Context(), req)
	if err != nil {
		return err
	}
	return kerr.ErrorForCode(res.(*kmsg.FetchResponse).Topics[0].Partitions[0].ErrorCode)
}

// A topic that is deleted goes from the disk; who waits for more of it is told at
// once; one made again under its name begins anew.
func TestDeletedTopicGoesFromTheDisk(t *testing.T) {
	dir := t.TempDir()
	cfg := config(t, dir)
	cfg.AutoCreateTopics = false
	d := start(t, cfg)
	st := openStore(t, d)
	for round := range 3 {
		create(t, st, "orders", 2, 1)
		k := producer(t, d) // the last one has the id of another topic
		if at := produce(t, k, "orders", 0, "v"); at != 0 {
			t.Fatalf("round %d: the first record has offset %d", round, at)
		}
		produce(t, k, "orders", 0, "v")
		answer := make(chan error, 1)
		reader := newClient(t, d, kgo.MaxVersions(fetch11()))
		must(t, fetchCode(t, reader, "orders", 0, 0))
		go func() { answer <- fetchCode(t, reader, "orders", 2, time.Minute) }()
		if round == 1 {
			time.Sleep(50 * time.Millisecond) // so that, mostly, it waits
		}
		deleteTopic(t, st, "orders")
		select {
		case err := <-answer:
			if !errors.Is(err, kerr.UnknownTopicOrPartition) {
				t.Errorf("round %d: fetch was answered %v", round, err)
			}
		case <-time.After(patience):
			t.Fatal("the fetch still waits")
		}
		without(t, dir, "logs", "orders-")
		without(t, dir, "deleting", "orders-")
		if names := logDirs(t, dir, "stray"); len(names) > 0 {
			t.Errorf("kept: %v", names)
		}
		for key := range keys(t, st, "/") {
			if strings.Contains(key, "orders") {
				t.Errorf("round %d: %s is left", round, key)
			}
		}
	}
}

// fetch11 has clients name topics, not ids.
func fetch11() *kversion.Versions {
	v := kversion.Stable()
	v.SetMaxKeyVersion(int16(kmsg.Fetch), 11)
	return v
}

// shows waits until a daemon shows clients the topic with that id and so many
// partitions.
func shows(t *testing.T, d *broker.Daemon, topic string, id uuid.UUID, partitions int) {
	t.Helper()
	k := newClient(t, d)
	req := kmsg.NewPtrMetadataRequest()
	asked := kmsg.NewMetadataRequestTopic()
	asked.Topic = &topic
	req.Topics = append(req.Topics, asked)
	eventually(t, func() string {
		res, err := k.SeedBrokers()[0].Request(t.Context(), req) // this daemon and no other
		must(t, err)
		got := res.(*kmsg.MetadataResponse).Topics[0]
		if now := uuid.UUID(got.TopicID); now != id || len(got.Partitions) != partitions {
			return fmt.Sprintf("id %s, %d partitions, want %s, %d", now, len(got.Partitions), id, partitions)
		}
		return ""
	})
}

// A topic deleted and made again within one step of the daemon, or while it is
// down, begins anew, and the old log is kept for a day where the daemon did not see
// that it was to be deleted.
func TestTopicMadeAnewGetsANewLog(t *testing.T) {
	outer := start(t, elsewhere(t))
	st := openStore(t, outer)
	dir := t.TempDir()
	cfg := config(t, dir)
	cfg.ID, cfg.Etcd.Endpoints, cfg.AutoCreateTopics = 7, outer.EtcdEndpoints(), false
	d := start(t, cfg)
	create(t, st, "orders", 1, 7)
	k := producer(t, d)
	produce(t, k, "orders", 0, "old")
	var newest registry.TopicRecord
	for range 5 {
		deleteTopic(t, st, "orders")
		newest = create(t, st, "orders", 1, 7)
	}
	shows(t, d, "orders", newest.ID(), 1)
	if at := produce(t, producer(t, d), "orders", 0, "new"); at != 0 {
		t.Errorf("the first record has offset %d", at)
	}
	if names := logDirs(t, dir, "stray"); len(names) > 0 {
		t.Errorf("kept, though it was to be deleted: %v", names)
	}
	must(t, d.Close())
	deleteTopic(t, st, "orders")
	create(t, st, "orders", 1, 7)
	d = start(t, cfg)
	if at := produce(t, producer(t, d), "orders", 0, "newer"); at != 0 {
		t.Errorf("after the restart the first record has offset %d", at)
	}
	if names := logDirs(t, dir, "stray"); len(names) != 1 || !strings.HasPrefix(names[0], "orders-0.") {
		t.Errorf("stray: %v", names)
	}
}

// What the registry does not know at a start is kept for a day, and comes back if
// the registry knows it again.
func TestStrayLogs(t *testing.T) {
	outer := start(t, elsewhere(t))
	st := openStore(t, outer)
	dir := t.TempDir()
	said := &logged{}
	cfg := config(t, dir)
	cfg.ID, cfg.Etcd.Endpoints, cfg.Logger = 7, outer.EtcdEndpoints(), slog.New(slog.NewTextHandler(said, nil))
	d := start(t, cfg)
	create(t, st, "orders", 1, 7)
	create(t, st, "pay-ments", 1, 7)
	k := producer(t, d)
	produce(t, k, "orders", 0, "a")
	produce(t, k, "pay-ments", 0, "a")
	must(t, d.Close())
	before := keys(t, st, "/brokers/topics/orders")
	_, err := st.Txn(t.Context(), registry.Txn{Then: []registry.Op{{Kind: registry.OpDelete, Key: "/brokers/topics/orders", Prefix: true}}})
	must(t, err)
	must(t, os.MkdirAll(filepath.Join(dir, "logs", "no partition"), 0o750))
	must(t, os.MkdirAll(filepath.Join(dir, "deleting", "old-0.1", "x"), 0o750))
	old := filepath.Join(dir, "stray", fmt.Sprintf("old-0.%d", time.Now().Add(-25*time.Hour).UnixMilli()))
	must(t, os.MkdirAll(filepath.Join(old, "x"), 0o750))
	d = start(t, cfg)
	without(t, dir, "logs", "orders-")
	without(t, dir, "stray", "old-")
	without(t, dir, "deleting", "old-")
	if names := logDirs(t, dir, "stray"); len(names) != 1 || !strings.HasPrefix(names[0], "orders-0.") {
		t.Errorf("stray: %v", names)
	}
	if got := fmt.Sprint(logDirs(t, dir, "logs")); got != "[no partition pay-ments-0]" {
		t.Errorf("logs: %s", got)
	}
	if !said.has("moved aside") {
		t.Error("not a word of it")
	}
	must(t, d.Close())
	for key, kv := range before {
		put(t, st, key, string(kv.Value))
	}
	d = start(t, cfg)
	if at := produce(t, producer(t, d), "orders", 0, "b"); at != 1 {
		t.Errorf("what came back ends at %d", at)
	}
	// The same while it runs.
	_, err = st.Txn(t.Context(), registry.Txn{Then: []registry.Op{{Kind: registry.OpDelete, Key: "/brokers/topics/orders", Prefix: true}}})
	must(t, err)
	without(t, dir, "logs", "orders-")
	for key, kv := range before {
		if kv.Lease == 0 {
			put(t, st, key, string(kv.Value))
		}
	}
	if at := produce(t, producer(t, d), "orders", 0, "c"); at != 2 {
		t.Errorf("what came back ends at %d", at)
	}
}

// A record that somebody wrote without an id gets one, and can be used; a tool that
// drops the id later does not make another topic of it.
func TestTopicWithoutIDIsAdopted(t *testing.T) {
	d := start(t, config(t, t.TempDir()))
	st := openStore(t, d)
	put(t, st, "/brokers/topics/old", `{"version":1,"partitions":{"0":[1]}}`)
	k := producer(t, d)
	if at := produce(t, k, "old", 0, "a"); at != 0 {
		t.Errorf("offset %d", at)
	}
	id := func() string {
		kv := keys(t, st, "/brokers/topics/old")["/brokers/topics/old"]
		_, rec, _, err := registry.Root("").ParseTopic(kv)
		must(t, err)
		return rec.TopicID
	}
	first := id()
	if _, err := uuid.Parse(first); err != nil {
		t.Errorf("id %q", first)
	}
	put(t, st, "/brokers/topics/old", `{"version":1,"partitions":{"0":[1],"1":[1]}}`)
	eventually(t, func() string {
		if now := id(); now != first {
			return "the id is " + now
		}
		return ""
	})
	if at := produce(t, k, "old", 0, "b"); at != 1 {
		t.Errorf("offset %d", at)
	}
	if at := produce(t, producer(t, d), "old", 1, "b"); at != 0 {
		t.Errorf("offset %d", at)
	}
}

// A marker in the way of 0.8.2 deletes a topic, and what a tool that died has left
// of a deletion is done.
func TestDaemonFinishesDeletions(t *testing.T) {
	dir := t.TempDir()
	d := start(t, config(t, dir))
	st := openStore(t, d)
	create(t, st, "orders", 2, 1)
	k := producer(t, d)
	produce(t, k, "orders", 0, "a")
	p := registry.Partition{Topic: "orders", Home: 1}
	group := registry.Root("").Group("g")
	put(t, st, group.Offset(p), "1")
	put(t, st, registry.Root("").DeletedTopic("orders"), `""`)
	gone := func() string {
		for key := range keys(t, st, "/") {
			if strings.Contains(key, "orders") {
				return key + " is there"
			}
		}
		return ""
	}
	eventually(t, gone)
	without(t, dir, "logs", "orders-")
	put(t, st, group.Offset(p), "1")
	put(t, st, registry.Root("").PartitionState("orders", 0), `{"isr":[1]}`)
	put(t, st, registry.Root("").DeletedTopic("orders"), `{"version":1,"topic_id":"x"}`) // last: its turn comes by the clock
	eventually(t, gone)
}

// The leader that a state names is followed, though a person wrote it.
func TestLeaderChangedByHand(t *testing.T) {
	said := &logged{}
	cfg := config(t, t.TempDir())
	cfg.Logger = slog.New(slog.NewTextHandler(said, nil))
	d := start(t, cfg)
	st := openStore(t, d)
	create(t, st, "orders", 1, 1)
	k := producer(t, d)
	produce(t, k, "orders", 0, "a")
	reader := newClient(t, d, kgo.MaxVersions(fetch11()))
	must(t, fetchCode(t, reader, "orders", 0, 0))
	state := func(leader, epoch int) {
		put(t, st, registry.Root("").PartitionState("orders", 0),
			fmt.Sprintf(`{"controller_epoch":1,"leader":%d,"version":1,"leader_epoch":%d,"isr":[1]}`, leader, epoch))
	}
	answers := func(want error) {
		t.Helper()
		eventually(t, func() string {
			if err := fetchCode(t, reader, "orders", 0, 0); !errors.Is(err, want) {
				return fmt.Sprintf("fetch: %v, want %v", err, want)
			}
			return ""
		})
	}
	state(5, 1)
	answers(kerr.NotLeaderForPartition)
	state(1, 2)
	answers(nil)
	if at := produce(t, k, "orders", 0, "b"); at != 1 {
		t.Errorf("offset %d", at)
	}
	// An epoch that goes back is told, since it stops all appends, and heals.
	state(1, 1)
	eventually(t, func() string {
		if !said.has("leader_epoch=1 log_epoch=2") {
			return "not a word of it"
		}
		return ""
	})
	answers(nil)
	state(1, 3)
	if at := produce(t, producer(t, d), "orders", 0, "c"); at != 2 {
		t.Errorf("offset %d", at)
	}
}

// A topic's own limits hold, from when they are set.
func TestTopicSettingsAreHonoured(t *testing.T) {
	dir := t.TempDir()
	d := start(t, config(t, dir))
	st := openStore(t, d)
	create(t, st, "orders", 1, 1)
	k := producer(t, d)
	large := strings.Repeat("x", 100_000)
	produce(t, k, "orders", 0, large)
	_, err := registry.AlterTopicConfig(t.Context(), st, "", "orders", map[string]string{"max.message.bytes": "5000", "segment.bytes": "1048576"}, nil)
	must(t, err)
	eventually(t, func() string {
		r := &kgo.Record{Topic: "orders", Value: []byte(large)}
		if err := k.ProduceSync(t.Context(), r).FirstErr(); !errors.Is(err, kerr.MessageTooLarge) {
			return fmt.Sprintf("a large record: %v", err)
		}
		return ""
	})
	produce(t, k, "orders", 0, "small")
	_, err = registry.AlterTopicConfig(t.Context(), st, "", "orders", nil, []string{"max.message.bytes"})
	must(t, err)
	eventually(t, func() string {
		r := &kgo.Record{Topic: "orders", Value: []byte(large)}
		if err := k.ProduceSync(t.Context(), r).FirstErr(); err != nil {
			return fmt.Sprintf("a large record: %v", err)
		}
		return ""
	})
	for range 15 {
		produce(t, k, "orders", 0, large)
	}
	segments, err := filepath.Glob(filepath.Join(dir, "logs", "orders-0", "*.log"))
	must(t, err)
	if len(segments) < 2 {
		t.Errorf("one segment for 1.6 MB: %v", segments)
	}
}

// A log that cannot be opened is tried again though nothing changes in the registry.
func TestOpeningIsTriedAgain(t *testing.T) {
	dir := t.TempDir()
	d := start(t, config(t, dir))
	st := openStore(t, d)
	file := filepath.Join(dir, "logs", "orders-0")
	must(t, os.MkdirAll(filepath.Dir(file), 0o750))
	must(t, os.WriteFile(file, []byte("in the way"), 0o600))
	create(t, st, "orders", 1, 1)
	reader := newClient(t, d, kgo.MaxVersions(fetch11()))
	eventually(t, func() string {
		if err := fetchCode(t, reader, "orders", 0, 0); !errors.Is(err, kerr.KafkaStorageError) {
			return fmt.Sprint("fetch: ", err)
		}
		return ""
	})
	must(t, os.Remove(file))
	produce(t, producer(t, d), "orders", 0, "a")
}

func TestNamesThatCollideAreRefusedToClients(t *testing.T) {
	d := start(t, config(t, t.TempDir()))
	create(t, openStore(t, d), "or.ders", 1, 1)
	k := newClient(t, d)
	req := kmsg.NewPtrMetadataRequest()
	req.AllowAutoTopicCreation = true
	topic := kmsg.NewMetadataRequestTopic()
	topic.Topic = kmsg.StringPtr("or_ders")
	req.Topics = append(req.Topics, topic)
	res, err := req.RequestWith(t.Context(), k)
	must(t, err)
	if err := kerr.ErrorForCode(res.Topics[0].ErrorCode); !errors.Is(err, kerr.InvalidTopicException) {
		t.Errorf("got %v", err)
	}
}
