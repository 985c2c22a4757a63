package groups_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/rebalance/groups"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

// stage is a registry with one group, g, that a test sets up key by key.
type stage struct {
	t      *testing.T
	st     *memory.Store
	paths  registry.GroupPaths
	leases map[string]registry.LeaseID // by consumer id
}

func newStage(t *testing.T) *stage {
	return &stage{t, memory.New(), root.Group("g"), map[string]registry.LeaseID{}}
}

func (s *stage) put(key, value string, lease registry.LeaseID) int64 {
	s.t.Helper()
	res, err := s.st.Txn(s.t.Context(), registry.Txn{Then: []registry.Op{registry.Put(key, []byte(value), lease)}})
	if err != nil {
		s.t.Fatal(err)
	}
	return res.Revision
}

func (s *stage) topic(name string, partitions int) {
	var list []string
	for p := range partitions {
		list = append(list, fmt.Sprintf(`"%d":[1]`, p))
	}
	s.put(root.Topic(name), `{"version":1,"partitions":{`+strings.Join(list, ",")+`}}`, 0)
}

func (s *stage) member(id string, strategy []string, subscription map[string]int32) {
	s.t.Helper()
	lease, err := s.st.Grant(s.t.Context(), time.Hour)
	if err != nil {
		s.t.Fatal(err)
	}
	s.leases[id] = lease.ID
	value, err := registry.Encode(registry.ConsumerRecord{Version: 1, Subscription: subscription, Pattern: registry.PatternStatic,
		Timestamp: "1796009631365", Strategy: strategy})
	if err != nil {
		s.t.Fatal(err)
	}
	s.put(s.paths.ID(id), string(value), lease.ID)
}

func partition(topic string, number int32) registry.Partition {
	return registry.Partition{Topic: topic, Home: 1, Number: number}
}

// own lets the n-th stream of a member own partitions.
func (s *stage) own(id string, stream int32, topic string, numbers ...int32) {
	for _, n := range numbers {
		s.put(s.paths.Owner(partition(topic, n)), rebalance.ThreadID(id, stream), s.leases[id])
	}
}

func (s *stage) disown(topic string, number int32) {
	s.t.Helper()
	if _, err := s.st.Txn(s.t.Context(), registry.Txn{Then: []registry.Op{registry.Delete(s.paths.Owner(partition(topic, number)))}}); err != nil {
		s.t.Fatal(err)
	}
}

// move claims or releases a partition as a member does, with its history.
func (s *stage) move(action, id, topic string, number int32, at time.Time, reason string) {
	s.t.Helper()
	p := partition(topic, number)
	value, err := json.Marshal(registry.HistoryRecord{Version: 1, Time: fmt.Sprint(at.UnixMilli()), Member: id, Action: action,
		Partitions: map[string][]string{topic: {p.Name()}}, Reason: reason, Strategy: "range"})
	if err != nil {
		s.t.Fatal(err)
	}
	op := registry.Delete(s.paths.Owner(p))
	if action == registry.ActionClaimed {
		op = registry.Put(s.paths.Owner(p), []byte(rebalance.ThreadID(id, 0)), s.leases[id])
	}
	entry := registry.Put(s.paths.HistoryEntry(at.UnixMilli(), id, uint64(number)), value, 0)
	if _, err := s.st.Txn(s.t.Context(), registry.Txn{Then: []registry.Op{op, entry}}); err != nil {
		s.t.Fatal(err)
	}
}

func (s *stage) dies(id string) {
	s.t.Helper()
	if err := s.st.Revoke(s.t.Context(), s.leases[id]); err != nil {
		s.t.Fatal(err)
	}
}

func (s *stage) describe() *groups.Description {
	s.t.Helper()
	d, bad, err := groups.Describe(s.t.Context(), s.st, root, "g", nil)
	if err != nil || len(bad) > 0 {
		s.t.Fatal(err, bad)
	}
	return d
}

// says wants a state, and of the partitions that are not right what is said of them.
func (s *stage) says(state groups.State, troubles ...string) {
	s.t.Helper()
	d := s.describe()
	var got []string
	for _, r := range d.Partitions {
		if r.Standing != groups.StandingRight {
			got = append(got, fmt.Sprintf("%s/%d %s: %s", r.Topic, r.Partition, r.Standing, show(r.Why)))
		}
	}
	if d.State != state || !slices.Equal(got, troubles) {
		s.t.Errorf("%s, want %s\n%s\nwant\n%s", d.State, state, strings.Join(got, "\n"), strings.Join(troubles, "\n"))
	}
}

