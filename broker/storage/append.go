package storage

import (
	"errors"
	"fmt"
	"math"
	"syscall"

	"github.com/twmb/franz-go/pkg/kerr"
)

// Appended tells where batches were stored.
type Appended struct {
	Base      int64 // offset of the first record
	Next      int64 // offset after the last record
	Duplicate bool  // they had been stored before, at these offsets
}

// Append stores batches, back to back in b, at the end: all of them, or none. It
// writes base offsets and the leader epoch into b, which it owns from then on. The
// records are durable once Durable is at least Next.
//
// What is wrong with the batches is told by the Kafka error inside the error. now
// is in milliseconds since 1970.
func (l *Log) Append(b []byte, leaderEpoch int32, now int64) (Appended, error) {
	headers, err := splitBatches(b, l.opts.MaxBatchBytes)
	if err != nil {
		return Appended{}, fmt.Errorf("append to %s: %w", l.dir, err)
	}
	if int64(len(b)) > l.opts.SegmentBytes {
		return Appended{}, fmt.Errorf("append to %s: %d bytes do not fit segment.bytes, %d: %w",
			l.dir, len(b), l.opts.SegmentBytes, kerr.RecordListTooLarge)
	}
	if len(headers) > 1 {
		for i := range headers {
			if headers[i].idempotent() {
				// Part of them could be duplicates, and there is no answer for that. No
				// client sends it, and Kafka refuses it too.
				return Appended{}, fmt.Errorf("append to %s: a batch with a producer id must come alone: %w", l.dir, kerr.InvalidRecord)
			}
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.store(b, headers, leaderEpoch, now)
}

// store does the part of Append that needs the lock.
func (l *Log) store(b []byte, headers []Header, leaderEpoch int32, now int64) (Appended, error) {
	if l.closed {
		return Appended{}, ErrClosed
	}
	if err := l.durable.failure(); err != nil {
		return Appended{}, err
	}
	l.producers.expire(now - l.opts.ProducerExpiry.Milliseconds())
	first := &headers[0]
	if first.idempotent() {
		stored, err := l.producers.check(first)
		if err != nil {
			return Appended{}, fmt.Errorf("append to %s: %w", l.dir, err)
		}
		if stored != nil {
			return Appended{Base: stored.base, Next: stored.next(), Duplicate: true}, nil
		}
	}
	end := l.end.Load()
	next, err := place(b, headers, end, leaderEpoch)
	if err != nil {
		return Appended{}, fmt.Errorf("append to %s: %w", l.dir, err)
	}
	if err := l.makeRoom(int64(len(b)), next); err != nil {
		return Appended{}, err
	}
	if err := l.beginEpoch(leaderEpoch, end); err != nil {
		return Appended{}, err
	}
	if err := l.write(b); err != nil {
		return Appended{}, err
	}
	position := l.position
	for i := range headers {
		l.tail.add(&headers[i], position)
		l.producers.apply(&headers[i], now)
		position += headers[i].Size()
	}
	l.position = position
	l.end.Store(next)
	l.wakeSyncer()
	tell(l.opts.Listener.Appended, Stored{Dir: l.dir, From: end, To: next, Bytes: len(b)})
	return Appended{Base: end, Next: next}, nil
}

// place gives the batches their offsets, and returns the offset after the last.
func place(b []byte, headers []Header, next int64, leaderEpoch int32) (int64, error) {
	for i := range headers {
		h := &headers[i]
		if next > math.MaxInt64-int64(h.NumRecords) {
			return 0, fmt.Errorf("the offset after %d records from %d does not exist: %w", h.NumRecords, next, kerr.InvalidRecord)
		}
		h.BaseOffset, h.LeaderEpoch = next, leaderEpoch
		stamp(b[:h.Size()], h)
		b = b[h.Size():]
		next = h.Next()
	}
	return next, nil
}

// write puts bytes at the end of the active segment. When the disk is full, what
// was written is taken back and the log goes on. After any other error it is not
// known what the file holds, so the log fails.
func (l *Log) write(b []byte) error {
	n, err := l.active.log.WriteAt(b, l.position)
	if err == nil && n == len(b) {
		return nil
	}
	if err == nil {
		err = fmt.Errorf("%d of %d bytes written", n, len(b))
	}
	if truncateErr := l.active.log.Truncate(l.position); truncateErr != nil {
		return l.fail("taking back a write that failed", errors.Join(err, truncateErr))
	}
	if !isDiskFull(err) {
		return l.fail("write", err)
	}
	tell(l.opts.Listener.AppendUndone, AppendUndone{Dir: l.dir, Offset: l.end.Load(), Err: err})
	return fmt.Errorf("append to %s: %w: %w", l.dir, ErrDiskFull, err)
}

func isDiskFull(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// beginEpoch notes a leader epoch before its first batch.
func (l *Log) beginEpoch(epoch int32, start int64) error {
	latest := l.epochs.latest()
	if epoch == latest {
		return nil
	}
	if epoch < latest {
		return fmt.Errorf("append to %s with leader epoch %d after %d: %w", l.dir, epoch, latest, kerr.FencedLeaderEpoch)
	}
	list := l.epochs.with(epoch, start)
	if err := writeSmallFile(l.opts.FS, l.dir, epochsName, list.encode()); err != nil {
		return fmt.Errorf("append to %s: begin leader epoch %d: %w", l.dir, epoch, err)
	}
	l.epochs = list
	return nil
}

// makeRoom seals the active segment if the batches do not fit it: by size, or
// because offsets in its index are 32 bits relative to its base.
func (l *Log) makeRoom(size, next int64) error {
	if l.position == 0 {
		return nil
	}
	if l.position+size <= l.opts.SegmentBytes && next-1-l.active.base <= math.MaxInt32 {
		return nil
	}
	err := l.roll()
	switch {
	case err == nil || l.durable.failure() != nil:
		return err
	case isDiskFull(err):
		// The log is as it was, and the next append tries again.
		return fmt.Errorf("append to %s: begin a new segment: %w: %w", l.dir, ErrDiskFull, err)
	}
	return l.fail("beginning a new segment", err)
}

// roll seals the active segment and begins the next. All of the old one is durable
// before the new one exists.
func (l *Log) roll() error {
	if err := l.syncActive(); err != nil {
		return err
	}
	fs, end := l.opts.FS, l.end.Load()
	if err := writeIndexes(fs, l.dir, l.active.base, &l.tail); err != nil {
		return err
	}
	if err := writeSnapshot(fs, l.dir, l.producers, end); err != nil {
		return err
	}
	sealed, err := l.active.sealed(fs, l.dir, l.position)
	if err != nil {
		return err
	}
	fresh, err := createSegment(fs, l.dir, end)
	if err != nil {
		return errors.Join(err, sealed.closeIndexes())
	}
	l.active, l.position, l.tail = fresh, 0, newTail(l.opts.IndexIntervalBytes)
	l.syncMu.Lock()
	old := l.view.Load().segments
	segments := append(append(make([]*segment, 0, len(old)+1), old[:len(old)-1]...), sealed, fresh)
	l.view.Store(&view{segments: segments, durable: end, latest: l.tail.latest})
	l.syncMu.Unlock()
	tell(l.opts.Listener.SegmentRolled, SegmentRolled{
		Dir: l.dir, Sealed: sealed.base, Active: end, SizeBytes: sealed.size,
	})
	return nil
}
