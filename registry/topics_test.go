package registry_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

const root = registry.Root("/kc")

func create(t *testing.T, st registry.Store, name string, partitions int32) registry.TopicRecord {
	t.Helper()
	rec, err := registry.CreateTopic(t.Context(), st, root, registry.TopicSpec{Name: name, Partitions: partitions, ReplicationFactor: 1}, []int32{1, 2, 3})
	if err != nil {
		t.Fatal(err)
	}
	return rec
}

func everything(t *testing.T, st registry.Store) map[string]string {
	t.Helper()
	kvs, _, err := registry.List(t.Context(), st, "/", 0)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for _, kv := range kvs {
		all[kv.Key] = string(kv.Value)
	}
	return all
}

func topicRecord(t *testing.T, st registry.Store, name string) registry.TopicRecord {
	t.Helper()
	kv, _, err := registry.GetKey(t.Context(), st, root.Topic(name))
	if err != nil || kv == nil {
		t.Fatalf("record of %s: %v, %v", name, kv, err)
	}
	_, rec, ok, err := root.ParseTopic(*kv)
	if err != nil || !ok {
		t.Fatalf("record of %s: %v", name, err)
	}
	return rec
}

// A topic of more partitions than fit one transaction gets all of its states, also
// where a topic before it has left some behind; partitions that are added too.
func TestStatesOfManyPartitions(t *testing.T) {
	st := memory.New()
	stale := `{"controller_epoch":1,"leader":9,"version":1,"leader_epoch":7,"isr":[9]}`
	put(t, st, root.PartitionState("t", 0), stale, root.PartitionState("t", 290), stale, root.PartitionState("t", 390), stale)
	rec := create(t, st, "t", 300)
	check := func(total int) {
		t.Helper()
		rec := topicRecord(t, st, "t")
		if len(rec.Partitions) != total || len(rec.Home) != total {
			t.Fatalf("%d partitions, %d homes, want %d", len(rec.Partitions), len(rec.Home), total)
		}
		for p := range int32(total) {
			kv, _, err := registry.GetKey(t.Context(), st, root.PartitionState("t", p))
			if err != nil || kv == nil {
				t.Fatalf("state %d: %v, %v", p, kv, err)
			}
			_, _, state, ok, err := root.ParsePartitionState(*kv)
			if !ok || err != nil || state.Leader != rec.Partitions[p][0] || state.LeaderEpoch != 0 {
				t.Fatalf("state %d: %+v, %v, replicas %v", p, state, err, rec.Partitions[p])
			}
		}
	}
	check(300)
	if _, err := registry.AddPartitions(t.Context(), st, root, "t", 600, []int32{4, 5}); err != nil {
		t.Fatal(err)
	}
	check(600)
	now := topicRecord(t, st, "t")
	for p, replicas := range rec.Partitions {
		if !slices.Equal(now.Partitions[p], replicas) || now.Home[p] != rec.Home[p] {
			t.Fatalf("partition %d moved from %v to %v", p, replicas, now.Partitions[p])
		}
	}
	if now.TopicID != rec.TopicID {
		t.Errorf("the id was %s and is %s", rec.TopicID, now.TopicID)
	}
}

func TestAddPartitionsRefuses(t *testing.T) {
	st := memory.New()
	create(t, st, "t", 3)
	put(t, st, root.Topic("gap"), `{"version":1,"partitions":{"0":[1],"2":[1]}}`)
	for _, c := range []struct {
		topic   string
		total   int32
		brokers []int32
		want    error
		says    string
	}{
		{"t", 2, []int32{1}, registry.ErrFewerPartitions, "it has 3, and 2 were asked for"},
		{"t", 3, []int32{1}, registry.ErrFewerPartitions, "it has 3"},
		{"t", registry.MaxPartitions + 1, []int32{1}, registry.ErrPartitions, "20000"},
		{"t", 0, []int32{1}, registry.ErrPartitions, "0"},
		{"t", 4, nil, registry.ErrNoBroker, ""},
		{"nosuch", 4, []int32{1}, registry.ErrNoTopic, "nosuch"},
		{"gap", 4, []int32{1}, registry.ErrRecord, "no partition 1"},
	} {
		before := everything(t, st)
		_, err := registry.AddPartitions(t.Context(), st, root, c.topic, c.total, c.brokers)
		if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s to %d: %v", c.topic, c.total, err)
		}
		if after := everything(t, st); len(after) != len(before) {
			t.Errorf("%s to %d: keys were written", c.topic, c.total)
		}
	}
}

