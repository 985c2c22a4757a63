package storage_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/muster-io/muster/broker/storage"
)

// model is the log as a list.
type model struct {
	batches []modelBatch
}

type modelBatch struct {
	base, next int64
	times      []int64
	bytes      []byte
	sequence   int32
	pid        int64
}

func (m *model) end() int64 {
	if len(m.batches) == 0 {
		return 0
	}
	return m.batches[len(m.batches)-1].next
}

func (m *model) bytesFrom(offset, end int64) []byte {
	var b []byte
	for _, batch := range m.batches {
		if batch.next > offset && batch.next <= end {
			b = append(b, batch.bytes...)
		}
	}
	return b
}

func (m *model) offsetForTime(ts, end int64) (int64, int64, bool) {
	for _, batch := range m.batches {
		for i, at := range batch.times {
			if batch.next <= end && at >= ts {
				return batch.base + int64(i), at, true
			}
		}
	}
	return 0, 0, false
}

func (m *model) maxTimestamp(end int64) (offset, ts int64, ok bool) {
	ts = -1
	for _, batch := range m.batches {
		for i, at := range batch.times {
			if batch.next <= end && at > ts {
				offset, ts, ok = batch.base+int64(i), at, true
			}
		}
	}
	return offset, ts, ok
}

// cut forgets what is not below end, which must lie between two batches.
func (m *model) cut(end int64) error {
	for i, batch := range m.batches {
		if batch.base == end {
			m.batches = m.batches[:i]
			return nil
		}
	}
	if m.end() != end {
		return fmt.Errorf("the log ends at %d, inside a batch or past the end, %d", end, m.end())
	}
	return nil
}

// run is one random life of a log.
type run struct {
	t    *testing.T
	rng  *rand.Rand
	fs   *storage.MemFS
	opts storage.Options
	log  *storage.Log
	m    model
	next map[int64]int32 // sequence by producer
	now  int64
}

func TestRandomRunsMatchTheModel(t *testing.T) {
	for seed := range uint64(40) {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			t.Parallel()
			rng := rand.New(rand.NewPCG(seed, 1))
			r := &run{t: t, rng: rng, fs: storage.NewMemFS(), next: map[int64]int32{}, now: 1000}
			r.opts = storage.Options{
				SegmentBytes:       int64(1000 + rng.IntN(20_000)),
				IndexIntervalBytes: int64(rng.IntN(2000)) + 1,
			}
			// A crash takes the indexes of the newest segment and nothing else.
			r.opts.Listener.Repaired = func(i storage.Repaired) { t.Error(i) }
			r.log, _ = open(t, r.fs, r.opts)
			for range 250 {
				r.step()
			}
			r.check()
			closeLog(t, r.log)
		})
	}
}

func (r *run) step() {
	switch n := r.rng.IntN(100); {
	case n < 55:
		r.append()
	case n < 65:
		r.resend()
	case n < 75:
		await(r.t, r.log, r.m.end())
	case n < 92:
		r.check()
	case n < 96:
		closeLog(r.t, r.log)
		r.reopen(true)
	default:
		r.crash()
	}
}

func (r *run) append() {
	count := 1
	pid := int64(r.rng.IntN(4) - 1)
	if pid < 0 {
		count = 1 + r.rng.IntN(3)
	}
	var sent []byte
	var batches []modelBatch
	for range count {
		spec := batchSpec{size: r.rng.IntN(200), pid: pid}
		for range 1 + r.rng.IntN(5) {
			r.now += int64(r.rng.IntN(30)) - 10
			spec.times = append(spec.times, max(r.now, 0))
		}
		if pid < 0 {
			spec.epoch, spec.sequence = -1, -1
		} else {
			spec.sequence = r.next[pid]
		}
		b := makeBatch(spec)
		sent = append(sent, b...)
		batches = append(batches, modelBatch{times: spec.times, bytes: b, pid: pid, sequence: spec.sequence})
	}
	if len(sent) > int(r.opts.SegmentBytes) {
		return
	}
	at := appendTo(r.t, r.log, sent)
	if at.Base != r.m.end() || at.Duplicate {
		r.t.Fatalf("appended at %+v, the log ended at %d", at, r.m.end())
	}
	next := at.Base
	for _, b := range batches {
		b.base, b.next = next, next+int64(len(b.times))
		binary.BigEndian.PutUint64(b.bytes, uint64(b.base))
		binary.BigEndian.PutUint32(b.bytes[12:], 0)
		next = b.next
		r.m.batches = append(r.m.batches, b)
	}
	if next != at.Next {
		r.t.Fatalf("next is %d, not %d", at.Next, next)
	}
	if pid >= 0 {
		r.next[pid] += int32(len(batches[0].times))
	}
}