// verdict wants what verify says.
func (s *stage) verdict(reasons ...string) {
	s.t.Helper()
	v, _, err := groups.Verify(s.t.Context(), s.st, root, "g")
	if err != nil {
		s.t.Fatal(err)
	}
	if v.Right != (len(reasons) == 0) || !slices.Equal(v.Reasons, reasons) {
		s.t.Errorf("right %v: %q\nwant %q", v.Right, v.Reasons, reasons)
	}
}

var byRange = []string{"range"}

func TestStates(t *testing.T) {
	s := newStage(t)
	s.topic("t", 4)
	s.put(s.paths.Offset(partition("t", 0)), "5", 0)
	s.says(groups.StateEmpty)
	s.verdict() // as 0.8.2's tool

	s.member("a", byRange, map[string]int32{"t": 1})
	lonely := "a-0 is due it and has not claimed it; no owner before is known"
	s.says(groups.StateOwnerless, "t/0 ownerless: "+lonely, "t/1 ownerless: "+lonely, "t/2 ownerless: "+lonely, "t/3 ownerless: "+lonely)
	s.verdict("No owners for any partitions for topic t")

	s.own("a", 0, "t", 0, 1, 2)
	s.says(groups.StateOwnerless, "t/3 ownerless: "+lonely)
	s.verdict("No owner for partition [t,3]")

	s.own("a", 0, "t", 3)
	s.says(groups.StateStable)
	s.verdict()

	s.member("b", byRange, map[string]int32{"t": 1})
	s.says(groups.StateMoving, "t/2 moving: b-0 waits for a-0", "t/3 moving: b-0 waits for a-0")
	s.verdict("Owner a-0 for partition [t,2] is not right: b-0 waits for a-0", "Owner a-0 for partition [t,3] is not right: b-0 waits for a-0")

	s.disown("t", 2)
	s.says(groups.StateOwnerless, "t/2 ownerless: b-0 is due it and has not claimed it; no owner before is known", "t/3 moving: b-0 waits for a-0")
	s.disown("t", 3)
	s.own("b", 0, "t", 2, 3)
	s.says(groups.StateStable)
	d := s.describe()
	for i, m := range d.Members {
		if m.ID != []string{"a", "b"}[i] || m.Owns != 2 || show(m.Due) != "2" || m.Since == nil || m.Since.UnixMilli() != 1796009631365 || m.Pattern != "static" {
			t.Errorf("%+v", m)
		}
	}
}

// Whatever stands in an owner key, it is told why it is not right.
func TestWrongOwners(t *testing.T) {
	s := newStage(t)
	s.topic("t", 6)
	s.member("a", byRange, map[string]int32{"t": 2})
	s.own("a", 0, "t", 0, 1, 2)
	s.put(s.paths.Owner(partition("t", 3)), "ghost-1", 0)
	s.own("a", 0, "t", 4)
	s.put(s.paths.Owner(partition("t", 5)), "a-1", 0)
	s.own("a", 0, "gone", 0)
	s.says(groups.StateMoving,
		"gone/0 moving: nobody is due it; a-0 has not released it",
		"t/3 moving: a-1 waits for it; its owner ghost-1 is not registered",
		"t/4 moving: a-1 waits for a-0",
		"t/5 moving: a-1 waits for it; its owner key stands under another lease than the registration of a")
	s.verdict("Owner a-0 for partition [gone,0] is not right: nobody is due it; a-0 has not released it",
		"Owner ghost-1 for partition [t,3] is not a valid member of consumer group g",
		"Owner a-0 for partition [t,4] is not right: a-1 waits for a-0",
		"Owner a-1 for partition [t,5] is not right: a-1 waits for it; its owner key stands under another lease than the registration of a")
}

// An owner key of a deleted topic of the same name is worth nothing.
func TestOwnerOlderThanItsTopic(t *testing.T) {
	s := newStage(t)
	s.member("a", byRange, map[string]int32{"t": 1})
	s.own("a", 0, "t", 0)
	s.topic("t", 1)
	s.says(groups.StateMoving, "t/0 moving: a-0 waits for it; its owner key is older than the topic, and so worth nothing")
}

// A client without streams writes its id alone.
func TestOwnerWithoutStream(t *testing.T) {
	s := newStage(t)
	s.topic("t", 1)
	s.member("a", byRange, map[string]int32{"t": 1})
	s.put(s.paths.Owner(partition("t", 0)), "a", s.leases["a"])
	s.says(groups.StateStable)
}

