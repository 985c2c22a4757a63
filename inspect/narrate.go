package inspect

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// Line is one change, told. Nil fields are not part of it, or not known.
type Line struct {
	Revision       int64   `json:"revision"`
	Kind           string  `json:"kind"`
	Path           string  `json:"path"` // of the key, from the root
	Group          *string `json:"group"`
	Member         *string `json:"member"`
	Owner          *string `json:"owner"` // value of an owner key, verbatim; Member is whom it names
	Topic          *string `json:"topic"`
	Partition      *int32  `json:"partition"`
	Broker         *int32  `json:"broker"`
	Lease          *string `json:"lease"`
	Offset         *int64  `json:"offset"`
	PreviousOffset *int64  `json:"previous_offset"`
	Reason         *string `json:"reason"` // of a claim or release, where the group's history tells it
	Text           string  `json:"text"`
	// Detail is set on what would drown the rest: commits, counts, and the states
	// that come and go with their topic.
	Detail bool `json:"detail"`
}

// Kinds of Line that a reader filters by.
const (
	KindCommitted = "committed"
	KindClaimed   = "claimed"
	KindReleased  = "released"
	KindMissed    = "missed" // history was lost; what follows or came before is the difference
	KindSilent    = "registry-silent"
	KindRecovered = "registry-recovered"
)

// Narrate tells what events mean: who did what. They are whole revisions, in
// order, as a View gives them. there tells whether a key is there after them.
func Narrate(root registry.Root, events []registry.Event, there func(key string) bool) []Line {
	gone := map[string]bool{}
	for _, e := range events {
		if e.Deleted {
			gone[e.Key] = true
		}
	}
	var lines []Line
	for len(events) > 0 {
		n := slices.IndexFunc(events, func(e registry.Event) bool { return e.ModRevision != events[0].ModRevision })
		if n < 0 {
			n = len(events)
		}
		ended := sessionsEnded(root, events[:n])
		for _, e := range events[:n] {
			t := teller{root: root, e: e, p: root.Locate(e.Key)}
			t.registered = func(id string) bool { key := root.Group(t.p.Group).ID(id); return there(key) || gone[key] }
			t.created = !e.Deleted && (e.Previous == nil && e.CreateRevision == e.ModRevision ||
				e.Previous != nil && e.Previous.CreateRevision != e.CreateRevision)
			t.before, t.now = e.KV, e.KV
			if e.Previous != nil {
				t.before = *e.Previous
			}
			t.ended = ended[t.before.Lease]
			lines = append(lines, t.tell())
		}
		events = events[n:]
	}
	return lines
}

// sessionsEnded returns the leases of which a registration and other keys vanished
// in one revision. A process that leaves in order deletes the others before.
func sessionsEnded(root registry.Root, events []registry.Event) map[registry.LeaseID]bool {
	keys, registered := map[registry.LeaseID]int{}, map[registry.LeaseID]bool{}
	for _, e := range events {
		if !e.Deleted || e.Previous == nil || e.Previous.Lease == 0 {
			continue
		}
		keys[e.Previous.Lease]++
		if k := root.Locate(e.Key).Kind; k == registry.KindMember || k == registry.KindBroker {
			registered[e.Previous.Lease] = true
		}
	}
	maps.DeleteFunc(registered, func(l registry.LeaseID, _ bool) bool { return keys[l] < 2 })
	return registered
}

type teller struct {
	root        registry.Root
	e           registry.Event
	p           registry.Location
	created     bool
	ended       bool                 // the key went with its session
	registered  func(id string) bool // now, or until a moment ago
	before, now registry.KV
	line        Line
}

func (t *teller) tell() Line {
	f := newFinding("", t.p, "")
	t.line = Line{Revision: t.e.ModRevision, Path: t.p.Path, Group: f.Group, Member: f.Member, Topic: f.Topic,
		Partition: f.Partition, Broker: f.Broker}
	if lease := t.now.Lease; lease != 0 {
		t.setLease(lease)
	} else if t.e.Deleted && t.before.Lease != 0 {
		t.setLease(t.before.Lease)
	}
	if t.p.Problem != nil {
		t.raw()
		return t.line
	}
	switch t.p.Kind {
	case registry.KindMember:
		t.member()
	case registry.KindOwner:
		t.owner()
	case registry.KindOffset:
		t.offset()
	case registry.KindBroker:
		t.broker()
	case registry.KindTopic:
		t.topic()
	case registry.KindState:
		t.state()
	case registry.KindCount:
		t.count()
	case registry.KindTopicConfig, registry.KindGroupConfig:
		t.config()
	case registry.KindDeletion:
		t.deletion()
	case registry.KindTarget:
		t.target()
	case registry.KindHistory:
		t.history()
	default:
		t.raw()
	}
	return t.line
}

func (t *teller) setLease(id registry.LeaseID) {
	text := registry.LeaseText(id)
	t.line.Lease = &text
}

func (t *teller) say(kind, format string, args ...any) {
	t.line.Kind, t.line.Text = kind, fmt.Sprintf(format, args...)
}

// lease is how a text ends that speaks of a key with a lease.
func (t *teller) lease() string {
	if t.line.Lease == nil {
		return " without a lease"
	}
	return " (lease " + *t.line.Lease + ")"
}

// raw tells of a key whose meaning is not known, or whose value cannot be read.
func (t *teller) raw() {
	switch {
	case t.e.Deleted:
		t.say("deleted", "%s deleted", t.p.Path)
	case t.created:
		t.say("created", "%s = %s", t.p.Path, shown(t.now.Value))
	default:
		t.say("changed", "%s = %s", t.p.Path, shown(t.now.Value))
	}
}

