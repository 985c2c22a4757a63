package rebalance

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"

	"github.com/muster-io/muster/registry"
)

// Current tells whether the target was made for the group that a snapshot shows:
// the same members with the same subscriptions, the same topics in the same
// incarnation with the same partitions. A nil target is not current.
func (t *Target) Current(s Snapshot) bool {
	if t == nil || t.Group != fingerprint(s) || len(t.Assignment.Topics) != len(s.Topology) {
		return false
	}
	for topic, list := range s.Topology {
		share, found := t.Assignment.Topics[topic]
		if !found || t.Incarnations[topic] != s.Incarnations[topic] || !samePartitions(share.Partitions, list) {
			return false
		}
	}
	return true
}

func samePartitions(sorted, list []registry.Partition) bool {
	return slices.Equal(sorted, slices.SortedFunc(slices.Values(list), registry.ComparePartitions))
}

// fingerprint stands for the members and their subscriptions to topics that exist.
func fingerprint(s Snapshot) string {
	h := sha256.New()
	for _, m := range byID(s.Members) {
		fmt.Fprintf(h, "%q", m.ID)
		for _, topic := range slices.Sorted(maps.Keys(m.Subscription)) {
			if _, exists := s.Topology[topic]; exists {
				fmt.Fprintf(h, " %q %d", topic, m.Subscription[topic])
			}
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
}

// NextTarget returns the target that follows the snapshot's own.
func NextTarget(s Snapshot) *Target {
	members := byID(s.Members)
	a := &Assignment{Strategy: StrategySticky, Topics: make(map[string]TopicShare, len(s.Topology))}
	at := map[string]int32{}
	for i, m := range members {
		a.Members = append(a.Members, m.ID)
		at[m.ID] = int32(i)
	}
	type spot struct {
		topic string
		owner *Thread
	}
	load := map[Thread]int{}
	var spots []spot
	for _, topic := range slices.Sorted(maps.Keys(s.Topology)) {
		share := TopicShare{Partitions: slices.SortedFunc(slices.Values(s.Topology[topic]), registry.ComparePartitions)}
		for _, p := range share.Partitions {
			owner := Nobody
			if s.Target != nil && s.Target.Incarnations[topic] == s.Incarnations[topic] {
				was := s.Target.Assignment.Topics[topic]
				if i, found := slices.BinarySearchFunc(was.Partitions, p, registry.ComparePartitions); found && was.Owners[i] != Nobody {
					m, stays := at[s.Target.Assignment.Members[was.Owners[i].Member]]
					if stays && was.Owners[i].Stream < members[m].Subscription[topic] {
						owner = Thread{m, was.Owners[i].Stream}
						load[owner]++
					}
				}
			}
			share.Owners = append(share.Owners, owner)
		}
		a.Topics[topic] = share
		for i := range share.Owners {
			spots = append(spots, spot{topic, &share.Owners[i]})
		}
	}
	for moved := true; moved; {
		moved = false
		for _, x := range spots {
			best := *x.owner
			for i, m := range members {
				for n := range m.Subscription[x.topic] {
					to := Thread{int32(i), n}
					if best == Nobody || load[to] < load[best] {
						best = to
					}
				}
			}
			if best != *x.owner && (*x.owner == Nobody || load[*x.owner] > load[best]+1) {
				if *x.owner != Nobody {
					load[*x.owner]--
				}
				load[best]++
				*x.owner, moved = best, true
			}
		}
	}
	return &Target{Snapshot: s.Revision, Assignment: a, Incarnations: maps.Clone(s.Incarnations), Group: fingerprint(s)}
}
