package rebalance

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"maps"
	"slices"
	"strings"
)

// Current tells whether the target was made for the group that a snapshot shows:
// the same members with the same subscriptions, the same topics in the same
// incarnation with the same partitions, each with an owner that may have it. It
// need not be balanced: somebody may have written it by hand. A nil target is not current.
func (t *Target) Current(s Snapshot) bool {
	return t != nil && t.current(newLineup(s), s.Incarnations)
}

func (t *Target) current(l *lineup, incarnations map[string]int64) bool {
	if len(t.Assignment.Topics) != len(l.topics) || !slices.Equal(t.Assignment.Members, l.ids) || t.Group != l.fingerprint() {
		return false
	}
	streams := make([]int32, len(l.ids)) // of each member in the class at hand
	for _, c := range l.classes {
		for _, x := range c.consumers {
			streams[x.member] = x.streams
		}
		for _, i := range c.topics {
			topic := l.topics[i]
			share, found := t.Assignment.Topics[topic]
			if !found || t.Incarnations[topic] != incarnations[topic] || !slices.Equal(share.Partitions, l.shares[i].Partitions) {
				return false
			}
			for _, owner := range share.Owners {
				if owner == Nobody && len(c.consumers) > 0 || owner != Nobody && owner.Stream >= streams[owner.Member] {
					return false
				}
			}
		}
		for _, x := range c.consumers {
			streams[x.member] = 0
		}
	}
	return true
}

