package conformance

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

const (
	topic      = "lines"
	group      = "readers"
	partitions = 6
	lineCount  = 150_000 // so many that a consumer which runs away from its catcher has some left to do
	// lease is what consumers ask for: short, so that the test is, and long enough
	// for a busy machine to renew it.
	lease = 10 * time.Second
	// daemonLease is so long that a start that waited for it would be seen.
	daemonLease = 60 * time.Second
	// reserve is text that the last fault needs.
	reserve = 30_000
)

// member is a consumer process and its id in the group.
type member struct {
	*process
	id string
}

// scenario is the state of the end-to-end test.
type scenario struct {
	*cluster
	history *history
	feeder  *feeder
	lines   []line
	members map[string]*member // all that ever ran, by name
	live    []string           // ids, of those that should be in the group

	killed    *member
	tail      look // of the killed one
	stopped   *member
	stoppedAt int   // records that it had printed
	thawed    int64 // revision
	outage    time.Time
	recovered time.Time
}

// TestEndToEnd is the main job on real input, through a crash, a stop, a pause and
// a crash of the daemon, all under load.
func TestEndToEnd(t *testing.T) {
	need(t, "kcat", "etcdctl")
	s := &scenario{cluster: newCluster(newSandbox(t)), lines: realText(t, lineCount), members: map[string]*member{}}
	s.begin()
	s.killConsumer("a")
	s.join("d")
	s.terminateConsumer("b")
	s.join("e")
	s.join("f") // four, among whom six partitions cannot be shared evenly
	s.pauseConsumer("c")
	s.killDaemon()
	s.finish()
	s.leaveAll()
	s.judge()
	s.stopDaemon()
}

// note reports a figure.
func (s *scenario) note(format string, args ...any) {
	s.t.Helper()
	s.t.Logf(format, args...)
}

// begin starts the daemon and three consumers of a new topic.
func (s *scenario) begin() {
	s.t.Helper()
	s.note("daemon ready with an empty directory after %v", s.startDaemon("--session-timeout", daemonLease.String()).Round(time.Millisecond))
	s.history = s.watch()
	s.tool("topics", "create", topic, "--partitions", fmt.Sprint(partitions))
	s.feeder = s.startFeeder(topic, s.lines)
	s.feeder.more(10_000, 5_000, reserve)
	for _, name := range []string{"a", "b", "c"} {
		s.join(name)
	}
	s.feeder.drained()
	s.history.until(patience, "every partition has an offset", func(tr tree) bool { return len(tr.offsets(group, topic)) == partitions })
	s.checkTree()
}

// join starts a consumer and waits until the group has shared out anew.
func (s *scenario) join(name string) {
	s.t.Helper()
	before := s.history.snapshot().members(group)
	p := s.startConsumer("consumer-"+name, group, topic, "--from-beginning", "--set", fmt.Sprintf("zookeeper.session.timeout.ms=%d", lease.Milliseconds()))
	began := time.Now()
	var id string
	s.history.until(patience, p.name+" registers", func(tr tree) bool {
		for _, m := range tr.members(group) {
			if !slices.Contains(before, m) {
				id = m
			}
		}
		return id != ""
	})
	host, err := os.Hostname()
	if err != nil {
		s.t.Fatal(err)
	}
	if !regexp.MustCompile("^" + regexp.QuoteMeta(host) + `:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`).MatchString(id) {
		s.t.Errorf("consumer id %q is not <hostname>:<uuid>", id)
	}
	s.members[name] = &member{p, id}
	s.live = append(s.live, id)
	s.settled()
	s.note("consumer %s joined and the group settled after %v", name, time.Since(began).Round(time.Millisecond))
}

// settled waits until the live consumers own the partitions by the rule.
func (s *scenario) settled() {
	s.t.Helper()
	s.history.until(patience, fmt.Sprintf("%d consumers share the partitions by the rule", len(s.live)), func(tr tree) bool {
		return tr.shared(group, topic, allOn(1, partitions), s.live...)
	})
}

