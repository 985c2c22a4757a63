package run

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/muster-io/muster/registry"
)

// The watchdog's ends of its pipes.
const (
	commandsFD = 3
	reportsFD  = 4
)

// How often it is looked whether anything of a child is left: at first often, since
// most end at once.
const (
	minLookPause = 2 * time.Millisecond
	maxLookPause = 100 * time.Millisecond
)

// unclearLimit is how long a child is not held to be gone because of a process without
// an environment. One that executes a program has none for a moment, and would show
// whose it is after that; one that has none for longer may have been started without.
const unclearLimit = 2 * time.Second

// watchdog owns the children. One goroutine does everything but what might wait.
type watchdog struct {
	reports  *lines
	lease    registry.LeaseID // 0 or below for none
	children map[uint64]*watched
	marks    map[string]uint64        // child by "<pid> <start>" of processes that were seen as its own
	unclear  map[string]time.Duration // when processes were first seen that nothing tells whose they are
	limit    time.Duration            // how long they count
	null     *os.File
	timerFD  int
	timer    *os.File // of timerFD, on the clock that runs through suspend; Go's timers stand still meanwhile
	pause    time.Duration
	look     time.Duration // when to look again what is left; 0 if nothing is ending
	asked    []*watched    // to stop; what has left their groups is still to be asked
	out      sync.Mutex    // for whole lines
}

// watched is a child, from its start until nothing of it is left.
type watched struct {
	id      uint64
	pid     int // and its process group, which is not used again before the process is reaped
	until   time.Duration
	exited  bool // not reaped yet
	dying   bool // everything of it is to be killed
	overdue bool
	empty   bool // nothing was left at the last look
}

// Watchdog is the second process's main function: it serves the process that started
// it until that closes the pipe or is gone, kills what is left, and returns. If the
// first process ended without having left its group, revoke is called last with its
// lease: what it owned is free then, and need not wait for the lease to run out. It must
// be called by the main goroutine of a process that does nothing else.
func Watchdog(revoke func(registry.LeaseID) error) error { return guard(revoke, unclearLimit) }

// guard is Watchdog; unclear is for how long a process without an environment counts.
func guard(revoke func(registry.LeaseID) error, unclear time.Duration) error {
	// A child is killed when the thread that started it ends: it must be one that
	// lasts as long as the process.
	runtime.LockOSThread()
	// Whoever asks all processes of a service to stop is to be obeyed by the first
	// process. The signals are caught rather than ignored: children would inherit that.
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGPIPE)
	exits := make(chan os.Signal, 1)
	signal.Notify(exits, unix.SIGCHLD)
	if err := becomeSubreaper(); err != nil {
		return err
	}
	w := &watchdog{reports: newLines(), children: map[uint64]*watched{}, marks: map[string]uint64{}, unclear: map[string]time.Duration{}, limit: unclear}
	var err error
	if w.null, err = os.Open(os.DevNull); err != nil {
		return err
	}
	defer w.null.Close()
	w.timerFD, err = unix.TimerfdCreate(unix.CLOCK_BOOTTIME, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	if err != nil {
		return fmt.Errorf("make a timer: %w", err)
	}
	w.timer = os.NewFile(uintptr(w.timerFD), "timer")
	unix.CloseOnExec(commandsFD)
	unix.CloseOnExec(reportsFD)
	go w.reports.run(os.NewFile(reportsFD, "reports")) // whoever should read may be stopped
	commands := make(chan command, 1000)
	go readLines(os.NewFile(commandsFD, "commands"), commands, nil) // ends with the process
	err = w.serve(commands, exits)
	if err == nil && w.lease > 0 {
		err = revoke(w.lease)
	}
	return err
}

func (w *watchdog) serve(commands <-chan command, exits <-chan os.Signal) error {
	ticks := make(chan struct{})
	go w.tick(ticks)
	for {
		select {
		case c, ok := <-commands:
			if !ok {
				for _, p := range w.children {
					_ = unix.Kill(-p.pid, unix.SIGKILL) // at once; then whatever else there is
				}
				return sweep()
			}
			w.obey(&c)
			for range len(commands) { // one look at all processes for many that are to stop
				if c, ok = <-commands; ok {
					w.obey(&c)
				}
			}
		case <-exits:
			w.pause = 0
		case <-ticks:
		}
		if err := w.turn(boottime()); err != nil {
			return errors.Join(err, sweep())
		}
	}
}

// turn does what follows from what has happened, and from the time.
func (w *watchdog) turn(now time.Duration) error {
	w.endOverdue(now)
	w.noteExits()
	return cmp.Or(w.askStrays(), w.lookAfter(now), w.setTimer())
}

// tick tells of each time that the timer fires.
func (w *watchdog) tick(ticks chan<- struct{}) {
	for {
		if _, err := w.timer.Read(make([]byte, 8)); err != nil {
			return
		}
		ticks <- struct{}{}
	}
}

