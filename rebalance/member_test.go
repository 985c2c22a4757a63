package rebalance_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/rebalance/internal/guards"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

var simSeed = flag.Uint64("sim.seed", 0, "seed of the one simulation to run; 0 runs many")

// world is a registry in memory with several members whose actions, answers and
// news are carried out one at a time in a random order.
type world struct {
	r       *rand.Rand
	store   *memory.Store
	group   registry.GroupPaths
	now     time.Duration
	counts  map[string]int   // partitions of each topic; 0 while it is deleted
	born    map[string]int64 // at which revision each topic's record was created
	chores  []func()         // what is left to do of a deletion
	members map[string]*simMember
	fresh   func() (rebalance.Snapshot, []error) // what a reader without memory sees now
	log     []ownerEvent                         // every change of an owner key
	owners  map[string]registry.KV
	faults  bool
	off     guards.Off
	// profile of the group: the strategies that its members state, one of which each of
	// them has; whether all subscribe alike.
	strategies [][]string
	uniform    bool
	// tainted partitions had their owner key deleted by an outsider: until things
	// are quiet again two may deliver, which only the fence of a commit can tell.
	tainted map[registry.Partition]bool
}

type ownerEvent struct {
	revision int64
	key      string
	kv       registry.KV // zero if deleted
}

type simMember struct {
	id         string
	machine    *rebalance.Member
	reader     *rebalance.Reader
	lease      registry.LeaseID
	record     registry.ConsumerRecord
	refused    string
	pending    []func() rebalance.Event   // carried out in any order
	watches    map[registry.Partition]int // -> position in world.log
	delivering map[registry.Partition]int64
	gone       bool
}

var ctx = context.Background()

// failure ends a run: an invariant does not hold.
type failure string

func (w *world) fail(format string, args ...any) { panic(failure(fmt.Sprintf(format, args...))) }

func newWorld(seed uint64, off guards.Off) *world {
	w := &world{r: rand.New(rand.NewPCG(seed, 7)), store: memory.New(), group: registry.Root("").Group("g"), off: off,
		counts: map[string]int{}, born: map[string]int64{}, members: map[string]*simMember{}, owners: map[string]registry.KV{},
		tainted: map[registry.Partition]bool{}, now: 1}
	sticky, roundrobin := []string{"sticky", "range"}, []string{"roundrobin", "range-numeric"}
	profiles := [][][]string{{{"range"}}, {sticky}, {roundrobin}, {sticky, sticky, {"range"}, {"range", "sticky"}}, {roundrobin, roundrobin, nil}}
	w.strategies = profiles[w.r.IntN(len(profiles))]
	w.uniform = w.strategies[0][0] == "roundrobin"
	w.create("a", 6)
	w.create("b", 3)
	return w
}

func (w *world) create(topic string, partitions int) {
	w.counts[topic] = partitions
	w.born[topic] = w.putTopic(topic)
}

// putTopic writes the record of a topic as it is by now.
func (w *world) putTopic(topic string) int64 {
	rec := registry.TopicRecord{Version: 1, Partitions: map[int32][]int32{}}
	for i := range int32(w.counts[topic]) {
		rec.Partitions[i] = []int32{1 + i%2}
	}
	return w.put(registry.Root("").Topic(topic), rec)
}

func (w *world) put(key string, record any) int64 {
	value, err := registry.Encode(record)
	w.must(err)
	res, err := w.store.Txn(ctx, registry.Txn{Then: []registry.Op{registry.Put(key, value, 0)}})
	w.must(err)
	return res.Revision
}

// deleteTopic deletes the record of a topic, and some time later its owner keys (unless
// whoever did it knew of the record only); then the topic is there again, as another one.
func (w *world) deleteTopic(topic string) {
	partitions := w.counts[topic]
	_, err := w.store.Txn(ctx, registry.Txn{Then: []registry.Op{registry.Delete(registry.Root("").Topic(topic))}})
	w.must(err)
	w.counts[topic] = 0
	delete(w.born, topic)
	w.snapshots()
	thorough := w.r.IntN(3) > 0
	w.chores = append(w.chores, func() {
		for _, key := range slices.Sorted(maps.Keys(w.owners)) {
			p, err := w.group.ParsePartition(key)
			w.must(err)
			if p.Topic == topic && thorough {
				w.deleteOwner(p)
			}
		}
		w.chores = append(w.chores, func() {
			w.create(topic, partitions)
			w.snapshots()
		})
	})
}

