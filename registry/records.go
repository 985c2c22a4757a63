package registry

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/google/uuid"
)

// ErrRecord marks a value in the registry that cannot be read as what its key
// says. Readers report it with its key and go on without it.
var ErrRecord = errors.New("record cannot be parsed")

// BrokerRecord is the value of /brokers/ids/<id>, for example
//
//	{"version":1,"host":"node-a","port":9092,"jmx_port":-1,"timestamp":"1796009568591"}
//
// Host is a name or an address without brackets; numbers fit int32 and the
// timestamp (milliseconds) is text, since a 0.8 client reads no larger number.
type BrokerRecord struct {
	Version   int32  `json:"version"`
	Host      string `json:"host"`
	Port      int32  `json:"port"`
	JMXPort   int32  `json:"jmx_port"`
	Timestamp string `json:"timestamp"`
}

// ParseBroker reads a broker record and the id off its key.
func (r Root) ParseBroker(kv KV) (id int32, rec BrokerRecord, err error) {
	p := r.Locate(kv.Key)
	switch {
	case p.Problem != nil:
		return 0, rec, p.Problem
	case p.Kind != KindBroker:
		return 0, rec, fmt.Errorf("key %s: %w: it is of no broker", kv.Key, ErrRecord)
	}
	if err := decode(kv, &rec); err != nil {
		return 0, rec, err
	}
	if rec.Host == "" || rec.Port <= 0 || rec.Port > 65535 {
		return 0, rec, fmt.Errorf("broker record %s: %w: host %q, port %d", kv.Key, ErrRecord, rec.Host, rec.Port)
	}
	return p.Broker, rec, nil
}

// TopicRecord is the value of /brokers/topics/<topic>, for example
//
//	{"version":1,"partitions":{"0":[1,2]},"home":{"0":1},"topic_id":"5f8a…"}
//
// Partitions maps each partition to its replicas, the preferred leader first.
// Records that 0.8.2 wrote have neither home nor topic_id: their homes are the
// first replicas. With no_log there are no logs and no states: the partitions are
// there to be owned, and no daemon is needed, so that they may have no replicas.
type TopicRecord struct {
	Version    int32             `json:"version"`
	Partitions map[int32][]int32 `json:"partitions"`
	Home       map[int32]int32   `json:"home,omitempty"`
	TopicID    string            `json:"topic_id,omitempty"`
	NoLog      bool              `json:"no_log,omitempty"`
}

// ParseTopic reads a topic record and the name off its key. ok is false for keys
// below a topic that are not its record.
func (r Root) ParseTopic(kv KV) (name string, rec TopicRecord, ok bool, err error) {
	p := r.Locate(kv.Key)
	if name = p.Topic; p.Kind != KindTopic || p.Problem != nil {
		return "", rec, false, ofKind(p, KindTopic)
	}
	if err := decode(kv, &rec); err != nil {
		return name, rec, false, err
	}
	if rec.Partitions == nil {
		return name, rec, false, fmt.Errorf("topic record %s: %w: no partitions", kv.Key, ErrRecord)
	}
	for p, replicas := range rec.Partitions {
		if p < 0 || len(replicas) == 0 && !rec.NoLog {
			return name, rec, false, fmt.Errorf("topic record %s: %w: partition %d has no replica", kv.Key, ErrRecord, p)
		}
		// A home below 0 would make an owner key that cannot be read back.
		if rec.home(p) < 0 || len(replicas) > 0 && slices.Min(replicas) < 0 {
			return name, rec, false, fmt.Errorf("topic record %s: %w: partition %d is on a broker below 0", kv.Key, ErrRecord, p)
		}
	}
	return name, rec, true, nil
}

// ofKind is the problem of a key if it is of that kind; of others it is no matter.
func ofKind(p Location, kind Kind) error {
	if p.Kind != kind {
		return nil
	}
	return p.Problem
}

// List returns the topic's partitions by number.
func (t TopicRecord) List(topic string) []Partition {
	list := make([]Partition, 0, len(t.Partitions))
	for n := range t.Partitions {
		list = append(list, Partition{Topic: topic, Home: t.home(n), Number: n})
	}
	slices.SortFunc(list, ComparePartitions)
	return list
}

// home is that of a partition as stated, else its first replica; 0 without any.
func (t TopicRecord) home(n int32) int32 {
	if home, ok := t.Home[n]; ok {
		return home
	}
	if replicas := t.Partitions[n]; len(replicas) > 0 {
		return replicas[0]
	}
	return 0
}

// ID returns the topic id, or the nil id for a record without one.
func (t TopicRecord) ID() uuid.UUID {
	id, err := uuid.Parse(t.TopicID)
	if err != nil {
		return uuid.Nil
	}
	return id
}

// PartitionState is the value of /brokers/topics/<topic>/partitions/<p>/state, for example
//
//	{"controller_epoch":1,"leader":1,"version":1,"leader_epoch":0,"isr":[1]}
//
// Leader -1 means that there is none.
type PartitionState struct {
	ControllerEpoch int32   `json:"controller_epoch"`
	Leader          int32   `json:"leader"`
	Version         int32   `json:"version"`
	LeaderEpoch     int32   `json:"leader_epoch"`
	ISR             []int32 `json:"isr"`
}

