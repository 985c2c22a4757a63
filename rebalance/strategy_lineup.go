package rebalance

import (
	"cmp"
	"encoding/binary"
	"hash/maphash"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/muster-io/muster/registry"
)

// lineup is the topics and the members of a snapshot in one order, whatever their
// order in the snapshot: where all strategies begin.
type lineup struct {
	ids     []string // of the members, sorted
	topics  []string // of the topology, sorted
	shares  []TopicShare
	subs    []subscription
	subOf   []int32 // member -> place in subs
	classes []class
}

// subscription is one that members have in common, which most groups' do.
type subscription struct {
	streams map[string]int32
	members []int32
}

// class is the topics that the same threads may own.
type class struct {
	topics    []int32
	consumers []consumer // by member
}

// consumer is a member's place in a class: so many of its streams, counted from 0.
type consumer struct {
	member  int32
	streams int32
}

// newLineup sorts both: partitions of each topic by number, members by id.
func newLineup(s Snapshot) *lineup {
	names := make([]string, 0, len(s.Topology))
	for topic := range s.Topology {
		names = append(names, topic)
	}
	l := &lineup{topics: make([]string, len(names)), shares: make([]TopicShare, len(names))}
	for t, at := range sortedPlaces(names) {
		l.topics[t] = names[at]
	}
	for t, topic := range l.topics {
		l.shares[t].Partitions = byNumber(s.Topology[topic])
	}
	l.addMembers(s.Members)
	l.classify()
	return l
}

func (l *lineup) addMembers(members []MemberInfo) {
	ids := make([]string, len(members))
	for i := range members {
		ids[i] = members[i].ID
	}
	l.ids, l.subOf = make([]string, len(members)), make([]int32, len(members))
	byHash := make(map[uint64][]int32)
	seed := maphash.MakeSeed()
	last := int32(-1)
	for i, at := range sortedPlaces(ids) {
		streams := members[at].Subscription
		if last < 0 || !sameSubscription(l.subs[last].streams, streams) {
			last = l.findSubscription(streams, byHash, seed)
		}
		l.ids[i], l.subOf[i] = ids[at], last
		l.subs[last].members = append(l.subs[last].members, int32(i))
	}
}

func (l *lineup) findSubscription(streams map[string]int32, byHash map[uint64][]int32, seed maphash.Seed) int32 {
	hash := hashSubscription(streams, seed)
	for _, i := range byHash[hash] {
		if maps.Equal(l.subs[i].streams, streams) {
			return i
		}
	}
	i := int32(len(l.subs))
	byHash[hash] = append(byHash[hash], i)
	l.subs = append(l.subs, subscription{streams: streams})
	return i
}

func hashSubscription(streams map[string]int32, seed maphash.Seed) (hash uint64) {
	for topic, n := range streams {
		hash += maphash.String(seed, topic) * uint64(2*n+1) // a sum: maps have no order
	}
	return hash
}

// sameSubscription looks first whether it is one map: a Reader has members that
// subscribe alike share it, and there may be ten thousand topics in it.
func sameSubscription(a, b map[string]int32) bool {
	return reflect.ValueOf(a).Pointer() == reflect.ValueOf(b).Pointer() || maps.Equal(a, b)
}

// classify finds the consumers of each topic.
func (l *lineup) classify() {
	type taker struct{ sub, streams int32 }
	takers := make([][]taker, len(l.topics))
	place := make(map[string]int, len(l.topics))
	for t, topic := range l.topics {
		place[topic] = t
	}
	for i, sub := range l.subs {
		for topic, n := range sub.streams {
			if t, exists := place[topic]; exists && n > 0 {
				takers[t] = append(takers[t], taker{int32(i), n})
			}
		}
	}
	known := make(map[string]int)
	var key []byte
	for t, list := range takers {
		key = key[:0]
		for _, x := range list {
			key = binary.BigEndian.AppendUint64(key, uint64(x.sub)<<32|uint64(x.streams))
		}
		k, found := known[string(key)]
		if !found {
			k = len(l.classes)
			known[string(key)] = k
			var c class
			for _, x := range list {
				for _, m := range l.subs[x.sub].members {
					c.consumers = append(c.consumers, consumer{m, x.streams})
				}
			}
			if len(list) > 1 {
				slices.SortFunc(c.consumers, func(a, b consumer) int { return cmp.Compare(a.member, b.member) })
			}
			l.classes = append(l.classes, c)
		}
		l.classes[k].topics = append(l.classes[k].topics, int32(t))
	}
}

