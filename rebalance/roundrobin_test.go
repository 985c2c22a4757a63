package rebalance_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// dealer is a member that states roundrobin.
func dealer(id string, subscription map[string]int32) rebalance.MemberInfo {
	return rebalance.MemberInfo{ID: id, Subscription: subscription, Strategies: []string{"roundrobin", "range"}}
}

func TestRoundRobinVectors(t *testing.T) {
	two := map[string]int32{"orders": 2, "clicks": 2}
	one := map[string]int32{"orders": 1, "clicks": 1}
	members := []rebalance.MemberInfo{dealer("g_c1", two), dealer("g_c2", one)}
	a := assign(rebalance.Topology{"orders": numbers("orders", 4), "clicks": numbers("clicks", 2)}, members)
	equal(t, a.Strategy, "roundrobin")
	equal(t, threads(a), "clicks/0 g_c1-1, clicks/1 g_c2-0, orders/0 g_c1-0, orders/1 g_c1-1, orders/2 g_c2-0, orders/3 g_c1-0")

	both := map[string]int32{"t1": 1, "t2": 1}
	a = assign(rebalance.Topology{"t1": numbers("t1", 3), "t2": numbers("t2", 2)}, []rebalance.MemberInfo{dealer("g_a", both), dealer("g_b", both)})
	equal(t, threads(a), "t1/0 g_a-0, t1/1 g_b-0, t1/2 g_a-0, t2/0 g_b-0, t2/1 g_a-0")

	// Equal hashes go by topic: [Aa,0] and [BB,0] have the same.
	both = map[string]int32{"Aa": 1, "BB": 1}
	a = assign(rebalance.Topology{"BB": numbers("BB", 1), "Aa": numbers("Aa", 1)}, []rebalance.MemberInfo{dealer("b", both), dealer("a", both)})
	equal(t, threads(a), "Aa/0 a-0, BB/0 b-0")

	// The hash is over UTF-16 code units: [é,0] has 84849, which is before [ê,0].
	both = map[string]int32{"ê": 1, "é": 1, "z": 1}
	a = assign(rebalance.Topology{"ê": numbers("ê", 1), "é": numbers("é", 1), "z": numbers("z", 1)}, []rebalance.MemberInfo{dealer("a", both), dealer("b", both)})
	equal(t, threads(a), "z/0 a-0, é/0 b-0, ê/0 a-0")
}

func threads(a *rebalance.Assignment) string {
	var list []string
	for p, thread := range a.All() {
		list = append(list, fmt.Sprintf("%s/%d %s", p.Topic, p.Number, thread))
	}
	return strings.Join(list, ", ")
}

func TestRoundRobinRefusesMembersThatDiffer(t *testing.T) {
	const needs = "roundrobin needs members that all subscribe to the same topics, each with one number of streams for all of them: "
	sub := func(pairs ...any) map[string]int32 {
		m := map[string]int32{}
		for i := 0; i < len(pairs); i += 2 {
			m[pairs[i].(string)] = int32(pairs[i+1].(int))
		}
		return m
	}
	for _, c := range []struct {
		members []map[string]int32
		want    string
	}{
		{[]map[string]int32{sub("a", 1, "b", 1), sub("a", 1, "b", 1), sub("a", 1)}, "m2 without b, unlike m0, m1"},
		{[]map[string]int32{sub("a", 1), sub("a", 1), sub("a", 1, "x", 1)}, "m2 with x besides, unlike m0, m1"},
		{[]map[string]int32{sub("b", 1), sub("a", 1), sub("a", 1), sub("a", 1), sub("a", 1), sub("a", 1)}, "m0 without a with b besides, unlike m1, m2, m3 and 2 more"},
		{[]map[string]int32{sub("a", 1, "b", 1), sub("a", 1, "b", 2)}, "m1 with streams 1 of a, but 2 of b"},
		{[]map[string]int32{sub("a", 1, "ghost", 1), sub("a", 1)}, "m1 without ghost, unlike m0"},
		{[]map[string]int32{sub("a", 1), sub("b", 1), sub("c", 1), sub("d", 1), sub("e", 1)},
			"m1 without a with b besides, unlike m0; m2 without a with c besides, unlike m0; m3 without a with d besides, unlike m0; and others"},
		{[]map[string]int32{sub("a", 2, "b", 2), sub("a", 1, "b", 1), sub()}, ""},
		{[]map[string]int32{sub(), sub()}, ""},
		{nil, ""},
	} {
		s := rebalance.Snapshot{Topology: rebalance.Topology{"a": numbers("a", 2), "b": numbers("b", 2), "z": numbers("z", 2)}}
		for i, m := range c.members {
			s.Members = append(s.Members, dealer(fmt.Sprintf("m%d", i), m))
		}
		a, err := rebalance.Assign(s)
		if c.want == "" {
			if err != nil || a.Topics["z"].Owners[0] != rebalance.Nobody {
				t.Errorf("%v: %v", c.members, err)
			}
			continue
		}
		if a != nil || !errors.Is(err, rebalance.ErrNotUniform) {
			t.Fatalf("%v: %v, %v", c.members, a, err)
		}
		equal(t, err.Error(), needs+c.want)
	}
}

// Balanced to within one over all topics; every partition once; the same whatever the order of the input.
func TestRoundRobinProperties(t *testing.T) {
	seed := rand.Uint64()
	for i := range uint64(300) {
		r := rand.New(rand.NewPCG(seed+i, 1))
		s := rebalance.Snapshot{Topology: rebalance.Topology{}}
		total := 0
		for n := range 1 + r.IntN(4) {
			topic := fmt.Sprintf("t%d", n)
			s.Topology[topic] = numbers(topic, r.IntN(30))
			total += len(s.Topology[topic])
		}
		all := 0
		for m := range 1 + r.IntN(6) {
			streams := 1 + r.IntN(12)
			all += streams
			sub := map[string]int32{}
			for topic := range s.Topology {
				sub[topic] = int32(streams)
			}
			s.Members = append(s.Members, dealer(fmt.Sprintf("m%d", m), sub))
		}
		a := assign(s.Topology, s.Members)
		counts := map[string]int{}
		seen := map[registry.Partition]bool{}
		for p, thread := range a.All() {
			counts[thread]++
			seen[p] = true
		}
		if len(seen) != total {
			t.Fatalf("seed %d: %d of %d partitions have an owner", seed+i, len(seen), total)
		}
		for thread, n := range counts {
			if n < total/all || n > total/all+1 {
				t.Fatalf("seed %d: %s has %d of %d partitions among %d threads", seed+i, thread, n, total, all)
			}
		}
		g := &stickyGroup{r: r, s: s}
		again := g.shuffled()
		if b := assign(again.Topology, again.Members); threads(b) != threads(a) {
			t.Fatalf("seed %d: order matters:\n%s\n%s", seed+i, threads(a), threads(b))
		}
	}
}
