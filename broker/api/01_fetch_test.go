package api_test

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/broker/api"
	"github.com/muster-io/muster/broker/partition"
)

type fetchFrom struct {
	partition int32
	offset    int64
	maxBytes  int32
	epoch     int32
}

// fetchRequest asks partitions of one topic for all that is there, at once.
func fetchRequest(version int16, topic api.Topic, from ...fetchFrom) *kmsg.FetchRequest {
	req := kmsg.NewPtrFetchRequest()
	req.Version, req.MinBytes, req.MaxBytes = version, 1, 1<<20
	t := kmsg.NewFetchRequestTopic()
	t.Topic, t.TopicID = topic.Name, topic.ID
	for _, f := range from {
		p := kmsg.NewFetchRequestTopicPartition()
		p.Partition, p.FetchOffset, p.CurrentLeaderEpoch = f.partition, f.offset, f.epoch
		p.PartitionMaxBytes = 1 << 20
		if f.maxBytes > 0 {
			p.PartitionMaxBytes = f.maxBytes
		}
		t.Partitions = append(t.Partitions, p)
	}
	req.Topics = append(req.Topics, t)
	return req
}

// fill appends batches of one record each and waits until they can be read.
func (b *broker) fill(t *testing.T, topic string, number int32, batches ...[]byte) {
	t.Helper()
	p, err := b.Partition(topic, number)
	if err != nil {
		t.Fatal(err)
	}
	for _, batch := range batches {
		a, err := p.Append(batch)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.AwaitHighWatermark(context.Background(), a.Next); err != nil {
			t.Fatal(err)
		}
	}
}

func TestFetchEveryVersion(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 2)
	topic := b.topic("orders")
	batch := testBatch(3, 5, "v")
	size := len(batch)
	b.fill(t, "orders", 0, batch, testBatch(3, 6, "w"))
	c := b.dial(t)
	for version := int16(4); version <= 18; version++ {
		for _, isolation := range []int8{0, 1} {
			req := fetchRequest(version, topic, fetchFrom{0, 4, 0, -1}, fetchFrom{1, 0, 0, 7})
			req.IsolationLevel = isolation
			resp := ask[*kmsg.FetchResponse](c, req)
			if resp.ErrorCode != 0 || resp.SessionID != 0 || resp.ThrottleMillis != 0 {
				t.Fatalf("version %d: %+v", version, resp)
			}
			got := resp.Topics[0].Partitions[0]
			if got.ErrorCode != 0 || got.HighWatermark != 6 || got.LastStableOffset != 6 || got.AbortedTransactions != nil ||
				got.PreferredReadReplica != -1 || len(got.RecordBatches) != size {
				t.Fatalf("version %d: %+v", version, got)
			}
			if want := int64(-1); version >= 5 && got.LogStartOffset != 0 || version < 5 && got.LogStartOffset != want {
				t.Fatalf("version %d: log start offset %d", version, got.LogStartOffset)
			}
			if empty := resp.Topics[0].Partitions[1]; empty.ErrorCode != 0 || empty.HighWatermark != 0 || empty.RecordBatches == nil {
				t.Fatalf("version %d: empty partition: %+v", version, empty)
			}
		}
	}
}

