package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/registrytest"
)

// A child that says in a journal what it does: a line of its partition, its fence, the
// process that was started, its own process, and when. It goes on for a while
// when it is told to stop. So does another process that it has started, which has left
// its group and session, and does not stop when told.
const worker = `
export LEADER=$$
say='echo "$MUSTER_PARTITION $MUSTER_FENCE $LEADER $$ $(date +%s%N)" >>$JOURNAL'
setsid sh -c "trap '' TERM; while :; do $say; sleep 0.02; done" &
trap 'for i in 1 2 3 4 5 6 7 8 9 10; do eval "$say"; sleep 0.02; done; exit 0' TERM
while :; do eval "$say"; sleep 0.02; done`

// runPatience is for what is to happen at once or after the short leases of some tests, and
// not only when a lease of runTTL has run out.
const (
	runPatience = 40 * time.Second
	runTTL      = "60s"
)

// runGroup is a group of muster run processes on an etcd of their own, with a topic
// of four partitions without a log.
type runGroup struct {
	t       *testing.T
	st      *registrytest.Server
	journal string
	owners  string
	members int
}

func newRunGroup(t *testing.T) *runGroup {
	t.Helper()
	g := &runGroup{t: t, st: registrytest.Start(t), journal: filepath.Join(t.TempDir(), "journal"), owners: registry.Root("").Group("g").Owners()}
	spec := registry.TopicSpec{Name: "shards", Partitions: 4, NoLog: true}
	if _, err := registry.CreateTopic(t.Context(), g.st, "", spec, nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// Everything that has to do with this test has the journal in its environment.
		var left []int
		defer func() {
			for _, pid := range left {
				_, command := describeProcess(pid)
				t.Logf("process %d: %s", pid, command)
			}
		}()
		g.eventually("processes are left behind", func() bool {
			left = g.processes()
			return len(left) == 0
		})
	})
	return g
}

// member is a muster run process.
type member struct {
	g   *runGroup
	id  string
	cmd *exec.Cmd
	out lockedBuffer
	err lockedBuffer
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// run starts a member with flags and then, after --, a command. Flags win over those given here.
func (g *runGroup) run(args ...string) *member {
	g.t.Helper()
	g.members++
	m := &member{g: g, id: fmt.Sprintf("m%d", g.members)}
	args = append([]string{"run", "--etcd-endpoints", g.st.Endpoint, "--group", "g", "--topic", "shards", "--id", m.id,
		"--session-timeout", runTTL, "--grace", "300ms"}, args...)
	m.cmd = exec.Command("/proc/self/exe", args...)
	m.cmd.Env = append(os.Environ(), asMuster+"=1", "JOURNAL="+g.journal)
	m.cmd.Stdout, m.cmd.Stderr = &m.out, &m.err
	m.cmd.WaitDelay = runPatience / 2
	if err := m.cmd.Start(); err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() {
		_ = m.cmd.Process.Kill()
		_ = m.cmd.Wait()
		if g.t.Failed() {
			g.t.Logf("stderr of process %d:\n%s", m.cmd.Process.Pid, m.err.String())
		}
	})
	return m
}

func (m *member) signal(sig syscall.Signal) {
	m.g.t.Helper()
	if err := m.cmd.Process.Signal(sig); err != nil {
		m.g.t.Fatal(err)
	}
}

// wait waits for the end and returns the exit status.
func (m *member) wait() int {
	m.g.t.Helper()
	done := make(chan error, 1)
	go func() { done <- m.cmd.Wait() }()
	select {
	case err := <-done:
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			return exit.ExitCode()
		} else if err != nil && !errors.Is(err, exec.ErrWaitDelay) {
			m.g.t.Fatal(err)
		}
		return 0
	case <-time.After(runPatience):
		m.g.t.Fatalf("process %d does not end", m.cmd.Process.Pid)
		return 0
	}
}

// watchdog is the second process of the member.
func (m *member) watchdog() int {
	m.g.t.Helper()
	var found int
	m.g.eventually("no watchdog", func() bool {
		found = m.watchdogNow()
		return found != 0
	})
	return found
}

// watchdogNow is 0 where there is none.
func (m *member) watchdogNow() int {
	m.g.t.Helper()
	for _, pid := range m.g.processes() {
		if parent, command := describeProcess(pid); parent == m.cmd.Process.Pid && strings.Contains(command, watchdogCommandName) {
			return pid
		}
	}
	return 0
}

