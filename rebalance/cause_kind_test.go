package rebalance_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// The kind is that of the first thing that the text tells of, and there is one if
// there is a text.
func TestKindOfCause(t *testing.T) {
	parts := func(n int32) (list []registry.Partition) {
		for i := range n {
			list = append(list, registry.Partition{Topic: "t", Home: 1, Number: i})
		}
		return list
	}
	snapshot := func(partitions int32, members ...rebalance.MemberInfo) rebalance.Snapshot {
		return rebalance.Snapshot{Revision: 5, Members: members, Topology: rebalance.Topology{"t": parts(partitions)}, Incarnations: map[string]int64{"t": 1}}
	}
	member := func(id string, strategy string, streams int32) rebalance.MemberInfo {
		return rebalance.MemberInfo{ID: id, Subscription: map[string]int32{"t": streams}, Strategies: []string{strategy}}
	}
	a, b := member("a", "range", 1), member("b", "range", 1)
	sticky := snapshot(2, member("a", "sticky", 1))
	withTarget := sticky
	withTarget.Target = &rebalance.Target{Record: 7}
	var seen []rebalance.CauseKind
	for _, c := range []struct {
		before, after rebalance.Snapshot
		kind          rebalance.CauseKind
		text          string
	}{
		{snapshot(2, a), snapshot(2, a), "", ""},
		{snapshot(2, a), snapshot(2, b), rebalance.CauseLeft, "member a left"},
		{snapshot(2, a), snapshot(2, a, b), rebalance.CauseJoined, "member b joined"},
		{snapshot(2, a), snapshot(2, member("a", "range", 2)), rebalance.CauseSubscription, "member a changed"},
		{snapshot(2, a), snapshot(3, a), rebalance.CauseTopics, "topic t has 3 partitions"},
		{snapshot(2, a), snapshot(3, a, member("c", "sticky", 1)), rebalance.CauseStrategy, "strategy changed to range-numeric"},
		{snapshot(2), snapshot(2, a), rebalance.CauseJoined, "member a joined"},
		{sticky, withTarget, rebalance.CauseTarget, "target was written anew"},
	} {
		kind, text := rebalance.KindOfCause(c.before, c.after), rebalance.Cause(c.before, c.after)
		if kind != c.kind || !strings.HasPrefix(text, c.text) || (kind == "") != (text == "") {
			t.Errorf("%q, %q; want %q, %q", kind, text, c.kind, c.text)
		}
		seen = append(seen, kind)
	}
	for _, kind := range rebalance.CauseKinds() {
		if !slices.Contains(seen, kind) {
			t.Errorf("%s was not seen", kind)
		}
	}
}
