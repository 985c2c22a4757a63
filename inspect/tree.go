package inspect

import (
	"errors"
	"strconv"
	"strings"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// Tree is what stood in the registry at one revision.
type Tree struct {
	Root     registry.Root
	Revision int64
	Keys     []registry.KV
}

// treeOf gathers a View of root.Parts().
func treeOf(root registry.Root, s registry.Snapshot) Tree {
	t := Tree{Root: root, Revision: s.Revision}
	for i := range root.Parts() {
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
		p := t.Root.Locate(kv.Key)
		switch {
		case p.Problem != nil:
			m.note(CodeUnreadableName, p, kv, p.Problem.Error())
		case p.Kind == registry.KindUnknown:
			m.note(CodeUnknownKey, p, kv, "nothing that Muster writes or reads")
		case p.Kind == registry.KindClusterID:
			if len(kv.Value) == 0 {
				m.unreadable(p, kv, errors.New("the cluster id is empty"))
			}
		default:
			m.take(p, kv)
		}
		if kv.Lease != 0 && lasting(p.Kind) {
			f := m.note(CodeRecordUnderLease, p, kv, "bound to lease "+registry.LeaseText(kv.Lease))
			f.Repair = &Repair{Action: "write it anew without a lease", txn: registry.Txn{
				If: []registry.Cond{unchanged(kv)}, Then: []registry.Op{registry.Put(kv.Key, kv.Value, 0)}}}
		}
	}
	return m
}

// lasting tells whether keys of the kind are to outlive whoever wrote them.
func lasting(k registry.Kind) bool {
	switch k {
	case registry.KindClusterID, registry.KindTopic, registry.KindState, registry.KindTopicConfig, registry.KindGroupConfig,
		registry.KindDeletion, registry.KindOffset, registry.KindTarget, registry.KindHistory:
		return true
	}
	return false
}

func (m *model) take(p registry.Location, kv registry.KV) {
	var err error
	switch p.Kind {
	case registry.KindBroker:
		var rec registry.BrokerRecord
		if _, rec, err = m.root.ParseBroker(kv); err != nil {
			rec = registry.BrokerRecord{} // not the half that could be read
		}
		m.brokers[p.Broker] = brokerKey{kv, rec}
	case registry.KindTopic:
		var rec registry.TopicRecord
		t := m.topic(p.Topic)
		t.record = &kv
		if _, rec, _, err = m.root.ParseTopic(kv); err == nil {
			t.rec = &rec
			for _, q := range rec.List(p.Topic) {
				t.homes[q.Number] = q.Home
			}
		}
	case registry.KindCount:
		if _, err = strconv.ParseUint(string(kv.Value), 10, 31); err == nil {
			m.topic(p.Topic).counts[p.Broker] = kv
		}
	case registry.KindState:
		var rec registry.PartitionState
		s := stateKey{kv: kv}
		if _, _, rec, _, err = m.root.ParsePartitionState(kv); err == nil {
			s.rec = &rec
		}
		m.topic(p.Topic).states[p.Partition.Number] = s
	case registry.KindTopicConfig:
		m.topic(p.Topic).config = &kv
		_, err = registry.ParseTopicConfig(kv)
	case registry.KindGroupConfig:
		_, err = registry.ParseTopicConfig(kv) // of the same form
	case registry.KindDeletion:
		m.deletions[p.Topic] = kv
		_, _, err = m.root.ParseDeletion(kv)
	default:
		err = m.takeOfGroup(p, kv)
	}
	if err != nil {
		m.unreadable(p, kv, err)
	}
}

func (m *model) takeOfGroup(p registry.Location, kv registry.KV) error {
	switch p.Kind {
	case registry.KindMember:
		g := m.group(p.Group)
		g.ids = append(g.ids, kv)
		rec, err := registry.ParseConsumer(kv)
		if err != nil {
			g.members[p.Member] = memberKey{kv: kv}
			return err
		}
		g.members[p.Member] = memberKey{kv, &rec}
	case registry.KindOwner:
		g := m.group(p.Group)
		g.owners = append(g.owners, partitionKey{kv, p.Partition})
		if len(kv.Value) == 0 {
			return errors.New("the owner key names nobody")
		}
	case registry.KindOffset:
		g := m.group(p.Group)
		g.offsets = append(g.offsets, partitionKey{kv, p.Partition})
		if _, below := belowZero(kv); below {
			return nil // a finding of its own
		}
		_, err := registry.ParseOffset(kv)
		return err
	case registry.KindTarget:
		_, err := rebalance.ReadTarget(kv)
		return err
	case registry.KindHistory:
		_, err := registry.ParseHistory(kv)
		return err
	}
	return nil
}

// belowZero reads an offset that is a number, and below 0.
func belowZero(kv registry.KV) (int64, bool) {
	n, err := strconv.ParseInt(strings.TrimSpace(string(kv.Value)), 10, 64)
	return n, err == nil && n < 0
}

func (m *model) note(c Code, p registry.Location, kv registry.KV, what string) *Finding {
	f := newFinding(c, p, what)
	f.lease = kv.Lease
	f.quiet = []span{{kv.Key, false}}
	m.found = append(m.found, f)
	return &m.found[len(m.found)-1]
}

func (m *model) unreadable(p registry.Location, kv registry.KV, err error) {
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
