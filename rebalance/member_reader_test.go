package rebalance_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

var readerGroup = registry.Root("").Group("g")

func consumerKV(id string, revision int64, value string) registry.KV {
	return registry.KV{Key: readerGroup.ID(id), Value: []byte(value), CreateRevision: revision, ModRevision: revision, Lease: 7}
}

func topicKV(name string, created, modified int64, partitions int) registry.KV {
	var list []string
	for i := range partitions {
		list = append(list, fmt.Sprintf(`"%d":[1]`, i))
	}
	return registry.KV{Key: registry.Root("").Topic(name), Value: []byte(`{"version":1,"partitions":{` + strings.Join(list, ",") + `}}`),
		CreateRevision: created, ModRevision: modified}
}

// What a Reader remembers makes no difference to what it says: after any changes it
// reads the same as one that has seen nothing before, whatever order the keys' ids
// are in, and complains of each bad record once.
func TestAReaderThatRemembersReadsTheSame(t *testing.T) {
	for range 200 {
		seed := rand.Uint64()
		r := rand.New(rand.NewPCG(seed, 1))
		reader := rebalance.NewReader("", readerGroup, "b:2")
		ids, topics := map[string]registry.KV{}, map[string]registry.KV{}
		var target *registry.KV
		records := []string{
			`{"version":1,"subscription":{"t1":1},"pattern":"static","strategy":["sticky"]}`,
			`{"version":1,"subscription":{"t1":2,"t2":1},"pattern":"static"}`,
			`{"version":1,"subscription":{"t[12]":2},"pattern":"white_list"}`,
			`{"version":1,"subscription":{"t[12]":3},"pattern":"white_list"}`,
			`{"version":1,"subscription":{"t3":1},"pattern":"black_list"}`,
			`{"version":1,"subscription":{"t3":1},"pattern":"black_list","exclude_internal_topics":false}`,
			`{"version":1,"subscription":{"(":1},"pattern":"white_list"}`,
			`{"version":1,"subscription":{"a":1,"b":1},"pattern":"white_list"}`,
			`{"version":1,"subscription":{"t1":1},"pattern":"other"}`, `{}`, `x`,
		}
		complaints := map[string]bool{}
		for revision := int64(1); revision < 60; revision++ {
			switch id := []string{"a/1", "b:2", "b 3", "c", "é"}[r.IntN(5)]; r.IntN(9) {
			case 0, 1, 2:
				kv := consumerKV(id, revision, records[r.IntN(len(records))])
				if r.IntN(10) == 0 {
					kv.Lease = 0
				}
				ids[kv.Key] = kv
			case 3:
				delete(ids, readerGroup.ID(id))
			case 4, 5, 6:
				name := []string{"t1", "t2", "t3", "__consumer_offsets"}[r.IntN(4)]
				key := registry.Root("").Topic(name)
				kv := topicKV(name, revision, revision, r.IntN(4))
				if was, there := topics[key]; there && r.IntN(2) == 0 {
					kv.CreateRevision = was.CreateRevision
				}
				if r.IntN(8) == 0 {
					kv.Value = []byte("x")
				}
				topics[key] = kv
				below := registry.KV{Key: registry.Root("").PartitionState(name, 0), ModRevision: revision}
				topics[below.Key] = below
			case 7:
				name := []string{"t1", "t2", "t3", "__consumer_offsets"}[r.IntN(4)]
				delete(topics, registry.Root("").Topic(name))
			case 8:
				if target = nil; r.IntN(3) > 0 {
					target = &registry.KV{Key: readerGroup.Target(), ModRevision: revision, Value: []byte("{}")}
				}
			}
			list := func(m map[string]registry.KV) (list []registry.KV) {
				for _, key := range slices.Sorted(maps.Keys(m)) {
					list = append(list, m[key])
				}
				return list
			}
			got, bad := reader.Read(revision, list(ids), list(topics), target)
			want, all := rebalance.NewReader("", readerGroup, "b:2").Read(revision, list(ids), list(topics), target)
			if !reflect.DeepEqual(normal(got), normal(want)) {
				t.Fatalf("seed %d, revision %d:\n%+v\nand without memory\n%+v", seed, revision, got, want)
			}
			for _, err := range bad {
				complaints[err.Error()] = true
			}
			for _, err := range all {
				if !complaints[err.Error()] {
					t.Fatalf("seed %d, revision %d: never said %v", seed, revision, err)
				}
			}
			if again, bad := reader.Read(revision, list(ids), list(topics), target); len(bad) > 0 || !reflect.DeepEqual(again, got) {
				t.Fatalf("seed %d, revision %d: says again %v", seed, revision, bad)
			}
			if !slices.IsSortedFunc(got.Members, func(a, b rebalance.MemberInfo) int { return strings.Compare(a.ID, b.ID) }) {
				t.Fatalf("seed %d: members in another order: %v", seed, got.Members)
			}
		}
	}
}

