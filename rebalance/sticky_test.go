package rebalance_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// stickyGroup makes random groups of a size, and changes them.
type stickyGroup struct {
	r                                    *rand.Rand
	topics, partitions, members, streams int
	alike                                bool // all members subscribe to all topics
	revision                             int64
	s                                    rebalance.Snapshot
	joined                               int
}

func newStickyGroup(seed uint64, topics, partitions, members, streams int) *stickyGroup {
	r := rand.New(rand.NewPCG(seed, 2))
	g := &stickyGroup{r: r, topics: topics, partitions: partitions, members: members, streams: streams, alike: r.IntN(2) == 0}
	g.s = rebalance.Snapshot{Topology: rebalance.Topology{}, Incarnations: map[string]int64{}}
	for range 1 + r.IntN(topics) {
		g.create()
	}
	for range 1 + r.IntN(members) {
		g.join()
	}
	return g
}

func (g *stickyGroup) topic() string { return fmt.Sprintf("t%d", g.r.IntN(g.topics)) }

func (g *stickyGroup) create() {
	topic := g.topic()
	g.revision++
	g.s.Incarnations[topic] = g.revision
	g.s.Topology[topic] = nil
	for n := range 1 + g.r.IntN(g.partitions) {
		g.s.Topology[topic] = append(g.s.Topology[topic], registry.Partition{Topic: topic, Home: int32(g.r.IntN(3)), Number: int32(n)})
	}
}

func (g *stickyGroup) subscription() map[string]int32 {
	sub := map[string]int32{}
	streams := int32(1 + g.r.IntN(g.streams))
	for i := range g.topics {
		if !g.alike {
			streams = int32(1 + g.r.IntN(g.streams))
		}
		if g.alike || g.r.IntN(2) == 0 {
			sub[fmt.Sprintf("t%d", i)] = streams
		}
	}
	return sub
}

func (g *stickyGroup) join() {
	g.joined++
	m := rebalance.MemberInfo{ID: fmt.Sprintf("m%d-%d", g.r.IntN(100), g.joined), Strategies: []string{"sticky"}, Subscription: g.subscription()}
	g.s.Members = append(g.s.Members, m)
}

// change makes one or more changes, of any kind.
func (g *stickyGroup) change() {
	g.revision++
	g.s.Revision = g.revision
	for range 1 + g.r.IntN(3) {
		topic := g.topic()
		list := g.s.Topology[topic]
		switch i := g.r.IntN(7); {
		case i <= 1 && len(g.s.Members) < g.members:
			g.join()
		case i <= 3 && len(g.s.Members) > 1:
			at := g.r.IntN(len(g.s.Members))
			g.s.Members = slices.Delete(slices.Clone(g.s.Members), at, at+1)
		case i == 4 && list != nil && len(list) < g.partitions:
			g.s.Topology[topic] = append(slices.Clone(list), registry.Partition{Topic: topic, Home: 1, Number: int32(len(list))})
		case i == 5:
			g.create()
		case i == 6 && len(g.s.Topology) > 1:
			delete(g.s.Topology, topic)
			delete(g.s.Incarnations, topic)
		default:
			g.s.Members = slices.Clone(g.s.Members)
			g.s.Members[g.r.IntN(len(g.s.Members))].Subscription = g.subscription()
		}
	}
}

// shuffled is the same snapshot in another order.
func (g *stickyGroup) shuffled() rebalance.Snapshot {
	s := g.s
	s.Members = slices.Clone(s.Members)
	g.r.Shuffle(len(s.Members), func(i, j int) { s.Members[i], s.Members[j] = s.Members[j], s.Members[i] })
	s.Topology = rebalance.Topology{}
	for topic, list := range g.s.Topology {
		list = slices.Clone(list)
		g.r.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
		s.Topology[topic] = list
	}
	return s
}

// randomTarget has any owners, balanced or not.
func (g *stickyGroup) randomTarget() *rebalance.Target {
	t := rebalance.NextTarget(g.s)
	for _, share := range t.Assignment.Topics {
		for i := range share.Owners {
			m := int32(g.r.IntN(len(t.Assignment.Members)))
			share.Owners[i] = rebalance.Thread{Member: m, Stream: int32(g.r.IntN(g.streams))}
		}
	}
	return t
}