// deleteOwner deletes an owner key as an outsider, whoever has it.
func (w *world) deleteOwner(p registry.Partition) {
	w.tainted[p] = true
	_, err := w.store.Txn(ctx, registry.Txn{Then: []registry.Op{registry.Delete(w.group.Owner(p))}})
	w.must(err)
	w.note()
	w.fence(p)
}

// note brings the log up to date after a write to the store.
func (w *world) note() {
	kvs, revision, err := registry.List(ctx, w.store, w.group.Owners(), 0)
	w.must(err)
	now := map[string]registry.KV{}
	for _, kv := range kvs {
		now[kv.Key] = kv
		if w.owners[kv.Key].CreateRevision != kv.CreateRevision {
			w.log = append(w.log, ownerEvent{kv.CreateRevision, kv.Key, kv})
		}
	}
	for _, key := range slices.Sorted(maps.Keys(w.owners)) {
		if _, there := now[key]; !there {
			w.log = append(w.log, ownerEvent{revision: revision, key: key})
		}
	}
	w.owners = now
}

func (w *world) must(err error) {
	if err != nil {
		w.fail("%v", err)
	}
}

func (w *world) join(id string) {
	m := &simMember{id: id, machine: rebalance.NewMemberWithout(id, w.off), reader: rebalance.NewReader("", w.group, id)}
	m.watches, m.delivering = map[registry.Partition]int{}, map[registry.Partition]int64{}
	m.record = registry.ConsumerRecord{Version: 1, Pattern: registry.PatternStatic,
		Subscription: map[string]int32{"a": 1 + int32(w.r.IntN(2)), "b": 1}, Strategy: w.strategies[w.r.IntN(len(w.strategies))]}
	switch k := w.r.IntN(12); {
	case w.uniform && k > 0:
		m.record.Subscription = map[string]int32{"a": 2, "b": 2}
	case k < 4:
		delete(m.record.Subscription, "b")
	case k < 6:
		list := []string{registry.PatternWhiteList, registry.PatternBlackList}[w.r.IntN(2)]
		m.record.Pattern, m.record.Subscription = list, map[string]int32{[]string{"[ac]", "b, x", "("}[w.r.IntN(3)]: 2}
	}
	w.members[id] = m
	w.register(m)
}

func (w *world) register(m *simMember) {
	lease, err := w.store.Grant(ctx, time.Hour)
	w.must(err)
	m.lease = lease.ID
	w.putRegistration(m)
}

func (w *world) putRegistration(m *simMember) {
	key := w.group.ID(m.id)
	value, err := registry.Encode(m.record)
	w.must(err)
	res, err := w.store.Txn(ctx, registry.Txn{
		If:   []registry.Cond{registry.Absent(key)},
		Then: []registry.Op{registry.Put(key, value, m.lease)},
		Else: []registry.Op{registry.Get(key)},
	})
	w.must(err)
	revision := res.Revision
	if !res.Succeeded {
		revision = res.Items[0].KVs[0].CreateRevision
	}
	m.pending = append(m.pending, func() rebalance.Event {
		return rebalance.Registered{Registration: registry.Registration{Key: key, Revision: revision}}
	})
	w.snapshots()
}

// snapshots gives every member news of the group as it is now, to be taken later.
func (w *world) snapshots() {
	ids, revision, err := registry.List(ctx, w.store, w.group.IDs(), 0)
	w.must(err)
	topics, _, err := registry.List(ctx, w.store, registry.Root("").Topics(), revision)
	w.must(err)
	target, _, err := registry.GetKey(ctx, w.store, w.group.Target())
	w.must(err)
	w.fresh = func() (rebalance.Snapshot, []error) {
		return rebalance.NewReader("", w.group, "").Read(revision, ids, topics, target)
	}
	for _, m := range w.sorted() {
		m.pending = append(m.pending, func() rebalance.Event {
			s, _ := m.reader.Read(revision, ids, topics, target)
			return s
		})
	}
}

