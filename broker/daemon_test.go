package broker_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/broker"
	"github.com/muster-io/muster/internal/freeport"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/etcd"
)

// patience is how long a test waits for what should happen soon. It is shorter than
// what would happen without the daemon's doing: a fetch that is answered after its
// minute, a lease of registry.MaxTTL that runs out.
const patience = 45 * time.Second

// sessionTimeout keeps a daemon's session though the machine stands still for a while:
// who wants it lost revokes its lease.
const sessionTimeout = 30 * time.Second

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func config(t *testing.T, dir string) broker.Config {
	return broker.Config{ID: 1, DataDir: dir, Listen: "127.0.0.1:0", SessionTimeout: sessionTimeout, AutoCreateTopics: true,
		EtcdListenClient: "http://" + freeport.Must(), EtcdListenPeer: "http://" + freeport.Must(), NumPartitions: 2}
}

func start(t *testing.T, cfg broker.Config) *broker.Daemon {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	d, err := broker.Start(ctx, cfg)
	must(t, err)
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func startError(t *testing.T, cfg broker.Config) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	d, err := broker.Start(ctx, cfg)
	if err == nil {
		d.Close()
		t.Fatal("the daemon started")
	}
	return err.Error()
}

func openStore(t *testing.T, d *broker.Daemon) *etcd.Store {
	t.Helper()
	st, err := etcd.Open(t.Context(), etcd.Options{Endpoints: d.EtcdEndpoints()})
	must(t, err)
	t.Cleanup(func() { st.Close() })
	return st
}

func newClient(t *testing.T, d *broker.Daemon, opts ...kgo.Opt) *kgo.Client {
	t.Helper()
	k, err := kgo.NewClient(append(opts, kgo.SeedBrokers(d.Address()), kgo.MetadataMinAge(20*time.Millisecond))...)
	must(t, err)
	t.Cleanup(k.Close)
	return k
}

func eventually(t *testing.T, missing func() string) {
	t.Helper()
	deadline := time.Now().Add(patience)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for what := missing(); what != ""; what = missing() {
		if time.Now().After(deadline) {
			t.Fatalf("after %s: %s", patience, what)
		}
		<-tick.C
	}
}

func keys(t *testing.T, st registry.Store, prefix string) map[string]registry.KV {
	t.Helper()
	kvs, _, err := registry.List(t.Context(), st, prefix, 0)
	must(t, err)
	m := map[string]registry.KV{}
	for _, kv := range kvs {
		m[kv.Key] = kv
	}
	return m
}

// A topic that a client asks for is created, its records outlive a restart, and
// a daemon that stops takes its keys along at once.
func TestDaemonServesAndLeaves(t *testing.T) {
	outer := start(t, config(t, t.TempDir())) // its etcd outlives the daemon under test
	st := openStore(t, outer)
	cfg := config(t, t.TempDir())
	cfg.ID, cfg.Etcd, cfg.Root = 7, etcd.Options{Endpoints: outer.EtcdEndpoints()}, "/kc/prod"
	for run := range 3 {
		d := start(t, cfg)
		k := newClient(t, d, kgo.AllowAutoTopicCreation(), kgo.DefaultProduceTopic("orders"), kgo.RecordPartitioner(kgo.ManualPartitioner()))
		must(t, k.ProduceSync(t.Context(), &kgo.Record{Partition: 1, Value: fmt.Append(nil, "v", run)}).FirstErr())
		k.AddConsumePartitions(map[string]map[int32]kgo.Offset{"orders": {1: kgo.NewOffset().AtStart()}})
		var got []string
		for len(got) <= run {
			f := k.PollFetches(t.Context())
			must(t, f.Err())
			f.EachRecord(func(r *kgo.Record) { got = append(got, string(r.Value)) })
		}
		if want := []string{"v0", "v1", "v2"}[:run+1]; strings.Join(got, " ") != strings.Join(want, " ") {
			t.Errorf("run %d: %v", run, got)
		}
		k.Close()
		host, _, err := net.SplitHostPort(d.Address())
		must(t, err)
		eventually(t, func() string {
			all := keys(t, st, "/kc/prod/")
			if kv := all["/kc/prod/brokers/topics/orders/7"]; string(kv.Value) != "2" || kv.Lease == 0 {
				return fmt.Sprintf("count of partitions is %q, lease %x", kv.Value, kv.Lease)
			}
			if kv := all["/kc/prod/brokers/ids/7"]; !strings.Contains(string(kv.Value), `"host":"`+host+`"`) || kv.Lease == 0 {
				return fmt.Sprintf("broker record is %q", kv.Value)
			}
			return ""
		})
		must(t, d.Close())
		for key, kv := range keys(t, st, "/kc/prod/") {
			if kv.Lease != 0 || strings.HasPrefix(key, "/kc/prod/brokers/ids/") {
				t.Errorf("run %d: %s is left behind", run, key)
			}
		}
	}
	for key := range keys(t, st, "/") {
		if strings.Contains(key, "orders") && !strings.HasPrefix(key, "/kc/prod/") {
			t.Errorf("%s stands outside the root", key)
		}
	}
}