func (s *scenario) drop(m *member) {
	s.live = slices.DeleteFunc(s.live, func(id string) bool { return id == m.id })
}

// look is what a frozen consumer has, what it has printed, and what it has not.
type look struct {
	owned     []int
	committed map[int]int64 // in the registry
	printed   map[int]int64 // the offset after the last one printed
	logEnd    map[int]int64
}

func (s *scenario) look(m *member) look {
	s.t.Helper()
	// What it had sent before it stood may wait in etcd yet; what is written now comes after that.
	s.etcdctl("put", "/mark", m.id)
	s.etcdctl("del", "/mark")
	tr := s.readTree()
	records, err := readOutput(m.stdout, s.lines)
	if err != nil {
		s.t.Fatal(err)
	}
	l := look{committed: tr.offsets(group, topic), printed: ends(records)}
	for p, thread := range tr.owners(group, topic) {
		if thread == m.id+"-0" {
			l.owned = append(l.owned, p)
		}
	}
	slices.Sort(l.owned)
	if l.logEnd, err = s.describe(group).logEnds(); err != nil {
		s.t.Fatal(err)
	}
	return l
}

// lagging are the partitions with records that are in the log and not printed;
// tails those with records that are printed and not committed.
func (l look) lagging() []int {
	return slices.DeleteFunc(slices.Clone(l.owned), func(p int) bool { return l.logEnd[p] <= l.printed[p] })
}

func (l look) tails() []int {
	return slices.DeleteFunc(slices.Clone(l.owned), func(p int) bool { return l.printed[p] <= l.committed[p] })
}

// caught freezes a consumer in the middle of its work: when a condition holds,
// which is looked at while the consumer stands and so cannot change. If it does not
// hold, the consumer goes on for a moment and is frozen again.
func (s *scenario) caught(m *member, what string, is func() bool) {
	s.t.Helper()
	var last int64    // what it had printed at the last try
	const enough = 50 // tries in which it printed nothing: it needs another burst
	for try, still := 1, enough; try <= 2000; try++ {
		if still == enough {
			// It stands while the burst comes, and then has all of it before it.
			m.freeze()
			last, still = m.size(), 0
			s.feeder.more(6_000, unpaced, reserve)
			s.feeder.drained()
			m.thaw()
		}
		time.Sleep(300 * time.Microsecond)
		since := time.Now()
		m.freeze()
		if still++; m.size() > last {
			last, still = m.size(), 0
		}
		if still == 0 && is() {
			s.note("%s was caught at try %d: %s", m.name, try, what)
			return
		}
		m.thaw()
		if stood := time.Since(since); stood > 50*time.Millisecond {
			time.Sleep(max(10*time.Millisecond, stood/4)) // it has a lease to renew, too
		}
	}
	s.t.Fatalf("%s was never caught: %s", m.name, what)
}

// moved waits until partitions have other owners than one consumer, and returns
// when that was.
func (s *scenario) moved(from *member, owned []int) time.Time {
	s.t.Helper()
	s.history.until(patience, "the partitions of "+from.name+" have other owners", func(tr tree) bool {
		owners := tr.owners(group, topic)
		return !slices.ContainsFunc(owned, func(p int) bool { return owners[p] == "" || owners[p] == from.id+"-0" })
	})
	var last time.Time
	for _, p := range owned {
		for _, ch := range s.history.all() {
			if ch.key == fmt.Sprintf("/consumers/%s/owners/%s/1-%d", group, topic, p) && !ch.deleted && ch.at.After(last) {
				last = ch.at
			}
		}
	}
	return last
}

