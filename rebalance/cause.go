package rebalance

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/muster-io/muster/registry"
)

// Bounds of a reason: whoever reads it wants to know what happened, not all of it.
const (
	maxReason = 240 // bytes
	maxName   = 64  // bytes of one name in it
	maxNames  = 2   // names in a list, before it says how many more
)

// Cause tells, for people, what is different between two snapshots of a group, what
// matters most first. It is empty if nothing is that could move a partition.
func Cause(before, after Snapshot) string {
	var list []string
	was, is := Agree(before.Members), Agree(after.Members)
	if was != is && len(before.Members) > 0 && len(after.Members) > 0 {
		list = append(list, "strategy changed to "+is)
	}
	list = append(list, membersCause(before.Members, after.Members)...)
	list = append(list, topicsCause(before, after)...)
	if len(list) == 0 && (&before).record() != (&after).record() && is == StrategySticky {
		list = append(list, "target was written anew")
	}
	return bounded(list)
}

func membersCause(before, after []MemberInfo) []string {
	left, joined, other := memberChanges(before, after)
	return append(append(sentence("member", left, "left"), sentence("member", joined, "joined")...),
		sentence("member", other, "changed its subscription", "changed their subscriptions")...)
}

// memberChanges are the ids of those who left, joined, or ask for something else.
func memberChanges(before, after []MemberInfo) (left, joined, other []string) {
	before, after = byID(before), byID(after)
	for len(before) > 0 || len(after) > 0 {
		switch {
		case len(after) == 0 || len(before) > 0 && before[0].ID < after[0].ID:
			left = append(left, before[0].ID)
			before = before[1:]
		case len(before) == 0 || after[0].ID < before[0].ID:
			joined = append(joined, after[0].ID)
			after = after[1:]
		default:
			if !sameMember(before[0], after[0]) {
				other = append(other, after[0].ID)
			}
			before, after = before[1:], after[1:]
		}
	}
	return left, joined, other
}

func topicsCause(before, after Snapshot) []string {
	if sameMap(before.Topology, after.Topology) && sameMap(before.Incarnations, after.Incarnations) {
		return nil
	}
	var deleted, created, again, resized, placed []string
	for topic, is := range after.Topology {
		was, there := before.Topology[topic]
		switch {
		case !there && (after.Incarnations[topic] > before.Revision || subscribed(before.Members, topic)):
			created = append(created, topic)
		case !there:
			// It was there, and nobody asked for it: the members say why it is here.
		case before.Incarnations[topic] != after.Incarnations[topic]:
			again = append(again, topic)
		case len(was) != len(is):
			resized = append(resized, fmt.Sprintf("topic %s has %d partitions, had %d", name(topic), len(is), len(was)))
		case !slices.Equal(was, is):
			placed = append(placed, topic)
		}
	}
	for topic := range before.Topology {
		if _, still := after.Topology[topic]; !still && stillAsked(before.Members, after.Members, topic) {
			deleted = append(deleted, topic)
		}
	}
	for _, l := range [][]string{deleted, created, again, resized, placed} {
		slices.Sort(l)
	}
	list := slices.Concat(
		sentence("topic", deleted, "was deleted", "were deleted"),
		sentence("topic", created, "was created", "were created"),
		sentence("topic", again, "was deleted and created again", "were deleted and created again"))
	if len(resized) > maxNames {
		more := len(resized) - maxNames
		resized = append(resized[:maxNames:maxNames], fmt.Sprintf("%d more topics have other partitions", more))
	}
	return slices.Concat(list, resized, sentence("topic", placed, "has other partitions", "have other partitions"))
}

// sameMember tells whether a member asks for the same as before: a filter that
// stands as it was does, though it allows others when topics come and go.
func sameMember(a, b MemberInfo) bool {
	if !slices.Equal(a.Strategies, b.Strategies) || a.Filter != b.Filter {
		return false
	}
	return a.Filter != "" || sameMap(a.Subscription, b.Subscription) || maps.Equal(a.Subscription, b.Subscription)
}

func subscribed(members []MemberInfo, topic string) bool {
	return slices.ContainsFunc(members, func(m MemberInfo) bool { return m.Subscription[topic] > 0 })
}

// stillAsked tells of a topic that was there whether it is gone, and not only asked
// for by nobody any more.
func stillAsked(before, after []MemberInfo, topic string) bool {
	return subscribed(after, topic) || slices.ContainsFunc(before, func(m MemberInfo) bool {
		return m.Filter != "" && m.Subscription[topic] > 0 &&
			slices.ContainsFunc(after, func(x MemberInfo) bool { return x.ID == m.ID && x.Filter == m.Filter })
	})
}

// sameMap tells of two maps that nobody changes that they are one, without looking
// into them.
func sameMap[M ~map[K]V, K comparable, V any](a, b M) bool {
	return len(a) == len(b) && reflect.ValueOf(a).UnsafePointer() == reflect.ValueOf(b).UnsafePointer()
}

// differs tells whether two snapshots differ in their target record, and whether in
// anything else that matters to the member.
func (s *Snapshot) differs(t *Snapshot) (target, rest bool) {
	same := s.Registered == t.Registered && sameMembers(s.Members, t.Members) &&
		(sameMap(s.Topology, t.Topology) || maps.EqualFunc(s.Topology, t.Topology, slices.Equal[[]registry.Partition])) &&
		(sameMap(s.Incarnations, t.Incarnations) || maps.Equal(s.Incarnations, t.Incarnations))
	return s.record() != t.record(), !same
}

func sameMembers(a, b []MemberInfo) bool {
	if len(a) == len(b) && len(a) > 0 && &a[0] == &b[0] {
		return true
	}
	return slices.EqualFunc(a, b, func(x, y MemberInfo) bool {
		return x.ID == y.ID && slices.Equal(x.Strategies, y.Strategies) &&
			(sameMap(x.Subscription, y.Subscription) || maps.Equal(x.Subscription, y.Subscription))
	})
}

// sentence says of a list of names what became of them; with verb for one, and
// verbs for several, if that differs.
func sentence(kind string, names []string, verb string, verbs ...string) []string {
	if len(names) == 0 {
		return nil
	}
	if len(names) == 1 {
		return []string{kind + " " + name(names[0]) + " " + verb}
	}
	for _, other := range verbs {
		verb = other
	}
	text := kind + "s "
	switch shown := min(len(names), maxNames); {
	case len(names) == shown:
		text += name(names[0]) + " and " + name(names[1])
	default:
		for i, n := range names[:shown] {
			if i > 0 {
				text += ", "
			}
			text += name(n)
		}
		text += fmt.Sprintf(" and %d more", len(names)-shown)
	}
	return []string{text + " " + verb}
}

// name spells a name of any shape within bounds.
func name(n string) string {
	if strings.ContainsFunc(n, func(r rune) bool { return r < ' ' || r == utf8.RuneError || r == 0x7f }) {
		n = fmt.Sprintf("%q", n)
	}
	if len(n) <= maxName {
		return n
	}
	cut := maxName - len("…")
	for !utf8.RuneStart(n[cut]) {
		cut--
	}
	return n[:cut] + "…"
}

// bounded joins what fits into one reason, and says how much did not.
func bounded(list []string) string {
	var b strings.Builder
	for i, text := range list {
		more := fmt.Sprintf("; and %d more", len(list)-i)
		if i > 0 && b.Len()+len("; ")+len(text)+len(more) > maxReason {
			b.WriteString(more)
			break
		}
		if i > 0 {
			b.WriteString("; ")
		}
		b.WriteString(text)
	}
	return b.String()
}