// freeze stops the member while it has a watchdog. One that is about to replace it, as it
// does of itself when that was silent for long, is let go on before.
func (m *member) freeze(fit func(watchdog int) bool) {
	m.g.t.Helper()
	m.g.eventually("no watchdog", func() bool {
		m.signal(syscall.SIGSTOP)
		m.g.eventually("it does not stop", func() bool { return isStopped(m.cmd.Process.Pid) })
		if pid := m.watchdogNow(); pid != 0 && fit(pid) {
			return true
		}
		m.signal(syscall.SIGCONT)
		time.Sleep(100 * time.Millisecond) // in which it gets on
		return false
	})
}

func isStopped(pid int) bool {
	state, _ := processStat(pid)
	return state == 'T'
}

// processStat is 0 for a process that is no more, or only waits for its parent.
func processStat(pid int) (state byte, parent int) {
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 2 || fields[0][0] == 'Z' || fields[0][0] == 'X' {
		return 0, 0
	}
	parent, _ = strconv.Atoi(string(fields[1]))
	return fields[0][0], parent
}

func describeProcess(pid int) (parent int, command string) {
	_, parent = processStat(pid)
	line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return parent, string(line)
}

// processes are all that live and have the journal in their environment.
func (g *runGroup) processes() []int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		g.t.Fatal(err)
	}
	var list []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if parent, _ := describeProcess(pid); err == nil && parent != 0 && bytes.Contains(env, []byte("JOURNAL="+g.journal+"\x00")) {
			list = append(list, pid)
		}
	}
	return list
}

func (g *runGroup) eventually(what string, ok func() bool) {
	g.t.Helper()
	for end := time.Now().Add(runPatience); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			g.t.Fatal(what)
		}
	}
}

// span is when a child, and what it had started, was seen at work.
type span struct {
	partition, leader int
	fence             int64
	first, last       time.Time
	pids              map[int]bool
}

func (g *runGroup) journalText() string {
	g.t.Helper()
	data, err := os.ReadFile(g.journal)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		g.t.Fatal(err)
	}
	return string(data)
}

// spans reads the journal.
func (g *runGroup) spans() []*span {
	g.t.Helper()
	type key struct {
		partition, leader int
		fence             int64
	}
	found := map[key]*span{}
	var list []*span
	for _, line := range strings.Split(g.journalText(), "\n") {
		var k key
		var pid int
		var at int64
		if n, _ := fmt.Sscan(line, &k.partition, &k.fence, &k.leader, &pid, &at); n < 5 {
			continue // date was killed, or the line is not complete yet
		}
		s := found[k]
		if s == nil {
			s = &span{partition: k.partition, leader: k.leader, fence: k.fence, first: time.Unix(0, at), pids: map[int]bool{}}
			found[k] = s
			list = append(list, s)
		}
		s.last = time.Unix(0, at)
		s.pids[pid] = true
	}
	slices.SortStableFunc(list, func(a, b *span) int { return cmp.Or(cmp.Compare(a.partition, b.partition), a.first.Compare(b.first)) })
	return list
}

// noTwoAtOnce holds the journal to the promise.
func (g *runGroup) noTwoAtOnce() {
	g.t.Helper()
	list := g.spans()
	for i, s := range list[:max(len(list)-1, 0)] {
		next := list[i+1]
		if next.partition != s.partition {
			continue
		}
		if next.first.Before(s.last) {
			g.t.Errorf("partition %d: process %d of fence %d was at work %s after process %d of fence %d had begun",
				s.partition, s.leader, s.fence, s.last.Sub(next.first), next.leader, next.fence)
		}
		if next.fence < s.fence {
			g.t.Errorf("partition %d: fence %d after %d", s.partition, next.fence, s.fence)
		}
	}
}

// atWork waits until each partition has a child that was started after a moment, both
// of whose processes are at work, and returns how many children there have been.
func (g *runGroup) atWork(since time.Time) int {
	g.t.Helper()
	var n int
	g.eventually("not all partitions have a new child", func() bool {
		list := g.spans()
		n = len(list)
		fresh := map[int]bool{}
		for _, s := range list {
			if s.first.After(since) && len(s.pids) == 2 {
				fresh[s.partition] = true
			}
		}
		return len(fresh) == 4
	})
	return n
}

// turn is an ownership of a partition.
type turn struct {
	partition int
	fence     int64
}

