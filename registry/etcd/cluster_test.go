package etcd

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/muster-io/muster/registry"
)

// memberVariable makes the test binary a member of a cluster: the options of its
// server, as JSON.
const memberVariable = "MUSTER_TEST_ETCD_MEMBER"

// serveMember is the life of such a process. It ends with its stdin.
func serveMember(options string) int {
	var o ServerOptions
	if err := json.Unmarshal([]byte(options), &o); err != nil {
		panic(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	o.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil))
	server, err := StartServer(ctx, o)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println("ready")
	<-ctx.Done()
	server.Close()
	return 0
}

// cluster is three members, each a process.
type cluster struct {
	t       *testing.T
	members []*process
}

type process struct {
	t     *testing.T
	o     ServerOptions
	cmd   *exec.Cmd
	stdin io.Closer
	ready chan struct{} // closed when it serves
	ended chan struct{}
	log   string
}

func newTestCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{t: t}
	var initial []string
	for i := range 3 {
		name := fmt.Sprintf("m%d", i+1)
		o := freePorts(t, filepath.Join(t.TempDir(), name))
		o.Name = name
		initial = append(initial, name+"="+o.ListenPeer)
		c.members = append(c.members, &process{t: t, o: o, log: filepath.Join(t.TempDir(), name+".log")})
	}
	for _, m := range c.members {
		m.o.InitialCluster = strings.Join(initial, ",")
		m.start()
	}
	for _, m := range c.members {
		m.await()
	}
	return c
}

func (p *process) start() {
	p.t.Helper()
	options, err := json.Marshal(p.o)
	if err != nil {
		p.t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), memberVariable+"="+string(options))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		p.t.Fatal(err)
	}
	defer log.Close()
	cmd.Stderr = log
	stdin, err := cmd.StdinPipe()
	if err != nil {
		p.t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		p.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	p.cmd, p.stdin, p.ready, p.ended = cmd, stdin, make(chan struct{}), make(chan struct{})
	ready, ended := p.ready, p.ended
	go func() {
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			if lines.Text() == "ready" {
				close(ready)
			}
		}
		cmd.Wait()
		close(ended)
	}()
	p.t.Cleanup(func() {
		cmd.Process.Kill()
		<-ended
	})
}

func (p *process) await() {
	p.t.Helper()
	select {
	case <-p.ready:
	case <-p.ended:
		data, _ := os.ReadFile(p.log)
		p.t.Fatalf("%s ended: %s", p.o.Name, data)
	case <-time.After(longEnough):
		p.t.Fatalf("%s is not ready", p.o.Name)
	}
}

func (p *process) signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
	switch s {
	case syscall.SIGKILL:
		<-p.ended
	case syscall.SIGSTOP:
		awaitStopped(p.t, p.cmd.Process.Pid)
	}
}

// awaitStopped returns when each thread of a process that was sent SIGSTOP stands:
// the signal alone is only a request, and until then it may answer.
func awaitStopped(t *testing.T, pid int) {
	t.Helper()
	running := func() bool {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
		if err != nil {
			t.Fatal(err)
		}
		return slices.ContainsFunc(threads, func(name string) bool {
			stat, err := os.ReadFile(name)
			// The state follows the command's name, which is in parentheses.
			_, state, ok := strings.Cut(string(stat), ") ")
			return err == nil && ok && !strings.ContainsAny(state[:1], "TZX")
		})
	}
	for end := time.Now().Add(longEnough); running(); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(end) {
			t.Fatalf("process %d does not stand after SIGSTOP", pid)
		}
	}
}

// back undoes a signal.
func (p *process) back(s syscall.Signal) {
	p.t.Helper()
	if s == syscall.SIGSTOP {
		p.signal(syscall.SIGCONT)
		return
	}
	p.start()
	p.await()
}

// leader asks until all members agree on who leads.
func (c *cluster) leader() *process {
	c.t.Helper()
	ctx := within(c.t, longEnough)
	for ctx.Err() == nil {
		leaders := map[uint64]int{}
		var found *process
		for _, m := range c.members {
			st, err := Open(ctx, Options{Endpoints: []string{m.o.ListenClient}})
			if err != nil {
				continue
			}
			if s, err := st.Client().Status(ctx, m.o.ListenClient); err == nil {
				leaders[s.Leader]++
				if s.Leader == s.Header.MemberId {
					found = m
				}
			}
			st.Close()
		}
		if found != nil && len(leaders) == 1 {
			for _, n := range leaders {
				if n == len(c.members) {
					return found
				}
			}
		}
	}
	c.t.Fatal("no leader")
	return nil
}

