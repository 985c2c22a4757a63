package api_test

import (
	"context"
	"encoding/binary"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/broker/api"
	"github.com/muster-io/muster/broker/partition"
)

// produceRequest sends records to the partitions of one topic.
func produceRequest(version, acks int16, topic api.Topic, records map[int32][]byte) *kmsg.ProduceRequest {
	req := kmsg.NewPtrProduceRequest()
	req.Version, req.Acks, req.TimeoutMillis = version, acks, 10_000
	t := kmsg.NewProduceRequestTopic()
	t.Topic, t.TopicID = topic.Name, topic.ID
	for number := range int32(100) {
		if b, ok := records[number]; ok {
			p := kmsg.NewProduceRequestTopicPartition()
			p.Partition, p.Records = number, b
			t.Partitions = append(t.Partitions, p)
		}
	}
	req.Topics = append(req.Topics, t)
	return req
}

func TestProduceEveryVersion(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 1)
	topic := b.topic("orders")
	c := b.dial(t)
	next := int64(0)
	for version := int16(3); version <= 13; version++ {
		for _, acks := range []int16{-1, 1} {
			resp := ask[*kmsg.ProduceResponse](c, produceRequest(version, acks, topic, map[int32][]byte{0: testBatch(3, 5, "v")}))
			got := resp.Topics[0].Partitions[0]
			if got.ErrorCode != 0 || got.BaseOffset != next || got.LogAppendTime != -1 {
				t.Fatalf("version %d acks %d: %+v, want base offset %d", version, acks, got, next)
			}
			if version >= 5 && got.LogStartOffset != 0 {
				t.Fatalf("version %d: log start offset %d", version, got.LogStartOffset)
			}
			if version < 13 && resp.Topics[0].Topic != "orders" || version >= 13 && resp.Topics[0].TopicID != topic.ID {
				t.Fatalf("version %d: topic %q id %x", version, resp.Topics[0].Topic, resp.Topics[0].TopicID)
			}
			next += 3
		}
	}
}

func TestProduceVersionsBelowThreeAreAdvertisedButNotServed(t *testing.T) {
	b := start(t, api.Options{})
	table := ask[*kmsg.ApiVersionsResponse](b.dial(t), kmsg.NewPtrApiVersionsRequest())
	if k := table.ApiKeys[0]; k.ApiKey != 0 || k.MinVersion != 0 || k.MaxVersion != 13 {
		t.Fatalf("produce is advertised as %+v", k)
	}
	for version := range int16(3) {
		c := b.dial(t)
		req := kmsg.NewPtrProduceRequest()
		req.Version = version
		c.send(req)
		c.closed()
	}
}

func TestProduceErrorsAreForEachPartition(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 4)
	b.change(func(s *api.Snapshot) {
		s.Brokers = append(s.Brokers, api.Broker{ID: 2, Host: "fd00:10::2", Port: 9093, Rack: "r2"})
		topic, _ := s.Topics.Get("orders")
		topic.Partitions = append([]api.PartitionInfo(nil), topic.Partitions...)
		topic.Partitions[1].Leader, topic.Partitions[1].LeaderEpoch = 2, 9
		s.Topics = s.Topics.Change([]api.Topic{topic}, nil)
	})
	corrupt := testBatch(1, 5, "v")
	corrupt[30]++
	old := testBatch(1, 5, "v")
	old[16] = 1
	c := b.dial(t)
	for _, version := range []int16{9, 13} {
		resp := ask[*kmsg.ProduceResponse](c, produceRequest(version, -1, b.topic("orders"), map[int32][]byte{
			0: testBatch(1, 5, "v"), 1: testBatch(1, 5, "v"), 2: corrupt, 3: old, 4: testBatch(1, 5, "v"),
		}))
		var codes []int16
		for _, p := range resp.Topics[0].Partitions {
			codes = append(codes, p.ErrorCode)
			if p.ErrorCode != 0 && (p.BaseOffset != -1 || p.LogStartOffset != -1) {
				t.Errorf("version %d: offsets beside an error: %+v", version, p)
			}
		}
		for i, want := range []int16{0, 6, 2, 87, 3} {
			if codes[i] != want {
				t.Errorf("version %d: codes %v, want 0 6 2 87 3", version, codes)
				break
			}
		}
		if version < 10 {
			continue
		}
		if l := resp.Topics[0].Partitions[1].CurrentLeader; l.LeaderID != 2 || l.LeaderEpoch != 9 {
			t.Errorf("current leader %+v", l)
		}
		if len(resp.Brokers) != 1 || resp.Brokers[0].Host != "fd00:10::2" || resp.Brokers[0].Port != 9093 {
			t.Errorf("leaders' addresses %+v", resp.Brokers)
		}
	}
}

