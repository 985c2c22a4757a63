package storage

import (
	"math"

	"github.com/twmb/franz-go/pkg/kerr"
)

// minRecordSize is the length byte, attributes, two deltas, key and value
// lengths, and the count of headers, at one byte each. A count of records that
// could not fit is refused before the walk.
const minRecordSize = 7

// record is what a look-up needs of a record.
type record struct {
	timestampDelta int64
	offsetDelta    int32
}

// recordReader walks over records without copying or allocating.
type recordReader struct{ b []byte }

// next returns the next record, or why it is malformed.
func (r *recordReader) next() (record, string) {
	length, rest, ok := readVarint(r.b)
	if !ok || length < 0 || length > int64(len(rest)) {
		return record{}, "its length does not fit"
	}
	b := rest[:length]
	r.b = rest[length:]
	if len(b) == 0 {
		return record{}, "it has no attributes"
	}
	b = b[1:] // attributes of records are not used
	timestampDelta, b, ok1 := readVarint(b)
	offsetDelta, b, ok2 := readVarint(b)
	if !ok1 || !ok2 || offsetDelta < 0 || offsetDelta > math.MaxInt32 {
		return record{}, "its deltas are malformed"
	}
	b, ok1 = skipBytes(b, true)
	if !ok1 {
		return record{}, "its key does not fit"
	}
	b, ok1 = skipBytes(b, true)
	if !ok1 {
		return record{}, "its value does not fit"
	}
	if why := skipHeaders(b); why != "" {
		return record{}, why
	}
	return record{timestampDelta: timestampDelta, offsetDelta: int32(offsetDelta)}, ""
}

func skipHeaders(b []byte) string {
	count, b, ok := readVarint(b)
	if !ok || count < 0 {
		return "its count of headers is malformed"
	}
	for range count { // each takes at least two bytes, so a wrong count ends soon
		if b, ok = skipBytes(b, false); !ok {
			return "a header key does not fit"
		}
		if b, ok = skipBytes(b, true); !ok {
			return "a header value does not fit"
		}
	}
	if len(b) != 0 {
		return "bytes are left over in it"
	}
	return ""
}

// skipBytes skips a length and as many bytes; length -1 is null.
func skipBytes(b []byte, nullable bool) ([]byte, bool) {
	n, b, ok := readVarint(b)
	switch {
	case !ok:
		return nil, false
	case n == -1 && nullable:
		return b, true
	case n < 0 || n > int64(len(b)):
		return nil, false
	}
	return b[n:], true
}

// readVarint reads a zigzag varint of at most 64 bits.
func readVarint(b []byte) (int64, []byte, bool) {
	var u uint64
	for i, c := range b {
		if i == 9 && c > 1 {
			return 0, nil, false // would not fit 64 bits
		}
		u |= uint64(c&0x7f) << (7 * i)
		if c < 0x80 {
			return int64(u>>1) ^ -int64(u&1), b[i+1:], true
		}
	}
	return 0, nil, false
}

// checkRecords checks uncompressed records against their header and returns
// the largest timestamp.
func checkRecords(b []byte, h *Header) (int64, *BatchError) {
	if int64(h.NumRecords)*minRecordSize > int64(len(b)) {
		return 0, refuse(kerr.InvalidRecord, "%d records in %d bytes", h.NumRecords, len(b))
	}
	maxTimestamp := int64(math.MinInt64)
	r := recordReader{b}
	for i := range h.NumRecords {
		rec, why := r.next()
		if why != "" {
			return 0, refuse(kerr.InvalidRecord, "record %d: %s", i, why)
		}
		if rec.offsetDelta != i {
			return 0, refuse(kerr.InvalidRecord, "record %d: its offset delta is %d", i, rec.offsetDelta)
		}
		maxTimestamp = max(maxTimestamp, h.FirstTimestamp+rec.timestampDelta)
	}
	if len(r.b) != 0 {
		return 0, refuse(kerr.InvalidRecord, "%d bytes after the last record", len(r.b))
	}
	return maxTimestamp, nil
}
