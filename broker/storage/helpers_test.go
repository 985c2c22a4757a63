package storage_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/broker/storage"
)

const (
	testDir = "data/orders-0"
	// deadline ends waits for something that should happen at once.
	deadline = time.Minute
)

// batchSpec describes a batch as a producer would send it.
type batchSpec struct {
	times    []int64 // one record each
	size     int     // of each value
	pid      int64
	epoch    int16
	sequence int32
	codec    int16
	payload  func(records []byte) []byte // compression
}

// makeBatch encodes with franz-go's encoder, not ours.
func makeBatch(spec batchSpec) []byte {
	var records []byte
	maxTime := spec.times[0]
	for i, ts := range spec.times {
		maxTime = max(maxTime, ts)
		r := kmsg.Record{TimestampDelta64: ts - spec.times[0], OffsetDelta: int32(i), Key: []byte("k"), Value: make([]byte, spec.size)}
		if i%2 == 1 {
			r.Headers = []kmsg.Header{{Key: "h", Value: []byte("v")}, {Key: "null"}}
			r.Key = nil
		}
		for j := range r.Value {
			r.Value[j] = byte(int(ts) + i + j)
		}
		body := r.AppendTo(nil)
		// AppendTo writes Length as given: one byte for the zero that stands there.
		r.Length = int32(len(body) - 1)
		records = r.AppendTo(records)
	}
	if spec.payload != nil {
		records = spec.payload(records)
	}
	b := kmsg.RecordBatch{
		Length: int32(49 + len(records)), Magic: 2, Attributes: spec.codec,
		LastOffsetDelta: int32(len(spec.times) - 1), FirstTimestamp: spec.times[0], MaxTimestamp: maxTime,
		ProducerID: spec.pid, ProducerEpoch: spec.epoch, FirstSequence: spec.sequence,
		NumRecords: int32(len(spec.times)), Records: records, PartitionLeaderEpoch: -1,
	}
	out := b.AppendTo(nil)
	fixCRC(out)
	return out
}

func fixCRC(batch []byte) {
	binary.BigEndian.PutUint32(batch[17:], crc32.Checksum(batch[21:], crc32.MakeTable(crc32.Castagnoli)))
}

// plain is a batch of n records without idempotence.
func plain(n int, ts int64, size int) []byte {
	times := make([]int64, n)
	for i := range times {
		times[i] = ts + int64(i)
	}
	return makeBatch(batchSpec{times: times, size: size, pid: -1, epoch: -1, sequence: -1})
}

// idempotent is a batch of n records from a producer.
func idempotent(pid int64, epoch int16, sequence int32, n int) []byte {
	return makeBatch(batchSpec{times: make([]int64, n), size: 10, pid: pid, epoch: epoch, sequence: sequence})
}

func open(t testing.TB, fs storage.FS, opts storage.Options) (*storage.Log, storage.Recovery) {
	t.Helper()
	opts.FS = fs
	l, recovery, err := storage.Open(testDir, opts, 0)
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	return l, recovery
}

func closeLog(t testing.TB, l *storage.Log) {
	t.Helper()
	if err := l.Close(); err != nil {
		t.Fatalf("close: %v", err)
	}
}

func appendTo(t testing.TB, l *storage.Log, batch []byte) storage.Appended {
	t.Helper()
	at, err := l.Append(batch, 0, 0)
	if err != nil {
		t.Fatalf("append: %v", err)
	}
	return at
}

func await(t testing.TB, l *storage.Log, offset int64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	if err := l.AwaitDurable(ctx, offset); err != nil {
		t.Fatalf("offset %d does not become durable: %v", offset, err)
	}
}

// appendDurably appends and waits.
func appendDurably(t testing.TB, l *storage.Log, batch []byte) storage.Appended {
	t.Helper()
	at := appendTo(t, l, batch)
	await(t, l, at.Next)
	return at
}

// readAll reads from an offset to the durable one.
func readAll(l *storage.Log, from int64, maxBytes int) ([]byte, error) {
	var all []byte
	for from < l.Durable() {
		b, err := l.Read(from, l.Durable(), maxBytes)
		if err != nil {
			return all, err
		}
		if len(b) == 0 {
			return all, fmt.Errorf("nothing at offset %d below %d", from, l.Durable())
		}
		all = append(all, b...)
		for len(b) > 0 {
			size := 12 + int(binary.BigEndian.Uint32(b[8:]))
			from = int64(binary.BigEndian.Uint64(b)) + int64(binary.BigEndian.Uint32(b[23:])) + 1
			b = b[size:]
		}
	}
	return all, nil
}

// await waits for a condition by asking for it again and again.
func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(deadline); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %s: %s", deadline, what)
		}
	}
}
