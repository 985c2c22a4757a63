// Package rebalance decides who owns what in a consumer group: pure functions
// from topology and members to an assignment, and the state machine of one
// member. Nothing in it does I/O or reads a clock.
//
// Where to look: Assign (assign.go) is the rule by which partitions are shared;
// Member.Step (member.go) decides what to claim and what to give up;
// registry.Claim writes the owner keys.
package rebalance

import (
	"cmp"
	"iter"
	"maps"
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

// Thread is one stream of one member: Member is its place in Assignment.Members.
type Thread struct {
	Member int32
	Stream int32
}

// Nobody is the thread of a partition that no member subscribes to.
var Nobody = Thread{Member: -1}

// Assignment says which thread is to own each partition of a group. It is made
// once for all members, so that it is kept small: one Thread for each partition.
type Assignment struct {
	Strategy string
	// Members are the ids of the members that take part, sorted.
	Members []string
	// Topics that somebody subscribes to. Owners has one entry for each partition of
	// the topology's list, which is by number.
	Topics map[string]TopicShare
}

// TopicShare is the part of an Assignment that is about one topic.
type TopicShare struct {
	Partitions []registry.Partition
	Owners     []Thread
}

// Owner returns the thread that is to own the partition.
func (a *Assignment) Owner(p registry.Partition) (thread string, ok bool) {
	t := a.Topics[p.Topic]
	i, found := slices.BinarySearchFunc(t.Partitions, p, registry.ComparePartitions)
	if !found || t.Owners[i] == Nobody {
		return "", false
	}
	return ThreadID(a.Members[t.Owners[i].Member], t.Owners[i].Stream), true
}

// Of returns the part of one member: partition -> number of its stream.
func (a *Assignment) Of(id string) map[registry.Partition]int32 {
	mine := make(map[registry.Partition]int32)
	me, found := slices.BinarySearch(a.Members, id)
	if !found {
		return mine
	}
	for _, t := range a.Topics {
		for i, thread := range t.Owners {
			if int(thread.Member) == me {
				mine[t.Partitions[i]] = thread.Stream
			}
		}
	}
	return mine
}

// All returns every partition that is to be owned, with the thread that is to own
// it, by topic and number.
func (a *Assignment) All() iter.Seq2[registry.Partition, string] {
	return func(yield func(registry.Partition, string) bool) {
		for _, topic := range slices.Sorted(maps.Keys(a.Topics)) {
			t := a.Topics[topic]
			for i, thread := range t.Owners {
				if thread != Nobody && !yield(t.Partitions[i], ThreadID(a.Members[thread.Member], thread.Stream)) {
					return
				}
			}
		}
	}
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

// Assign shares out the partitions of all topics of a snapshot among its members,
// by the strategy that they agree on.
func Assign(s Snapshot) (*Assignment, error) {
	a := &Assignment{Strategy: Agree(s.Members), Topics: make(map[string]TopicShare, len(s.Topology))}
	sorted := slices.SortedFunc(slices.Values(s.Members), func(x, y MemberInfo) int { return strings.Compare(x.ID, y.ID) })
	for _, m := range sorted {
		a.Members = append(a.Members, m.ID)
	}
	order := byHome
	if a.Strategy == StrategyRangeNumeric {
		order = registry.ComparePartitions
	}
	for topic, partitions := range s.Topology {
		a.Topics[topic] = divide(topic, partitions, sorted, order)
	}
	return a, nil
}

// divide is the documented rule for one topic. Its steps are those of the
// algorithm: sort the partitions so that those of one broker cluster together;
// sort the threads of all consumers of the topic, as strings; thread i gets N =
// P div T consecutive partitions, and the first P mod T threads one more.
func divide(topic string, partitions []registry.Partition, members []MemberInfo, order func(a, b registry.Partition) int) TopicShare {
	type place struct {
		id string
		Thread
	}
	var ct []place
	for i, m := range members {
		for n := range m.Subscription[topic] {
			ct = append(ct, place{m.Thread(n), Thread{int32(i), n}})
		}
	}
	share := TopicShare{Partitions: slices.SortedFunc(slices.Values(partitions), registry.ComparePartitions)}
	share.Owners = slices.Repeat([]Thread{Nobody}, len(partitions))
	if len(ct) == 0 {
		return share
	}
	slices.SortFunc(ct, func(a, b place) int { return compareUTF16(a.id, b.id) })
	pt := slices.SortedFunc(slices.Values(partitions), order)
	n, extra := len(pt)/len(ct), len(pt)%len(ct)
	for i, thread := range ct {
		first := i*n + min(i, extra)
		count := n
		if i < extra {
			count++
		}
		for _, p := range pt[first : first+count] {
			j, _ := slices.BinarySearchFunc(share.Partitions, p, registry.ComparePartitions)
			share.Owners[j] = thread.Thread
		}
	}
	return share
}

// byHome clusters the partitions of one broker: by home, then by number.
func byHome(a, b registry.Partition) int {
	return cmp.Or(cmp.Compare(a.Home, b.Home), cmp.Compare(a.Number, b.Number), strings.Compare(a.Topic, b.Topic))
}
