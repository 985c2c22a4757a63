package conformance

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

var (
	scriptSeed   = flag.Uint64("seed", 0, "run the scripts of this seed in place of the usual ones")
	scriptRounds = flag.Int("rounds", 20, "rounds of each script")
)

// scriptSeeds are the seeds of the gate.
var scriptSeeds = []uint64{1, 2, 3}

const (
	scriptGroup = "scripted"
	mainTopic   = "main"
	extraTopic  = "extra" // comes and goes
	// scriptLease is what members ask for unless a test says otherwise. A tenth of it is how
	// late the child of a member that stands may be killed.
	scriptLease = 5 * time.Second
	// notice is how long a member may take to see that a partition was taken away under its feet.
	notice = 20 * time.Second
)

// cast is which kinds of members a script has, and on what.
type cast struct {
	name  string
	noLog bool // the topics have none
	kinds []kind
}

var casts = []cast{
	{"records", false, []kind{commandConsumer, libraryConsumer}},
	{"shards", true, []kind{commandRunner, libraryOwner}},
	{"mixed", false, []kind{commandConsumer, libraryConsumer, commandRunner, libraryOwner}},
}

// TestScripts plays random scripts of events with real processes: members join, stop,
// are killed and stopped for a while, topics come, go and grow, people delete keys,
// the daemon is taken away. After each round the group must become quiet, and be as
// the strategy says; what its members did all the time is judged by an observer.
func TestScripts(t *testing.T) {
	need(t, "etcdctl")
	seeds := scriptSeeds
	if *scriptSeed != 0 {
		seeds = []uint64{*scriptSeed}
	}
	for _, c := range casts {
		for _, seed := range seeds {
			t.Run(fmt.Sprintf("%s/%d", c.name, seed), func(t *testing.T) { play(t, c, seed, *scriptRounds) })
		}
	}
}

// script is the state of one. What it does depends on its seed alone.
type script struct {
	*cluster
	cast
	r         *rand.Rand
	bin       string // scriptmember
	history   *history
	members   []*actor // all that ever were
	producers []*producer
	topics    map[string]int // partitions of those that are there
	lists     []string       // of strategies, from which each member takes one
	uniform   bool           // all members have one stream
	lease     time.Duration  // of members
	harm      harm
	compacted int64
	seen      *observation
	began     time.Time
}

// producer is the process that writes to a topic.
type producer struct {
	*process
	topic string
	over  bool // the topic is deleted, and with it what was written
}

// stop ends it once it has written something.
func (p *producer) stop() {
	p.t.Helper()
	until(p.t, patience, p.name+" was told that something is stored", func() bool { return p.size() > 0 })
	p.signal(syscall.SIGTERM)
	p.exits(0, patience)
}

// newScript starts a daemon and a watch of its registry.
func newScript(t *testing.T, c cast, seed uint64) *script {
	t.Helper()
	bin, err := scriptMember()
	if err != nil {
		t.Fatal(err)
	}
	s := &script{cluster: newCluster(newSandbox(t)), cast: c, r: rand.New(rand.NewPCG(seed, uint64(len(c.name)))), bin: bin,
		topics: map[string]int{}, harm: harm{map[string]bool{}, map[int64]bool{}}, seen: newObservation(), began: time.Now(), lease: scriptLease}
	s.startDaemon()
	s.history = s.watch()
	return s
}

func play(t *testing.T, c cast, seed uint64, rounds int) {
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("to play it again: go test -v -run '^TestScripts$/^%s$' -seed %d -rounds %d", c.name, seed, rounds)
		}
	})
	s := newScript(t, c, seed)
	modes := [][]string{
		{"range"},
		{"sticky"},
		{"roundrobin"},
		{"range,sticky", "sticky,range", "sticky"},
		{"roundrobin,range-numeric", "range-numeric,roundrobin", "-"},
	}
	mode := int((seed + uint64(slices.IndexFunc(casts, func(o cast) bool { return o.name == c.name }))) % uint64(len(modes)))
	s.lists = modes[mode]
	s.uniform = slices.ContainsFunc(s.lists, func(l string) bool { return strings.Contains(l, "roundrobin") })
	s.createTopic(mainTopic, 6)
	s.tell("strategies %v", s.lists)
	s.join()
	s.join()
	s.quiet()
	for round := range rounds {
		began := time.Now()
		done := []string{s.event()}
		if s.r.IntN(4) == 0 { // the next one does not wait for quiet
			done = append(done, s.event())
		}
		s.quiet()
		s.tell("%d. %s; quiet after %v in all", round+1, strings.Join(done, ", and at once "), since(began))
	}
	s.finish()
}

