package rebalance_test

import (
	"strings"
	"testing"
	"time"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// A claim of many partitions is carried out in parts. A partition that was held
// in the first and given up before the last is seen to be free: the watch begins
// where its own part was decided, and news from then on count.
func TestAReleaseBetweenTwoPartsOfAClaimIsSeen(t *testing.T) {
	held, free := registry.Partition{Topic: "t", Home: 1, Number: 0}, registry.Partition{Topic: "t", Home: 1, Number: 1}
	m := rebalance.NewMember("c")
	m.Step(1, rebalance.Registered{Registration: registry.Registration{Key: "/ids/c", Revision: 5}})
	var claim rebalance.Claim
	for _, a := range m.Step(1, rebalance.Snapshot{Revision: 5, Registered: 5,
		Members:  []rebalance.MemberInfo{{ID: "c", Subscription: map[string]int32{"t": 1}}},
		Topology: rebalance.Topology{"t": {held, free}}}) {
		if c, ok := a.(rebalance.Claim); ok {
			claim = c
		}
	}
	if len(claim.Wants) != 2 || claim.Wants[0].Partition != held {
		t.Fatalf("claims %v", claim.Wants)
	}
	after := map[registry.Partition]int64{}
	for _, a := range m.Step(2, rebalance.ClaimAnswered{Number: claim.Number, Revision: 12, Outcomes: []rebalance.ClaimOutcome{
		{Token: 3, Revision: 10}, {Mine: true, Token: 12, Revision: 12}}}) {
		if w, ok := a.(rebalance.Watch); ok {
			after[w.Partition] = w.After
		}
	}
	if after[held] != 10 || after[free] != 12 {
		t.Errorf("watches begin after %v", after)
	}
	var again []rebalance.Want
	for _, a := range m.Step(3, rebalance.OwnerSeen{Partition: held, Revision: 11}) {
		if c, ok := a.(rebalance.Claim); ok {
			again = c.Wants
		}
	}
	if len(again) != 1 || again[0].Partition != held {
		t.Errorf("the partition is free, and the member claims %v", again)
	}
}

// A target that no record can hold is not proposed: the group is told why, until it
// fits. What is held stays.
func TestATargetThatIsTooLargeIsRefused(t *testing.T) {
	p := registry.Partition{Topic: "t", Home: 1, Number: 0}
	m := rebalance.NewMember("c")
	snapshot := func(revision int64, ids ...string) []rebalance.Action {
		s := rebalance.Snapshot{Revision: revision, Registered: 5, Topology: rebalance.Topology{"t": {p}}}
		for _, id := range ids {
			s.Members = append(s.Members, rebalance.MemberInfo{ID: id, Subscription: map[string]int32{"t": 1}, Strategies: []string{"sticky"}})
		}
		return m.Step(time.Duration(revision)*time.Second, s)
	}
	m.Step(1, rebalance.Registered{Registration: registry.Registration{Key: "/ids/c", Revision: 5}})
	long := strings.Repeat("x", rebalance.MaxTarget)
	actions := snapshot(10, "c", long)
	if r, ok := actions[0].(rebalance.Refused); !ok || len(actions) != 1 || !strings.Contains(r.Reason, "too large") {
		t.Fatalf("does %v", actions)
	}
	if actions = snapshot(11, "c", long); len(actions) > 0 {
		t.Fatalf("says again %v", actions)
	}
	actions = snapshot(12, "c")
	if len(actions) != 2 || actions[0] != (rebalance.Refused{}) {
		t.Fatalf("does %v", actions)
	}
	if propose, ok := actions[1].(rebalance.Propose); !ok || propose.Snapshot != 12 || len(propose.Value) == 0 {
		t.Fatalf("does %v", actions)
	}
}
