package storage_test

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/muster-io/muster/broker/storage"
)

func TestProducerRules(t *testing.T) {
	type send struct {
		pid      int64
		epoch    int16
		sequence int32
		n        int
		base     int64 // answered
		dup      bool
		err      error
	}
	for name, sends := range map[string][]send{
		"in order": {{1, 0, 0, 3, 0, false, nil}, {1, 0, 3, 2, 3, false, nil}},
		"again":    {{1, 0, 0, 3, 0, false, nil}, {1, 0, 3, 1, 3, false, nil}, {1, 0, 0, 3, 0, true, nil}, {1, 0, 3, 1, 3, true, nil}},
		"the last five are known, the sixth is not": {
			{1, 0, 0, 1, 0, false, nil}, {1, 0, 1, 1, 1, false, nil}, {1, 0, 2, 1, 2, false, nil}, {1, 0, 3, 1, 3, false, nil},
			{1, 0, 4, 1, 4, false, nil}, {1, 0, 5, 1, 5, false, nil}, {1, 0, 1, 1, 1, true, nil},
			{1, 0, 0, 1, 0, false, kerr.OutOfOrderSequenceNumber}},
		"a gap":           {{1, 0, 0, 1, 0, false, nil}, {1, 0, 2, 1, 0, false, kerr.OutOfOrderSequenceNumber}, {1, 0, 1, 1, 1, false, nil}},
		"an overlap":      {{1, 0, 0, 2, 0, false, nil}, {1, 0, 1, 2, 0, false, kerr.OutOfOrderSequenceNumber}},
		"another length":  {{1, 0, 0, 2, 0, false, nil}, {1, 0, 0, 1, 0, false, kerr.OutOfOrderSequenceNumber}},
		"unknown":         {{1, 4, 77, 1, 0, false, nil}, {1, 4, 78, 1, 1, false, nil}},
		"older epoch":     {{1, 2, 0, 1, 0, false, nil}, {1, 1, 0, 1, 0, false, kerr.InvalidProducerEpoch}},
		"newer epoch":     {{1, 2, 9, 1, 0, false, nil}, {1, 3, 0, 1, 1, false, nil}, {1, 3, 1, 1, 2, false, nil}},
		"newer, not at 0": {{1, 2, 0, 1, 0, false, nil}, {1, 3, 1, 1, 0, false, kerr.OutOfOrderSequenceNumber}, {1, 2, 1, 1, 1, false, nil}},
		"two producers":   {{1, 0, 0, 1, 0, false, nil}, {2, 0, 0, 1, 1, false, nil}, {1, 0, 0, 1, 0, true, nil}},
		"wraps to 0": {
			{1, 0, math.MaxInt32, 1, 0, false, nil}, {1, 0, 0, 1, 1, false, nil}, {1, 0, math.MaxInt32, 1, 0, true, nil}},
		"wraps inside": {
			{1, 0, math.MaxInt32 - 1, 4, 0, false, nil}, {1, 0, 2, 1, 4, false, nil}, {1, 0, math.MaxInt32 - 1, 4, 0, true, nil}},
	} {
		t.Run(name, func(t *testing.T) {
			l, _ := open(t, storage.NewMemFS(), storage.Options{})
			for i, s := range sends {
				at, err := l.Append(idempotent(s.pid, s.epoch, s.sequence, s.n), 0, 0)
				if !errors.Is(err, s.err) || err == nil && (at.Base != s.base || at.Next != s.base+int64(s.n) || at.Duplicate != s.dup) {
					t.Fatalf("%d: %+v, %v", i, at, err)
				}
			}
			closeLog(t, l)
		})
	}
}

