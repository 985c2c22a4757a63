package broker

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/google/uuid"

	"github.com/muster-io/muster/broker/api"
	"github.com/muster-io/muster/registry"
)

// catalog is what the registry says of brokers and topics. It takes in events, so
// that a change costs what it is about and not what is there besides. It does no
// I/O.
type catalog struct {
	root      registry.Root
	brokers   map[int32]liveBroker
	topics    map[string]*topicEntry
	deletions map[string]registry.KV // the markers
}

type liveBroker struct {
	api.Broker
	lease registry.LeaseID
}

// topicEntry is what stands about one topic.
type topicEntry struct {
	// record is the last one that could be read. One that cannot be is no deletion:
	// unreadable says that such a one is there.
	record     *registry.TopicRecord
	created    int64 // its create-revision
	unreadable bool
	unnamed    bool // it has no id in the registry; record.TopicID is what it was
	states     map[int32]registry.PartitionState
	config     map[string]string
}

func newCatalog(root registry.Root) *catalog {
	return &catalog{root: root, brokers: map[int32]liveBroker{}, topics: map[string]*topicEntry{}, deletions: map[string]registry.KV{}}
}

// catalogChange is what some events have changed.
type catalogChange struct {
	brokers   bool
	topics    map[string]bool
	deletions map[string]bool
	// condemned are topics by id whose deletion was asked for, now or meanwhile: what
	// is on disk of them need not be kept.
	condemned map[uuid.UUID]bool
	bad       []error
}

func (c *catalog) apply(events []registry.Event) catalogChange {
	ch := catalogChange{topics: map[string]bool{}, deletions: map[string]bool{}, condemned: map[uuid.UUID]bool{}}
	for i := range events {
		e := &events[i]
		err := c.key(e, &ch)
		if err != nil {
			ch.bad = append(ch.bad, err)
		}
	}
	return ch
}

func (c *catalog) key(e *registry.Event, ch *catalogChange) error {
	at := c.root.Locate(e.Key)
	if at.Problem != nil {
		if e.Deleted {
			return nil
		}
		return at.Problem
	}
	switch at.Kind {
	case registry.KindBroker:
		return c.brokerKey(at.Broker, e, ch)
	case registry.KindTopic:
		return c.recordKey(at.Topic, e, ch)
	case registry.KindState:
		return c.stateKey(at.Topic, at.Partition.Number, e, ch)
	case registry.KindTopicConfig:
		return c.configKey(at.Topic, e, ch)
	case registry.KindDeletion:
		return c.deletionKey(at.Topic, e, ch)
	}
	return nil
}

func (c *catalog) brokerKey(id int32, e *registry.Event, ch *catalogChange) error {
	ch.brokers = true
	if e.Deleted {
		delete(c.brokers, id)
		return nil
	}
	_, rec, err := c.root.ParseBroker(e.KV)
	if err != nil {
		return err
	}
	c.brokers[id] = liveBroker{Broker: api.Broker{ID: id, Host: rec.Host, Port: rec.Port}, lease: e.Lease}
	return nil
}

// entry is that of a topic, made if there is none.
func (c *catalog) entry(name string, ch *catalogChange) *topicEntry {
	ch.topics[name] = true
	t := c.topics[name]
	if t == nil {
		t = &topicEntry{states: map[int32]registry.PartitionState{}}
		c.topics[name] = t
	}
	return t
}

// forget drops an entry that says nothing any more.
func (c *catalog) forget(name string) {
	if t := c.topics[name]; t.record == nil && !t.unreadable && len(t.states) == 0 && t.config == nil {
		delete(c.topics, name)
	}
}

func (c *catalog) recordKey(name string, e *registry.Event, ch *catalogChange) error {
	t := c.entry(name, ch)
	defer c.forget(name)
	if e.Deleted {
		t.record, t.unreadable, t.unnamed = nil, false, false
		return nil
	}
	_, rec, _, err := c.root.ParseTopic(e.KV)
	t.unreadable = err != nil
	if err != nil {
		return err
	}
	t.unnamed = rec.TopicID == ""
	if t.unnamed && t.record != nil && t.created == e.CreateRevision {
		// A tool of 0.8.2 has written it anew and dropped the id. It is the same topic.
		rec.TopicID = t.record.TopicID
	}
	t.record, t.created = &rec, e.CreateRevision
	if rec.TopicID != "" && rec.ID() == uuid.Nil {
		return fmt.Errorf("topic record %s: %w: topic_id %q is no UUID", e.Key, registry.ErrRecord, rec.TopicID)
	}
	return nil
}

