package rebalance_test

import (
	"testing"

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
