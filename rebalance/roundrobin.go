package rebalance

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"unicode/utf16"

	"github.com/muster-io/muster/registry"
)

// ErrNotUniform refuses roundrobin to a group whose members do not all subscribe to
// the same topics, each with one number of streams for all of them.
var ErrNotUniform = errors.New("roundrobin needs members that all subscribe to the same topics, each with one number of streams for all of them")

func assignRoundRobin(s Snapshot) (*Assignment, error) {
	members := byID(s.Members)
	a := &Assignment{Strategy: StrategyRoundRobin, Topics: make(map[string]TopicShare, len(s.Topology))}
	for _, m := range members {
		a.Members = append(a.Members, m.ID)
	}
	subscribed := map[string]bool{}
	for _, m := range members {
		for topic := range m.Subscription {
			subscribed[topic] = true
		}
	}
	streams := make([]int32, len(members))
	for i, m := range members {
		first := true
		for topic := range subscribed {
			n := m.Subscription[topic]
			if !first && n != streams[i] {
				return nil, fmt.Errorf("%w: member %s", ErrNotUniform, m.ID)
			}
			streams[i], first = n, false
		}
	}
	type place struct {
		id string
		Thread
	}
	var threads []place
	for i, m := range members {
		for n := range streams[i] {
			threads = append(threads, place{m.Thread(n), Thread{int32(i), n}})
		}
	}
	slices.SortFunc(threads, func(a, b place) int { return compareUTF16(a.id, b.id) })
	type entry struct {
		hash  int32
		p     registry.Partition
		owner *Thread
	}
	var all []entry
	for topic, partitions := range s.Topology {
		t := TopicShare{Partitions: slices.SortedFunc(slices.Values(partitions), registry.ComparePartitions)}
		t.Owners = slices.Repeat([]Thread{Nobody}, len(t.Partitions))
		a.Topics[topic] = t
		if !subscribed[topic] {
			continue
		}
		for i, p := range t.Partitions {
			all = append(all, entry{javaHash("[" + topic + "," + strconv.Itoa(int(p.Number)) + "]"), p, &t.Owners[i]})
		}
	}
	slices.SortFunc(all, func(x, y entry) int {
		return cmp.Or(cmp.Compare(x.hash, y.hash), registry.ComparePartitions(x.p, y.p))
	})
	for i, e := range all {
		*e.owner = threads[i%len(threads)].Thread
	}
	return a, nil
}

// javaHash is String.hashCode.
func javaHash(s string) int32 {
	var h int32
	for _, unit := range utf16.Encode([]rune(s)) {
		h = 31*h + int32(unit)
	}
	return h
}
