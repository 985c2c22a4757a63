package rebalance_test

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf16"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// numbers returns n partitions of a topic, with homes 1.
func numbers(topic string, n int) []registry.Partition {
	var list []registry.Partition
	for i := range n {
		list = append(list, registry.Partition{Topic: topic, Home: 1, Number: int32(i)})
	}
	return list
}

func member(id string, subscription map[string]int32) rebalance.MemberInfo {
	return rebalance.MemberInfo{ID: id, Subscription: subscription, Strategies: []string{"range"}}
}

// shares prints an assignment as "member: topic numbers" lines.
func shares(a *rebalance.Assignment, members []rebalance.MemberInfo) string {
	var b strings.Builder
	for _, m := range members {
		mine := a.Of(m.ID)
		var list []registry.Partition
		for p := range mine {
			list = append(list, p)
		}
		slices.SortFunc(list, registry.ComparePartitions)
		fmt.Fprintf(&b, "%s:", m.ID)
		for _, p := range list {
			fmt.Fprintf(&b, " %s/%d", p.Topic, p.Number)
		}
		b.WriteString("\n")
	}
	return b.String()
}

func equal(t *testing.T, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}
}

// assign shares out topics without fail.
func assign(topology rebalance.Topology, members []rebalance.MemberInfo) *rebalance.Assignment {
	a, err := rebalance.Assign(rebalance.Snapshot{Topology: topology, Members: members})
	if err != nil {
		panic(err)
	}
	return a
}

// byNumber assigns n partitions of one topic to members with so many streams, and
// lists the threads that own them, by number.
func byNumber(n int, streams map[string]int32) []string {
	var members []rebalance.MemberInfo
	for id, n := range streams {
		members = append(members, member(id, map[string]int32{"t": n}))
	}
	threads := make([]string, n)
	for p, thread := range assign(rebalance.Topology{"t": numbers("t", n)}, members).All() {
		threads[p.Number] = thread
	}
	return threads
}

// The vectors of the documented rule: q = P div T, one more for the first P mod T.
func TestRangeVectors(t *testing.T) {
	for _, c := range []struct {
		partitions int
		streams    map[string]int32
		want       string
	}{
		{5, map[string]int32{"C1": 2, "C2": 2}, "C1-0 C1-0 C1-1 C2-0 C2-1"},
		{10, map[string]int32{"a": 1, "b": 1, "c": 1}, "a-0 a-0 a-0 a-0 b-0 b-0 b-0 c-0 c-0 c-0"},
		{2, map[string]int32{"a": 1, "b": 1, "c": 1}, "a-0 b-0"},
		{12, map[string]int32{"g_a": 11}, "g_a-0 g_a-0 g_a-1 g_a-10 g_a-2 g_a-3 g_a-4 g_a-5 g_a-6 g_a-7 g_a-8 g_a-9"},
	} {
		equal(t, strings.Join(byNumber(c.partitions, c.streams), " "), c.want)
	}
}

func TestThreadsSortAsTheJVMSortsThem(t *testing.T) {
	order := byNumber(8, map[string]int32{"g_a_b": 1, "g_a.b": 1, "g_a": 3, "g_a-0": 1, "g_a-10": 1, "g_B": 1})
	equal(t, strings.Join(order, ", "), "g_B-0, g_a-0, g_a-0-0, g_a-1, g_a-10-0, g_a-2, g_a.b-0, g_a_b-0")
	order = byNumber(12, map[string]int32{"g_a": 11, "g_a-0": 1})
	equal(t, strings.Join(order[:5], ", "), "g_a-0, g_a-0-0, g_a-1, g_a-10, g_a-2")

	// U+1F600 is D83D DE00 in UTF-16 and so comes before U+FB01.
	equal(t, byNumber(1, map[string]int32{"ﬁ": 1, "😀": 1})[0], "😀-0")
}

func TestRangeClustersPartitionsOfOneBroker(t *testing.T) {
	var list []registry.Partition
	for i := range 4 {
		list = append(list, registry.Partition{Topic: "t", Home: int32(1 + i%2), Number: int32(i)})
	}
	members := []rebalance.MemberInfo{member("a", map[string]int32{"t": 1}), member("b", map[string]int32{"t": 1})}
	a := assign(rebalance.Topology{"t": list}, members)
	equal(t, a.Strategy, "range")
	equal(t, shares(a, members), "a: t/0 t/2\nb: t/1 t/3\n")

	members[1].Strategies = nil // a consumer of 0.8
	a = assign(rebalance.Topology{"t": list}, members)
	equal(t, a.Strategy, "range-numeric")
	equal(t, shares(a, members), "a: t/0 t/1\nb: t/2 t/3\n")
}