func TestProduceRefusesTheWholeRequest(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 1)
	topic := b.topic("orders")
	c := b.dial(t)
	// The numbers are those of golden/kafka-4.4 and of probes of a Kafka 4.4, except
	// that Kafka looks at the records of "acks 2" and "transaction" first.
	for name, test := range map[string]struct {
		change func(*kmsg.ProduceRequest)
		code   int16
	}{
		"acks 2":           {func(r *kmsg.ProduceRequest) { r.Acks = 2 }, 21},
		"transaction":      {func(r *kmsg.ProduceRequest) { r.TransactionID = kmsg.StringPtr("tx") }, 53},
		"unknown topic id": {func(r *kmsg.ProduceRequest) { r.Topics[0].TopicID = uuid.New() }, 100},
		"zero topic id":    {func(r *kmsg.ProduceRequest) { r.Topics[0].TopicID = uuid.Nil }, 100},
		"no records":       {func(r *kmsg.ProduceRequest) { r.Topics[0].Partitions[0].Records = nil }, 87},
		"cut records": {func(r *kmsg.ProduceRequest) {
			r.Topics[0].Partitions[0].Records = r.Topics[0].Partitions[0].Records[:40]
		}, 2},
	} {
		req := produceRequest(13, -1, topic, map[int32][]byte{0: testBatch(1, 5, "v")})
		test.change(req)
		resp := ask[*kmsg.ProduceResponse](c, req)
		if got := resp.Topics[0].Partitions[0].ErrorCode; got != test.code {
			t.Errorf("%s: error %d, want %d", name, got, test.code)
		}
	}
	// The message is about what was sent, and says nothing of this machine.
	req := produceRequest(13, -1, topic, map[int32][]byte{0: []byte("short")})
	got := ask[*kmsg.ProduceResponse](c, req).Topics[0].Partitions[0].ErrorMessage
	if got == nil || !strings.Contains(*got, "5 bytes") || strings.Contains(*got, b.dir) {
		t.Errorf("message %v", got)
	}
	p, _ := b.Partition("orders", 0)
	if p.End() != 0 {
		t.Errorf("%d records were stored", p.End())
	}
}

// stuckPartition appends, but never acknowledges by itself.
type stuckPartition struct {
	partition.Partition
	acknowledge chan struct{} // closed: the high watermark is the end
	waiting     chan int64    // each AwaitHighWatermark
}

func newStuck(p partition.Partition) *stuckPartition {
	return &stuckPartition{Partition: p, acknowledge: make(chan struct{}), waiting: make(chan int64, 100)}
}

func (p *stuckPartition) HighWatermark() int64 {
	select {
	case <-p.acknowledge:
		return p.End()
	default:
		return 0
	}
}

