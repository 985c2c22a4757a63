package simulation

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

var ctx = context.Background()

const (
	ms  = time.Millisecond
	sec = time.Second
)

// world is one run: the twin in memory, the processes, the logs, and the queue of
// what happens when. One seed decides everything; time is a number.
type world struct {
	r       *rand.Rand
	now     time.Duration
	queue   queue
	seq     uint64
	tasks   map[*task]struct{}
	turn    *task // the task that runs now
	trace   func(text string)
	counts  counts
	lenient bool  // only harm counts: see the flag
	off     guard // the guard that is switched off; none with all on

	twin     *memory.Store
	expiry   time.Duration // at which the twin is looked at for leases that ran out
	root     registry.Root
	group    registry.GroupPaths
	seen     int64 // revision up to which the history was taken
	views    []view
	reader   *rebalance.Reader
	ids      map[string]registry.KV // by id
	topics   map[string]registry.KV // records, by topic
	target   *registry.KV
	lists    map[string][]registry.Partition // of those in topics
	down     map[int32]bool                  // brokers that are lost
	watches  map[string][]*ownerWatch
	procs    []*process // those that live, in the order of their start
	operator bool       // what happens now is done by hand
	observer observer
	profile  profile
	started  int
	entries  uint64        // of history
	outage   time.Duration // until then the registry does not answer
	ended    bool
}

// profile is what of a run is drawn at its beginning.
type profile struct {
	ttl        time.Duration
	handling   time.Duration // mean of what a handler takes for a record
	commits    time.Duration // commit interval
	faults     int           // of 1,000 calls so many go wrong while it storms
	storming   bool
	history    bool       // members write it
	lists      [][]string // of strategies, that members state
	uniform    bool       // members have the same subscription
	members    int
	partitions int
	disturb    int // how many disturbances
}

// view is the group at one revision, made once for all members.
type view struct {
	snapshot   rebalance.Snapshot
	registered map[string]int64
	changed    map[string]int64 // topic -> mod-revision of its record
	since      int64            // oldest registration
	newest     int64            // last registration that was written
	assigned   bool
	assignment *rebalance.Assignment
	refused    error
}

func (v *view) assign() (*rebalance.Assignment, error) {
	if !v.assigned {
		v.assigned = true
		v.assignment, v.refused = rebalance.Assign(v.snapshot)
	}
	return v.assignment, v.refused
}

// divided tells whether members may claim by this state: by sticky only once there is
// a target for it.
func (v *view) divided() bool {
	s := v.snapshot
	return rebalance.Agree(s.Members) != rebalance.StrategySticky || s.Target.Current(s)
}

// gives tells whether a member may claim the partition by this state: by sticky, if
// the target that stands, nil if there is none, says so, for whatever group it was
// made. The state may be older than the target: a member that writes one follows it at
// once, and by then the group may agree on another strategy, because members have left.
func (v *view) gives(part registry.Partition, thread string, stands *rebalance.Target) bool {
	if rebalance.Agree(v.snapshot.Members) == rebalance.StrategySticky {
		if stands == nil {
			return false
		}
		due, ok := stands.Assignment.Owner(part)
		return ok && due == thread
	}
	a, err := v.assign()
	if err != nil {
		return false
	}
	due, ok := a.Owner(part)
	return ok && due == thread
}

// follows tells whether the members follow the target record of that revision.
func (v *view) follows(record int64) bool {
	t := v.snapshot.Target
	return t != nil && t.Record == record && rebalance.Agree(v.snapshot.Members) == rebalance.StrategySticky
}

// failure ends a run: an invariant does not hold.
type failure struct{ text string }

func (f failure) Error() string { return f.text }

func (w *world) fail(format string, args ...any) {
	panic(failure{fmt.Sprintf("at %s: ", w.now) + fmt.Sprintf(format, args...)})
}

func (w *world) must(err error) {
	if err != nil {
		w.fail("%v", err)
	}
}

func (w *world) tell(format string, args ...any) {
	if w.trace != nil {
		w.trace(fmt.Sprintf("%9.3f  ", w.now.Seconds()) + fmt.Sprintf(format, args...))
	}
}