func (c *cluster) other(than *process) *process {
	for _, m := range c.members {
		if m != than {
			return m
		}
	}
	panic("unreachable")
}

// traffic is a writer, a session and a View through one Store, and how long each
// went without.
type traffic struct {
	t       *testing.T
	st      *Store
	turns   lockedBuffer // a line for each time that the Store turns to another member
	term    uint64       // of the leader in the beginning
	session *registry.Session
	view    *registry.View
	stop    context.CancelFunc
	work    sync.WaitGroup
	still   context.CancelFunc // ends the writer
	writer  sync.WaitGroup

	mu                 sync.Mutex
	written            int64 // revision
	writes, failed     int
	longest            time.Duration // between two writes that succeeded
	late               time.Duration // from a write to the View, at most
	least              time.Duration // of the session's time left
	firstFailure       error
	reads, readsFailed int
	slowest            time.Duration  // read
	acknowledged       map[int64]bool // revisions of writes that the watch has not shown yet
	shown              int64          // newest revision that it has
}

func startTraffic(t *testing.T, endpoint string) *traffic {
	t.Helper()
	w := &traffic{t: t, least: time.Hour, acknowledged: map[int64]bool{}}
	st, err := Open(t.Context(), Options{Endpoints: []string{endpoint}, Logger: slog.New(slog.NewTextHandler(&w.turns, nil))})
	if err != nil {
		t.Fatal(err)
	}
	w.st = st
	if w.session, err = registry.OpenSession(t.Context(), st, registry.SessionOptions{TTL: trafficTTL}); err != nil {
		t.Fatal(err)
	}
	if _, err := registry.Register(t.Context(), st, w.session, "/ids/"+registry.LeaseText(w.session.Lease()), nil); err != nil {
		t.Fatal(err)
	}
	if w.view, err = registry.OpenView(t.Context(), st, []string{"/traffic/", "/ids/"}, registry.ViewOptions{}, nil); err != nil {
		t.Fatal(err)
	}
	w.term = w.nowTerm()
	ctx, cancel := context.WithCancel(t.Context())
	w.stop = cancel
	writing, still := context.WithCancel(ctx)
	w.still = still
	w.writer.Go(func() { w.write(writing) })
	w.work.Go(func() { w.read(ctx) })
	w.work.Go(func() { w.follow(ctx) })
	changes := st.Watch(ctx, "/traffic/", w.view.Snapshot().Revision+1)
	w.work.Go(func() { w.watch(changes) })
	return w
}

const (
	writeEvery = 20 * time.Millisecond
	// trafficTTL is longer than a member is away and the machine stands still together;
	// a session that is not renewed meanwhile comes close to its end.
	trafficTTL = 18 * time.Second
	// callWithin is long enough for a call to outlive a loss and an election.
	callWithin = 30 * time.Second
)

// nowTerm is the term of the leader.
func (w *traffic) nowTerm() uint64 {
	w.t.Helper()
	for ctx := within(w.t, longEnough); ; time.Sleep(20 * time.Millisecond) {
		res, err := w.st.Client().MemberList(ctx)
		if err == nil {
			return res.Header.RaftTerm
		}
		if ctx.Err() != nil {
			w.t.Fatal(err)
		}
	}
}

func (w *traffic) write(ctx context.Context) {
	last := time.Now()
	for ctx.Err() == nil {
		limited, cancel := context.WithTimeout(ctx, callWithin)
		res, err := w.st.Txn(limited, registry.Txn{Then: []registry.Op{registry.Put("/traffic/x", nil, 0)}})
		cancel()
		w.mu.Lock()
		if err == nil {
			w.writes++
			w.written = res.Revision
			if res.Revision > w.shown {
				w.acknowledged[res.Revision] = true
			}
			w.longest = max(w.longest, time.Since(last))
			last = time.Now()
		} else if ctx.Err() == nil {
			w.failed++
			if w.firstFailure == nil {
				w.firstFailure = err
			}
		}
		w.mu.Unlock()
		time.Sleep(writeEvery)
	}
}