// Field case 03: of two members that share four partitions one stands for three
// leases. What the other owns by then it neither deletes nor writes over, it commits
// nothing of before, and it registers anew and gets its half back.
func TestCase03(t *testing.T) {
	need(t, "etcdctl")
	for _, kinds := range [][]kind{{commandConsumer, libraryConsumer}, {commandRunner, libraryOwner}} {
		t.Run(string(kinds[0]), func(t *testing.T) {
			t.Parallel() // it waits most of the time
			name := map[bool]string{true: "records", false: "shards"}[kinds[0].consumes()]
			s := newScript(t, cast{name: name, noLog: !kinds[0].consumes()}, 3)
			s.lease = 10 * time.Second // long enough for b to keep its own all the time
			s.createTopic(mainTopic, 4)
			a, b := s.newActor(kinds[0], "a", "range", 1), s.newActor(kinds[1], "b", "range", 1)
			s.members = []*actor{a, b}
			s.quiet()
			former := s.registered(a)
			a.freeze()
			stands := time.Now()
			a.gone = true
			s.quiet() // b has all four
			for time.Since(stands) < 3*s.lease {
				time.Sleep(100 * time.Millisecond)
				if lease := s.history.snapshot()[groupBase+"/ids/a"].Lease; lease != 0 {
					t.Fatalf("a is registered under lease %x while it stands", lease)
				}
			}
			held := s.history.snapshot()
			a.gone = false
			a.thaw()
			s.quiet()
			if lease := s.registered(a); lease == former {
				t.Errorf("a is registered under lease %x again", lease)
			}
			now := s.history.snapshot()
			home := map[bool]int{false: 1, true: 0}[s.noLog]
			for p := range 4 {
				key := fmt.Sprintf("%s/owners/%s/%d-%d", groupBase, mainTopic, home, p)
				if kept := now[key].CreateRevision == held[key].CreateRevision; kept != (p >= 2) {
					t.Errorf("%s was %s, created at %d, and is %s, created at %d", key, held[key].Value, held[key].CreateRevision, now[key].Value, now[key].CreateRevision)
				}
			}
			// That b gave up two itself, and who committed what when, is what quiet has judged.
			s.finish()
		})
	}
}

func (s *script) tell(format string, args ...any) {
	s.t.Logf("%6.1f s  %s", time.Since(s.began).Seconds(), fmt.Sprintf(format, args...))
}

// event makes something happen that can, and says what.
func (s *script) event() string {
	s.t.Helper()
	events := []struct {
		weight int
		do     func() string // "" if it cannot happen now
	}{
		{6, s.join}, {3, s.leave}, {4, s.killOne}, {2, s.doze}, {3, s.sleep},
		{2, s.grow}, {3, s.extra},
		{2, s.deleteRegistration}, {2, s.deleteOwner}, {2, s.revoke}, {2, s.compact}, {2, s.restart},
	}
	total := 0
	for _, e := range events {
		total += e.weight
	}
	for {
		n := s.r.IntN(total)
		for _, e := range events {
			if n -= e.weight; n < 0 {
				if said := e.do(); said != "" {
					return said
				}
				break
			}
		}
	}
}

func (s *script) live() []*actor {
	return slices.DeleteFunc(slices.Clone(s.members), func(a *actor) bool { return a.gone })
}

// one is a live member, by chance.
func (s *script) one() *actor {
	list := s.live()
	return list[s.r.IntN(len(list))]
}

func (s *script) join() string {
	s.t.Helper()
	if len(s.live()) >= 5 {
		return ""
	}
	// Each kind is there in its turn, so that no script is without one.
	k := s.kinds[len(s.members)%len(s.kinds)]
	list := s.lists[s.r.IntN(len(s.lists))]
	streams := 1 + s.r.IntN(2)
	if s.uniform {
		streams = 1
	}
	if list == "-" && !k.library() {
		list = s.lists[0]
	}
	// The place in the order of ids is by chance, too.
	id := fmt.Sprintf("%c%d-%s", 'a'+s.r.IntN(26), len(s.members), k)
	how := fmt.Sprintf("%s joins (%s, streams %d)", id, list, streams)
	if k == commandConsumer && !s.uniform && s.r.IntN(2) == 0 {
		k, how = filteringConsumer, how+" with a filter"
	}
	s.members = append(s.members, s.newActor(k, id, list, streams))
	return how
}