// assignment makes the answer out of the shares.
func (l *lineup) assignment(strategy string) *Assignment {
	a := &Assignment{Strategy: strategy, Members: l.ids, Topics: make(map[string]TopicShare, len(l.topics))}
	for t, topic := range l.topics {
		a.Topics[topic] = l.shares[t]
	}
	return a
}

// sortedThreads lists the threads of a class by their ids, as the JVM sorts them.
func (l *lineup) sortedThreads(c class) []Thread {
	list := make([]Thread, 0, len(c.consumers))
	for _, m := range c.consumers {
		for n := range m.streams {
			list = append(list, Thread{m.member, n})
		}
	}
	plain := true
	for _, m := range c.consumers {
		plain = plain && ascii(l.ids[m.member])
	}
	order := func(a, b Thread) int {
		x, y := l.ids[a.Member], l.ids[b.Member]
		if plain && !strings.HasPrefix(x, y) && !strings.HasPrefix(y, x) {
			return strings.Compare(x, y) // the numbers after the ids do not matter
		}
		return compareUTF16(ThreadID(x, a.Stream), ThreadID(y, b.Stream))
	}
	slices.SortFunc(list, order)
	return list
}

// sortedPlaces lists the places of texts in the order of the texts. The eight bytes
// behind what all begin with are compared as a number, which decides for nearly all:
// ids are names of hosts, mostly of one domain, with something random behind.
func sortedPlaces(texts []string) []int32 {
	common := 0
	if len(texts) > 0 {
		common = len(texts[0])
	}
	for _, text := range texts {
		common = min(common, len(text))
		for text[:common] != texts[0][:common] {
			common--
		}
	}
	type entry struct {
		key uint64
		at  int32
	}
	sorted := make([]entry, len(texts))
	for i, text := range texts {
		var key [8]byte
		copy(key[:], text[common:])
		sorted[i] = entry{binary.BigEndian.Uint64(key[:]), int32(i)}
	}
	slices.SortFunc(sorted, func(a, b entry) int {
		if a.key != b.key {
			return cmp.Compare(a.key, b.key)
		}
		return strings.Compare(texts[a.at], texts[b.at])
	})
	places := make([]int32, len(texts))
	for i, e := range sorted {
		places[i] = e.at
	}
	return places
}

// byNumber returns the partitions of one topic by number; the list itself if that
// is its order. Numbers are dense, so that each is its own place, nearly always.
func byNumber(list []registry.Partition) []registry.Partition {
	if slices.IsSortedFunc(list, comparePlaces) {
		return list
	}
	sorted := make([]registry.Partition, len(list))
	seen := make([]bool, len(list))
	for _, p := range list {
		if p.Number < 0 || int(p.Number) >= len(list) || seen[p.Number] {
			copy(sorted, list)
			slices.SortFunc(sorted, comparePlaces)
			return sorted
		}
		sorted[p.Number], seen[p.Number] = p, true
	}
	return sorted
}

func comparePlaces(a, b registry.Partition) int {
	if a.Number != b.Number {
		return cmp.Compare(a.Number, b.Number)
	}
	return cmp.Compare(a.Home, b.Home)
}

// nobody returns the owners of so many partitions that nobody subscribes to.
func nobody(n int) []Thread {
	owners := make([]Thread, n)
	for i := range owners {
		owners[i] = Nobody
	}
	return owners
}

// byID returns the members sorted.
func byID(members []MemberInfo) []MemberInfo {
	ids := make([]string, len(members))
	for i := range members {
		ids[i] = members[i].ID
	}
	sorted := make([]MemberInfo, len(members))
	for i, at := range sortedPlaces(ids) {
		sorted[i] = members[at]
	}
	return sorted
}
