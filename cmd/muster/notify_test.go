package main

import (
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/muster-io/muster/broker"
)

// patient is a daemon whose state the test sets.
type patient struct {
	mu             sync.Mutex
	ready, healthy bool
	reason         string
}

func (p *patient) set(ready, healthy bool, reason string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ready, p.healthy, p.reason = ready, healthy, reason
}

func (p *patient) Ready() (bool, []broker.Check) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ready, []broker.Check{{Name: "phase", OK: true}, {Name: "session", OK: p.ready, Reason: p.reason}}
}

func (p *patient) Healthy() (bool, []broker.Check) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.healthy, nil
}

// What systemd is told: ready once, changes of the state, signs of life only while
// there is life, and the end.
func TestNotify(t *testing.T) {
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: t.TempDir() + "/notify", Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	t.Setenv("NOTIFY_SOCKET", conn.LocalAddr().String())
	t.Setenv("WATCHDOG_USEC", "30000")
	buf := make([]byte, 4096)
	// until reads on to a message, and counts the signs of life on the way.
	until := func(want string) (alive int) {
		t.Helper()
		if err := conn.SetReadDeadline(time.Now().Add(30 * time.Second)); err != nil {
			t.Fatal(err)
		}
		for {
			n, err := conn.Read(buf)
			if err != nil {
				t.Fatalf("no %q: %v", want, err)
			}
			switch got := string(buf[:n]); got {
			case want:
				return alive
			case "WATCHDOG=1":
				alive++
			default:
				t.Fatalf("got %q, waiting for %q", got, want)
			}
		}
	}
	d := &patient{ready: true, healthy: true}
	stopping := notify(d, slog.New(slog.DiscardHandler))
	until("READY=1\nSTATUS=serving")
	until("WATCHDOG=1")
	d.set(false, true, "lost")
	until("STATUS=not ready: session: lost")
	until("WATCHDOG=1")
	d.set(false, false, "stuck")
	until("STATUS=not ready: session: stuck")
	d.set(false, false, "still stuck")
	if n := until("STATUS=not ready: session: still stuck"); n != 0 {
		t.Errorf("%d signs of life from a daemon that is stuck", n)
	}
	d.set(true, true, "")
	until("STATUS=serving")
	// It waits for its reader as systemd's socket does, which holds no more than a few messages.
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		stopping()
	}()
	until("STOPPING=1\nSTATUS=stopping")
	<-stopped
}

// Without systemd there is nobody to tell.
func TestNotifyWithoutSystemd(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	var log strings.Builder
	notify(&patient{}, slog.New(slog.NewTextHandler(&log, nil)))()
	if log.Len() > 0 {
		t.Error(log.String())
	}
}
