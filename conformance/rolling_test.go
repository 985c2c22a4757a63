package conformance

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

const (
	rollRounds     = 11
	rollPartitions = 12
	rollConsumers  = 4
	rollProducers  = 3       // the last one our own, the others kcat
	rollRate       = 200     // lines a second of each producer
	rollLines      = 250_000 // of each, more than it will send
	rollKeys       = 240     // of each, so that every partition gets some all the time
	// rollLease is what daemons and consumers ask for: longer than etcd takes to elect
	// a leader on a busy machine.
	rollLease = 15 * time.Second
)

// rolling is the state of the test of a cluster whose members fail in turn.
type rolling struct {
	*three
	history   *history
	lines     []line
	home      homes
	traffic   *traffic
	feeders   []*feeder
	consumers []*process  // the id of each is its name
	repeats   int         // up to the last round
	judged    time.Time   // when losses were last looked at
	taken     map[int]int // how often each daemon was taken away, by broker id
	leaders   int         // rounds in which that was the leader of etcd
}

// fault is what is done to a daemon in a round.
type fault int

const (
	kill     fault = iota // -9, and away until the others have noticed
	killLong              // and away for longer than its lease
	stop                  // SIGSTOP for longer than its lease, of one that does not lead
	stopLeader
	killTwo // both away for longer than anybody's lease, and with them the quorum
)

// faults of the rounds that are not plain kills.
var faults = map[int]fault{2: killLong, 5: stopLeader, 8: stop, rollRounds: killTwo}

// TestRollingKills: three daemons of one cluster, each killed and started again in
// turn, under a group and producers that go on all the time. In two rounds the daemon
// is not killed but stopped, for longer than its lease; in the last, two are killed at
// once, and with them the quorum. Each consumer is told of one
// etcd member only, so that each fault takes that one from some.
func TestRollingKills(t *testing.T) {
	need(t, "kcat", "etcdctl")
	began := time.Now()
	s := &rolling{three: newThree(newSandbox(t), "--session-timeout", rollLease.String()), taken: map[int]int{}}
	s.begin()
	t.Logf("everything is up after %v", since(began))
	for round := 1; round <= rollRounds; round++ {
		s.round(round, faults[round])
	}
	if s.leaders == 0 {
		t.Error("the leader of etcd was never taken")
	}
	s.finish()
	t.Logf("all of it took %v", since(began))
}

func since(t time.Time) time.Duration { return time.Since(t).Round(time.Millisecond) }

// begin starts daemons, producers and consumers.
func (s *rolling) begin() {
	s.t.Helper()
	s.lines = realText(s.t, rollProducers*rollLines)
	for i := range s.lines {
		s.lines[i].key = fmt.Sprintf("%d-%d", i/rollLines, i%rollKeys)
	}
	s.t.Logf("three daemons with empty directories are ready after %v", s.startAll().Round(time.Millisecond))
	s.history = s.watch()
	s.tool("topics", "create", topic, "--partitions", fmt.Sprint(rollPartitions))
	s.history.until(patience, "the topic has its record", func(tr tree) bool { _, ok := tr["/brokers/topics/"+topic]; return ok })
	s.home = s.history.snapshot().homes(s.t, topic)
	s.checkSpread()
	s.traffic = newTraffic(s.t, s.lines, rollPartitions)
	for i := range rollConsumers {
		name := fmt.Sprintf("consumer-%d", i+1)
		p := s.nodes[i%len(s.nodes)].startConsumer(name, group, topic, "--from-beginning", "--set", "consumer.id="+name,
			"--set", fmt.Sprintf("zookeeper.session.timeout.ms=%d", rollLease.Milliseconds()), "--set", "auto.commit.interval.ms=500")
		s.consumers = append(s.consumers, p)
		s.traffic.consumer(name, p)
	}
	for i := range rollProducers {
		from, to := i*rollLines, (i+1)*rollLines
		var f *feeder
		if i < rollProducers-1 {
			f = s.startFeeder(topic, s.lines[from:to], telling...)
			s.traffic.producer(f.kcat.name, f.kcat, from, to)
		} else {
			// It does not tell of each record; it ends with status 0 only if all are stored.
			f = s.startProducer("produce", s.lines[from:to], s.muster, "produce", "--etcd-endpoints", s.nodes[i%len(s.nodes)].etcd, "--topic", topic, "-K", keyDelimiter)
		}
		s.feeders = append(s.feeders, f)
		f.rest(rollRate)
	}
	s.history.until(patience, "every partition has an offset", func(tr tree) bool { return len(tr.offsets(group, topic)) == rollPartitions })
	s.verify("before the first round")
}