func (w *world) sorted() (list []*simMember) {
	for _, id := range slices.Sorted(maps.Keys(w.members)) {
		list = append(list, w.members[id])
	}
	return list
}

func (w *world) step(m *simMember, e rebalance.Event) {
	for _, a := range m.machine.Step(w.now, e) {
		w.act(m, a)
	}
	w.check(m)
}

// check is the invariant: no two members deliver one partition, and whoever
// delivers has the owner key under its lease and token.
func (w *world) check(m *simMember) {
	for p, token := range m.delivering {
		if w.tainted[p] {
			continue
		}
		kv := w.owners[w.group.Owner(p)]
		if kv.CreateRevision != token || kv.Lease != m.lease {
			w.fail("%s delivers %s under %d, the owner key has %d, lease %d", m.id, p, token, kv.CreateRevision, kv.Lease)
		}
		for _, other := range w.members {
			if _, both := other.delivering[p]; both && other != m {
				w.fail("%s and %s both deliver %s", m.id, other.id, p)
			}
		}
	}
}

func (w *world) act(m *simMember, a rebalance.Action) {
	later := func(f func() rebalance.Event) { m.pending = append(m.pending, f) }
	switch a := a.(type) {
	case rebalance.Claim:
		lease := m.lease
		later(func() rebalance.Event { return w.claim(m, lease, a) })
	case rebalance.Release:
		lease := m.lease
		later(func() rebalance.Event { return w.release(m, lease, a) })
	case rebalance.Propose:
		later(func() rebalance.Event { return w.propose(a) })
	case rebalance.Refused:
		if a.Reason == m.refused {
			w.fail("%s says twice: %q", m.id, a.Reason)
		}
		m.refused = a.Reason
	case rebalance.Deliver:
		m.delivering[a.Partition] = a.Token
	case rebalance.Revoke:
		later(func() rebalance.Event {
			if m.delivering[a.Partition] == a.Token {
				delete(m.delivering, a.Partition)
			}
			return rebalance.Drained(a)
		})
	case rebalance.Lose:
		delete(m.delivering, a.Partition)
	case rebalance.Watch:
		if _, twice := m.watches[a.Partition]; twice {
			w.fail("%s watches %s twice", m.id, a.Partition)
		}
		at := slices.IndexFunc(w.log, func(e ownerEvent) bool { return e.revision > a.After })
		if at < 0 {
			at = len(w.log)
		}
		m.watches[a.Partition] = at
	case rebalance.Unwatch:
		if _, there := m.watches[a.Partition]; !there {
			w.fail("%s unwatches %s, which it does not watch", m.id, a.Partition)
		}
		delete(m.watches, a.Partition)
	case rebalance.Reregister:
		later(func() rebalance.Event { w.putRegistration(m); return rebalance.Tick{} })
	case rebalance.Left:
		if len(m.delivering) > 0 {
			w.fail("%s left while it delivers %v", m.id, m.delivering)
		}
		w.expire(m)
		m.gone = true
		delete(w.members, m.id)
		w.snapshots()
	}
}