// worth is what a target is judged by, in this order; less is better.
type worth struct{ unevenness, members, streams int }

func (w worth) better(than worth) bool {
	return slices.Compare([]int{w.unevenness, w.members, w.streams}, []int{than.unevenness, than.members, than.streams}) < 0
}

// places lists the partitions of a snapshot, with the threads that may own each and
// the one that does by a target.
type place struct {
	registry.Partition
	may []string
	was string
}

func places(s rebalance.Snapshot) (list []place) {
	follows := s.Target != nil && slices.ContainsFunc(s.Target.Assignment.Members, func(id string) bool {
		return slices.ContainsFunc(s.Members, func(m rebalance.MemberInfo) bool { return m.ID == id })
	})
	was := maps.Collect(byRange(s).All())
	if follows {
		was = maps.Collect(s.Target.Assignment.All())
	}
	for _, topic := range slices.Sorted(maps.Keys(s.Topology)) {
		for _, p := range s.Topology[topic] {
			x := place{Partition: p}
			for _, m := range s.Members {
				for n := range m.Subscription[topic] {
					x.may = append(x.may, m.Thread(n))
				}
			}
			if !follows || s.Target.Incarnations[topic] == s.Incarnations[topic] {
				x.was = was[p]
			}
			list = append(list, x)
		}
	}
	return list
}

// byRange is what the group has if it comes from range.
func byRange(s rebalance.Snapshot) *rebalance.Assignment {
	members := slices.Clone(s.Members)
	for i := range members {
		members[i].Strategies = []string{rebalance.StrategyRange}
	}
	return assign(s.Topology, members)
}

func judge(list []place, owners []string) (w worth) {
	load := map[string]int{}
	for i, x := range list {
		if len(x.may) == 0 {
			continue
		}
		if x.was != owners[i] {
			w.streams++
		}
		if memberOf(x.was) != memberOf(owners[i]) {
			w.members++
		}
		w.unevenness += 2*load[owners[i]] + 1 // their sum is that of the squares of all loads
		load[owners[i]]++
	}
	return w
}

func memberOf(thread string) string {
	id, _, _ := rebalance.ParseThread(thread, func(id string) bool { return id != thread })
	return id
}

// best tries all assignments.
func best(list []place) (w worth) {
	owners := make([]string, len(list))
	first := true
	var try func(i int)
	try = func(i int) {
		if i == len(list) {
			if x := judge(list, owners); first || x.better(w) {
				w, first = x, false
			}
			return
		}
		if len(list[i].may) == 0 {
			try(i + 1)
			return
		}
		for _, owners[i] = range list[i].may {
			try(i + 1)
		}
	}
	try(0)
	return w
}

func owners(t *testing.T, list []place, a *rebalance.Assignment) []string {
	t.Helper()
	all := maps.Collect(a.All())
	names := make([]string, len(list))
	for i, x := range list {
		owner, owned := all[x.Partition]
		if owned != (len(x.may) > 0) || owned && !slices.Contains(x.may, owner) {
			t.Fatalf("%s goes to %q, of %q", x.Partition, owner, x.may)
		}
		names[i] = owner
		delete(all, x.Partition)
	}
	if len(all) > 0 {
		t.Fatalf("more than there is: %v", all)
	}
	return names
}

// Against all assignments that there are: none is better balanced, and of those that are
// as good, none moves fewer partitions to other members, or then to other streams.
func TestStickyIsTheBestOfAllAssignments(t *testing.T) {
	seed := rand.Uint64()
	for i := range uint64(4000) {
		g := newStickyGroup(seed+i, 3, 3, 3, 2)
		if i%2 == 0 {
			g = newStickyGroup(seed+i, 2, 4, 2, 3)
		}
		for step := range 4 {
			if step > 0 && g.r.IntN(2) == 0 {
				g.s.Target = g.randomTarget()
				g.change()
			}
			list := places(g.s)
			combinations := 1
			for _, x := range list {
				combinations *= max(1, len(x.may))
			}
			next := rebalance.NextTarget(g.s)
			got := judge(list, owners(t, list, next.Assignment))
			if combinations <= 20_000 {
				if want := best(list); got != want {
					t.Fatalf("seed %d step %d: %+v, want %+v\n%+v\nwas %v\nis  %v", seed+i, step, got, want, list, g.s.Target, next.Assignment)
				}
			}
			g.s.Target = next
			g.change()
		}
	}
}

