package storage_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/muster-io/muster/broker/storage"
)

func path(name string) string { return filepath.Join(testDir, name) }

func logName(base int64) string { return fmt.Sprintf("%020d.log", base) }

// contents returns a file as it is.
func contents(t testing.TB, fs storage.FS, name string) []byte {
	t.Helper()
	f, err := fs.Open(path(name))
	if err != nil {
		t.Fatal(err)
	}
	size, err := f.Size()
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, size)
	if n, err := f.ReadAt(b, 0); n < len(b) {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return b
}

// put replaces a file.
func put(t testing.TB, fs storage.FS, name string, b []byte) {
	t.Helper()
	f, err := fs.Create(path(name))
	if err == nil {
		_, err = f.WriteAt(b, 0)
	}
	if err == nil {
		err = errors.Join(f.Sync(), f.Close(), fs.SyncDir(testDir))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// filled is a file system with a log of ten batches of one record in segments of
// three, and the bytes of one batch.
func filled(t testing.TB, clean bool) (*storage.MemFS, int) {
	t.Helper()
	mem := storage.NewMemFS()
	size := len(plain(1, 0, 10))
	l, _ := open(t, mem, storage.Options{SegmentBytes: int64(3*size + 1), IndexIntervalBytes: 1})
	for i := range int64(10) {
		appendDurably(t, l, plain(1, 1000+i, 10))
	}
	after := mem
	if !clean {
		after = mem.CrashClone(1)
	}
	closeLog(t, l)
	return after, size
}

func TestTornTailIsCutAndReported(t *testing.T) {
	for name, tear := range map[string]func(b []byte, size int) []byte{
		"half a header":   func(b []byte, size int) []byte { return append(b, b[:30]...) },
		"half a batch":    func(b []byte, size int) []byte { return append(b, b[:size-1]...) },
		"zeros":           func(b []byte, _ int) []byte { return append(b, make([]byte, 4096)...) },
		"a flipped bit":   func(b []byte, size int) []byte { x := bytes.Clone(b); x[size-1] ^= 1; return append(b, x...) },
		"an older offset": func(b []byte, size int) []byte { return append(b, b[:size]...) },
		"a huge length": func(b []byte, size int) []byte {
			x := bytes.Clone(b[:size])
			binary.BigEndian.PutUint32(x[8:], 1<<31-1)
			return append(b, x...)
		},
	} {
		t.Run(name, func(t *testing.T) {
			mem, size := filled(t, false)
			whole := contents(t, mem, logName(9))
			torn := tear(bytes.Clone(whole), size)
			put(t, mem, logName(9), torn)
			var told storage.Recovery
			l, recovery := open(t, mem, storage.Options{Listener: storage.Listener{Recovered: func(r storage.Recovery) { told = r }}})
			want := storage.Recovery{Dir: testDir, Segment: 9, ValidOffset: 10, BytesCut: int64(len(torn) - len(whole)), Reason: recovery.Reason}
			if recovery != want || told != recovery || recovery.Reason == "" {
				t.Errorf("recovery %+v", recovery)
			}
			if at := appendDurably(t, l, plain(1, 0, 10)); at.Base != 10 {
				t.Errorf("goes on at %d", at.Base)
			}
			closeLog(t, l)
		})
	}
}

func TestNewestSegmentMayBeEmpty(t *testing.T) {
	mem, _ := filled(t, false)
	put(t, mem, logName(9), nil)
	l, recovery := open(t, mem, storage.Options{})
	if recovery.ValidOffset != 9 || recovery.BytesCut != 0 {
		t.Errorf("recovery %+v", recovery)
	}
	closeLog(t, l)
}

func TestDamageBeforeTheNewestSegmentIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		damage  func(t *testing.T, fs storage.FS, size int)
		segment int64
		offset  int64
	}{
		"cut short": {func(t *testing.T, fs storage.FS, size int) {
			put(t, fs, logName(3), contents(t, fs, logName(3))[:2*size])
		}, 3, 5},
		"torn": {func(t *testing.T, fs storage.FS, size int) {
			put(t, fs, logName(3), contents(t, fs, logName(3))[:2*size+9])
		}, 3, 5},
		"a batch too many": {func(t *testing.T, fs storage.FS, size int) {
			put(t, fs, logName(3), append(contents(t, fs, logName(3)), contents(t, fs, logName(6))...))
		}, 3, 9},
		"a segment is missing": {func(t *testing.T, fs storage.FS, _ int) {
			if err := fs.Remove(path(logName(3))); err != nil {
				t.Fatal(err)
			}
		}, 0, 3},
		"a flipped bit in the last batch, index gone": {func(t *testing.T, fs storage.FS, size int) {
			b := contents(t, fs, logName(3))
			b[3*size-1] ^= 1
			put(t, fs, logName(3), b)
			if err := fs.Remove(path(strings.Replace(logName(3), "log", "index", 1))); err != nil {
				t.Fatal(err)
			}
		}, 3, 5},
	} {
		for _, clean := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, clean=%v", name, clean), func(t *testing.T) {
				mem, size := filled(t, clean)
				c.damage(t, mem, size)
				l, _, err := storage.Open(testDir, storage.Options{FS: mem, IndexIntervalBytes: 1}, 0)
				var damage *storage.CorruptionError
				if !errors.As(err, &damage) || damage.Dir != testDir || damage.Segment != c.segment || damage.Offset != c.offset {
					t.Fatalf("open: %v, %v", l, err)
				}
			})
		}
	}
}

