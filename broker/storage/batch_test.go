package storage_test

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/muster-io/muster/broker/storage"
)

func gzipped(records []byte) []byte {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write(records); err != nil {
		panic(err)
	}
	if err := w.Close(); err != nil {
		panic(err)
	}
	return b.Bytes()
}

// changed is a batch with some bytes set, and a CRC that matches again.
func changed(batch []byte, at int, b ...byte) []byte {
	c := bytes.Clone(batch)
	copy(c[at:], b)
	fixCRC(c)
	return c
}

func TestBatchesFromOutsideAreChecked(t *testing.T) {
	good := plain(3, 1000, 20)
	big := func(v uint32) []byte { return binary.BigEndian.AppendUint32(nil, v) }
	noRecords := changed(good[:61], 57, 0, 0, 0, 1)
	binary.BigEndian.PutUint32(noRecords[8:], 49)
	binary.BigEndian.PutUint32(noRecords[23:], 0)
	fixCRC(noRecords)
	badCRC := bytes.Clone(good)
	badCRC[len(badCRC)-1] ^= 1
	for name, c := range map[string]struct {
		sent []byte
		want *kerr.Error
	}{
		"nothing":                {nil, kerr.InvalidRecord},
		"half a header":          {good[:30], kerr.CorruptMessage},
		"half a batch":           {good[:len(good)-1], kerr.CorruptMessage},
		"bytes after":            {append(bytes.Clone(good), 1, 2, 3), kerr.CorruptMessage},
		"magic 1":                {changed(good, 16, 1), kerr.CorruptMessage},
		"negative length":        {changed(good, 8, big(math.MaxUint32)...), kerr.CorruptMessage},
		"length 48":              {changed(good, 8, big(48)...), kerr.CorruptMessage},
		"huge length":            {changed(good, 8, big(math.MaxInt32)...), kerr.MessageTooLarge},
		"too large":              {plain(1, 0, storage.DefaultMaxBatchBytes), kerr.MessageTooLarge},
		"CRC":                    {badCRC, kerr.CorruptMessage},
		"no records":             {changed(good, 57, big(0)...), kerr.InvalidRecord},
		"a record too many":      {changed(good, 57, big(4)...), kerr.InvalidRecord},
		"negative count":         {changed(changed(good, 57, big(math.MaxUint32)...), 23, big(math.MaxUint32-1)...), kerr.InvalidRecord},
		"count beyond the bytes": {changed(changed(good, 57, big(1<<30)...), 23, big(1<<30-1)...), kerr.InvalidRecord},
		"a record less":          {changed(changed(good, 57, big(2)...), 23, big(1)...), kerr.InvalidRecord},
		"records missing":        {noRecords, kerr.InvalidRecord},
		"record length":          {changed(good, 61, 0x7f), kerr.InvalidRecord},
		"offset delta":           {changed(good, 64, 2), kerr.InvalidRecord},
		"codec 5":                {changed(good, 22, 5), kerr.UnsupportedCompressionType},
		"transactional":          {changed(good, 22, 1<<4), kerr.InvalidTxnState},
		"control":                {changed(good, 22, 1<<5), kerr.InvalidRecord},
		"log append time":        {changed(good, 22, 1<<3), kerr.InvalidTimestamp},
		"unknown attribute":      {changed(good, 21, 1), kerr.InvalidRecord},
		"producer id -2":         {changed(good, 43, 255, 255, 255, 255, 255, 255, 255, 254), kerr.InvalidRecord},
		"producer, no sequence":  {idempotent(1, 0, -1, 1), kerr.InvalidRecord},
		"producer, no epoch":     {idempotent(1, -1, 0, 1), kerr.InvalidRecord},
		"two with a producer id": {append(idempotent(1, 0, 0, 1), idempotent(1, 0, 1, 1)...), kerr.InvalidRecord},
		"the second one is bad":  {append(bytes.Clone(good), badCRC...), kerr.CorruptMessage},
		"larger than a segment":  {bytes.Repeat(plain(1, 0, 1_000_000), 3), kerr.RecordListTooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			l, _ := open(t, storage.NewMemFS(), storage.Options{SegmentBytes: 2 << 20})
			if at, err := l.Append(c.sent, 0, 0); !errors.Is(err, c.want) {
				t.Errorf("append: %+v, %v", at, err)
			}
			if l.End() != 0 {
				t.Errorf("something was stored: end %d", l.End())
			}
			closeLog(t, l)
		})
	}
}