func (w *world) claim(m *simMember, lease registry.LeaseID, a rebalance.Claim) rebalance.Event {
	answer := rebalance.ClaimAnswered{Number: a.Number}
	lost := w.faults && w.r.IntN(8) == 0
	run := func() {
		var claims []registry.OwnerClaim
		for _, want := range a.Wants {
			topic := want.Partition.Topic
			claims = append(claims, registry.OwnerClaim{Key: w.group.Owner(want.Partition), Value: []byte(rebalance.ThreadID(m.id, want.Stream)),
				Topic: registry.Root("").Topic(topic), Incarnation: a.Incarnations[topic]})
		}
		guard := registry.Guard{Registration: a.Registration, IDs: w.group.IDs(), Snapshot: a.Snapshot}
		if a.Target != 0 {
			guard.Target, guard.TargetRevision = w.group.Target(), a.Target
		}
		results, revision, err := registry.Claim(ctx, &interrupted{Store: w.store, w: w}, lease, guard, claims, nil)
		w.note()
		answer.Revision, answer.Stale = revision, errors.Is(err, registry.ErrStale)
		answer.Unknown = err != nil && !answer.Stale
		for i, r := range results {
			topic := a.Wants[i].Partition.Topic
			if r.Holder == nil && r.Token == revision && w.born[topic] != a.Incarnations[topic] {
				w.fail("%s became the owner of %s by a claim of %d, and the topic is of %d", m.id, a.Wants[i].Partition, a.Incarnations[topic], w.born[topic])
			}
			o := rebalance.ClaimOutcome{Mine: r.Holder == nil, Token: r.Token, Stream: a.Wants[i].Stream, Revision: r.Revision}
			if string(r.Value) != string(claims[i].Value) {
				o.Stream = -1
			}
			answer.Outcomes = append(answer.Outcomes, o)
		}
	}
	if !lost {
		run()
		return answer
	}
	switch w.r.IntN(3) {
	case 0: // it takes effect, the reply is lost
		run()
	case 1: // it takes effect much later
		m.pending = append(m.pending, func() rebalance.Event { run(); return rebalance.Tick{} })
	}
	return rebalance.ClaimAnswered{Number: a.Number, Unknown: true}
}

// interrupted lets others act between the transactions of one claim.
type interrupted struct {
	registry.Store
	w     *world
	begun bool
}

func (s *interrupted) Txn(ctx context.Context, t registry.Txn) (registry.TxnResult, error) {
	for s.begun && s.w.r.IntN(3) > 0 && s.w.advance() {
	}
	s.begun = true
	res, err := s.Store.Txn(ctx, t)
	s.w.note()
	return res, err
}

// propose writes the target record; the reply may be lost, and it may arrive late.
func (w *world) propose(a rebalance.Propose) rebalance.Event {
	run := func() rebalance.Event {
		guard := registry.Guard{Registration: a.Registration, IDs: w.group.IDs(), Snapshot: a.Snapshot}
		revision, err := registry.WriteTarget(ctx, w.store, guard, w.group.Target(), a.Value, a.Replace)
		stale := errors.Is(err, registry.ErrStale)
		if !stale {
			w.must(err)
			w.snapshots()
		}
		return rebalance.ProposeAnswered{Number: a.Number, Revision: revision, Stale: stale}
	}
	if !w.faults || w.r.IntN(8) > 0 {
		return run()
	}
	switch w.r.IntN(3) {
	case 0: // it takes effect, the reply is lost
		run()
	case 1: // it takes effect much later
		m := w.sorted()[0]
		m.pending = append(m.pending, func() rebalance.Event { run(); return rebalance.Tick{} })
	}
	return rebalance.ProposeAnswered{Number: a.Number, Unknown: true}
}

func (w *world) release(m *simMember, lease registry.LeaseID, a rebalance.Release) rebalance.Event {
	var list []registry.OwnerRelease
	for _, h := range a.Held {
		// An older token is harmless: the key that it names is gone.
		if token, still := m.delivering[h.Partition]; still && m.lease == lease && (h.Token == 0 || h.Token == token) {
			w.fail("%s releases %s while it delivers it", m.id, h.Partition)
		}
		list = append(list, registry.OwnerRelease{Key: w.group.Owner(h.Partition), Token: h.Token})
	}
	if w.faults && w.r.IntN(8) == 0 {
		switch w.r.IntN(3) {
		case 0: // it takes effect, the reply is lost
			_, err := registry.Release(ctx, w.store, lease, list, nil)
			w.must(err)
			w.note()
		case 1: // it takes effect much later, for the keys that it found now
			found := w.lookUp(lease, list)
			m.pending = append(m.pending, func() rebalance.Event {
				_, err := registry.Release(ctx, w.store, lease, found, nil)
				w.must(err)
				w.note()
				return rebalance.Tick{}
			})
		}
		return rebalance.ReleaseAnswered{Number: a.Number, Failed: true}
	}
	_, err := registry.Release(ctx, &interrupted{Store: w.store, w: w}, lease, list, nil)
	w.must(err)
	w.note()
	return rebalance.ReleaseAnswered{Number: a.Number}
}