func TestDamageInsideAnOldSegment(t *testing.T) {
	mem, size := filled(t, true)
	b := contents(t, mem, logName(3))
	b[2*size-1] ^= 1
	put(t, mem, logName(3), b)
	_, _, err := storage.Open(testDir, storage.Options{FS: mem, VerifyAll: true}, 0)
	var damage *storage.CorruptionError
	if !errors.As(err, &damage) || damage.Segment != 3 || damage.Offset != 4 || damage.Position != int64(size) {
		t.Errorf("open and verify all: %v", err)
	}
	l, _ := open(t, mem, storage.Options{})
	if b, err := l.Read(3, 10, 10_000); err != nil || len(b) != size {
		t.Errorf("what comes before the damage: %d bytes, %v", len(b), err)
	}
	damage = nil
	if _, err := l.Read(4, 10, 10_000); !errors.As(err, &damage) || damage.Offset != 4 {
		t.Errorf("the damaged batch was read: %v", err)
	}
	if b, err := l.Read(5, 10, 10_000); err != nil || len(b) != size {
		t.Errorf("what comes after the damage: %d bytes, %v", len(b), err)
	}
	closeLog(t, l)
}

func TestSegmentOfTheLastCloseIsMissing(t *testing.T) {
	mem, _ := filled(t, true)
	if err := mem.Remove(path(logName(9))); err != nil {
		t.Fatal(err)
	}
	var damage *storage.CorruptionError
	if _, _, err := storage.Open(testDir, storage.Options{FS: mem}, 0); !errors.As(err, &damage) {
		t.Errorf("open: %v", err)
	}
}

func TestIndexesAreMadeAgain(t *testing.T) {
	for _, suffix := range []string{"index", "timeindex"} {
		for name, spoil := range map[string]func([]byte) []byte{
			"missing":    nil,
			"empty":      func([]byte) []byte { return nil },
			"cut":        func(b []byte) []byte { return b[:len(b)-1] },
			"entry lost": func(b []byte) []byte { return b[:len(b)-len(b)/2] },
			"wrong":      func(b []byte) []byte { return bytes.Repeat([]byte{0xff}, len(b)) },
			"zeros":      func(b []byte) []byte { return make([]byte, len(b)) },
		} {
			for _, base := range []int64{3, 9} {
				t.Run(fmt.Sprintf("%s %s of %d", suffix, name, base), func(t *testing.T) {
					mem, size := filled(t, true)
					file := strings.Replace(logName(base), "log", suffix, 1)
					want := contents(t, mem, file)
					if base == 9 && suffix == "index" && name != "missing" && name != "wrong" {
						return // a segment of one batch has no entries
					}
					if spoil == nil {
						if err := mem.Remove(path(file)); err != nil {
							t.Fatal(err)
						}
					} else {
						put(t, mem, file, spoil(bytes.Clone(want)))
					}
					opts := storage.Options{SegmentBytes: int64(3*size + 1), IndexIntervalBytes: 1}
					l, _ := open(t, mem, opts)
					for i := range int64(10) {
						if b, err := l.Read(i, 10, 1); err != nil || binary.BigEndian.Uint64(b) != uint64(i) {
							t.Fatalf("read %d: %v", i, err)
						}
						if at, ok, err := l.OffsetForTime(1000 + i); err != nil || !ok || at.Offset != i {
							t.Fatalf("time %d: %+v, %v, %v", 1000+i, at, ok, err)
						}
					}
					closeLog(t, l)
					if got := contents(t, mem, file); !bytes.Equal(got, want) {
						t.Errorf("made again differently: %x, was %x", got, want)
					}
				})
			}
		}
	}
}