// A record that 0.8.2 wrote keeps its homes when partitions are added and when it
// is given an id; a state that somebody has written stays.
func TestRecordWithoutHomes(t *testing.T) {
	st := memory.New()
	state := `{"controller_epoch":3,"leader":2,"version":1,"leader_epoch":5,"isr":[2]}`
	put(t, st, root.Topic("old"), `{"version":1,"partitions":{"0":[2],"1":[1]}}`, root.PartitionState("old", 0), state)
	if adopted, err := registry.AdoptTopic(t.Context(), st, root, "old", ""); err != nil || !adopted {
		t.Fatal(adopted, err)
	}
	id := topicRecord(t, st, "old").TopicID
	if adopted, err := registry.AdoptTopic(t.Context(), st, root, "old", "other"); err != nil || id == "" || adopted {
		t.Fatalf("id %q, %v, %v", id, adopted, err)
	}
	rec, err := registry.AddPartitions(t.Context(), st, root, "old", 4, []int32{1, 2})
	if err != nil {
		t.Fatal(err)
	}
	if rec.TopicID != id || rec.Home[0] != 2 || rec.Home[1] != 1 || rec.Home[2] != 2 || rec.Home[3] != 1 {
		t.Errorf("%+v", rec)
	}
	if got := everything(t, st)[root.PartitionState("old", 0)]; got != state {
		t.Errorf("state became %s", got)
	}
	if adopted, err := registry.AdoptTopic(t.Context(), st, root, "nosuch", ""); err != nil || adopted {
		t.Error(adopted, err)
	}
}

// Many who add partitions at once agree: each asks for one more than it saw.
func TestAddPartitionsRace(t *testing.T) {
	st := memory.New()
	create(t, st, "t", 1)
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			_, err := registry.AddPartitions(t.Context(), st, root, "t", int32(10+i), []int32{1, 2, 3})
			if err != nil && !errors.Is(err, registry.ErrFewerPartitions) {
				t.Error(err)
			}
		})
	}
	all.Wait()
	rec := topicRecord(t, st, "t")
	if len(rec.Partitions) != 17 {
		t.Errorf("%d partitions", len(rec.Partitions))
	}
	if least, most := counts(rec.Partitions, []int32{1, 2, 3}); most-least > 1 {
		t.Errorf("%d to %d partitions on a broker", least, most)
	}
}

func TestNamesThatDifferOnlyBySeparators(t *testing.T) {
	long := "a.b.c.d.e.f.g.h.i"
	st := memory.New()
	for _, name := range []string{"orders.eu", "plain", "x_y.z", long, "a"} {
		create(t, st, name, 130)
	}
	for name, want := range map[string]error{
		"orders_eu": registry.ErrTopicCollision, "orders.eu": registry.ErrTopicExists, "orders-eu": nil, "orders": nil,
		"plain": registry.ErrTopicExists, "x.y.z": registry.ErrTopicCollision, "x_y_z": registry.ErrTopicCollision, "x_yz": nil,
		strings.ReplaceAll(long, ".", "_"): registry.ErrTopicCollision, long: registry.ErrTopicExists, long + ".j": nil,
		"...": nil, "._.": registry.ErrTopicCollision,
	} {
		if name == "._." {
			continue // after "..."
		}
		if _, err := registry.CreateTopic(t.Context(), st, root, registry.TopicSpec{Name: name, Partitions: 1, ReplicationFactor: 1}, []int32{1}); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", name, err, want)
		}
	}
	if _, err := registry.CreateTopic(t.Context(), st, root, registry.TopicSpec{Name: "._.", Partitions: 1, ReplicationFactor: 1}, []int32{1}); !errors.Is(err, registry.ErrTopicName) {
		t.Errorf("._. beside ...: %v", err)
	}
}

