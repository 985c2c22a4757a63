package run

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/rebalance/membership"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

// bench is a Runner whose member gets nothing, and ownerships made by hand.
type bench struct {
	*kennel
	r       *Runner
	session *registry.Session
	cancel  context.CancelFunc
	done    chan error
}

func newBench(t *testing.T, script string) *bench {
	t.Helper()
	return newBenchWith(t, Config{Command: []string{"sh", "-c", script}, Watchdog: watchdogCommand(patience), limits: patientLimits})
}

func newBenchWith(t *testing.T, cfg Config) *bench {
	t.Helper()
	st := memory.New()
	b := &bench{kennel: &kennel{t: t, dir: t.TempDir()}, done: make(chan error, 1)}
	t.Setenv("D", b.dir)
	var err error
	if b.session, err = registry.OpenSession(t.Context(), st, registry.SessionOptions{TTL: registry.MaxTTL}); err != nil {
		t.Fatal(err)
	}
	cfg.Stdout, cfg.Stderr = os.Stderr, os.Stderr
	cfg.Membership = membership.Config{Store: st, Group: "g", SessionTimeout: registry.MaxTTL, Subscription: membership.Subscription{Topics: map[string]int32{"t": 1}}}
	if b.r, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	b.cancel = cancel
	go func() { b.done <- b.r.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-b.done:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(patience):
			t.Error("the run does not end") // as a test that was cut short did not end its ownerships
		}
		if err := b.session.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return b
}

// within runs f in the goroutine of Run.
func (b *bench) within(f func()) {
	b.t.Helper()
	done := make(chan struct{})
	b.r.post(func() { defer close(done); f() })
	select {
	case <-done:
	case <-b.r.ended:
		b.t.Fatal("the run has ended")
	}
}

// stopWatchdog stops the watchdog, whose child must be a process; from then on it is
// waited for no longer than usual.
func (b *bench) stopWatchdog(child int) {
	b.t.Helper()
	b.within(func() {
		b.r.cfg.limits = usualLimits()
		b.r.keeper.closing = b.r.cfg.limits.closing
		if p, ok := readProcess(child); child != 0 && (!ok || p.parent != b.r.keeper.cmd.Process.Pid) {
			b.t.Errorf("process %d is not the watchdog's child: %+v", child, p)
		}
		if err := b.r.keeper.cmd.Process.Signal(unix.SIGSTOP); err != nil {
			b.t.Error(err)
		}
	})
}

// end waits until the run has ended.
func (b *bench) end() {
	b.t.Helper()
	select {
	case err := <-b.done:
		b.done <- err
	case <-time.After(patience):
		b.t.Fatal("the run does not end")
	}
}

func (b *bench) own(token int64) (o *membership.Ownership, end func()) {
	w := rebalance.Want{Partition: registry.Partition{Topic: "t"}}
	o, _, end = membership.NewOwnership(b.session, w, token, nil)
	b.r.Begin([]*membership.Ownership{o})
	return o, end
}

// ownedAgain loses a partition whose child has written "former", and owns it again until
// there is a child that writes "second". What it returns ends that, too.
func (b *bench) ownedAgain() (former int, loseSecond func()) {
	b.t.Helper()
	first, end := b.own(1)
	former = b.pid("former")
	end()
	b.r.Lost(first, "test")
	second, endSecond := b.own(2)
	b.pid("second")
	return former, func() {
		endSecond()
		b.r.Lost(second, "test")
	}
}

// A partition that is lost and owned again by the same member gets a new child only
// when nothing of the old one is left; and is not given up before, either.
func TestRunnerWaitsForTheFormerChild(t *testing.T) {
	for i := range 20 {
		t.Run(strconv.Itoa(i), func(t *testing.T) { // which ends one run before the next begins
			b := newBench(t, `if [ -s $D/former ]; then
				kill -0 $(cat $D/former) 2>/dev/null && echo $$ >$D/overlap
				echo $$ >$D/second; exec sleep 100
			fi
			setsid sh -c 'echo $$ >$D/former; exec sleep 100' & exec sleep 100`)
			former, loseSecond := b.ownedAgain()
			if _, err := os.Stat(b.dir + "/overlap"); err == nil || running(former) {
				t.Error("the second child was started while something of the first was left")
			}
			loseSecond()
		})
	}
}