// In larger groups: every partition once; balance, by exchange; the same whatever the
// order of the input; nothing moves when nothing changed; what is current is.
func TestStickyProperties(t *testing.T) {
	seed := rand.Uint64()
	for i := range uint64(200) {
		g := newStickyGroup(seed+i, 6, 30, 12, 3)
		for step := range 6 {
			list := places(g.s)
			next := rebalance.NextTarget(g.s)
			names := owners(t, list, next.Assignment)
			if from, to := improvement(list, names); from != "" {
				t.Fatalf("seed %d step %d: a partition should go from %s to %s", seed+i, step, from, to)
			}
			shuffled := g.shuffled()
			again := rebalance.NextTarget(shuffled)
			if fmt.Sprint(again.Assignment, again.Incarnations, again.Group) != fmt.Sprint(next.Assignment, next.Incarnations, next.Group) {
				t.Fatalf("seed %d step %d: order matters:\n%v\n%v", seed+i, step, next.Assignment, again.Assignment)
			}
			if g.s.Target.Current(g.s) {
				t.Fatalf("seed %d step %d: the former target is current", seed+i, step)
			}
			g.s.Target = next
			shuffled.Target = next
			if !next.Current(g.s) || !next.Current(shuffled) {
				t.Fatalf("seed %d step %d: the next target is not current", seed+i, step)
			}
			if still := rebalance.NextTarget(g.s); fmt.Sprint(still.Assignment) != fmt.Sprint(next.Assignment) {
				t.Fatalf("seed %d step %d: moved without a cause:\n%v\n%v", seed+i, step, next.Assignment, still.Assignment)
			}
			if a, err := rebalance.Assign(g.s); err != nil || a != next.Assignment {
				t.Fatalf("seed %d step %d: Assign does not follow the current target: %v", seed+i, step, err)
			}
			before := fmt.Sprint(places(g.s))
			for before == fmt.Sprint(places(g.s)) {
				g.change()
			}
		}
	}
}

// improvement looks for a chain of moves from a thread to one that has two less.
func improvement(list []place, names []string) (from, to string) {
	load := map[string]int{}
	next := map[string]map[string]bool{}
	for i, x := range list {
		for _, thread := range x.may {
			load[thread] += 0
			if next[names[i]] == nil {
				next[names[i]] = map[string]bool{}
			}
			next[names[i]][thread] = true
		}
		if len(x.may) > 0 {
			load[names[i]]++
		}
	}
	for thread, n := range load {
		reached := map[string]bool{thread: true}
		for queue := []string{thread}; len(queue) > 0; queue = queue[1:] {
			for other := range next[queue[0]] {
				if load[other] < n-1 {
					return thread, other
				}
				if !reached[other] {
					reached[other] = true
					queue = append(queue, other)
				}
			}
		}
	}
	return "", ""
}

// follow makes the target of a group that follows the one before.
func follow(before *rebalance.Target, topology rebalance.Topology, ids ...string) *rebalance.Target {
	s := rebalance.Snapshot{Topology: topology, Incarnations: map[string]int64{}, Target: before}
	all := map[string]int32{}
	for topic := range topology {
		all[topic] = 1
	}
	for _, id := range ids {
		s.Members = append(s.Members, rebalance.MemberInfo{ID: id, Subscription: all, Strategies: []string{"sticky"}})
	}
	return rebalance.NextTarget(s)
}