// normal tells no difference between no members, or topics, and an empty list of them.
func normal(s rebalance.Snapshot) rebalance.Snapshot {
	if len(s.Members) == 0 {
		s.Members = nil
	}
	s.Members = slices.Clone(s.Members)
	for i, m := range s.Members {
		if len(m.Subscription) == 0 {
			s.Members[i].Subscription = nil
		}
	}
	return s
}

// Every member expands the filter of a registration alike, by what the registration says.
func TestFiltersOfRegistrationsAreExpanded(t *testing.T) {
	ids := []registry.KV{
		consumerKV("black", 1, `{"version":1,"subscription":{"a":1},"pattern":"black_list"}`),
		consumerKV("broken", 2, `{"version":1,"subscription":{"(":1},"pattern":"white_list"}`),
		consumerKV("slow", 3, `{"version":1,"subscription":{"(x+x+)+y(?!z)":1},"pattern":"white_list"}`),
		consumerKV("white", 4, `{"version":1,"subscription":{"a, __.*":2},"pattern":"white_list","exclude_internal_topics":false}`),
	}
	topics := []registry.KV{topicKV("__consumer_offsets", 5, 5, 1), topicKV("a", 6, 6, 2), topicKV("b", 7, 7, 1), topicKV(strings.Repeat("x", 60), 8, 8, 1)}
	reader := rebalance.NewReader("", readerGroup, "white")
	s, bad := reader.Read(9, ids, topics, nil)
	want := map[string]map[string]int32{
		"black": {"b": 1, strings.Repeat("x", 60): 1}, "broken": {}, "slow": {}, "white": {"__consumer_offsets": 2, "a": 2},
	}
	for _, m := range s.Members {
		if !maps.Equal(m.Subscription, want[m.ID]) {
			t.Errorf("%s subscribes to %v, want %v", m.ID, m.Subscription, want[m.ID])
		}
	}
	if len(s.Members) != len(want) || len(s.Topology) != 4 || s.Registered != 4 {
		t.Errorf("read %+v", s)
	}
	if len(bad) != 2 {
		t.Errorf("says %v, want something of two filters", bad)
	}
	// A topic is created: those that allow it are told of it, and what did not change is the same.
	s, bad = reader.Read(11, ids, slices.Insert(slices.Clone(topics), 3, topicKV("c", 11, 11, 3)), nil)
	if len(bad) > 0 || s.Members[0].Subscription["c"] != 1 || s.Members[3].Subscription["c"] != 0 || len(s.Topology["c"]) != 3 {
		t.Errorf("read %+v, %v", s, bad)
	}
}

// bigGroup is a group of members that all have the filter, or are static, and topics.
// Members that subscribe alike share one map, also when one has registered anew; so
// do snapshots, as long as anybody subscribes so.
func TestEqualSubscriptionsAreShared(t *testing.T) {
	const both, other = `{"version":1,"subscription":{"t":1,"u":2},"pattern":"static"}`, `{"version":1,"subscription":{"t":1,"u":1},"pattern":"static"}`
	topics := []registry.KV{topicKV("t", 1, 1, 1), topicKV("u", 2, 2, 1)}
	r := rebalance.NewReader("", readerGroup, "")
	var kept []rebalance.Snapshot // so that no address is used again
	read := func(want string, ids ...registry.KV) (maps []uintptr) {
		t.Helper()
		s, bad := r.Read(9, ids, topics, nil)
		if len(bad) > 0 {
			t.Fatal(bad)
		}
		kept = append(kept, s)
		var got []string
		for _, m := range s.Members {
			maps = append(maps, reflect.ValueOf(m.Subscription).Pointer())
			got = append(got, fmt.Sprint(m.ID, m.Subscription))
		}
		equal(t, fmt.Sprint(got, len(s.Topology)), want)
		return maps
	}
	first := read("[a:1map[t:1 u:2] b:1map[t:1 u:2] c:1map[t:1 u:1]] 2",
		consumerKV("a:1", 3, both), consumerKV("b:1", 4, both), consumerKV("c:1", 5, other))
	second := read("[a:1map[t:1 u:1] b:1map[t:1 u:2]] 2", consumerKV("a:1", 6, other), consumerKV("b:1", 7, both))
	if first[0] != first[1] || first[0] == first[2] || second[0] != first[2] || second[1] != first[0] {
		t.Errorf("%x, then %x", first, second)
	}
	read("[] 0")
	if third := read("[d:1map[t:1 u:2]] 2", consumerKV("d:1", 8, both)); third[0] == first[0] {
		t.Error("what nobody subscribed to was kept")
	}
	runtime.KeepAlive(kept)
}

