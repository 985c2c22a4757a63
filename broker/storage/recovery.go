package storage

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"path/filepath"
	"strings"
)

// opener opens a log. It keeps what is open so far, to be closed if it fails.
//
// The order matters: the mark of the last clean close is gone from the disk before
// anything is changed, so a log is never taken for clean that is not.
type opener struct {
	fs       FS
	dir      string
	opts     Options
	now      int64
	recovery Recovery

	segments []*segment // open, in order
	size     int64      // of the last one
	tail     tail
	end      int64
}

func (o *opener) abandon() error {
	var err error
	for _, s := range o.segments {
		err = errors.Join(err, s.close())
	}
	return err
}

func (o *opener) open() (*Log, error) {
	o.recovery.Dir = o.dir
	mark, why, err := o.takeMark()
	if err != nil {
		return nil, err
	}
	bases, err := listOffsets(o.fs, o.dir, logSuffix)
	if err != nil {
		return nil, err
	}
	if err := o.removeLeftovers(bases); err != nil {
		return nil, err
	}
	if why == "" && (len(bases) == 0 || bases[len(bases)-1] != mark.segment) {
		// The file was there when the log was closed. Going on without it would
		// give its offsets to other records.
		return nil, &CorruptionError{Dir: o.dir, Segment: mark.segment, Offset: mark.segment,
			Reason: "the newest segment at the last close is missing, or is not the newest"}
	}
	if len(bases) == 0 {
		fresh, err := createSegment(o.fs, o.dir, 0)
		if err != nil {
			return nil, err
		}
		o.segments, o.tail = []*segment{fresh}, newTail(o.opts.IndexIntervalBytes)
		o.recovery.Clean = true
		return o.build()
	}
	for i := range len(bases) - 1 {
		if err := o.openSealed(bases[i], bases[i+1]); err != nil {
			return nil, err
		}
	}
	if err := o.openActive(bases[len(bases)-1], mark, why); err != nil {
		return nil, err
	}
	return o.build()
}

// build makes the log of what was opened.
func (o *opener) build() (*Log, error) {
	last := o.segments[len(o.segments)-1]
	o.recovery.Segment, o.recovery.ValidOffset = last.base, o.end
	l := &Log{
		dir: o.dir, opts: o.opts, active: last, position: o.size, tail: o.tail,
		durable: newWatermark(o.end), kick: make(chan struct{}, 1), syncDone: make(chan struct{}),
	}
	l.end.Store(o.end)
	l.view.Store(&view{segments: o.segments})
	l.view.Store(l.snapshot())
	if err := l.loadProducers(o.now); err != nil {
		return nil, err
	}
	if err := l.loadEpochs(); err != nil {
		return nil, err
	}
	return l, nil
}

// cleanMark is what the file left by Close says.
type cleanMark struct {
	segment, size, end int64
}

const cleanFormat = "version: 0\nsegment: %d\nsize: %d\nend: %d\n"

func (m cleanMark) encode() []byte {
	text := fmt.Sprintf(cleanFormat, m.segment, m.size, m.end)
	return fmt.Appendf(nil, "%scrc: %08x\n", text, crc32.Checksum([]byte(text), castagnoli()))
}

// takeMark reads the mark of a clean close and removes it for good. why says why
// there is none to believe, or is "".
func (o *opener) takeMark() (mark cleanMark, why string, err error) {
	data, err := readSmallFile(o.fs, o.dir, cleanName)
	if errors.Is(err, ErrNotExist) {
		return mark, "it was not closed", nil
	}
	if err != nil {
		return mark, "", fmt.Errorf("read %s: %w", filepath.Join(o.dir, cleanName), err)
	}
	if _, err := fmt.Sscanf(string(data), cleanFormat, &mark.segment, &mark.size, &mark.end); err != nil ||
		string(mark.encode()) != string(data) {
		why = "the mark of its last close is malformed"
	}
	if err := o.fs.Remove(filepath.Join(o.dir, cleanName)); err != nil {
		return mark, "", fmt.Errorf("remove %s: %w", filepath.Join(o.dir, cleanName), err)
	}
	if err := o.fs.SyncDir(o.dir); err != nil {
		return mark, "", fmt.Errorf("remove %s: %w", filepath.Join(o.dir, cleanName), err)
	}
	return mark, why, nil
}