func (w *traffic) read(ctx context.Context) {
	for ctx.Err() == nil {
		began := time.Now()
		limited, cancel := context.WithTimeout(ctx, callWithin)
		_, err := w.st.Range(limited, registry.RangeRequest{Key: "/traffic/x"})
		cancel()
		w.mu.Lock()
		if w.reads++; err != nil && ctx.Err() == nil {
			w.readsFailed++
		}
		w.slowest = max(w.slowest, time.Since(began))
		w.mu.Unlock()
		time.Sleep(writeEvery)
	}
}

// watch sees every write once and in order, whatever member it comes from.
func (w *traffic) watch(changes <-chan registry.WatchResponse) {
	for r := range changes {
		if r.Err != nil {
			w.t.Errorf("the watch ended: %v", r.Err)
		}
		w.mu.Lock()
		for _, e := range r.Events {
			if e.ModRevision <= w.shown {
				w.t.Errorf("the watch shows revision %d after %d", e.ModRevision, w.shown)
			}
			for rev := range w.acknowledged {
				if rev > w.shown && rev < e.ModRevision {
					w.t.Errorf("the watch left out revision %d", rev)
				}
			}
			w.shown = e.ModRevision
			delete(w.acknowledged, e.ModRevision)
		}
		w.mu.Unlock()
	}
}

// follow measures how long a write has been done that the View does not show.
func (w *traffic) follow(ctx context.Context) {
	var behindSince time.Time
	for ctx.Err() == nil {
		w.mu.Lock()
		w.least = min(w.least, w.session.Left())
		if w.view.Snapshot().Revision < w.written {
			if behindSince.IsZero() {
				behindSince = time.Now()
			}
			w.late = max(w.late, time.Since(behindSince))
		} else {
			behindSince = time.Time{}
		}
		w.mu.Unlock()
		time.Sleep(5 * time.Millisecond)
	}
}

func (w *traffic) end(name string, limit time.Duration) {
	w.t.Helper()
	w.still()
	w.writer.Wait()
	rev := put(w.t, w.st, "/traffic/last", "")
	until(w.t, w.view, longEnough, at(rev))
	for deadline := time.Now().Add(longEnough); ; time.Sleep(5 * time.Millisecond) {
		w.mu.Lock()
		shown := w.shown
		w.mu.Unlock()
		if shown >= rev {
			break
		}
		if time.Now().After(deadline) {
			w.t.Errorf("%s: the watch shows revision %d, not %d", name, shown, rev)
			break
		}
	}
	w.stop()
	w.work.Wait()
	if len(w.acknowledged) > 0 {
		w.t.Errorf("%s: the watch has not shown %d writes", name, len(w.acknowledged))
	}
	w.t.Logf("%-28s longest pause of the writer %5.2f s (%d failed of %d), slowest read %5.2f s (%d failed), view late by %5.2f s, session had %4.1f s left",
		name, w.longest.Seconds(), w.failed, w.writes+w.failed, w.slowest.Seconds(), w.readsFailed, w.late.Seconds(), w.least.Seconds())
	if w.firstFailure != nil {
		w.t.Logf("%-28s the first failure: %v", name, w.firstFailure)
	}
	if w.longest > limit || w.slowest > limit || w.late > limit {
		w.t.Errorf("%s: paused for longer than %s", name, limit)
	}
	// The one write that is under way when the member is lost has no answer, and must
	// not be made again. The next waits for a member, and a leader, that work. On a busy
	// machine members are given up, and leaders, that are only slow.
	elections := int(w.nowTerm() - w.term)
	turns := strings.Count(w.turns.String(), "turned to another etcd member")
	if w.failed > max(turns, 1)+max(elections-1, 0) || w.readsFailed > 0 {
		w.t.Errorf("%s: %d writes and %d reads failed; the Store has turned %d times, of %d elections", name, w.failed, w.readsFailed, turns, elections)
	}
	if !w.session.Alive() || w.least < time.Second {
		w.t.Errorf("%s: the session came to within %s of its end: %v", name, w.least, w.session.Err())
	}
	w.view.Close()
	ctx, cancel := context.WithTimeout(context.Background(), longEnough)
	defer cancel()
	if err := w.session.Close(ctx); err != nil {
		w.t.Errorf("%s: %v", name, err)
	}
	w.st.Close()
}