func newWorld(seed uint64) *world {
	w := &world{r: rand.New(rand.NewPCG(seed, 5)), now: 1, tasks: map[*task]struct{}{}, root: registry.Root(""),
		ids: map[string]registry.KV{}, topics: map[string]registry.KV{}, lists: map[string][]registry.Partition{}, down: map[int32]bool{}, watches: map[string][]*ownerWatch{}}
	w.twin = memory.NewManual(func() time.Duration { return w.now })
	w.seen = w.twin.Revision()
	w.group = w.root.Group("g")
	w.reader = rebalance.NewReader(w.root, w.group, "")
	w.observer = observer{w: w, logs: map[registry.Partition]*plog{}, excused: map[ownership]time.Duration{}, spoiled: map[string]bool{}, born: map[string]int64{}}
	return w
}

// A happening is something that is due at a moment.
type happening struct {
	at  time.Duration
	seq uint64
	f   func()
}

type queue []happening

func (q queue) Len() int { return len(q) }
func (q queue) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].seq < q[j].seq
}
func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *queue) Push(x any)   { *q = append(*q, x.(happening)) }
func (q *queue) Pop() any {
	old := *q
	x := old[len(old)-1]
	old[len(old)-1] = happening{}
	*q = old[:len(old)-1]
	return x
}

var _ heap.Interface = (*queue)(nil)

func (w *world) at(at time.Duration, f func()) {
	w.seq++
	// By hand, since container/heap would box each happening.
	q := append(w.queue, happening{max(at, w.now), w.seq, f})
	for i := len(q) - 1; i > 0; {
		parent := (i - 1) / 2
		if !q.Less(i, parent) {
			break
		}
		q.Swap(i, parent)
		i = parent
	}
	w.queue = q
}

func (w *world) after(d time.Duration, f func()) { w.at(w.now+d, f) }

// step lets the next thing happen; false if nothing is due by then.
func (w *world) step(until time.Duration) bool {
	q := w.queue
	if len(q) == 0 || q[0].at > until {
		return false
	}
	next := q[0]
	last := len(q) - 1
	q[0], q[last] = q[last], happening{}
	q = q[:last]
	for i := 0; ; {
		least := i
		for _, child := range [2]int{2*i + 1, 2*i + 2} {
			if child < last && q.Less(child, least) {
				least = child
			}
		}
		if least == i {
			break
		}
		q.Swap(i, least)
		i = least
	}
	w.queue = q
	w.now = next.at
	next.f()
	return true
}

func (w *world) run(d time.Duration) {
	until := w.now + d
	for w.step(until) {
	}
	w.now = until
}

// chance is true once in n times.
func (w *world) chance(n int) bool { return w.r.IntN(n) == 0 }

func (w *world) between(least, most time.Duration) time.Duration {
	return least + time.Duration(w.r.Int64N(int64(most-least)+1))
}

// latency is what a message takes one way.
func (w *world) latency() time.Duration {
	switch {
	case w.profile.storming && w.chance(100):
		w.counts[slowMessage]++
		return w.between(50*ms, 2*sec)
	case w.chance(20):
		return w.between(ms, 40*ms)
	}
	return w.between(200*time.Microsecond, 3*ms)
}

// A task is a piece of a process that waits in the middle: a coroutine, so that the
// real functions of the registry run in it and other things happen between their calls.
type task struct {
	w     *world
	p     *process // nil: an operator's
	next  func() (struct{}, bool)
	stop  func()
	yield func(struct{}) bool
	turns uint64        // of waiting; an answer that comes for an older one is nothing
	limit time.Duration // calls end by then
}

var errKilled = errors.New("killed")

func (w *world) spawn(p *process, f func(t *task)) {
	t := &task{w: w, p: p}
	t.next, t.stop = iter.Pull(func(yield func(struct{}) bool) {
		defer func() {
			if r := recover(); r != nil && r != errKilled {
				panic(r)
			}
		}()
		t.yield = yield
		f(t)
	})
	w.tasks[t] = struct{}{}
	t.run()
}

func (t *task) run() {
	before := t.w.turn
	t.w.turn = t
	_, more := t.next()
	t.w.turn = before
	if !more {
		delete(t.w.tasks, t)
	}
}

