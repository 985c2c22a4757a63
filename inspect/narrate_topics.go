package inspect

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/muster-io/muster/registry"
)

func (t *teller) topic() {
	name := "topic=" + shown([]byte(t.p.Topic)) + " "
	_, now, _, err := t.root.ParseTopic(t.now)
	_, was, _, errWas := t.root.ParseTopic(t.before)
	added := len(now.Partitions) - len(was.Partitions)
	switch {
	case t.e.Deleted:
		t.say("topic-deleted", "%sdeleted", name)
	case err != nil:
		t.say("topic-unreadable", "%shas a record that cannot be read", name)
	case t.created:
		without := ""
		if now.NoLog {
			without = ", without a log"
		}
		t.say("topic-created", "%screated with %d partitions%s", name, len(now.Partitions), without)
	case t.e.Previous == nil || errWas != nil:
		t.say("topic-changed", "%shas now %d partitions", name, len(now.Partitions))
	case added > 0:
		t.say("partitions-added", "%s%d partitions added: %d -> %d", name, added, len(was.Partitions), len(now.Partitions))
	default:
		t.say("topic-changed", "%shas another record, with %d partitions", name, len(now.Partitions))
	}
}

func (t *teller) state() {
	where := fmt.Sprintf("topic=%s partition=%d ", shown([]byte(t.p.Topic)), t.p.Partition.Number)
	_, _, now, _, err := t.root.ParsePartitionState(t.now)
	_, _, was, _, errWas := t.root.ParsePartitionState(t.before)
	switch {
	case t.e.Deleted:
		t.say("state-deleted", "%sstate deleted", where)
		t.line.Detail = true
	case err != nil:
		t.say("state-unreadable", "%sstate cannot be read", where)
	case t.created || t.e.Previous == nil || errWas != nil:
		t.say("state-written", "%sled by broker %d, epoch %d, in sync %v", where, now.Leader, now.LeaderEpoch, now.ISR)
		t.line.Detail = t.created
	case now.Leader != was.Leader || now.LeaderEpoch != was.LeaderEpoch:
		t.say("leader-changed", "%sleader %d -> %d, epoch %d -> %d, in sync %v", where, was.Leader, now.Leader, was.LeaderEpoch, now.LeaderEpoch, now.ISR)
	default:
		t.say("in-sync-changed", "%sin sync %v -> %v", where, was.ISR, now.ISR)
	}
}

func (t *teller) count() {
	where := fmt.Sprintf("topic=%s broker=%d ", shown([]byte(t.p.Topic)), t.p.Broker)
	if t.e.Deleted {
		t.say("count-deleted", "%sstates no partitions any more", where)
	} else {
		t.say("count-written", "%sstates %s partitions", where, shown(t.now.Value))
	}
	t.line.Detail = true
}

func (t *teller) config() {
	what := "topic=" + shown([]byte(t.p.Topic))
	if t.p.Kind == registry.KindGroupConfig {
		what = "group=" + shown([]byte(t.p.Group))
	}
	now, err := registry.ParseTopicConfig(t.now)
	var was registry.TopicConfig
	if t.e.Previous != nil && !t.created {
		was, _ = registry.ParseTopicConfig(t.before) // one that could not be read counts as none
	}
	switch {
	case t.e.Deleted:
		t.say("config-deleted", "%s settings deleted", what)
	case err != nil:
		t.say("config-unreadable", "%s has settings that cannot be read", what)
	default:
		changes := settings(was.Config, now.Config)
		t.say("config-changed", "%s settings: %s", what, changes)
		if t.line.Detail = changes == ""; t.line.Detail {
			t.say("config-changed", "%s has no settings of its own", what)
		}
	}
}

// settings tells the difference between two sets of them.
func settings(was, now map[string]string) string {
	all := maps.Clone(was)
	if all == nil {
		all = map[string]string{}
	}
	maps.Copy(all, now)
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(all)) {
		before, had := was[name]
		after, has := now[name]
		name = shown([]byte(name))
		switch {
		case !had:
			parts = append(parts, fmt.Sprintf("%s=%s", name, shown([]byte(after))))
		case !has:
			parts = append(parts, fmt.Sprintf("%s removed, was %s", name, shown([]byte(before))))
		case before != after:
			parts = append(parts, fmt.Sprintf("%s %s -> %s", name, shown([]byte(before)), shown([]byte(after))))
		}
	}
	return strings.Join(parts, "; ")
}

func (t *teller) deletion() {
	name := "topic=" + shown([]byte(t.p.Topic)) + " "
	if t.e.Deleted {
		t.say("deletion-finished", "%sdeletion finished", name)
		return
	}
	kept := ""
	if _, rec, err := t.root.ParseDeletion(t.now); err == nil && rec.KeepOffsets {
		kept = "; offsets are kept"
	}
	t.say("deletion-begun", "%sdeletion begun%s", name, kept)
}