func (p *stuckPartition) AwaitHighWatermark(ctx context.Context, offset int64) error {
	p.waiting <- offset
	select {
	case <-p.acknowledge:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func TestProduceTimesOutWhenNothingIsAcknowledged(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 1)
	b.replace("orders", 0, func(p partition.Partition) partition.Partition { return newStuck(p) })
	topic := b.topic("orders")
	c := b.dial(t)
	for _, timeout := range []int32{-5, 0, 20} {
		req := produceRequest(9, -1, topic, map[int32][]byte{0: testBatch(1, 5, "v")})
		req.TimeoutMillis = timeout
		resp := ask[*kmsg.ProduceResponse](c, req)
		if got := resp.Topics[0].Partitions[0]; got.ErrorCode != kerr.RequestTimedOut.Code || got.BaseOffset != -1 {
			t.Fatalf("timeout %d: %+v", timeout, got)
		}
	}
	resp := ask[*kmsg.ProduceResponse](c, produceRequest(9, 1, topic, map[int32][]byte{0: testBatch(1, 5, "v")}))
	if got := resp.Topics[0].Partitions[0]; got.ErrorCode != 0 || got.BaseOffset != 3 {
		t.Fatalf("acks=1 does not wait: %+v", got)
	}
}

// The appends of pipelined requests must all be done before the first is
// acknowledged: only so can they share an fsync.
func TestPipelinedProducesAppendBeforeTheFirstIsAnswered(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 1)
	var stuck *stuckPartition
	b.replace("orders", 0, func(p partition.Partition) partition.Partition { stuck = newStuck(p); return stuck })
	topic := b.topic("orders")
	c := b.dial(t)
	const n = 5
	var reqs []kmsg.Request
	for range n {
		req := produceRequest(9, -1, topic, map[int32][]byte{0: testBatch(1, 5, "v")})
		c.send(req)
		reqs = append(reqs, req)
	}
	waitFor(t, "five appends", func() bool { return stuck.End() == n })
	if first := <-stuck.waiting; first != 1 || len(stuck.waiting) != 0 {
		t.Fatalf("the first wait is for %d, %d more wait", first, len(stuck.waiting))
	}
	close(stuck.acknowledge)
	for i, req := range reqs {
		resp := c.receive(req, int32(i+1)).(*kmsg.ProduceResponse)
		if got := resp.Topics[0].Partitions[0]; got.ErrorCode != 0 || got.BaseOffset != int64(i) {
			t.Fatalf("request %d: %+v", i, got)
		}
	}
}

func TestProduceWithoutAcks(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 1)
	topic := b.topic("orders")
	c := b.dial(t)
	c.send(produceRequest(9, 0, topic, map[int32][]byte{0: testBatch(2, 5, "v")}))
	// The next answer is that of the next request: there was none for the first.
	resp := ask[*kmsg.ProduceResponse](c, produceRequest(9, 1, topic, map[int32][]byte{0: testBatch(1, 5, "v")}))
	if got := resp.Topics[0].Partitions[0].BaseOffset; got != 2 {
		t.Fatalf("base offset %d, want 2", got)
	}
	c.send(produceRequest(9, 0, topic, map[int32][]byte{7: testBatch(2, 5, "v")}))
	c.closed()
	_ = c.nc.Close()
	<-b.gone
	if log := b.log.String(); strings.Count(log, "\n") != 1 || !strings.Contains(log, "client_id=raw") || !strings.Contains(log, "partition 7") {
		t.Errorf("log: %s", log)
	}
}

// brokenPartition fails in a way that has no code.
type brokenPartition struct{ partition.Partition }

func (brokenPartition) Append([]byte) (partition.Appended, error) {
	return partition.Appended{}, errors.New("the disk sings")
}

func TestErrorsWithoutACodeAreLogged(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 1)
	b.replace("orders", 0, func(p partition.Partition) partition.Partition { return brokenPartition{p} })
	resp := ask[*kmsg.ProduceResponse](b.dial(t),
		produceRequest(8, 1, b.topic("orders"), map[int32][]byte{0: testBatch(1, 5, "v")}))
	got := resp.Topics[0].Partitions[0]
	if got.ErrorCode != -1 || got.ErrorMessage != nil {
		t.Errorf("answer %+v", got)
	}
	if log := b.log.String(); !strings.Contains(log, "the disk sings") || !strings.Contains(log, "topic=orders partition=0") {
		t.Errorf("log: %s", log)
	}
}

// What Append may trust: the bytes are the partition's own, not a buffer that the
// next request overwrites.
func TestAppendedBytesAreNotReused(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 1)
	keep := &keepingPartition{}
	b.replace("orders", 0, func(p partition.Partition) partition.Partition { keep.Partition = p; return keep })
	c := b.dial(t)
	for i := range 3 {
		ask[*kmsg.ProduceResponse](c, produceRequest(9, 1, b.topic("orders"),
			map[int32][]byte{0: testBatch(1, int64(i), "v")}))
	}
	for i, batch := range keep.batches {
		if ts := binary.BigEndian.Uint64(batch[27:]); ts != uint64(i) {
			t.Errorf("batch %d has the timestamp %d", i, ts)
		}
	}
}

type keepingPartition struct {
	partition.Partition
	batches [][]byte
}

func (p *keepingPartition) Append(b []byte) (partition.Appended, error) {
	p.batches = append(p.batches, b)
	return p.Partition.Append(b)
}

// waitFor waits for a condition that nothing signals.
func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited too long for %s", what)
		}
	}
}