// shown keeps foreign bytes from a terminal, and long values from the line.
func shown(value []byte) string {
	const most = 200
	text := string(value)
	if !utf8.ValidString(text) || strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		text = strconv.Quote(text)
	}
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "…"
	}
	return text
}

func (t *teller) member() {
	who := fmt.Sprintf("group=%s member=%s ", t.p.Group, shown([]byte(t.p.Member)))
	rec, err := registry.ParseConsumer(t.now)
	switch {
	case t.e.Deleted && t.ended:
		t.say("session-ended", "%slost: its session ended, lease %s expired or was revoked", who, *t.line.Lease)
	case t.e.Deleted:
		t.say("left", "%sleft%s", who, t.lease())
	case err != nil:
		t.say("member-unreadable", "%swrote a registration that cannot be read%s", who, t.lease())
	case t.created:
		t.say("joined", "%sjoined%s: %s", who, t.lease(), subscription(rec))
	default:
		t.say("registration-changed", "%schanged its registration%s: %s", who, t.lease(), subscription(rec))
	}
}

func subscription(rec registry.ConsumerRecord) string {
	var parts []string
	for _, topic := range slices.Sorted(maps.Keys(rec.Subscription)) {
		parts = append(parts, fmt.Sprintf("%s, streams %d", shown([]byte(topic)), rec.Subscription[topic]))
	}
	if rec.Pattern != registry.PatternStatic {
		parts = append(parts, "pattern "+shown([]byte(rec.Pattern)))
	}
	return strings.Join(parts, "; ")
}

// partition is how an owner or offset begins.
func (t *teller) partition() string {
	return fmt.Sprintf("group=%s topic=%s partition=%s ", t.p.Group, shown([]byte(t.p.Topic)), t.p.Partition.Name())
}

func (t *teller) owner() {
	value := string(t.now.Value)
	if t.e.Deleted {
		value = string(t.before.Value)
	}
	t.line.Owner = &value
	if id, _, ok := rebalance.ParseThread(value, t.registered); ok {
		t.line.Member = &id
	}
	owner := shown([]byte(value))
	where := t.partition()
	switch {
	case t.e.Deleted && t.ended:
		t.say("lost", "%slost by %s: its session ended", where, owner)
	case t.e.Deleted:
		t.say(KindReleased, "%sreleased by %s", where, owner)
	case t.created && t.e.Previous == nil:
		t.say(KindClaimed, "%sclaimed by %s%s", where, owner, t.lease())
	case t.created:
		t.say(KindClaimed, "%sclaimed by %s%s; it was owned by %s", where, owner, t.lease(), shown(t.before.Value))
	default:
		t.say("owner-rewritten", "%sowner key rewritten: %s%s, was %s", where, owner, t.lease(), shown(t.before.Value))
	}
}

func (t *teller) offset() {
	where := t.partition()
	var was, now *int64
	if n, err := registry.ParseOffset(t.before); err == nil && (t.e.Previous != nil) {
		was = &n
	}
	if n, err := registry.ParseOffset(t.now); err == nil && !t.e.Deleted {
		now = &n
	}
	t.line.Offset, t.line.PreviousOffset = now, was
	switch {
	case t.e.Deleted:
		t.say("offset-deleted", "%soffset %s deleted", where, shown(t.before.Value))
	case now == nil:
		t.say("offset-unreadable", "%soffset cannot be read: %s", where, shown(t.now.Value))
	case was == nil || t.created:
		t.say(KindCommitted, "%scommitted offset %d", where, *now)
	default:
		t.say(KindCommitted, "%scommitted offset %d -> %d", where, *was, *now)
	}
	t.line.Detail = t.line.Kind == KindCommitted
}

func (t *teller) target() {
	group := fmt.Sprintf("group=%s ", t.p.Group)
	target, err := rebalance.ReadTarget(t.now)
	switch {
	case t.e.Deleted:
		t.say("target-deleted", "%starget deleted", group)
	case err != nil:
		t.say("target-unreadable", "%starget cannot be read", group)
	default:
		t.say("target-written", "%sis to be divided anew: %d members, %d topics", group, len(target.Assignment.Members), len(target.Assignment.Topics))
	}
}

// history is told as detail: the claims and releases are told themselves.
func (t *teller) history() {
	group := fmt.Sprintf("group=%s ", t.p.Group)
	rec, err := registry.ParseHistory(t.now)
	switch {
	case t.e.Deleted:
		t.say("history-deleted", "%sentry of history deleted", group)
	case err != nil:
		t.say("history-unreadable", "%sentry of history cannot be read", group)
	default:
		t.line.Member = &rec.Member
		n := 0
		for _, names := range rec.Partitions {
			n += len(names)
		}
		t.say("history-written", "%smember=%s %s %d partitions: %s", group, shown([]byte(rec.Member)), rec.Action, n, shown([]byte(rec.Reason)))
	}
	t.line.Detail = err == nil || t.e.Deleted
}

func (t *teller) broker() {
	_, rec, err := t.root.ParseBroker(t.now)
	switch {
	case t.e.Deleted:
		t.say("broker-gone", "broker=%d gone: it stopped, or its session ended%s", t.p.Broker, t.lease())
	case err != nil:
		t.say("broker-unreadable", "broker=%d has a record that cannot be read%s", t.p.Broker, t.lease())
	case t.created:
		t.say("broker-registered", "broker=%d registered at %s port %d%s", t.p.Broker, rec.Host, rec.Port, t.lease())
	default:
		t.say("broker-changed", "broker=%d is now at %s port %d%s", t.p.Broker, rec.Host, rec.Port, t.lease())
	}
}