func (w *watchdog) obey(c *command) {
	if c.Start != nil {
		w.start(c.Start)
	}
	for id, until := range c.Until {
		if p := w.children[id]; p != nil {
			p.until = until
		}
	}
	if p := w.children[c.Term]; p != nil {
		_ = unix.Kill(-p.pid, unix.SIGTERM)
		_ = unix.Kill(-p.pid, unix.SIGCONT) // one that is stopped could not hear it
		w.asked = append(w.asked, p)
	}
	if p := w.children[c.Kill]; p != nil {
		p.dying = true
		w.pause = 0
		_ = unix.Kill(-p.pid, unix.SIGKILL)
	}
	if c.Lease != 0 {
		w.lease = c.Lease
	}
	if c.Number != 0 {
		w.reports.send(report{Number: c.Number})
	}
}

func (w *watchdog) start(s *startCommand) {
	if boottime() >= s.Until {
		w.reports.send(report{Failed: &failedReport{ID: s.ID, Error: "its time was over", Late: true}})
		return
	}
	out, errOut, err := w.outputs(s.Prefix)
	if err == nil {
		defer out.close()
		defer errOut.close()
		var pid int
		pid, err = syscall.ForkExec(s.Path, s.Args, &syscall.ProcAttr{
			Env:   append(s.Env, fmt.Sprintf("%s=%d-%d", childVariable, os.Getpid(), s.ID)),
			Files: []uintptr{w.null.Fd(), out.child.Fd(), errOut.child.Fd()},
			Sys:   &syscall.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL},
		})
		if err == nil {
			w.children[s.ID] = &watched{id: s.ID, pid: pid, until: s.Until}
			w.reports.send(report{Started: &startedReport{ID: s.ID, PID: pid}})
			return
		}
	}
	fatal := false
	for _, e := range []error{unix.ENOENT, unix.EACCES, unix.ENOEXEC, unix.ENOTDIR, unix.EISDIR, unix.E2BIG} {
		fatal = fatal || errors.Is(err, e)
	}
	w.reports.send(report{Failed: &failedReport{ID: s.ID, Error: fmt.Sprintf("start %s: %v", s.Path, err), Fatal: fatal}})
}

// output is where a child writes to.
type output struct {
	child *os.File
	ours  bool // to be closed when the child has it
}

func (o output) close() {
	if o.ours {
		o.child.Close()
	}
}

// outputs are the watchdog's own, or pipes whose lines are copied there.
func (w *watchdog) outputs(prefix string) (out, errOut output, err error) {
	if prefix == "" {
		return output{child: os.Stdout}, output{child: os.Stderr}, nil
	}
	if out, err = w.copyLines(prefix, os.Stdout); err != nil {
		return out, errOut, err
	}
	if errOut, err = w.copyLines(prefix, os.Stderr); err != nil {
		out.close()
	}
	return out, errOut, err
}

// maxLine is where a line without end is broken.
const maxLine = 64 << 10

func (w *watchdog) copyLines(prefix string, to *os.File) (output, error) {
	r, child, err := os.Pipe()
	if err != nil {
		return output{}, err
	}
	go func() { // ends when nobody holds the other end, or with the process
		defer r.Close()
		b := bufio.NewReaderSize(r, maxLine)
		for {
			line, err := b.ReadSlice('\n')
			if len(line) > 0 {
				whole := append([]byte(prefix), bytes.TrimSuffix(line, []byte("\n"))...)
				w.out.Lock()
				_, _ = to.Write(append(whole, '\n'))
				w.out.Unlock()
			}
			if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
				return
			}
		}
	}()
	return output{child: child, ours: true}, nil
}

// askStrays asks what has left the process groups of children to stop with them.
func (w *watchdog) askStrays() error {
	if len(w.asked) == 0 {
		return nil
	}
	left, _, err := w.find()
	for _, p := range w.asked {
		for _, stray := range left[p.id] {
			if stray.group != p.pid {
				stray.signal(unix.SIGTERM)
			}
		}
	}
	w.asked = nil
	return err
}

// endOverdue kills the children whose time is over.
func (w *watchdog) endOverdue(now time.Duration) {
	for _, p := range w.children {
		if now >= p.until && !p.dying {
			p.dying, p.overdue = true, !p.exited
			w.pause = 0
			_ = unix.Kill(-p.pid, unix.SIGKILL)
		}
	}
}

// noteExits tells of the processes that have ended. They are not reaped yet: as
// long as they are there, their group is, and no other can have its number.
func (w *watchdog) noteExits() {
	for _, p := range w.children {
		if p.exited {
			continue
		}
		var info unix.Siginfo
		if err := unix.Waitid(unix.P_PID, p.pid, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil); err != nil || info.Signo == 0 {
			continue
		}
		p.exited = true
		w.pause = 0
		w.reports.send(report{Exited: &exitedReport{ID: p.id, Failure: failureOf(&info), Overdue: p.overdue}})
	}
}

