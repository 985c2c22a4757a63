package partition_test

import (
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/broker/partition"
	"github.com/muster-io/muster/broker/storage"
)

const dir = "data/orders-0"

// batch is one record from a producer, pid -1 for none.
func batch(pid int64, sequence int32, ts int64) []byte {
	r := kmsg.Record{Value: []byte("value")}
	r.Length = int32(len(r.AppendTo(nil)) - 1)
	records := r.AppendTo(nil)
	b := kmsg.RecordBatch{
		Length: int32(49 + len(records)), Magic: 2, FirstTimestamp: ts, MaxTimestamp: ts,
		ProducerID: pid, FirstSequence: sequence, NumRecords: 1, Records: records,
	}
	out := b.AppendTo(nil)
	binary.BigEndian.PutUint32(out[17:], crc32.Checksum(out[21:], crc32.MakeTable(crc32.Castagnoli)))
	return out
}

func openOn(t *testing.T, fs storage.FS, epoch int32) *partition.Local {
	t.Helper()
	p, _, err := partition.OpenLocal(partition.LocalOptions{
		Dir: dir, FS: fs, TopicID: storage.TopicID{1}, LeaderEpoch: epoch, Now: func() time.Time { return time.UnixMilli(0) },
	})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestLocal(t *testing.T) {
	mem := storage.NewMemFS()
	p := openOn(t, mem, 4)
	grown := p.Grown(0)
	at, err := p.Append(append(batch(-1, -1, 1000), batch(-1, -1, 2000)...))
	if err != nil || at != (partition.Appended{Base: 0, Next: 2, LogAppendTime: -1}) {
		t.Fatalf("append: %+v, %v", at, err)
	}
	if err := p.AwaitHighWatermark(t.Context(), at.Next); err != nil {
		t.Fatal(err)
	}
	<-grown
	if p.Start() != 0 || p.End() != 2 || p.HighWatermark() != 2 || p.LeaderEpoch() != 4 {
		t.Errorf("start %d, end %d, high watermark %d, epoch %d", p.Start(), p.End(), p.HighWatermark(), p.LeaderEpoch())
	}
	b, err := p.Read(1, 1000)
	if err != nil || binary.BigEndian.Uint64(b) != 1 || binary.BigEndian.Uint32(b[12:]) != 4 {
		t.Errorf("read %x, %v", b, err)
	}
	when, ok, err := p.OffsetForTime(1001)
	if err != nil || !ok || when != (partition.TimedOffset{Offset: 1, Timestamp: 2000, Epoch: 4}) {
		t.Errorf("by time: %+v, %v, %v", when, ok, err)
	}
	when, ok, err = p.MaxTimestamp()
	if err != nil || !ok || when != (partition.TimedOffset{Offset: 1, Timestamp: 2000, Epoch: 4}) {
		t.Errorf("largest time: %+v, %v, %v", when, ok, err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	p = openOn(t, mem, 3)
	if _, err := p.Append(batch(-1, -1, 0)); !errors.Is(err, kerr.FencedLeaderEpoch) {
		t.Errorf("with an older epoch: %v", err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestErrorsCarryKafkaCodes(t *testing.T) {
	mem := storage.NewMemFS()
	var broken, torn atomic.Bool
	fs := &storage.FaultFS{FS: mem, Before: func(op storage.Op, name string) error {
		switch {
		case broken.Load() && op == storage.OpSync && strings.HasSuffix(name, ".log"):
			return syscall.EIO
		case torn.Load() && op == storage.OpWrite && strings.HasSuffix(name, ".log"):
			return syscall.ENOSPC
		}
		return nil
	}}
	p := openOn(t, fs, 0)
	expect := func(what string, err error, want *kerr.Error) {
		t.Helper()
		if ke := (*kerr.Error)(nil); !errors.As(err, &ke) || ke != want {
			t.Errorf("%s: %v, want %v", what, err, want)
		}
	}
	_, err := p.Append(nil)
	expect("nothing", err, kerr.InvalidRecord)
	_, err = p.Append(batch(-1, -1, 0)[:70])
	expect("half a batch", err, kerr.CorruptMessage)
	_, err = p.Read(7, 100)
	expect("beyond the end", err, kerr.OffsetOutOfRange)
	if _, err = p.Append(batch(1, 5, 0)); err != nil {
		t.Fatal(err)
	}
	_, err = p.Append(batch(1, 7, 0))
	expect("a gap", err, kerr.OutOfOrderSequenceNumber)
	torn.Store(true)
	_, err = p.Append(batch(1, 6, 0))
	expect("full disk", err, kerr.KafkaStorageError)
	torn.Store(false)
	if err := p.AwaitHighWatermark(t.Context(), p.End()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := p.AwaitHighWatermark(ctx, 99); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}

	broken.Store(true)
	at, err := p.Append(batch(1, 6, 0))
	if err != nil {
		t.Fatal(err)
	}
	expect("failed sync", p.AwaitHighWatermark(t.Context(), at.Next), kerr.KafkaStorageError)
	_, err = p.Append(batch(1, 7, 0))
	expect("append after a failed sync", err, kerr.KafkaStorageError)
	if err := p.Close(); err == nil {
		t.Error("close hides the failure")
	}
	_, err = p.Append(batch(1, 7, 0))
	expect("closed", err, kerr.NotLeaderForPartition)
}

// A duplicate is answered at once, but is no more acknowledged than the original.
func TestDuplicateWaitsForTheOriginal(t *testing.T) {
	proceed := make(chan struct{})
	var block atomic.Bool
	fs := &storage.FaultFS{FS: storage.NewMemFS(), Before: func(op storage.Op, name string) error {
		if block.Load() && op == storage.OpSync && strings.HasSuffix(name, ".log") {
			<-proceed
		}
		return nil
	}}
	p := openOn(t, fs, 0)
	block.Store(true)
	first, err := p.Append(batch(1, 0, 0))
	if err != nil {
		t.Fatal(err)
	}
	again, err := p.Append(batch(1, 0, 0))
	if err != nil || !again.Duplicate || again.Base != first.Base || again.Next != first.Next {
		t.Fatalf("sent again: %+v, %v", again, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := p.AwaitHighWatermark(ctx, again.Next); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the duplicate was acknowledged before the original: %v", err)
	}
	close(proceed)
	if err := p.AwaitHighWatermark(t.Context(), again.Next); err != nil {
		t.Error(err)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

func TestOpenLocalRefuses(t *testing.T) {
	mem := storage.NewMemFS()
	if err := openOn(t, mem, 0).Close(); err != nil {
		t.Fatal(err)
	}
	_, _, err := partition.OpenLocal(partition.LocalOptions{Dir: dir, FS: mem, TopicID: storage.TopicID{2}})
	if wrong := (*storage.IdentityError)(nil); !errors.As(err, &wrong) {
		t.Errorf("another topic: %v", err)
	}
	for what, opts := range map[string]partition.LocalOptions{
		"no topic id":     {Dir: dir, FS: mem},
		"negative epoch":  {Dir: dir, FS: mem, TopicID: storage.TopicID{1}, LeaderEpoch: -1},
		"tiny segments":   {Dir: dir, FS: mem, TopicID: storage.TopicID{1}, SegmentBytes: 5},
		"negative expiry": {Dir: dir, FS: mem, TopicID: storage.TopicID{1}, ProducerExpiry: -1},
	} {
		if _, _, err := partition.OpenLocal(opts); err == nil {
			t.Errorf("%s was accepted", what)
		}
	}
}

func TestLocalOnTheDisk(t *testing.T) {
	opts := partition.LocalOptions{Dir: t.TempDir() + "/a/b/orders-0", TopicID: storage.TopicID{1}}
	for i := range int64(3) {
		p, recovery, err := partition.OpenLocal(opts)
		if err != nil || !recovery.Clean || recovery.ValidOffset != i {
			t.Fatalf("open: %s, %v", recovery, err)
		}
		at, err := p.Append(batch(3, int32(i), i))
		if err != nil || at.Base != i {
			t.Fatalf("append: %+v, %v", at, err)
		}
		if err := p.AwaitHighWatermark(t.Context(), at.Next); err != nil {
			t.Fatal(err)
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// Who waits for more of a partition that is given up, or asks for it later, is told
// why it was.
func TestRetire(t *testing.T) {
	for drop, why := range map[bool]*kerr.Error{true: kerr.UnknownTopicOrPartition, false: kerr.NotLeaderForPartition} {
		p := openOn(t, storage.NewMemFS(), 0)
		if _, err := p.Append(batch(-1, -1, 0)); err != nil {
			t.Fatal(err)
		}
		waits := make(chan error, 1)
		go func() { waits <- p.AwaitHighWatermark(t.Context(), 5) }()
		grown := p.Grown(5)
		if err := p.Retire(why, drop); err != nil {
			t.Fatal(err)
		}
		<-grown
		_, appended := p.Append(batch(-1, -1, 0))
		_, read := p.Read(0, 100)
		for what, err := range map[string]error{"wait": <-waits, "append": appended, "read": read} {
			if !errors.Is(err, why) {
				t.Errorf("%s: %v, want %v", what, err, why)
			}
		}
	}
}