func (s *script) leave() string {
	s.t.Helper()
	if len(s.live()) < 2 {
		return ""
	}
	a := s.one()
	s.registered(a) // a program that has hardly begun just ends
	a.gone = true
	a.signal(syscall.SIGTERM)
	a.exits(0, patience)
	return a.id + " leaves"
}

func (s *script) killOne() string {
	if len(s.live()) < 2 {
		return ""
	}
	a := s.one()
	a.gone = true
	a.signal(syscall.SIGKILL)
	<-a.done
	return a.id + " is killed"
}

// doze stops a member for less than its lease, as far as the machine allows that.
func (s *script) doze() string {
	s.t.Helper()
	a := s.one()
	pause := time.Duration(200+s.r.IntN(600)) * time.Millisecond
	a.freeze()
	time.Sleep(pause)
	a.thaw()
	return fmt.Sprintf("%s stands for %v", a.id, pause)
}

// sleep stops a member for longer than its lease; the others share what it had.
func (s *script) sleep() string {
	s.t.Helper()
	if len(s.live()) < 2 {
		return ""
	}
	a := s.one()
	s.registered(a)
	a.freeze()
	s.history.until(patience, a.id+" is not registered any more", func(tr tree) bool { return !slices.Contains(tr.members(scriptGroup), a.id) })
	a.gone = true
	s.quiet()
	a.gone = false
	a.thaw()
	return a.id + " stands past its lease"
}

// registered waits until a member is: one that was started just now may not be yet.
func (s *script) registered(a *actor) (lease int64) {
	s.t.Helper()
	s.history.until(patience, a.id+" is registered", func(tr tree) bool {
		lease = tr["/consumers/"+scriptGroup+"/ids/"+a.id].Lease
		return lease != 0
	})
	return lease
}

func (s *script) createTopic(name string, partitions int) {
	s.t.Helper()
	args := []string{"topics", "create", name, "--partitions", fmt.Sprint(partitions)}
	if s.noLog {
		args = append(args, "--no-log")
	}
	s.tool(args...)
	s.topics[name] = partitions
	if !s.noLog {
		p := s.start("producer-"+name, nil, nil, s.bin, "produce", "-brokers", s.kafka, "-topics", name, "-name", fmt.Sprintf("%s%d", name, len(s.producers)))
		s.producers = append(s.producers, &producer{process: p, topic: name})
	}
}

func (s *script) grow() string {
	s.t.Helper()
	if s.topics[mainTopic] >= 12 {
		return ""
	}
	s.topics[mainTopic] += 1 + s.r.IntN(3)
	s.tool("topics", "alter", mainTopic, "--partitions", fmt.Sprint(s.topics[mainTopic]))
	return fmt.Sprintf("%s has %d partitions", mainTopic, s.topics[mainTopic])
}

// extra creates a topic, or deletes it.
func (s *script) extra() string {
	s.t.Helper()
	if _, there := s.topics[extraTopic]; !there {
		s.createTopic(extraTopic, 1+s.r.IntN(5))
		return fmt.Sprintf("%s is created with %d partitions", extraTopic, s.topics[extraTopic])
	}
	for _, p := range s.producers {
		if p.topic == extraTopic && !p.over {
			p.stop()
			p.over = true
		}
	}
	s.tool("topics", "delete", extraTopic)
	delete(s.topics, extraTopic)
	return extraTopic + " is deleted"
}

func (s *script) deleteRegistration() string {
	s.t.Helper()
	a := s.one()
	s.registered(a)
	s.etcdctl("del", "/consumers/"+scriptGroup+"/ids/"+a.id)
	return "somebody deletes the registration of " + a.id
}

func (s *script) deleteOwner() string {
	s.t.Helper()
	topic := mainTopic
	if _, there := s.topics[extraTopic]; there && s.r.IntN(2) == 0 {
		topic = extraTopic
	}
	home := 1
	if s.noLog {
		home = 0
	}
	key := fmt.Sprintf("/consumers/%s/owners/%s/%d-%d", scriptGroup, topic, home, s.r.IntN(s.topics[topic]))
	s.harm.touched[key] = true
	s.etcdctl("del", key)
	return "somebody deletes " + key
}

