package storage

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io"
)

const (
	// lookupChunk is a few times the interval of the index: a look-up is one read.
	lookupChunk = 16 << 10
	// scanChunk is for walks over whole segments, where the disk should stream.
	scanChunk = 1 << 20
)

// cursor walks over the batches of a segment, header by header.
type cursor struct {
	seg      *segment
	end      int64 // of what may be read
	chunk    int   // bytes read at a time
	position int64 // of the batch under the cursor
	buf      []byte
	bufAt    int64
}

// errBadBatch is wrapped where bytes are not a batch. It is never returned to
// callers of the package: recovery cuts there, others make a CorruptionError of it.
var errBadBatch = errors.New("bad batch")

func newCursor(seg *segment, from, end int64, chunk int) *cursor {
	return &cursor{seg: seg, position: from, end: end, chunk: chunk}
}

// header returns the batch under the cursor, or io.EOF at the end. The batch lies
// wholly before the end.
func (c *cursor) header() (Header, error) {
	left := c.end - c.position
	if left == 0 {
		return Header{}, io.EOF
	}
	if left < headerSize {
		return Header{}, fmt.Errorf("%w: %d bytes are less than a batch header", errBadBatch, left)
	}
	b, err := c.peek(c.position, headerSize)
	if err != nil {
		return Header{}, err
	}
	h, err := parseHeader(b)
	if err != nil {
		return h, fmt.Errorf("%w: %s", errBadBatch, err.(*BatchError).Reason)
	}
	if h.Size() > left {
		return h, fmt.Errorf("%w: its length is %d, %d bytes are left", errBadBatch, h.Size(), left)
	}
	return h, nil
}

// batch returns the whole batch under the cursor, valid until the next call.
func (c *cursor) batch(h *Header) ([]byte, error) { return c.peek(c.position, h.Size()) }

func (c *cursor) skip(h *Header) { c.position += h.Size() }

// intact checks the CRC of the batch under the cursor, piece by piece: after a
// crash its length may be any number, and is no reason to take that much memory.
func (c *cursor) intact(h *Header) error {
	crc := uint32(0)
	end := c.position + h.Size()
	for at := c.position + atAttributes; at < end; {
		b, err := c.peek(at, min(int64(c.chunk), end-at))
		if err != nil {
			return err
		}
		crc = crc32.Update(crc, castagnoli(), b)
		at += int64(len(b))
	}
	if crc != h.CRC {
		return fmt.Errorf("%w: its CRC is %08x, its header says %08x", errBadBatch, crc, h.CRC)
	}
	return nil
}

// peek returns n bytes from a position. The caller has checked that they are there.
func (c *cursor) peek(at, n int64) ([]byte, error) {
	from := at - c.bufAt
	if from >= 0 && from+n <= int64(len(c.buf)) {
		return c.buf[from : from+n], nil
	}
	want := min(max(n, int64(c.chunk)), c.end-at)
	if int64(cap(c.buf)) < want {
		c.buf = make([]byte, want)
	}
	c.buf, c.bufAt = c.buf[:want], at
	if err := readFull(c.seg.log, c.buf, at); err != nil {
		c.buf = c.buf[:0]
		return nil, fmt.Errorf("read segment %d: %w", c.seg.base, err)
	}
	return c.buf[:n], nil
}