// checkSpread requires that the partitions are spread over the brokers, no two in a
// row on one.
func (s *rolling) checkSpread() {
	s.t.Helper()
	counts := map[int]int{}
	for p, broker := range s.home {
		counts[broker]++
		if p > 0 && broker == s.home[p-1] {
			s.t.Errorf("partitions %d and %d are both on broker %d", p-1, p, broker)
		}
	}
	for _, n := range s.nodes {
		if counts[n.id] != rollPartitions/len(s.nodes) {
			s.t.Errorf("homes are %v: not spread over the brokers", s.home)
			return
		}
	}
}

// victims are whose turn it is: those taken least often, among those that fit.
func (s *rolling) victims(f fault) (list []*cluster, led bool) {
	s.t.Helper()
	leader := s.leader()
	list = slices.DeleteFunc(slices.Clone(s.nodes), func(c *cluster) bool {
		return f == stop && c == leader || f == stopLeader && c != leader
	})
	slices.SortStableFunc(list, func(a, b *cluster) int { return s.taken[a.id] - s.taken[b.id] })
	n := 1
	if f == killTwo {
		n = 2
	}
	list = list[:n]
	for _, c := range list {
		s.taken[c.id]++
	}
	if led = slices.Contains(list, leader); led {
		s.leaders++
	}
	return list, led
}

// round takes one daemon away and back, or two.
func (s *rolling) round(number int, f fault) {
	s.t.Helper()
	list, led := s.victims(f)
	s.traffic.rest()
	before := s.history.snapshot()
	var a absence
	if f == stop || f == stopLeader {
		a = s.pause(list[0])
	} else {
		a = s.kill(f, list)
	}
	if f == stopLeader {
		s.leader()                  // it knows by then that it is not
		time.Sleep(3 * time.Second) // what it revokes, it revokes in the next half second
	}
	if f == killTwo {
		s.sessionsEnded(before)
	}
	names := ""
	for _, n := range list {
		s.history.until(patience, fmt.Sprintf("broker %d is registered anew", n.id), func(tr tree) bool {
			return tr[n.brokerKey()].CreateRevision > before[n.brokerKey()].CreateRevision && tr.counted(n, topic)
		})
		names += fmt.Sprintf("broker %d, ", n.id)
	}
	back := time.Now()
	until(s.t, patience, fmt.Sprintf("every partition is written to after round %d", number), func() bool { return s.traffic.flows(back) })
	written := since(back)
	s.verify(fmt.Sprintf("after round %d", number))
	s.t.Logf("round %d: %s%s, leader of etcd: %v; away for %v, ready %v after its start; all written to %v after that, all well after %v",
		number, names, a.what, led, a.away, a.ready, written, since(back))
	s.tell(list)
	s.judgeLosses(func(st *stint) bool {
		// A leader of etcd that goes on after a stop can revoke the leases of all, which
		// look expired to it, before it learns that it leads no more: it asks the others
		// only if its clock has not ticked for a while, and that ticks again at once. Up
		// to there nothing may be lost.
		return f == stopLeader && st.ended > a.thawed || f == killTwo
	})
}

// sessionsEnded waits until the consumers are registered anew after an outage that no
// session outlasts. The clock of the registry stood meanwhile: it looks quiet until then.
func (s *rolling) sessionsEnded(before tree) {
	s.t.Helper()
	for _, p := range s.consumers {
		key := "/consumers/" + group + "/ids/" + p.name
		s.history.until(patience, p.name+" is registered anew", func(tr tree) bool {
			return tr[key].Lease != 0 && tr[key].Lease != before[key].Lease
		})
	}
}

// counted tells whether a daemon is registered and has said how many partitions of a
// topic it has, which it does a moment later.
func (tr tree) counted(n *cluster, topic string) bool {
	lease := tr[n.brokerKey()].Lease
	return lease != 0 && tr[fmt.Sprintf("/brokers/topics/%s/%d", topic, n.id)].Lease == lease
}

// absence is what became of a daemon.
type absence struct {
	what        string
	away, ready time.Duration
	thawed      int64 // revision when it went on
}