// Of those who create names that collide at one moment, one wins.
func TestNameRace(t *testing.T) {
	for _, name := range []string{"a.b", "a.b.c.d.e.f.g.h.i"} {
		for round := range 20 {
			st := memory.New()
			var all sync.WaitGroup
			var mu sync.Mutex
			created := 0
			for i := range 8 {
				variant := []byte(name)
				if i%2 == 0 {
					variant[1] = '_'
				}
				if i%4 < 2 {
					variant[len(variant)-2] = '_'
				}
				all.Go(func() {
					_, err := registry.CreateTopic(t.Context(), st, root, registry.TopicSpec{Name: string(variant), Partitions: 1, ReplicationFactor: 1}, []int32{1})
					mu.Lock()
					defer mu.Unlock()
					if err == nil {
						created++
					} else if !errors.Is(err, registry.ErrTopicExists) && !errors.Is(err, registry.ErrTopicCollision) {
						t.Error(err)
					}
				})
			}
			all.Wait()
			if created != 1 {
				t.Fatalf("round %d: %d topics like %s", round, created, name)
			}
		}
	}
}

func TestTopicConfig(t *testing.T) {
	st := memory.New()
	create(t, st, "t", 1)
	alter := func(set map[string]string, remove ...string) (map[string]string, error) {
		return registry.AlterTopicConfig(t.Context(), st, root, "t", set, remove)
	}
	got, err := alter(map[string]string{"segment.bytes": "1048576", "cleanup.policy": "compact,delete"})
	if err != nil || len(got) != 2 {
		t.Fatalf("%v, %v", got, err)
	}
	got, err = alter(map[string]string{"segment.bytes": "2097152"}, "cleanup.policy")
	if err != nil || fmt.Sprint(got) != "map[segment.bytes:2097152]" {
		t.Fatalf("%v, %v", got, err)
	}
	if kv := everything(t, st)[root.TopicConfig("t")]; kv != `{"version":1,"config":{"segment.bytes":"2097152"}}` {
		t.Error(kv)
	}
	for says, set := range map[string]map[string]string{
		`"nosuch": no such setting`:                    {"nosuch": "1"},
		`retention.ms="-2": want a number from -1`:     {"retention.ms": "-2"},
		`cleanup.policy="compac": want compact or del`: {"cleanup.policy": "compac"},
		`preallocate="yes": want true or false`:        {"preallocate": "yes"},
		`min.cleanable.dirty.ratio="2": want a number`: {"min.cleanable.dirty.ratio": "2"},
	} {
		if _, err := alter(set); !errors.Is(err, registry.ErrTopicConfig) || !strings.Contains(err.Error(), says) {
			t.Errorf("%v: %v", set, err)
		}
	}
	if _, err := alter(nil, "cleanup.policy"); !errors.Is(err, registry.ErrTopicConfig) || !strings.Contains(err.Error(), "not set") {
		t.Error(err)
	}
	if _, err := registry.AlterTopicConfig(t.Context(), st, root, "nosuch", nil, nil); !errors.Is(err, registry.ErrNoTopic) {
		t.Error(err)
	}
	_, err = registry.CreateTopic(t.Context(), st, root, registry.TopicSpec{Name: "u", Partitions: 1, ReplicationFactor: 1,
		Config: map[string]string{"retention.hours": "1"}}, []int32{1})
	if !errors.Is(err, registry.ErrTopicConfig) || !strings.Contains(err.Error(), "retention.hours") {
		t.Error(err)
	}
	if names := registry.UnhonouredConfig(map[string]string{"segment.bytes": "1", "retention.ms": "1", "flush.ms": "1"}); fmt.Sprint(names) != "[flush.ms retention.ms]" {
		t.Error(names)
	}
}