// lookUp is the first half of registry.Release: keys to be released whatever their
// token is are looked for at once, and deleted under the token that was found.
func (w *world) lookUp(lease registry.LeaseID, list []registry.OwnerRelease) (found []registry.OwnerRelease) {
	for _, r := range list {
		if r.Token == 0 {
			kv := w.owners[r.Key]
			if kv.Key == "" || kv.Lease != lease {
				continue
			}
			r.Token = kv.CreateRevision
		}
		found = append(found, r)
	}
	return found
}

// fence tells members of commits that are refused, sooner or later: of partitions
// that they deliver and whose owner key is not theirs.
func (w *world) fence(p registry.Partition) {
	for _, m := range w.sorted() {
		token, delivers := m.delivering[p]
		if delivers && w.owners[w.group.Owner(p)].CreateRevision != token && w.r.IntN(2) == 0 {
			m.pending = append(m.pending, func() rebalance.Event { return rebalance.Fenced{Partition: p, Token: token} })
		}
	}
}

func (w *world) expire(m *simMember) {
	w.store.Expire(m.lease)
	w.note()
}

// loseSession: the member notices before the store does.
func (w *world) loseSession(m *simMember) {
	w.step(m, rebalance.SessionLost{})
	w.expire(m)
	w.register(m)
}

// advance carries out one thing that is due for some member; false if nothing is.
func (w *world) advance() bool {
	var due []func()
	for i, chore := range w.chores {
		due = append(due, func() {
			w.chores = slices.Delete(w.chores, i, i+1)
			chore()
		})
	}
	for _, m := range w.sorted() {
		for i := range m.pending {
			due = append(due, func() {
				f := m.pending[i]
				m.pending = slices.Delete(m.pending, i, i+1)
				if e := f(); !m.gone {
					w.step(m, e)
				}
			})
		}
		for _, p := range slices.SortedFunc(maps.Keys(m.watches), registry.ComparePartitions) {
			if at := m.watches[p]; at < len(w.log) {
				due = append(due, func() {
					m.watches[p]++
					if e := w.log[at]; e.key == w.group.Owner(p) {
						w.step(m, rebalance.OwnerSeen{Partition: p, Revision: e.revision, Exists: e.kv.Key != "",
							Mine: e.kv.Lease == m.lease && e.kv.Key != "", Token: e.kv.CreateRevision})
					}
				})
			}
		}
	}
	if len(due) == 0 {
		return false
	}
	due[w.r.IntN(len(due))]()
	return true
}

func (w *world) disturb(next *int) {
	list := w.sorted()
	var m *simMember
	if len(list) > 0 {
		m = list[w.r.IntN(len(list))]
	}
	switch k := w.r.IntN(40); {
	case k == 0 && len(list) < 6:
		*next++
		w.join(fmt.Sprintf("m%d", *next))
	case k == 1 && m != nil && len(list) > 1:
		w.step(m, rebalance.Leaving{})
	case k == 2 && m != nil:
		w.loseSession(m)
	case k == 3 && w.counts["a"] > 0 && w.counts["a"] < 12:
		w.counts["a"]++
		w.putTopic("a")
		w.snapshots()
	case k == 4 && len(w.owners) > 0:
		key := slices.Sorted(maps.Keys(w.owners))[w.r.IntN(len(w.owners))]
		p, err := w.group.ParsePartition(key)
		w.must(err)
		w.deleteOwner(p)
	case k == 5 && m != nil:
		_, err := w.store.Txn(ctx, registry.Txn{Then: []registry.Op{registry.Delete(w.group.ID(m.id))}})
		w.must(err)
		w.snapshots()
	case k == 7: // the target record is deleted, or replaced by what nobody can read
		op := registry.Delete(w.group.Target())
		if w.r.IntN(2) == 0 {
			op = registry.Put(w.group.Target(), []byte("{}"), 0)
		}
		_, err := w.store.Txn(ctx, registry.Txn{Then: []registry.Op{op}})
		w.must(err)
		w.snapshots()
	case k == 8 && len(list) < 6: // many at once
		for range 1 + w.r.IntN(3) {
			*next++
			w.join(fmt.Sprintf("m%d", *next))
		}
	case k == 6 && w.counts["a"] > 0 && w.counts["b"] > 0:
		w.deleteTopic([]string{"a", "b"}[w.r.IntN(2)])
	}
}

