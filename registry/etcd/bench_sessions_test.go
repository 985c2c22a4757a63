//go:build unix

package etcd_test

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/etcd"
	"github.com/muster-io/muster/registry/registrytest"
)

const serveVariable = "MUSTER_BENCH_SERVE_ETCD"

// TestServeEtcd is no test: it is the etcd that a benchmark runs in a process of its
// own, until its standard input ends.
func TestServeEtcd(t *testing.T) {
	if os.Getenv(serveVariable) == "" {
		return
	}
	st := registrytest.Start(t)
	fmt.Println("endpoint", st.Endpoint)
	io.Copy(io.Discard, os.Stdin)
}

// startEtcdProcess returns the endpoint of an etcd whose work is not this process's.
func startEtcdProcess(b *testing.B) string {
	b.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^TestServeEtcd$")
	cmd.Env = append(os.Environ(), serveVariable+"=1")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		in.Close()
		io.Copy(io.Discard, out)
		if err := cmd.Wait(); err != nil {
			b.Error(err)
		}
	})
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if endpoint, ok := strings.CutPrefix(lines.Text(), "endpoint "); ok {
			return endpoint
		}
	}
	b.Fatal("etcd did not start")
	return ""
}

func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// What it takes to keep 1,000 sessions of 6 s alive in one process: one operation is
// one time to live. Run it with -benchtime 3x.
func BenchmarkSessions1000(b *testing.B) {
	st, err := etcd.Open(b.Context(), etcd.Options{Endpoints: []string{startEtcdProcess(b)}})
	if err != nil {
		b.Fatal(err)
	}
	defer st.Close()
	var sessions []*registry.Session
	for range 1000 {
		s, err := registry.OpenSession(b.Context(), st, registry.SessionOptions{})
		if err != nil {
			b.Fatal(err)
		}
		sessions = append(sessions, s)
	}
	time.Sleep(registry.DefaultTTL / 2) // past the first renewal, which opens a stream
	began, before := time.Now(), cpuTime(b)
	for b.Loop() {
		time.Sleep(registry.DefaultTTL)
	}
	b.ReportMetric(float64(cpuTime(b)-before)/float64(time.Since(began))*100, "%core")
	for _, s := range sessions {
		if !s.Alive() {
			b.Errorf("session lost: %v", s.Err())
		}
		if err := s.Close(b.Context()); err != nil {
			b.Error(err)
		}
	}
}
