package api

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/muster-io/muster/broker/partition"
)

// Cluster is what the handlers ask of the daemon. Every method may be called by
// many connections at once, and none but CreateTopic and ProducerID may block.
//
// Errors that a client is to be told are (or wrap) a *kerr.Error. Any other error
// becomes UNKNOWN_SERVER_ERROR on the wire and a line in the log.
type Cluster interface {
	// BrokerID is the id under which this daemon is registered.
	BrokerID() int32

	// Snapshot is the registry view of this moment. It is shared: handlers never
	// write into it, and the daemon never changes one that it has handed out.
	Snapshot() Snapshot

	// Partition is the partition as this broker leads it. Errors:
	// UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_FOR_PARTITION, LEADER_NOT_AVAILABLE,
	// KAFKA_STORAGE_ERROR.
	Partition(topic string, partition int32) (partition.Partition, error)

	// CreateTopic creates a topic with the daemon's defaults. A topic that exists
	// already is TOPIC_ALREADY_EXISTS. On return Snapshot need not show it yet: the
	// client is then told LEADER_NOT_AVAILABLE and asks again.
	CreateTopic(ctx context.Context, name string) error

	// ProducerID is an id that no producer has had before.
	ProducerID(ctx context.Context) (int64, error)
}

// Snapshot is the brokers and topics of one registry revision, immutable.
type Snapshot struct {
	ClusterID  string
	Controller int32 // -1 while there is none
	Brokers    []Broker
	Topics     TopicSet
}

// Broker is a live broker with the address that clients are to use.
type Broker struct {
	ID   int32
	Host string // a name or an address; IPv6 without brackets
	Port int32
	Rack string // "" for none
}

// Topic is a topic with all of its partitions, also those without a leader.
type Topic struct {
	Name       string
	ID         uuid.UUID // zero for a topic that has none
	Internal   bool
	Partitions []PartitionInfo // sorted by number
}

// Partition finds a partition by its number.
func (t Topic) Partition(number int32) (PartitionInfo, bool) {
	at, there := slices.BinarySearchFunc(t.Partitions, number, func(p PartitionInfo, n int32) int { return cmp.Compare(p.Number, n) })
	if !there {
		return PartitionInfo{}, false
	}
	return t.Partitions[at], true
}

// PartitionInfo is the state of one partition.
type PartitionInfo struct {
	Number      int32
	Leader      int32 // -1 while there is none
	LeaderEpoch int32
	Replicas    []int32
	ISR         []int32
}

// Options are the daemon's settings for the handlers. The zero value of a field
// stands for the default named beside it.
type Options struct {
	// Logger gets the errors that clients are told only as UNKNOWN_SERVER_ERROR.
	// Default: nothing is logged.
	Logger *slog.Logger

	// AutoCreateTopics lets a Metadata request that allows it create the topics
	// that it names. Kafka: auto.create.topics.enable. Off by default.
	AutoCreateTopics bool

	// FetchMaxBytes bounds one Fetch response whatever the client asks for; a first
	// batch that is larger still goes out whole. Kafka: fetch.max.bytes, 55 MiB.
	FetchMaxBytes int

	// FetchMaxWait bounds how long one Fetch is held back for more data, whatever
	// the client asks for. A held Fetch keeps its connection's order waiting, so no
	// client should be able to ask for hours. 5 minutes.
	FetchMaxWait time.Duration

	// ProduceMaxWait bounds how long a Produce with acks=-1 waits for the high
	// watermark, whatever timeout the client asks for. 5 minutes.
	ProduceMaxWait time.Duration
}