// What roundrobin refuses is said with why, and the members keep what they hold.
func TestRefused(t *testing.T) {
	s := newStage(t)
	s.topic("t", 2)
	s.topic("u", 1)
	s.member("a", []string{"roundrobin"}, map[string]int32{"t": 1})
	s.own("a", 0, "t", 0)
	s.member("b", []string{"roundrobin"}, map[string]int32{"t": 1, "u": 1})
	d := s.describe()
	if d.State != groups.StateRefused || d.Refusal == nil || !strings.Contains(*d.Refusal, "roundrobin needs") || d.Members[0].Due != nil {
		t.Errorf("%s, %s", d.State, show(d.Refusal))
	}
	const why = "the group cannot be divided"
	s.says(groups.StateRefused, "t/0 kept: "+why, "t/1 ownerless: "+why+"; no owner before is known",
		"u/0 ownerless: "+why+"; no owner before is known")
	s.verdict("Consumer group g cannot be divided: "+show(d.Refusal), "No owner for partition [t,1]", "No owners for any partitions for topic u")
}

// The history tells since when a partition has its owner, or has none, and why.
func TestHistory(t *testing.T) {
	s := newStage(t)
	at := func(second int) time.Time {
		return time.UnixMilli(1796009600000).Add(time.Duration(second) * time.Second)
	}
	s.topic("t", 3)
	s.member("a", byRange, map[string]int32{"t": 1})
	s.member("b", byRange, map[string]int32{"t": 1})
	s.move(registry.ActionClaimed, "a", "t", 0, at(1), "joined")
	s.move(registry.ActionClaimed, "a", "t", 1, at(2), "joined")
	s.move(registry.ActionReleased, "a", "t", 1, at(3), "member b joined")
	s.move(registry.ActionClaimed, "b", "t", 2, at(4), "joined")
	s.says(groups.StateOwnerless, "t/1 ownerless: a-0 is due it and has not claimed it; released by a (member b joined)")
	s.dies("b")
	s.says(groups.StateOwnerless, "t/1 ownerless: a-0 is due it and has not claimed it; released by a (member b joined)",
		"t/2 ownerless: a-0 is due it and has not claimed it; b had it: its session ended, or the owner key was deleted; nobody released it")
	for i, want := range []string{at(1).String(), at(3).String(), "nil"} {
		if got := show(s.describe().Partitions[i].Since); got != want {
			t.Errorf("partition %d since %s, want %s", i, got, want)
		}
	}
	s.move(registry.ActionClaimed, "a", "t", 2, at(5), "member b left")
	told := func(f groups.HistoryFilter) string {
		list, bad, err := groups.History(t.Context(), s.st, root, "g", f)
		if err != nil || len(bad) > 0 {
			t.Fatal(err, bad)
		}
		var lines []string
		for _, e := range list {
			lines = append(lines, fmt.Sprintf("%s %s %v %s", e.Member, e.Action, e.Partitions, show(e.Reason)))
		}
		return strings.Join(lines, "\n")
	}
	all := `a claimed [{t 0 1}] joined
a claimed [{t 1 1}] joined
a released [{t 1 1}] member b joined
b claimed [{t 2 1}] joined
b ended [{t 2 1}] its session ended, or the owner key was deleted; nobody released it
a claimed [{t 2 1}] member b left`
	two := int32(2)
	lines := strings.Split(all, "\n")
	for _, c := range []struct {
		f    groups.HistoryFilter
		want string
	}{
		{groups.HistoryFilter{}, all},
		{groups.HistoryFilter{Topic: "u"}, ""},
		{groups.HistoryFilter{Topic: "t", Partition: &two}, strings.Join(lines[3:], "\n")},
		{groups.HistoryFilter{Limit: 1}, lines[5]},
		{groups.HistoryFilter{Since: at(4)}, strings.Join(lines[3:], "\n")},
	} {
		if got := told(c.f); got != c.want {
			t.Errorf("%+v:\n%s\nwant\n%s", c.f, got, c.want)
		}
	}
	// The last owner dies, and nobody is left to write of it.
	s.dies("a")
	if got, want := told(groups.HistoryFilter{Limit: 1}), "a ended [{t 0 1} {t 2 1}] "; !strings.HasPrefix(got, want) {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestPlan(t *testing.T) {
	s := newStage(t)
	s.topic("t", 5)
	for i, id := range []string{"host-1", "host-2", "host-22"} {
		s.member(id, byRange, map[string]int32{"t": 1})
		s.own(id, 0, "t", [][]int32{{0, 1}, {2, 3}, {4}}[i]...)
	}
	plan := func(c groups.Change) string {
		p, bad, err := groups.MakePlan(t.Context(), s.st, root, "g", c)
		if err != nil || len(bad) > 0 {
			return err.Error()
		}
		text := fmt.Sprintf("%s %d", show(p.Strategy), p.Total)
		for _, m := range p.Moves {
			text += fmt.Sprintf("; %d %s -> %s", m.Partition, show(m.From), show(m.To))
		}
		for _, m := range p.Members {
			text += fmt.Sprintf("; %s %s %s", m.ID, show(m.Before), show(m.After))
		}
		return text
	}
	for _, c := range []struct {
		change groups.Change
		want   string
	}{
		{groups.Change{}, "range 5; host-1 2 2; host-2 2 2; host-22 1 1"},
		{groups.Change{Without: []string{"host-22"}}, "range 5; 2 host-2-0 -> host-1-0; 4 host-22-0 -> host-2-0; host-1 2 3; host-2 2 2; host-22 1 nil"},
		{groups.Change{Without: []string{"host-2"}}, "range 5; 2 host-2-0 -> host-1-0; 3 host-2-0 -> host-22-0; host-1 2 3; host-2 2 nil; host-22 1 2"},
		{groups.Change{Without: []string{"host-1", "host-2", "host-22"}},
			"nil 0; 0 host-1-0 -> nil; 1 host-1-0 -> nil; 2 host-2-0 -> nil; 3 host-2-0 -> nil; 4 host-22-0 -> nil; host-1 2 nil; host-2 2 nil; host-22 1 nil"},
		{groups.Change{Add: 1}, "range 5; 3 host-2-0 -> host-22-0; 4 host-22-0 -> new-1-0; host-1 2 2; host-2 2 1; host-22 1 1; new-1 nil 1"},
		{groups.Change{Without: []string{"host"}}, "plan for group g: more than one member begins with \"host\": host-1, host-2"},
		{groups.Change{Without: []string{"x"}}, "plan for group g: no such member: \"x\""},
	} {
		if got := plan(c.change); got != c.want {
			t.Errorf("%+v:\n%s\nwant\n%s", c.change, got, c.want)
		}
	}
}

// Members that a plan adds have ids that nobody has, also where one goes by such a name.
func TestPlanAddsOthers(t *testing.T) {
	s := newStage(t)
	s.topic("t", 4)
	s.member("new-1", byRange, map[string]int32{"t": 1})
	p, _, err := groups.MakePlan(t.Context(), s.st, root, "g", groups.Change{Add: 2})
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, m := range p.Members {
		ids = append(ids, m.ID)
	}
	if got := strings.Join(ids, " "); got != "new-1 new-2 new-3" {
		t.Errorf("members %s", got)
	}
}

// A plan with another strategy, where the group allows it and where it does not.
func TestPlanWithAnotherStrategy(t *testing.T) {
	s := newStage(t)
	s.topic("t", 9)
	for i, id := range []string{"a", "b", "c"} {
		s.member(id, []string{"sticky"}, map[string]int32{"t": 1})
		s.own(id, 0, "t", int32(3*i), int32(3*i+1), int32(3*i+2))
	}
	p, _, err := groups.MakePlan(t.Context(), s.st, root, "g", groups.Change{Without: []string{"b"}, Strategy: "roundrobin"})
	if err != nil || show(p.Strategy) != "roundrobin" || p.Refusal != nil {
		t.Errorf("%+v, %v", p, err)
	}
	s.topic("u", 1)
	s.member("d", []string{"sticky"}, map[string]int32{"u": 1})
	p, _, err = groups.MakePlan(t.Context(), s.st, root, "g", groups.Change{Strategy: "roundrobin"})
	if err != nil || p.Refusal == nil || len(p.Moves) != 0 || p.Members[0].After != nil {
		t.Errorf("%+v, %v", p, err)
	}
}

// A member with a filter is shown with the topics that it stands for now.
func TestFilterMember(t *testing.T) {
	s := newStage(t)
	s.topic("orders.eu", 1)
	s.topic("orders.us", 1)
	s.topic("audit", 1)
	lease, err := s.st.Grant(t.Context(), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	s.leases["a"] = lease.ID
	s.put(s.paths.ID("a"), `{"version":1,"subscription":{"orders.*":1},"pattern":"white_list","timestamp":"1","strategy":["range"]}`, lease.ID)
	s.own("a", 0, "orders.eu", 0)
	s.says(groups.StateOwnerless, "orders.us/0 ownerless: a-0 is due it and has not claimed it; no owner before is known")
	m := s.describe().Members[0]
	if got := fmt.Sprint(m.Pattern, " ", show(m.Filter), " ", m.Subscription); got != "white_list orders.* map[orders.eu:1 orders.us:1]" {
		t.Error(got)
	}
	s.own("a", 0, "orders.us", 0)
	s.says(groups.StateStable)
	s.verdict()
}
