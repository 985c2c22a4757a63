package storage_test

import (
	"testing"

	"github.com/muster-io/muster/broker/storage"
)

// What a listener was told, summed up, is what the log holds, over segments and
// after it was opened again; a duplicate counts nowhere.
func TestListenerAndSizeAccountForEveryByte(t *testing.T) {
	fs := storage.NewMemFS()
	var bytes, records, synced, syncs int64
	opts := storage.Options{SegmentBytes: 1000, Listener: storage.Listener{
		Appended: func(s storage.Stored) {
			bytes += int64(s.Bytes)
			records += s.To - s.From
		},
		Synced: func(s storage.Synced) {
			synced += s.To - s.From
			syncs++
			if s.Took < 0 {
				t.Errorf("%s", s)
			}
		},
	}}
	l, _ := open(t, fs, opts)
	if l.Size() != 0 {
		t.Errorf("an empty log has %d bytes", l.Size())
	}
	for i := range int64(20) {
		appendDurably(t, l, plain(3, i, 50))
	}
	for range 2 {
		appendDurably(t, l, idempotent(7, 0, 0, 2))
	}
	size := l.Size()
	closeLog(t, l)
	if records != 62 || l.End() != records || synced != records || syncs < 22-1 || size != bytes || bytes < 3*opts.SegmentBytes {
		t.Errorf("%d records in %d bytes appended, %d made durable by %d syncs; the log ends at %d with %d bytes",
			records, bytes, synced, syncs, l.End(), size)
	}
	l, _ = open(t, fs, opts)
	defer closeLog(t, l)
	if l.Size() != size {
		t.Errorf("opened again the log has %d bytes, not %d", l.Size(), size)
	}
}