func (s *script) revoke() string {
	s.t.Helper()
	a := s.one()
	lease := s.registered(a)
	s.harm.revoked[lease] = true
	// It may be gone at that moment.
	p := s.start("tool", nil, nil, "etcdctl", "--endpoints", s.etcd, "lease", "revoke", fmt.Sprintf("%x", lease))
	<-p.done
	return "somebody revokes the lease of " + a.id
}

func (s *script) compact() string {
	s.t.Helper()
	revision := s.caughtUp(s.history)
	if revision > s.compacted { // else nothing has happened since
		s.compacted = revision
		p := s.start("tool", nil, nil, "etcdctl", "--endpoints", s.etcd, "compaction", fmt.Sprint(revision))
		p.exits(0, patience)
	}
	return fmt.Sprintf("history is compacted to %d", revision)
}

func (s *script) restart() string {
	s.t.Helper()
	sig := []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM}[s.r.IntN(2)]
	s.daemon.signal(sig)
	select {
	case <-s.daemon.done:
	case <-time.After(patience):
		s.t.Fatalf("the daemon does not end after %v", sig)
	}
	if s.r.IntN(3) > 0 {
		s.startDaemon()
		return fmt.Sprintf("the daemon is ended by %v and started again", sig)
	}
	former := s.history.snapshot()
	pause := s.lease + time.Second
	time.Sleep(pause)
	s.startDaemon()
	// Every session has ended, which the registry, whose clock stood, does not know at
	// first: it looks quiet.
	for _, a := range s.live() {
		key := groupBase + "/ids/" + a.id
		s.history.until(patience, a.id+" registers anew", func(tr tree) bool { return tr[key].Lease != 0 && tr[key].Lease != former[key].Lease })
	}
	return fmt.Sprintf("the daemon is ended by %v and started again after %v", sig, pause)
}

// quiet waits until the group is as its strategy says, and has the observer judge.
func (s *script) quiet() {
	s.t.Helper()
	var ids []string
	for _, a := range s.live() {
		if !a.running() {
			s.t.Fatalf("%s has ended: %s", a.id, a.state())
		}
		ids = append(ids, a.id)
	}
	slices.Sort(ids)
	why := ""
	defer func() {
		if s.t.Failed() && why != "" {
			s.t.Log(why)
		}
	}()
	s.history.until(patience, "the group is as the strategy says", func(tr tree) bool {
		why = standing(tr, ids, s.topics)
		return why == ""
	})
	p := s.start("tool", nil, nil, s.muster, "groups", "verify", scriptGroup, "--wait", patience.String(), "--etcd-endpoints", s.etcd)
	<-p.done
	if p.cmd.ProcessState.ExitCode() != 0 {
		s.t.Fatalf("groups verify: %s\n%s%s", p.state(), tail(p.stdout), tail(p.stderr))
	}
	// A member that has just lost its session may not have been seen to.
	until(s.t, patience, "groups describe says the same", func() bool {
		why = s.described(ids)
		return why == ""
	})
	if s.name == "records" {
		s.consumedAll()
	}
	s.judge()
}

// consumedAll waits until everything that producers were told is stored is consumed.
func (s *script) consumedAll() {
	s.t.Helper()
	want := s.acknowledged()
	missing := ""
	defer func() {
		if s.t.Failed() && missing != "" {
			s.t.Logf("not consumed: %s", missing)
		}
	}()
	until(s.t, patience, "everything acknowledged is consumed", func() bool {
		missing = s.missing(want)
		return missing == ""
	})
}

// finish ends all of it in order; nothing of it may be left.
func (s *script) finish() {
	s.t.Helper()
	if !s.noLog {
		s.drain()
	}
	s.doctor()
	for _, a := range s.live() {
		a.signal(syscall.SIGTERM)
	}
	for _, a := range s.live() {
		a.exits(0, patience)
		a.gone = true
	}
	s.caughtUp(s.history)
	s.judge()
	s.judgeHistory()
	tr := s.readTree()
	for key, kv := range tr {
		if strings.HasPrefix(key, "/consumers/"+scriptGroup+"/ids/") || strings.HasPrefix(key, "/consumers/"+scriptGroup+"/owners/") {
			s.t.Errorf("left behind: %s = %s", key, kv.Value)
		}
	}
	until(s.t, patience, "no lease is left but the daemon's", func() bool { return len(s.leases()) == 1 })
	s.doctor()
	s.history.p.kill()
	s.daemon.signal(syscall.SIGTERM)
	s.daemon.exits(0, patience)
	s.tell("all over: %s", s.sums())
}