// killConsumer kills one with lag and with an uncommitted tail.
func (s *scenario) killConsumer(name string) {
	s.t.Helper()
	m := s.members[name]
	ttl := s.grantedTTL(s.history.snapshot()["/consumers/"+group+"/ids/"+m.id].Lease)
	var since time.Time
	s.caught(m, "lag above zero, and an uncommitted tail", func() bool {
		since = time.Now()
		s.tail = s.look(m)
		return len(s.tail.lagging()) > 0 && len(s.tail.tails()) > 0
	})
	m.signal(syscall.SIGKILL)
	<-m.done
	s.killed = m
	s.drop(m)
	// That nothing of it was committed after the look is for judgeKilled to see, in the
	// history: the next owner may commit before anybody could look once more.
	s.feeder.more(3_000, 1_000, reserve) // so that the others are busy meanwhile
	took := s.moved(m, s.tail.owned).Sub(since)
	s.note("kill -9 of %s: owned %v, lag in %v, tails in %v; others own all after %v (lease %v)", m.name, s.tail.owned, s.tail.lagging(),
		s.tail.tails(), took.Round(time.Millisecond), ttl)
	if took > ttl+ttl*4/5 { // it takes a second more than the lease; what waits for two is too late
		s.t.Errorf("partitions of a killed consumer moved after %v, want at most its lease of %v and a moment", took, ttl)
	}
	s.settled()
}

// terminateConsumer ends one in order, under load.
func (s *scenario) terminateConsumer(name string) {
	s.t.Helper()
	m := s.members[name]
	before := m.size()
	s.feeder.more(8_000, unpaced, reserve)
	until(s.t, patience, m.name+" works on the burst", func() bool { return m.size() > before+4096 })
	var owned []int
	for p, thread := range s.history.snapshot().owners(group, topic) {
		if thread == m.id+"-0" {
			owned = append(owned, p)
		}
	}
	since := time.Now()
	m.signal(syscall.SIGTERM)
	s.drop(m)
	took := s.moved(m, owned).Sub(since)
	m.exits(0, patience)
	s.note("SIGTERM of %s: others own %v after %v; it exited after %v", m.name, owned, took.Round(time.Millisecond),
		m.ended.Sub(since).Round(time.Millisecond))
	if took > lease*4/5 { // without waiting for a lease
		s.t.Errorf("partitions of a consumer that left in order moved after %v", took)
	}
	s.settled()
}

// pauseConsumer stops one past its lease and lets it go on.
func (s *scenario) pauseConsumer(name string) {
	s.t.Helper()
	m := s.members[name]
	idKey := "/consumers/" + group + "/ids/" + m.id
	former := s.history.snapshot()[idKey].Lease
	ttl := s.grantedTTL(former)
	var since time.Time
	var l look
	// It stands in the middle of its work, with records fetched that it must not print
	// afterwards. Where it stands matters: between the last look at the lease and the
	// write that follows lie a few instructions, and stopped just there any program
	// would write that one record. Only a fence at the reader of the output could
	// prevent that, so it is not what is tested here. One record is written at a time:
	// while one is in its write, no other is between look and write.
	s.caught(m, "lag above zero, in the write of a record", func() bool {
		since = time.Now()
		if !m.writing() {
			return false
		}
		l = s.look(m)
		return len(l.lagging()) > 0
	})
	s.drop(m)
	took := s.moved(m, l.owned).Sub(since)
	s.settled()
	s.note("SIGSTOP of %s: owned %v, lag in %v; others own all after %v (lease %v)", m.name, l.owned, l.lagging(), took.Round(time.Millisecond), ttl)

	s.feeder.more(4_000, unpaced, reserve)
	s.feeder.drained()
	s.consumed("while " + m.name + " stands")
	records, err := readOutput(m.stdout, s.lines)
	if err != nil {
		s.t.Fatal(err)
	}
	s.stopped, s.stoppedAt = m, len(records)
	s.thawed = s.lastRevision()
	s.feeder.more(4_000, 4_000, reserve)
	began := time.Now()
	m.thaw()
	s.history.until(patience, m.name+" is registered under a new lease", func(tr tree) bool {
		return tr[idKey].Lease != 0 && tr[idKey].Lease != former
	})
	s.live = append(s.live, m.id)
	s.settled()
	s.note("SIGCONT of %s: back in the group with its share after %v", m.name, time.Since(began).Round(time.Millisecond))
}

