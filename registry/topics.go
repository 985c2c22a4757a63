package registry

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/google/uuid"
)

// MaxPartitions is the most partitions that a topic may have: its record is one
// value, which etcd limits to 1.5 MiB.
const MaxPartitions = 20_000

// Errors of CreateTopic that callers branch on.
var (
	ErrTopicExists       = errors.New("topic exists already")
	ErrTopicDeleting     = errors.New("topic is being deleted")
	ErrTopicCollision    = fmt.Errorf("%w: it differs only by . and _ from another topic's", ErrTopicName)
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
	// NoLog makes partitions that are only owned. They need no broker, and have
	// neither replicas nor settings: the two fields above are not looked at.
	NoLog bool
}

// InternalTopic tells whether Kafka keeps its own state in the topic. Clients are
// told, and it cannot be deleted.
func InternalTopic(name string) bool {
	return name == "__consumer_offsets" || name == "__transaction_state"
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

// CreateTopic creates a topic on the given live brokers, or on none if it has no
// log. Its record is written by
// one transaction if there is none; so are its settings and the states of its
// first partitions. The states of more partitions than fit follow, as long as the
// topic is there; until then their leaders are the first replicas.
//
// A topic that is being deleted is ErrTopicDeleting. One whose name differs only
// by "." and "_" is ErrTopicCollision, also if another creates it at this moment:
// Kafka's metrics cannot tell the two apart, so no client expects both.
func CreateTopic(ctx context.Context, st Store, root Root, spec TopicSpec, brokers []int32) (TopicRecord, error) {
	if err := checkSpec(spec, brokers); err != nil {
		return TopicRecord{}, fmt.Errorf("create topic %s: %w", clip([]byte(spec.Name)), err)
	}
	rec := TopicRecord{Version: 1, TopicID: uuid.NewString(), NoLog: spec.NoLog}
	if err := rec.extend(spec.Name, spec.Partitions, brokers); err != nil {
		return TopicRecord{}, fmt.Errorf("create topic %s: %w", spec.Name, err)
	}
	if err := createTopic(ctx, st, root, spec, rec); err != nil {
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
	case spec.NoLog:
		return nil
	case spec.ReplicationFactor != 1:
		return fmt.Errorf("%w: %d", ErrReplicationFactor, spec.ReplicationFactor)
	case len(brokers) == 0:
		return ErrNoBroker
	}
	return ValidateTopicConfig(spec.Config)
}

func createTopic(ctx context.Context, st Store, root Root, spec TopicSpec, rec TopicRecord) error {
	record, err := Encode(rec)
	if err != nil {
		return err
	}
	settings := spec.Config
	if settings == nil || spec.NoLog {
		settings = map[string]string{}
	}
	config, err := Encode(TopicConfig{Version: 1, Config: settings})
	if err != nil {
		return err
	}
	states, err := stateOps(root, spec.Name, rec, 0)
	if err != nil {
		return err
	}
	then := []Op{Put(root.Topic(spec.Name), record, 0), Put(root.TopicConfig(spec.Name), config, 0)}
	n := min(len(states), MaxNested-len(then))
	then = append(then, states[:n]...)
	revision, err := createRecord(ctx, st, root, spec.Name, then)
	if err != nil {
		return err
	}
	return writeStates(ctx, st, root, spec.Name, incarnation{revision, revision}, states[n:])
}

// createRecord runs then if the name is free, and returns the revision of that.
func createRecord(ctx context.Context, st Store, root Root, name string, then []Op) (int64, error) {
	topic, marker := root.Topic(name), root.DeletedTopic(name)
	for {
		g, err := guardName(ctx, st, root, name)
		if err != nil {
			return 0, err
		}
		t := Txn{If: append([]Cond{Absent(topic), Absent(marker)}, g.conds...), Then: then, Else: []Op{Get(topic), Get(marker)}}
		for _, other := range g.others {
			t.Else = append(t.Else, Get(root.Topic(other)))
		}
		res, err := st.Txn(ctx, t)
		switch {
		case err != nil:
			return 0, err
		case res.Succeeded:
			return res.Revision, nil
		case len(res.Items[0].KVs) > 0:
			return 0, ErrTopicExists
		case len(res.Items[1].KVs) > 0:
			return 0, fmt.Errorf("%w: try again when it is gone", ErrTopicDeleting)
		}
		for i, other := range g.others {
			if len(res.Items[i+2].KVs) > 0 {
				return 0, fmt.Errorf("%w, %s", ErrTopicCollision, other)
			}
		}
		// Only a listing can have gone stale: somebody created a topic that begins alike.
	}
}

// nameGuard holds as long as no topic stands whose name differs only by . and _.
type nameGuard struct {
	conds  []Cond
	others []string // the names that conds are about, if they are few
}

// maxSeparators bounds the names that are enumerated: 2^6 of them fit a
// transaction. Who has more dots than that pays for a listing.
const maxSeparators = 6

// guardName makes a condition of a rule about all topics. A name without . and _
// collides with none, and one with few of them only with so many others: each is a
// key that must be absent. For more of them the topics that begin alike are listed,
// and nothing there may have been created since.
func guardName(ctx context.Context, st Store, root Root, name string) (nameGuard, error) {
	var g nameGuard
	first := strings.IndexAny(name, "._")
	if first < 0 {
		return g, nil
	}
	if strings.Count(name, ".")+strings.Count(name, "_") <= maxSeparators {
		for _, other := range alike(name) {
			if other == name || ValidateTopicName(other) != nil {
				continue
			}
			g.others = append(g.others, other)
			g.conds = append(g.conds, Absent(root.Topic(other)))
		}
		return g, nil
	}
	prefix := root.Topics() + name[:first]
	keys, revision, err := listKeys(ctx, st, prefix)
	if err != nil {
		return g, fmt.Errorf("look for names alike: %w", err)
	}
	folded := foldName(name)
	for _, key := range keys {
		other := root.Locate(key).Topic
		if other != name && foldName(other) == folded {
			return g, fmt.Errorf("%w, %s", ErrTopicCollision, other)
		}
	}
	g.conds = []Cond{{Key: prefix, Prefix: true, Field: FieldCreateRevision, Relation: Less, Number: revision + 1}}
	return g, nil
}

func foldName(name string) string { return strings.ReplaceAll(name, ".", "_") }

// alike returns all names that differ from name only by . and _, itself included.
func alike(name string) []string {
	names := []string{""}
	for i := range len(name) {
		c := name[i]
		if c != '.' && c != '_' {
			for j := range names {
				names[j] += string(c)
			}
			continue
		}
		for _, n := range names {
			names = append(names, n+"_")
		}
		for j := range names[:len(names)/2] {
			names[j] += "."
		}
	}
	return names
}

// listKeys is List without the values.
func listKeys(ctx context.Context, st Store, prefix string) ([]string, int64, error) {
	var keys []string
	req := RangeRequest{Key: prefix, Prefix: true, Limit: listPage, KeysOnly: true}
	for {
		res, err := st.Range(ctx, req)
		if err != nil {
			return nil, 0, err
		}
		if req.Revision == 0 {
			req.Revision = res.Revision
		}
		for _, kv := range res.KVs {
			keys = append(keys, kv.Key)
		}
		if !res.More || len(res.KVs) == 0 {
			return keys, req.Revision, nil
		}
		req.After = keys[len(keys)-1]
	}
}

// stateOps are the puts of the initial states of the partitions from the given
// number on.
func stateOps(root Root, topic string, rec TopicRecord, from int32) ([]Op, error) {
	var ops []Op
	for _, p := range rec.List(topic) {
		if p.Number < from || rec.NoLog {
			continue
		}
		state, err := Encode(InitialState(rec.Partitions[p.Number]))
		if err != nil {
			return nil, err
		}
		ops = append(ops, Put(root.PartitionState(topic, p.Number), state, 0))
	}
	return ops, nil
}

// incarnation tells a topic from another of the same name: created is the
// create-revision of its record, since the revision at which the partitions in
// question were added.
type incarnation struct{ created, since int64 }

// writeStates writes states that did not fit the transaction which made their
// partitions: only while that topic is there, or a topic deleted meanwhile would
// leave them behind; and only where none has been written since.
func writeStates(ctx context.Context, st Store, root Root, topic string, i incarnation, states []Op) error {
	for len(states) > 0 {
		n := min(len(states), MaxNested)
		t := Txn{If: []Cond{CreatedAt(root.Topic(topic), i.created)}}
		for _, op := range states[:n] {
			older := Cond{Key: op.Key, Field: FieldModRevision, Relation: Less, Number: i.since}
			t.Then = append(t.Then, Nested(Txn{If: []Cond{older}, Then: []Op{op}}))
		}
		states = states[n:]
		res, err := st.Txn(ctx, t)
		if err != nil {
			return err
		}
		if !res.Succeeded {
			return fmt.Errorf("%w meanwhile", ErrTopicDeleting)
		}
	}
	return nil
}

// InitialState is the state of a partition that has never had another: its first
// replica leads.
func InitialState(replicas []int32) PartitionState {
	return PartitionState{Version: 1, Leader: replicas[0], ISR: replicas}
}
