package conformance

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// keepVariable keeps the directory of a failed test.
const keepVariable = "MUSTER_CONFORMANCE_KEEP"

// raceStatus is the exit status of a process in which a race was seen.
const raceStatus = 66

// patience is for what takes milliseconds on a machine that is not busy, and has to
// come about on one that is.
const patience = 90 * time.Second

// sandbox is a test's directory and all processes that it starts there.
type sandbox struct {
	t   *testing.T
	dir string

	mu    sync.Mutex
	procs []*process
	names map[string]int
	ports []*net.UDPConn // one for each port that was given away
}

func newSandbox(t *testing.T) *sandbox {
	t.Helper()
	dir, err := os.MkdirTemp("", "muster-conformance-")
	if err != nil {
		t.Fatal(err)
	}
	b := &sandbox{t: t, dir: dir, names: map[string]int{}}
	t.Cleanup(b.close)
	return b
}

// close ends what still runs, by pid, and shows the logs if the test failed.
func (b *sandbox) close() {
	for _, p := range b.procs {
		p.kill()
	}
	for _, p := range b.procs {
		p.checkRaces()
	}
	for _, lock := range b.ports {
		lock.Close()
	}
	if b.t.Failed() {
		for _, p := range b.procs {
			if p.cmd.ProcessState.Success() && strings.HasPrefix(p.name, "tool") {
				continue
			}
			b.t.Logf("--- %s (pid %d, %s): %s\n%s", p.name, p.cmd.Process.Pid, p.state(), strings.Join(p.cmd.Args[1:], " "), tail(p.stderr))
		}
		if os.Getenv(keepVariable) != "" {
			b.t.Logf("kept %s", b.dir)
			return
		}
		b.t.Logf("set %s=1 to keep the directory", keepVariable)
	}
	if err := os.RemoveAll(b.dir); err != nil {
		b.t.Error(err)
	}
}

func (b *sandbox) path(name string) string { return filepath.Join(b.dir, name) }

// tail returns the end of a log.
func tail(path string) string {
	const most = 4000
	data, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	if len(data) > most {
		data = append([]byte("…"), data[len(data)-most:]...)
	}
	return string(data)
}

// process is a running program with its output in two files.
type process struct {
	t              *testing.T
	name           string
	cmd            *exec.Cmd
	stdout, stderr string
	done           chan struct{} // closed when it has ended
	ended          time.Time     // valid then
	races          sync.Once
}

// start runs a program. Its stdout goes to <name>.out unless out is given; stdin
// may be nil.
func (b *sandbox) start(name string, stdin io.Reader, out io.Writer, argv ...string) *process {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.names[name]++; b.names[name] > 1 {
		name = fmt.Sprintf("%s-%d", name, b.names[name])
	}
	p := &process{t: b.t, name: name, cmd: exec.Command(argv[0], argv[1:]...), done: make(chan struct{}),
		stdout: b.path(name + ".out"), stderr: b.path(name + ".err")}
	var opened []*os.File
	create := func(path string) *os.File {
		f, err := os.Create(path)
		if err != nil {
			b.t.Fatal(err)
		}
		opened = append(opened, f)
		return f
	}
	p.cmd.Stderr = create(p.stderr)
	if p.cmd.Stdout = out; out == nil {
		p.cmd.Stdout = create(p.stdout)
	}
	p.cmd.Stdin, p.cmd.Dir, p.cmd.Env = stdin, b.dir, cleanEnvironment()
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		b.t.Fatalf("start %s: %v", name, err)
	}
	for _, f := range opened {
		f.Close()
	}
	if err := tellReaper(p.cmd.Process.Pid); err != nil {
		b.t.Fatalf("reaper: %v", err)
	}
	b.procs = append(b.procs, p)
	go func() {
		p.cmd.Wait() // the status is in ProcessState
		p.ended = time.Now()
		tellReaper(-p.cmd.Process.Pid)
		close(p.done)
	}()
	return p
}