func TestAgreeTakesTheFirstThatAllState(t *testing.T) {
	m := func(id string, strategies ...string) rebalance.MemberInfo {
		return rebalance.MemberInfo{ID: id, Strategies: strategies}
	}
	for _, c := range []struct {
		members []rebalance.MemberInfo
		want    string
	}{
		{nil, "range-numeric"},
		{[]rebalance.MemberInfo{m("a", "range")}, "range"},
		{[]rebalance.MemberInfo{m("b", "range", "range-numeric"), m("a", "range-numeric", "range")}, "range-numeric"},
		{[]rebalance.MemberInfo{m("a", "sticky", "range"), m("b", "range")}, "range"},
		{[]rebalance.MemberInfo{m("a", "range"), m("b")}, "range-numeric"},
		{[]rebalance.MemberInfo{m("b", "sticky", "roundrobin"), m("a", "roundrobin", "sticky")}, "roundrobin"},
		{[]rebalance.MemberInfo{m("a", "sticky", "roundrobin", "range"), m("c", "range", "sticky"), m("b", "roundrobin", "sticky")}, "sticky"},
		{[]rebalance.MemberInfo{m("a", "sticky"), m("b", "roundrobin")}, "range-numeric"},
		{[]rebalance.MemberInfo{m("a", "newer", "sticky"), m("b", "newer", "sticky")}, "sticky"},
		{[]rebalance.MemberInfo{m("a", "sticky"), m("b", "sticky"), m("c")}, "range-numeric"},
		{[]rebalance.MemberInfo{m("a", "sticky", "range-numeric"), m("b", "range-numeric", "range")}, "range-numeric"},
	} {
		equal(t, rebalance.Agree(c.members), c.want)
	}
}

// Field case 08: uneven division; more consumers than partitions.
func TestCase08(t *testing.T) {
	group := func(n int) (list []rebalance.MemberInfo) {
		for i := range n {
			list = append(list, member(fmt.Sprintf("c%02d", i), map[string]int32{"t": 1}))
		}
		return list
	}
	members := group(9)
	a := assign(rebalance.Topology{"t": numbers("t", 32)}, members)
	var counts []string
	for _, m := range members {
		var mine []int32
		for p := range a.Of(m.ID) {
			mine = append(mine, p.Number)
		}
		counts = append(counts, fmt.Sprintf("%d-%d", slices.Min(mine), slices.Max(mine)))
	}
	equal(t, strings.Join(counts, " "), "0-3 4-7 8-11 12-15 16-19 20-22 23-25 26-28 29-31")

	members = group(38)
	a = assign(rebalance.Topology{"t": numbers("t", 16)}, members)
	for i, m := range members {
		if got, want := len(a.Of(m.ID)), min(1, max(0, 16-i)); got != want {
			t.Errorf("%s owns %d, want %d", m.ID, got, want)
		}
	}
}

// Field case 11: each topic is divided among its own subscribers.
func TestCase11(t *testing.T) {
	topology := rebalance.Topology{"test": numbers("test", 2), "other": numbers("other", 2), "t1": numbers("t1", 3), "t2": numbers("t2", 3)}
	members := []rebalance.MemberInfo{member("c1", map[string]int32{"test": 1}), member("c2", map[string]int32{"other": 1})}
	a := assign(topology, members)
	equal(t, shares(a, members), "c1: test/0 test/1\nc2: other/0 other/1\n")

	both := map[string]int32{"t1": 1, "t2": 1}
	members = []rebalance.MemberInfo{member("c1", both), member("c2", both)}
	want := "c1: t1/0 t1/1 t2/0 t2/1\nc2: t1/2 t2/2\n"
	a = assign(topology, members)
	equal(t, shares(a, members), want)

	members[0] = member("c1", map[string]int32{"t1": 1, "t2": 1, "ghost": 1})
	a = assign(topology, members)
	equal(t, shares(a, members), want)
}

// Field case 07: which consumer an owner key names.
func TestCase07(t *testing.T) {
	registered := func(id string) bool {
		return id == "g_node-a-7-1761955200000-0b0c0d0e" || id == "node-b-2:5c975c69-a251-4a52-9a6f-779738190012"
	}
	for owner, want := range map[string]string{
		"g_node-a-7-1761955200000-0b0c0d0e-0":           "g_node-a-7-1761955200000-0b0c0d0e 0 true",
		"g_node-a-7-1761955200000-0b0c0d0e-1":           "g_node-a-7-1761955200000-0b0c0d0e 1 true",
		"node-b-2:5c975c69-a251-4a52-9a6f-779738190012": "node-b-2:5c975c69-a251-4a52-9a6f-779738190012 -1 true",
		"ghost-host-9": " 0 false",
		"":             " 0 false",
		"g_node-a-7-1761955200000-0b0c0d0e-99999999999": " 0 false",
	} {
		id, n, ok := rebalance.ParseThread(owner, registered)
		equal(t, fmt.Sprint(id, " ", n, " ", ok), want)
	}
}

