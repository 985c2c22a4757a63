package simulation

import (
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/muster-io/muster/registry"
)

// counts tell how often each thing happened, summed over runs.
type counts [numCounts]int

type count int

const (
	joins count = iota
	leaves
	crashes
	restarts
	shortStops
	longStops
	revokedLeases
	deletedRegistrations
	deletedOwners
	deletedTopics
	sloppyDeletions
	createdTopics
	addedPartitions
	lostBrokers
	returnedBrokers
	trimmedLogs
	cutWatches
	lateWatches
	slowMessage
	slowHandlers
	lostReplies
	lateEffects
	lostRequests
	lostRenewals
	staleClaims
	reregistered
	fencedCommits
	outOfRange
	losses
	claimedKeys
	handedOver
	finishedAgain
	admitted
	deletedTargets
	garbledTargets
	proposed
	staleProposals
	refusals
	filters
	sameIDs
	outages
	suspends
	compactions
	calmJoins
	calmLeaves
	calmPartitions
	calmCrashes
	calmBrokers
	calmTopics
	numCounts
)

var countNames = [numCounts]string{"joins", "leaves", "crashes", "restarts at once", "pauses short of the lease", "pauses past the lease", "leases revoked by hand",
	"registrations deleted by hand", "owner keys deleted by hand", "topics deleted", "topic records deleted by hand", "topics created", "partitions added", "brokers lost",
	"brokers back", "logs trimmed", "watches cut", "late watches", "slow messages", "slow handlers", "lost replies", "late effects", "lost requests", "lost renewals",
	"stale claims", "registered again", "fenced commits", "offsets out of range", "partitions lost", "owner keys claimed", "records handed over",
	"records finished again", "commits admitted", "target records deleted by hand", "target records garbled", "targets written", "stale proposals", "refusals told", "members with a filter",
	"second processes with an id", "outages of the registry", "suspends of all", "compactions", "calm joins", "calm leaves", "calm partitions", "calm crashes", "calm broker losses", "calm topics of no concern"}

// result is what one run came to.
type result struct {
	seed    uint64
	failure string
	counts  counts
	quiet   time.Duration // until the storm's last damage was mended
	virtual time.Duration
}

// simulate is one run.
func simulate(seed uint64, off guard, trace func(string)) (r result) {
	w := newWorld(seed)
	w.trace, w.off, w.lenient = trace, off, *lenient
	r.seed = seed
	defer func() {
		r.counts, r.virtual = w.counts, w.now
		switch e := recover().(type) {
		case nil:
		case failure:
			r.failure = e.text
		default:
			r.failure = fmt.Sprintf("panic: %v\n%s", e, debug.Stack())
		}
		w.close()
	}()
	w.draw()
	w.begin()
	w.storm()
	r.quiet = w.calm()
	for range 2 {
		w.calmChange()
	}
	w.drain()
	return r
}

// draw decides what of the run is the same throughout.
func (w *world) draw() {
	p := &w.profile
	p.members = 2 + w.r.IntN(4)
	p.partitions = 2 + w.r.IntN(7)
	p.disturb = 4 + w.r.IntN(14)
	if w.chance(250) || *large {
		p.members, p.partitions, p.disturb = 10+w.r.IntN(41), 20+w.r.IntN(80), 20
	}
	p.ttl = []time.Duration{2 * sec, 2 * sec, 3 * sec, 6 * sec}[w.r.IntN(4)]
	p.handling = []time.Duration{5 * ms, 50 * ms, 200 * ms}[w.r.IntN(3)]
	p.commits = []time.Duration{300 * ms, sec, 5 * sec}[w.r.IntN(3)]
	p.history = w.chance(3)
	p.faults = []int{0, 20, 60, 150}[w.r.IntN(4)]
	switch w.r.IntN(8) {
	case 0, 1:
		p.lists = [][]string{{"range"}}
	case 2:
		p.lists = [][]string{{"roundrobin", "range"}}
		p.uniform = !w.chance(5)
	case 3, 4, 5:
		p.lists = [][]string{{"sticky", "range"}}
		p.uniform = w.chance(2)
	default:
		p.lists = [][]string{{"range"}, {"range", "range-numeric"}, {"range-numeric", "range"}, nil, {"sticky", "range"}, {"range", "sticky"}}
	}
}