// kill kills daemons and starts them again.
func (s *rolling) kill(f fault, list []*cluster) absence {
	s.t.Helper()
	began := time.Now()
	for _, n := range list {
		n.daemon.signal(syscall.SIGKILL)
	}
	for _, n := range list {
		<-n.daemon.done
	}
	pause := 1500 * time.Millisecond
	if f != kill {
		pause = rollLease + 2*time.Second
	}
	time.Sleep(pause)
	a := absence{what: "killed", away: since(began)}
	for _, n := range list {
		s.launch(n)
	}
	for _, n := range list {
		s.ready(n.daemon)
	}
	a.ready = since(began) - a.away
	if f == killTwo {
		s.watchAgain(s.history)
	}
	return a
}

// pause stops a daemon until the others know it as gone. They are asked: a watch
// could be one of the stopped daemon.
func (s *rolling) pause(n *cluster) absence {
	s.t.Helper()
	var others []string
	for _, c := range s.nodes {
		if c != n {
			others = append(others, c.etcd)
		}
	}
	ask := *s.cluster
	ask.etcd = strings.Join(others, ",")
	began := time.Now()
	n.daemon.freeze()
	until(s.t, rollLease+patience, fmt.Sprintf("broker %d is not registered any more", n.id), func() bool {
		time.Sleep(100 * time.Millisecond)
		_, there := ask.readTree()[n.brokerKey()]
		return !there
	})
	time.Sleep(time.Second)
	a := absence{what: "stopped", thawed: ask.revision()}
	n.daemon.thaw()
	a.away = since(began)
	return a
}

// verify requires that everything acknowledged by now is consumed, and that nothing
// is wrong in the registry.
func (s *rolling) verify(when string) {
	s.t.Helper()
	goals := s.traffic.goals()
	until(s.t, patience, "everything acknowledged is consumed "+when, func() bool { return s.traffic.missing(goals) == 0 })
	ids := make([]string, len(s.consumers))
	for i, p := range s.consumers {
		if !p.running() {
			s.t.Fatalf("%s has ended: %s", p.name, p.state())
		}
		ids[i] = p.name
	}
	s.history.until(patience, "the consumers share the partitions by the rule "+when, func(tr tree) bool {
		return tr.shared(group, topic, s.home, ids...)
	})
	s.history.until(patience, "everything acknowledged is committed "+when, func(tr tree) bool {
		offsets := tr.offsets(group, topic)
		for p, acked := range goals {
			for offset := range acked {
				if offsets[p] <= offset {
					return false
				}
			}
		}
		return true
	})
	s.checkTree(ids)
	s.doctor(s.nodes[len(s.taken)%len(s.nodes)])
	s.judge()
}

// checkTree compares all keys with the registry's layout.
func (s *rolling) checkTree(ids []string) {
	s.t.Helper()
	c := treeCheck{s.t, s.readTree()}
	c.cluster()
	leases := map[int]int64{}
	for _, n := range s.nodes {
		leases[n.id] = c.broker(n.id, n.kafka)
	}
	c.topic(topic, s.home, leases)
	c.group(group, topic, s.home, ids...)
	c.nothingElse()
}

// doctor requires that the registry's own check finds nothing. It is asked by one
// member.
func (s *rolling) doctor(member *cluster) {
	s.t.Helper()
	p := s.start("doctor", nil, nil, s.muster, "registry", "doctor", "--etcd-endpoints", member.etcd)
	<-p.done
	if p.cmd.ProcessState.ExitCode() != 0 {
		s.t.Errorf("registry doctor, %s:\n%s%s", p.state(), tail(p.stdout), tail(p.stderr))
	}
}

// judge compares what the consumers printed with what the registry's history allowed
// them, so far.
func (s *rolling) judge() []*stint {
	s.t.Helper()
	var stints []*stint
	var outputs map[string][]record
	var err error
	// What is committed was printed, and what is printed was owned; either is seen here a
	// moment later.
	for end := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		if stints, err = replayGroup(group, topic, s.history.all()); err != nil {
			s.t.Fatalf("history of the registry: %v", err)
		}
		outputs, _ = s.traffic.snapshot()
		for _, p := range s.consumers {
			if err = explain(p.name, outputs[p.name], stints); err != nil {
				break
			}
		}
		if err == nil || time.Now().After(end) {
			break
		}
	}
	if err == nil {
		_, err = repeated(outputs, stints)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return stints
}