// The loss of one member of three, killed or paused, is a non-event for a client that
// was given one endpoint, be it that of the lost one, and be that the leader.
func TestLossOfOneMember(t *testing.T) {
	t.Parallel()
	const (
		// Long enough for the silence to be noticed, which takes 1 s, for an election
		// besides, etcd's own takes 1 to 2 s, and for a machine that stands still
		// meanwhile; and shorter than the member is away.
		limit = 8 * time.Second
		away  = 11 * time.Second // past the renewal that would otherwise be the last
	)
	for how, signal := range map[string]syscall.Signal{"killed": syscall.SIGKILL, "paused": syscall.SIGSTOP} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			c := newTestCluster(t)
			for _, s := range []struct {
				name           string
				victim, client func(leader *process) *process
			}{
				{"own member, a follower", c.other, c.other},
				{"own member, the leader", itself, itself},
				{"the leader, not the own one", itself, c.other},
				{"a follower, not the own one", c.other, itself},
			} {
				leader := c.leader()
				victim := s.victim(leader)
				w := startTraffic(t, s.client(leader).o.ListenClient)
				time.Sleep(500 * time.Millisecond)
				victim.signal(signal)
				time.Sleep(away)
				victim.back(signal)
				time.Sleep(500 * time.Millisecond)
				w.end(how+": "+s.name, limit)
			}
		})
	}
}

func itself(p *process) *process { return p }

// Without a quorum writes and reads fail within their deadline and say why; when it is
// there again, all goes on by itself.
func TestLossOfQuorum(t *testing.T) {
	t.Parallel()
	for how, signal := range map[string]syscall.Signal{"killed": syscall.SIGKILL, "paused": syscall.SIGSTOP} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			loseQuorum(t, newTestCluster(t), signal)
		})
	}
}

func loseQuorum(t *testing.T, c *cluster, signal syscall.Signal) {
	t.Helper()
	own := c.leader()
	st, err := Open(t.Context(), Options{Endpoints: []string{own.o.ListenClient}})
	if err != nil {
		t.Fatal(err)
	}
	v := openView(t, st, registry.ViewOptions{}, "/quorum/")
	until(t, v, longEnough, at(put(t, st, "/quorum/a", "1")))
	var victims []*process
	for _, m := range c.members {
		if m != own {
			victims = append(victims, m)
			m.signal(signal)
		}
	}
	const limit = 12 * time.Second // much longer than it takes to see that there is no quorum
	var calls sync.WaitGroup
	for name, call := range map[string]func(ctx context.Context) error{
		"write": func(ctx context.Context) error {
			_, err := st.Txn(ctx, registry.Txn{Then: []registry.Op{registry.Put("/quorum/a", []byte("2"), 0)}})
			return err
		},
		"read": func(ctx context.Context) error {
			_, err := st.Range(ctx, registry.RangeRequest{Key: "/quorum/a"})
			return err
		},
		"grant": func(ctx context.Context) error { _, err := st.Grant(ctx, 6*time.Second); return err },
	} {
		calls.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			began := time.Now()
			err := call(ctx)
			t.Logf("%v, %s: after %s: %v", signal, name, time.Since(began).Round(time.Millisecond), err)
			if !errors.Is(err, ErrNoQuorum) || time.Since(began) > limit+callLimit/3 {
				t.Errorf("%v, %s: after %s: %v", signal, name, time.Since(began), err)
			}
		})
	}
	if _, err := Open(t.Context(), Options{Endpoints: []string{own.o.ListenClient}, DialTimeout: 10 * time.Second}); err == nil ||
		!strings.Contains(err.Error(), "most members of its cluster do not") {
		t.Errorf("%v: open without a quorum: %v", signal, err)
	}
	calls.Wait()
	if signal == syscall.SIGKILL {
		victims[0].start()
		victims[0].await() // one of two makes a quorum
	} else {
		victims[0].back(signal)
	}
	began := time.Now()
	var rev int64
	for rev == 0 {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		if res, err := st.Txn(ctx, registry.Txn{Then: []registry.Op{registry.Put("/quorum/a", []byte("3"), 0)}}); err == nil {
			rev = res.Revision
		} else if time.Since(began) > longEnough {
			t.Fatalf("%v: not written after the quorum is back: %v", signal, err)
		}
		cancel()
	}
	until(t, v, longEnough, at(rev))
	t.Logf("%v: written and seen %s after the quorum is back", signal, time.Since(began).Round(time.Millisecond))
	victims[1].back(signal)
	v.Close()
	st.Close()
}