var topicNames = []string{"a", "b"}

func (w *world) begin() {
	for id := range int32(2) {
		w.setBroker(id+1, true)
	}
	w.createTopic("a", w.profile.partitions)
	w.createTopic("b", 1+w.profile.partitions/3)
	w.produceSome()
	for range w.profile.members {
		w.join()
		if w.chance(2) {
			w.run(w.between(0, 50*ms))
		}
	}
	w.produce()
}

func (w *world) setBroker(id int32, up bool) {
	key := fmt.Sprintf("%s%d", w.root.Brokers(), id)
	w.down[id] = !up
	if up {
		w.byHand(registry.Txn{Then: []registry.Op{registry.Put(key, []byte("{}"), 0)}})
	} else {
		w.byHand(registry.Txn{Then: []registry.Op{registry.Delete(key)}})
	}
	w.tell("broker %d is up: %v", id, up)
	if up {
		for _, l := range w.sortedLogs() {
			if l.partition.Home == id {
				l.readable()
			}
		}
	}
}

func (w *world) sortedLogs() (list []*plog) {
	for _, l := range w.observer.logs {
		list = append(list, l)
	}
	slices.SortFunc(list, func(a, b *plog) int { return registry.ComparePartitions(a.partition, b.partition) })
	return list
}

func (w *world) createTopic(name string, partitions int) {
	rec := registry.TopicRecord{Version: 1, Partitions: map[int32][]int32{}, Home: map[int32]int32{}}
	for n := range int32(partitions) {
		rec.Partitions[n], rec.Home[n] = []int32{1 + n%2}, 1+n%2
	}
	value, err := registry.Encode(rec)
	w.must(err)
	res := w.byHand(registry.Txn{
		If:   []registry.Cond{registry.Absent(w.root.Topic(name)), registry.Absent(w.root.DeletedTopic(name))},
		Then: []registry.Op{registry.Put(w.root.Topic(name), value, 0)},
	})
	if res.Succeeded {
		w.counts[createdTopics]++
		w.tell("topic %s is created at %d with %d partitions", name, res.Revision, partitions)
	}
}

func (w *world) addPartitions(name string, n int) {
	rec := registry.TopicRecord{Version: 1, Partitions: map[int32][]int32{}, Home: map[int32]int32{}}
	total := int32(len(w.lists[name]) + n)
	for n := range total {
		rec.Partitions[n], rec.Home[n] = []int32{1 + n%2}, 1+n%2
	}
	value, err := registry.Encode(rec)
	w.must(err)
	w.tell("topic %s gets %d partitions", name, total)
	w.byHand(registry.Txn{Then: []registry.Op{registry.Put(w.root.Topic(name), value, 0)}})
}

// deleteTopic deletes a topic as the tools do, or its record only, and creates it
// again some time later.
func (w *world) deleteTopic(name string) {
	partitions := len(w.lists[name])
	again := func() {
		if len(w.lists[name]) == 0 {
			w.createTopic(name, partitions)
			w.produceSome()
		}
	}
	w.tell("topic %s is deleted", name)
	if w.chance(4) {
		w.counts[sloppyDeletions]++
		w.observer.spoiled[name] = true
		for _, l := range w.observer.logs {
			if l.partition.Topic == name {
				l.sloppy = true
			}
		}
		w.byHand(registry.Txn{Then: []registry.Op{registry.Delete(w.root.Topic(name))}})
		w.after(w.between(0, 2*sec), again)
		return
	}
	w.counts[deletedTopics]++
	w.spawn(nil, func(t *task) {
		_, err := registry.DeleteTopic(ctx, link{w: w}, w.root, name, registry.DeleteOptions{})
		if errors.Is(err, registry.ErrNoTopic) {
			return // another deletion was faster
		}
		w.must(err)
		t.sleep(w.between(0, 2*sec))
		again()
	})
}

