package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/muster-io/muster/broker"
	"github.com/muster-io/muster/internal/freeport"
	"github.com/muster-io/muster/rebalance/consumer"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/etcd"
)

// The tests of this package share one daemon with its etcd: both are real.
var shared struct {
	daemon *broker.Daemon
	store  *etcd.Store
}

var root registry.Root

func TestMain(m *testing.M) {
	if endpoint := os.Getenv(victimEndpoint); endpoint != "" {
		victim(endpoint)
	}
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "muster-consumer")
		if err != nil {
			panic(err)
		}
		defer os.RemoveAll(dir)
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		shared.daemon, err = broker.Start(ctx, broker.Config{ID: 1, DataDir: dir, Listen: "127.0.0.1:0", SessionTimeout: registry.MaxTTL,
			EtcdListenClient: "http://" + freeport.Must(), EtcdListenPeer: "http://" + freeport.Must()})
		if err != nil {
			panic(err)
		}
		defer shared.daemon.Close()
		shared.store, err = etcd.Open(ctx, etcd.Options{Endpoints: shared.daemon.EtcdEndpoints()})
		if err != nil {
			panic(err)
		}
		defer shared.store.Close()
		return m.Run()
	}())
}

// patience bounds every wait; what takes this long has gone wrong, however slow the
// machine is.
const patience = time.Minute

// eventually waits until ok says nothing is missing; it fails with what was.
func eventually(t *testing.T, missing func() string) {
	t.Helper()
	deadline := time.Now().Add(patience)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		what := missing()
		if what == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("after %s: %s", patience, what)
		}
		<-tick.C
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

var names atomic.Int64

// name makes a topic or group name of the test's, another one at each call.
func name(t *testing.T, suffix string) string {
	return fmt.Sprintf("%s.%d.%s", strings.ReplaceAll(t.Name(), "/", "."), names.Add(1), suffix)
}

func createTopic(t *testing.T, topic string, partitions int32) []registry.Partition {
	t.Helper()
	rec, err := registry.CreateTopic(t.Context(), shared.store, root,
		registry.TopicSpec{Name: topic, Partitions: partitions, ReplicationFactor: 1}, []int32{1})
	must(t, err)
	return rec.List(topic)
}

func newProducer(t *testing.T) *kgo.Client {
	t.Helper()
	k, err := kgo.NewClient(kgo.SeedBrokers(shared.daemon.Address()), kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.MetadataMinAge(50*time.Millisecond), kgo.UnknownTopicRetries(1000)) // the daemon has to hear of the topic first
	must(t, err)
	t.Cleanup(k.Close)
	return k
}

// produce writes records whose values are their numbers, n of them to each partition.
func produce(t *testing.T, topic string, partitions int, from, n int) {
	t.Helper()
	k := newProducer(t)
	var records []*kgo.Record
	for p := range partitions {
		for i := range n {
			records = append(records, &kgo.Record{Topic: topic, Partition: int32(p), Value: []byte(fmt.Sprint(from + i))})
		}
	}
	must(t, k.ProduceSync(t.Context(), records...).FirstErr())
}

// running is a consumer that runs in the test.
type running struct {
	*consumer.Consumer
	cancel context.CancelFunc
	done   chan struct{}
	err    error
}

// start runs a consumer until the end of the test. Its session outlasts whatever holds
// up the test's process, unless cfg says otherwise: one that is lost has records
// handed over again.
func start(t *testing.T, cfg consumer.Config, h consumer.Handler) *running {
	t.Helper()
	if cfg.Store == nil {
		cfg.Store = shared.store
	}
	if cfg.SessionTimeout == 0 {
		cfg.SessionTimeout = registry.MaxTTL
	}
	c, err := consumer.New(cfg, h)
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	r := &running{Consumer: c, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(r.done)
		r.err = c.Run(ctx)
	}()
	t.Cleanup(func() { r.stop(t) })
	return r
}

// stop asks the consumer to leave and waits for it.
func (r *running) stop(t *testing.T) {
	t.Helper()
	r.cancel()
	r.wait(t)
}

func (r *running) wait(t *testing.T) {
	t.Helper()
	select {
	case <-r.done:
	case <-time.After(patience):
		buf := make([]byte, 1<<20)
		t.Fatalf("consumer %s does not stop:\n%s", r.ID(), buf[:runtime.Stack(buf, true)])
	}
}

// journal collects what handlers were given, and watches that no two have a
// record of one partition at the same time.
type journal struct {
	t  *testing.T
	mu sync.Mutex
	// got lists the consumer of each record, by partition and offset.
	got   map[registry.Partition]map[int64][]string
	count int
	busy  map[registry.Partition]string
}

func newJournal(t *testing.T) *journal {
	return &journal{t: t, got: map[registry.Partition]map[int64][]string{}, busy: map[registry.Partition]string{}}
}

func (j *journal) handler(id string, then consumer.Handler) consumer.Handler {
	return func(ctx context.Context, r *consumer.Record) error {
		j.begin(id, r)
		var err error
		if then != nil {
			err = then(ctx, r)
		}
		j.mu.Lock()
		delete(j.busy, r.Partition)
		j.mu.Unlock()
		return err
	}
}

func (j *journal) begin(id string, r *consumer.Record) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if other, both := j.busy[r.Partition]; both {
		j.t.Errorf("%s and %s both have a record of %s in hand", other, id, r.Partition)
	}
	j.busy[r.Partition] = id
	if j.got[r.Partition] == nil {
		j.got[r.Partition] = map[int64][]string{}
	}
	j.got[r.Partition][r.Offset] = append(j.got[r.Partition][r.Offset], id)
	j.count++
}

func (j *journal) total() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.count
}

// each calls f for each partition and offset up to n.
func (j *journal) each(partitions []registry.Partition, n int64, f func(p registry.Partition, offset int64, by []string)) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, p := range partitions {
		for o := range n {
			f(p, o, j.got[p][o])
		}
	}
}

// owners reads the group's owner keys.
func owners(t *testing.T, group string) map[registry.Partition]registry.KV {
	t.Helper()
	paths := root.Group(group)
	kvs, _, err := registry.List(context.Background(), shared.store, paths.Owners(), 0)
	must(t, err)
	m := map[registry.Partition]registry.KV{}
	for _, kv := range kvs {
		p, err := paths.ParsePartition(kv.Key)
		must(t, err)
		m[p] = kv
	}
	return m
}

// ownedAs waits until the partitions of one topic are owned as the text says:
// "0:a 1:b" by consumer id.
func ownedAs(t *testing.T, group, topic, want string) {
	t.Helper()
	eventually(t, func() string {
		got := []string{}
		byNumber := map[int32]string{}
		for p, kv := range owners(t, group) {
			if p.Topic == topic {
				byNumber[p.Number] = strings.TrimSuffix(string(kv.Value), "-0")
			}
		}
		for n := int32(0); len(byNumber) > 0; n++ {
			if id, ok := byNumber[n]; ok {
				got = append(got, fmt.Sprintf("%d:%s", n, id))
				delete(byNumber, n)
			}
		}
		if text := strings.Join(got, " "); text != want {
			return fmt.Sprintf("%s is owned as %q, want %q", topic, text, want)
		}
		return ""
	})
}

func committed(t *testing.T, group string, p registry.Partition) string {
	t.Helper()
	kv, _, err := registry.GetKey(context.Background(), shared.store, root.Group(group).Offset(p))
	must(t, err)
	if kv == nil {
		return "none"
	}
	return string(kv.Value)
}

var errHandler = errors.New("handler says no")
