//go:build linux

package vigil

import (
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"
)

// From kill -9 until another process sees the registration gone.
func BenchmarkKill(b *testing.B) {
	f := newFixture(b)
	f.serve()
	var took []time.Duration
	n := 0
	for b.Loop() {
		id := fmt.Sprint("c", n, "-")
		n++
		c := startChild(b, childConfig{Endpoint: f.st.Endpoint, Cluster: f.id, Brokers: []int32{1}, ID: id})
		c.says("watched by 1")
		watch := f.st.WatchKey(b.Context(), key(id+"0"), 1)
		<-watch // that it stands
		began := time.Now()
		c.signal(syscall.SIGKILL)
		for r := range watch {
			must(b, r.Err)
			if len(r.Events) > 0 && r.Events[0].Deleted {
				break
			}
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "ms-p50")
	b.ReportMetric(float64(took[len(took)-1].Microseconds())/1000, "ms-max")
}

// What it costs to watch a process that does nothing.
func BenchmarkIdle(b *testing.B) {
	f := newFixture(b)
	s := f.serve()
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapInuse + m.StackInuse
	}
	files := func() int {
		dir, err := os.ReadDir("/proc/self/fd")
		must(b, err)
		return len(dir)
	}
	const many = 1000
	for b.Loop() {
		a, lease := f.registered("a")
		memory, goroutines, open := heap(), runtime.NumGoroutine(), files()
		conns := make([]net.Conn, many)
		for i := range conns {
			c := f.greeted(b)
			if !c.add(lease, a.key, a.secret) {
				b.Fatal("it is not watched")
			}
			conns[i], c.r = c.Conn, nil
		}
		b.ReportMetric(float64(heap()-memory)/many, "B/process")
		b.ReportMetric(float64(runtime.NumGoroutine()-goroutines)/many, "goroutines/process")
		b.ReportMetric(float64(files()-open)/many-1, "files/process") // one is the client's
		for _, c := range conns {
			_, _ = c.Write([]byte(`{"op":"bye"}` + "\n"))
			_ = c.Close()
		}
		eventually(b, func() string {
			if s.Connections() != 0 {
				return "still connected"
			}
			return ""
		})
	}
}