// cleanEnvironment is this process's, without settings of Muster. The race
// detector gives other threads a second to report at exit, by default, which is
// most of the time that a tool runs; a tenth is left. And etcdctl gives up sooner than we do.
func cleanEnvironment() []string {
	var env []string
	for _, e := range os.Environ() {
		if !strings.HasPrefix(e, "MUSTER_") && !strings.HasPrefix(e, "ETCDCTL_") && !strings.HasPrefix(e, "GORACE=") {
			env = append(env, e)
		}
	}
	return append(env, "ETCDCTL_API=3", "ETCDCTL_DIAL_TIMEOUT=60s", "ETCDCTL_COMMAND_TIMEOUT=60s", fmt.Sprintf("GORACE=halt_on_error=0 exitcode=%d atexit_sleep_ms=100", raceStatus))
}

func (p *process) running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// state says how the process ended.
func (p *process) state() string {
	if p.running() {
		return "running"
	}
	return p.cmd.ProcessState.String()
}

func (p *process) signal(s syscall.Signal) {
	p.t.Helper()
	if err := syscall.Kill(p.cmd.Process.Pid, s); err != nil {
		p.t.Fatalf("%s to %s, which is %s: %v", s, p.name, p.state(), err)
	}
}

// kill ends the process and all that it started.
func (p *process) kill() {
	if p.running() {
		syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	}
	<-p.done
}

// exits waits for the end of the process and requires a status.
func (p *process) exits(status int, limit time.Duration) {
	p.t.Helper()
	select {
	case <-p.done:
	case <-time.After(limit):
		p.t.Fatalf("%s has not ended after %s", p.name, limit)
	}
	p.checkRaces()
	if got := p.cmd.ProcessState.ExitCode(); got != status {
		p.t.Fatalf("%s ended with %s, want exit status %d; stderr ends: %s", p.name, p.state(), status, tail(p.stderr))
	}
}

// checkRaces fails the test if the process, which has ended, saw a data race.
func (p *process) checkRaces() {
	p.races.Do(func() {
		data, err := os.ReadFile(p.stderr)
		if err != nil {
			p.t.Error(err)
		}
		if i := bytes.Index(data, []byte("DATA RACE")); i >= 0 {
			p.t.Errorf("data race in %s:\n%s", p.name, data[max(i-100, 0):min(i+6000, len(data))])
		}
		if p.cmd.ProcessState.ExitCode() == raceStatus {
			p.t.Errorf("%s ended with the status of a data race", p.name)
		}
	})
}

// freeze stops the process and returns when each of its threads stands.
func (p *process) freeze() {
	p.t.Helper()
	p.signal(syscall.SIGSTOP)
	stands := func(task string) bool {
		state, err := os.ReadFile(filepath.Join(task, "stat"))
		// The state follows the command's name, which is in parentheses.
		_, rest, ok := bytes.Cut(state, []byte(") "))
		return err != nil || ok && (rest[0] == 'T' || rest[0] == 'Z' || rest[0] == 'X')
	}
	for end := time.Now().Add(patience); !p.everyThread(stands); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(end) {
			p.t.Fatalf("%s does not stand after SIGSTOP", p.name)
		}
	}
}

func (p *process) thaw() { p.signal(syscall.SIGCONT) }

// writing tells of a frozen process whether it was stopped in the write of a
// record, with more to come: one thread stands in the system call write, or at its
// return, with file 1.
func (p *process) writing() bool {
	write := map[string]string{"amd64": "1 0x1 ", "arm64": "64 0x1 "}[runtime.GOARCH]
	return !p.everyThread(func(task string) bool {
		call, err := os.ReadFile(filepath.Join(task, "syscall"))
		// A kernel that does not tell must not hold us up.
		return err == nil && write != "" && !strings.HasPrefix(string(call), write)
	})
}

func (p *process) everyThread(is func(task string) bool) bool {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", p.cmd.Process.Pid))
	if err != nil {
		p.t.Fatal(err)
	}
	for _, task := range tasks {
		if !is(task) {
			return false
		}
	}
	return true
}

// size is how much the process has written to its stdout.
func (p *process) size() int64 {
	p.t.Helper()
	info, err := os.Stat(p.stdout)
	if err != nil {
		p.t.Fatal(err)
	}
	return info.Size()
}

// until polls a condition, and fails the test if it does not come true.
func until(t *testing.T, limit time.Duration, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %s: %s", limit, what)
		}
	}
}