// removeLeftovers removes files that a crash has left half made, and indexes
// without a segment.
func (o *opener) removeLeftovers(bases []int64) error {
	names, err := o.fs.ReadDir(o.dir)
	if err != nil {
		return fmt.Errorf("list %s: %w", o.dir, err)
	}
	known := map[int64]bool{}
	for _, base := range bases {
		known[base] = true
	}
	for _, name := range names {
		left := strings.HasSuffix(name, tempSuffix)
		for _, suffix := range []string{indexSuffix, timeIndexSuffix} {
			base, ok := offsetOf(name, suffix)
			left = left || ok && !known[base]
		}
		if !left {
			continue
		}
		if err := removeIfThere(o.fs, filepath.Join(o.dir, name)); err != nil {
			return fmt.Errorf("remove the leftover %s: %w", filepath.Join(o.dir, name), err)
		}
	}
	return nil
}

// openLog opens the log file of a segment, to be closed by abandon.
func (o *opener) openLog(base int64) (*segment, int64, error) {
	f, err := o.fs.Open(fileName(o.dir, base, logSuffix))
	if err != nil {
		return nil, 0, fmt.Errorf("open segment %d: %w", base, err)
	}
	s := &segment{base: base, log: f}
	o.segments = append(o.segments, s)
	size, err := f.Size()
	if err != nil {
		return nil, 0, fmt.Errorf("open segment %d: %w", base, err)
	}
	return s, size, nil
}

// openSealed opens a segment that is not the last, and must end where the next
// begins. Its indexes are made again if they are not what they should be.
func (o *opener) openSealed(base, next int64) error {
	raw, size, err := o.openLog(base)
	if err != nil {
		return err
	}
	s, why := raw, ""
	if size > math.MaxUint32 {
		why = "it is larger than its index can tell"
	} else if s, err = raw.sealed(o.fs, o.dir, size); err != nil {
		why = err.Error()
	} else if why = s.checkIndexes(next, o.opts.IndexIntervalBytes); why != "" {
		if err := s.closeIndexes(); err != nil {
			return fmt.Errorf("close the indexes of segment %d: %w", base, err)
		}
	}
	if why == "" {
		o.segments[len(o.segments)-1] = s
	}
	if why == "" && !o.opts.VerifyAll {
		return nil
	}
	found, err := raw.scan(size, o.opts.IndexIntervalBytes)
	if err != nil {
		return fmt.Errorf("open log %s: %w", o.dir, err)
	}
	damage := CorruptionError{Dir: o.dir, Segment: base, Position: found.position, Offset: found.next}
	if found.bad != nil {
		damage.Reason = found.bad.Error()
		return &damage
	}
	if found.next != next {
		damage.Reason = fmt.Sprintf("it ends at offset %d, and the next segment begins at %d", found.next, next)
		return &damage
	}
	if why == "" {
		return nil
	}
	if err := writeIndexes(o.fs, o.dir, base, &found.tail); err != nil {
		return fmt.Errorf("open log %s: %w", o.dir, err)
	}
	if s, err = raw.sealed(o.fs, o.dir, size); err != nil {
		return fmt.Errorf("open log %s: %w", o.dir, err)
	}
	o.segments[len(o.segments)-1] = s
	tell(o.opts.Listener.Repaired, Repaired{Dir: o.dir, What: fmt.Sprintf("the indexes of segment %d", base), Reason: why})
	return nil
}

// checkIndexes tells why the indexes of a sealed segment are not to be used, or "".
// It walks from the last entry to the end, so it also sees whether the segment ends
// where the next begins.
func (s *segment) checkIndexes(next, interval int64) string {
	t := newTail(interval)
	if n := s.index.len(); n > 0 {
		last, err := s.index.at(n - 1)
		if err != nil {
			return err.Error()
		}
		t.index = []indexEntry{last}
	}
	known := len(t.index)
	end, err := s.walkTail(&t, s.size)
	switch {
	case err != nil:
		return err.Error()
	case end != next:
		return fmt.Sprintf("it ends at offset %d, and the next segment begins at %d", end, next)
	case len(t.index) != known:
		return "entries at the end of the index are missing"
	case t.latest.timestamp > s.latest.timestamp:
		return "entries at the end of the time index are missing"
	}
	return s.checkLatest()
}

// checkLatest tells why the last entry of the time index is not to be believed, or
// "": by it whole segments are skipped.
func (s *segment) checkLatest() string {
	if s.times.len() == 0 {
		return ""
	}
	position, err := s.seek(s.index, s.latest.offset, s.size)
	c := newCursor(s, position, s.size, lookupChunk)
	for err == nil {
		var h Header
		if h, err = c.header(); err == nil && h.lastOffset() >= s.latest.offset {
			if h.lastOffset() != s.latest.offset || h.MaxTimestamp != s.latest.timestamp {
				return "the last entry of the time index does not match its batch"
			}
			return ""
		}
		c.skip(&h)
	}
	return "the last entry of the time index points to no batch: " + err.Error()
}