func TestFetchErrors(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 2)
	b.change(func(s *api.Snapshot) {
		s.Brokers = append(s.Brokers, api.Broker{ID: 2, Host: "fd00:10::2", Port: 9093})
		topic, _ := s.Topics.Get("orders")
		topic.Partitions = append([]api.PartitionInfo(nil), topic.Partitions...)
		topic.Partitions[1].Leader, topic.Partitions[1].LeaderEpoch = 2, 9
		s.Topics = s.Topics.Change([]api.Topic{topic}, nil)
	})
	topic := b.topic("orders")
	b.fill(t, "orders", 0, testBatch(3, 5, "v"))
	c := b.dial(t)
	for name, test := range map[string]struct {
		from fetchFrom
		code int16
	}{
		"past the end":    {fetchFrom{0, 4, 0, -1}, 1},
		"negative offset": {fetchFrom{0, -1, 0, -1}, 1},
		"no partition":    {fetchFrom{5, 0, 0, -1}, 3},
		"not led here":    {fetchFrom{1, 0, 0, -1}, 6},
		"old epoch":       {fetchFrom{0, 0, 0, 6}, 74},
		"new epoch":       {fetchFrom{0, 0, 0, 8}, 75},
	} {
		for _, version := range []int16{9, 12, 18} {
			req := fetchRequest(version, topic, test.from)
			req.MaxWaitMillis = 60_000 // an error is answered at once
			resp := ask[*kmsg.FetchResponse](c, req)
			got := resp.Topics[0].Partitions[0]
			if got.ErrorCode != test.code || len(got.RecordBatches) != 0 {
				t.Errorf("%s, version %d: %+v", name, version, got)
			}
			if test.code == 1 && (got.HighWatermark != 3 || got.LogStartOffset != 0) {
				t.Errorf("%s, version %d: the offsets are not told: %+v", name, version, got)
			}
			if test.code == 6 && version >= 12 && (got.CurrentLeader.LeaderID != 2 || got.CurrentLeader.LeaderEpoch != 9) {
				t.Errorf("%s, version %d: current leader %+v", name, version, got.CurrentLeader)
			}
			if test.code == 6 && version >= 16 && (len(resp.Brokers) != 1 || resp.Brokers[0].Host != "fd00:10::2") {
				t.Errorf("%s, version %d: addresses %+v", name, version, resp.Brokers)
			}
		}
	}
	topic.ID = uuid.New()
	if got := ask[*kmsg.FetchResponse](c, fetchRequest(13, topic, fetchFrom{0, 0, 0, -1})).Topics[0].Partitions[0]; got.ErrorCode != 100 {
		t.Errorf("unknown topic id: %+v", got)
	}
}

func TestFetchNeverMakesASession(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 1)
	topic := b.topic("orders")
	c := b.dial(t)
	for _, test := range []struct {
		id, epoch int32
		code      int16
	}{{0, 0, 0}, {0, -1, 0}, {123, 0, 0}, {123, -1, 0}, {123, 1, 70}, {0, 5, 70}} {
		req := fetchRequest(12, topic, fetchFrom{0, 0, 0, -1})
		req.SessionID, req.SessionEpoch = test.id, test.epoch
		resp := ask[*kmsg.FetchResponse](c, req)
		if resp.ErrorCode != test.code || resp.SessionID != 0 {
			t.Errorf("session %d epoch %d: error %d, session %d", test.id, test.epoch, resp.ErrorCode, resp.SessionID)
		}
		if test.code == 0 && len(resp.Topics) != 1 {
			t.Errorf("session %d epoch %d: %d topics", test.id, test.epoch, len(resp.Topics))
		}
	}
}

func TestFetchLimits(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 2)
	topic := b.topic("orders")
	one := testBatch(1, 5, "v")
	size := int32(len(one))
	for number := range int32(2) {
		for range 3 {
			b.fill(t, "orders", number, bytes.Clone(one))
		}
	}
	c := b.dial(t)
	for name, test := range map[string]struct {
		max, max0, max1 int32
		want            [2]int32 // batches
	}{
		"all":                                {1 << 20, 1 << 20, 1 << 20, [2]int32{3, 3}},
		"partition limits":                   {1 << 20, 2 * size, size, [2]int32{2, 1}},
		"whole batches only":                 {1 << 20, 2*size + 5, 2*size - 1, [2]int32{2, 1}},
		"overall limit":                      {4 * size, 1 << 20, 1 << 20, [2]int32{3, 1}},
		"overall limit falls in a batch":     {4*size - 1, 1 << 20, 1 << 20, [2]int32{3, 0}},
		"one batch whatever the limits":      {1, 1, 1, [2]int32{1, 0}},
		"a second partition gets no such":    {1 << 20, 3 * size, 1, [2]int32{3, 0}},
		"negative limits are none to exceed": {-1, -1, -1, [2]int32{1, 0}},
	} {
		req := fetchRequest(11, topic, fetchFrom{0, 0, 0, -1}, fetchFrom{1, 0, 0, -1})
		req.MaxBytes = test.max
		req.Topics[0].Partitions[0].PartitionMaxBytes = test.max0
		req.Topics[0].Partitions[1].PartitionMaxBytes = test.max1
		req.MinBytes, req.MaxWaitMillis = 1<<20, 60_000 // must not wait for what does not fit
		if name == "all" {
			req.MinBytes = 1
		}
		resp := ask[*kmsg.FetchResponse](c, req)
		for i, p := range resp.Topics[0].Partitions {
			if got := int32(len(p.RecordBatches)); got != test.want[i]*size {
				t.Errorf("%s: partition %d has %d bytes, want %d batches of %d", name, i, got, test.want[i], size)
			}
		}
	}
}

