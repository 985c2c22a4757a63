package storage_test

import (
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/muster-io/muster/broker/storage"
)

func openBench(b *testing.B, dir string) *storage.Log {
	b.Helper()
	l, _, err := storage.Open(dir, storage.Options{}, 0)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := l.Close(); err != nil {
			b.Error(err)
		}
	})
	return l
}

// BenchmarkAppendSynced appends on the disk of this machine and waits until the
// batch is synced. window is how many appends are under way in each log at once.
func BenchmarkAppendSynced(b *testing.B) {
	for _, c := range []struct{ logs, window, bytes int }{
		{1, 1, 1000}, {1, 5, 16_000}, {6, 1, 16_000}, {6, 5, 16_000}, {6, 5, 100_000},
	} {
		b.Run(fmt.Sprintf("logs=%d/window=%d/bytes=%d", c.logs, c.window, c.bytes), func(b *testing.B) {
			batch := plain(10, 1000, c.bytes/10)
			var logs []*storage.Log
			for i := range c.logs {
				logs = append(logs, openBench(b, filepath.Join(b.TempDir(), fmt.Sprint(i))))
			}
			b.SetBytes(int64(len(batch)))
			b.ResetTimer()
			var done atomic.Int64
			var wg sync.WaitGroup
			for _, l := range logs {
				for range c.window {
					wg.Go(func() {
						own := append([]byte(nil), batch...)
						for done.Add(1) <= int64(b.N) {
							at, err := l.Append(own, 0, 0)
							if err == nil {
								err = l.AwaitDurable(b.Context(), at.Next)
							}
							if err != nil {
								b.Error(err)
								return
							}
						}
					})
				}
			}
			wg.Wait()
		})
	}
}

// BenchmarkAppend leaves out the disk: what checking and bookkeeping cost.
func BenchmarkAppend(b *testing.B) {
	for _, records := range []int{1, 100} {
		b.Run(fmt.Sprintf("records=%d", records), func(b *testing.B) {
			l := openBench(b, b.TempDir())
			batch := plain(records, 1000, 100)
			b.SetBytes(int64(len(batch)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := l.Append(batch, 0, 0); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkRead(b *testing.B) {
	l := openBench(b, b.TempDir())
	const batches = 4000
	batch := plain(10, 1000, 1600)
	for range batches {
		if _, err := l.Append(batch, 0, 0); err != nil {
			b.Fatal(err)
		}
	}
	if err := l.AwaitDurable(b.Context(), l.End()); err != nil {
		b.Fatal(err)
	}
	for _, maxBytes := range []int{1, 100_000, 1 << 20} {
		b.Run(fmt.Sprintf("bytes=%d", maxBytes), func(b *testing.B) {
			b.ReportAllocs()
			i := int64(0)
			for b.Loop() {
				i += 7919
				got, err := l.Read(i*10%(batches*10-1000), l.End(), maxBytes)
				if err != nil {
					b.Fatal(err)
				}
				b.SetBytes(int64(len(got)))
			}
		})
	}
}