// resend sends a producer's last batch again, and one with a gap.
func (r *run) resend() {
	pid := int64(r.rng.IntN(3))
	for i := len(r.m.batches) - 1; i >= 0; i-- {
		b := r.m.batches[i]
		if b.pid != pid {
			continue
		}
		at := appendTo(r.t, r.log, bytes.Clone(b.bytes))
		if !at.Duplicate || at.Base != b.base || at.Next != b.next {
			r.t.Fatalf("sent again: %+v, had been stored at %d to %d", at, b.base, b.next)
		}
		_, err := r.log.Append(idempotent(pid, 0, r.next[pid]+7, 1), 0, 0)
		if !errors.Is(err, kerr.OutOfOrderSequenceNumber) {
			r.t.Fatalf("a gap in the sequence gave %v", err)
		}
		return
	}
}

func (r *run) check() {
	durable := r.log.Durable()
	if end := r.log.End(); end != r.m.end() {
		r.t.Fatalf("the log ends at %d, the model at %d", end, r.m.end())
	}
	if durable > 0 {
		offset := r.rng.Int64N(durable)
		got, err := readAll(r.log, offset, r.rng.IntN(3000))
		if err != nil {
			r.t.Fatal(err)
		}
		// More may have become durable while it was read.
		if want := r.m.bytesFrom(offset, r.log.Durable()); !bytes.HasPrefix(want, got) || len(got) < len(r.m.bytesFrom(offset, durable)) {
			r.t.Fatalf("read from %d: %d bytes, the model has %d", offset, len(got), len(want))
		}
	}
	await(r.t, r.log, r.m.end())
	ts := r.now - int64(r.rng.IntN(800)) + 20
	at, ok, err := r.log.OffsetForTime(ts)
	offset, when, wantOK := r.m.offsetForTime(ts, r.m.end())
	if err != nil || ok != wantOK || ok && (at.Offset != offset || at.Timestamp != when) {
		r.t.Fatalf("time %d: %+v %v %v, the model says %d at %d, %v", ts, at, ok, err, offset, when, wantOK)
	}
	at, ok, err = r.log.MaxTimestamp()
	offset, when, wantOK = r.m.maxTimestamp(r.m.end())
	if err != nil || ok != wantOK || ok && (at.Offset != offset || at.Timestamp != when) {
		r.t.Fatalf("largest time: %+v %v %v, the model says %d at %d, %v", at, ok, err, offset, when, wantOK)
	}
}

func (r *run) reopen(clean bool) {
	name, before := newestSegment(r.t, r.fs)
	var recovery storage.Recovery
	r.log, recovery = open(r.t, r.fs, r.opts)
	if recovery.Clean != clean {
		r.t.Fatalf("recovery: %s", recovery)
	}
	after, err := r.fs.Size(filepath.Join(testDir, name))
	if err != nil {
		r.t.Fatal(err)
	}
	if recovery.BytesCut != before-after || recovery.ValidOffset != r.log.End() || r.log.Durable() != r.log.End() {
		r.t.Fatalf("recovery says %s; %s went from %d to %d bytes; the log ends at %d, durable %d",
			recovery, name, before, after, r.log.End(), r.log.Durable())
	}
}

func (r *run) crash() {
	if r.rng.IntN(2) == 0 {
		await(r.t, r.log, r.m.end())
	}
	acknowledged := r.log.Durable()
	old := r.log
	r.fs = r.fs.CrashClone(r.rng.Uint64())
	closeLog(r.t, old)
	r.reopen(false)
	if r.log.End() < acknowledged {
		r.t.Fatalf("%d was acknowledged, after the crash the log ends at %d", acknowledged, r.log.End())
	}
	if err := r.m.cut(r.log.End()); err != nil {
		r.t.Fatal(err)
	}
	got, err := readAll(r.log, r.log.Start(), 5000)
	if err != nil || !bytes.Equal(got, r.m.bytesFrom(0, r.m.end())) {
		r.t.Fatalf("after the crash %d bytes can be read (%v), the model has %d", len(got), err, len(r.m.bytesFrom(0, r.m.end())))
	}
	for pid := range r.next {
		r.next[pid] = 0
	}
	for _, b := range r.m.batches {
		if b.pid >= 0 {
			r.next[b.pid] = b.sequence + int32(len(b.times))
		}
	}
}

func newestSegment(t testing.TB, fs storage.FS) (string, int64) {
	t.Helper()
	names, err := fs.ReadDir(testDir)
	if err != nil {
		t.Fatal(err)
	}
	newest := ""
	for _, name := range names {
		if strings.HasSuffix(name, ".log") {
			newest = name
		}
	}
	size, err := fs.Size(filepath.Join(testDir, newest))
	if err != nil {
		t.Fatal(err)
	}
	return newest, size
}
