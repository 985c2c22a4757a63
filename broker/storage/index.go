package storage

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sort"
)

// The sizes of entries in Kafka's index files.
const (
	indexEntrySize     = 8  // offset relative to the segment u32, position u32
	timeIndexEntrySize = 12 // timestamp i64, offset relative to the segment u32
)

// indexEntry says that the batch at position ends with the record at offset: so
// Kafka writes it, and its dump tool checks it.
type indexEntry struct {
	offset   int64
	position int64
}

// timeEntry says that no record before the batch that ends with offset has a
// timestamp as large.
type timeEntry struct {
	timestamp int64
	offset    int64
}

// tail gathers what the indexes of a segment will hold while batches are added.
// Its slices only grow, so a copy of their headers can be read without a lock.
//
// The active segment has its index here and not in files: after a crash it is
// scanned anyway, and an append stays one write.
type tail struct {
	interval  int64 // bytes between entries
	sinceLast int64
	index     []indexEntry
	times     []timeEntry
	latest    timeEntry // the first batch with the largest timestamp
}

func newTail(interval int64) tail { return tail{interval: interval, latest: timeEntry{timestamp: -1}} }

// add notes a batch that starts at position.
func (t *tail) add(h *Header, position int64) {
	if h.MaxTimestamp > t.latest.timestamp {
		t.latest = timeEntry{h.MaxTimestamp, h.lastOffset()}
	}
	if t.sinceLast > t.interval {
		t.index = append(t.index, indexEntry{h.lastOffset(), position})
		t.addTime()
		t.sinceLast = 0
	}
	t.sinceLast += h.Size()
}

// addTime makes an entry of the largest timestamp so far, unless there is one.
func (t *tail) addTime() {
	last := int64(-1) // Kafka's "no timestamp": such records are not indexed
	if n := len(t.times); n > 0 {
		last = t.times[n-1].timestamp
	}
	if t.latest.timestamp > last {
		t.times = append(t.times, t.latest)
	}
}

// encodeIndex returns the contents of the index file.
func (t *tail) encodeIndex(base int64) []byte {
	b := make([]byte, 0, len(t.index)*indexEntrySize)
	for _, e := range t.index {
		b = binary.BigEndian.AppendUint32(b, uint32(e.offset-base))
		b = binary.BigEndian.AppendUint32(b, uint32(e.position))
	}
	return b
}

// encodeTimes returns the contents of the time index, closed by an entry for the
// largest timestamp, by which a segment is skipped.
func (t *tail) encodeTimes(base int64) []byte {
	t.addTime()
	b := make([]byte, 0, len(t.times)*timeIndexEntrySize)
	for _, e := range t.times {
		b = binary.BigEndian.AppendUint64(b, uint64(e.timestamp))
		b = binary.BigEndian.AppendUint32(b, uint32(e.offset-base))
	}
	return b
}

func decodeIndexEntry(b []byte, base int64) indexEntry {
	return indexEntry{
		offset:   base + int64(binary.BigEndian.Uint32(b)),
		position: int64(binary.BigEndian.Uint32(b[4:])),
	}
}

func decodeTimeEntry(b []byte, base int64) timeEntry {
	return timeEntry{
		timestamp: int64(binary.BigEndian.Uint64(b)),
		offset:    base + int64(binary.BigEndian.Uint32(b[8:])),
	}
}

// entries is an index that can be searched, in memory or in a file.
type entries[E any] interface {
	len() int
	at(i int) (E, error)
}

type memoryEntries[E any] []E

func (m memoryEntries[E]) len() int            { return len(m) }
func (m memoryEntries[E]) at(i int) (E, error) { return m[i], nil }

// fileEntries reads entries one by one where they are needed: the indexes of
// large logs do not fit memory, and the pages in use are cached by the system.
type fileEntries[E any] struct {
	file   File
	n      int
	size   int
	base   int64
	decode func([]byte, int64) E
}

func (f *fileEntries[E]) len() int { return f.n }

func (f *fileEntries[E]) at(i int) (E, error) {
	var buf [timeIndexEntrySize]byte
	b := buf[:f.size]
	if err := readFull(f.file, b, int64(i)*int64(f.size)); err != nil {
		var none E
		return none, err
	}
	return f.decode(b, f.base), nil
}

// lastNotAfter returns the last entry that is not after what is looked for; ok is
// false if there is none.
func lastNotAfter[E any](in entries[E], after func(E) bool) (found E, ok bool, err error) {
	i := sort.Search(in.len(), func(i int) bool {
		e, readErr := in.at(i)
		err = errors.Join(err, readErr)
		return readErr == nil && after(e)
	})
	if err != nil || i == 0 {
		return found, false, err
	}
	found, err = in.at(i - 1)
	return found, err == nil, err
}

// openEntries opens an index file. A length that is no whole number of entries
// is an error: the file is made again.
func openEntries[E any](fs FS, name string, size int, base int64, decode func([]byte, int64) E) (*fileEntries[E], error) {
	f, err := fs.Open(name)
	if err != nil {
		return nil, err
	}
	length, err := f.Size()
	if err == nil && length%int64(size) != 0 {
		err = fmt.Errorf("%s has %d bytes, not a multiple of %d", name, length, size)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &fileEntries[E]{file: f, n: int(length / int64(size)), size: size, base: base, decode: decode}, nil
}

// all reads the whole index and checks that it grows.
func (f *fileEntries[E]) all(grows func(before, after E) bool) ([]E, error) {
	b := make([]byte, f.n*f.size)
	if err := readFull(f.file, b, 0); err != nil {
		return nil, err
	}
	list := make([]E, f.n)
	for i := range list {
		list[i] = f.decode(b[i*f.size:], f.base)
		if i > 0 && !grows(list[i-1], list[i]) {
			return nil, fmt.Errorf("entry %d does not follow the one before it", i)
		}
	}
	return list, nil
}

func indexGrows(a, b indexEntry) bool { return b.offset > a.offset && b.position > a.position }
func timesGrow(a, b timeEntry) bool   { return b.timestamp > a.timestamp && b.offset > a.offset }