func (c *catalog) stateKey(name string, n int32, e *registry.Event, ch *catalogChange) error {
	t := c.entry(name, ch)
	defer c.forget(name)
	if e.Deleted {
		delete(t.states, n)
		return nil
	}
	_, _, state, _, err := c.root.ParsePartitionState(e.KV)
	if err != nil {
		return err // the last one that could be read stays
	}
	t.states[n] = state
	return nil
}

func (c *catalog) configKey(name string, e *registry.Event, ch *catalogChange) error {
	t := c.entry(name, ch)
	defer c.forget(name)
	if e.Deleted {
		t.config = nil
		return nil
	}
	rec, err := registry.ParseTopicConfig(e.KV)
	if err != nil {
		return err
	}
	t.config = rec.Config
	return nil
}

func (c *catalog) deletionKey(name string, e *registry.Event, ch *catalogChange) error {
	_, rec, err := c.root.ParseDeletion(e.KV)
	if name == "" {
		return err
	}
	ch.deletions[name] = true
	if e.Deleted {
		delete(c.deletions, name)
		return nil
	}
	c.deletions[name] = e.KV
	if id, errID := uuid.Parse(rec.TopicID); err == nil && errID == nil {
		ch.condemned[id] = true
	}
	return err
}

// list is the live brokers by id.
func (c *catalog) list() []api.Broker {
	list := make([]api.Broker, 0, len(c.brokers))
	for _, b := range c.brokers {
		list = append(list, b.Broker)
	}
	slices.SortFunc(list, func(a, b api.Broker) int { return cmp.Compare(a.ID, b.ID) })
	return list
}

// topic is the topic as clients are told of it; of one without a log they are not. A
// partition without a state has
// the one that it was created with.
func (c *catalog) topic(name string) (api.Topic, bool) {
	t := c.topics[name]
	if t == nil || t.record == nil || t.record.NoLog {
		return api.Topic{}, false
	}
	topic := api.Topic{Name: name, ID: t.record.ID(), Internal: registry.InternalTopic(name),
		Partitions: make([]api.PartitionInfo, 0, len(t.record.Partitions))}
	for number, replicas := range t.record.Partitions {
		state, ok := t.states[number]
		if !ok {
			state = registry.InitialState(replicas)
		}
		topic.Partitions = append(topic.Partitions, api.PartitionInfo{Number: number, Leader: state.Leader,
			LeaderEpoch: state.LeaderEpoch, Replicas: replicas, ISR: state.ISR})
	}
	slices.SortFunc(topic.Partitions, func(a, b api.PartitionInfo) int { return cmp.Compare(a.Number, b.Number) })
	return topic, true
}

// count is how many partitions of a topic have a replica on a broker, and the
// create-revision of the record that says so.
func (c *catalog) count(name string, broker int32) (n int32, created int64) {
	t := c.topics[name]
	if t == nil || t.record == nil || t.record.NoLog {
		return 0, 0
	}
	for _, replicas := range t.record.Partitions {
		if slices.Contains(replicas, broker) {
			n++
		}
	}
	return n, t.created
}

// belongs tells whether the registry has the partition of the topic with that id;
// unsure if it has something under the name that does not say.
func (c *catalog) belongs(name string, number int32, id uuid.UUID) (yes, unsure bool) {
	t := c.topics[name]
	switch {
	case t == nil || t.record == nil:
		return false, t != nil && t.unreadable
	case t.record.ID() == uuid.Nil:
		return false, true
	}
	_, there := t.record.Partitions[number]
	return there && t.record.ID() == id, false
}

// logSettings is what a topic's own settings say about its logs; 0 is unset.
type logSettings struct{ segmentBytes, indexInterval, maxBatch int64 }

// minBatchBytes is what a batch of one empty record has at least.
const minBatchBytes = 61

// settings reads those that are honoured. A value that is larger or smaller than a
// log can do is as near to it as can be; one that cannot be read is left out.
func (t *topicEntry) settings() (s logSettings, err error) {
	var bad []error
	read := func(name string, least, most int64) int64 {
		text, set := t.config[name]
		if !set {
			return 0
		}
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil || n < 0 {
			bad = append(bad, fmt.Errorf("%w: %s is %q", registry.ErrRecord, name, text))
			return 0
		}
		return min(max(n, least), most)
	}
	s.segmentBytes = read("segment.bytes", minSegmentBytes, maxSegmentBytes)
	s.indexInterval = read("index.interval.bytes", 1, maxSegmentBytes)
	s.maxBatch = read("max.message.bytes", minBatchBytes, maxSegmentBytes)
	return s, errors.Join(bad...)
}
