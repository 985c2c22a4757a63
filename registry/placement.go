package registry

import (
	"hash/fnv"
	"slices"
)

// Place spreads the partitions of a new topic over the live brokers, of which
// there must be at least one: one after the other, in order of their ids,
// beginning at one that depends on the topic's name, so that topics of one
// partition spread too. It is a pure function: any two that create the same topic
// among the same brokers place it alike.
func Place(topic string, partitions int32, brokers []int32) map[int32][]int32 {
	return PlaceMore(topic, nil, partitions, brokers)
}

// PlaceMore returns the replicas of the partitions that a topic lacks to have
// total, numbered on from placed, which has those before. Each goes to the live
// broker that has the fewest of the topic, and of those to the next one in the
// order of ids; but never to the broker of the partition before it, unless there
// is no other. So the pattern of Place goes on where the brokers are the same, a
// broker that is new catches up, and one that is gone gets nothing.
func PlaceMore(topic string, placed map[int32][]int32, total int32, brokers []int32) map[int32][]int32 {
	ids := slices.Clone(brokers)
	slices.Sort(ids)
	ids = slices.Compact(ids)
	load := make(map[int32]int, len(ids))
	for _, replicas := range placed {
		load[replicas[0]]++
	}
	h := fnv.New32a()
	h.Write([]byte(topic))
	next := int(h.Sum32() % uint32(len(ids))) // where the search begins
	before := int32(-1)
	from := int32(len(placed))
	if from > 0 {
		before = placed[from-1][0]
		at, found := slices.BinarySearch(ids, before)
		if found {
			at++
		}
		next = at % len(ids)
	}
	more := make(map[int32][]int32, max(total-from, 0))
	for p := from; p < total; p++ {
		at := leastLoaded(ids, load, next, before)
		before = ids[at]
		load[before]++
		next = (at + 1) % len(ids)
		more[p] = []int32{before}
	}
	return more
}

// leastLoaded searches ids around the circle from next.
func leastLoaded(ids []int32, load map[int32]int, next int, except int32) int {
	best := -1
	for i := range ids {
		at := (next + i) % len(ids)
		if ids[at] == except && len(ids) > 1 {
			continue
		}
		if best < 0 || load[ids[at]] < load[ids[best]] {
			best = at
		}
	}
	return best
}
