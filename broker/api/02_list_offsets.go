package api

import (
	"context"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/broker/partition"
	"github.com/muster-io/muster/broker/wire"
)

// ListOffsets (key 2): the offset of a partition's start, end, or of a time.
//
// The end is the high watermark, for both isolation levels: without transactions
// the last stable offset is the same. A time that no record reaches, and the
// questions about remote storage, which there is none of, are answered with offset
// -1 and no error, as Kafka does. The leader epoch is told where it is known: not
// for the start, whose batch would have to be read for it.
//
// Versions:
//
//	0    several offsets per partition: not served
//	1    one offset, with its timestamp
//	2    isolation level
//	4    the client's leader epoch is checked; the record's is answered
//	6    flexible
//	7    -3: the record with the largest timestamp
//	8    -4: the earliest offset on this broker, which is the earliest
//	9    -5: the latest offset in remote storage
//	10   a timeout, for remote storage
//	11   -6: the earliest offset not yet in remote storage
const (
	listOffsetsMin = 1
	listOffsetsMax = 11
)

// The questions that are not times.
const (
	latest                = -1
	earliest              = -2
	maxTimestamp          = -3
	earliestLocal         = -4
	latestTiered          = -5
	earliestPendingUpload = -6
)

// listOffsetsSince is the version that allows a question. Kafka answers those that
// are too new for the request, or not known at all, with UNSUPPORTED_VERSION.
func listOffsetsSince(question int64) int16 {
	switch question {
	case latest, earliest:
		return listOffsetsMin
	case maxTimestamp:
		return 7
	case earliestLocal:
		return 8
	case latestTiered:
		return 9
	case earliestPendingUpload:
		return 11
	}
	if question >= 0 {
		return listOffsetsMin
	}
	return listOffsetsMax + 1
}

func (h *handlers) registerListOffsets(srv *wire.Server) {
	srv.Register(int16(kmsg.ListOffsets), listOffsetsMin, listOffsetsMax, h.listOffsets)
}

// Looking up a time reads from the disk, so all is done in the Answer.
func (h *handlers) listOffsets(_ context.Context, r *wire.Request) wire.Answer {
	req := r.Body.(*kmsg.ListOffsetsRequest)
	return func(ctx context.Context) (kmsg.Response, error) {
		resp := kmsg.NewPtrListOffsetsResponse()
		for i := range req.Topics {
			in := &req.Topics[i]
			out := kmsg.NewListOffsetsResponseTopic()
			out.Topic = in.Topic
			for j := range in.Partitions {
				if ctx.Err() != nil {
					return nil, context.Cause(ctx)
				}
				out.Partitions = append(out.Partitions, h.listOffset(req.Version, in.Topic, &in.Partitions[j]))
			}
			resp.Topics = append(resp.Topics, out)
		}
		return resp, nil
	}
}

func (h *handlers) listOffset(version int16, topic string, in *kmsg.ListOffsetsRequestTopicPartition) kmsg.ListOffsetsResponseTopicPartition {
	out := kmsg.NewListOffsetsResponseTopicPartition()
	out.Partition = in.Partition
	p, err := h.partition(topicRef{name: topic}, in.Partition, in.CurrentLeaderEpoch)
	if err == nil && version < listOffsetsSince(in.Timestamp) {
		err = kerr.UnsupportedVersion
	}
	var at partition.TimedOffset
	ok := false
	if err == nil {
		at, ok, err = answerOffset(p, in.Timestamp)
	}
	if ok {
		out.Offset, out.Timestamp, out.LeaderEpoch = at.Offset, at.Timestamp, at.Epoch
	}
	out.ErrorCode = h.code(err, "topic", topic, "partition", in.Partition, "request", "list_offsets")
	return out
}

// answerOffset answers one question; ok is false if there is no such offset.
func answerOffset(p partition.Partition, question int64) (at partition.TimedOffset, ok bool, err error) {
	switch question {
	case latest:
		return partition.TimedOffset{Offset: p.HighWatermark(), Timestamp: -1, Epoch: p.LeaderEpoch()}, true, nil
	case earliest, earliestLocal:
		return partition.TimedOffset{Offset: p.Start(), Timestamp: -1, Epoch: -1}, true, nil
	case maxTimestamp:
		return p.MaxTimestamp()
	case latestTiered, earliestPendingUpload:
		return partition.TimedOffset{}, false, nil
	}
	return p.OffsetForTime(question)
}
