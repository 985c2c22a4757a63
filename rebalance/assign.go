// Package rebalance decides who owns what in a consumer group: pure functions
// from topology and members to an assignment, and the state machine of one
// member. Nothing in it does I/O or reads a clock.
//
// Where to look: Range (assign.go) is the rule by which partitions are shared;
// Member.Step (member.go) decides what to claim and what to give up;
// registry.Claim writes the owner keys.
package rebalance

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/muster-io/muster/registry"
)

// Strategies that a group can agree on.
const (
	StrategyRange        = "range"
	StrategyRangeNumeric = "range-numeric"
)

// Known tells whether a strategy can be asked for.
func Known(strategy string) bool {
	return strategy == StrategyRange || strategy == StrategyRangeNumeric
}

// MemberInfo is what a group knows of one of its members.
type MemberInfo struct {
	ID           string           // consumer id
	Subscription map[string]int32 // topic -> number of streams
	Strategies   []string         // in order of preference; empty is range-numeric
}

// Thread returns the id of the member's n-th stream.
func (m MemberInfo) Thread(n int32) string { return ThreadID(m.ID, n) }

// ThreadID returns the id of a consumer's n-th stream, counted from 0 in each topic.
func ThreadID(consumer string, n int32) string { return consumer + "-" + strconv.Itoa(int(n)) }

// ParseThread finds the consumer that an owner key's value names, among the
// registered ids: a value that is an id (from a client without streams), or an id
// and the number of a stream. Counting dashes would not do: ids hold any.
func ParseThread(owner string, registered func(id string) bool) (consumer string, stream int32, ok bool) {
	if registered(owner) {
		return owner, -1, true
	}
	i := strings.LastIndexByte(owner, '-')
	if i < 0 {
		return "", 0, false
	}
	n, err := strconv.ParseUint(owner[i+1:], 10, 31)
	if err != nil || n > registry.MaxStreams || !registered(owner[:i]) {
		return "", 0, false
	}
	return owner[:i], int32(n), true
}

// Topology is the topics of a snapshot with their partitions.
type Topology map[string][]registry.Partition

// Assignment says which thread is to own each partition.
type Assignment map[registry.Partition]string

// Of returns the part of one member: partition -> number of its stream.
func (a Assignment) Of(m MemberInfo) map[registry.Partition]int32 {
	streams := make(map[string]int32)
	for _, n := range m.Subscription {
		for i := range n {
			streams[m.Thread(i)] = i
		}
	}
	mine := make(map[registry.Partition]int32)
	for p, thread := range a {
		if i, ok := streams[thread]; ok && i < m.Subscription[p.Topic] {
			mine[p] = i
		}
	}
	return mine
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

// Assign shares out the partitions of all topics by the group's strategy.
func Assign(topology Topology, members []MemberInfo) (Assignment, string) {
	strategy := Agree(members)
	order := byHome
	if strategy == StrategyRangeNumeric {
		order = registry.ComparePartitions
	}
	a := make(Assignment)
	for topic, partitions := range topology {
		for p, thread := range Range(partitions, threadsOf(topic, members), order) {
			a[p] = thread
		}
	}
	return a, strategy
}

// Range is the documented rule for one topic. Its steps are those of the
// algorithm: sort the partitions so that those of one broker cluster together;
// sort the threads of all consumers of the topic, as strings; thread i gets N =
// P div T consecutive partitions, and the first P mod T threads one more.
func Range(partitions []registry.Partition, threads []string, order func(a, b registry.Partition) int) Assignment {
	a := make(Assignment, len(partitions))
	if len(threads) == 0 {
		return a
	}
	pt := slices.SortedFunc(slices.Values(partitions), order)
	ct := slices.SortedFunc(slices.Values(threads), compareUTF16)
	n, extra := len(pt)/len(ct), len(pt)%len(ct)
	for i, thread := range ct {
		first := i*n + min(i, extra)
		count := n
		if i < extra {
			count++
		}
		for _, p := range pt[first : first+count] {
			a[p] = thread
		}
	}
	return a
}

// byHome clusters the partitions of one broker: by home, then by number.
func byHome(a, b registry.Partition) int {
	return cmp.Or(cmp.Compare(a.Home, b.Home), cmp.Compare(a.Number, b.Number), strings.Compare(a.Topic, b.Topic))
}

// threadsOf lists the threads of all members that subscribe to the topic.
func threadsOf(topic string, members []MemberInfo) []string {
	var threads []string
	for _, m := range members {
		for i := range m.Subscription[topic] {
			threads = append(threads, m.Thread(i))
		}
	}
	return threads
}