// produceSome puts a few records into some logs.
func (w *world) produceSome() {
	for _, l := range w.sortedLogs() {
		if l.end == 0 && w.chance(2) {
			l.end = int64(1 + w.r.IntN(8))
			l.readable()
		}
	}
}

// produce goes on putting records into logs.
func (w *world) produce() {
	w.after(w.between(20*ms, 300*ms), func() {
		if w.ended {
			return
		}
		if logs := w.sortedLogs(); len(logs) > 0 {
			l := logs[w.r.IntN(len(logs))]
			if l.end-l.finished < 10 {
				l.end += int64(1 + w.r.IntN(2))
				l.readable()
			}
		}
		w.produce()
	})
}

func (w *world) join() *process {
	rec := registry.ConsumerRecord{Version: 1, Pattern: registry.PatternStatic, Timestamp: "1", Subscription: map[string]int32{"a": 1, "b": 1},
		Strategy: w.profile.lists[w.r.IntN(len(w.profile.lists))]}
	if !w.profile.uniform {
		rec.Subscription["a"] += int32(w.r.IntN(2))
		if w.chance(3) {
			delete(rec.Subscription, "b")
		}
		if w.chance(6) {
			w.counts[filters]++
			rec.Pattern, rec.Subscription = registry.PatternWhiteList, map[string]int32{"[ab]": 1}
			if w.chance(2) {
				rec.Pattern, rec.Subscription = registry.PatternBlackList, map[string]int32{"b": 2}
			}
		}
	}
	w.counts[joins]++
	return w.start(fmt.Sprintf("m%d", w.started+1), rec, w.chance(3))
}

// storm is the time in which things go wrong.
func (w *world) storm() {
	w.profile.storming = true
	w.run(w.between(0, sec))
	for range w.profile.disturb {
		w.disturb()
		if !w.chance(3) {
			w.run(w.between(0, 1200*ms))
		}
	}
	w.profile.storming = false
}

func (w *world) someone() *process {
	if len(w.procs) == 0 {
		return nil
	}
	return w.procs[w.r.IntN(len(w.procs))]
}