// While a process executes a program it has no environment that would tell whose it is.
// Here that lasts long enough to be seen: the mark comes back with the second program.
func TestRunnerWaitsForAProcessWithoutEnvironment(t *testing.T) {
	b := newBench(t, `if [ -s $D/former ]; then echo $$ >$D/second; exec sleep 100; fi
		(setsid env -i /bin/sh -c "echo \$\$ >$D/former; sleep 0.1; exec env `+childVariable+`=$`+childVariable+` sleep 100" &)
		exec sleep 100`)
	former, loseSecond := b.ownedAgain()
	if running(former) {
		t.Error("the second child was started while something of the first was left")
	}
	loseSecond()
}

// One that never has an environment is not waited for: it may be anybody's. It ends with
// the run.
func TestRunnerDoesNotWaitForWhatNeverShows(t *testing.T) {
	b := newBenchWith(t, Config{Watchdog: watchdogCommand(100 * time.Millisecond), limits: patientLimits,
		Command: []string{"sh", "-c", `if [ -s $D/former ]; then echo $$ >$D/second; exec sleep 100; fi
		(setsid env -i /bin/sh -c "echo \$\$ >$D/former; while :; do sleep 1; done" &)
		exec sleep 100`}})
	former, loseSecond := b.ownedAgain()
	if !running(former) {
		t.Error("it was ended, so this test shows nothing")
	}
	loseSecond()
	b.cancel()
	b.end()
	if running(former) {
		t.Error("it outlives the run")
	}
}

// A child that was lost keeps the partition of the next ownership from being given up
// while it may run, though the watchdog does not answer; that is then killed.
func TestRunnerKillsAWatchdogThatDoesNotKill(t *testing.T) {
	b := newBench(t, `[ -s $D/leader ] || echo $$ >$D/leader; exec sleep 100`)
	first, end := b.own(1)
	pid := b.pid("leader")
	b.stopWatchdog(pid)
	began := time.Now()
	end()
	b.r.Lost(first, "test")
	second, endSecond := b.own(2)
	if !b.r.Drain(second) {
		t.Error("the second ownership was lost")
	}
	if running(pid) {
		t.Error("the partition was given up while the former child was there")
	}
	if took := time.Since(began); took > patience {
		t.Errorf("it took %s", took)
	}
	endSecond()
	b.r.Revoked(second)
}

// A partition that is lost when the watchdog has just ended is not waited for by the
// next one, which knows nothing of its child and would be killed for not answering.
func TestRunnerLosesBetweenWatchdogs(t *testing.T) {
	b := newBench(t, `echo $$ >$D/leader-$MUSTER_FENCE; exec sleep 100`)
	first, end := b.own(1)
	former := b.pid("leader-1")
	end()
	b.r.post(func() {
		b.r.keeper.kill()
		for range b.r.keeper.reports {
		}
		b.r.keeperEnded()
		b.r.step(b.r.unitOf(first), input{kind: inLose})
		if b.r.urgent.number != 0 {
			t.Error("an answer is waited for that nobody will give")
		}
	})
	second, endSecond := b.own(2)
	b.pid("leader-2")
	if running(former) {
		t.Error("the former child runs")
	}
	endSecond()
	b.r.Lost(second, "test")
}

// A watchdog that is stopped when all is done does not keep the run from its end.
func TestRunnerEndsThoughTheWatchdogIsStopped(t *testing.T) {
	b := newBench(t, `echo $$ >$D/leader; exec sleep 100`)
	o, end := b.own(1)
	b.pid("leader")
	if !b.r.Drain(o) {
		t.Fatal("lost")
	}
	end()
	b.r.Revoked(o)
	b.stopWatchdog(0)
	b.cancel()
	b.end()
}

// A watchdog that is stopped for good is replaced, and the child with it.
func TestRunnerReplacesAWatchdogThatDoesNotAnswer(t *testing.T) {
	b := newBench(t, `[ -s $D/first ] && echo $$ >$D/second || echo $$ >$D/first; exec sleep 100`)
	o, end := b.own(1)
	first := b.pid("first")
	b.stopWatchdog(first)
	b.pid("second")
	if running(first) {
		t.Error("the first child runs beside the second")
	}
	end()
	b.r.Lost(o, "test")
}