// tell prints how long nothing was heard of producers and consumers while a daemon
// was away.
func (s *rolling) tell(taken []*cluster) {
	s.t.Helper()
	var its, others []int
	for p, broker := range s.home {
		if slices.ContainsFunc(taken, func(n *cluster) bool { return n.id == broker }) {
			its = append(its, p)
		} else {
			others = append(others, p)
		}
	}
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(s.traffic.silences)) {
		all, elsewhere := s.traffic.longest(name, others)
		_, there := s.traffic.longest(name, its)
		fmt.Fprintf(&b, " %s %d/%d/%d,", name, all.Milliseconds(), elsewhere.Milliseconds(), there.Milliseconds())
	}
	_, repeats := s.traffic.snapshot()
	s.t.Logf("  longest silence in ms (at all, of one partition elsewhere, of one of its own):%s %d records printed again", b.String(), repeats-s.repeats)
	s.repeats = repeats
}

// judgeLosses requires that no consumer has lost its session since the last round,
// but for excused losses.
func (s *rolling) judgeLosses(excused func(*stint) bool) {
	s.t.Helper()
	lost := 0
	for _, st := range s.judge() {
		switch {
		case !st.lost || !st.endedAt.After(s.judged):
		case excused(st):
			lost++
		default:
			s.t.Errorf("a session was lost: %v", st)
		}
	}
	if lost > 0 {
		s.t.Logf("  %d partitions were lost with a session", lost)
	}
	s.judged = time.Now()
}

// finish ends producers, consumers and daemons in order, and judges all of it.
func (s *rolling) finish() {
	s.t.Helper()
	sent := 0
	var all []int
	for i, f := range s.feeders {
		n := len(f.end(2 * patience))
		sent += n
		for k := range n {
			all = append(all, i*rollLines+k)
		}
		if log := tail(f.kcat.stderr); strings.Contains(log, "Delivery failed") {
			s.t.Errorf("%s: %s", f.kcat.name, log)
		}
	}
	s.verify("at the end")
	// Our own producer does not tell what it was told.
	until(s.t, patience, "every line is printed", func() bool { return s.traffic.unprinted(all) == 0 })
	for _, p := range s.consumers {
		p.signal(syscall.SIGTERM)
	}
	for _, p := range s.consumers {
		p.exits(0, patience)
	}
	s.traffic.end()
	s.judge()
	s.complete(all)
	s.left()
	_, repeats := s.traffic.snapshot()
	s.t.Logf("%d lines acknowledged, all consumed; %d printed a second time", sent, repeats)
	s.history.p.kill()
	s.stopAll()
	// The last one could not take its keys away. Started again, all find their own.
	s.startAll()
	until(s.t, patience, "the daemons are registered again", func() bool {
		tr := s.readTree()
		return !slices.ContainsFunc(s.nodes, func(n *cluster) bool { return !tr.counted(n, topic) })
	})
	s.left()
	s.stopAll()
}

// complete requires that each line that was sent is in the log once, and printed, the
// offsets of a partition without a gap, and the lines of a producer there in order.
func (s *rolling) complete(all []int) {
	s.t.Helper()
	places := map[int]int{}
	for p, printed := range s.traffic.printed {
		last := map[int]int{} // by producer
		for offset := range int64(len(printed)) {
			n, ok := printed[offset]
			if !ok {
				s.t.Fatalf("partition %d: %d offsets were printed, and %d is not among them", p, len(printed), offset)
			}
			if before, ok := last[n/rollLines]; ok && n <= before {
				s.t.Errorf("partition %d offset %d holds line %d, after line %d of the same producer", p, offset, n, before)
			}
			last[n/rollLines] = n
			places[n]++
		}
	}
	for _, n := range all {
		if places[n] != 1 {
			s.t.Fatalf("line %d was acknowledged and is in the log %d times", n, places[n])
		}
	}
	if len(places) != len(all) {
		s.t.Errorf("%d lines are in the log, %d were sent", len(places), len(all))
	}
}

// left requires that nothing ephemeral is left but the daemons' own.
func (s *rolling) left() {
	s.t.Helper()
	c := treeCheck{s.t, s.readTree()}
	c.cluster()
	leases := map[int]int64{}
	for _, n := range s.nodes {
		leases[n.id] = c.broker(n.id, n.kafka)
	}
	c.topic(topic, s.home, leases)
	c.group(group, topic, s.home)
	c.nothingElse()
	until(s.t, patience, "no lease is left but the daemons'", func() bool { return len(s.leases()) == len(s.nodes) })
}
