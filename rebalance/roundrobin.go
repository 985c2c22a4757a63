package rebalance

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
)

// ErrNotUniform refuses roundrobin to a group in which not all members subscribe to
// the same topics, each with one number of streams for all of them.
var ErrNotUniform = errors.New("roundrobin needs members that all subscribe to the same topics, each with one number of streams for all of them")

// assignRoundRobin is the rule of 0.8.2: the partitions of all topics, in the order
// of the hashes of their names, go to the sorted threads in turn. It needs every
// thread to be one of every topic; then all topics that exist are of one class.
// Partitions of equal hash, which 0.8.2 left in any order, are by topic and number.
func assignRoundRobin(s Snapshot) (*Assignment, error) {
	l := newLineup(s)
	if err := l.uniform(); err != nil {
		return nil, err
	}
	type entry struct{ hash, topic, place int32 }
	var all []entry
	var threads []Thread
	for _, class := range l.classes {
		cg := l.sortedThreads(class)
		if len(cg) > 0 {
			threads = cg
		}
		for _, t := range class.topics {
			list := l.shares[t].Partitions
			l.shares[t].Owners = nobody(len(list))
			if len(cg) == 0 {
				continue
			}
			prefix := javaHash(0, "["+l.topics[t]+",")
			for i, p := range list {
				all = append(all, entry{javaHash(prefix, strconv.Itoa(int(p.Number))+"]"), t, int32(i)})
			}
		}
	}
	slices.SortFunc(all, func(a, b entry) int {
		return cmp.Or(cmp.Compare(a.hash, b.hash), cmp.Compare(a.topic, b.topic), cmp.Compare(a.place, b.place))
	})
	for i, e := range all {
		l.shares[e.topic].Owners[e.place] = threads[i%len(threads)]
	}
	return l.assignment(StrategyRoundRobin), nil
}

// uniform says which members differ, and in what, for the first few. Members that
// subscribe to nothing are no matter, and topics that do not exist count: as in 0.8.2.
func (l *lineup) uniform() error {
	var usual *subscription // what most members have
	for i := range l.subs {
		sub := &l.subs[i]
		if len(sub.streams) > 0 && (usual == nil || len(sub.members) > len(usual.members)) {
			usual = sub
		}
	}
	var found []string
	for _, sub := range l.subs {
		if len(sub.streams) == 0 {
			continue
		}
		if text := topicsApart(sub.streams, usual.streams); text != "" {
			found = append(found, l.names(sub)+text+", unlike "+l.names(*usual))
		}
		if text := streamsApart(sub.streams); text != "" {
			found = append(found, l.names(sub)+text)
		}
	}
	if len(found) == 0 {
		return nil
	}
	const most = 3 // people read it
	if len(found) > most {
		found = append(found[:most], "and others")
	}
	return fmt.Errorf("%w: %s", ErrNotUniform, strings.Join(found, "; "))
}

func (l *lineup) names(sub subscription) string {
	ids := make([]string, len(sub.members))
	for i, m := range sub.members {
		ids[i] = l.ids[m]
	}
	return some(ids)
}

// topicsApart says what a subscription lacks of the usual one, and what it has besides.
func topicsApart(streams, usual map[string]int32) (text string) {
	if topics := missing(usual, streams); len(topics) > 0 {
		text += " without " + some(topics)
	}
	if topics := missing(streams, usual); len(topics) > 0 {
		text += " with " + some(topics) + " besides"
	}
	return text
}

func missing(of, in map[string]int32) []string {
	var topics []string
	for _, topic := range slices.Sorted(maps.Keys(of)) {
		if _, found := in[topic]; !found {
			topics = append(topics, topic)
		}
	}
	return topics
}

// streamsApart says where a member has not one number of streams.
func streamsApart(streams map[string]int32) string {
	topics := slices.Sorted(maps.Keys(streams))
	for _, topic := range topics {
		if a, b := streams[topics[0]], streams[topic]; a != b {
			return fmt.Sprintf(" with streams %d of %s, but %d of %s", a, topics[0], b, topic)
		}
	}
	return ""
}

// some lists the first few of what is named in an error.
func some(list []string) string {
	const most = 3
	if len(list) > most {
		return strings.Join(list[:most], ", ") + " and " + strconv.Itoa(len(list)-most) + " more"
	}
	return strings.Join(list, ", ")
}

// javaHash goes on with a String.hashCode, which is over UTF-16 code units.
func javaHash(h int32, s string) int32 {
	if ascii(s) {
		for i := range len(s) {
			h = 31*h + int32(s[i])
		}
		return h
	}
	for _, unit := range utf16.Encode([]rune(s)) {
		h = 31*h + int32(unit)
	}
	return h
}