// turns are the ownerships under which a child, and what it had started, was at work.
func (g *runGroup) turns() map[turn]bool {
	g.t.Helper()
	found := map[turn]bool{}
	for _, s := range g.spans() {
		if len(s.pids) == 2 {
			found[turn{s.partition, s.fence}] = true
		}
	}
	return found
}

// owns waits until each member owns so many partitions, and nobody else any, with a child
// at work on each.
func (g *runGroup) owns(want map[*member]int) {
	g.t.Helper()
	named := map[string]int{}
	for m, n := range want {
		named[m.id] = n
	}
	g.eventually(fmt.Sprintf("partitions are not divided as %v", named), func() bool {
		at := g.turns()
		got := map[string]int{}
		for _, kv := range g.ownerKeys() {
			number, err := strconv.Atoi(kv.Key[strings.LastIndexByte(kv.Key, '-')+1:])
			if err != nil {
				g.t.Fatal(err)
			}
			if !at[turn{number, kv.CreateRevision}] {
				return false
			}
			got[strings.TrimSuffix(string(kv.Value), "-0")]++
		}
		return maps.Equal(got, named)
	})
}

func (g *runGroup) ownerKeys() []registry.KV {
	g.t.Helper()
	kvs, _, err := registry.List(g.t.Context(), g.st, g.owners, 0)
	if err != nil {
		g.t.Fatal(err)
	}
	return kvs
}

// watchReleases reports owner keys that are deleted while a child lives that was
// started under them.
func (g *runGroup) watchReleases() (deleted func() int) {
	g.t.Helper()
	var mu sync.Mutex
	n := 0
	held := map[string]int64{}
	ctx, cancel := context.WithCancel(context.Background())
	v, err := registry.OpenView(ctx, g.st, []string{g.owners}, registry.ViewOptions{}, func(_ registry.Snapshot, events []registry.Event) {
		mu.Lock()
		defer mu.Unlock()
		for _, e := range events {
			if !e.Deleted {
				held[e.Key] = e.CreateRevision
				continue
			}
			n++
			for _, s := range g.spans() {
				if strings.HasSuffix(e.Key, fmt.Sprintf("/0-%d", s.partition)) && s.fence == held[e.Key] {
					for pid := range s.pids {
						if parent, _ := describeProcess(pid); parent != 0 {
							g.t.Errorf("%s was deleted while process %d of it was there", e.Key, pid)
						}
					}
				}
			}
		}
	})
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { v.Close(); cancel() })
	return func() int { mu.Lock(); defer mu.Unlock(); return n }
}

// Partitions go from member to member: the child of the one, with all that it has
// started, is gone before the owner key is, and so before the child of the other starts.
func TestRunHandsOver(t *testing.T) {
	g := newRunGroup(t)
	deleted := g.watchReleases()
	first := g.run("--", "sh", "-c", worker)
	g.owns(map[*member]int{first: 4})
	second := g.run("--", "sh", "-c", worker)
	g.owns(map[*member]int{first: 2, second: 2})
	first.signal(syscall.SIGTERM)
	if status := first.wait(); status != 0 {
		t.Errorf("exit status %d", status)
	}
	g.owns(map[*member]int{second: 4})
	second.signal(syscall.SIGINT)
	if status := second.wait(); status != 0 {
		t.Errorf("exit status %d", status)
	}
	g.eventually("owner keys are left", func() bool { return deleted() == 8 })
	if keys := g.ownerKeys(); len(keys) > 0 {
		t.Errorf("left: %v", keys)
	}
	g.noTwoAtOnce()
}

// A member that is killed takes its children along, at once, and then its lease: the
// children of the other begin within half a second, after the end of the former ones
// and long before the lease would have run out. A machine that is busy with other
// things may need another try for that; one that is slow has half of the time in which
// a member joins.
func TestRunKilled(t *testing.T) {
	const soon, tries = 500 * time.Millisecond, 10
	g := newRunGroup(t)
	other := g.run("--", "sh", "-c", worker)
	g.owns(map[*member]int{other: 4})
	quick := false
	for try := 0; try < tries && !quick; try++ {
		began := time.Now()
		first := g.run("--", "sh", "-c", worker)
		g.owns(map[*member]int{other: 2, first: 2})
		killed := time.Now()
		first.signal(syscall.SIGKILL)
		g.owns(map[*member]int{other: 4})
		took := time.Duration(0)
		for _, s := range g.spans() {
			if s.first.After(killed) {
				took = max(took, s.first.Sub(killed))
			}
		}
		limit := max(soon, killed.Sub(began)/2)
		t.Logf("taken over after %s, want %s", took, limit)
		quick = took <= limit
	}
	// By now a former child that had been left would have gone on writing.
	seen := len(g.journalText())
	g.eventually("nobody is at work", func() bool { return len(g.journalText()) > seen+1000 })
	g.noTwoAtOnce()
	if !quick {
		t.Error("not once taken over in time")
	}
}