// Kafka's rule for its index files, which its dump tool checks: an entry after more
// than the interval, with the last offset and the position of its batch; time
// entries with the largest timestamp so far, and one at the end of the segment.
func TestIndexFilesAreKafkas(t *testing.T) {
	mem, size := filled(t, true)
	entry := func(parts ...any) []byte {
		var b bytes.Buffer
		for _, p := range parts {
			if err := binary.Write(&b, binary.BigEndian, p); err != nil {
				t.Fatal(err)
			}
		}
		return b.Bytes()
	}
	want := slices.Concat(entry(uint32(1), uint32(size)), entry(uint32(2), uint32(2*size)))
	if got := contents(t, mem, "00000000000000000003.index"); !bytes.Equal(got, want) {
		t.Errorf("index %x, want %x", got, want)
	}
	want = slices.Concat(entry(int64(1004), uint32(1)), entry(int64(1005), uint32(2)))
	if got := contents(t, mem, "00000000000000000003.timeindex"); !bytes.Equal(got, want) {
		t.Errorf("time index %x, want %x", got, want)
	}
}

func TestCleanCloseNeedsNoScan(t *testing.T) {
	mem, _ := filled(t, true)
	l, recovery := open(t, mem, storage.Options{})
	if !recovery.Clean || recovery.ValidOffset != 10 {
		t.Errorf("recovery %+v", recovery)
	}
	after := mem.CrashClone(3) // the mark must be gone for good by now
	closeLog(t, l)
	l, recovery = open(t, after, storage.Options{})
	if recovery.Clean || recovery.ValidOffset != 10 {
		t.Errorf("after a crash: %+v", recovery)
	}
	closeLog(t, l)
}

func TestUntrueMarkIsNotBelieved(t *testing.T) {
	mem, size := filled(t, true)
	put(t, mem, logName(9), append(contents(t, mem, logName(9)), make([]byte, 7)...))
	l, recovery := open(t, mem, storage.Options{})
	if recovery.Clean || recovery.BytesCut != 7 {
		t.Errorf("other size: %+v", recovery)
	}
	closeLog(t, l)
	put(t, mem, "clean-close", []byte("version: 0\n"))
	l, recovery = open(t, mem, storage.Options{})
	if recovery.Clean || recovery.ValidOffset != 10 {
		t.Errorf("malformed: %+v", recovery)
	}
	closeLog(t, l)
	_ = size
}

func TestLeaderEpochCheckpoint(t *testing.T) {
	mem := storage.NewMemFS()
	l, _ := open(t, mem, storage.Options{})
	for i, epoch := range []int32{0, 0, 3, 3, 5} {
		at, err := l.Append(plain(1, 0, 10), epoch, 0)
		if err != nil {
			t.Fatal(i, err)
		}
		await(t, l, at.Next)
	}
	const want = "0\n3\n0 0\n3 2\n5 4\n"
	if got := string(contents(t, mem, "leader-epoch-checkpoint")); got != want {
		t.Errorf("checkpoint %q", got)
	}
	if _, err := l.Append(plain(1, 0, 10), 4, 0); err == nil {
		t.Error("an older epoch was accepted")
	}
	closeLog(t, l)

	put(t, mem, "leader-epoch-checkpoint", []byte("0\n1\nrubbish\n"))
	l, _ = open(t, mem, storage.Options{})
	closeLog(t, l)
	if got := string(contents(t, mem, "leader-epoch-checkpoint")); got != want {
		t.Errorf("made again as %q", got)
	}
	// The batch of epoch 5 is lost, and with it the epoch.
	all := contents(t, mem, logName(0))
	put(t, mem, logName(0), all[:len(all)-3])
	l, _ = open(t, mem, storage.Options{})
	closeLog(t, l)
	if got := string(contents(t, mem, "leader-epoch-checkpoint")); got != "0\n2\n0 0\n3 2\n" {
		t.Errorf("after a cut %q", got)
	}
}

