package storage_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/muster-io/muster/broker/storage"
)

// gate is a file system whose syncs of log files wait for permission.
type gate struct {
	storage.FaultFS
	syncs  atomic.Int64
	closed atomic.Bool
	open   chan struct{}
}

func newGate(fs storage.FS) *gate {
	g := &gate{open: make(chan struct{})}
	g.FS = fs
	g.Before = func(op storage.Op, name string) error {
		if op == storage.OpSync && strings.HasSuffix(name, ".log") {
			g.syncs.Add(1)
			if g.closed.Load() {
				<-g.open
			}
		}
		return nil
	}
	return g
}

func TestAppendsShareOneSync(t *testing.T) {
	g := newGate(storage.NewMemFS())
	l, _ := open(t, g, storage.Options{})
	g.closed.Store(true)
	before := g.syncs.Load()
	first := appendTo(t, l, plain(1, 0, 10))
	eventually(t, "the first append starts a sync", func() bool { return g.syncs.Load() == before+1 })
	const appenders = 50
	var wg sync.WaitGroup
	for range appenders {
		wg.Go(func() {
			at, err := l.Append(plain(1, 0, 10), 0, 0)
			if err == nil {
				err = l.AwaitDurable(t.Context(), at.Next)
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	eventually(t, "all have appended while the sync runs", func() bool { return l.End() == first.Next+appenders })
	g.closed.Store(false)
	close(g.open)
	wg.Wait()
	if n := g.syncs.Load() - before; n != 2 {
		t.Errorf("%d syncs for one append and then %d at once, not 2", n, appenders)
	}
	closeLog(t, l)
}

func TestNothingIsDurableBeforeTheSyncIsOver(t *testing.T) {
	g := newGate(storage.NewMemFS())
	l, _ := open(t, g, storage.Options{})
	appendDurably(t, l, plain(2, 0, 10))
	g.closed.Store(true)
	before := g.syncs.Load()
	at := appendTo(t, l, plain(3, 0, 10))
	eventually(t, "the sync begins", func() bool { return g.syncs.Load() == before+1 })

	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := l.AwaitDurable(ctx, at.Next); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("acknowledged before the sync: %v", err)
	}
	past := l.DurablePast(2)
	select {
	case <-past:
		t.Error("growth was told before the sync")
	default:
	}
	if l.DurablePast(2) != past {
		t.Error("two that wait for one offset have a channel each")
	}
	if b, err := l.Read(2, l.End(), 1000); len(b) > 0 || err != nil {
		t.Errorf("%d bytes read that are not synced, %v", len(b), err)
	}
	if l.Durable() != 2 || l.End() != 5 {
		t.Errorf("durable %d, end %d", l.Durable(), l.End())
	}
	close(g.open)
	await(t, l, at.Next)
	<-past
	if b, err := l.Read(2, l.End(), 1000); len(b) == 0 || err != nil {
		t.Errorf("%d bytes after the sync, %v", len(b), err)
	}
	closeLog(t, l)
}

func TestAwaitEndsAtClose(t *testing.T) {
	l, _ := open(t, storage.NewMemFS(), storage.Options{})
	past := l.DurablePast(100)
	done := make(chan error)
	go func() { done <- l.AwaitDurable(t.Context(), 100) }()
	closeLog(t, l)
	if err := <-done; !errors.Is(err, storage.ErrClosed) {
		t.Errorf("await at close: %v", err)
	}
	<-past
	if _, err := l.Append(plain(1, 0, 1), 0, 0); !errors.Is(err, storage.ErrClosed) {
		t.Errorf("append after close: %v", err)
	}
	if _, err := l.Read(0, 0, 1); !errors.Is(err, storage.ErrClosed) {
		t.Errorf("read after close: %v", err)
	}
	if err := l.Close(); !errors.Is(err, storage.ErrClosed) {
		t.Errorf("second close: %v", err)
	}
}

// faults returns errors for one operation on files with one suffix, while set.
type faults struct {
	storage.FaultFS
	err atomic.Pointer[error]
}

func newFaults(fs storage.FS, op storage.Op, suffix string) *faults {
	f := &faults{}
	f.FS = fs
	f.Before = func(o storage.Op, name string) error {
		if err := f.err.Load(); err != nil && o == op && strings.HasSuffix(name, suffix) {
			return *err
		}
		return nil
	}
	return f
}

func (f *faults) set(err error) {
	if err == nil {
		f.err.Store(nil)
		return
	}
	f.err.Store(&err)
}

func TestAFailedSyncIsForEver(t *testing.T) {
	mem := storage.NewMemFS()
	f := newFaults(mem, storage.OpSync, ".log")
	var failed atomic.Int64
	l, _ := open(t, f, storage.Options{Listener: storage.Listener{Failed: func(*storage.FailedError) { failed.Add(1) }}})
	appendDurably(t, l, plain(1, 0, 10))
	f.set(syscall.EIO)
	at := appendTo(t, l, plain(1, 0, 10))
	past := l.DurablePast(1)
	err := l.AwaitDurable(t.Context(), at.Next)
	var sticky *storage.FailedError
	if !errors.As(err, &sticky) || !errors.Is(err, syscall.EIO) {
		t.Fatalf("the waiter was told %v", err)
	}
	<-past
	f.set(nil) // the disk says that all is well again
	if _, err := l.Append(plain(1, 0, 10), 0, 0); !errors.As(err, &sticky) {
		t.Errorf("append after a failed sync: %v", err)
	}
	if l.Durable() != 1 || failed.Load() != 1 {
		t.Errorf("durable %d, told %d times", l.Durable(), failed.Load())
	}
	if b, err := l.Read(0, 1, 1000); err != nil || len(b) == 0 {
		t.Errorf("what was durable cannot be read: %v", err)
	}
	if err := l.Close(); !errors.Is(err, syscall.EIO) {
		t.Errorf("close hides the failure: %v", err)
	}
	l, recovery := open(t, mem, storage.Options{})
	if recovery.Clean || l.End() < 1 {
		t.Errorf("after a failure: %s", recovery)
	}
	closeLog(t, l)
}

func TestAFullDiskIsNoFailure(t *testing.T) {
	f := newFaults(storage.NewMemFS(), storage.OpWrite, ".log")
	undone := 0
	l, _ := open(t, f, storage.Options{Listener: storage.Listener{AppendUndone: func(storage.AppendUndone) { undone++ }}})
	appendTo(t, l, plain(1, 0, 10))
	f.set(&storage.ShortWrite{Bytes: 40, Err: syscall.ENOSPC})
	if _, err := l.Append(idempotent(7, 0, 0, 1), 0, 0); !errors.Is(err, storage.ErrDiskFull) || !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("append on a full disk: %v", err)
	}
	if _, size := newestSegment(t, f); undone != 1 || l.End() != 1 || size != int64(len(plain(1, 0, 10))) {
		t.Errorf("undone %d times, end %d, %d bytes", undone, l.End(), size)
	}
	f.set(nil)
	if at := appendDurably(t, l, idempotent(7, 0, 0, 1)); at.Base != 1 || at.Duplicate {
		t.Errorf("with room again: %+v", at)
	}
	closeLog(t, l)
}

func TestOtherWriteErrorsFailTheLog(t *testing.T) {
	for name, write := range map[string]error{
		"io error":    &storage.ShortWrite{Bytes: 10, Err: syscall.EIO},
		"short write": &storage.ShortWrite{Bytes: 10, Err: errors.New("odd")},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFaults(storage.NewMemFS(), storage.OpWrite, ".log")
			l, _ := open(t, f, storage.Options{})
			f.set(write)
			var sticky *storage.FailedError
			if _, err := l.Append(plain(1, 0, 10), 0, 0); !errors.As(err, &sticky) {
				t.Fatalf("append: %v", err)
			}
			f.set(nil)
			if _, err := l.Append(plain(1, 0, 10), 0, 0); !errors.As(err, &sticky) {
				t.Fatalf("next append: %v", err)
			}
			if err := l.Close(); err == nil {
				t.Error("close hides the failure")
			}
		})
	}
}