// A member that is stopped for longer than its lease lasts has no child when another
// has its partitions, and starts new ones when it goes on. Its watchdog has a tenth of the
// lease for that: 2 s, longer than a busy machine keeps it from its work.
func TestRunStopped(t *testing.T) {
	g := newRunGroup(t)
	first := g.run("--session-timeout", "20s", "--", "sh", "-c", worker)
	g.owns(map[*member]int{first: 4})
	second := g.run("--", "sh", "-c", worker)
	for range 2 {
		g.owns(map[*member]int{first: 2, second: 2})
		first.freeze(func(watchdog int) bool { return !isStopped(watchdog) })
		g.owns(map[*member]int{second: 4})
		g.noTwoAtOnce()
		first.signal(syscall.SIGCONT)
	}
	g.owns(map[*member]int{first: 2, second: 2})
	g.noTwoAtOnce()
}

// A member that is killed while its watchdog is stopped: the kernel wakes that.
func TestRunKilledWhileTheWatchdogIsStopped(t *testing.T) {
	g := newRunGroup(t)
	first := g.run("--", "sh", "-c", worker)
	g.owns(map[*member]int{first: 4})
	// Frozen, since it would soon replace a watchdog that is stopped.
	first.freeze(func(watchdog int) bool { return syscall.Kill(watchdog, syscall.SIGSTOP) == nil })
	first.signal(syscall.SIGKILL)
	second := g.run("--", "sh", "-c", worker)
	g.owns(map[*member]int{second: 4})
	if n := len(g.turns()); n != 8 {
		t.Errorf("%d ownerships, want 8", n)
	}
	g.noTwoAtOnce()
}

// When the watchdog is killed, or stopped, its children end before others are started.
func TestRunWithoutWatchdog(t *testing.T) {
	for name, sig := range map[string]syscall.Signal{"killed": syscall.SIGKILL, "stopped": syscall.SIGSTOP} {
		t.Run(name, func(t *testing.T) {
			g := newRunGroup(t)
			m := g.run("--", "sh", "-c", worker)
			g.owns(map[*member]int{m: 4})
			former, began := m.watchdog(), time.Now()
			if err := syscall.Kill(former, sig); err != nil {
				t.Fatal(err)
			}
			children := g.atWork(began)
			if now := m.watchdog(); now == former {
				t.Error("no other watchdog")
			}
			if n := len(g.turns()); n != 4 {
				t.Errorf("%d ownerships, want the 4 of before", n)
			}
			g.noTwoAtOnce()
			m.signal(syscall.SIGTERM)
			if status := m.wait(); status != 0 {
				t.Errorf("exit status %d", status)
			}
			// A watchdog that was kept from its work for long may have been replaced besides.
			if ended := strings.Count(m.err.String(), "watchdog ended"); ended == 0 || children > 4+4*ended {
				t.Errorf("%d children, and %d watchdogs have ended", children, ended)
			}
		})
	}
}