func TestIdentity(t *testing.T) {
	mem := storage.NewMemFS()
	id := storage.TopicID{0xfb, 0xff, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14}
	if err := storage.EnsureIdentity(mem, testDir, id); err != nil {
		t.Fatal(err)
	}
	if got := string(contents(t, mem, "partition.metadata")); got != "version: 0\ntopic_id: -_8BAgMEBQYHCAkKCwwNDg\n" {
		t.Errorf("file %q", got)
	}
	if err := storage.EnsureIdentity(mem, testDir, id); err != nil {
		t.Errorf("again: %v", err)
	}
	other := id
	other[0]++
	var wrong *storage.IdentityError
	if err := storage.EnsureIdentity(mem, testDir, other); !errors.As(err, &wrong) || wrong.Have != id || wrong.Want != other {
		t.Errorf("other topic: %v", err)
	}
	put(t, mem, "partition.metadata", []byte("version: 1\n"))
	if err := storage.EnsureIdentity(mem, testDir, id); !errors.As(err, &wrong) || wrong.Reason == "" {
		t.Errorf("unknown version: %v", err)
	}
	mem, _ = filled(t, true)
	if err := storage.EnsureIdentity(mem, testDir, id); !errors.As(err, &wrong) || wrong.Reason == "" {
		t.Errorf("a log without identity: %v", err)
	}
}

// What is written once is durable when the call returns, with its name.
func TestSmallFilesSurviveACrash(t *testing.T) {
	for seed := range uint64(20) {
		mem := storage.NewMemFS()
		id := storage.TopicID{1}
		if err := storage.EnsureIdentity(mem, testDir, id); err != nil {
			t.Fatal(err)
		}
		l, _ := open(t, mem, storage.Options{})
		if err := storage.EnsureIdentity(mem.CrashClone(seed), testDir, id); err != nil {
			t.Errorf("seed %d: after creation: %v", seed, err)
		}
		if _, err := l.Append(plain(1, 0, 10), 3, 0); err != nil {
			t.Fatal(err)
		}
		await(t, l, 1)
		if got := string(contents(t, mem.CrashClone(seed), "leader-epoch-checkpoint")); got != "0\n1\n3 0\n" {
			t.Errorf("seed %d: the epoch of a durable batch is lost: %q", seed, got)
		}
		closeLog(t, l)
		l, recovery := open(t, mem.CrashClone(seed), storage.Options{})
		if !recovery.Clean {
			t.Errorf("seed %d: after a clean close: %s", seed, recovery)
		}
		closeLog(t, l)
	}
}

func TestWrongEntryInsideAnIndex(t *testing.T) {
	for name, position := range map[string]uint32{"no batch": 1, "the batch before": 0, "the batch after": uint32(2 * len(plain(1, 0, 10))), "outside": 1 << 30} {
		t.Run(name, func(t *testing.T) {
			mem, _ := filled(t, true)
			const file = "00000000000000000003.index"
			b := contents(t, mem, file)
			binary.BigEndian.PutUint32(b[4:], position)
			put(t, mem, file, b)
			l, _ := open(t, mem, storage.Options{IndexIntervalBytes: 1})
			for offset := range int64(10) {
				if got, err := l.Read(offset, 10, 1); err != nil || binary.BigEndian.Uint64(got) != uint64(offset) {
					t.Errorf("read %d: %x, %v", offset, got, err)
				}
			}
			closeLog(t, l)
		})
	}
}
