package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	// startLimit bounds the wait for a process to do what it was started for.
	startLimit = 30 * time.Second
	// stopLimit bounds an orderly stop.
	stopLimit = 15 * time.Second
)

// process is a child. It is ended by its pid, and never outlives this program:
// the kernel kills it with us.
type process struct {
	name    string
	cmd     *exec.Cmd
	started time.Time
	log     string // file with its stderr
	exited  chan struct{}
	err     error // of Wait, once exited is closed
}

// spec says how a child is run. Nil stdin and stdout are /dev/null.
type spec struct {
	name   string
	args   []string
	env    []string // besides childEnv
	stdin  *os.File
	stdout *os.File
	lines  func(line string, at time.Time) // is given stdout line by line, in place of stdout
}

var processNumber atomic.Int64

// start runs a child; its stderr goes to a file of its own.
func (b *bench) start(s spec) (*process, error) {
	path := filepath.Join(b.dir, fmt.Sprintf("%03d-%s.log", processNumber.Add(1), s.name))
	log, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command(s.args[0], s.args[1:]...)
	cmd.Env = append(childEnv(), s.env...)
	cmd.Stderr = log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if s.stdin != nil {
		cmd.Stdin = s.stdin
	}
	if s.stdout != nil {
		cmd.Stdout = s.stdout
	}
	var out io.ReadCloser
	if s.lines != nil {
		if out, err = cmd.StdoutPipe(); err != nil {
			return nil, err
		}
	}
	p := &process{name: s.name, cmd: cmd, log: path, exited: make(chan struct{}), started: time.Now()}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", s.name, err)
	}
	go func() {
		if out != nil {
			scanLines(out, s.lines)
		}
		p.err = cmd.Wait() // after the last line: Wait closes the pipe
		close(p.exited)
	}()
	return p, nil
}

func scanLines(r io.Reader, f func(string, time.Time)) {
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			return
		}
		f(strings.TrimSuffix(line, "\n"), time.Now())
	}
}

// childEnv keeps settings of the caller's shell out of what is measured.
func childEnv() []string {
	env := []string{"ETCDCTL_API=3"}
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "MUSTER_") && !strings.HasPrefix(v, "ETCDCTL_") && !strings.HasPrefix(v, "KCAT_") {
			env = append(env, v)
		}
	}
	return env
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func (p *process) signal(s os.Signal) error {
	if err := p.cmd.Process.Signal(s); err != nil {
		return fmt.Errorf("%s (pid %d): %w", p.name, p.pid(), err)
	}
	return nil
}

// wait returns when the child has ended: nil if in order.
func (p *process) wait(ctx context.Context, limit time.Duration) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("still runs after %s", limit))
	defer cancel()
	select {
	case <-p.exited:
		return p.explain(p.err)
	case <-ctx.Done():
		return p.explain(context.Cause(ctx))
	}
}

// stop ends the child in order, and by force if it does not.
func (p *process) stop(ctx context.Context) error {
	select {
	case <-p.exited:
		return p.explain(errors.Join(errors.New("it has ended before it was asked to"), p.err))
	default:
	}
	err := p.signal(syscall.SIGTERM)
	if err == nil {
		err = p.wait(ctx, stopLimit)
	}
	p.kill()
	return err
}

// kill ends the child by force, if it still runs, and waits for it.
func (p *process) kill() {
	select {
	case <-p.exited:
		return
	default:
	}
	_ = p.cmd.Process.Kill() // the only error is that it has ended meanwhile
	<-p.exited
}

// explain adds what the child said last.
func (p *process) explain(err error) error {
	if err == nil {
		return nil
	}
	const most = 2000
	text := readText(p.log)
	if len(text) > most {
		text = "…" + text[len(text)-most:]
	}
	return fmt.Errorf("%s: %w\n%s", p.name, err, text)
}

// alive is an error once the child has ended.
func (p *process) alive() error {
	select {
	case <-p.exited:
		return p.explain(errors.Join(errors.New("it has ended"), p.err))
	default:
		return nil
	}
}

// call runs a child to its end.
func (b *bench) call(ctx context.Context, name string, args ...string) error {
	p, err := b.start(spec{name: name, args: args})
	if err != nil {
		return err
	}
	defer p.kill()
	return p.wait(ctx, startLimit)
}

// capture is call for a child that prints a little, which is returned.
func (b *bench) capture(ctx context.Context, name string, args ...string) (string, error) {
	var text strings.Builder
	p, err := b.start(spec{name: name, args: args, lines: func(line string, _ time.Time) {
		text.WriteString(line)
		text.WriteByte('\n')
	}})
	if err != nil {
		return "", err
	}
	defer p.kill()
	if err := p.wait(ctx, startLimit); err != nil {
		return "", err
	}
	return text.String(), nil
}

// until polls f until it is true or fails.
func until(ctx context.Context, every, limit time.Duration, what string, f func() (bool, error)) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("%s: not within %s", what, limit))
	defer cancel()
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		if ok, err := f(); ok || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// memory is what /proc/PID/status says, in MiB, since the kernel counts in KiB.
func (p *process) memory(field string) (float64, error) {
	text := lineAfter(readText(fmt.Sprintf("/proc/%d/status", p.pid())), field, ":")
	kib, err := strconv.ParseFloat(strings.TrimSuffix(text, " kB"), 64)
	if err != nil {
		return 0, fmt.Errorf("%s (pid %d): no %s in its status: %w", p.name, p.pid(), field, err)
	}
	return kib / 1024, nil
}

// cpu is the time that the child has used, of user and system. The kernel counts it in
// hundredths of a second.
func (p *process) cpu() (time.Duration, error) {
	_, rest, _ := strings.Cut(readText(fmt.Sprintf("/proc/%d/stat", p.pid())), ") ")
	fields := strings.Fields(rest) // from the third on: the second is the name, in parentheses
	if len(fields) < 13 {
		return 0, fmt.Errorf("%s (pid %d): no CPU time in its stat", p.name, p.pid())
	}
	user, err1 := strconv.ParseInt(fields[11], 10, 64)
	system, err2 := strconv.ParseInt(fields[12], 10, 64)
	return time.Duration(user+system) * 10 * time.Millisecond, errors.Join(err1, err2)
}

// written is how many bytes the child has given to write(2), sockets included.
func (p *process) written() (int64, error) {
	text := lineAfter(readText(fmt.Sprintf("/proc/%d/io", p.pid())), "wchar", ":")
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s (pid %d): no wchar in its io: %w", p.name, p.pid(), err)
	}
	return n, nil
}
