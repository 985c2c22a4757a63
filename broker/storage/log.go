package storage

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// Log is the log of one partition. It is safe for concurrent use.
//
// Locks, in the order in which they are taken:
//
//	mu      appends, one at a time; held while bytes go to the system
//	syncMu  syncs, one at a time: of two at once, only one would be told of an
//	        error, and the other would believe that all is well
//
// Readers take neither: they work on the view, which is replaced as a whole.
type Log struct {
	dir  string
	opts Options

	mu        sync.Mutex // guards what follows
	active    *segment
	position  int64 // where the next byte goes in the active segment
	tail      tail
	producers *producers
	epochs    epochs
	closed    bool

	end     atomic.Int64 // written under mu
	syncMu  sync.Mutex   // also guards storing the view
	view    atomic.Pointer[view]
	durable *watermark

	kick     chan struct{} // something is there to be synced
	syncDone chan struct{} // the syncer has ended

	readers readerGate
}

// view is what readers may see: all below the durable offset.
type view struct {
	segments []*segment // in order; the last is the active one
	durable  int64
	position int64 // of the durable offset in the active segment
	index    memoryEntries[indexEntry]
	times    memoryEntries[timeEntry]
	latest   timeEntry
}

// Options of a log. The zero value of each field means its default.
type Options struct {
	// FS is where the files are; nil for the machine's own file system.
	FS FS

	// SegmentBytes is segment.bytes: a segment that would grow beyond it is sealed.
	// Small segments waste files, large ones make the scan after a crash long (about
	// one second for each GiB). At most 1 GiB, which is also the default.
	SegmentBytes int64

	// IndexIntervalBytes is index.interval.bytes: how many bytes of batches lie
	// between two entries of the indexes. 4096 by default.
	IndexIntervalBytes int64

	// MaxBatchBytes is max.message.bytes: a larger batch is refused.
	MaxBatchBytes int

	// ProducerExpiry is how long a silent producer is remembered; 7 days by default.
	ProducerExpiry time.Duration

	// MaxProducers is how many producers are remembered; 100,000 by default.
	MaxProducers int

	// VerifyAll checks every byte of every segment at open. Without it segments
	// before the newest are checked at their ends, as they were synced as a whole;
	// damage inside one is then found by whoever reads it.
	VerifyAll bool

	// Decompress replaces the package's own, which see.
	Decompress Decompressor

	Listener Listener
}

const (
	// Positions in Kafka's index are 32 bits, and its tools read them as signed:
	// 1 GiB leaves room for the batch that makes a segment full.
	maxSegmentBytes = 1 << 30

	defaultIndexInterval  = 4096
	defaultProducerExpiry = 7 * 24 * time.Hour
)

func (o Options) withDefaults() (Options, error) {
	if o.FS == nil {
		o.FS = OS{}
	}
	if o.SegmentBytes == 0 {
		o.SegmentBytes = maxSegmentBytes
	}
	if o.IndexIntervalBytes == 0 {
		o.IndexIntervalBytes = defaultIndexInterval
	}
	if o.MaxBatchBytes == 0 {
		o.MaxBatchBytes = DefaultMaxBatchBytes
	}
	if o.ProducerExpiry == 0 {
		o.ProducerExpiry = defaultProducerExpiry
	}
	if o.MaxProducers == 0 {
		o.MaxProducers = maxProducers
	}
	if o.Decompress == nil {
		o.Decompress = Decompress
	}
	switch {
	case o.SegmentBytes < headerSize || o.SegmentBytes > maxSegmentBytes:
		return o, fmt.Errorf("segment.bytes is %d: it must be %d to %d", o.SegmentBytes, headerSize, maxSegmentBytes)
	case o.IndexIntervalBytes < 0:
		return o, fmt.Errorf("index.interval.bytes is %d: it cannot be negative", o.IndexIntervalBytes)
	case o.MaxBatchBytes < headerSize || o.MaxBatchBytes > maxSegmentBytes:
		return o, fmt.Errorf("max.message.bytes is %d: it must be %d to %d", o.MaxBatchBytes, headerSize, maxSegmentBytes)
	case o.ProducerExpiry < 0 || o.MaxProducers < 0 || o.MaxProducers > maxProducers:
		return o, fmt.Errorf("producers expire after %s, at most %d: it must be positive, at most %d",
			o.ProducerExpiry, o.MaxProducers, maxProducers)
	}
	return o, nil
}

