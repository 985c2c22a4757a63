package run

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/muster-io/muster/registry"
)

// patience bounds what a test waits for. What a test starts to be killed lives longer.
const patience = time.Minute

// patientLimits are for tests in which the watchdog is not stopped, however slow it is.
var patientLimits = limits{missed: int(patience / feedPause), start: int(patience / feedPause), urgent: patience, closing: patience}

// watchdogCommand is the test binary, which is its own watchdog.
func watchdogCommand(unclear time.Duration) []string {
	return []string{"/proc/self/exe", "watchdog", unclear.String()}
}

func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "watchdog" {
		unclear, err := time.ParseDuration(os.Args[2])
		if err == nil {
			// What it revokes it writes into the directory of the test, where that looks.
			err = guard(func(lease registry.LeaseID) error {
				return os.WriteFile(filepath.Join(os.Getenv("D"), "revoked"), []byte(registry.LeaseText(lease)), 0o600)
			}, unclear)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "watchdog:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// kennel is a watchdog and what it has said.
type kennel struct {
	t *testing.T
	*keeper
	dir string
	ids uint64
}

func newKennel(t *testing.T) *kennel {
	t.Helper()
	return newKennelWith(t, Config{Watchdog: watchdogCommand(patience), Stdout: os.Stderr, Stderr: os.Stderr})
}

func newKennelWith(t *testing.T, cfg Config) *kennel {
	t.Helper()
	cfg.limits = patientLimits
	k, err := startKeeper(&cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := k.close(); err != nil {
			t.Error(err)
		}
		if err := sweep(); err != nil {
			t.Error(err)
		}
	})
	return &kennel{t: t, keeper: k, dir: t.TempDir()}
}

// start starts a shell script, which finds the test's directory as $D.
func (k *kennel) start(script string, life time.Duration) (id uint64, pid int) {
	k.t.Helper()
	k.ids++
	k.send(command{Start: &startCommand{ID: k.ids, Path: "/bin/sh", Args: []string{"sh", "-c", script},
		Env: append(os.Environ(), "D="+k.dir), Until: boottime() + life}})
	return k.ids, k.next(func(p report) bool { return p.Started != nil && p.Started.ID == k.ids }).Started.PID
}

// next passes over reports until one that is wanted.
func (k *kennel) next(wanted func(report) bool) report {
	k.t.Helper()
	limit := time.After(patience)
	for {
		select {
		case p, ok := <-k.reports:
			if !ok {
				k.t.Fatal("the watchdog has ended")
			}
			if p.Failed != nil && !wanted(p) {
				k.t.Fatalf("%+v", p.Failed)
			}
			if wanted(p) {
				return p
			}
		case <-limit:
			k.t.Fatal("the watchdog does not tell")
		}
	}
}

func (k *kennel) exited(id uint64) *exitedReport {
	k.t.Helper()
	return k.next(func(p report) bool { return p.Exited != nil && p.Exited.ID == id }).Exited
}

func (k *kennel) gone(id uint64) {
	k.t.Helper()
	k.next(func(p report) bool { return p.Gone == id })
}

// pid waits for a process to write its id into a file, which says that it is ready.
func (k *kennel) pid(name string) int {
	k.t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(time.Millisecond) {
		data, _ := os.ReadFile(filepath.Join(k.dir, name))
		if pid, err := strconv.Atoi(strings.TrimSuffix(string(data), "\n")); err == nil && strings.HasSuffix(string(data), "\n") {
			return pid
		}
	}
	k.t.Fatalf("nobody writes %s", name)
	return 0
}

func running(pid int) bool {
	p, ok := readProcess(pid)
	return ok && !p.dead()
}

// await waits until a process runs no more.
func await(t *testing.T, pids ...int) {
	t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(time.Millisecond) {
		left := 0
		for _, pid := range pids {
			if running(pid) {
				left++
			}
		}
		if left == 0 {
			return
		}
	}
	t.Fatalf("of %v, some run still", pids)
}

const (
	// forever does not stop when asked.
	forever = `trap '' TERM; echo $$ >$D/leader; while :; do sleep 1; done`
	// family has one process in its group that does not stop when asked, and one that
	// has left group, session and parents.
	family = `(trap '' TERM; sh -c 'echo $$ >$D/grandchild; while :; do sleep 1; done') &
		setsid sh -c 'trap "" TERM; sh -c "echo \$\$ >$D/stray; while :; do sleep 1; done" &' &
		while [ ! -s $D/grandchild ] || [ ! -s $D/stray ]; do sleep 0.01; done; `
)

func (k *kennel) family() []int { return []int{k.pid("grandchild"), k.pid("stray")} }

// How processes end is told as shells tell it.
func TestWatchdogTellsHowChildrenEnd(t *testing.T) {
	k := newKennel(t)
	for script, want := range map[string]string{"exit 0": "", "exit 3": "exit status 3", "kill -TERM $$": "signal: terminated", "kill -KILL $$": "signal: killed"} {
		id, _ := k.start(script, 10*patience)
		if e := k.exited(id); e.Failure != want || e.Overdue {
			t.Errorf("%s: %+v, want %q", script, e, want)
		}
		k.gone(id)
	}
}

// A child is killed when its time is over, with all that descends from it; one whose
// time is renewed is not.
func TestWatchdogKillsInTime(t *testing.T) {
	k := newKennel(t)
	const sleeper = "while :; do sleep 1; done"
	killed := func(id uint64, until time.Duration) {
		t.Helper()
		if e := k.exited(id); !e.Overdue || e.Failure != "signal: killed" {
			t.Errorf("%+v", e)
		}
		if now := boottime(); now < until {
			t.Errorf("killed %s before its time was over", until-now)
		}
		k.gone(id)
	}
	k.send(command{Number: 1})
	k.next(func(p report) bool { return p.Number == 1 }) // it is ready, and starts a child in a moment
	until := boottime() + 3*time.Second
	brief, _ := k.start(sleeper, 3*time.Second)
	killed(brief, until)
	overdue, pid := k.start(family+forever, 10*patience)
	pids := append(k.family(), pid)
	renewed, other := k.start(sleeper, 10*patience)
	until = boottime() + 4*time.Second
	k.send(command{Until: map[uint64]time.Duration{renewed: until, overdue: until}})
	k.send(command{Until: map[uint64]time.Duration{renewed: boottime() + 10*patience, 99: 0}})
	killed(overdue, until)
	for _, pid := range pids {
		if running(pid) {
			t.Errorf("process %d is left of what is gone", pid)
		}
	}
	if !running(other) {
		t.Error("the child whose time was renewed was killed, too")
	}
	k.send(command{Kill: renewed})
	k.gone(renewed)
}

// A child whose time is over before it is started is not.
func TestWatchdogStartsNothingTooLate(t *testing.T) {
	k := newKennel(t)
	k.send(command{Start: &startCommand{ID: 1, Path: "/bin/sh", Args: []string{"sh", "-c", "echo $$ >$D/leader"},
		Env: []string{"D=" + k.dir}, Until: boottime()}})
	if f := k.next(func(p report) bool { return p.Failed != nil }).Failed; !f.Late || f.Fatal {
		t.Errorf("%+v", f)
	}
	k.send(command{Start: &startCommand{ID: 2, Path: k.dir + "/nosuch", Args: []string{"x"}, Until: boottime() + 10*patience}})
	if f := k.next(func(p report) bool { return p.Failed != nil }).Failed; f.Late || !f.Fatal || !strings.Contains(f.Error, "no such file") {
		t.Errorf("%+v", f)
	}
	if _, err := os.Stat(k.dir + "/leader"); err == nil {
		t.Error("it was started all the same")
	}
}

// What a process leaves behind is told of as its end, and asked to stop as it is; only
// when all is gone, the child is.
func TestWatchdogCountsWhatIsLeftBehind(t *testing.T) {
	k := newKennel(t)
	id, _ := k.start(family+"exit 0", 10*patience) // or its end would come by itself
	pids := k.family()
	k.exited(id)
	k.send(command{Term: id, Number: 1})
	k.next(func(p report) bool {
		if p.Gone != 0 {
			t.Fatal("gone though two processes run")
		}
		return p.Number == 1
	})
	for _, pid := range pids {
		if !running(pid) {
			t.Errorf("process %d does not ignore SIGTERM", pid)
		}
	}
	k.send(command{Kill: id})
	k.gone(id)
	for _, pid := range pids {
		if running(pid) {
			t.Errorf("process %d is left", pid)
		}
	}
}

// A process that was seen below a child is counted as its own when nothing shows it any
// more: not its group, its parents or its environment.
func TestWatchdogRemembersWhoseAProcessWas(t *testing.T) {
	k := newKennel(t)
	id, _ := k.start(`setsid env -i PATH="$PATH" sh -c "trap '' TERM; echo \$\$ >$D/stray; while :; do sleep 1; done" & `+forever, 10*patience)
	k.pid("leader")
	stray := k.pid("stray")
	k.send(command{Term: id, Number: 1})
	for n := range uint64(2) { // it has looked by the second answer
		k.send(command{Number: n + 2})
		k.next(func(p report) bool { return p.Number == n+2 })
	}
	k.send(command{Kill: id})
	k.gone(id)
	if running(stray) {
		t.Error("it runs on")
	}
}

// SIGTERM reaches all processes of a child, also the one that left its group.
func TestWatchdogAsksAllToStop(t *testing.T) {
	k := newKennel(t)
	id, _ := k.start(`sh -c 'trap "echo \$\$ >$D/asked1; exit" TERM; echo $$ >$D/grandchild; while :; do sleep 0.01; done' &
		setsid sh -c 'trap "echo \$\$ >$D/asked2; exit" TERM; echo $$ >$D/stray; while :; do sleep 0.01; done' &
		trap "wait" TERM; echo $$ >$D/leader; while :; do sleep 0.01; done`, 10*patience)
	k.family()
	k.pid("leader")
	k.send(command{Term: id})
	k.pid("asked1")
	k.pid("asked2")
	k.send(command{Kill: id})
	k.gone(id)
}

// When the pipe closes, whoever held it, everything is killed.
func TestWatchdogKillsAllWhenLeftAlone(t *testing.T) {
	k := newKennel(t)
	_, one := k.start(family+forever, 10*patience)
	_, two := k.start("while :; do sleep 1; done", 10*patience)
	pids := append(k.family(), one, two)
	if err := k.close(); err != nil {
		t.Error(err)
	}
	for _, pid := range pids {
		if running(pid) {
			t.Errorf("process %d is left", pid)
		}
	}
}

// Nothing is left either when the watchdog is stopped and has to be killed.
func TestNothingIsLeftOfAStoppedWatchdog(t *testing.T) {
	k := newKennel(t)
	_, pid := k.start(family+forever, 10*patience)
	pids := append(k.family(), pid)
	if err := k.cmd.Process.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	k.closing = usualLimits().closing
	if err := k.close(); err != nil {
		t.Error(err)
	}
	for _, pid := range pids {
		if running(pid) {
			t.Errorf("process %d is left", pid)
		}
	}
}

// A child that is stopped, as by SIGSTOP, is asked and killed like any other.
func TestWatchdogEndsStoppedChildren(t *testing.T) {
	k := newKennel(t)
	id, pid := k.start("trap 'exit 7' TERM; echo $$ >$D/leader; while :; do sleep 0.01; done", 10*patience)
	k.pid("leader")
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	k.send(command{Term: id})
	if e := k.exited(id); e.Failure != "exit status 7" {
		t.Errorf("%+v", e)
	}
	k.gone(id)
}

// When the watchdog is killed, so are the children; what had left them is found.
func TestWatchdogDoesNotOutliveItsChildren(t *testing.T) {
	k := newKennel(t)
	_, pid := k.start(family+forever, 10*patience)
	strays := k.family()
	k.kill()
	for range k.reports {
	}
	<-k.ended
	await(t, pid)
	if err := sweep(); err != nil {
		t.Fatal(err)
	}
	for _, pid := range strays {
		if running(pid) {
			t.Errorf("process %d is left", pid)
		}
	}
}

// Signals for the whole service are the first process's business, and what a child
// inherits is as usual: nothing is ignored or blocked.
func TestWatchdogIsNotStoppedBySignals(t *testing.T) {
	k := newKennel(t)
	k.send(command{Number: 1})
	k.next(func(p report) bool { return p.Number == 1 }) // it is ready
	for _, sig := range []unix.Signal{unix.SIGTERM, unix.SIGINT, unix.SIGHUP, unix.SIGPIPE} {
		if err := k.cmd.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
	}
	id, _ := k.start(`cat /proc/self/status >$D/status; ls -l /proc/$$/fd >$D/files; ps -o pgid= -p $$ | tr -d ' ' >$D/group; echo $$ >$D/leader`, 10*patience)
	k.gone(id)
	status, err := os.ReadFile(k.dir + "/status")
	if err != nil {
		t.Fatal(err)
	}
	for _, mask := range []string{"SigBlk", "SigIgn"} {
		if !strings.Contains(string(status), mask+":\t0000000000000000\n") {
			t.Errorf("%s is not empty: %s", mask, status)
		}
	}
	files, err := os.ReadFile(k.dir + "/files")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range []int{commandsFD, reportsFD} {
		pipe, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", k.cmd.Process.Pid, fd))
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(files), pipe) {
			t.Errorf("the child holds the watchdog's %s: %s", pipe, files)
		}
	}
	if k.pid("group") != k.pid("leader") {
		t.Error("the child has no process group of its own")
	}
}