// polledPartition tells when somebody waits for it to grow.
type polledPartition struct {
	partition.Partition
	polled chan struct{}
}

func (p *polledPartition) Grown(offset int64) <-chan struct{} {
	p.polled <- struct{}{}
	return p.Partition.Grown(offset)
}

func (b *broker) watchPolls(topic string, number int) chan struct{} {
	polled := make(chan struct{}, 1000)
	b.replace(topic, number, func(p partition.Partition) partition.Partition { return &polledPartition{p, polled} })
	return polled
}

func TestFetchWaitsForMinBytes(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 2)
	topic := b.topic("orders")
	polled := b.watchPolls("orders", 1)
	size := len(testBatch(1, 5, "v"))
	c := b.dial(t)
	req := fetchRequest(12, topic, fetchFrom{0, 0, 0, -1}, fetchFrom{1, 0, 0, -1})
	req.MinBytes, req.MaxWaitMillis = int32(3*size), 60_000
	id := c.send(req)
	<-polled
	b.fill(t, "orders", 0, testBatch(1, 5, "v"))
	<-polled // it was not enough: it waits again
	b.fill(t, "orders", 1, testBatch(1, 5, "v"))
	<-polled
	b.fill(t, "orders", 0, testBatch(1, 5, "v"))
	resp := c.receive(req, id).(*kmsg.FetchResponse)
	p0, p1 := resp.Topics[0].Partitions[0], resp.Topics[0].Partitions[1]
	if len(p0.RecordBatches) != 2*size || len(p1.RecordBatches) != size || p0.HighWatermark != 2 {
		t.Fatalf("%d and %d bytes, want 2 and 1 batches of %d", len(p0.RecordBatches), len(p1.RecordBatches), size)
	}
}

func TestFetchGivesUpAfterMaxWait(t *testing.T) {
	b := start(t, api.Options{FetchMaxWait: 50 * time.Millisecond})
	b.addTopic("orders", 1)
	topic := b.topic("orders")
	for _, wait := range []int32{0, -1, 30, 60_000} { // the last is bounded by the option
		req := fetchRequest(12, topic, fetchFrom{0, 0, 0, -1})
		req.MaxWaitMillis = wait
		began := time.Now()
		resp := ask[*kmsg.FetchResponse](b.dial(t), req)
		took := time.Since(began)
		if resp.Topics[0].Partitions[0].ErrorCode != 0 || wait == 30 && took < 30*time.Millisecond || took > patience/2 {
			t.Errorf("max wait %d: took %s, %+v", wait, took, resp.Topics[0].Partitions[0])
		}
	}
}

func TestFetchIsReleasedWhenTheClientGoesAway(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 1)
	topic := b.topic("orders")
	polled := b.watchPolls("orders", 0)
	c := b.dial(t)
	req := fetchRequest(12, topic, fetchFrom{0, 0, 0, -1})
	req.MaxWaitMillis = 60_000
	c.send(req)
	<-polled
	_ = c.nc.Close()
	select { // the end of a connection is told when both of its goroutines have ended
	case err := <-b.gone:
		if err != nil {
			t.Errorf("the end: %v", err)
		}
	case <-time.After(patience):
		t.Fatal("the fetch is still held")
	}
	if log := b.log.String(); log != "" {
		t.Errorf("log: %s", log)
	}
}

