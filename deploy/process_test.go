//go:build linux

package deploy

import (
	"bytes"
	"context"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// process is a program that runs, with its output in memory.
type process struct {
	t              *testing.T
	name           string
	cmd            *exec.Cmd
	stdout, stderr buffer
	done           chan struct{} // closed when it has ended
}

// buffer is output that may be read while it grows.
type buffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// start runs a command in a process group of its own, which ends with the test.
func start(t *testing.T, name string, cmd *exec.Cmd) *process {
	t.Helper()
	p := &process{t: t, name: name, cmd: cmd, done: make(chan struct{})}
	if cmd.Stdout == nil {
		cmd.Stdout = &p.stdout
	}
	if cmd.Stderr == nil {
		cmd.Stderr = &p.stderr
	}
	// A child that keeps the output open must not keep us.
	cmd.WaitDelay = time.Second
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	if err := cmd.Start(); err != nil {
		t.Fatalf("start %s: %v", name, err)
	}
	go func() {
		cmd.Wait() // the status is in ProcessState
		close(p.done)
	}()
	t.Cleanup(func() {
		syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		<-p.done
		if t.Failed() {
			t.Logf("--- %s (%s)\n%s%s", name, cmd.ProcessState, tail(p.stdout.String()), tail(p.stderr.String()))
		}
	})
	return p
}

func tail(text string) string {
	const most = 3000
	if len(text) > most {
		return "…" + text[len(text)-most:]
	}
	return text
}

// run runs a command to its end and returns its output; it must succeed.
func run(t *testing.T, limit time.Duration, argv ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(argv, " "), err, out)
	}
	return string(out)
}

func (p *process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// until polls a condition, and fails the test if it does not come true, or if one of
// the processes ends first.
func until(t *testing.T, limit time.Duration, what string, is func() bool, needed ...*process) {
	t.Helper()
	for end := time.Now().Add(limit); !is(); time.Sleep(20 * time.Millisecond) {
		for _, p := range needed {
			if p.ended() {
				t.Fatalf("%s ended with %s before: %s", p.name, p.cmd.ProcessState, what)
			}
		}
		if time.Now().After(end) {
			t.Fatalf("not within %s: %s", limit, what)
		}
	}
}

// stop sends SIGTERM and requires a good end.
func (p *process) stop(limit time.Duration) {
	p.t.Helper()
	if err := syscall.Kill(p.cmd.Process.Pid, syscall.SIGTERM); err != nil {
		p.t.Fatalf("SIGTERM to %s: %v", p.name, err)
	}
	select {
	case <-p.done:
	case <-time.After(limit):
		p.t.Fatalf("%s has not ended %s after SIGTERM", p.name, limit)
	}
	if status := p.cmd.ProcessState.ExitCode(); status != 0 {
		p.t.Errorf("%s ended with status %d after SIGTERM, want 0", p.name, status)
	}
}

func (p *process) kill() {
	syscall.Kill(p.cmd.Process.Pid, syscall.SIGKILL)
	<-p.done
}

// patience is for what takes a moment on a machine that is not busy, and has to come
// about on one that is.
const patience = 2 * time.Minute

var client = http.Client{Timeout: 10 * time.Second}

// answers says whether a GET is answered with 200.
func answers(url string) bool {
	res, err := client.Get(url)
	if err != nil {
		return false
	}
	res.Body.Close()
	return res.StatusCode == http.StatusOK
}

func writeFile(t *testing.T, path, text string, mode os.FileMode) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
}