func bigGroup(members, topics int, filter bool) (ids, list []registry.KV) {
	for i := range members {
		value := fmt.Sprintf(`{"version":1,"subscription":{"t%05d":1},"pattern":"static","strategy":["range"]}`, i%topics)
		if filter {
			value = `{"version":1,"subscription":{"t.*":1},"pattern":"white_list","strategy":["range"]}`
		}
		ids = append(ids, consumerKV(fmt.Sprintf("host-%05d:1", i), int64(i+1), value))
	}
	for i := range topics {
		list = append(list, topicKV(fmt.Sprintf("t%05d", i), int64(i+1), int64(i+1), 1))
	}
	return ids, list
}

// One registration of 500 is written anew, with 10,000 topics.
func BenchmarkReadOneRegistration(b *testing.B) {
	for _, filter := range []bool{false, true} {
		b.Run(fmt.Sprintf("filter=%v", filter), func(b *testing.B) {
			ids, topics := bigGroup(500, 10_000, filter)
			reader := rebalance.NewReader("", readerGroup, "")
			reader.Read(1, ids, topics, nil)
			revision := int64(20_000)
			b.ReportAllocs()
			for b.Loop() {
				revision++
				ids[250].ModRevision = revision
				if s, bad := reader.Read(revision, ids, topics, nil); len(s.Members) != 500 || len(bad) > 0 {
					b.Fatal(bad)
				}
			}
		})
	}
}

// All of 100 members list the same 10,000 topics; one joins, and the group is divided.
func BenchmarkDivideLongLists(b *testing.B) {
	_, topics := bigGroup(0, 10_000, false)
	subscription := make([]string, len(topics))
	for i := range subscription {
		subscription[i] = fmt.Sprintf(`"t%05d":1`, i)
	}
	value := `{"version":1,"subscription":{` + strings.Join(subscription, ",") + `},"pattern":"static","strategy":["range"]}`
	var ids []registry.KV
	for i := range 100 {
		ids = append(ids, consumerKV(fmt.Sprintf("host-%05d:1", i), int64(i+1), value))
	}
	reader := rebalance.NewReader("", readerGroup, "")
	reader.Read(1, ids, topics, nil)
	n := 0
	for b.Loop() {
		n++
		s, bad := reader.Read(int64(20_000+n), ids[:len(ids)-n%2], topics, nil)
		if _, err := rebalance.Assign(s); err != nil || len(bad) > 0 {
			b.Fatal(err, bad)
		}
	}
}

// A topic comes and goes, of 10,000, in a group of 500 with one filter.
func BenchmarkReadOneTopic(b *testing.B) {
	ids, topics := bigGroup(500, 10_000, true)
	reader := rebalance.NewReader("", readerGroup, "")
	reader.Read(1, ids, topics, nil)
	n := 0
	b.ReportAllocs()
	for b.Loop() {
		n++
		if s, bad := reader.Read(int64(20_000+n), ids, topics[:len(topics)-n%2], nil); len(s.Topology) != len(topics)-n%2 || len(bad) > 0 {
			b.Fatal(bad)
		}
	}
}

// A registration without a lease counts for nobody, and its key is named.
func TestReaderLeavesOutWhatHasNoLease(t *testing.T) {
	record := `{"version":1,"subscription":{"t1":1},"pattern":"static"}`
	alive, stuck := consumerKV("a", 1, record), consumerKV("b", 2, record)
	stuck.Lease = 0
	s, bad := rebalance.NewReader("", readerGroup, "").Read(3, []registry.KV{alive, stuck}, []registry.KV{topicKV("t1", 1, 1, 2)}, nil)
	if len(s.Members) != 1 || s.Members[0].ID != "a" {
		t.Errorf("members %+v", s.Members)
	}
	if len(bad) != 1 || !strings.Contains(bad[0].Error(), stuck.Key) {
		t.Errorf("said %v", bad)
	}
}