func (s *scenario) lastRevision() int64 {
	all := s.history.all()
	return all[len(all)-1].ModRevision
}

// consumed waits until everything that is in the log is committed.
func (s *scenario) consumed(when string) description {
	s.t.Helper()
	var d description
	until(s.t, patience, "lag is 0 "+when, func() bool {
		d = s.describe(group)
		for _, r := range d.Partitions {
			if r.Lag == nil || *r.Lag != 0 {
				return false
			}
		}
		return len(d.Partitions) == partitions
	})
	return d
}

// killDaemon kills the daemon while it is written to and read from, and starts it
// again on the same directory and ports.
func (s *scenario) killDaemon() {
	s.t.Helper()
	sent, limit := s.feeder.progress()
	s.feeder.rest(3_000) // slowly, so that enough is left when the daemon is killed
	until(s.t, patience, "the producer is at work", func() bool { n, _ := s.feeder.progress(); return n > limit+4_000 })
	brokerKey := "/brokers/ids/1"
	former := s.history.snapshot()[brokerKey]
	s.outage = time.Now()
	s.daemon.signal(syscall.SIGKILL)
	<-s.daemon.done
	atKill, limit := s.feeder.progress()
	if atKill == limit {
		s.t.Fatalf("nothing is left to produce at the kill: %d of %d", sent, limit)
	}
	s.feeder.rest(12_000)
	took := s.startDaemon("--session-timeout", daemonLease.String())
	s.recovered = time.Now()
	s.note("kill -9 of the daemon after line %d: ready again %v after its start (its lease: %v)", atKill, took.Round(time.Millisecond), daemonLease)
	if took > daemonLease/2 {
		s.t.Errorf("the daemon was ready after %v: did it wait for its own lease?", took)
	}
	s.history.until(patience, "the daemon is registered anew", func(tr tree) bool {
		return tr[brokerKey].CreateRevision > former.CreateRevision && tr[brokerKey].Lease != former.Lease
	})
}

// finish lets the rest of the text through.
func (s *scenario) finish() {
	s.t.Helper()
	s.feeder.drained()
	s.feeder.kcat.exits(0, 2*patience)
	if errs := tail(s.feeder.kcat.stderr); strings.Contains(errs, "Delivery failed") {
		s.t.Errorf("kcat: %s", errs)
	}
	s.registeredAnew()
	s.settled()
	d := s.consumed("at the end")
	s.note("all consumed %v after the daemon was ready again", time.Since(s.recovered).Round(time.Millisecond))
	tr := s.readTree()
	offsets, owners := tr.offsets(group, topic), share(allOn(1, partitions), s.live...)
	var sum int64
	for i, r := range d.Partitions {
		if r.Topic != topic || r.Partition != i || r.Broker != 1 || r.Offset == nil || r.LogEnd == nil || r.Owner == nil || r.Host == nil {
			s.t.Fatalf("describe, row %d: %+v", i, r)
		}
		if *r.Offset != offsets[i] || *r.LogEnd != offsets[i] || *r.Owner != owners[i] {
			s.t.Errorf("describe, row %d: offset %d, log end %d, owner %s; the registry has %d and %s", i, *r.Offset, *r.LogEnd, *r.Owner, offsets[i], owners[i])
		}
		sum += offsets[i]
	}
	if sum != lineCount || d.Strategy != "range" || len(d.Members) != len(s.live) {
		s.t.Errorf("%d records, strategy %s, %d members; want %d, range, %d", sum, d.Strategy, len(d.Members), lineCount, len(s.live))
	}
	s.checkTree()
}