// Three members to whom and to whose watchdogs things happen, several at a time: at no
// moment two children of a partition, and in the end one of each.
func TestRunRandomly(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	t.Logf("seed %d", seed)
	g := newRunGroup(t)
	// Of a lease of 10 s the watchdog has 1 s to kill the children of a member that is stopped.
	const lease = 10 * time.Second
	start := func() *member { return g.run("--session-timeout", lease.String(), "--", "sh", "-c", worker) }
	members := []*member{start(), start(), start()}
	g.atWork(time.Time{})
	stopped := map[int]bool{}
	hurt := map[*member]int{} // watchdogs that are to be replaced
	// One of the two processes must be there to look after the children. What happens to
	// the first one while it is about to replace the second is not covered.
	healed := func(m *member) {
		if former, ok := hurt[m]; ok {
			g.eventually("no other watchdog", func() bool { return m.watchdog() != former })
			delete(hurt, m)
		}
	}
	for range 25 {
		time.Sleep(time.Duration(r.IntN(800)) * time.Millisecond) // the pace of events, not a wait for anything
		i := r.IntN(len(members))
		m := members[i]
		if stopped[i] {
			m.signal(syscall.SIGCONT)
			delete(stopped, i)
			continue
		}
		what := r.IntN(6)
		t.Log(time.Now().Format("05.000"), []string{"kill", "stop", "stop", "watchdog killed", "watchdog stopped", "leave"}[what], m.cmd.Process.Pid)
		switch what {
		case 0:
			m.freeze(func(int) bool { return true }) // one that is stopped is awakened by the kernel
			m.signal(syscall.SIGKILL)
			members[i] = start()
		case 1, 2:
			healed(m)
			m.freeze(func(watchdog int) bool { return !isStopped(watchdog) })
			stopped[i] = true
		case 3, 4:
			healed(m)
			hurt[m] = m.watchdog()
			_ = syscall.Kill(hurt[m], map[int]syscall.Signal{3: syscall.SIGKILL, 4: syscall.SIGSTOP}[what])
		case 5:
			m.signal(syscall.SIGTERM)
			// One that had not come to ask for signals ends of this one, having done nothing.
			if status := m.wait(); status != 0 && (status != -1 || m.err.String() != "") {
				t.Errorf("exit status %d", status)
			}
			members[i] = start()
		}
	}
	for i := range stopped {
		members[i].signal(syscall.SIGCONT)
	}
	for _, m := range members { // since the end of the test kills the first processes
		healed(m)
	}
	// Whoever was stopped for too long is dead to the others by then.
	late := time.Now().Add(lease)
	g.eventually("partitions without a child at work", func() bool {
		at := map[int]bool{}
		for _, s := range g.spans() {
			if s.last.After(late) && len(s.pids) == 2 {
				at[s.partition] = true
			}
		}
		return len(at) == 4
	})
	g.noTwoAtOnce()
}

// A child that ends is started again, not at once; nothing of the one before is left.
func TestRunStartsAgain(t *testing.T) {
	g := newRunGroup(t)
	m := g.run("--", "sh", "-c", worker+` & until grep -qs "$MUSTER_FENCE $$ " $JOURNAL; do sleep 0.1; done; sleep 0.3; exit 1`)
	g.eventually("nothing was started again", func() bool { return len(g.spans()) >= 8 })
	m.signal(syscall.SIGTERM)
	if status := m.wait(); status != 0 {
		t.Errorf("exit status %d", status)
	}
	g.noTwoAtOnce()
	for _, s := range g.spans() {
		for _, next := range g.spans() {
			if pause := next.first.Sub(s.last); next.partition == s.partition && pause > 0 && pause < 900*time.Millisecond {
				t.Errorf("partition %d: started again after %s", s.partition, pause)
			}
		}
	}
}

// How a run ends by itself.
func TestRunEnds(t *testing.T) {
	g := newRunGroup(t)
	for _, c := range []struct {
		args   []string
		status int
		says   string
	}{
		{[]string{"--", "/nosuch/program"}, 1, "no such program"},
		{[]string{"--", "/nosuch/{partition}"}, 1, "/nosuch/"},
		{[]string{"--on-exit", "stop", "--", "true"}, 0, ""},
		{[]string{"--on-exit", "stop", "--", "sh", "-c", "exit 3"}, 1, "sh for partition 0-"},
		{[]string{"--on-exit", "never", "--", "true"}, 2, "restart-on-failure"},
		{[]string{"--grace", "-1s", "--", "true"}, 2, "grace"},
		{[]string{"--session-timeout", "1s", "--", "true"}, 2, "2000"},
		{nil, 2, "want a command"},
	} {
		m := g.run(c.args...)
		if status := m.wait(); status != c.status || !strings.Contains(m.err.String(), c.says) {
			t.Errorf("%v: status %d, want %d; %s", c.args, status, c.status, m.err.String())
		}
		if keys, _, err := registry.List(t.Context(), g.st, registry.Root("").Group("g").IDs(), 0); err != nil || len(keys)+len(g.ownerKeys()) > 0 {
			t.Errorf("%v: keys are left: %v, %v", c.args, keys, err)
		}
	}
}

