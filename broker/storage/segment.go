package storage

import (
	"errors"
	"fmt"
	"io"
)

// segment is one file of the log with its indexes. A sealed segment does not
// change any more. The active one, the last, has its indexes in a tail.
type segment struct {
	base  int64
	log   File
	size  int64 // of a sealed segment
	index entries[indexEntry]
	times entries[timeEntry]
	files []File // of the indexes
	// The first batch with the largest timestamp of a sealed segment, named by its
	// last offset; timestamp -1 if no record has one.
	latest timeEntry
}

func createSegment(fs FS, dir string, base int64) (*segment, error) {
	f, err := fs.Create(fileName(dir, base, logSuffix))
	if err != nil {
		return nil, fmt.Errorf("create segment %d: %w", base, err)
	}
	if err := fs.SyncDir(dir); err != nil {
		// Not wrapped: whatever it was, the file is there now and may or may not
		// be after a crash, so it must not pass for a full disk and be tried again.
		return nil, errors.Join(fmt.Errorf("create segment %d: %v", base, err), f.Close())
	}
	return &segment{base: base, log: f}, nil
}

func (s *segment) close() error { return errors.Join(s.log.Close(), s.closeIndexes()) }

func (s *segment) closeIndexes() error {
	var err error
	for _, f := range s.files {
		err = errors.Join(err, f.Close())
	}
	return err
}

// writeIndexes makes the index files of a segment whose tail is complete, synced,
// and their names too.
func writeIndexes(fs FS, dir string, base int64, t *tail) error {
	if err := writeAll(fs, fileName(dir, base, indexSuffix), t.encodeIndex(base)); err != nil {
		return fmt.Errorf("write the index of segment %d: %w", base, err)
	}
	if err := writeAll(fs, fileName(dir, base, timeIndexSuffix), t.encodeTimes(base)); err != nil {
		return fmt.Errorf("write the time index of segment %d: %w", base, err)
	}
	if err := fs.SyncDir(dir); err != nil {
		return fmt.Errorf("write the indexes of segment %d: %w", base, err)
	}
	return nil
}

// sealed returns the segment as it is once its index files are written.
func (s *segment) sealed(fs FS, dir string, size int64) (*segment, error) {
	index, err := openEntries(fs, fileName(dir, s.base, indexSuffix), indexEntrySize, s.base, decodeIndexEntry)
	if err != nil {
		return nil, fmt.Errorf("open the index of segment %d: %w", s.base, err)
	}
	times, err := openEntries(fs, fileName(dir, s.base, timeIndexSuffix), timeIndexEntrySize, s.base, decodeTimeEntry)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open the time index of segment %d: %w", s.base, err), index.file.Close())
	}
	done := &segment{
		base: s.base, log: s.log, size: size, index: index, times: times,
		files: []File{index.file, times.file}, latest: timeEntry{timestamp: -1},
	}
	if times.n > 0 {
		if done.latest, err = times.at(times.n - 1); err != nil {
			return nil, errors.Join(err, index.file.Close(), times.file.Close())
		}
	}
	return done, nil
}

// scanned is what a walk over a segment found.
type scanned struct {
	next     int64 // offset after the last good batch
	position int64 // byte after it
	tail     tail
	bad      error // why the walk ended before the end; wraps errBadBatch
}

// scan walks over the segment from the start, and checks every byte of it.
// The error is one of reading; damage is in the answer.
func (s *segment) scan(size, interval int64) (scanned, error) {
	out := scanned{next: s.base, tail: newTail(interval)}
	c := newCursor(s, 0, size, scanChunk)
	for {
		h, err := c.header()
		if err == nil && h.BaseOffset != out.next {
			err = fmt.Errorf("%w: its base offset is %d", errBadBatch, h.BaseOffset)
		}
		if err == nil {
			err = c.intact(&h)
		}
		switch {
		case errors.Is(err, io.EOF) && c.position == size:
			return out, nil
		case errors.Is(err, errBadBatch):
			out.bad = err
			return out, nil
		case err != nil:
			return out, err
		}
		out.tail.add(&h, c.position)
		out.next = h.Next()
		c.skip(&h)
		out.position = c.position
	}
}

// seek returns the position of an index entry from which a walk forward meets the
// batch that holds offset.
func (s *segment) seek(index entries[indexEntry], offset, end int64) (int64, error) {
	e, ok, err := lastNotAfter(index, func(e indexEntry) bool { return e.offset > offset })
	if err != nil {
		return 0, fmt.Errorf("look up offset %d in segment %d: %w", offset, s.base, err)
	}
	if !ok || e.position >= end {
		return 0, nil
	}
	// Index files carry no checksum. An entry is believed when the batch that it
	// points to is the one that it names; else the walk starts at the beginning,
	// which is slow and right.
	h, err := newCursor(s, e.position, end, headerSize).header()
	if errors.Is(err, errBadBatch) || err == nil && h.lastOffset() != e.offset {
		return 0, nil
	}
	return e.position, err
}