// One that is slow to start is not, though it answers only then.
func TestRunnerWaitsForAWatchdogThatStarts(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	limits := patientLimits
	limits.start = usualLimits().start
	b := newBenchWith(t, Config{Command: []string{"sh", "-c", "echo $$ >$D/leader; exec sleep 100"}, limits: limits,
		Watchdog: []string{"sh", "-c", "echo $$ >>$D/watchdogs; sleep 2; exec " + self + " watchdog 1m"}})
	o, end := b.own(1)
	b.pid("leader")
	b.pid("watchdogs") // if there were more, this is no number
	end()
	b.r.Lost(o, "test")
}

// One that answers is not, either.
func TestAnswersCount(t *testing.T) {
	r := &Runner{missed: usualLimits().missed, urgent: urgency{number: 5}}
	r.take(report{Number: 4})
	if r.missed != 0 || !r.answered || r.urgent.number == 0 {
		t.Errorf("an answer that came before the urgent one: missed %d, urgent %d", r.missed, r.urgent.number)
	}
	r.take(report{Number: 6})
	if r.urgent.number != 0 {
		t.Error("a later answer does not count for an earlier one")
	}
}

// A child's environment says once what it is for, whatever the runner's own says.
func TestCommandOf(t *testing.T) {
	for _, name := range []string{"MUSTER_FENCE", "MUSTER_PARTITION", childVariable} {
		t.Setenv(name, "another's")
	}
	t.Setenv("KEPT", "as it is")
	r, err := New(Config{Command: []string{"x", "{topic}/{partition}", "{group} {fence} {other}"}, Watchdog: []string{"x"},
		Membership: membership.Config{Store: memory.New(), Group: "g", ID: "c", Subscription: membership.Subscription{Topics: map[string]int32{"t": 1}}}})
	if err != nil {
		t.Fatal(err)
	}
	args, env := r.commandOf(&membership.Ownership{Partition: registry.Partition{Topic: "t", Home: 2, Number: 3}, Stream: 1, Token: 4})
	if want := []string{"x", "t/3", "g 4 {other}"}; !slices.Equal(args, want) {
		t.Errorf("arguments are %q, want %q", args, want)
	}
	got := map[string][]string{}
	for _, v := range env {
		name, value, _ := strings.Cut(v, "=")
		got[name] = append(got[name], value)
	}
	for name, want := range map[string]string{"MUSTER_GROUP": "g", "MUSTER_TOPIC": "t", "MUSTER_PARTITION": "3", "MUSTER_HOME": "2",
		"MUSTER_FENCE": "4", "MUSTER_MEMBER": "c", "MUSTER_STREAM": "1", "KEPT": "as it is"} {
		if !slices.Equal(got[name], []string{want}) {
			t.Errorf("%s is %q, want %q", name, got[name], want)
		}
	}
	if got[childVariable] != nil {
		t.Errorf("%s is handed on", childVariable)
	}
}

// A signal goes to the very process that was seen, not to a later one of its number.
func TestSignalGoesToTheVeryProcess(t *testing.T) {
	k := newKennel(t)
	id, pid := k.start("exec sleep 100", 10*patience)
	p, _ := readProcess(pid)
	other := p
	other.start += "1"
	other.signal(unix.SIGKILL)
	p.signal(unix.SIGTERM)
	if e := k.exited(id); e.Failure != "signal: terminated" {
		t.Errorf("it ended: %s", e.Failure)
	}
	k.gone(id)
}

