package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// This file walks over a Produce request without allocating, so that its counts
// are known to be sane before kmsg allocates by them. Other requests are small
// enough (MaxFrame) to go without.

var errShort = errors.New("it ends too early")

// The first versions with a transactional id, with compact lengths and tagged
// fields, and with topic ids in place of names.
const (
	produceTxn      = 3
	produceFlexible = 9
	produceTopicIDs = 13
)

// checkProduce bounds the topics, partitions and tags of a Produce request body.
func checkProduce(version int16, body []byte) error {
	w := walker{rest: body, flexible: version >= produceFlexible}
	if version >= produceTxn {
		w.skipString() // transactional id
	}
	w.skip(2 + 4) // acks, timeout
	for range w.count() {
		if version >= produceTopicIDs {
			w.skip(16)
		} else {
			w.skipString()
		}
		for range w.count() {
			w.skip(4)
			w.skipBytes()
			w.skipTags()
			if w.err != nil {
				return w.err
			}
		}
		w.skipTags()
		if w.err != nil {
			return w.err
		}
	}
	w.skipTags()
	return w.err
}

// walker moves over the encoding of a struct; after the first error it stands still.
type walker struct {
	rest     []byte
	flexible bool
	entries  int
	err      error
}

func (w *walker) skip(n int) {
	switch {
	case w.err != nil:
	case n < 0 || n > len(w.rest):
		w.err = errShort
	default:
		w.rest = w.rest[n:]
	}
}

// length reads a length of the given width in the old encoding, or a compact one.
// Null is 0.
func (w *walker) length(width int) int {
	if w.err != nil {
		return 0
	}
	if w.flexible {
		n, rest, err := readUvarint(w.rest)
		w.rest, w.err = rest, err
		return max(int(n)-1, 0)
	}
	if len(w.rest) < width {
		w.err = errShort
		return 0
	}
	var n int
	if width == 2 {
		n = int(int16(binary.BigEndian.Uint16(w.rest)))
	} else {
		n = int(int32(binary.BigEndian.Uint32(w.rest)))
	}
	w.rest = w.rest[width:]
	return max(n, 0)
}

func (w *walker) skipString() { w.skip(w.length(2)) }
func (w *walker) skipBytes()  { w.skip(w.length(4)) }

// count reads the length of an array and adds it to the entries seen so far.
func (w *walker) count() int {
	n := w.length(4)
	if w.err == nil && n > maxProduceEntries-w.entries {
		w.err = fmt.Errorf("more than %d topics and partitions", maxProduceEntries)
	}
	if w.err != nil {
		return 0
	}
	w.entries += n
	return n
}

func (w *walker) skipTags() {
	if w.err == nil && w.flexible {
		w.rest, w.err = skipTags(w.rest)
	}
}

// skipTags moves over a section of tagged fields.
func skipTags(b []byte) ([]byte, error) {
	count, b, err := readUvarint(b)
	if err != nil {
		return nil, fmt.Errorf("count of tagged fields: %w", err)
	}
	if count > maxHeaderTags {
		return nil, fmt.Errorf("%d tagged fields, at most %d", count, maxHeaderTags)
	}
	for range count {
		var size uint32
		if _, b, err = readUvarint(b); err == nil {
			size, b, err = readUvarint(b)
		}
		if err != nil {
			return nil, fmt.Errorf("tagged field: %w", err)
		}
		if uint64(size) > uint64(len(b)) {
			return nil, fmt.Errorf("tagged field of %d bytes: %w", size, errShort)
		}
		b = b[size:]
	}
	return b, nil
}

// readUvarint reads an unsigned 32-bit varint of at most 5 bytes.
func readUvarint(b []byte) (uint32, []byte, error) {
	n, width := binary.Uvarint(b[:min(len(b), binary.MaxVarintLen32)])
	if width <= 0 || n > 1<<32-1 {
		return 0, nil, fmt.Errorf("varint: %w", errShort)
	}
	return uint32(n), b[width:], nil
}