func TestWrongMaxTimestampIsPutRight(t *testing.T) {
	mem := storage.NewMemFS()
	l, _ := open(t, mem, storage.Options{})
	appendDurably(t, l, changed(plain(2, 1000, 10), 35, 0x7f)) // far in the future
	if at, ok, err := l.MaxTimestamp(); err != nil || !ok || at.Timestamp != 1001 || at.Offset != 1 {
		t.Errorf("largest time: %+v, %v, %v", at, ok, err)
	}
	got, err := readAll(l, 0, 1000)
	want := plain(2, 1000, 10)
	binary.BigEndian.PutUint32(want[12:], 0)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("read %x, %v", got, err)
	}
	closeLog(t, l)
}

func TestReadLimits(t *testing.T) {
	l, _ := open(t, storage.NewMemFS(), storage.Options{})
	size := len(plain(2, 0, 10))
	for range 5 {
		appendDurably(t, l, plain(2, 0, 10))
	}
	for _, c := range []struct {
		offset, limit int64
		maxBytes      int
		batches       int
	}{
		{0, 10, 0, 1}, {0, 10, -1, 1}, {0, 10, 2 * size, 2}, {0, 10, 3*size - 1, 2}, {1, 10, 1 << 30, 5}, {9, 10, 1 << 30, 1},
		{0, 3, 1 << 30, 1}, {0, 1, 1 << 30, 0}, {10, 10, 1 << 30, 0}, {4, 4, 1 << 30, 0}, {0, 99, 1 << 30, 5},
	} {
		if b, err := l.Read(c.offset, c.limit, c.maxBytes); err != nil || len(b) != c.batches*size {
			t.Errorf("%+v: %d bytes, %v", c, len(b), err)
		}
	}
	for _, offset := range []int64{-1, 11, math.MaxInt64, math.MinInt64} {
		if _, err := l.Read(offset, 10, 100); !errors.Is(err, kerr.OffsetOutOfRange) {
			t.Errorf("offset %d: %v", offset, err)
		}
	}
	closeLog(t, l)
}

func TestReadsDoNotAliasEachOther(t *testing.T) {
	l, _ := open(t, storage.NewMemFS(), storage.Options{})
	sent := plain(1, 0, 100)
	appendDurably(t, l, sent)
	clear(sent)
	first, err1 := l.Read(0, 1, 1000)
	want := bytes.Clone(first)
	clear(first)
	second, err2 := l.Read(0, 1, 1000)
	if err := errors.Join(err1, err2); err != nil || !bytes.Equal(second, want) {
		t.Errorf("changed by another's hands: %x, %v", second, err)
	}
	closeLog(t, l)
}

func TestTimesInsideBatches(t *testing.T) {
	rubbish := func([]byte) []byte { return []byte("no gzip") }
	for name, c := range map[string]struct {
		codec       int16
		payload     func([]byte) []byte
		undecodable bool
	}{
		"plain":       {0, nil, false},
		"gzip":        {storage.CodecGzip, gzipped, false},
		"broken gzip": {storage.CodecGzip, rubbish, true},
		"cut records": {storage.CodecGzip, func(b []byte) []byte { return gzipped(b[:5]) }, true},
		"broken zstd": {storage.CodecZstd, rubbish, true},
	} {
		t.Run(name, func(t *testing.T) {
			told := 0
			l, _ := open(t, storage.NewMemFS(), storage.Options{
				Listener: storage.Listener{BatchUndecodable: func(storage.BatchUndecodable) { told++ }}})
			appendDurably(t, l, plain(2, 100, 10))
			// Not in order, and the largest twice: the first one counts.
			appendDurably(t, l, makeBatch(batchSpec{
				times: []int64{200, 230, 210, 230}, size: 10, pid: -1, epoch: -1, sequence: -1, codec: c.codec, payload: c.payload}))
			for ts, want := range map[int64]storage.TimedOffset{
				0: {Offset: 0, Timestamp: 100}, 101: {Offset: 1, Timestamp: 101}, 102: {Offset: 2, Timestamp: 200},
				201: {Offset: 3, Timestamp: 230}, 230: {Offset: 3, Timestamp: 230},
			} {
				if c.undecodable && ts > 101 {
					want = storage.TimedOffset{Offset: 2, Timestamp: 230} // the batch, at its word
				}
				if at, ok, err := l.OffsetForTime(ts); err != nil || !ok || at != want {
					t.Errorf("time %d: %+v, %v, %v", ts, at, ok, err)
				}
			}
			if _, ok, err := l.OffsetForTime(231); ok || err != nil {
				t.Errorf("later than all: %v, %v", ok, err)
			}
			at, ok, err := l.MaxTimestamp()
			if err != nil || !ok || at.Timestamp != 230 || at.Offset != 3 && !c.undecodable {
				t.Errorf("largest: %+v, %v, %v", at, ok, err)
			}
			if (told > 0) != c.undecodable {
				t.Errorf("told %d times", told)
			}
			closeLog(t, l)
		})
	}
}