// nth fails the n-th call to a store: before it takes effect, or after.
type nth struct {
	n, calls int
	after    bool
}

var errCrash = errors.New("crash")

func (f *nth) hooks() memory.Hooks {
	hit := func(context.Context, string) error {
		if f.calls++; f.calls == f.n {
			return errCrash
		}
		return nil
	}
	if f.after {
		return memory.Hooks{After: hit}
	}
	return memory.Hooks{Before: hit}
}

// withGroups makes two topics and many groups that read both.
func withGroups(t *testing.T, st registry.Store) {
	t.Helper()
	create(t, st, "orders", 130)
	create(t, st, "orders2", 3)
	create(t, st, "ord", 3)
	for g := range 150 {
		group := root.Group(fmt.Sprintf("g %d/%d", g, g%3))
		var keys []string
		for _, topic := range []string{"orders", "orders2", "ord"} {
			for n := range int32(3) {
				p := registry.Partition{Topic: topic, Home: 1, Number: n}
				keys = append(keys, group.Owner(p), "c-0", group.Offset(p), "42")
			}
		}
		put(t, st, append(keys, group.ID("c"), "{}")...)
	}
	put(t, st, root.TopicBroker("orders", 1), "44", root.TopicBroker("orders2", 1), "1", "/kc0/consumers/g/owners/orders/1-0", "elsewhere",
		"/kc/consumers", "a key that is no group's", "/kc/consumers/orders", "x")
}

func of(key, topic string) bool {
	return strings.HasSuffix(key, "/"+topic) && key != "/kc/consumers/orders" || strings.Contains(key, "/"+topic+"/")
}

// rest is what stands that is not the topic's.
func rest(all map[string]string, topic string, offsetsToo bool) map[string]string {
	left := map[string]string{}
	for key, value := range all {
		if !of(key, topic) || !strings.HasPrefix(key, "/kc/") || !offsetsToo && strings.Contains(key, "/offsets/") {
			left[key] = value
		}
	}
	return left
}

func same(t *testing.T, what string, got, want map[string]string) {
	t.Helper()
	for key := range want {
		if got[key] != want[key] {
			t.Errorf("%s: %s is %q, was %q", what, key, got[key], want[key])
		}
	}
	for key := range got {
		if _, there := want[key]; !there {
			t.Errorf("%s: %s is left", what, key)
		}
	}
}

func TestDeleteTopic(t *testing.T) {
	for _, keep := range []bool{false, true} {
		st := memory.New()
		withGroups(t, st)
		want := rest(everything(t, st), "orders", !keep)
		d, err := registry.DeleteTopic(t.Context(), st, root, "orders", registry.DeleteOptions{KeepOffsets: keep})
		if err != nil {
			t.Fatal(err)
		}
		offsets := int64(450)
		if keep {
			offsets = 0
		}
		if d.Partitions != 130 || d.Groups != 150 || d.Owners != 450 || d.Offsets != offsets || d.Resumed || d.TopicID == "" || d.OffsetsKept != keep {
			t.Errorf("%+v", d)
		}
		same(t, "deleted", everything(t, st), want)
		if _, err := registry.DeleteTopic(t.Context(), st, root, "orders", registry.DeleteOptions{}); !errors.Is(err, registry.ErrNoTopic) {
			t.Errorf("again: %v", err)
		}
		if _, err := registry.FinishDeletion(t.Context(), st, root, "orders2"); !errors.Is(err, registry.ErrNoTopic) {
			t.Errorf("finish what was never begun: %v", err)
		}
		create(t, st, "orders", 2)
	}
	st := memory.New()
	create(t, st, "__consumer_offsets", 1)
	if _, err := registry.DeleteTopic(t.Context(), st, root, "__consumer_offsets", registry.DeleteOptions{}); !errors.Is(err, registry.ErrInternalTopic) {
		t.Error(err)
	}
}

