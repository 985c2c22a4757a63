package broker_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/broker"
	"github.com/muster-io/muster/internal/freeport"
	"github.com/muster-io/muster/registry"
)

// threeDaemons are daemons 1 to 3 on the etcd of a fourth, which leads nothing.
type threeDaemons struct {
	t    *testing.T
	st   registry.Store
	cfg  map[int32]broker.Config
	live map[int32]*broker.Daemon
}

func startThree(t *testing.T) *threeDaemons {
	o := start(t, elsewhere(t))
	c := &threeDaemons{t: t, st: openStore(t, o), cfg: map[int32]broker.Config{}, live: map[int32]*broker.Daemon{}}
	for id := range int32(3) {
		cfg := config(t, t.TempDir())
		cfg.ID, cfg.Etcd.Endpoints, cfg.Listen = id+1, o.EtcdEndpoints(), freeport.Must()
		c.cfg[id+1] = cfg
		c.live[id+1] = start(t, cfg)
	}
	for id := range c.live {
		c.sees(id, 1, 2, 3)
	}
	return c
}

func (c *threeDaemons) metadata(of int32, topics ...string) *kmsg.MetadataResponse {
	c.t.Helper()
	req := kmsg.NewPtrMetadataRequest()
	req.Topics = []kmsg.MetadataRequestTopic{}
	for _, name := range topics {
		topic := kmsg.NewMetadataRequestTopic()
		topic.Topic = kmsg.StringPtr(name)
		req.Topics = append(req.Topics, topic)
	}
	k, err := kgo.NewClient(kgo.SeedBrokers(c.live[of].Address()))
	must(c.t, err)
	defer k.Close()
	res, err := k.SeedBrokers()[0].Request(c.t.Context(), req)
	must(c.t, err)
	return res.(*kmsg.MetadataResponse)
}

// sees waits until a daemon shows exactly those brokers, each where it listens.
func (c *threeDaemons) sees(of int32, ids ...int32) {
	c.t.Helper()
	eventually(c.t, func() string {
		var seen []int32
		for _, b := range c.metadata(of).Brokers {
			seen = append(seen, b.NodeID)
			if at := broker.JoinAddress(b.Host, b.Port); at != c.cfg[b.NodeID].Listen {
				return fmt.Sprintf("broker %d is at %s, not %s", b.NodeID, at, c.cfg[b.NodeID].Listen)
			}
		}
		if !slices.Equal(seen, ids) {
			return fmt.Sprintf("daemon %d sees %v, want %v", of, seen, ids)
		}
		return ""
	})
}

func (c *threeDaemons) stop(id int32) {
	c.t.Helper()
	must(c.t, c.live[id].Close())
	delete(c.live, id)
}

func (c *threeDaemons) start(id int32) {
	c.t.Helper()
	c.live[id] = start(c.t, c.cfg[id])
}

// count is what stands about a topic's partitions on a broker.
func (c *threeDaemons) count(topic string, id int32) string {
	kv, _, err := registry.GetKey(c.t.Context(), c.st, registry.Root("").TopicBroker(topic, id))
	must(c.t, err)
	if kv == nil {
		return ""
	}
	if kv.Lease == 0 {
		return "without lease"
	}
	return string(kv.Value)
}

func (c *threeDaemons) counts(topic string, want map[int32]string) {
	c.t.Helper()
	eventually(c.t, func() string {
		for id := range int32(3) {
			if got := c.count(topic, id+1); got != want[id+1] {
				return fmt.Sprintf("count of %s on %d is %q, want %q", topic, id+1, got, want[id+1])
			}
		}
		return ""
	})
}

