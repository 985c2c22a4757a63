package run

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// process is a line of /proc/<pid>/stat. start tells a process from a later one of
// the same id.
type process struct {
	pid, parent, group int
	state              byte
	start              string
}

// dead tells whether it only waits for its parent to take note of its end.
func (p process) dead() bool { return p.state == 'Z' || p.state == 'X' }

func (p process) key() string { return strconv.Itoa(p.pid) + " " + p.start }

// readProcess is not ok for a process that is no more.
func readProcess(pid int) (p process, ok bool) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return p, false
	}
	// The name, in parentheses, may hold anything.
	rest := bytes.Fields(data[bytes.LastIndexByte(data, ')')+1:])
	if len(rest) < 20 {
		return p, false
	}
	p = process{pid: pid, state: rest[0][0], start: string(rest[19])}
	p.parent, _ = strconv.Atoi(string(rest[1]))
	p.group, _ = strconv.Atoi(string(rest[2]))
	return p, true
}

// descendants are the processes below this one, by their ids.
func descendants() (map[int]process, error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	all := make(map[int]process, len(names))
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if p, ok := readProcess(pid); ok {
			all[pid] = p
		}
	}
	self := os.Getpid()
	below := map[int]process{}
	for pid, p := range all {
		// A parent may end, and its id be used again, while the list is read: no chain is
		// longer than the list.
		for at, hops := p, 0; hops <= len(all); hops++ {
			if at.parent == self {
				below[pid] = p
				break
			}
			next, ok := all[at.parent]
			if !ok {
				break
			}
			at = next
		}
	}
	return below, nil
}

// signal sends to this very process, and to no later one of the same id.
func (p process) signal(sig unix.Signal) {
	fd, err := unix.PidfdOpen(p.pid, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if now, ok := readProcess(p.pid); ok && now.start == p.start {
		_ = unix.PidfdSendSignal(fd, sig, nil, 0) // who may not be killed is seen to be left
	}
}

// becomeSubreaper makes this process the parent of what loses its own below it.
func becomeSubreaper() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become a subreaper: %w", err)
	}
	return nil
}

// boottime is a clock that runs on while the machine is suspended, as leases do.
func boottime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic("CLOCK_BOOTTIME: " + err.Error()) // it is in every kernel that Go runs on
	}
	return time.Duration(ts.Nano())
}

// sweepPause is between two looks for processes that were killed.
const sweepPause = 5 * time.Millisecond

// sweep kills all that descends from this process, and returns when nothing is left.
func sweep() error {
	for {
		below, err := descendants()
		if err != nil {
			return fmt.Errorf("look for processes left behind: %w", err)
		}
		if len(below) == 0 {
			return nil
		}
		for _, p := range below {
			if !p.dead() {
				p.signal(unix.SIGKILL)
			} else if p.parent == os.Getpid() {
				_, _ = unix.Wait4(p.pid, nil, unix.WNOHANG, nil)
			}
		}
		time.Sleep(sweepPause)
	}
}