// wait parks the task until resume is called for this turn.
func (t *task) wait() {
	if !t.yield(struct{}{}) {
		panic(errKilled)
	}
}

// sleep lets time pass; false if the process is ending.
func (t *task) sleep(d time.Duration) {
	t.turns++
	turn := t.turns
	t.at(t.w.now+d, func() {
		if t.turns == turn {
			t.run()
		}
	})
	t.wait()
}

func (t *task) at(at time.Duration, f func()) {
	if t.p == nil {
		t.w.at(at, f)
		return
	}
	t.p.at(at, free, f)
}

// within bounds the calls that follow.
func (t *task) within(d time.Duration) { t.limit = t.w.now + d }

// close ends what is left.
func (w *world) close() {
	for t := range w.tasks {
		t.stop()
	}
}

// took notes what a change of the registry brought: who watches hears of it later.
func (w *world) took() {
	events := w.twin.History(w.seen)
	defer func() { w.observer.releasing = nil }()
	if len(events) == 0 {
		return
	}
	viewed, topical := false, false
	for i := range events {
		e := &events[i]
		w.seen = e.ModRevision
		switch {
		case strings.HasPrefix(e.Key, w.group.Owners()):
			w.ownerChanged(e)
		case strings.HasPrefix(e.Key, w.group.IDs()):
			viewed = true
			id, err := w.group.ParseID(e.Key)
			w.must(err)
			w.ids[id] = e.KV
			if e.Deleted {
				delete(w.ids, id)
			}
		case e.Key == w.group.Target():
			viewed, w.target = true, nil
			if !e.Deleted {
				kv := e.KV
				w.target = &kv
			}
		case strings.HasPrefix(e.Key, w.root.Topics()):
			name := strings.TrimPrefix(e.Key, w.root.Topics())
			if strings.Contains(name, "/") {
				break
			}
			viewed, topical = true, true
			if e.Deleted {
				delete(w.topics, name)
				delete(w.lists, name)
				break
			}
			_, rec, _, err := w.root.ParseTopic(e.KV)
			w.must(err)
			w.topics[name], w.lists[name] = e.KV, rec.List(name)
		case strings.HasPrefix(e.Key, w.root.Brokers()):
			viewed = true
		case strings.HasPrefix(e.Key, w.group.Offsets()):
			w.observer.offsetChanged(e)
		}
	}
	if topical {
		w.observer.topicsChanged()
	}
	if viewed {
		w.look()
	}
}

// look makes the view of the newest revision, and tells the members in a while.
func (w *world) look() {
	v := view{registered: make(map[string]int64, len(w.ids)), changed: make(map[string]int64, len(w.topics))}
	ids := make([]registry.KV, 0, len(w.ids))
	for _, id := range sortedKeys(w.ids) {
		kv := w.ids[id]
		ids = append(ids, kv)
		v.registered[id] = kv.ModRevision
		if v.since == 0 || kv.CreateRevision < v.since {
			v.since = kv.CreateRevision
		}
		v.newest = max(v.newest, kv.ModRevision)
	}
	topics := make([]registry.KV, 0, len(w.topics))
	for _, name := range sortedKeys(w.topics) {
		topics = append(topics, w.topics[name])
		v.changed[name] = w.topics[name].ModRevision
	}
	v.snapshot, _ = w.reader.Read(w.seen, ids, topics, w.target) // what is garbled is left out
	w.views = append(w.views, v)
	i := len(w.views) - 1
	for _, p := range w.procs {
		p.viewSoon(i)
	}
}

// expire lets leases run out when their time comes, a little late as etcd does.
func (w *world) expire(at time.Duration) {
	if w.expiry != 0 && w.expiry <= at {
		return
	}
	w.expiry = at
	w.at(at, func() {
		if w.expiry != at {
			return
		}
		w.expiry = 0
		next := w.twin.ExpireDue()
		w.took()
		if next != 0 {
			w.expire(next + w.between(0, 300*ms))
		}
	})
}

// byHand does something in the registry that none of the processes did.
func (w *world) byHand(t registry.Txn) registry.TxnResult {
	w.operator = true
	res, err := w.twin.Txn(ctx, t)
	w.must(err)
	w.took()
	w.operator = false
	return res
}