func (w *world) disturb() {
	p := w.someone()
	if p == nil {
		w.join()
		return
	}
	switch w.r.IntN(26) {
	case 25:
		// A process stands so long that another is started in its place, and goes on.
		if w.named(p.id) == 1 {
			w.counts[sameIDs]++
			p.stop(w.profile.ttl + w.between(0, w.profile.ttl))
			w.after(w.between(0, w.profile.ttl), func() {
				if w.profile.storming && w.named(p.id) == 1 {
					w.start(p.id, p.record, p.largest)
				}
			})
		}
	case 23:
		w.counts[outages]++
		w.outage = w.now + w.between(100*ms, w.profile.ttl*3/2)
		w.tell("the registry does not answer until %s", w.outage)
	case 24:
		if w.chance(2) {
			w.counts[suspends]++
			d := w.between(100*ms, w.profile.ttl*3/2)
			for _, p := range w.procs {
				p.stop(d + w.between(0, 20*ms))
			}
			break
		}
		w.counts[compactions]++
		for _, p := range w.procs {
			for _, part := range sortedWatches(p.watches) {
				p.watches[part].cut()
			}
		}
	case 22:
		if w.chance(2) {
			w.counts[deletedTargets]++
			w.tell("the target record is deleted by hand")
			w.byHand(registry.Txn{Then: []registry.Op{registry.Delete(w.group.Target())}})
			break
		}
		w.counts[garbledTargets]++
		w.tell("the target record is garbled")
		w.byHand(registry.Txn{Then: []registry.Op{registry.Put(w.group.Target(), []byte("{"), 0)}})
	case 0, 1:
		if len(w.procs) < w.profile.members+3 {
			w.join()
		}
	case 2, 3:
		if len(w.procs) > 1 {
			w.counts[leaves]++
			p.leave()
		}
	case 4:
		w.crash(p)
	case 5:
		w.crash(p)
		w.counts[restarts]++
		w.after(w.between(0, sec), func() {
			if w.named(p.id) == 0 {
				w.start(p.id, p.record, p.largest)
			}
		})
	case 6, 7, 8:
		w.counts[longStops]++
		p.stop(w.profile.ttl + w.between(-500*ms, w.profile.ttl))
	case 9, 10:
		w.counts[shortStops]++
		p.stop(w.between(10*ms, w.profile.ttl))
	case 11:
		if p.session != nil {
			w.counts[revokedLeases]++
			w.tell("the lease of %s is revoked by hand", p.id)
			w.operator = true
			_ = w.twin.Revoke(ctx, p.session.lease) // it may be gone
			w.took()
			w.operator = false
		}
	case 12:
		w.counts[deletedRegistrations]++
		w.tell("the registration of %s is deleted by hand", p.id)
		w.byHand(registry.Txn{Then: []registry.Op{registry.Delete(w.group.ID(p.id))}})
	case 13:
		if logs := w.sortedLogs(); len(logs) > 0 {
			part := logs[w.r.IntN(len(logs))].partition
			w.counts[deletedOwners]++
			w.tell("the owner key of %s is deleted by hand", part)
			w.byHand(registry.Txn{Then: []registry.Op{registry.Delete(w.group.Owner(part))}})
		}
	case 14:
		if name := topicNames[w.r.IntN(2)]; len(w.lists[name]) > 0 {
			w.deleteTopic(name)
		}
	case 15:
		if n := len(w.lists["a"]); n > 0 && n < 2*w.profile.partitions {
			w.counts[addedPartitions]++
			w.addPartitions("a", 1+w.r.IntN(2))
			w.produceSome()
		}
	case 16:
		id := int32(1 + w.r.IntN(2))
		if w.down[id] {
			break
		}
		w.counts[lostBrokers]++
		w.setBroker(id, false)
		w.after(w.between(10*ms, 3*sec), func() {
			w.counts[returnedBrokers]++
			w.setBroker(id, true)
		})
	case 17:
		logs := w.sortedLogs()
		if len(logs) == 0 {
			break
		}
		if l := logs[w.r.IntN(len(logs))]; l.end > l.start {
			w.counts[trimmedLogs]++
			l.start += 1 + w.r.Int64N(l.end-l.start)
			w.tell("%s begins at %d from now on", l.partition, l.start)
			l.finished = max(l.finished, l.start)
			l.advance()
		}
	case 18, 19:
		for _, part := range sortedWatches(p.watches) {
			if w.chance(2) {
				w.counts[cutWatches]++
				p.watches[part].cut()
			}
		}
	case 20, 21:
		p.slow = w.now + w.between(100*ms, 3*sec)
	}
}

// named is how many processes have an id.
func (w *world) named(id string) (n int) {
	for _, p := range w.procs {
		if p.id == id {
			n++
		}
	}
	return n
}

func sortedWatches(m map[registry.Partition]*ownerWatch) (list []registry.Partition) {
	for p := range m {
		list = append(list, p)
	}
	slices.SortFunc(list, registry.ComparePartitions)
	return list
}

func (w *world) crash(p *process) {
	w.counts[crashes]++
	w.tell("%s crashes", p.id)
	p.end()
}

// Bounds of virtual time: until the group is quiet after the last fault, which may be
// a request that takes effect maxLate later, a process that stands for two leases, or
// a handler that takes as long; and after a change where nothing goes wrong.
const (
	quietBound = 60 * sec
	calmBound  = 2 * sec
	glance     = 250 * ms
)

// settle runs until the group is as it must be, and says how long it took.
func (w *world) settle(bound time.Duration) time.Duration {
	began := w.now
	for {
		w.run(glance)
		why := w.verify()
		if why == "" {
			return w.now - began
		}
		if w.now-began > bound {
			w.fail("not quiet after %s: %s", bound, why)
		}
	}
}