// ParsePartitionState reads a state and the partition off its key. ok is false
// for other keys below a topic.
func (r Root) ParsePartitionState(kv KV) (topic string, partition int32, rec PartitionState, ok bool, err error) {
	p := r.Locate(kv.Key)
	if p.Kind != KindState || p.Problem != nil {
		return "", 0, rec, false, ofKind(p, KindState)
	}
	var leader struct {
		Leader *int32 `json:"leader"` // left out it would be 0, which is a broker
	}
	if err := errors.Join(decode(kv, &rec), decode(kv, &leader)); err != nil {
		return "", 0, rec, false, err
	}
	if rec.ISR == nil || leader.Leader == nil {
		return "", 0, rec, false, fmt.Errorf("state %s: %w: leader or isr is missing", kv.Key, ErrRecord)
	}
	return p.Topic, p.Partition.Number, rec, true, nil
}

// TopicConfig is the value of /config/topics/<topic>, for example
//
//	{"version":1,"config":{"cleanup.policy":"compact"}}
type TopicConfig struct {
	Version int32             `json:"version"`
	Config  map[string]string `json:"config"`
}

// Patterns of a consumer's subscription.
const (
	PatternStatic    = "static"
	PatternWhiteList = "white_list"
	PatternBlackList = "black_list"
)

// ConsumerRecord is the value of /consumers/<group>/ids/<consumer id>, for example
//
//	{"version":1,"subscription":{"orders":2},"pattern":"static","timestamp":"1796009631365","strategy":["range"]}
//
// Subscription maps a topic (or, for a list pattern, one regular expression) to a
// number of streams. A record without strategy, as 0.8.2 writes it, stands for
// range-numeric.
//
// ExcludeInternalTopics tells whether a list pattern leaves out InternalTopics; absent
// it does. Notice is the SHA-256, in hex, of a secret of the process: whoever knows
// the secret may have the lease of this registration revoked when the process dies.
type ConsumerRecord struct {
	Version               int32            `json:"version"`
	Subscription          map[string]int32 `json:"subscription"`
	Pattern               string           `json:"pattern"`
	Timestamp             string           `json:"timestamp"`
	Strategy              []string         `json:"strategy,omitempty"`
	ExcludeInternalTopics *bool            `json:"exclude_internal_topics,omitempty"`
	Notice                string           `json:"notice,omitempty"`
}

// ExcludesInternal tells whether a list pattern leaves out InternalTopics.
func (c ConsumerRecord) ExcludesInternal() bool {
	return c.ExcludeInternalTopics == nil || *c.ExcludeInternalTopics
}

// ParseConsumer reads a registration.
func ParseConsumer(kv KV) (ConsumerRecord, error) {
	var rec ConsumerRecord
	if err := decode(kv, &rec); err != nil {
		return rec, err
	}
	if rec.Subscription == nil || rec.Pattern == "" {
		return rec, fmt.Errorf("consumer record %s: %w: subscription or pattern is missing", kv.Key, ErrRecord)
	}
	for topic, streams := range rec.Subscription {
		if streams < 1 || streams > MaxStreams {
			return rec, fmt.Errorf("consumer record %s: %w: %d streams for %q", kv.Key, ErrRecord, streams, topic)
		}
	}
	return rec, nil
}

// MaxStreams bounds the streams of one subscription, so that a bad record cannot
// make every member of a group allocate without end.
const MaxStreams = 10_000

// ParseOffset reads the value of an offset key: the offset of the next record to
// read, in decimal.
func ParseOffset(kv KV) (int64, error) {
	n, err := strconv.ParseInt(string(bytes.TrimSpace(kv.Value)), 10, 64)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("offset %s: %w: %q", kv.Key, ErrRecord, clip(kv.Value))
	}
	return n, nil
}

// FormatOffset is the inverse of ParseOffset.
func FormatOffset(offset int64) []byte { return strconv.AppendInt(nil, offset, 10) }

// Encode returns a record as JSON without blanks.
func Encode(record any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // a 0.8 reader has no need of \u003c, and people read these
	if err := enc.Encode(record); err != nil {
		return nil, fmt.Errorf("encode %T: %w", record, err)
	}
	return bytes.TrimRight(b.Bytes(), "\n"), nil
}

func decode(kv KV, into any) error {
	if err := json.Unmarshal(kv.Value, into); err != nil {
		return fmt.Errorf("record %s: %w: %w", kv.Key, ErrRecord, err)
	}
	return nil
}

func clip(value []byte) string {
	const most = 40
	if len(value) > most {
		return string(value[:most]) + "…"
	}
	return string(value)
}

// MaxTopicName is Kafka's limit since it had to fit file names with a suffix.
const MaxTopicName = 249

// ErrTopicName refuses a topic name.
var ErrTopicName = errors.New("invalid topic name")

// ValidateTopicName accepts what Kafka accepts: 1 to 249 of letters, digits and
// "._-", other than "." and "..".
func ValidateTopicName(name string) error {
	if name == "" || name == "." || name == ".." || len(name) > MaxTopicName {
		return fmt.Errorf("%w %q: want 1 to %d characters, and neither . nor .. alone", ErrTopicName, clip([]byte(name)), MaxTopicName)
	}
	for i := 0; i < len(name); i++ {
		if !plainByte(name[i]) || name[i] == ':' {
			return fmt.Errorf("%w %q: only letters, digits and ._- are allowed", ErrTopicName, clip([]byte(name)))
		}
	}
	return nil
}

// ValidateGroupName refuses only what no key can carry, and the empty name.
func ValidateGroupName(name string) error {
	if name == "" {
		return errors.New("group name is empty")
	}
	_, err := EscapeName(name)
	return err
}

// ParseTopicConfig reads a topic's settings.
func ParseTopicConfig(kv KV) (TopicConfig, error) {
	var rec TopicConfig
	return rec, decode(kv, &rec)
}