func TestStickyByExample(t *testing.T) {
	topology := rebalance.Topology{"t": numbers("t", 4), "u": numbers("u", 4)}
	one := follow(follow(nil, nil, "a", "b", "c"), topology, "a", "b", "c")
	equal(t, threads(one.Assignment), "t/0 a-0, t/1 b-0, t/2 c-0, t/3 a-0, u/0 b-0, u/1 c-0, u/2 a-0, u/3 b-0")
	// b leaves: what others have stays, and what it had is dealt out.
	two := follow(one, topology, "a", "c")
	equal(t, threads(two.Assignment), "t/0 a-0, t/1 a-0, t/2 c-0, t/3 a-0, u/0 c-0, u/1 c-0, u/2 a-0, u/3 c-0")
	// d joins: each gives up what it has most of.
	three := follow(two, topology, "a", "c", "d")
	equal(t, threads(three.Assignment), "t/0 a-0, t/1 a-0, t/2 c-0, t/3 d-0, u/0 c-0, u/1 c-0, u/2 a-0, u/3 d-0")
	// t gets two partitions more: they go where least is.
	topology = rebalance.Topology{"t": numbers("t", 6), "u": numbers("u", 4)}
	four := follow(three, topology, "a", "c", "d")
	equal(t, threads(four.Assignment), "t/0 a-0, t/1 a-0, t/2 c-0, t/3 d-0, t/4 a-0, t/5 d-0, u/0 c-0, u/1 c-0, u/2 a-0, u/3 d-0")
}

// A group that turns from range to sticky moves no more than balance wants, whether
// it has no target yet or one of members that are long gone.
func TestStickyBeginsWithWhatRangeGave(t *testing.T) {
	six := rebalance.Topology{"t": numbers("t", 6)}
	for _, former := range []*rebalance.Target{nil, follow(nil, six, "x", "y")} {
		equal(t, threads(follow(former, six, "a", "b", "c").Assignment), "t/0 a-0, t/1 a-0, t/2 b-0, t/3 b-0, t/4 c-0, t/5 c-0")
		two := rebalance.Topology{"t": numbers("t", 4), "u": numbers("u", 4)}
		// By range a has t/0, t/1, u/0 and u/1.
		equal(t, threads(follow(former, two, "a", "b", "c").Assignment),
			"t/0 a-0, t/1 a-0, t/2 b-0, t/3 c-0, u/0 a-0, u/1 b-0, u/2 b-0, u/3 c-0")
	}
	// One member that stays is enough: what it has it keeps.
	former := follow(nil, six, "a", "x", "y")
	equal(t, threads(follow(former, six, "a", "b", "c").Assignment), "t/0 a-0, t/1 a-0, t/2 b-0, t/3 c-0, t/4 b-0, t/5 c-0")
}

// What is dealt out anew is even in each topic, too.
func TestStickySpreadsEachTopic(t *testing.T) {
	seed := rand.Uint64()
	for i := range uint64(100) {
		r := rand.New(rand.NewPCG(seed+i, 1))
		topology := rebalance.Topology{}
		for n := range 1 + r.IntN(8) {
			topic := fmt.Sprintf("t%d", n)
			topology[topic] = numbers(topic, 1+r.IntN(40))
		}
		var ids []string
		for n := range 1 + r.IntN(10) {
			ids = append(ids, fmt.Sprintf("m%02d", n))
		}
		a := follow(follow(nil, nil, ids...), topology, ids...).Assignment
		for topic, share := range a.Topics {
			counts := make([]int, len(ids))
			for _, owner := range share.Owners {
				counts[owner.Member]++
			}
			if slices.Max(counts)-slices.Min(counts) > 1 {
				t.Fatalf("seed %d: %s is spread as %v", seed+i, topic, counts)
			}
		}
	}
}

// A partition with another home is another one: its owner key is. It is dealt out anew,
// and what the member had of it does not count.
func TestStickyWithAnotherHome(t *testing.T) {
	topology := rebalance.Topology{"t": numbers("t", 3)}
	before := follow(nil, topology, "a", "b")
	copy(before.Assignment.Topics["t"].Owners, []rebalance.Thread{{Member: 1}, {Member: 0}, {Member: 1}})
	equal(t, threads(follow(before, topology, "a", "b").Assignment), "t/0 b-0, t/1 a-0, t/2 b-0")
	moved := rebalance.Topology{"t": numbers("t", 3)}
	moved["t"][2].Home--
	equal(t, threads(follow(before, moved, "a", "b").Assignment), "t/0 b-0, t/1 a-0, t/2 a-0")
}
