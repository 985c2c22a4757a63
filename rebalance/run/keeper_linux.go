package run

import (
	"fmt"
	"os"
	"os/exec"
	"time"

	"golang.org/x/sys/unix"
)

// answerWait is after the watchdog's end has been ordered, until its output is no
// more waited for.
const answerWait = time.Second

// keeper is the first process's end of a watchdog.
type keeper struct {
	cmd      *exec.Cmd
	commands *lines
	reports  chan report   // closed at the watchdog's end
	ended    chan struct{} // likewise, when it was reaped
	closing  time.Duration // how soon it must have ended by itself
}

// startKeeper starts a watchdog by the given command line.
func startKeeper(cfg *Config) (*keeper, error) {
	if err := becomeSubreaper(); err != nil {
		return nil, err
	}
	commands, toWatchdog, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start the watchdog: %w", err)
	}
	defer commands.Close()
	reports, fromWatchdog, err := os.Pipe()
	if err != nil {
		toWatchdog.Close()
		return nil, fmt.Errorf("start the watchdog: %w", err)
	}
	defer fromWatchdog.Close()
	k := &keeper{cmd: exec.Command(cfg.Watchdog[0], cfg.Watchdog[1:]...), commands: newLines(),
		reports: make(chan report, 100), ended: make(chan struct{}), closing: cfg.limits.closing}
	k.cmd.Stdout, k.cmd.Stderr, k.cmd.WaitDelay = cfg.Stdout, cfg.Stderr, answerWait
	k.cmd.ExtraFiles = []*os.File{commandsFD - 3: commands, reportsFD - 3: fromWatchdog}
	// In a session of its own it is not stopped with the first process from a terminal. And
	// when that dies while the watchdog is stopped for another reason, the kernel wakes
	// it. (It does so as well when only the thread ends that comes by here; no harm.)
	k.cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true, Pdeathsig: unix.SIGCONT}
	if err := k.cmd.Start(); err != nil {
		toWatchdog.Close()
		reports.Close()
		return nil, fmt.Errorf("start the watchdog: %w", err)
	}
	written := make(chan struct{})
	go func() {
		defer close(written)
		k.commands.run(toWatchdog)
	}()
	read := make(chan struct{})
	go func() {
		defer close(read)
		defer reports.Close()
		readLines(reports, k.reports, k.ended)
	}()
	go func() {
		_ = k.cmd.Wait() // how it ended makes no difference
		k.commands.close()
		<-written
		close(k.ended)
		<-read
	}()
	return k, nil
}

func (k *keeper) send(c command) { k.commands.send(c) }

// kill ends the watchdog, and with it its children.
func (k *keeper) kill() { _ = k.cmd.Process.Kill() }

// close has the watchdog kill what is left and end, and waits for that. One that
// does not, perhaps because it is stopped, is killed, and what it leaves behind too.
func (k *keeper) close() error {
	k.commands.close()
	late := time.AfterFunc(k.closing, k.kill)
	for range k.reports {
	}
	<-k.ended
	if late.Stop() {
		return nil
	}
	return sweep()
}
