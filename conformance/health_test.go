package conformance

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// supervisor is a socket on which a daemon tells systemd of itself.
type supervisor struct {
	path string

	mu    sync.Mutex
	lines []string // in order
}

func newSupervisor(b *sandbox) *supervisor {
	b.t.Helper()
	s := &supervisor{path: b.path("notify")}
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: s.path, Net: "unixgram"})
	if err != nil {
		b.t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 4096)
		for {
			n, err := conn.Read(buf)
			if err != nil {
				return
			}
			s.mu.Lock()
			s.lines = append(s.lines, strings.Split(string(buf[:n]), "\n")...)
			s.mu.Unlock()
		}
	}()
	b.t.Cleanup(func() {
		conn.Close()
		<-done
	})
	return s
}

// has counts the lines that begin so.
func (s *supervisor) has(prefix string) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.lines {
		if strings.HasPrefix(l, prefix) {
			n++
		}
	}
	return n
}

// last is the newest line that begins so.
func (s *supervisor) last(prefix string) (line string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.lines {
		if strings.HasPrefix(l, prefix) {
			line = l
		}
	}
	return line
}

// supervisedLease is that of the daemon: half of it without news of etcd is a trouble,
// and before the test wants one a busy machine must not make it.
const supervisedLease = 20 * time.Second

// TestSupervision: a service manager and probes see a daemon start, stop being of
// use while its etcd is frozen, come back, and stop. All that time it lives.
func TestSupervision(t *testing.T) {
	b := newSandbox(t)
	etcd := newCluster(b)
	etcd.startDaemon()
	c := newCluster(b)
	c.id = 2
	s := newSupervisor(b)
	page := "127.0.0.1:" + freePorts(b, 1)[0]
	argv := append([]string{"env", "NOTIFY_SOCKET=" + s.path, "WATCHDOG_USEC=900000"},
		c.serverArgs("--etcd-external", etcd.etcd, "--session-timeout", supervisedLease.String(), "--http", page)...)
	p := b.start("daemon", nil, nil, argv...)
	until(t, patience, "READY=1", func() bool { return s.has("READY=1") == 1 })
	if out, err := os.ReadFile(p.stdout); err != nil || !bytes.HasPrefix(out, []byte("ready ")) {
		t.Errorf("READY=1 came before the line on stdout: %q, %v", out, err)
	}

	client := http.Client{Timeout: patience}
	get := func(path string) (int, string) {
		res, err := client.Get("http://" + page + path)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		body, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		return res.StatusCode, string(body)
	}
	state := func(what string, limit time.Duration, status int, line string) {
		t.Helper()
		began := time.Now()
		until(t, limit, what, func() bool {
			if status, body := get("/healthz"); status != http.StatusOK {
				t.Fatalf("%s: /healthz: %d %s", what, status, body)
			}
			got, _ := get("/readyz")
			return got == status
		})
		took := time.Since(began)
		until(t, patience, line, func() bool { return strings.HasPrefix(s.last("STATUS="), line) })
		t.Logf("%s after %v: %s", what, took.Round(time.Millisecond), s.last("STATUS="))
	}
	alive := func() {
		t.Helper()
		n := s.has("WATCHDOG=1")
		until(t, patience, "two more signs of life", func() bool { return s.has("WATCHDOG=1") >= n+2 })
	}
	state("ready", patience, http.StatusOK, "STATUS=serving")
	alive()

	etcd.daemon.freeze()
	state("not ready within the session's time to live", supervisedLease, http.StatusServiceUnavailable, "STATUS=not ready: ")
	until(t, patience, "the session is lost", func() bool { _, body := get("/readyz"); return strings.Contains(body, "session: lost") })
	alive()
	etcd.daemon.thaw()
	state("ready again", patience, http.StatusOK, "STATUS=serving")
	_, body := get("/metrics")
	for _, want := range []string{"muster_sessions_lost_total{reason=\"deadline\"} 1\n", "muster_session_stalls_total 1\n", "muster_view_troubles_total 1\n"} {
		if !strings.Contains(body, "\n"+want) {
			t.Errorf("/metrics does not say %q", want)
		}
	}

	p.signal(syscall.SIGTERM)
	p.exits(0, patience)
	until(t, patience, "STOPPING=1", func() bool { return s.has("STOPPING=1") == 1 })
	if s.has("READY=1") != 1 {
		t.Error("READY=1 came more than once")
	}
}
