package storage

import (
	"errors"
	"fmt"
	"io"
	"sort"

	"github.com/twmb/franz-go/pkg/kerr"
)

// find returns the segment that holds offset, or would.
func (v *view) find(offset int64) int {
	i := sort.Search(len(v.segments), func(i int) bool { return v.segments[i].base > offset })
	return max(i-1, 0)
}

// indexOf returns the index of a segment and the end of what may be read of it.
func (v *view) indexOf(i int) (entries[indexEntry], int64) {
	if i == len(v.segments)-1 {
		return v.index, v.position
	}
	return v.segments[i].index, v.segments[i].size
}

// Read returns whole batches from the one that holds offset on, all of them below
// limit and below the durable offset. It stops before maxBytes is exceeded or the
// segment ends, but returns at least one batch if there is one. The bytes are the
// caller's. What is returned has been checked against its CRC; damage is a
// *CorruptionError.
func (l *Log) Read(offset, limit int64, maxBytes int) ([]byte, error) {
	if !l.readers.enter() {
		return nil, ErrClosed
	}
	defer l.readers.leave()
	end := l.end.Load() // before the view, which must not be newer
	v := l.view.Load()
	if offset < v.segments[0].base || offset > max(end, v.durable) {
		return nil, fmt.Errorf("read offset %d of %s, which has %d to %d: %w",
			offset, l.dir, v.segments[0].base, end, kerr.OffsetOutOfRange)
	}
	limit = min(limit, v.durable)
	if offset >= limit {
		return nil, nil
	}
	i := v.find(offset)
	c, h, err := l.locate(v, i, offset)
	if err != nil {
		return nil, err
	}
	return l.readFrom(c, &h, limit, maxBytes)
}

// locate returns a cursor on the batch that holds offset. The offset is below the
// durable one.
func (l *Log) locate(v *view, i int, offset int64) (*cursor, Header, error) {
	s := v.segments[i]
	index, end := v.indexOf(i)
	position, err := s.seek(index, offset, end)
	if err != nil {
		return nil, Header{}, fmt.Errorf("log %s: %w", l.dir, err)
	}
	c := newCursor(s, position, end, lookupChunk)
	for {
		h, err := c.header()
		if errors.Is(err, io.EOF) || err == nil && h.BaseOffset > offset {
			err = fmt.Errorf("%w: the batch is missing", errBadBatch)
		}
		if err != nil {
			return nil, h, l.damaged(s, c.position, offset, err)
		}
		if h.Next() > offset {
			return c, h, nil
		}
		c.skip(&h)
	}
}

// readFrom reads from the batch under the cursor on.
func (l *Log) readFrom(c *cursor, first *Header, limit int64, maxBytes int) ([]byte, error) {
	n := min(max(int64(maxBytes), first.Size()), c.end-c.position)
	b := make([]byte, n)
	if err := readFull(c.seg.log, b, c.position); err != nil {
		return nil, fmt.Errorf("log %s: read segment %d: %w", l.dir, c.seg.base, err)
	}
	want := first.BaseOffset
	cut := 0
	for len(b)-cut >= headerSize {
		h, err := parseHeader(b[cut:])
		if err == nil && h.Size() > int64(len(b)-cut) {
			break
		}
		why := ""
		if err != nil {
			why = err.Error()
		} else if why = checkStored(b[cut:cut+int(h.Size())], &h, want); why == "" && h.Next() > limit {
			break
		}
		if why != "" {
			if cut > 0 {
				break // what is before the damage can still be read
			}
			return nil, &CorruptionError{Dir: l.dir, Segment: c.seg.base, Position: c.position, Offset: want, Reason: why}
		}
		want = h.Next()
		cut += int(h.Size())
	}
	return b[:cut:cut], nil
}