// simulate runs one world, and returns what did not hold.
func simulate(seed uint64, off guards.Off) (failed error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case failure:
			failed = errors.New(string(r))
		default:
			panic(r)
		}
	}()
	w := newWorld(seed, off)
	next := 2
	w.join("m1")
	w.join("m2")
	w.faults = true
	for range 400 {
		w.now += time.Millisecond
		w.disturb(&next)
		w.advance()
		if w.r.IntN(10) == 0 {
			for _, m := range w.sorted() {
				if at, ok := m.machine.Wake(); ok && at <= w.now {
					w.step(m, rebalance.Tick{})
				}
			}
		}
	}
	w.faults = false
	w.settle()
	for {
		s, _ := w.fresh()
		_, err := rebalance.Assign(s)
		if err == nil {
			break
		}
		// Refused: everybody says so, and nobody claims. It ends with the member in the way.
		for _, m := range w.sorted() {
			if m.refused != err.Error() {
				w.fail("%s says %q, and the group cannot be divided: %v", m.id, m.refused, err)
			}
			w.check(m)
		}
		w.leave(w.odd())
		w.settle()
	}
	w.verify()
	return nil
}

// leave has a member leave.
func (w *world) leave(m *simMember) { w.step(m, rebalance.Leaving{}) }

// odd is a member that does not subscribe as most do, or any.
func (w *world) odd() *simMember {
	list := w.sorted()
	for _, m := range list {
		if m.record.Subscription["a"] != 2 || m.record.Subscription["b"] != 2 {
			return m
		}
	}
	return list[0]
}

// settle runs until nothing is due any more, letting time pass for retries.
func (w *world) settle() {
	for range 100_000 {
		if w.advance() {
			continue
		}
		waiting := false
		for _, m := range w.sorted() {
			if at, ok := m.machine.Wake(); ok {
				w.now, waiting = max(w.now, at), true
				w.step(m, rebalance.Tick{})
			}
		}
		if !waiting {
			return
		}
	}
	w.fail("never quiet")
}

// verify: after quiet, every partition has the owner that the strategy says.
func (w *world) verify() {
	clear(w.tainted)
	s, _ := w.fresh()
	due, err := rebalance.Assign(s)
	w.must(err)
	if due.Strategy == rebalance.StrategySticky && !s.Target.Current(s) {
		w.fail("the target record is not current")
	}
	for _, m := range w.sorted() {
		if !m.machine.Settled() || m.refused != "" {
			w.fail("%s is not settled, refused %q: %s", m.id, m.refused, m.machine)
		}
		w.check(m)
	}
	want := maps.Collect(due.All())
	for p, thread := range want {
		kv := w.owners[w.group.Owner(p)]
		if got := string(kv.Value); got != thread {
			w.fail("%s is owned by %q, want %q", p, got, thread)
		}
		if kv.CreateRevision < w.born[p.Topic] {
			w.fail("%s is owned since %d, and its topic is of %d", p, kv.CreateRevision, w.born[p.Topic])
		}
	}
	if len(w.owners) != len(want) {
		w.fail("%d owner keys, want %d: %v", len(w.owners), len(want), slices.Sorted(maps.Keys(w.owners)))
	}
	delivering := 0
	for _, m := range w.members {
		delivering += len(m.delivering)
	}
	if delivering != len(want) {
		w.fail("%d partitions are delivered, want %d", delivering, len(want))
	}
}

// In random runs with joins, departures, lost sessions, lost replies, late writes,
// keys deleted by outsiders, topics deleted and made again, target records that are
// deleted or cannot be read, members that state other strategies, and stale news, at
// no moment do two members deliver one partition, and after quiet each partition has
// the owner that the strategy says.
func TestMembersInRandomOrder(t *testing.T) {
	first, runs := *simSeed, uint64(1)
	if first == 0 {
		first, runs = rand.Uint64(), 1000
		if testing.Short() {
			runs = 200
		}
	}
	for seed := first; seed < first+runs; seed++ {
		if err := simulate(seed, guards.Off{}); err != nil {
			t.Fatalf("repeat with -sim.seed=%d: %v", seed, err)
		}
	}
}
