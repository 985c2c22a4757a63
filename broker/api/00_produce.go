package api

import (
	"context"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/broker/partition"
	"github.com/muster-io/muster/broker/wire"
)

// Produce (key 0): appends record batches to partitions of this broker.
//
// All partitions of a request are appended to at once, by the connection's reader;
// then acks=-1 waits, in the order of the connection, until the high watermark has
// passed them all, or the request's timeout. So the appends of pipelined requests
// share an fsync. acks=1 answers after the append. acks=0 has no response; where
// one would tell an error the connection is closed, so that the client notices and
// asks for metadata, as Kafka does.
//
// Each partition has its own error, and one that fails does not keep another from
// being stored. A timeout does not undo an append: the client that sends again is
// recognized by its sequence numbers, if it is idempotent.
//
// Not done: transactions. A request with a transactional id stores nothing and is
// refused with TRANSACTIONAL_ID_AUTHORIZATION_FAILED, which no client retries.
//
// Versions:
//
//	0-2  message sets of magic 0 and 1: not served. But ApiVersions must name 0, as
//	     Kafka 4 does too (KAFKA-18659): librdkafka takes it as the sign that the
//	     broker can store compressed batches, and else sends them uncompressed,
//	     without a word.
//	3    record batches (magic 2), transactional id
//	4    KAFKA_STORAGE_ERROR may be told
//	5    log start offset in the response
//	7    zstd
//	8    error message in the response
//	9    flexible
//	10   the current leader is told with NOT_LEADER_OR_FOLLOWER
//	13   topic ids in place of names; UNKNOWN_TOPIC_ID
const (
	produceAdvertised    = 0
	produceMin           = 3
	produceMax           = 13
	produceCurrentLeader = 10
	produceTopicID       = 13
)

const (
	acksNone   = 0
	acksLeader = 1
	acksAll    = -1
)

// atMagic is where a record batch, or a message set, has its format version.
const atMagic = 16

func (h *handlers) registerProduce(srv *wire.Server) {
	srv.Register(int16(kmsg.Produce), produceMin, produceMax, h.produce)
	srv.Advertise(int16(kmsg.Produce), produceAdvertised)
}

// appended is a partition of a request that was appended to.
type appended struct {
	out  *kmsg.ProduceResponseTopicPartition
	p    partition.Partition
	next int64
	who  []any // topic and partition, for the log
}

func (h *handlers) produce(_ context.Context, r *wire.Request) wire.Answer {
	req := r.Body.(*kmsg.ProduceRequest)
	resp := kmsg.NewPtrProduceResponse()
	stored, failure := h.appendAll(req, resp)
	if req.Acks == acksNone {
		if failure != nil {
			return wire.Fail(fmt.Errorf("produce with acks=0: %w", failure))
		}
		return nil
	}
	if req.Acks == acksLeader || len(stored) == 0 {
		return wire.Ready(resp)
	}
	timeout := min(max(time.Duration(req.TimeoutMillis)*time.Millisecond, 0), h.opts.ProduceMaxWait)
	return func(ctx context.Context) (kmsg.Response, error) {
		if err := h.awaitAll(ctx, stored, r.Received.Add(timeout)); err != nil {
			return nil, err
		}
		return resp, nil
	}
}