// calm waits until all that went wrong is over, and mended.
func (w *world) calm() time.Duration {
	w.tell("no more faults from here")
	if slices.ContainsFunc(w.procs, func(p *process) bool { return w.named(p.id) > 1 }) {
		// One of them cannot come in, and is taken away.
		w.run(maxLate)
		for _, p := range slices.Clone(w.procs) {
			if w.named(p.id) > 1 && (p.session == nil || w.ids[p.id].Lease != p.session.lease) {
				w.crash(p)
			}
		}
	}
	// An outage that began before goes on, and with it what comes late of it.
	w.run(max(w.outage-w.now, 0))
	quiet := w.settle(quietBound)
	// What is still under way of the storm may come late.
	w.run(maxLate)
	w.settle(quietBound)
	return quiet
}

// calmChange is one change to a group that is quiet: what does not move must not be
// touched, and what moves must do so once.
func (w *world) calmChange() {
	if _, err := w.views[len(w.views)-1].assign(); err != nil {
		return // it cannot be divided
	}
	before := w.owners()
	began := w.counts
	w.observer.ended = map[ownership]int{}
	kind := w.r.IntN(6)
	if len(w.procs) < 2 && (kind == 1 || kind == 3) {
		kind = 0
	}
	bound := calmBound
	switch kind {
	case 3:
		w.counts[calmCrashes]++
		w.crash(w.someone())
		bound += w.profile.ttl
	case 4:
		w.counts[calmBrokers]++
		w.setBroker(1, false)
		w.run(w.between(10*ms, sec))
		w.setBroker(1, true)
	case 5:
		w.counts[calmTopics]++
		w.createTopic(fmt.Sprintf("c%d", w.seq), 3)
	case 0:
		w.counts[calmJoins]++
		w.join()
	case 1:
		w.counts[calmLeaves]++
		w.someone().leave()
	case 2:
		w.counts[calmPartitions]++
		if len(w.lists["a"]) > 0 {
			w.addPartitions("a", 1)
		}
	}
	w.settle(bound)
	after := w.owners()
	for _, part := range sortedPartitions(after) {
		is, was := after[part], before[part]
		if is.thread == was.thread && is.token != was.token || is.thread == was.thread && w.observer.ended[ownership{part, was.token}] > 0 {
			w.fail("%s stayed with %s, and was given up meanwhile", part, is.thread)
		}
	}
	moved := 0
	for part, is := range after {
		if is.thread != before[part].thread {
			moved++
		}
	}
	if claimed := w.counts[claimedKeys] - began[claimedKeys]; claimed > moved {
		w.fail("%d owner keys were claimed in a change that moves %d partitions", claimed, moved)
	}
	w.observer.ended = nil
}

type owned struct {
	thread string
	token  int64
}

func (w *world) owners() map[registry.Partition]owned {
	kvs, _, err := registry.List(ctx, w.twin, w.group.Owners(), 0)
	w.must(err)
	m := map[registry.Partition]owned{}
	for _, kv := range kvs {
		p, err := w.group.ParsePartition(kv.Key)
		w.must(err)
		m[p] = owned{string(kv.Value), kv.CreateRevision}
	}
	return m
}

func sortedPartitions(m map[registry.Partition]owned) (list []registry.Partition) {
	for p := range m {
		list = append(list, p)
	}
	slices.SortFunc(list, registry.ComparePartitions)
	return list
}

// drain ends the production: all that was produced must be read and committed.
func (w *world) drain() {
	w.ended = true
	w.tell("no more records from here")
	began := w.now
	for {
		w.run(sec)
		why := w.consumed()
		if why == "" {
			break
		}
		if w.now-began > quietBound {
			w.fail("%s after %s", why, quietBound)
		}
	}
	if why := w.recorded(); why != "" {
		w.fail("%s", why)
	}
	if why := w.verify(); why != "" {
		w.fail("quiet no more: %s", why)
	}
}

func (c counts) String() string {
	var b strings.Builder
	for i, n := range c {
		fmt.Fprintf(&b, "%10d %s\n", n, countNames[i])
	}
	return b.String()
}
