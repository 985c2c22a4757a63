package api

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/broker/partition"
	"github.com/muster-io/muster/broker/wire"
)

// Fetch (key 1): record batches of many partitions, from given offsets on.
//
// Reads in the order of the request until the response is full. The first batch of
// the response goes out whatever its size, so that a client with small limits gets
// on. While there is less than the minimum and no partition has an error, the
// request is held until partitions grow, and only what they have grown by is read;
// it is answered early when a partition has more than fits, since waiting could
// then not add to it, and when the server shuts down.
//
// Fetch sessions are never made: the answer to every full request has session id
// 0, which tells the client to send full requests. One that goes on with a session
// (of a broker that had this address before) is told FETCH_SESSION_ID_NOT_FOUND
// and begins anew. So forgotten topics need no attention.
//
// Isolation levels: without transactions the last stable offset is the high
// watermark, and nothing was ever aborted.
//
// Not done: fetching from followers (rack), fetching as a follower (replica id and
// state are ignored: everybody reads to the high watermark), diverging epochs.
//
// Versions:
//
//	0-3  message sets of magic 0 and 1: not served
//	4    record batches (magic 2), isolation level, last stable offset
//	5    log start offset
//	7    fetch sessions
//	9    the client's leader epoch is checked
//	10   zstd
//	11   rack
//	12   flexible; the current leader is told with NOT_LEADER_OR_FOLLOWER and
//	     FENCED_LEADER_EPOCH
//	13   topic ids in place of names; UNKNOWN_TOPIC_ID
//	15   replica state in place of replica id
//	16   addresses of the leaders told
//	17   directory id, 18 high watermark: of followers
const (
	fetchMin           = 4
	fetchMax           = 18
	fetchSessions      = 7
	fetchCurrentLeader = 12
	fetchTopicID       = 13
	fetchLeaderAddress = 16
)

// The session epochs of requests that name all of their partitions.
const (
	sessionInitial = 0
	sessionFinal   = -1
)

// Fields of a record batch.
const (
	batchLength    = 8 // of what follows this field
	batchPrefix    = batchLength + 4
	batchLastDelta = 23
	batchHeader    = 61
)

func (h *handlers) registerFetch(srv *wire.Server) {
	srv.Register(int16(kmsg.Fetch), fetchMin, fetchMax, h.fetch)
}

func (h *handlers) fetch(_ context.Context, r *wire.Request) wire.Answer {
	req := r.Body.(*kmsg.FetchRequest)
	if req.Version >= fetchSessions && req.SessionEpoch != sessionInitial && req.SessionEpoch != sessionFinal {
		resp := kmsg.NewPtrFetchResponse()
		resp.ErrorCode = kerr.FetchSessionIDNotFound.Code
		return wire.Ready(resp)
	}
	return func(ctx context.Context) (kmsg.Response, error) {
		wait := min(max(time.Duration(req.MaxWaitMillis)*time.Millisecond, 0), h.opts.FetchMaxWait)
		f := h.newFetching(req)
		if err := f.run(ctx, wait, r.Draining); err != nil {
			return nil, err
		}
		f.finish()
		return f.resp, nil
	}
}

// fetching is one Fetch on its way.
type fetching struct {
	h       *handlers
	resolve *resolver
	version int16
	resp    *kmsg.FetchResponse
	parts   []fetchPart

	minBytes, maxBytes int
	bytes              int // records in the response
	failed             bool
	full               bool // a partition has more than fits
}

// fetchPart is one partition of a Fetch.
type fetchPart struct {
	out      *kmsg.FetchResponseTopicPartition
	ref      topicRef
	p        partition.Partition // nil once it has failed
	next     int64               // offset after what has been read
	maxBytes int
	grown    <-chan struct{}
}

func (h *handlers) newFetching(req *kmsg.FetchRequest) *fetching {
	f := &fetching{
		h:        h,
		resolve:  h.resolver(),
		version:  req.Version,
		resp:     kmsg.NewPtrFetchResponse(),
		minBytes: int(req.MinBytes),
		maxBytes: min(int(req.MaxBytes), h.opts.FetchMaxBytes),
	}
	f.resp.Topics = make([]kmsg.FetchResponseTopic, len(req.Topics))
	for i := range req.Topics {
		in, out := &req.Topics[i], &f.resp.Topics[i]
		out.Default()
		out.Topic, out.TopicID = in.Topic, in.TopicID
		ref := f.resolve.byName(in.Topic)
		if req.Version >= fetchTopicID {
			ref = f.resolve.byID(in.TopicID)
		}
		out.Partitions = make([]kmsg.FetchResponseTopicPartition, len(in.Partitions))
		for j := range in.Partitions {
			f.add(ref, &in.Partitions[j], &out.Partitions[j])
		}
	}
	return f
}

func (f *fetching) add(ref topicRef, in *kmsg.FetchRequestTopicPartition, out *kmsg.FetchResponseTopicPartition) {
	out.Default()
	out.Partition = in.Partition
	out.RecordBatches = []byte{} // empty, not null: as Kafka
	part := fetchPart{out: out, ref: ref, next: in.FetchOffset, maxBytes: int(in.PartitionMaxBytes)}
	var err error
	if part.p, err = f.h.partition(ref, in.Partition, in.CurrentLeaderEpoch); err != nil {
		f.fail(&part, err)
	}
	f.parts = append(f.parts, part)
}