// appendAll appends to every partition of the request and fills the response. The
// error is the first that a partition was told.
func (h *handlers) appendAll(req *kmsg.ProduceRequest, resp *kmsg.ProduceResponse) (stored []appended, failure error) {
	resolve := h.resolver()
	refused := refuseProduce(req)
	resp.Topics = make([]kmsg.ProduceResponseTopic, len(req.Topics))
	for i := range req.Topics {
		in, out := &req.Topics[i], &resp.Topics[i]
		out.Default()
		out.Topic, out.TopicID = in.Topic, in.TopicID
		ref := resolve.byName(in.Topic)
		if req.Version >= produceTopicID {
			ref = resolve.byID(in.TopicID)
		}
		out.Partitions = make([]kmsg.ProduceResponseTopicPartition, len(in.Partitions))
		for j := range in.Partitions {
			who := []any{"topic", ref.name, "partition", in.Partitions[j].Partition}
			part := &out.Partitions[j]
			part.Default()
			part.Partition = in.Partitions[j].Partition
			a, err := appended{}, refused
			if err == nil {
				a, err = h.appendOne(ref, part, in.Partitions[j].Records)
			}
			if err != nil {
				h.refusePartition(part, err, who)
				resolve.hintProduce(req.Version, ref, part, resp)
				if failure == nil {
					failure = fmt.Errorf("topic %q partition %d: %w", ref.name, part.Partition, err)
				}
				continue
			}
			a.who = who
			stored = append(stored, a)
		}
	}
	return stored, failure
}

// refuseProduce is about the request as a whole.
func refuseProduce(req *kmsg.ProduceRequest) error {
	switch {
	case req.TransactionID != nil:
		return fmt.Errorf("transactions are not supported (transactional id %q): %w",
			*req.TransactionID, kerr.TransactionalIDAuthorizationFailed)
	case req.Acks != acksNone && req.Acks != acksLeader && req.Acks != acksAll:
		return kerr.InvalidRequiredAcks
	}
	return nil
}

func (h *handlers) appendOne(ref topicRef, out *kmsg.ProduceResponseTopicPartition, records []byte) (appended, error) {
	p, err := h.partition(ref, out.Partition, -1)
	if err != nil {
		return appended{}, err
	}
	if len(records) > atMagic && records[atMagic] < 2 {
		// The same code as Kafka's.
		return appended{}, fmt.Errorf("message format %d in a request that allows only 2: %w",
			records[atMagic], kerr.InvalidRecord)
	}
	a, err := p.Append(records)
	if err != nil {
		return appended{}, err
	}
	out.BaseOffset = a.Base
	out.LogAppendTime = a.LogAppendTime
	out.LogStartOffset = p.Start()
	return appended{out: out, p: p, next: a.Next}, nil
}

func (h *handlers) refusePartition(out *kmsg.ProduceResponseTopicPartition, err error, who []any) {
	out.ErrorCode = h.code(err, append(who, "request", "produce")...)
	out.ErrorMessage = detail(err)
	out.BaseOffset, out.LogAppendTime, out.LogStartOffset = -1, -1, -1
}

// hintProduce tells the client of a partition that is led elsewhere where to go.
func (r *resolver) hintProduce(version int16, ref topicRef, out *kmsg.ProduceResponseTopicPartition, resp *kmsg.ProduceResponse) {
	if version < produceCurrentLeader || out.ErrorCode != kerr.NotLeaderForPartition.Code {
		return
	}
	info, b, ok := r.snap.leader(ref.name, out.Partition)
	if !ok {
		return
	}
	out.CurrentLeader.LeaderID, out.CurrentLeader.LeaderEpoch = info.Leader, info.LeaderEpoch
	for i := range resp.Brokers {
		if resp.Brokers[i].NodeID == b.ID {
			return
		}
	}
	resp.Brokers = append(resp.Brokers, kmsg.ProduceResponseBroker{NodeID: b.ID, Host: b.Host, Port: b.Port, Rack: rack(b)})
}

// awaitAll waits until what was stored is acknowledged. The partitions become so
// in any order, and the deadline is the same for all, so waiting for one after the
// other takes no longer than waiting for all at once. Only the end of ctx is an
// error; a partition's own goes into its response.
func (h *handlers) awaitAll(ctx context.Context, stored []appended, deadline time.Time) error {
	wait, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	for _, a := range stored {
		if a.p.HighWatermark() >= a.next { // also when the deadline is over
			continue
		}
		err := a.p.AwaitHighWatermark(wait, a.next)
		switch {
		case err == nil:
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case wait.Err() != nil:
			h.refusePartition(a.out, kerr.RequestTimedOut, a.who)
		default:
			h.refusePartition(a.out, err, a.who)
		}
	}
	return nil
}
