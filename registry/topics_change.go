package registry

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/google/uuid"
)

// Errors of changes to a topic that callers branch on.
var (
	ErrNoTopic         = errors.New("no such topic")
	ErrFewerPartitions = errors.New("the number of partitions can only grow")
)

// AddPartitions makes a topic have total partitions, the new ones placed on the
// given live brokers by PlaceMore, or nowhere if the topic has no log. Those that are there keep their replicas and
// homes. The record is changed by compare-and-swap; states that do not fit the
// same transaction follow it, as with CreateTopic.
func AddPartitions(ctx context.Context, st Store, root Root, topic string, total int32, liveBrokers []int32) (TopicRecord, error) {
	fail := func(err error) (TopicRecord, error) {
		return TopicRecord{}, fmt.Errorf("add partitions to topic %s: %w", clip([]byte(topic)), err)
	}
	if total < 1 || total > MaxPartitions {
		return fail(fmt.Errorf("%w, not %d", ErrPartitions, total))
	}
	for {
		kv, rec, err := readTopic(ctx, st, root, topic)
		if err != nil {
			return fail(err)
		}
		from := int32(len(rec.Partitions))
		if err := rec.extend(topic, total, liveBrokers); err != nil {
			return fail(err)
		}
		states, err := stateOps(root, topic, rec, from)
		if err != nil {
			return fail(err)
		}
		n := min(len(states), MaxNested-1)
		revision, err := swapTopic(ctx, st, root, kv, rec, states[:n])
		if err != nil {
			return fail(err)
		}
		if revision == 0 {
			continue
		}
		if err := writeStates(ctx, st, root, topic, incarnation{kv.CreateRevision, revision}, states[n:]); err != nil {
			return fail(err)
		}
		return rec, nil
	}
}

// extend adds partitions until there are total. They are copied first: others may
// hold the maps.
func (t *TopicRecord) extend(topic string, total int32, brokers []int32) error {
	from := int32(len(t.Partitions))
	switch {
	case total <= from:
		return fmt.Errorf("%w: it has %d, and %d were asked for", ErrFewerPartitions, from, total)
	case len(brokers) == 0 && !t.NoLog:
		return ErrNoBroker
	}
	home := make(map[int32]int32, total)
	for i, p := range t.List(topic) {
		if p.Number != int32(i) {
			return fmt.Errorf("%w: there is no partition %d among its %d", ErrRecord, i, from)
		}
		home[p.Number] = p.Home
	}
	placed := make(map[int32][]int32, total)
	maps.Copy(placed, t.Partitions)
	if t.NoLog {
		for p := from; p < total; p++ {
			placed[p], home[p] = []int32{}, 0
		}
	} else {
		for p, replicas := range PlaceMore(topic, t.Partitions, total, brokers) {
			placed[p], home[p] = replicas, replicas[0]
		}
	}
	t.Partitions, t.Home = placed, home
	return nil
}

// readTopic reads the record of a topic, which must be there.
func readTopic(ctx context.Context, st Store, root Root, topic string) (KV, TopicRecord, error) {
	kv, _, err := GetKey(ctx, st, root.Topic(topic))
	if err != nil {
		return KV{}, TopicRecord{}, err
	}
	if kv == nil {
		return KV{}, TopicRecord{}, ErrNoTopic
	}
	_, rec, _, err := root.ParseTopic(*kv)
	return *kv, rec, err
}

// swapTopic replaces the record read as kv, and runs more with it. Revision is 0
// if it has changed meanwhile.
func swapTopic(ctx context.Context, st Store, root Root, kv KV, rec TopicRecord, more []Op) (revision int64, err error) {
	value, err := Encode(rec)
	if err != nil {
		return 0, err
	}
	res, err := st.Txn(ctx, Txn{If: []Cond{ModifiedAt(kv.Key, kv.ModRevision)}, Then: append([]Op{Put(kv.Key, value, 0)}, more...)})
	if err != nil || !res.Succeeded {
		return 0, err
	}
	return res.Revision, nil
}

// AdoptTopic gives a topic without an id one: the given one, or if that is empty a
// new one. Records that 0.8.2 or a person wrote have none, and a log on disk must
// know whose it is. A topic that has an id, or is gone, is left alone, and not adopted.
func AdoptTopic(ctx context.Context, st Store, root Root, topic, id string) (adopted bool, err error) {
	if id == "" {
		id = uuid.NewString()
	}
	for {
		kv, rec, err := readTopic(ctx, st, root, topic)
		if errors.Is(err, ErrNoTopic) || err == nil && rec.TopicID != "" {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("adopt topic %s: %w", clip([]byte(topic)), err)
		}
		rec.TopicID = id
		revision, err := swapTopic(ctx, st, root, kv, rec, nil)
		if err != nil {
			return false, fmt.Errorf("adopt topic %s: %w", clip([]byte(topic)), err)
		}
		if revision != 0 {
			return true, nil
		}
	}
}

// AlterTopicConfig sets and removes settings of a topic by compare-and-swap, and
// returns all that it then has. A setting that is to be removed must be there.
func AlterTopicConfig(ctx context.Context, st Store, root Root, topic string, set map[string]string, remove []string) (map[string]string, error) {
	fail := func(err error) (map[string]string, error) {
		return nil, fmt.Errorf("alter topic %s: %w", clip([]byte(topic)), err)
	}
	if err := ValidateTopicConfig(set); err != nil {
		return fail(err)
	}
	for {
		key := root.TopicConfig(topic)
		res, err := st.Txn(ctx, Txn{Then: []Op{Get(root.Topic(topic)), Get(key)}})
		if err != nil {
			return fail(err)
		}
		if len(res.Items[0].KVs) == 0 {
			return fail(ErrNoTopic)
		}
		if _, topicRec, _, err := root.ParseTopic(res.Items[0].KVs[0]); err == nil && topicRec.NoLog {
			return fail(fmt.Errorf("%w: the topic has no log for settings to be about", ErrTopicConfig))
		}
		before := KV{Key: key}
		rec := TopicConfig{Config: map[string]string{}}
		if kvs := res.Items[1].KVs; len(kvs) > 0 {
			before = kvs[0]
			if rec, err = ParseTopicConfig(before); err != nil {
				return fail(err)
			}
		}
		config := maps.Clone(rec.Config)
		if config == nil {
			config = map[string]string{}
		}
		for _, name := range remove {
			if _, there := config[name]; !there {
				return fail(fmt.Errorf("%w %q: it is not set", ErrTopicConfig, name))
			}
			delete(config, name)
		}
		maps.Copy(config, set)
		value, err := Encode(TopicConfig{Version: 1, Config: config})
		if err != nil {
			return fail(err)
		}
		res, err = st.Txn(ctx, Txn{
			If:   []Cond{CreatedAt(root.Topic(topic), res.Items[0].KVs[0].CreateRevision), ModifiedAt(key, before.ModRevision)},
			Then: []Op{Put(key, value, 0)},
		})
		if err != nil {
			return fail(err)
		}
		if res.Succeeded {
			return config, nil
		}
	}
}

// UnhonouredConfig names, in order, those of the settings that are stored and that
// no daemon acts on yet.
func UnhonouredConfig(config map[string]string) []string {
	var names []string
	for _, name := range slices.Sorted(maps.Keys(config)) {
		if !topicSettings[name].honoured {
			names = append(names, name)
		}
	}
	return names
}