// A child whose work is done stays done, with its partition owned.
func TestRunDone(t *testing.T) {
	g := newRunGroup(t)
	m := g.run("--on-exit", "restart-on-failure", "--", "sh", "-c", `echo done {partition} >>$JOURNAL.done; [ {partition} != 3 ]`)
	count := func(line string) int {
		data, _ := os.ReadFile(g.journal + ".done")
		return strings.Count(string(data), line)
	}
	g.eventually("what failed was not started again", func() bool { return count("done 3\n") >= 3 })
	for p := range 3 {
		if n := count(fmt.Sprintf("done %d\n", p)); n != 1 {
			t.Errorf("partition %d was done %d times", p, n)
		}
	}
	if keys := g.ownerKeys(); len(keys) != 4 {
		t.Errorf("owned: %v", keys)
	}
	m.signal(syscall.SIGTERM)
	if status := m.wait(); status != 0 {
		t.Errorf("exit status %d", status)
	}
}

// The second signal ends the grace.
func TestRunSecondSignal(t *testing.T) {
	g := newRunGroup(t)
	m := g.run("--grace", "1h", "--", "sh", "-c", `trap 'touch $JOURNAL.asked.{partition}' TERM; touch $JOURNAL.up.{partition}; while :; do sleep 0.02; done`)
	all := func(what string) func() bool {
		return func() bool {
			list, _ := filepath.Glob(g.journal + what + "*")
			return len(list) == 4
		}
	}
	g.eventually("not all are up", all(".up."))
	m.signal(syscall.SIGINT)
	g.eventually("not all are asked", all(".asked."))
	m.signal(syscall.SIGINT)
	if status := m.wait(); status != 0 {
		t.Errorf("exit status %d", status)
	}
	if keys := g.ownerKeys(); len(keys) > 0 {
		t.Errorf("left: %v", keys)
	}
}

// A group of muster run is like any other to those who look at it.
func TestRunSeen(t *testing.T) {
	g := newRunGroup(t)
	m := g.run("--streams", "2", "--strategy", "sticky,range", "--", "sleep", "100")
	g.eventually("not all are up", func() bool { return strings.Count(m.err.String(), "child started") >= 4 })
	for _, c := range []struct{ args, says string }{
		{"groups describe g", " 0 - - - "},
		{"groups describe g -o json", `"no_log": true`},
		{"groups verify g", ""},
		{"registry doctor", ""},
	} {
		status, stdout, stderr := call(t, append(strings.Fields(c.args), "--etcd-endpoints", g.st.Endpoint)...)
		if status != 0 || !strings.Contains(strings.Join(strings.Fields(stdout), " "), strings.TrimSpace(c.says)) {
			t.Errorf("%s: status %d, %s%s", c.args, status, stdout, stderr)
		}
	}
	m.signal(syscall.SIGTERM)
	m.wait()
}

// What a child is told.
func TestRunTellsChildren(t *testing.T) {
	g := newRunGroup(t)
	m := g.run("--id", "me", "--prefix", "--", "sh", "-c", `echo {topic} {partition} {group} {fence} "$@"; env | grep ^MUSTER_ | grep -v TEST; echo that is all; sleep 100`, "sh", "x{partition}")
	g.eventually("not all has been printed", func() bool {
		out := m.out.String()
		return !slices.ContainsFunc([]int{0, 1, 2, 3}, func(p int) bool { return !strings.Contains(out, fmt.Sprintf("shards 0-%d that is all\n", p)) })
	})
	fences := map[string]int64{}
	for _, kv := range g.ownerKeys() {
		fences[kv.Key[strings.LastIndexByte(kv.Key, '/')+1:]] = kv.CreateRevision
	}
	out := m.out.String()
	for p := range 4 {
		name := fmt.Sprintf("0-%d", p)
		for _, line := range []string{
			fmt.Sprintf("shards %d g %d x%d", p, fences[name], p), fmt.Sprintf("MUSTER_FENCE=%d", fences[name]), fmt.Sprintf("MUSTER_PARTITION=%d", p),
			"MUSTER_TOPIC=shards", "MUSTER_GROUP=g", "MUSTER_HOME=0", "MUSTER_STREAM=0", "MUSTER_MEMBER=me",
		} {
			if !strings.Contains(out, "shards "+name+" "+line+"\n") {
				t.Errorf("partition %d is not told %s:\n%s", p, line, out)
			}
		}
	}
	m.signal(syscall.SIGTERM)
	m.wait()
}