// run reads until the response is good to go.
func (f *fetching) run(ctx context.Context, wait time.Duration, draining <-chan struct{}) error {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for i := range f.parts {
		f.read(&f.parts[i])
	}
	for wait > 0 && !f.failed && !f.full && f.bytes < f.minBytes {
		channels := f.watch()
		if len(channels) == 0 {
			return nil
		}
		switch awaitAny(ctx, timer.C, draining, channels) {
		case wokenByContext:
			return context.Cause(ctx)
		case wokenByTimer, wokenByDraining:
			return nil
		}
		before := f.bytes
		for i := range f.parts {
			if part := &f.parts[i]; part.grown != nil && isClosed(part.grown) {
				f.read(part)
			}
		}
		if f.bytes == before {
			return nil // nothing came of it (an error, a partition closed): do not spin
		}
	}
	return nil
}

// watch asks every partition to tell when it has more.
func (f *fetching) watch() []<-chan struct{} {
	channels := make([]<-chan struct{}, 0, len(f.parts))
	for i := range f.parts {
		part := &f.parts[i]
		if part.p == nil {
			continue
		}
		part.grown = part.p.Grown(part.next)
		channels = append(channels, part.grown)
	}
	return channels
}

// read adds to the response what the partition has and what fits.
func (f *fetching) read(part *fetchPart) {
	if part.p == nil {
		return
	}
	room := min(part.maxBytes-len(part.out.RecordBatches), f.maxBytes-f.bytes)
	if room <= 0 && f.bytes > 0 {
		f.full = f.full || part.p.HighWatermark() > part.next
		return
	}
	records, err := part.p.Read(part.next, max(room, 1))
	if err != nil {
		f.fail(part, err)
		return
	}
	if len(records) > room && f.bytes > 0 {
		f.full = true // its next batch does not fit, and it is not the first
		return
	}
	if len(records) == 0 {
		return
	}
	next, err := nextOffset(records)
	if err != nil {
		f.fail(part, err)
		return
	}
	part.next = next
	if len(part.out.RecordBatches) == 0 {
		part.out.RecordBatches = records[:len(records):len(records)] // no copy, and none of theirs overwritten
	} else {
		part.out.RecordBatches = append(part.out.RecordBatches, records...)
	}
	f.bytes += len(records)
}

func (f *fetching) fail(part *fetchPart, err error) {
	f.failed = true
	out := part.out
	out.ErrorCode = f.h.code(err, "topic", part.ref.name, "partition", out.Partition, "request", "fetch")
	out.HighWatermark, out.LastStableOffset, out.LogStartOffset = -1, -1, -1
	if part.p != nil && errors.Is(err, kerr.OffsetOutOfRange) {
		part.tellOffsets() // the client sees from them on which side it is
	}
	part.p = nil
	f.hint(part)
}

// finish fills in what should be as new as possible: the offsets of the partitions.
func (f *fetching) finish() {
	for i := range f.parts {
		if f.parts[i].p != nil {
			f.parts[i].tellOffsets()
		}
	}
}

func (part *fetchPart) tellOffsets() {
	hw := part.p.HighWatermark()
	part.out.HighWatermark, part.out.LastStableOffset = hw, hw
	part.out.LogStartOffset = part.p.Start()
}

// hint tells the client of a partition that is led elsewhere, or under another
// epoch, where to go.
func (f *fetching) hint(part *fetchPart) {
	code := part.out.ErrorCode
	if f.version < fetchCurrentLeader || code != kerr.NotLeaderForPartition.Code && code != kerr.FencedLeaderEpoch.Code {
		return
	}
	info, b, ok := f.resolve.snap.leader(part.ref.name, part.out.Partition)
	if !ok {
		return
	}
	part.out.CurrentLeader.LeaderID, part.out.CurrentLeader.LeaderEpoch = info.Leader, info.LeaderEpoch
	if f.version < fetchLeaderAddress {
		return
	}
	for i := range f.resp.Brokers {
		if f.resp.Brokers[i].NodeID == b.ID {
			return
		}
	}
	f.resp.Brokers = append(f.resp.Brokers, kmsg.FetchResponseBroker{NodeID: b.ID, Host: b.Host, Port: b.Port, Rack: rack(b)})
}

// nextOffset is the offset after the last of whole batches, back to back.
func nextOffset(records []byte) (int64, error) {
	for pos := 0; ; {
		b := records[pos:]
		if len(b) < batchHeader {
			break
		}
		size := batchPrefix + int64(binary.BigEndian.Uint32(b[batchLength:]))
		if size < batchHeader || size > int64(len(b)) {
			break
		}
		if size == int64(len(b)) {
			base, delta := binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[batchLastDelta:])
			return int64(base) + int64(int32(delta)) + 1, nil
		}
		pos += int(size)
	}
	return 0, fmt.Errorf("the partition returned %d bytes that are not whole batches: %w", len(records), kerr.CorruptMessage)
}