// Every partition goes to exactly one thread of a subscriber, balanced to within
// one by topic, whatever the order of the input.
func TestAssignProperties(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 1))
	for range 300 {
		topology := rebalance.Topology{}
		var names []string
		for i := range 1 + r.IntN(4) {
			name := fmt.Sprintf("t%d", i)
			names = append(names, name)
			for n := range r.IntN(20) {
				topology[name] = append(topology[name], registry.Partition{Topic: name, Home: int32(r.IntN(3)), Number: int32(n)})
			}
		}
		var members []rebalance.MemberInfo
		for i := range 1 + r.IntN(6) {
			sub := map[string]int32{}
			for _, name := range names {
				if r.IntN(3) > 0 {
					sub[name] = int32(1 + r.IntN(3))
				}
			}
			members = append(members, member(fmt.Sprintf("m-%d", i), sub))
		}
		a := assign(topology, members)
		want := shares(a, members)
		counts := map[string]map[string]int{}
		total := 0
		for _, m := range members {
			for p, stream := range a.Of(m.ID) {
				total++
				if counts[p.Topic] == nil {
					counts[p.Topic] = map[string]int{}
				}
				counts[p.Topic][m.Thread(stream)]++
			}
		}
		if total != len(maps.Collect(a.All())) {
			t.Fatalf("seed %d: %d partitions assigned, members see %d", seed, len(maps.Collect(a.All())), total)
		}
		for topic, list := range topology {
			threads := 0
			for _, m := range members {
				threads += int(m.Subscription[topic])
			}
			for thread, n := range counts[topic] {
				if q := len(list) / threads; n < q || n > q+1 {
					t.Fatalf("seed %d: %s has %d of %d partitions among %d threads", seed, thread, n, len(list), threads)
				}
			}
		}
		for _, list := range topology {
			r.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
		}
		shuffled := slices.Clone(members)
		r.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		again := assign(topology, shuffled)
		if got := shares(again, members); got != want {
			t.Fatalf("seed %d: order of input matters:\n%s\n%s", seed, got, want)
		}
	}
}

// Range as one would write it down from the documents, on groups of all kinds: ids
// that begin alike, in letters of all alphabets; brokers with any ids; gaps in the numbers.
func TestRangeIsTheDocumentedRule(t *testing.T) {
	seed := rand.Uint64()
	for i := range uint64(500) {
		r := rand.New(rand.NewPCG(seed+i, 3))
		g := &stickyGroup{r: r, topics: 3, streams: 12, alike: r.IntN(3) == 0}
		g.s = rebalance.Snapshot{Topology: rebalance.Topology{}, Incarnations: map[string]int64{}}
		for n := range 3 {
			topic, number := fmt.Sprintf("t%d", n), int32(0)
			for range r.IntN(40) {
				home := int32(1 + r.IntN(3))
				if i%3 == 0 {
					home = r.Int32()
				}
				g.s.Topology[topic] = append(g.s.Topology[topic], registry.Partition{Topic: topic, Home: home, Number: number})
				number += int32(1 + r.IntN(2)*int(i%2)*r.IntN(50))
			}
		}
		ids := []string{"a", "a-1", "a-", "B", "ﬁ", "😀", "é", "a_b", "a.b", "a-1-1", "a-10"}
		r.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
		strategy := []string{"range", "range-numeric"}[r.IntN(2)]
		for _, id := range ids[:r.IntN(len(ids))] {
			g.s.Members = append(g.s.Members, rebalance.MemberInfo{ID: id, Subscription: g.subscription(), Strategies: []string{strategy}})
		}
		s := g.shuffled()
		got := maps.Collect(assign(s.Topology, s.Members).All())
		want := map[registry.Partition]string{}
		for topic, list := range s.Topology {
			var ct []string
			for _, m := range s.Members {
				for n := range m.Subscription[topic] {
					ct = append(ct, m.Thread(n))
				}
			}
			slices.SortFunc(ct, func(a, b string) int { return slices.Compare(utf16.Encode([]rune(a)), utf16.Encode([]rune(b))) })
			pt := slices.SortedFunc(slices.Values(list), func(a, b registry.Partition) int {
				if strategy == "range" && a.Home != b.Home {
					return cmp.Compare(a.Home, b.Home)
				}
				return cmp.Compare(a.Number, b.Number)
			})
			for i, thread := range ct {
				n, extra := len(pt)/len(ct), len(pt)%len(ct)
				for _, p := range pt[i*n+min(i, extra) : (i+1)*n+min(i+1, extra)] {
					want[p] = thread
				}
			}
		}
		if !maps.Equal(got, want) {
			t.Fatalf("seed %d: %s of %v among %v\ngot  %v\nwant %v", seed+i, strategy, s.Topology, s.Members, got, want)
		}
	}
}