func TestDuplicatesAreKnownAfterRestarts(t *testing.T) {
	snapshot := func(offset int) string { return fmt.Sprintf("%020d.producers", offset) }
	rubbish := []byte("rubbish")
	for name, restart := range map[string]func(t *testing.T, fs *storage.MemFS){
		"clean":                  func(*testing.T, *storage.MemFS) {},
		"newest snapshot broken": func(t *testing.T, fs *storage.MemFS) { put(t, fs, snapshot(10), rubbish) },
		"all broken": func(t *testing.T, fs *storage.MemFS) {
			put(t, fs, snapshot(10), rubbish)
			put(t, fs, snapshot(9), rubbish)
		},
		"a flipped bit": func(t *testing.T, fs *storage.MemFS) {
			b := contents(t, fs, snapshot(10))
			b[len(b)-1] ^= 1
			put(t, fs, snapshot(10), b)
		},
		"none": func(t *testing.T, fs *storage.MemFS) {
			for _, offset := range []int{9, 10} {
				if err := fs.Remove(path(snapshot(offset))); err != nil {
					t.Fatal(err)
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			mem := storage.NewMemFS()
			opts := storage.Options{SegmentBytes: int64(3*len(idempotent(1, 0, 0, 1)) + 1)}
			l, _ := open(t, mem, opts)
			for i := range int32(10) {
				appendTo(t, l, idempotent(int64(i%2), 0, i/2, 1))
			}
			closeLog(t, l)
			restart(t, mem)
			l, _ = open(t, mem, opts)
			for i := range int32(10) {
				at := appendTo(t, l, idempotent(int64(i%2), 0, i/2, 1))
				if !at.Duplicate || at.Base != int64(i) {
					t.Errorf("%d: %+v", i, at)
				}
			}
			if _, err := l.Append(idempotent(1, 0, 9, 1), 0, 0); !errors.Is(err, kerr.OutOfOrderSequenceNumber) {
				t.Errorf("gap: %v", err)
			}
			closeLog(t, l)
		})
	}
}

func TestSilentProducersAreForgotten(t *testing.T) {
	const hour = int64(time.Hour / time.Millisecond)
	mem := storage.NewMemFS()
	l, _ := open(t, mem, storage.Options{ProducerExpiry: time.Hour})
	send := func(pid int64, sequence int32, now int64) error {
		_, err := l.Append(idempotent(pid, 0, sequence, 1), 0, now)
		return err
	}
	if err := errors.Join(send(1, 0, 0), send(2, 0, 1), send(1, 1, hour)); err != nil {
		t.Fatal(err)
	}
	if err := send(2, 50, hour+1); !errors.Is(err, kerr.OutOfOrderSequenceNumber) {
		t.Errorf("after an hour: %v", err)
	}
	if err := send(2, 50, hour+2); err != nil {
		t.Errorf("after more than an hour: %v", err)
	}
	if err := send(1, 50, hour+2); !errors.Is(err, kerr.OutOfOrderSequenceNumber) {
		t.Errorf("the other one was forgotten: %v", err)
	}
	closeLog(t, l)
}

func TestProducersAreBounded(t *testing.T) {
	mem := storage.NewMemFS()
	opts := storage.Options{MaxProducers: 3}
	l, _ := open(t, mem, opts)
	for pid := range int64(4) {
		appendTo(t, l, idempotent(pid, 0, 0, 1))
	}
	appendTo(t, l, idempotent(1, 0, 1, 1)) // now 2 is the one silent for the longest time
	closeLog(t, l)
	l, _ = open(t, mem, opts)
	appendTo(t, l, idempotent(9, 0, 0, 1))
	for pid, known := range map[int64]bool{1: true, 3: true, 9: true} {
		if _, err := l.Append(idempotent(pid, 0, 70, 1), 0, 0); errors.Is(err, kerr.OutOfOrderSequenceNumber) != known {
			t.Errorf("producer %d: %v", pid, err)
		}
	}
	if _, err := l.Append(idempotent(2, 0, 70, 1), 0, 0); err != nil {
		t.Errorf("producer 2 is still known: %v", err)
	}
	closeLog(t, l)
}