// Lines that are copied come whole, with their prefix, also the last one without end.
func TestWatchdogCopiesLines(t *testing.T) {
	dir := t.TempDir()
	out, err := os.Create(dir + "/out")
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	k := newKennelWith(t, Config{Watchdog: watchdogCommand(patience), Stdout: out, Stderr: out})
	const n = 20
	for i := range n {
		k.send(command{Start: &startCommand{ID: uint64(i + 1), Path: "/bin/sh", Prefix: fmt.Sprintf("p%d ", i), Until: boottime() + 10*patience,
			Args: []string{"sh", "-c", "for i in 1 2 3; do echo line $i; echo error $i >&2; done; printf end"}}})
	}
	for range n {
		k.next(func(p report) bool { return p.Gone != 0 })
	}
	want := map[string]bool{}
	for i := range n {
		want[fmt.Sprintf("p%d end", i)] = true
		for j := 1; j <= 3; j++ {
			want[fmt.Sprintf("p%d line %d", i, j)] = true
			want[fmt.Sprintf("p%d error %d", i, j)] = true
		}
	}
	var text []byte
	for end := time.Now().Add(patience); time.Now().Before(end) && strings.Count(string(text), "\n") < len(want); time.Sleep(time.Millisecond) {
		text, _ = os.ReadFile(dir + "/out")
	}
	if err := k.close(); err != nil {
		t.Error(err)
	}
	for _, line := range strings.Split(strings.TrimSuffix(string(text), "\n"), "\n") {
		if !want[line] {
			t.Errorf("line %q", line)
		}
		delete(want, line)
	}
	if len(want) > 0 {
		t.Errorf("%d lines did not come", len(want))
	}
}