// Open opens the log in dir, which is made if it is not there, and repairs what a
// crash has left. now (milliseconds since 1970) is when producers found in the log
// count as seen. A *CorruptionError means that acknowledged records are damaged.
func Open(dir string, opts Options, now int64) (*Log, Recovery, error) {
	opts, err := opts.withDefaults()
	if err != nil {
		return nil, Recovery{}, fmt.Errorf("open log %s: %w", dir, err)
	}
	if err := opts.FS.MkdirAll(dir); err != nil {
		return nil, Recovery{}, fmt.Errorf("make log directory %s: %w", dir, err)
	}
	o := opener{fs: opts.FS, dir: dir, opts: opts, now: now}
	l, err := o.open()
	if err != nil {
		return nil, o.recovery, errors.Join(err, o.abandon())
	}
	tell(opts.Listener.Recovered, o.recovery)
	go l.syncLoop()
	return l, o.recovery, nil
}

// Start is the first offset that can be read.
func (l *Log) Start() int64 { return l.view.Load().segments[0].base }

// End is one past the last record stored, durable or not.
func (l *Log) End() int64 { return l.end.Load() }

// LatestEpoch is the leader epoch that was written last, -1 if there is none. Appends
// with an older one are refused.
func (l *Log) LatestEpoch() int32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.epochs.latest()
}

// Durable is one past the last record that a crash cannot take away.
func (l *Log) Durable() int64 { return l.durable.load() }

// Size is how many bytes of the log are durable, indexes left out.
func (l *Log) Size() int64 {
	v := l.view.Load()
	size := v.position
	for _, s := range v.segments[:len(v.segments)-1] {
		size += s.size
	}
	return size
}

// Failure is why the log does not take appends any more: a *FailedError,
// ErrClosed, or nil.
func (l *Log) Failure() error { return l.durable.failure() }

// AwaitDurable returns nil once Durable is at least offset.
func (l *Log) AwaitDurable(ctx context.Context, offset int64) error {
	return l.durable.await(ctx, offset)
}

// DurablePast returns a channel that is closed once Durable is past offset, or
// will not grow any more because the log was closed or has failed.
func (l *Log) DurablePast(offset int64) <-chan struct{} { return l.durable.passed(offset) }

// Close makes what was appended durable, leaves the mark by which the next Open
// knows that it need not scan, and releases the files. A log that has failed
// returns its error and leaves no mark.
func (l *Log) Close() error { return l.shut(l.closeCleanly) }

// Drop closes a log whose directory is about to be removed: it makes nothing
// durable and leaves no mark.
func (l *Log) Drop() error { return l.shut(func() error { return nil }) }

// shut ends all use of the log. last is called, unless the log has failed, when
// nothing is appended any more.
func (l *Log) shut(last func() error) error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return ErrClosed
	}
	l.closed = true
	l.mu.Unlock()

	close(l.kick)
	<-l.syncDone
	err := l.durable.failure()
	if err == nil {
		err = last()
	}
	l.durable.stop(ErrClosed, func() {})
	l.readers.close()
	for _, s := range l.view.Load().segments {
		err = errors.Join(err, s.close())
	}
	return err
}

// closeCleanly writes what the next open will want. The mark comes last: it says
// that everything else is there.
func (l *Log) closeCleanly() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.syncActive(); err != nil {
		return err
	}
	fs := l.opts.FS
	if err := writeIndexes(fs, l.dir, l.active.base, &l.tail); err != nil {
		return fmt.Errorf("close log %s: %w", l.dir, err)
	}
	if err := writeSnapshot(fs, l.dir, l.producers, l.end.Load()); err != nil {
		return fmt.Errorf("close log %s: %w", l.dir, err)
	}
	mark := cleanMark{segment: l.active.base, size: l.position, end: l.end.Load()}
	if err := writeSmallFile(fs, l.dir, cleanName, mark.encode()); err != nil {
		return fmt.Errorf("close log %s: %w", l.dir, err)
	}
	return nil
}

// readerGate counts the reads under way, so that Close can wait for them.
type readerGate struct {
	mu     sync.Mutex
	closed bool
	group  sync.WaitGroup
}

// enter reports false once the gate is closed.
func (g *readerGate) enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return false
	}
	g.group.Add(1)
	return true
}

func (g *readerGate) leave() { g.group.Done() }

func (g *readerGate) close() {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	g.group.Wait()
}