// walkTail adds to a tail the batches from its last entry on, by their headers, and
// returns the offset after the last one.
func (s *segment) walkTail(t *tail, size int64) (int64, error) {
	next, position := s.base, int64(0)
	c := newCursor(s, 0, size, lookupChunk)
	if n := len(t.index); n > 0 {
		last := t.index[n-1]
		if last.position >= size {
			return 0, fmt.Errorf("%w: the last entry of the index points to %d of %d bytes", errBadBatch, last.position, size)
		}
		c.position, t.sinceLast = last.position, 0
		h, err := c.header()
		if err != nil {
			return 0, err
		}
		if h.lastOffset() != last.offset {
			return 0, fmt.Errorf("%w: the last entry of the index points to another batch", errBadBatch)
		}
		next = h.BaseOffset
	}
	for {
		h, err := c.header()
		if errors.Is(err, io.EOF) && c.position == size {
			return next, nil
		}
		if err != nil {
			return 0, err
		}
		if h.BaseOffset != next {
			return 0, fmt.Errorf("%w: offset %d follows %d", errBadBatch, h.BaseOffset, next)
		}
		position = c.position
		t.add(&h, position)
		next = h.Next()
		c.skip(&h)
	}
}

// openActive opens the last segment. If the log was closed properly it is as the
// mark says; else it is scanned, and cut at the first bad batch.
func (o *opener) openActive(base int64, mark cleanMark, why string) error {
	s, size, err := o.openLog(base)
	if err != nil {
		return err
	}
	o.size = size
	if why == "" && size != mark.size {
		why = fmt.Sprintf("segment %d has %d bytes, and had %d at the last close", base, size, mark.size)
	}
	if why == "" {
		if why = o.trustActive(s, mark); why == "" {
			o.recovery.Clean = true
			return nil
		}
	}
	found, err := s.scan(size, o.opts.IndexIntervalBytes)
	if err != nil {
		return fmt.Errorf("open log %s: %w", o.dir, err)
	}
	o.recovery.Reason = why
	if found.bad != nil {
		o.recovery.BytesCut = size - found.position
		o.recovery.Reason = fmt.Sprintf("%s; at offset %d, position %d: %v", why, found.next, found.position, found.bad)
		if err := s.log.Truncate(found.position); err != nil {
			return fmt.Errorf("cut segment %d of %s at %d: %w", base, o.dir, found.position, err)
		}
	}
	o.size, o.end, o.tail = found.position, found.next, found.tail
	// The indexes on disk may be those of what was cut.
	for _, suffix := range []string{indexSuffix, timeIndexSuffix} {
		if err := removeIfThere(o.fs, fileName(o.dir, base, suffix)); err != nil {
			return fmt.Errorf("remove a stale index: %w", err)
		}
	}
	// What the scan has read may be no more than a cached page: readers see it only
	// once it is known to be on disk.
	if err := s.log.Sync(); err != nil {
		return fmt.Errorf("sync segment %d of %s: %w", base, o.dir, err)
	}
	if err := o.fs.SyncDir(o.dir); err != nil {
		return fmt.Errorf("sync %s: %w", o.dir, err)
	}
	return nil
}

// trustActive takes the last segment as Close has left it, or tells why not.
func (o *opener) trustActive(s *segment, mark cleanMark) string {
	done, err := s.sealed(o.fs, o.dir, o.size)
	if err != nil {
		return err.Error()
	}
	why := o.loadTail(done, mark)
	if err := done.closeIndexes(); err != nil && why == "" {
		why = err.Error()
	}
	return why
}

func (o *opener) loadTail(s *segment, mark cleanMark) string {
	t := newTail(o.opts.IndexIntervalBytes)
	var err error
	if t.index, err = s.index.(*fileEntries[indexEntry]).all(indexGrows); err != nil {
		return "its index: " + err.Error()
	}
	if t.times, err = s.times.(*fileEntries[timeEntry]).all(timesGrow); err != nil {
		return "its time index: " + err.Error()
	}
	if why := s.checkLatest(); why != "" {
		return why
	}
	t.latest = s.latest
	end, err := s.walkTail(&t, o.size)
	if err != nil {
		return err.Error()
	}
	if end != mark.end {
		return fmt.Sprintf("it ends at offset %d, and ended at %d at the last close", end, mark.end)
	}
	o.tail, o.end = t, end
	return ""
}