// A daemon whose lease is taken away registers again and keeps serving meanwhile.
func TestDaemonSurvivesTheLossOfItsSession(t *testing.T) {
	d := start(t, config(t, t.TempDir()))
	st := openStore(t, d)
	k := newClient(t, d, kgo.AllowAutoTopicCreation(), kgo.DefaultProduceTopic("t"))
	must(t, k.ProduceSync(t.Context(), kgo.StringRecord("a")).FirstErr())
	eventually(t, func() string {
		if _, ok := keys(t, st, "/brokers/topics/")["/brokers/topics/t/1"]; !ok {
			return "no count"
		}
		return ""
	})
	before := keys(t, st, "/brokers/")["/brokers/ids/1"]
	must(t, st.Revoke(t.Context(), before.Lease))
	must(t, k.ProduceSync(t.Context(), kgo.StringRecord("b")).FirstErr())
	eventually(t, func() string {
		all := keys(t, st, "/brokers/")
		id, count := all["/brokers/ids/1"], all["/brokers/topics/t/1"]
		if id.Lease == 0 || id.Lease == before.Lease || count.Lease != id.Lease {
			return fmt.Sprintf("leases: id %x, count %x, before %x", id.Lease, count.Lease, before.Lease)
		}
		return ""
	})
}

func TestAutoCreationCanBeSwitchedOff(t *testing.T) {
	cfg := config(t, t.TempDir())
	cfg.AutoCreateTopics = false
	d := start(t, cfg)
	k := newClient(t, d)
	req := kmsg.NewPtrMetadataRequest()
	req.AllowAutoTopicCreation = true
	topic := kmsg.NewMetadataRequestTopic()
	topic.Topic = kmsg.StringPtr("ghost")
	req.Topics = append(req.Topics, topic)
	res, err := req.RequestWith(t.Context(), k)
	must(t, err)
	if err := kerr.ErrorForCode(res.Topics[0].ErrorCode); !errors.Is(err, kerr.UnknownTopicOrPartition) {
		t.Errorf("got %v", err)
	}
}

// Producer ids differ among daemons and over restarts.
func TestProducerIDsAreNeverHandedOutTwice(t *testing.T) {
	outer := start(t, config(t, t.TempDir()))
	cfg := config(t, t.TempDir())
	cfg.ID, cfg.Etcd = 2, etcd.Options{Endpoints: outer.EtcdEndpoints()}
	seen := map[int64]bool{}
	ask := func(d *broker.Daemon) {
		k := newClient(t, d)
		req := kmsg.NewPtrInitProducerIDRequest()
		res, err := req.RequestWith(t.Context(), k)
		must(t, err)
		must(t, kerr.ErrorForCode(res.ErrorCode))
		if seen[res.ProducerID] {
			t.Errorf("producer id %d was handed out twice", res.ProducerID)
		}
		seen[res.ProducerID] = true
	}
	for range 3 {
		d := start(t, cfg)
		ask(d)
		ask(outer)
		ask(d)
		must(t, d.Close())
	}
}