// fingerprint stands for the members and their subscriptions to topics that exist.
func (l *lineup) fingerprint() string {
	h := sha256.New()
	known := make(map[string]uint64) // subscriptions that differ only in topics that do not exist are one
	number := make([]uint64, len(l.subs))
	var b []byte
	for i, sub := range l.subs {
		b = b[:0]
		for _, topic := range slices.Sorted(maps.Keys(sub.streams)) {
			if _, exists := slices.BinarySearch(l.topics, topic); exists && sub.streams[topic] > 0 {
				b = binary.AppendUvarint(appendText(b, topic), uint64(sub.streams[topic]))
			}
		}
		n, found := known[string(b)]
		if !found {
			n = uint64(len(known))
			known[string(b)] = n
		}
		number[i] = n
	}
	for m, id := range l.ids {
		b = binary.AppendUvarint(appendText(b[:0], id), number[l.subOf[m]])
		h.Write(b)
	}
	for _, text := range slices.SortedFunc(maps.Keys(known), func(x, y string) int { return cmp.Compare(known[x], known[y]) }) {
		h.Write(appendText(b[:0], text))
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
}

func appendText(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// assignSticky is the target's assignment, if that is current, else the next one's.
func assignSticky(s Snapshot) *Assignment {
	l := newLineup(s)
	if s.Target != nil && s.Target.current(l, s.Incarnations) {
		return s.Target.Assignment
	}
	return nextTarget(l, s).Assignment
}

// NextTarget returns the target that follows the snapshot's own: a pure function of
// that, of the topics and of the members, whatever their order. Where there is none,
// or one whose members have all gone, it follows the division by range, so that a
// running group that turns from that to sticky moves no more than it must. In this
// order it is
//
//  1. complete: every partition that somebody subscribes to has an owner;
//  2. balanced: the partitions of all topics together are spread over the threads
//     (the members' streams) as evenly as the subscriptions allow. Where all
//     subscribe alike, no thread has two more than another. Where not, no move of a
//     partition, and no chain of such moves, would take one from a thread to another
//     that has two less;
//  3. sticky: of all such assignments, one that takes the fewest partitions from the
//     member that has them, and of those, one that takes the fewest from the stream;
//  4. spread: what is new, or has to move, is dealt out in rounds by topic and number,
//     and a thread gives up first of the topic that it has most of. So the partitions
//     of a topic are on many members, as far as that moves nothing.
//
// A partition is where it was if topic, incarnation, home and number are the same. So
// it changes nothing when nothing has changed that matters.
func NextTarget(s Snapshot) *Target { return nextTarget(newLineup(s), s) }

func nextTarget(l *lineup, s Snapshot) *Target {
	st := newSticky(l, s)
	st.balance()
	for k := range l.classes {
		st.deal(k)
	}
	return &Target{Snapshot: s.Revision, Assignment: l.assignment(StrategySticky), Incarnations: l.incarnations(s.Incarnations), Group: l.fingerprint()}
}

func (l *lineup) incarnations(all map[string]int64) map[string]int64 {
	mine := make(map[string]int64, len(l.topics))
	for _, topic := range l.topics {
		mine[topic] = all[topic]
	}
	return mine
}

// sticky is one computation of a target. Threads are numbered through: the streams
// of the first member, then those of the second, and so on.
type sticky struct {
	*lineup
	threads []Thread
	first   []int32 // member -> its first thread
	classes []stickyClass
}

// stickyClass is what each thread of a class had, and what it shall have. Both are
// counted, since it is only in the end that it matters which partitions they are.
type stickyClass struct {
	*class
	units  []unit
	pairs  []pair
	size   int     // partitions
	loose  []spot  // partitions without a thread: new, or taken from one that is gone
	strays []stray // those of loose that belong to a member that stays
}

// unit is a thread in a class.
type unit struct {
	thread int32
	had    int32 // partitions of the class that it can keep
	gets   int32
}

// pair is a member in a class; its units are neighbours.
type pair struct {
	member     int32
	first, end int32 // units
	had        int32 // by its units, and those whose stream is gone
}

// spot is a partition in its class: the place of the topic and in the topic.
type spot struct{ topic, place int32 }

type stray struct {
	spot
	pair int32
}

func newSticky(l *lineup, s Snapshot) *sticky {
	st := &sticky{lineup: l, first: make([]int32, len(l.ids)), classes: make([]stickyClass, len(l.classes))}
	streams := make([]int32, len(l.ids))
	for _, c := range l.classes {
		for _, x := range c.consumers {
			streams[x.member] = max(streams[x.member], x.streams)
		}
	}
	for m, n := range streams {
		st.first[m] = int32(len(st.threads))
		for i := range n {
			st.threads = append(st.threads, Thread{int32(m), i})
		}
	}
	was := previous{target: s.Target, members: l.follow(s.Target), incarnations: s.Incarnations}
	if !slices.ContainsFunc(was.members, func(now int32) bool { return now >= 0 }) {
		was.target = &Target{Assignment: l.divideByRange(StrategyRange), Incarnations: s.Incarnations}
		was.members = l.follow(was.target)
	}
	pairOf := make([]int32, len(l.ids)) // in the class at hand, plus 1
	for k := range l.classes {
		st.addClass(k, was, pairOf)
	}
	return st
}

// previous is the target that is followed, or the division by range.
type previous struct {
	target       *Target
	members      []int32 // of the target -> member now, or -1
	incarnations map[string]int64
}

// follow finds the target's members among those of now.
func (l *lineup) follow(t *Target) []int32 {
	if t == nil {
		return nil
	}
	now := make([]int32, len(t.Assignment.Members))
	i := 0
	for j, id := range t.Assignment.Members {
		for i < len(l.ids) && strings.Compare(l.ids[i], id) < 0 {
			i++
		}
		now[j] = -1
		if i < len(l.ids) && l.ids[i] == id {
			now[j] = int32(i)
		}
	}
	return now
}

func (p previous) share(topic string) TopicShare {
	if p.target == nil || p.target.Incarnations[topic] != p.incarnations[topic] {
		return TopicShare{}
	}
	return p.target.Assignment.Topics[topic]
}

// addClass leaves every partition where it was, if that may be.
func (st *sticky) addClass(k int, was previous, pairOf []int32) {
	c := &st.classes[k]
	c.class = &st.lineup.classes[k]
	c.pairs = make([]pair, 0, len(c.consumers))
	c.units = make([]unit, 0, len(c.consumers))
	for i, x := range c.consumers {
		pairOf[x.member] = int32(i + 1)
		c.pairs = append(c.pairs, pair{member: x.member, first: int32(len(c.units)), end: int32(len(c.units)) + x.streams})
		for n := range x.streams {
			c.units = append(c.units, unit{thread: st.first[x.member] + n})
		}
	}
	for _, t := range c.topics {
		share := &st.shares[t]
		share.Owners = make([]Thread, len(share.Partitions))
		c.size += len(share.Partitions)
		old := was.share(st.topics[t])
		if len(old.Partitions) == 0 {
			c.loose = slices.Grow(c.loose, len(share.Partitions))
		}
		j := 0
		for i := range share.Partitions {
			p := &share.Partitions[i]
			for j < len(old.Partitions) && comparePlaces(old.Partitions[j], *p) < 0 {
				j++
			}
			owner := Nobody
			if j < len(old.Partitions) && old.Partitions[j].Number == p.Number && old.Partitions[j].Home == p.Home {
				owner = old.Owners[j]
			}
			share.Owners[i] = Nobody
			x := int32(-1) // the pair
			if owner != Nobody {
				if owner.Member = was.members[owner.Member]; owner.Member >= 0 {
					x = pairOf[owner.Member] - 1
				}
			}
			at := spot{t, int32(i)}
			switch {
			case x < 0:
				c.loose = append(c.loose, at)
			case owner.Stream >= c.pairs[x].end-c.pairs[x].first:
				c.pairs[x].had++
				c.strays = append(c.strays, stray{at, x})
			default:
				c.pairs[x].had++
				c.units[c.pairs[x].first+owner.Stream].had++
				share.Owners[i] = owner
			}
		}
	}
	for _, x := range c.consumers {
		pairOf[x.member] = 0
	}
}

// balance decides how many partitions of each class each thread gets.
func (st *sticky) balance() {
	for _, part := range st.components() {
		if len(part) == 1 {
			st.classes[part[0]].balance()
		} else {
			newFlow(st, part).run()
		}
	}
}

// components groups the classes that have members in common, directly or by way of
// others. Only within these one class matters to the balance of another.
func (st *sticky) components() [][]int {
	parent := make([]int, len(st.classes))
	for k := range parent {
		parent[k] = k
	}
	root := func(k int) int {
		for parent[k] != k {
			parent[k] = parent[parent[k]]
			k = parent[k]
		}
		return k
	}
	last := make([]int, len(st.ids)) // class of each member, plus 1
	for k, c := range st.classes {
		for _, x := range c.consumers {
			if last[x.member] > 0 {
				parent[root(k)] = root(last[x.member] - 1)
			}
			last[x.member] = k + 1
		}
	}
	parts := make(map[int][]int)
	for k, c := range st.classes {
		if len(c.consumers) > 0 {
			parts[root(k)] = append(parts[root(k)], k)
		}
	}
	return slices.Collect(maps.Values(parts)) // in any order: none matters to another
}

// balance of a class alone: each thread gets N = size div threads, and the first
// choice of the rest are threads that have more than N now. One more for a thread
// keeps a partition with the member as long as the member has more than its threads' Ns,
// and with the stream if that has more than N; what keeps most comes first.
func (c *stickyClass) balance() {
	n, extra := int32(c.size/len(c.units)), c.size%len(c.units)
	give := func(u *unit) {
		u.gets++
		extra--
	}
	keeps := make([]int32, len(c.pairs)) // what the member has beyond its Ns, and would still keep
	for i, p := range c.pairs {
		keeps[i] = max(0, p.had-n*(p.end-p.first))
		for j := p.first; j < p.end; j++ {
			c.units[j].gets = n
		}
	}
	for _, choice := range []struct{ member, stream bool }{{true, true}, {true, false}, {false, true}} {
		for i, p := range c.pairs {
			for j := p.first; j < p.end && extra > 0; j++ {
				u := &c.units[j]
				if u.gets == n && (u.had > n) == choice.stream && (keeps[i] > 0) == choice.member {
					give(u)
					keeps[i]--
				}
			}
		}
	}
	// The rest keeps nothing. First one stream of every member, then a second.
	for stream := int32(0); extra > 0; stream++ {
		for _, p := range c.pairs {
			if j := p.first + stream; j < p.end && extra > 0 && c.units[j].gets == n {
				give(&c.units[j])
			}
		}
	}
}

// deal carries out what was counted.
func (st *sticky) deal(k int) {
	c := &st.classes[k]
	if len(c.units) == 0 {
		return // all are loose, and nobody wants them
	}
	need := make([]int32, len(c.units)) // what each thread lacks
	for i, u := range c.units {
		need[i] = max(0, u.gets-u.had)
	}
	give := func(at spot, unit int32) {
		st.shares[at.topic].Owners[at.place] = st.threads[c.units[unit].thread]
		need[unit]--
	}
	pool := c.loose
	for _, x := range append(c.strays, st.surplus(c)...) {
		// Another stream of the same member is the next best.
		p := c.pairs[x.pair]
		i := p.first
		for i < p.end && need[i] == 0 {
			i++
		}
		if i < p.end {
			give(x.spot, i)
		} else {
			pool = append(pool, x.spot)
		}
	}
	slices.SortFunc(pool, func(a, b spot) int {
		if a.topic != b.topic {
			return int(a.topic - b.topic)
		}
		return int(a.place - b.place)
	})
	var takers []int32
	for i := range need {
		if need[i] > 0 {
			takers = append(takers, int32(i))
		}
	}
	for len(pool) > 0 {
		rest := takers[:0]
		for _, i := range takers {
			give(pool[0], i)
			pool = pool[1:]
			if need[i] > 0 {
				rest = append(rest, i)
			}
		}
		takers = rest
	}
}

// surplus takes from threads what they have too much, first of the topics that they
// have most of.
func (st *sticky) surplus(c *stickyClass) []stray {
	first := make([]int32, len(c.units)+1) // where each thread's list begins
	pairs := make([]int32, 0, len(c.units))
	total := int32(0)
	for x, p := range c.pairs {
		for i := p.first; i < p.end; i++ {
			pairs = append(pairs, int32(x))
			if u := c.units[i]; u.had > u.gets {
				total += u.had
			}
			first[i+1] = total
		}
	}
	if total == 0 {
		return nil
	}
	unitOf := make([]int32, len(st.threads))
	for i, u := range c.units {
		unitOf[u.thread] = int32(i)
	}
	lists := make([]spot, total)
	fill := slices.Clone(first)
	for _, t := range c.topics {
		for place, owner := range st.shares[t].Owners {
			if owner == Nobody {
				continue
			}
			i := unitOf[st.first[owner.Member]+owner.Stream]
			if first[i+1] > first[i] {
				lists[fill[i]] = spot{t, int32(place)}
				fill[i]++
			}
		}
	}
	var out []stray
	for i, u := range c.units {
		if u.had <= u.gets {
			continue
		}
		for _, at := range tallest(lists[first[i]:first[i+1]], int(u.had-u.gets)) {
			st.shares[at.topic].Owners[at.place] = Nobody
			out = append(out, stray{at, pairs[i]})
		}
	}
	return out
}

// tallest picks n of a thread's partitions, which are by topic and number, each
// time the last one of the topic that has most left.
func tallest(list []spot, n int) []spot {
	height := make([]int32, len(list)) // of the partition in the pile of its topic
	for i := range list {
		if i > 0 && list[i].topic == list[i-1].topic {
			height[i] = height[i-1] + 1
		}
	}
	order := make([]int32, len(list))
	for i := range order {
		order[i] = int32(i)
	}
	slices.SortFunc(order, func(a, b int32) int {
		if height[a] != height[b] {
			return int(height[b] - height[a])
		}
		return int(b - a)
	})
	picked := make([]spot, n)
	for i := range picked {
		picked[i] = list[order[i]]
	}
	return picked
}