// Whatever call fails, with or without effect: while the deletion is unfinished no
// topic of the name can be created, and when it is repeated, by whoever it is,
// nothing of the topic is left and all else is untouched.
func TestDeletionIsRepeatable(t *testing.T) {
	for _, after := range []bool{false, true} {
		for n := 1; ; n++ {
			st := memory.New()
			withGroups(t, st)
			keep := n%2 == 0
			want := rest(everything(t, st), "orders", !keep)
			f := &nth{n: n, after: after}
			st.SetHooks(f.hooks())
			_, err := registry.DeleteTopic(t.Context(), st, root, "orders", registry.DeleteOptions{KeepOffsets: keep})
			st.SetHooks(memory.Hooks{})
			if err == nil {
				if n < 8 {
					t.Fatalf("only %d calls", n)
				}
				break
			}
			if !errors.Is(err, errCrash) {
				t.Fatal(err)
			}
			all := everything(t, st)
			_, marked := all[root.DeletedTopic("orders")]
			_, there := all[root.Topic("orders")]
			if there && marked {
				t.Fatalf("call %d: record and marker", n)
			}
			if says := strings.Contains(err.Error(), "a daemon goes on"); there && says || marked && !says && !(after && n == 2) {
				t.Errorf("call %d (after %v): record %v, marker %v, and the error says %v", n, after, there, marked, err)
			}
			_, err = registry.CreateTopic(t.Context(), st, root, registry.TopicSpec{Name: "orders", Partitions: 1, ReplicationFactor: 1}, []int32{1})
			switch {
			case there && errors.Is(err, registry.ErrTopicExists):
				_, err = registry.DeleteTopic(t.Context(), st, root, "orders", registry.DeleteOptions{KeepOffsets: keep})
			case marked && errors.Is(err, registry.ErrTopicDeleting):
				_, err = registry.FinishDeletion(t.Context(), st, root, "orders")
			case !there && !marked && err == nil:
				// All was done, and only the last answer lost.
				want2 := everything(t, st)
				for key := range rest(want2, "orders", true) {
					delete(want2, key)
				}
				for key, value := range want2 {
					if !strings.Contains(key, "/offsets/") {
						want[key] = value
					}
				}
			default:
				t.Fatalf("call %d: record %v, marker %v, create: %v", n, there, marked, err)
			}
			if err != nil {
				t.Fatalf("call %d, repeated: %v", n, err)
			}
			same(t, fmt.Sprintf("call %d failed (after %v)", n, after), everything(t, st), want)
		}
	}
}

// A marker in the way of 0.8.2 deletes a topic; one that says something else again
// is refused; one for a topic that is not there clears what is left of it.
func TestMarkerWrittenByHand(t *testing.T) {
	for _, value := range []string{"", `""`, `{"version":1}`, `{"version":1,"keep_offsets":true}`} {
		st := memory.New()
		withGroups(t, st)
		want := rest(everything(t, st), "orders", !strings.Contains(value, "true"))
		put(t, st, root.DeletedTopic("orders"), value)
		if _, err := registry.FinishDeletion(t.Context(), st, root, "orders"); err != nil {
			t.Fatal(err)
		}
		same(t, value, everything(t, st), want)
	}
	st := memory.New()
	withGroups(t, st)
	put(t, st, root.DeletedTopic("orders"), "nonsense")
	if _, err := registry.FinishDeletion(t.Context(), st, root, "orders"); !errors.Is(err, registry.ErrRecord) {
		t.Error(err)
	}
	put(t, st, root.DeletedTopic("gone"), "", root.Group("g").Offset(registry.Partition{Topic: "gone"}), "3")
	if d, err := registry.FinishDeletion(t.Context(), st, root, "gone"); err != nil || !d.Resumed || d.Offsets != 1 {
		t.Errorf("%+v, %v", d, err)
	}
}