// What keeps a daemon from starting says what to do.
func TestStartErrors(t *testing.T) {
	dir := t.TempDir()
	d := start(t, config(t, dir))
	taken := func(change func(*broker.Config)) broker.Config {
		cfg := config(t, t.TempDir())
		change(&cfg)
		return cfg
	}
	for want, cfg := range map[string]broker.Config{
		"is in use by another daemon: stop it, or choose another --data-dir": config(t, dir),
		"choose another --listen":               taken(func(c *broker.Config) { c.Listen = d.Address() }),
		"is taken by " + d.Address():            taken(func(c *broker.Config) { c.Etcd.Endpoints = d.EtcdEndpoints() }),
		"say with --advertise host:port":        taken(func(c *broker.Config) { c.Listen = "0.0.0.0:0" }),
		"no client can connect there":           taken(func(c *broker.Config) { c.Advertise = "[::]:9092" }),
		"add --insecure":                        taken(func(c *broker.Config) { c.EtcdListenClient = "http://0.0.0.0:2379" }),
		"or use that etcd with --etcd-external": taken(func(c *broker.Config) { c.EtcdListenClient = d.EtcdEndpoints()[0] }),
		"--broker-id -1":                        taken(func(c *broker.Config) { c.ID = -1 }),
		"--session-timeout 1s: want 2s to 1m0s": taken(func(c *broker.Config) { c.SessionTimeout = time.Second }),
		"(start one with: muster server)": taken(func(c *broker.Config) {
			c.Etcd = etcd.Options{Endpoints: []string{"http://" + freeport.Must()}, DialTimeout: time.Second}
		}),
	} {
		if got := startError(t, cfg); !strings.Contains(got, want) {
			t.Errorf("%q does not say %q", got, want)
		} else if strings.Contains(got, "\n") {
			t.Errorf("%q is more than a line", got)
		}
	}
	// As root every directory can be written; what lies under a file cannot be made.
	file := filepath.Join(dir, "muster.json", "below")
	if got := startError(t, config(t, file)); !strings.Contains(got, "choose another --data-dir") {
		t.Error(got)
	}
	must(t, d.Close())
	other := config(t, dir)
	other.ID = 2
	if got := startError(t, other); !strings.Contains(got, "belongs to broker 1: start with --broker-id 1") {
		t.Error(got)
	}
}

// A daemon that belongs to a cluster leaves a registry that has lost its keys as it is,
// so that a backup can be restored there, and does not look at half of one.
func TestRegistryThatLostItsKeys(t *testing.T) {
	outer := start(t, config(t, t.TempDir()))
	st := openStore(t, outer)
	root, err := registry.ParseRoot("/muster")
	must(t, err)
	cfg := config(t, t.TempDir())
	cfg.ID, cfg.Etcd.Endpoints, cfg.Root = 7, outer.EtcdEndpoints(), root
	must(t, start(t, cfg).Close())
	var file strings.Builder
	_, err = registry.Backup(t.Context(), st, root, &file)
	must(t, err)
	_, err = st.Txn(t.Context(), registry.Txn{Then: []registry.Op{{Kind: registry.OpDelete, Key: root.Prefix(), Prefix: true}}})
	must(t, err)
	if got := startError(t, cfg); !strings.Contains(got, "the registry has no /muster/cluster/id") || !strings.Contains(got, "muster registry restore") {
		t.Error(got)
	}
	put(t, st, root.Restoring(), "half")
	fresh := config(t, t.TempDir())
	fresh.ID, fresh.Etcd, fresh.Root = 8, cfg.Etcd, root
	for _, c := range []broker.Config{cfg, fresh} {
		if got := startError(t, c); !strings.Contains(got, "run muster registry restore again") {
			t.Error(got)
		}
	}
	_, err = st.Txn(t.Context(), registry.Txn{Then: []registry.Op{registry.Delete(root.Restoring())}})
	must(t, err)
	_, err = registry.Restore(t.Context(), st, root, strings.NewReader(file.String()))
	must(t, err)
	must(t, start(t, cfg).Close())
}

// A copy of a data directory does not take the place of the daemon that uses the
// original, though it remembers its lease.
func TestCopiedDataDirectory(t *testing.T) {
	outer := start(t, config(t, t.TempDir()))
	st := openStore(t, outer)
	cfg := config(t, t.TempDir())
	cfg.ID, cfg.Etcd.Endpoints = 7, outer.EtcdEndpoints()
	d := start(t, cfg)
	before := keys(t, st, "/brokers/ids/7")["/brokers/ids/7"]
	other := cfg
	other.DataDir = filepath.Join(t.TempDir(), "copy")
	must(t, os.CopyFS(other.DataDir, os.DirFS(cfg.DataDir)))
	if got := startError(t, other); !strings.Contains(got, "is taken by "+d.Address()) {
		t.Error(got)
	}
	if after := keys(t, st, "/brokers/ids/7")["/brokers/ids/7"]; after.ModRevision != before.ModRevision {
		t.Errorf("the record was %+v and is %+v", before, after)
	}
}
