package rebalance

import (
	"cmp"
	"slices"
	"strings"

	"github.com/muster-io/muster/registry"
)

func assignRange(s Snapshot, strategy string) *Assignment {
	a := &Assignment{Strategy: strategy, Topics: make(map[string]TopicShare, len(s.Topology))}
	sorted := byID(s.Members)
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
	return a
}

func byID(members []MemberInfo) []MemberInfo {
	return slices.SortedFunc(slices.Values(members), func(x, y MemberInfo) int { return strings.Compare(x.ID, y.ID) })
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