func TestRecordsWithoutTime(t *testing.T) {
	mem := storage.NewMemFS()
	l, _ := open(t, mem, storage.Options{SegmentBytes: 300, IndexIntervalBytes: 1})
	for range 9 {
		appendDurably(t, l, makeBatch(batchSpec{times: []int64{-1, -1}, size: 5, pid: -1, epoch: -1, sequence: -1}))
	}
	closeLog(t, l)
	l, recovery := open(t, mem, storage.Options{SegmentBytes: 300, IndexIntervalBytes: 1})
	if !recovery.Clean {
		t.Error(recovery)
	}
	if at, ok, err := l.MaxTimestamp(); ok || err != nil {
		t.Errorf("largest: %+v, %v", at, err)
	}
	if at, ok, err := l.OffsetForTime(0); ok || err != nil {
		t.Errorf("time 0: %+v, %v", at, err)
	}
	if at, ok, err := l.OffsetForTime(-1); !ok || at.Offset != 0 || err != nil {
		t.Errorf("time -1: %+v, %v, %v", at, ok, err)
	}
	closeLog(t, l)
}

// FuzzAppend sends anything: it must be refused with a Kafka error, or be stored so
// that it is read back as it came, apart from what the log writes into it.
func FuzzAppend(f *testing.F) {
	f.Add(plain(3, 1000, 20))
	f.Add(idempotent(4, 1, 7, 2))
	f.Add(append(plain(1, 0, 1), plain(2, 5, 0)...))
	f.Add(makeBatch(batchSpec{times: []int64{1, 2}, size: 9, pid: -1, epoch: -1, sequence: -1, codec: storage.CodecGzip, payload: gzipped}))
	f.Add(plain(3, 1000, 20)[:61])
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, sent []byte) {
		for _, crc := range []bool{false, true} {
			if crc && len(sent) > 21 {
				fixCRC(sent) // past the CRC is where the parser begins
			}
			fuzzAppend(t, sent)
		}
	})
}

func fuzzAppend(t *testing.T, sent []byte) {
	l, _ := open(t, storage.NewMemFS(), storage.Options{IndexIntervalBytes: 1})
	defer closeLog(t, l)
	b := bytes.Clone(sent)
	at, err := l.Append(b, 5, 0)
	if err != nil {
		if ke := (*kerr.Error)(nil); !errors.As(err, &ke) || l.End() != 0 {
			t.Fatalf("refused without a Kafka error: %v", err)
		}
		return
	}
	await(t, l, at.Next)
	got, err := readAll(l, 0, 1<<20)
	if err != nil || len(got) != len(sent) || at.Next <= at.Base {
		t.Fatalf("%+v: read %d of %d bytes, %v", at, len(got), len(sent), err)
	}
	for pos := 0; pos < len(got); pos += 12 + int(binary.BigEndian.Uint32(got[pos+8:])) {
		for _, ours := range [][2]int{{0, 8}, {12, 16}, {17, 21}, {35, 43}} {
			copy(got[pos+ours[0]:pos+ours[1]], sent[pos+ours[0]:])
		}
	}
	if !slices.Equal(got, sent) {
		t.Fatalf("sent %x, read %x", sent, got)
	}
	last, ok, err := l.MaxTimestamp()
	if err != nil || ok && (last.Offset < 0 || last.Offset >= at.Next) {
		t.Fatalf("largest time %+v, %v", last, err)
	}
	if first, found, err := l.OffsetForTime(last.Timestamp); err != nil || ok && !found || first.Offset < 0 {
		t.Fatalf("time %d: %+v, %v", last.Timestamp, first, err)
	}
}