// TestFaultsAtEveryOperation lets each operation of a short life fail in turn, and
// separately lets the machine die there. Whatever happens, the log that is
// opened afterwards has all that was acknowledged and nothing that was not sent.
func TestFaultsAtEveryOperation(t *testing.T) {
	for _, kind := range []error{syscall.EIO, syscall.ENOSPC, nil} {
		t.Run(fmt.Sprintf("error=%v", kind), func(t *testing.T) {
			t.Parallel()
			for n := int64(0); ; n++ {
				if !faultAt(t, n, kind) {
					if n < 40 {
						t.Fatalf("the life had only %d operations", n)
					}
					return
				}
			}
		})
	}
}

// faultAt runs the life with a fault at operation n; false if it had fewer.
func faultAt(t *testing.T, n int64, kind error) bool {
	mem := storage.NewMemFS()
	var count atomic.Int64
	var hit atomic.Bool
	var clone *storage.MemFS
	acknowledged := new(atomic.Int64)
	var atCrash int64
	f := &storage.FaultFS{FS: mem}
	f.Before = func(op storage.Op, name string) error {
		if count.Add(1)-1 != n {
			return nil
		}
		hit.Store(true)
		if kind == nil {
			atCrash = acknowledged.Load()
			clone = mem.CrashClone(uint64(n))
			return nil
		}
		if op == storage.OpWrite {
			return &storage.ShortWrite{Bytes: 33, Err: kind}
		}
		return kind
	}
	sent := life(t, f, acknowledged)
	want := acknowledged.Load()
	switch {
	case clone != nil:
		mem, want = clone, atCrash
	case n%2 == 1:
		mem = mem.CrashClone(uint64(n)) // the machine follows its disk
	}
	l, recovery, err := storage.Open(testDir, storage.Options{FS: mem, SegmentBytes: 400, IndexIntervalBytes: 1, VerifyAll: true}, 0)
	if err != nil {
		t.Fatalf("operation %d: %v", n, err)
	}
	got, err := readAll(l, 0, 1000)
	if err != nil || l.End() < want || !bytes.HasPrefix(sent, got) {
		t.Fatalf("operation %d: %d acknowledged, %s, %d of %d bytes, %v", n, want, recovery, len(got), len(sent), err)
	}
	closeLog(t, l)
	return hit.Load()
}

