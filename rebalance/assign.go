// Package rebalance decides who owns what in a consumer group: pure functions
// from topology and members to an assignment, and the state machine of one
// member. Nothing in it does I/O or reads a clock.
//
// Where to look: Assign (assign.go) is how partitions are shared, by the rule of
// strategy_range.go, roundrobin.go or sticky.go; Member.Step (member.go) decides
// what to claim and what to give up; registry.Claim writes the owner keys.
package rebalance

import (
	"iter"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/muster-io/muster/registry"
)

// MemberInfo is what a group knows of one of its members.
type MemberInfo struct {
	ID           string           // consumer id
	Subscription map[string]int32 // topic -> number of streams
	Strategies   []string         // in order of preference; empty is range-numeric
	// Filter is the filter and number of streams of a registration with a list pattern,
	// as text, of which Subscription is the expansion; empty for a static one.
	Filter string
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

// Assign shares out the partitions of all topics of a snapshot among its members,
// by the strategy that they agree on. A group whose strategy cannot divide it is
// refused with an error, such as ErrNotUniform. With sticky the answer is the
// snapshot's target if that is current, else what the next target will be.
func Assign(s Snapshot) (*Assignment, error) {
	strategy := Agree(s.Members)
	switch strategy {
	case StrategySticky:
		return assignSticky(s), nil
	case StrategyRoundRobin:
		return assignRoundRobin(s)
	default:
		return assignRange(s, strategy), nil
	}
}
