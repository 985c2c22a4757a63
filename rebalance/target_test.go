package rebalance_test

import (
	"errors"
	"math/rand/v2"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

func encode(t *testing.T, target *rebalance.Target) []byte {
	t.Helper()
	value, err := target.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return value
}

func TestTargetRecord(t *testing.T) {
	s := rebalance.Snapshot{Revision: 812, Incarnations: map[string]int64{"orders": 17, "clicks": 18, "old": 19},
		Topology: rebalance.Topology{"orders": numbers("orders", 4), "clicks": {{Topic: "clicks", Home: 2, Number: 3}, {Topic: "clicks", Home: 1, Number: 0}},
			"old": numbers("old", 1)},
		Members: []rebalance.MemberInfo{member("b:2", map[string]int32{"orders": 2, "clicks": 2}), member("a é", map[string]int32{"orders": 1, "clicks": 1, "ghost": 7})}}
	next := rebalance.NextTarget(s)
	value := encode(t, next)
	equal(t, string(value), `{"version":1,"revision":812,"strategy":"sticky","group":"`+next.Group+`","members":["a%20%C3%A9","b:2"],"streams":[1,2],`+
		`"topics":{"clicks":{"created":18,"homes":[1,2],"numbers":[0,3],"owners":[0,1]},"old":{"created":19,"homes":[1],"owners":[-1]},`+
		`"orders":{"created":17,"homes":[1],"owners":[0,2,1,2]}}}`)
	read, err := rebalance.ReadTarget(registry.KV{Key: "/consumers/g/target", Value: value, ModRevision: 815})
	if err != nil {
		t.Fatal(err)
	}
	next.Record = 815
	if !reflect.DeepEqual(read, next) {
		t.Errorf("read %+v, want %+v", read, next)
	}
	if !read.Current(s) {
		t.Error("it is not current once it is read back")
	}
}

func TestTargetIsCurrentForTheSameGroupOnly(t *testing.T) {
	group := func() rebalance.Snapshot {
		return rebalance.Snapshot{Revision: 5, Topology: rebalance.Topology{"t": numbers("t", 3), "u": numbers("u", 2)}, Incarnations: map[string]int64{"t": 1, "u": 2},
			Members: []rebalance.MemberInfo{member("a", map[string]int32{"t": 1, "u": 1}), member("b", map[string]int32{"t": 1, "u": 1})}}
	}
	target := rebalance.NextTarget(group())
	for name, c := range map[string]struct {
		change func(s *rebalance.Snapshot)
		want   bool
	}{
		"nothing":                 {func(*rebalance.Snapshot) {}, true},
		"registered again":        {func(s *rebalance.Snapshot) { s.Revision, s.Registered = 9, 9 }, true},
		"other list":              {func(s *rebalance.Snapshot) { s.Members[0].Strategies = []string{"sticky", "range"} }, true},
		"a topic that is not":     {func(s *rebalance.Snapshot) { s.Members[0].Subscription["ghost"] = 1 }, true},
		"member left":             {func(s *rebalance.Snapshot) { s.Members = s.Members[1:] }, false},
		"member joined":           {func(s *rebalance.Snapshot) { s.Members = append(s.Members, member("c", nil)) }, false},
		"another member":          {func(s *rebalance.Snapshot) { s.Members[1].ID = "c" }, false},
		"streams":                 {func(s *rebalance.Snapshot) { s.Members[1].Subscription["t"] = 2 }, false},
		"subscription":            {func(s *rebalance.Snapshot) { delete(s.Members[1].Subscription, "t") }, false},
		"subscriptions exchanged": {func(s *rebalance.Snapshot) { delete(s.Members[0].Subscription, "t") }, false},
		"more partitions":         {func(s *rebalance.Snapshot) { s.Topology["t"] = numbers("t", 4) }, false},
		"another home":            {func(s *rebalance.Snapshot) { s.Topology["t"][1].Home = 7 }, false},
		"topic deleted":           {func(s *rebalance.Snapshot) { delete(s.Topology, "u"); delete(s.Incarnations, "u") }, false},
		"topic created":           {func(s *rebalance.Snapshot) { s.Topology["v"] = numbers("v", 1) }, false},
		"topic created again":     {func(s *rebalance.Snapshot) { s.Incarnations["u"] = 8 }, false},
	} {
		s := group()
		c.change(&s)
		if got := target.Current(s); got != c.want {
			t.Errorf("%s: current %v, want %v", name, got, c.want)
		}
	}
	var none *rebalance.Target
	if none.Current(group()) {
		t.Error("no target is current")
	}
	// Written by hand: a thread that is none of the topic's, and a partition without an owner.
	for _, owner := range []rebalance.Thread{{Member: 1, Stream: 1}, rebalance.Nobody} {
		target := rebalance.NextTarget(group())
		target.Assignment.Topics["t"].Owners[0] = owner
		if target.Current(group()) {
			t.Errorf("current with the owner %v", owner)
		}
	}
	// A member that does not subscribe to the topic, though to another one.
	s := group()
	delete(s.Members[1].Subscription, "u")
	target = rebalance.NextTarget(s)
	target.Assignment.Topics["u"].Owners[0] = rebalance.Thread{Member: 1}
	if target.Current(s) {
		t.Error("current with an owner that does not subscribe")
	}
	// Other members than those that its group stands for.
	for _, ids := range [][]string{{"a"}, {"a", "c"}, {"a", "b", "c"}} {
		target := rebalance.NextTarget(group())
		target.Assignment.Members = ids
		target.Assignment.Topics["t"].Owners[0].Member = int32(len(ids) - 1)
		if target.Current(group()) {
			t.Errorf("current with the members %v", ids)
		}
	}
}

func TestBadTargetRecordsAreErrors(t *testing.T) {
	const good = `{"version":1,"revision":1,"strategy":"sticky","group":"x","members":["a","b"],"streams":[1],"topics":{"t":{"created":1,"homes":[1],"owners":[0,1]}}}`
	if _, err := rebalance.ReadTarget(registry.KV{Value: []byte(good)}); err != nil {
		t.Fatal(err)
	}
	for _, change := range [][2]string{
		{good, ``}, {good, `null`}, {good, `[]`}, {`"version":1`, `"version":2`}, {`sticky`, `range`},
		{`["a","b"]`, `["b","a"]`}, {`["a","b"]`, `["a","a"]`}, {`["a","b"]`, `["a","%zz"]`}, {`["a","b"]`, `["a"]`}, {`["a","b"]`, `[]`},
		{`"streams":[1]`, `"streams":[]`}, {`"streams":[1]`, `"streams":[0]`}, {`"streams":[1]`, `"streams":[1,1,1]`}, {`"streams":[1]`, `"streams":[1000000000]`},
		{`"homes":[1]`, `"homes":[]`}, {`"homes":[1]`, `"homes":[-1]`}, {`"homes":[1]`, `"homes":[1,1,1]`},
		{`[0,1]`, `[0,2]`}, {`[0,1]`, `[0,-2]`}, {`[0,1]`, `[0,1.5]`}, {`[0,1]`, `[0,9999999999]`},
		{`"owners"`, `"numbers":[0],"owners"`}, {`"owners"`, `"numbers":[1,1],"owners"`}, {`"owners"`, `"numbers":[-1,1],"owners"`},
		{`"t":`, `"%41":`},
	} {
		value := strings.Replace(good, change[0], change[1], 1)
		_, err := rebalance.ReadTarget(registry.KV{Key: "/consumers/g/target", Value: []byte(value)})
		if !errors.Is(err, registry.ErrRecord) || !strings.Contains(err.Error(), "/consumers/g/target") {
			t.Errorf("%s: error %v", value, err)
		}
	}
}

func FuzzReadTarget(f *testing.F) {
	f.Add([]byte(`{"version":1,"revision":1,"strategy":"sticky","group":"x","members":["a","b"],"streams":[2,1],"topics":{"t":{"created":1,"homes":[1],"numbers":[0,3],"owners":[0,-1]}}}`))
	f.Add([]byte(`{"version":1,"strategy":"sticky","members":["g_m-1"],"streams":[10000],"topics":{"t":{"created":1,"homes":[1,2],"owners":[9999,0,1]},"u":{"created":3,"homes":[0],"owners":[1]}}}`))
	f.Fuzz(func(t *testing.T, value []byte) {
		target, err := rebalance.ReadTarget(registry.KV{Value: value, ModRevision: 3})
		if err != nil {
			return
		}
		again, err := rebalance.ReadTarget(registry.KV{Value: encode(t, target), ModRevision: 3})
		if err != nil || !reflect.DeepEqual(again, target) {
			t.Fatalf("read %+v, then %+v: %v", target, again, err)
		}
		// Whatever it says, a group goes on from it.
		s := rebalance.Snapshot{Topology: rebalance.Topology{"t": numbers("t", 4), "u": numbers("u", 1)}, Incarnations: map[string]int64{"t": 1, "u": 3}, Target: target,
			Members: []rebalance.MemberInfo{
				{ID: "a", Subscription: map[string]int32{"t": 2}, Strategies: []string{"sticky"}},
				{ID: "g_m-1", Subscription: map[string]int32{"t": 1, "u": 1}, Strategies: []string{"sticky"}}}}
		list := places(s)
		owners(t, list, rebalance.NextTarget(s).Assignment)
	})
}

func TestTargetRecordOfALargeGroupFitsEtcd(t *testing.T) {
	for _, members := range []int{1000, 10_000} {
		s := largeGroup("sticky", 1, 100_000, members, shared(1))
		value, err := rebalance.NextTarget(s).Encode()
		t.Logf("%d members: %d bytes, %v", members, len(value), err)
		if members == 1000 && (err != nil || len(value) >= 1<<20) {
			t.Errorf("%d members: %d bytes, %v", members, len(value), err)
		}
	}
	s := largeGroup("sticky", 100, 1000, 1000, shared(100))
	if _, err := rebalance.NextTarget(s).Encode(); err != nil {
		t.Error(err)
	}
	s = largeGroup("sticky", 1, 300_000, 10_000, shared(1))
	_, err := rebalance.NextTarget(s).Encode()
	if !errors.Is(err, rebalance.ErrTargetTooLarge) || !strings.Contains(err.Error(), "10000 members") {
		t.Error(err)
	}
}

// What one target says another reads, in groups of all shapes.
func TestTargetRecordsReadBack(t *testing.T) {
	seed := rand.Uint64()
	for i := range uint64(200) {
		g := newStickyGroup(seed+i, 5, 20, 8, 3)
		for range 3 {
			next := rebalance.NextTarget(g.s)
			read, err := rebalance.ReadTarget(registry.KV{Value: encode(t, next)})
			if err != nil || !reflect.DeepEqual(read, next) {
				t.Fatalf("seed %d: %+v, want %+v: %v", seed+i, read, next, err)
			}
			g.s.Target = read
			g.change()
		}
	}
}

// The page shows a record that is what we write.
func TestStrategiesPage(t *testing.T) {
	page, err := os.ReadFile("../docs/strategies.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(page), "```target\n")
	text, _, found := strings.Cut(rest, "\n```")
	target, err := rebalance.ReadTarget(registry.KV{Value: []byte(text)})
	if err != nil || !found {
		t.Fatal(text, err)
	}
	equal(t, string(encode(t, target)), text)
	s := rebalance.Snapshot{Revision: target.Snapshot, Topology: rebalance.Topology{"orders": nil}, Incarnations: target.Incarnations}
	for n, home := range []int32{1, 2, 3, 1, 2} {
		s.Topology["orders"] = append(s.Topology["orders"], registry.Partition{Topic: "orders", Home: home, Number: int32(n)})
	}
	for _, id := range []string{"node-a:5c97", "node-b:77d0"} {
		s.Members = append(s.Members, rebalance.MemberInfo{ID: id, Subscription: map[string]int32{"orders": 1}, Strategies: []string{"sticky"}})
	}
	equal(t, string(encode(t, rebalance.NextTarget(s))), text)
	for _, strategy := range []string{"range", "range-numeric", "roundrobin", "sticky"} {
		if !rebalance.Known(strategy) || !strings.Contains(string(page), "| `"+strategy+"` |") {
			t.Errorf("%s is not on the page, or not known", strategy)
		}
	}
}