// A watchdog that is left alone revokes the present lease, also one that was started
// when another had died; not where the member has left.
func TestWatchdogRevokesTheLease(t *testing.T) {
	b := newBench(t, `exec sleep 100`)
	eventually := func(what string, ok func() bool) {
		t.Helper()
		for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
			var is bool
			b.within(func() { is = ok() })
			if is {
				return
			}
			if time.Now().After(end) {
				t.Fatal(what)
			}
		}
	}
	revoked := func() string {
		text, err := os.ReadFile(b.dir + "/revoked")
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		return string(text)
	}
	eventually("the member is not registered", func() bool { return b.r.lease > 0 })
	var first *keeper
	b.within(func() { first = b.r.keeper; first.kill() })
	eventually("there is no other watchdog", func() bool { return b.r.keeper != nil && b.r.keeper != first })
	if got := revoked(); got != "" {
		t.Errorf("%s is revoked by nobody", got)
	}
	var second *keeper
	var lease registry.LeaseID
	b.within(func() {
		second, lease = b.r.keeper, b.r.lease
		if err := second.close(); err != nil {
			t.Error(err)
		}
	})
	if got := revoked(); got != registry.LeaseText(lease) {
		t.Errorf("revoked is %q, not %s", got, registry.LeaseText(lease))
	}
	eventually("there is no other watchdog", func() bool { return b.r.keeper != nil && b.r.keeper != second })
	if err := os.Remove(b.dir + "/revoked"); err != nil {
		t.Fatal(err)
	}
	b.cancel()
	b.end()
	if got := revoked(); got != "" {
		t.Errorf("%s is revoked though the member has left", got)
	}
}

// A child is dead before the session's own deadline, by a margin; of what is lost, now.
func TestDeadline(t *testing.T) {
	s, err := registry.OpenSession(t.Context(), memory.New(), registry.SessionOptions{TTL: registry.MaxTTL}) // it is not renewed meanwhile
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(context.Background()); err != nil {
			t.Error(err)
		}
	}()
	o, _, end := membership.NewOwnership(s, rebalance.Want{}, 1, nil)
	before, left := boottime(), o.Left()
	if at := deadline(o); at > boottime()+left-killMargin || at < before {
		t.Errorf("the child may live for %s, the session for %s", at-before, left)
	}
	end()
	if at := deadline(o); at > boottime() {
		t.Errorf("the child of what is lost may live for %s", at-boottime())
	}
}

// A Hurry holds for partitions that are given up later, too.
func TestHurryLasts(t *testing.T) {
	b := newBench(t, `trap '' TERM; echo $$ >$D/leader; while :; do sleep 1; done`)
	b.r.post(func() { b.r.cfg.Grace = time.Hour })
	b.r.Hurry()
	o, end := b.own(1)
	pid := b.pid("leader")
	if !b.r.Drain(o) || running(pid) {
		t.Errorf("running %v", running(pid))
	}
	end()
	b.r.Revoked(o)
}

// No daemon is asked to watch: it would free the partitions while children work.
func TestRunnerIsNotWatched(t *testing.T) {
	st := memory.New()
	root := registry.Root("")
	if _, err := st.Txn(t.Context(), registry.Txn{Then: []registry.Op{registry.Put(root.ClusterID(), []byte("x"), 0)}}); err != nil {
		t.Fatal(err)
	}
	registered := make(chan struct{})
	r, err := New(Config{Command: []string{"true"}, Watchdog: watchdogCommand(patience), Stdout: os.Stderr, Stderr: os.Stderr, limits: patientLimits,
		Membership: membership.Config{Store: st, Group: "g", ID: "c", SessionTimeout: registry.MaxTTL, Subscription: membership.Subscription{Topics: map[string]int32{"t": 1}}, Watched: true,
			Listener: membership.Listener{Registered: func(string, registry.LeaseID) { close(registered) }}}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- r.Run(ctx) }()
	<-registered
	kv, _, err := registry.GetKey(t.Context(), st, root.Group("g").ID("c"))
	if err != nil || kv == nil {
		t.Fatal(kv, err)
	}
	if rec, err := registry.ParseConsumer(*kv); err != nil || rec.Notice != "" {
		t.Errorf("notice %q, error %v", rec.Notice, err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A Hurry that comes when Run has ended, or could not begin, does not wait for it.
func TestRunnerHurriesAtAnyTime(t *testing.T) {
	r, err := New(Config{Command: []string{"/nosuch/program"}, Watchdog: []string{"/nosuch/watchdog"},
		Membership: membership.Config{Store: memory.New(), Group: "g", Subscription: membership.Subscription{Topics: map[string]int32{"t": 1}}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Run(t.Context()); err == nil {
		t.Error("a program that is not there can be run")
	}
	r.Hurry()
}
