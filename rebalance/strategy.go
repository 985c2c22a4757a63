package rebalance

import (
	"slices"
	"strings"
)

// Strategies that a group can agree on.
const (
	// StrategyRange is the documented rule: partitions clustered by broker, threads
	// sorted, each thread a slice of each topic.
	StrategyRange = "range"
	// StrategyRangeNumeric is range with the partitions by number alone, as 0.8's own
	// consumers do it.
	StrategyRangeNumeric = "range-numeric"
	// StrategyRoundRobin is 0.8.2's: the partitions of all topics in the order of
	// their hashes, dealt out to the threads in turn.
	StrategyRoundRobin = "roundrobin"
	// StrategySticky balances over all topics and moves as few partitions as that
	// allows; it follows the group's target record.
	StrategySticky = "sticky"
)

// Known tells whether a strategy can be asked for.
func Known(strategy string) bool {
	switch strategy {
	case StrategyRange, StrategyRangeNumeric, StrategyRoundRobin, StrategySticky:
		return true
	}
	return false
}

// Agree returns the strategy of a group: the first in the list of the member with
// the lowest id that every member states. All support range-numeric, which is the
// answer when there is no other. So members that see the same registrations
// always agree.
func Agree(members []MemberInfo) string {
	if len(members) == 0 {
		return StrategyRangeNumeric
	}
	lowest := slices.MinFunc(members, func(a, b MemberInfo) int { return strings.Compare(a.ID, b.ID) })
	for _, s := range lowest.Strategies {
		stated := func(m MemberInfo) bool { return slices.Contains(m.Strategies, s) }
		if Known(s) && !slices.ContainsFunc(members, func(m MemberInfo) bool { return !stated(m) }) {
			return s
		}
	}
	return StrategyRangeNumeric
}
