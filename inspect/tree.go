package inspect

import (
	"errors"
	"strconv"
	"strings"

	"github.com/muster-io/muster/registry"
)

// Tree is what stood in the registry at one revision.
type Tree struct {
	Root     registry.Root
	Revision int64
	Keys     []registry.KV
}

// treeOf gathers a View of prefixes(root).
func treeOf(root registry.Root, s registry.Snapshot) Tree {
	t := Tree{Root: root, Revision: s.Revision}
	for i := range prefixes(root) {
		t.Keys = append(t.Keys, s.Under(i)...)
	}
	return t
}

// model is a Tree read as records.
type model struct {
	root      registry.Root
	brokers   map[int32]brokerKey
	topics    map[string]*topicKeys
	groups    map[string]*groupKeys
	deletions map[string]registry.KV
	found     []Finding // what could not be read
}

type brokerKey struct {
	kv  registry.KV
	rec registry.BrokerRecord
}

type topicKeys struct {
	record *registry.KV // nil if there is none
	rec    *registry.TopicRecord
	config *registry.KV
	states map[int32]stateKey
	counts map[int32]registry.KV
	homes  map[int32]int32 // number -> home, by the record
}

type stateKey struct {
	kv  registry.KV
	rec *registry.PartitionState // nil if it cannot be read
}

type groupKeys struct {
	paths   registry.GroupPaths
	ids     []registry.KV
	members map[string]memberKey
	owners  []partitionKey
	offsets []partitionKey
}

type memberKey struct {
	kv  registry.KV
	rec *registry.ConsumerRecord // nil if it cannot be read
}

type partitionKey struct {
	kv        registry.KV
	partition registry.Partition
}

func (m *model) topic(name string) *topicKeys {
	if m.topics[name] == nil {
		m.topics[name] = &topicKeys{states: map[int32]stateKey{}, counts: map[int32]registry.KV{}, homes: map[int32]int32{}}
	}
	return m.topics[name]
}

func (m *model) group(name string) *groupKeys {
	if m.groups[name] == nil {
		m.groups[name] = &groupKeys{paths: m.root.Group(name), members: map[string]memberKey{}}
	}
	return m.groups[name]
}

// read sorts the keys by what they are about, and notes those that nobody can read.
func (t Tree) read() *model {
	m := &model{root: t.Root, brokers: map[int32]brokerKey{}, topics: map[string]*topicKeys{},
		groups: map[string]*groupKeys{}, deletions: map[string]registry.KV{}}
	for _, kv := range t.Keys {
		p := locate(t.Root, kv.Key)
		switch p.kind {
		case kindUnreadable:
			m.note(CodeUnreadableName, p, kv, p.problem)
		case kindUnknown:
			m.note(CodeUnknownKey, p, kv, "nothing that Muster writes or reads")
		case kindClusterID:
			if len(kv.Value) == 0 {
				m.unreadable(p, kv, errors.New("the cluster id is empty"))
			}
		default:
			m.take(p, kv)
		}
	}
	return m
}

func (m *model) take(p place, kv registry.KV) {
	var err error
	switch p.kind {
	case kindBroker:
		var rec registry.BrokerRecord
		if _, rec, err = m.root.ParseBroker(kv); err != nil {
			rec = registry.BrokerRecord{} // not the half that could be read
		}
		m.brokers[p.broker] = brokerKey{kv, rec}
	case kindTopic:
		var rec registry.TopicRecord
		t := m.topic(p.topic)
		t.record = &kv
		if _, rec, _, err = m.root.ParseTopic(kv); err == nil {
			t.rec = &rec
			for _, q := range rec.List(p.topic) {
				t.homes[q.Number] = q.Home
			}
		}
	case kindCount:
		if _, err = strconv.ParseUint(string(kv.Value), 10, 31); err == nil {
			m.topic(p.topic).counts[p.broker] = kv
		}
	case kindState:
		var rec registry.PartitionState
		s := stateKey{kv: kv}
		if _, _, rec, _, err = m.root.ParsePartitionState(kv); err == nil {
			s.rec = &rec
		}
		m.topic(p.topic).states[p.partition.Number] = s
	case kindTopicConfig:
		m.topic(p.topic).config = &kv
		_, err = registry.ParseTopicConfig(kv)
	case kindGroupConfig:
		_, err = registry.ParseTopicConfig(kv) // of the same form
	case kindDeletion:
		m.deletions[p.topic] = kv
		_, _, err = m.root.ParseDeletion(kv)
	default:
		err = m.takeOfGroup(p, kv)
	}
	if err != nil {
		m.unreadable(p, kv, err)
	}
}

func (m *model) takeOfGroup(p place, kv registry.KV) error {
	switch p.kind {
	case kindMember:
		g := m.group(p.group)
		g.ids = append(g.ids, kv)
		rec, err := registry.ParseConsumer(kv)
		if err != nil {
			g.members[p.member] = memberKey{kv: kv}
			return err
		}
		g.members[p.member] = memberKey{kv, &rec}
	case kindOwner:
		g := m.group(p.group)
		g.owners = append(g.owners, partitionKey{kv, p.partition})
		if len(kv.Value) == 0 {
			return errors.New("the owner key names nobody")
		}
	case kindOffset:
		g := m.group(p.group)
		g.offsets = append(g.offsets, partitionKey{kv, p.partition})
		if _, below := belowZero(kv); below {
			return nil // a finding of its own
		}
		_, err := registry.ParseOffset(kv)
		return err
	}
	return nil
}

// belowZero reads an offset that is a number, and below 0.
func belowZero(kv registry.KV) (int64, bool) {
	n, err := strconv.ParseInt(strings.TrimSpace(string(kv.Value)), 10, 64)
	return n, err == nil && n < 0
}

func (m *model) note(c Code, p place, kv registry.KV, what string) *Finding {
	f := newFinding(c, p, what)
	f.lease = kv.Lease
	f.quiet = []span{{kv.Key, false}}
	m.found = append(m.found, f)
	return &m.found[len(m.found)-1]
}

func (m *model) unreadable(p place, kv registry.KV, err error) {
	m.note(CodeUnreadableRecord, p, kv, err.Error())
}

// deleted tells whether a topic has no record. One whose record cannot be read is
// there all the same, and one whose deletion is under way is not judged yet.
func (m *model) deleted(topic string) bool {
	if t := m.topics[topic]; t != nil && t.record != nil {
		return false
	}
	_, underWay := m.deletions[topic]
	return !underWay
}