// drain leaves the topics to those who consume, until all is consumed and committed.
func (s *script) drain() {
	s.t.Helper()
	for _, a := range s.live() {
		if !a.kind.consumes() {
			a.gone = true
			a.signal(syscall.SIGTERM)
			a.exits(0, patience)
		}
	}
	if len(s.live()) == 0 {
		s.members = append(s.members, s.newActor(libraryConsumer, "last", s.lists[0], 1))
	}
	for _, p := range s.producers {
		if !p.over {
			p.stop()
		}
	}
	s.quiet()
	s.consumedAll()
	want := s.acknowledged()
	s.history.until(patience, "everything acknowledged is committed", func(tr tree) bool {
		for r := range want {
			if tr.offsets(scriptGroup, r.topic)[r.partition] <= r.offset {
				return false
			}
		}
		return true
	})
}

func (s *script) doctor() {
	s.t.Helper()
	p := s.start("doctor", nil, nil, s.muster, "registry", "doctor", "--etcd-endpoints", s.etcd)
	<-p.done
	if p.cmd.ProcessState.ExitCode() != 0 {
		s.t.Errorf("registry doctor, %s:\n%s%s", p.state(), tail(p.stdout), tail(p.stderr))
	}
}

// kind is what a member is.
type kind string

const (
	commandConsumer kind = "consume"  // muster consume
	commandRunner   kind = "run"      // muster run
	libraryConsumer kind = "consumer" // a program on rebalance/consumer
	libraryOwner    kind = "owner"    // a program on rebalance/membership
	// filteringConsumer is a commandConsumer that is not told names of topics.
	filteringConsumer kind = "filter"
)

func (k kind) library() bool  { return k == libraryConsumer || k == libraryOwner }
func (k kind) consumes() bool { return k != commandRunner && k != libraryOwner }

// actor is a member of the group.
type actor struct {
	*process
	id   string
	kind kind
	gone bool // it is to be neither registered nor an owner
}

func (s *script) newActor(k kind, id, strategies string, streams int) *actor {
	s.t.Helper()
	own := []string{"-etcd", s.etcd, "-group", scriptGroup, "-id", id, "-topics", mainTopic + "," + extraTopic, "-strategies", strategies,
		"-streams", fmt.Sprint(streams), "-session", s.lease.String()}
	command := []string{"--etcd-endpoints", s.etcd, "--group", scriptGroup, "--streams", fmt.Sprint(streams), "--strategy", strategies}
	if k == filteringConsumer {
		command = append(command, "--include", "ma[^x]n,ext.*")
	} else {
		command = append(command, "--topic", mainTopic, "--topic", extraTopic)
	}
	var argv []string
	switch k {
	case libraryConsumer:
		argv = append([]string{s.bin, "consume"}, own...)
	case libraryOwner:
		argv = append([]string{s.bin, "own"}, own...)
	case commandConsumer, filteringConsumer:
		argv = append(append([]string{s.muster, "consume"}, command...), "--from-beginning", "--format", `delivered %t %p %f %N %o %s\n`,
			"--set", "consumer.id="+id, "--set", fmt.Sprintf("zookeeper.session.timeout.ms=%d", s.lease.Milliseconds()),
			"--set", "auto.commit.interval.ms=200")
	case commandRunner:
		argv = append(append([]string{s.muster, "run"}, command...), "--id", id, "--session-timeout", s.lease.String(), "--grace", "5s", "--", s.bin, "child")
	}
	return &actor{process: s.start(id, nil, nil, argv...), id: id, kind: k}
}

// scriptMember builds the program of the members that stand on the library.
var scriptMember = sync.OnceValues(func() (string, error) {
	muster, err := musterBinary()
	if err != nil {
		return "", err
	}
	path := filepath.Join(filepath.Dir(muster), "scriptmember")
	cmd := exec.Command("go", "build", "-race", "-o", path, "github.com/muster-io/muster/rebalance/internal/scriptmember")
	cmd.Dir = ".."
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", errors.Join(fmt.Errorf("go build -race: %w", err), errors.New(string(out)))
	}
	return path, nil
})