// life opens, appends over several segments, closes and does it again, as far as
// it gets. It returns what a log without faults would hold.
func life(t *testing.T, fs storage.FS, acknowledged *atomic.Int64) []byte {
	var sent []byte
	next := int64(0)
	for range 2 {
		l, _, err := storage.Open(testDir, storage.Options{FS: fs, SegmentBytes: 400, IndexIntervalBytes: 1}, 0)
		if err != nil {
			return sent
		}
		for range 8 {
			b := idempotent(1, 0, int32(next), 1)
			at, err := l.Append(b, int32(next/5), 0)
			if err != nil {
				at, err = l.Append(b, int32(next/5), 0) // a client tries again
			}
			if err != nil {
				break
			}
			if at.Base != next {
				t.Fatalf("appended at %d, not %d", at.Base, next)
			}
			next = at.Next
			sent = append(sent, b...)
			if l.AwaitDurable(t.Context(), at.Next) != nil {
				break
			}
			acknowledged.Store(at.Next)
		}
		_ = l.Close() // what it could not do is what the next open must bear
	}
	return sent
}

func TestConcurrentUse(t *testing.T) {
	l, _ := open(t, storage.NewMemFS(), storage.Options{SegmentBytes: 20_000, IndexIntervalBytes: 300})
	const appenders, each = 4, 150
	var writers, readers sync.WaitGroup
	for w := range appenders {
		writers.Go(func() {
			for i := range each {
				at, err := l.Append(idempotent(int64(w), 0, int32(2*i), 2), 0, 0)
				if err != nil {
					t.Error(err)
					return
				}
				if i%5 == 0 {
					if err := l.AwaitDurable(t.Context(), at.Next); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	for range 3 {
		readers.Go(func() {
			next := int64(0)
			for next < appenders*each*2 {
				<-l.DurablePast(next)
				b, err := readAll(l, next, 3000)
				if err != nil || len(b) == 0 {
					t.Errorf("read from %d: %d bytes, %v", next, len(b), err)
					return
				}
				next += 2 * int64(len(b)/len(idempotent(0, 0, 0, 2)))
				if _, _, err := l.OffsetForTime(0); err != nil {
					t.Error(err)
				}
				if _, _, err := l.MaxTimestamp(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	writers.Wait()
	readers.Wait()
	closeLog(t, l)
}

func TestCloseWaitsForReads(t *testing.T) {
	mem := storage.NewMemFS()
	reading, proceed := make(chan struct{}), make(chan struct{})
	var once sync.Once
	f := &storage.FaultFS{FS: mem}
	f.Before = func(op storage.Op, name string) error {
		if op == storage.OpRead && filepath.Ext(name) == ".log" {
			once.Do(func() {
				close(reading)
				<-proceed
			})
		}
		return nil
	}
	l, _ := open(t, f, storage.Options{})
	appendDurably(t, l, plain(1, 0, 10))
	read := make(chan error)
	go func() {
		_, err := l.Read(0, 1, 100)
		read <- err
	}()
	<-reading
	closed := make(chan error)
	go func() { closed <- l.Close() }()
	eventually(t, "the close begins", func() bool { return l.AwaitDurable(t.Context(), 99) != nil })
	close(proceed)
	if err := <-read; err != nil {
		t.Errorf("the read under way: %v", err)
	}
	if err := <-closed; err != nil {
		t.Errorf("close: %v", err)
	}
}
