package partition

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/muster-io/muster/broker/storage"
)

// Local is a partition whose only replica is a log on this machine: the high
// watermark is what is on disk.
type Local struct {
	log     *storage.Log
	epoch   int32
	now     func() time.Time
	retired atomic.Pointer[kerr.Error]
}

var _ Partition = (*Local)(nil)

// LocalOptions say where a Local is kept. Limits that are zero have the defaults
// of storage.Options, which explains them.
type LocalOptions struct {
	// Dir is the directory of this partition and nothing else. It is made if it is
	// not there. Two processes must not use it at once: the daemon locks the data
	// directory as a whole.
	Dir string

	// TopicID is whose partition it is. A directory made for another topic is
	// refused with a *storage.IdentityError. It cannot be zero.
	TopicID storage.TopicID

	// LeaderEpoch is written into the batches that are appended. It must not be less
	// than that of any batch in the log.
	LeaderEpoch int32

	// FS is nil for the machine's own file system.
	FS storage.FS

	SegmentBytes       int64         // segment.bytes
	IndexIntervalBytes int64         // index.interval.bytes
	MaxBatchBytes      int           // max.message.bytes
	ProducerExpiry     time.Duration // producer.id.expiration.ms
	VerifyAll          bool          // check every byte of the log at open

	// Decompress is nil for storage.Decompress.
	Decompress storage.Decompressor

	// Now is nil for the machine's clock. It decides only when producers expire.
	Now func() time.Time

	Listener storage.Listener
}

// OpenLocal opens the partition in a directory and repairs what a crash has left;
// what was done is in the Recovery, for the caller to log. Damage that cannot be
// repaired without losing acknowledged records is a *storage.CorruptionError.
func OpenLocal(opts LocalOptions) (*Local, storage.Recovery, error) {
	if opts.TopicID == (storage.TopicID{}) {
		return nil, storage.Recovery{}, fmt.Errorf("open partition %s: a topic id is required", opts.Dir)
	}
	if opts.LeaderEpoch < 0 {
		return nil, storage.Recovery{}, fmt.Errorf("open partition %s: leader epoch %d is negative", opts.Dir, opts.LeaderEpoch)
	}
	if opts.FS == nil {
		opts.FS = storage.OS{}
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	if err := storage.EnsureIdentity(opts.FS, opts.Dir, opts.TopicID); err != nil {
		return nil, storage.Recovery{}, err
	}
	log, recovery, err := storage.Open(opts.Dir, storage.Options{
		FS:                 opts.FS,
		SegmentBytes:       opts.SegmentBytes,
		IndexIntervalBytes: opts.IndexIntervalBytes,
		MaxBatchBytes:      opts.MaxBatchBytes,
		ProducerExpiry:     opts.ProducerExpiry,
		VerifyAll:          opts.VerifyAll,
		Decompress:         opts.Decompress,
		Listener:           opts.Listener,
	}, opts.Now().UnixMilli())
	if err != nil {
		return nil, recovery, err
	}
	return &Local{log: log, epoch: opts.LeaderEpoch, now: opts.Now}, recovery, nil
}

// Append implements Partition.
func (p *Local) Append(batches []byte) (Appended, error) {
	stored, err := p.log.Append(batches, p.epoch, p.now().UnixMilli())
	if err != nil {
		return Appended{}, p.forClient(err)
	}
	return Appended{Base: stored.Base, Next: stored.Next, LogAppendTime: -1, Duplicate: stored.Duplicate}, nil
}

// Read implements Partition.
func (p *Local) Read(offset int64, maxBytes int) ([]byte, error) {
	b, err := p.log.Read(offset, p.log.Durable(), maxBytes)
	return b, p.forClient(err)
}

// AwaitHighWatermark implements Partition.
func (p *Local) AwaitHighWatermark(ctx context.Context, offset int64) error {
	return p.forClient(p.log.AwaitDurable(ctx, offset))
}

// Grown implements Partition. All that wait for the same offset share a channel.
func (p *Local) Grown(offset int64) <-chan struct{} { return p.log.DurablePast(offset) }

// OffsetForTime implements Partition.
func (p *Local) OffsetForTime(ts int64) (TimedOffset, bool, error) {
	at, ok, err := p.log.OffsetForTime(ts)
	return TimedOffset(at), ok, p.forClient(err)
}

// MaxTimestamp implements Partition. Records without a timestamp (-1) do not count.
func (p *Local) MaxTimestamp() (TimedOffset, bool, error) {
	at, ok, err := p.log.MaxTimestamp()
	return TimedOffset(at), ok, p.forClient(err)
}

// Start implements Partition.
func (p *Local) Start() int64 { return p.log.Start() }

// End implements Partition.
func (p *Local) End() int64 { return p.log.End() }

// HighWatermark implements Partition.
func (p *Local) HighWatermark() int64 { return p.log.Durable() }

// Size is how many bytes of the log are on disk, indexes left out.
func (p *Local) Size() int64 { return p.log.Size() }

// Failure is why the partition does not take appends any more; nil while it does.
func (p *Local) Failure() error { return p.log.Failure() }

// LeaderEpoch implements Partition.
func (p *Local) LeaderEpoch() int32 { return p.epoch }

// LatestEpoch is the leader epoch that was written last, -1 if there is none. Where
// it is above LeaderEpoch nothing can be appended.
func (p *Local) LatestEpoch() int32 { return p.log.LatestEpoch() }

// Close implements Partition.
func (p *Local) Close() error { return p.log.Close() }

// Retire closes the partition because the broker is not to serve it any more.
// Whoever still uses it or waits for it is told why: it moved, or its topic is gone.
// With drop nothing is made durable, since the log is about to be removed.
func (p *Local) Retire(why *kerr.Error, drop bool) error {
	p.retired.Store(why)
	if drop {
		return p.log.Drop()
	}
	return p.log.Close()
}

// forClient puts into an error of the log the Kafka error that a client is told,
// unless one is there. The end of a context stays what it is: only the caller
// knows which of its time limits that was.
func (p *Local) forClient(err error) error {
	if err == nil || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	if _, ok := errors.AsType[*kerr.Error](err); ok {
		return err
	}
	if _, ok := errors.AsType[*storage.CorruptionError](err); ok {
		return fmt.Errorf("%w: %w", kerr.CorruptMessage, err)
	}
	if errors.Is(err, storage.ErrClosed) {
		if why := p.retired.Load(); why != nil {
			return fmt.Errorf("%w: %w", why, err)
		}
		// The broker stops: clients look for it anew.
		return fmt.Errorf("%w: %w", kerr.NotLeaderForPartition, err)
	}
	return fmt.Errorf("%w: %w", kerr.KafkaStorageError, err)
}