// registeredAnew waits for consumers whose session did not outlast the daemon's crash. Its
// clock stood meanwhile, so the registry looks quiet until they are back.
func (s *scenario) registeredAnew() {
	s.t.Helper()
	for _, m := range s.members {
		if !slices.Contains(s.live, m.id) {
			continue
		}
		until(s.t, patience, m.name+" is registered since it lost its last session", func() bool {
			log, err := os.ReadFile(m.stderr)
			if err != nil {
				s.t.Fatal(err)
			}
			return bytes.LastIndex(log, []byte("msg=registered")) > bytes.LastIndex(log, []byte(`msg="session lost"`))
		})
	}
	s.caughtUp(s.history)
}

// checkTree compares all keys, as etcdctl gets them, with the registry's layout.
func (s *scenario) checkTree() {
	s.t.Helper()
	c := treeCheck{s.t, s.readTree()}
	c.cluster()
	c.topic(topic, allOn(1, partitions), map[int]int64{1: c.broker(1, s.kafka)})
	c.group(group, topic, allOn(1, partitions), s.live...)
	c.nothingElse()
}

// leaveAll ends the consumers in order; of their ephemeral keys none must be left.
func (s *scenario) leaveAll() {
	s.t.Helper()
	var own []int64
	for key, kv := range s.readTree() {
		if strings.HasPrefix(key, "/consumers/"+group+"/ids/") {
			own = append(own, kv.Lease)
		}
	}
	for _, m := range s.members {
		if m.running() {
			m.signal(syscall.SIGTERM)
		}
	}
	for _, m := range s.members {
		if m != s.killed {
			m.exits(0, patience)
		}
	}
	tr := s.readTree()
	broker := tr["/brokers/ids/1"].Lease
	for key, kv := range tr {
		if kv.Lease != 0 && kv.Lease != broker || strings.Contains(key, "/ids/") && !strings.HasPrefix(key, "/brokers/") || strings.Contains(key, "/owners/") {
			s.t.Errorf("%s is left after all consumers have gone (lease %x)", key, kv.Lease)
		}
	}
	left := s.leases()
	for _, l := range own {
		if left[l] {
			s.t.Errorf("lease %x of a consumer is left after it has gone", l)
		}
	}
	// One that was being granted when the daemon was killed is nobody's, and runs out.
	until(s.t, patience, "no lease is left but the daemon's", func() bool { left = s.leases(); return len(left) == 1 && left[broker] })
	s.history.until(patience, "the watch has told all", func(now tree) bool {
		return maps.EqualFunc(now, tr, func(a, b keyValue) bool { return a.ModRevision == b.ModRevision })
	})
}

// judge compares what was printed with what the registry's history allowed.
func (s *scenario) judge() {
	s.t.Helper()
	stints, err := replayGroup(group, topic, s.history.all())
	if err != nil {
		s.t.Fatalf("history of the registry: %v", err)
	}
	outputs := map[string][]record{}
	for name, m := range s.members {
		records, err := readOutput(m.stdout, s.lines)
		if err != nil {
			s.t.Fatal(err)
		}
		if err := explain(m.id, records, stints); err != nil {
			s.t.Error(err)
		}
		outputs[name] = records
	}
	if err := complete(outputs, s.lines); err != nil {
		s.t.Error(err)
	}
	n, err := repeated(outputs, stints)
	if err != nil {
		s.t.Error(err)
	}
	total := 0
	for name, list := range outputs {
		s.note("consumer %s printed %d lines", name, len(list))
		total += len(list)
	}
	if s.t.Failed() {
		return
	}
	s.note("%d lines printed, %d of them a second time", total, n)
	s.judgeLosses(stints)
	s.judgeKilled(stints)
	s.judgeStopped(outputs)
}

