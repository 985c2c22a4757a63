package rebalance

import (
	"cmp"
	"slices"

	"github.com/muster-io/muster/registry"
)

// assignRange is the documented rebalancing algorithm, for all consumers of the
// group at once: for each topic T,
//
//	let PT be all partitions of topic T
//	let CG be all consumers of the group that consume topic T, each with its threads
//	sort PT, so that partitions on the same broker are clustered together
//	sort CG
//	let i be the place of a thread in CG, and N = size(PT) div size(CG)
//	assign the partitions from i*N to (i+1)*N - 1 to thread i
//
// and the first size(PT) mod size(CG) threads get one more each, which the documents
// leave open. With range-numeric PT is sorted by number alone.
func assignRange(s Snapshot, strategy string) *Assignment {
	return newLineup(s).divideByRange(strategy)
}

func (l *lineup) divideByRange(strategy string) *Assignment {
	for _, class := range l.classes {
		cg := l.sortedThreads(class) // one list for all topics with the same consumers
		for _, t := range class.topics {
			share := &l.shares[t]
			share.Owners = nobody(len(share.Partitions))
			if len(cg) == 0 {
				continue
			}
			pt := len(share.Partitions)
			var place []int32 // of the partitions in PT; nil is by number
			if strategy == StrategyRange {
				place = byHome(share.Partitions)
			}
			n, extra := pt/len(cg), pt%len(cg)
			for i, thread := range cg[:min(pt, len(cg))] {
				first, end := slice(i, n, extra)
				for j := first; j < end; j++ {
					if place == nil {
						share.Owners[j] = thread
					} else {
						share.Owners[place[j]] = thread
					}
				}
			}
		}
	}
	return l.assignment(strategy)
}

// slice is the part of thread i: N partitions, and one more for each of the first threads.
func slice(i, n, extra int) (first, end int) {
	first, end = i*n+min(i, extra), (i+1)*n+min(i+1, extra)
	return first, end
}

// byHome clusters the partitions of one broker: it lists the places in a list by
// number in the order of homes, and by number within each. nil if that is the order
// already.
func byHome(list []registry.Partition) []int32 {
	compare := func(a, b registry.Partition) int { return cmp.Compare(a.Home, b.Home) }
	if slices.IsSortedFunc(list, compare) {
		return nil
	}
	place := make([]int32, len(list))
	least, most := list[0].Home, list[0].Home
	for i := range list {
		least, most = min(least, list[i].Home), max(most, list[i].Home)
	}
	if span := int64(most) - int64(least) + 1; span <= int64(4*len(list)) {
		// Ids of brokers lie close together, so that they can be counted.
		first := make([]int32, span+1)
		for i := range list {
			first[list[i].Home-least+1]++
		}
		for home := range span {
			first[home+1] += first[home]
		}
		for i := range list {
			home := &first[list[i].Home-least]
			place[*home] = int32(i)
			*home++
		}
		return place
	}
	for i := range place {
		place[i] = int32(i)
	}
	slices.SortStableFunc(place, func(a, b int32) int { return compare(list[a], list[b]) })
	return place
}