func TestFetchIsWokenByShutdown(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 1)
	topic := b.topic("orders")
	polled := b.watchPolls("orders", 0)
	c := b.dial(t)
	req := fetchRequest(12, topic, fetchFrom{0, 0, 0, -1})
	req.MaxWaitMillis = 60_000
	id := c.send(req)
	<-polled
	stopped := make(chan error, 1)
	go func() { stopped <- b.srv.Shutdown(context.Background()) }()
	resp := c.receive(req, id).(*kmsg.FetchResponse)
	if p := resp.Topics[0].Partitions[0]; p.ErrorCode != 0 || p.HighWatermark != 0 {
		t.Errorf("answer at shutdown: %+v", p)
	}
	c.closed()
	_ = c.nc.Close()
	if err := <-stopped; err != nil {
		t.Error(err)
	}
}

func TestFetchEndsWhenThePartitionCloses(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 1)
	topic := b.topic("orders")
	polled := b.watchPolls("orders", 0)
	c := b.dial(t)
	req := fetchRequest(12, topic, fetchFrom{0, 0, 0, -1})
	req.MaxWaitMillis = 60_000
	id := c.send(req)
	<-polled
	p, _ := b.Partition("orders", 0)
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	c.receive(req, id)
}

// grownPartition claims to have grown without having.
type grownPartition struct{ partition.Partition }

func (grownPartition) Grown(int64) <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

func TestFetchDoesNotSpin(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 1)
	b.replace("orders", 0, func(p partition.Partition) partition.Partition { return grownPartition{p} })
	req := fetchRequest(12, b.topic("orders"), fetchFrom{0, 0, 0, -1})
	req.MaxWaitMillis = 60_000
	ask[*kmsg.FetchResponse](b.dial(t), req)
}

// lyingPartition returns what is no batch.
type lyingPartition struct {
	partition.Partition
	records []byte
	err     error
}

func (p lyingPartition) Read(int64, int) ([]byte, error) { return p.records, p.err }

func TestFetchChecksWhatItReads(t *testing.T) {
	for name, test := range map[string]struct {
		lying lyingPartition
		code  int16
	}{
		"half a batch": {lyingPartition{records: testBatch(1, 5, "v")[:65]}, 2},
		"no code":      {lyingPartition{err: errors.New("the disk sings")}, -1},
	} {
		b := start(t, api.Options{})
		b.addTopic("orders", 1)
		b.replace("orders", 0, func(p partition.Partition) partition.Partition { test.lying.Partition = p; return test.lying })
		resp := ask[*kmsg.FetchResponse](b.dial(t), fetchRequest(12, b.topic("orders"), fetchFrom{0, 0, 0, -1}))
		if got := resp.Topics[0].Partitions[0]; got.ErrorCode != test.code || len(got.RecordBatches) != 0 {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// A request may name a partition often, and more of them than one select takes.
func TestFetchOfVeryManyPartitions(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 1)
	topic := b.topic("orders")
	const n = 70_000
	var mentioned []fetchFrom
	for range n {
		mentioned = append(mentioned, fetchFrom{0, 0, 0, -1})
	}
	polled := make(chan struct{}, n)
	b.replace("orders", 0, func(p partition.Partition) partition.Partition { return &polledPartition{p, polled} })
	c := b.dial(t)
	req := fetchRequest(12, topic, mentioned...)
	req.MaxWaitMillis = 60_000
	id := c.send(req)
	for range n {
		<-polled
	}
	b.fill(t, "orders", 0, testBatch(1, 5, "v"))
	if got := c.receive(req, id).(*kmsg.FetchResponse); len(got.Topics[0].Partitions) != n {
		t.Errorf("%d partitions", len(got.Topics[0].Partitions))
	}
}
