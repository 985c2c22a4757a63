// Package partition says what one partition of a topic is to the rest of the
// broker: a place to append record batches, to read them back up to the high
// watermark, and to wait for more. Local keeps a partition in a log of this
// daemon; other homes (a replicated log, a topic of another Kafka cluster) fit
// behind the same interface.
package partition

import "context"

// A Partition is safe for concurrent use. Offsets count records; an offset is
// always that of the next record unless said otherwise. Errors that a client is
// to be told are (or wrap) a *kerr.Error, whose code goes onto the wire.
type Partition interface {
	// Append stores one or more record batches (magic 2, back to back, as a
	// producer sent them) at the end of the log. Every batch is checked before the
	// first is stored: all of them are stored, or none. Base offsets and the leader
	// epoch are written into the given bytes, which belong to the partition from
	// then on.
	//
	// The records are acknowledged only when AwaitHighWatermark(ctx, Next) has
	// returned nil. A batch that an idempotent producer sends again is not stored
	// twice: Append answers with the offsets of the first time.
	Append(batches []byte) (Appended, error)

	// Read returns whole batches, beginning with the one that holds offset, and
	// never any that reach past the high watermark. It stops before maxBytes is
	// exceeded, but returns at least one batch if there is one. At the high
	// watermark it returns nothing and no error; outside [Start, End] the error
	// is kerr.OffsetOutOfRange.
	Read(offset int64, maxBytes int) ([]byte, error)

	// AwaitHighWatermark returns when the high watermark is at least offset, or
	// with an error when ctx ends, the partition is closed, or its disk failed.
	AwaitHighWatermark(ctx context.Context, offset int64) error

	// Grown returns a channel that is closed once the high watermark is past
	// offset, or once the partition is closed or failed.
	Grown(offset int64) <-chan struct{}

	// OffsetForTime returns the first record whose timestamp (milliseconds since
	// 1970) is ts or later, below the high watermark; ok is false if there is none.
	OffsetForTime(ts int64) (at TimedOffset, ok bool, err error)

	// MaxTimestamp returns the record with the largest timestamp below the high
	// watermark; ok is false if the partition is empty.
	MaxTimestamp() (at TimedOffset, ok bool, err error)

	Start() int64         // the first offset that can be read
	End() int64           // one past the last record stored, acknowledged or not
	HighWatermark() int64 // one past the last record that readers may see
	LeaderEpoch() int32   // the epoch that Append writes into batches

	// Close makes what was appended durable and releases the files.
	Close() error
}

// Appended tells where batches were stored.
type Appended struct {
	Base          int64 // offset of the first record
	Next          int64 // offset after the last record; acknowledged once the high watermark reaches it
	LogAppendTime int64 // milliseconds, or -1 where the records keep the producer's timestamps
	Duplicate     bool  // an idempotent producer had sent these before
}

// TimedOffset is a record's offset with the timestamp and leader epoch of its batch.
type TimedOffset struct {
	Offset    int64
	Timestamp int64 // milliseconds since 1970
	Epoch     int32
}