// judgeLosses requires that each ownership ended in order, but for the killed, the
// stopped, and those whose session the daemon's crash cost.
func (s *scenario) judgeLosses(stints []*stint) {
	s.t.Helper()
	for _, st := range stints {
		inOutage := st.endedAt.After(s.outage) && st.endedAt.Before(s.recovered.Add(2*lease+time.Second))
		switch {
		case st.ended == 0:
			s.t.Errorf("never ended: %v", st)
		case !st.lost, st.owner == s.killed.id, st.owner == s.stopped.id && st.claimed < s.thawed:
		case inOutage:
			s.note("lost in the daemon's crash: %v", st)
		default:
			s.t.Errorf("lost without a fault: %v", st)
		}
	}
	for p := range partitions {
		i := slices.IndexFunc(stints, func(st *stint) bool { return st.partition == p })
		if i < 0 || stints[i].from != 0 {
			s.t.Errorf("partition %d did not begin at 0", p)
		}
	}
}

// judgeKilled requires of each partition of the killed consumer: its next owner
// began where etcdctl saw the offset right after the kill, and what was printed
// twice ends where the killed one ended.
func (s *scenario) judgeKilled(stints []*stint) {
	s.t.Helper()
	for _, p := range s.tail.owned {
		own := slices.DeleteFunc(slices.Clone(stints), func(st *stint) bool { return st.partition != p })
		i := slices.IndexFunc(own, func(st *stint) bool { return st.owner == s.killed.id && st.lost })
		if i < 0 || i+1 == len(own) {
			s.t.Errorf("partition %d of the killed consumer: %v", p, own)
			continue
		}
		committed, printed := s.tail.committed[p], max(s.tail.printed[p], own[i].from)
		if own[i].to != committed || own[i].printed != printed || own[i+1].from != committed {
			s.t.Errorf("partition %d: committed %d and printed to %d at the kill; %v; %v", p, committed, printed, own[i], own[i+1])
		}
		s.note("partition %d: committed %d at the kill, printed to %d: %d lines twice", p, committed, printed, printed-committed)
	}
}

// judgeStopped requires that the stopped consumer printed nothing after SIGCONT
// but under ownerships that it claimed after it.
func (s *scenario) judgeStopped(outputs map[string][]record) {
	s.t.Helper()
	for name, m := range s.members {
		if m != s.stopped {
			continue
		}
		for i, r := range outputs[name] {
			if (i >= s.stoppedAt) != (r.stint.claimed > s.thawed) {
				s.t.Errorf("%s: record %d of its output (%d before SIGCONT) belongs to %v; SIGCONT at revision %d", m.name, i, s.stoppedAt, r.stint, s.thawed)
				return
			}
		}
		s.note("%s printed %d lines before SIGSTOP and %d after it owned again", m.name, s.stoppedAt, len(outputs[name])-s.stoppedAt)
	}
}

// stopDaemon ends the daemon in order, and looks into what its etcd has on disk:
// another daemon, of another id, serves a copy of it.
func (s *scenario) stopDaemon() {
	s.t.Helper()
	s.history.p.kill()
	s.daemon.signal(syscall.SIGTERM)
	s.daemon.exits(0, patience)
	other := *s.cluster
	other.id, other.data = 9, s.path("copy")
	if err := os.CopyFS(other.data+"/etcd", os.DirFS(s.data+"/etcd")); err != nil {
		s.t.Fatal(err)
	}
	other.startDaemon("--etcd-name", "muster-1")
	for key, kv := range other.readTree() {
		if kv.Lease != 0 && key != "/brokers/ids/9" {
			s.t.Errorf("%s is left after SIGTERM of everything (lease %x)", key, kv.Lease)
		}
	}
	if leases := other.leases(); len(leases) != 1 {
		s.t.Errorf("leases left after SIGTERM of everything: %x", slices.Collect(maps.Keys(leases)))
	}
	other.daemon.signal(syscall.SIGTERM)
	other.daemon.exits(0, patience)
}