// Topics are spread over the daemons, clients find the right one whichever they
// ask, and while one is down the others go on.
func TestThreeDaemons(t *testing.T) {
	c := startThree(t)
	rec := create(t, c.st, "orders", 6, 1, 2, 3)
	c.counts("orders", map[int32]string{1: "2", 2: "2", 3: "2"})
	k, err := kgo.NewClient(kgo.SeedBrokers(c.live[2].Address(), c.live[1].Address()), kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.MetadataMinAge(20*time.Millisecond), kgo.MetadataMaxAge(200*time.Millisecond))
	must(t, err)
	t.Cleanup(k.Close)
	for p := range int32(6) {
		produce(t, k, "orders", p, "a")
	}
	for of := range c.live {
		c.knowsLeaders(of, rec, 0)
	}
	c.wrongDaemon(rec)

	c.stop(1)
	c.counts("orders", map[int32]string{2: "2", 3: "2"})
	for of := range c.live {
		c.sees(of, 2, 3)
		c.knowsLeaders(of, rec, 1)
	}
	late := make(chan error, 2)
	for p, replicas := range rec.Partitions {
		if replicas[0] != 1 {
			produce(t, k, "orders", p, "b")
			continue
		}
		k.Produce(t.Context(), &kgo.Record{Topic: "orders", Partition: p, Value: []byte("b")}, func(_ *kgo.Record, err error) { late <- err })
	}
	c.start(1)
	for range 2 {
		select {
		case err := <-late:
			must(t, err)
		case <-time.After(patience):
			t.Fatal("what was produced while the leader was down has not arrived")
		}
	}
	for of := range c.live {
		c.sees(of, 1, 2, 3)
		c.knowsLeaders(of, rec, 0)
	}
	rec, err = registry.AddPartitions(t.Context(), c.st, "", "orders", 9, []int32{1, 2, 3})
	must(t, err)
	c.counts("orders", map[int32]string{1: "3", 2: "3", 3: "3"})
	for p := range int32(3) {
		eventually(t, func() string { // the client learns of it in its time
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if err := k.ProduceSync(ctx, &kgo.Record{Topic: "orders", Partition: 6 + p, Value: []byte("c")}).FirstErr(); err != nil {
				return err.Error()
			}
			return ""
		})
	}
	c.readsAll(rec)

	deleteTopic(t, c.st, "orders")
	c.counts("orders", nil)
	for id, cfg := range c.cfg {
		without(t, cfg.DataDir, "logs", "orders-")
		if left := keys(t, c.st, fmt.Sprintf("/brokers/topics/orders/%d", id)); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
	}
}

// knowsLeaders waits until a daemon names the leaders of a topic; those on the
// broker that is down have none.
func (c *threeDaemons) knowsLeaders(of int32, rec registry.TopicRecord, down int32) {
	c.t.Helper()
	eventually(c.t, func() string {
		topic := c.metadata(of, "orders").Topics[0]
		if len(topic.Partitions) != len(rec.Partitions) {
			return fmt.Sprintf("daemon %d: %d partitions, error %d", of, len(topic.Partitions), topic.ErrorCode)
		}
		for _, p := range topic.Partitions {
			leader, code := rec.Partitions[p.Partition][0], int16(0)
			offline := []int32(nil)
			if leader == down {
				offline, leader, code = []int32{down}, -1, kerr.LeaderNotAvailable.Code
			}
			if p.Leader != leader || p.ErrorCode != code || !slices.Equal(p.OfflineReplicas, offline) || len(p.ISR) != 1 {
				return fmt.Sprintf("daemon %d shows %+v, want leader %d, error %d, offline %v", of, p, leader, code, offline)
			}
		}
		return ""
	})
}

// wrongDaemon asks a daemon for what another leads.
func (c *threeDaemons) wrongDaemon(rec registry.TopicRecord) {
	c.t.Helper()
	for id, d := range c.live {
		if id == rec.Partitions[0][0] {
			continue
		}
		k := newClient(c.t, d, kgo.MaxVersions(fetch11()))
		if err := fetchCodeOf(c.t, k, int(id), "orders", 0, 0); !errors.Is(err, kerr.NotLeaderForPartition) {
			c.t.Errorf("daemon %d answers a fetch with %v", id, err)
		}
	}
}

// readsAll reads every partition from its start.
func (c *threeDaemons) readsAll(rec registry.TopicRecord) {
	c.t.Helper()
	from := map[int32]kgo.Offset{}
	for p := range rec.Partitions {
		from[p] = kgo.NewOffset().AtStart()
	}
	k := newClient(c.t, c.live[3], kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{"orders": from}))
	ctx, cancel := context.WithTimeout(c.t.Context(), patience)
	defer cancel()
	got := map[int32]string{}
	for n := 0; n < 15; {
		f := k.PollFetches(ctx)
		must(c.t, f.Err())
		f.EachRecord(func(r *kgo.Record) { got[r.Partition] += string(r.Value); n++ })
	}
	for p := range int32(9) {
		want := "ab"
		if p > 5 {
			want = "c"
		}
		if got[p] != want {
			c.t.Errorf("partition %d has %q, want %q", p, got[p], want)
		}
	}
}

// A daemon whose lease ends takes its counts along, and writes them anew; a count
// is not written for a topic that is gone meanwhile.
func TestCountsFollowTheSession(t *testing.T) {
	c := startThree(t)
	create(t, c.st, "orders", 3, 1, 2, 3)
	create(t, c.st, "clicks", 3, 1, 2, 3)
	all := map[int32]string{1: "1", 2: "1", 3: "1"}
	c.counts("orders", all)
	c.counts("clicks", all)
	kv, _, err := registry.GetKey(t.Context(), c.st, "/brokers/ids/2")
	must(t, err)
	must(t, c.st.Revoke(t.Context(), kv.Lease))
	deleteTopic(t, c.st, "clicks")
	c.counts("orders", all)
	c.counts("clicks", nil)
	c.sees(3, 1, 2, 3)
	if left := keys(t, c.st, "/brokers/topics/clicks"); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}
