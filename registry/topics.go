package registry

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"

	"github.com/google/uuid"
)

// MaxPartitions is the most partitions that a topic may have: its record is one
// value, which etcd limits to 1.5 MiB.
const MaxPartitions = 20_000

// Errors of CreateTopic that callers branch on.
var (
	ErrTopicExists       = errors.New("topic exists already")
	ErrPartitions        = fmt.Errorf("invalid number of partitions: want 1 to %d", MaxPartitions)
	ErrReplicationFactor = errors.New("replication factor above 1 is not supported yet")
	ErrNoBroker          = errors.New("no broker is alive")
)

// TopicSpec describes a topic to create.
type TopicSpec struct {
	Name              string
	Partitions        int32
	ReplicationFactor int32
	Config            map[string]string
}

// Place spreads the partitions of a new topic over the live brokers: one after
// the other, in order of their ids, beginning at one that depends on the topic's
// name, so that topics of one partition spread too. It is a pure function: any
// two that create the same topic among the same brokers place it alike.
func Place(topic string, partitions int32, brokers []int32) map[int32][]int32 {
	ids := slices.Clone(brokers)
	slices.Sort(ids)
	h := fnv.New32a()
	h.Write([]byte(topic))
	first := int(h.Sum32() % uint32(len(ids)))
	placed := make(map[int32][]int32, partitions)
	for p := range partitions {
		placed[p] = []int32{ids[(first+int(p))%len(ids)]}
	}
	return placed
}

// LiveBrokers reads the broker records. Those that cannot be parsed are left out
// and returned as errors.
func LiveBrokers(ctx context.Context, st Store, root Root) (map[int32]BrokerRecord, []error, error) {
	kvs, _, err := List(ctx, st, root.Brokers(), 0)
	if err != nil {
		return nil, nil, fmt.Errorf("list brokers: %w", err)
	}
	brokers := make(map[int32]BrokerRecord, len(kvs))
	var bad []error
	for _, kv := range kvs {
		id, rec, err := root.ParseBroker(kv)
		if err != nil {
			bad = append(bad, err)
			continue
		}
		brokers[id] = rec
	}
	return brokers, bad, nil
}

// CreateTopic creates a topic on the given live brokers. Its record is written by
// one transaction if there is none; so are its settings and the states of its
// first partitions. The states of more partitions than fit follow, each if there
// is none; until then their leaders are the first replicas.
func CreateTopic(ctx context.Context, st Store, root Root, spec TopicSpec, brokers []int32) (TopicRecord, error) {
	if err := checkSpec(spec, brokers); err != nil {
		return TopicRecord{}, fmt.Errorf("create topic %s: %w", clip([]byte(spec.Name)), err)
	}
	rec := TopicRecord{Version: 1, Partitions: Place(spec.Name, spec.Partitions, brokers),
		Home: make(map[int32]int32, spec.Partitions), TopicID: uuid.NewString()}
	for p, replicas := range rec.Partitions {
		rec.Home[p] = replicas[0]
	}
	if err := writeTopic(ctx, st, root, spec, rec); err != nil {
		return TopicRecord{}, fmt.Errorf("create topic %s: %w", spec.Name, err)
	}
	return rec, nil
}

func checkSpec(spec TopicSpec, brokers []int32) error {
	if err := ValidateTopicName(spec.Name); err != nil {
		return err
	}
	switch {
	case spec.Partitions < 1 || spec.Partitions > MaxPartitions:
		return fmt.Errorf("%w, not %d", ErrPartitions, spec.Partitions)
	case spec.ReplicationFactor != 1:
		return fmt.Errorf("%w: %d", ErrReplicationFactor, spec.ReplicationFactor)
	case len(brokers) == 0:
		return ErrNoBroker
	}
	return nil
}

func writeTopic(ctx context.Context, st Store, root Root, spec TopicSpec, rec TopicRecord) error {
	record, err := Encode(rec)
	if err != nil {
		return err
	}
	settings := spec.Config
	if settings == nil {
		settings = map[string]string{}
	}
	config, err := Encode(TopicConfig{Version: 1, Config: settings})
	if err != nil {
		return err
	}
	key := root.Topic(spec.Name)
	first := Txn{If: []Cond{Absent(key)}, Then: []Op{Put(key, record, 0), Put(root.TopicConfig(spec.Name), config, 0)}}
	states, err := stateOps(root, spec.Name, rec)
	if err != nil {
		return err
	}
	n := min(len(states), MaxNested-len(first.Then))
	first.Then = append(first.Then, states[:n]...)
	res, err := st.Txn(ctx, first)
	if err != nil {
		return err
	}
	if !res.Succeeded {
		return ErrTopicExists
	}
	for states = states[n:]; len(states) > 0; states = states[n:] {
		n = min(len(states), MaxNested)
		var t Txn
		for _, op := range states[:n] {
			t.Then = append(t.Then, Nested(Txn{If: []Cond{Absent(op.Key)}, Then: []Op{op}}))
		}
		if _, err := st.Txn(ctx, t); err != nil {
			return err
		}
	}
	return nil
}

func stateOps(root Root, topic string, rec TopicRecord) ([]Op, error) {
	var ops []Op
	for _, p := range rec.List(topic) {
		state, err := Encode(InitialState(rec.Partitions[p.Number]))
		if err != nil {
			return nil, err
		}
		ops = append(ops, Put(root.PartitionState(topic, p.Number), state, 0))
	}
	return ops, nil
}

// InitialState is the state of a partition that has never had another: its first
// replica leads.
func InitialState(replicas []int32) PartitionState {
	return PartitionState{Version: 1, Leader: replicas[0], ISR: replicas}
}