// failureOf says how a process has failed.
func failureOf(info *unix.Siginfo) string {
	// The fields after the first three begin where a pointer could stand: the process, its
	// user, its status.
	const first = (3*4 + unsafe.Sizeof(uintptr(0)) - 1) &^ (unsafe.Sizeof(uintptr(0)) - 1)
	status := *(*int32)(unsafe.Add(unsafe.Pointer(info), first+2*4))
	const exited = 1 // CLD_EXITED
	switch {
	case info.Code != exited:
		return "signal: " + unix.Signal(status).String()
	case status != 0:
		return fmt.Sprintf("exit status %d", status)
	}
	return ""
}

// lookAfter looks, when it is time to, what is left of children that are ending, and
// kills it where it is to be killed.
func (w *watchdog) lookAfter(now time.Duration) error {
	ending := false
	for _, p := range w.children {
		ending = ending || p.exited || p.dying
	}
	if !ending {
		w.look, w.pause = 0, 0
		return nil
	}
	if w.pause != 0 && now < w.look {
		return nil
	}
	w.pause = min(max(2*w.pause, minLookPause), maxLookPause)
	left, unclear, err := w.find()
	if err != nil {
		return err
	}
	wait := w.mayShow(unclear, now)
	for _, p := range w.children {
		rest := left[p.id]
		if p.dying {
			_ = unix.Kill(-p.pid, unix.SIGKILL)
			for _, r := range rest {
				r.signal(unix.SIGKILL)
			}
		}
		if p.exited {
			w.settle(p, len(rest) == 0 && !wait)
		}
	}
	w.look = now + w.pause
	return nil
}

// mayShow tells whether one of the processes may show soon that it is of a child.
func (w *watchdog) mayShow(unclear []process, now time.Duration) bool {
	seen := make(map[string]time.Duration, len(unclear))
	young := false
	for _, p := range unclear {
		since, ok := w.unclear[p.key()]
		if !ok {
			since = now
		}
		seen[p.key()] = since
		young = young || now-since < w.limit
	}
	w.unclear = seen
	return young
}

// settle reaps a child of which nothing is left. One look is not enough for that: a
// process that was just being made may have been passed over. So the group, which its
// zombie still holds together, is killed, which passes over nobody, and looked at again.
func (w *watchdog) settle(p *watched, empty bool) {
	switch {
	case !empty:
		p.empty = false
	case !p.empty:
		p.empty = true
		w.pause = minLookPause
		_ = unix.Kill(-p.pid, unix.SIGKILL)
	default:
		_, _ = unix.Wait4(p.pid, nil, unix.WNOHANG, nil)
		delete(w.children, p.id)
		w.reports.send(report{Gone: p.id})
	}
}

// find returns the living processes of each child: those of its group, those that
// descend from one of them, and those that have its mark in their environment; and
// those that have no environment, which might be of any.
func (w *watchdog) find() (left map[uint64][]process, unclear []process, err error) {
	below, err := descendants()
	if err != nil {
		return nil, nil, fmt.Errorf("look for processes of children: %w", err)
	}
	self := os.Getpid()
	groups := make(map[int]uint64, len(w.children))
	for _, p := range w.children {
		groups[p.pid] = p.id
	}
	marks := make(map[string]uint64, len(below))
	left = map[uint64][]process{}
	for _, p := range below {
		if p.dead() {
			if _, ours := groups[p.pid]; !ours && p.parent == self {
				_, _ = unix.Wait4(p.pid, nil, unix.WNOHANG, nil)
			}
			continue
		}
		id, told := w.childOf(p, below, groups)
		if !told {
			unclear = append(unclear, p)
			continue
		}
		marks[p.key()] = id
		left[id] = append(left[id], p)
	}
	w.marks = marks
	return left, unclear, nil
}

// childOf is 0 for a process that cannot be told to be of one child. It is killed in
// the end, with all the rest. told is false where it has nothing that could tell.
func (w *watchdog) childOf(p process, below map[int]process, groups map[int]uint64) (id uint64, told bool) {
	for at, hops := p, 0; hops <= len(below); hops++ {
		if id := cmp.Or(groups[at.group], w.marks[at.key()]); id != 0 {
			return id, true
		}
		next, ok := below[at.parent]
		if !ok {
			break
		}
		at = next
	}
	return markOf(p.pid)
}

// markOf reads the mark off a process's environment; told is false where there is none.
func markOf(pid int) (id uint64, told bool) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		return 0, true // it is gone, or not ours to read
	}
	if len(data) == 0 {
		return 0, false
	}
	prefix := fmt.Sprintf("%s=%d-", childVariable, os.Getpid())
	for _, v := range strings.Split(string(data), "\x00") {
		if text, ok := strings.CutPrefix(v, prefix); ok {
			id, _ := strconv.ParseUint(text, 10, 64)
			return id, true
		}
	}
	return 0, true
}

// setTimer has serve wake when the next child's time is over, and for the next look.
func (w *watchdog) setTimer() error {
	at := w.look
	for _, p := range w.children {
		if !p.dying && (at == 0 || p.until < at) {
			at = max(p.until, 1) // 0 would be never
		}
	}
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(int64(at))}
	if err := unix.TimerfdSettime(w.timerFD, unix.TFD_TIMER_ABSTIME, &spec, nil); err != nil {
		return fmt.Errorf("set a timer: %w", err)
	}
	return nil
}
