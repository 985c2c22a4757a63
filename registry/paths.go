package registry

import (
	"fmt"
	"strconv"
	"strings"
)

// Root is the prefix that all keys of a registry stand under, without a trailing
// slash: "" for the whole key space, "/kc/prod" for a part of it.
type Root string

// ParseRoot reads the setting registry.root: "/" or a path such as "/kc/prod".
func ParseRoot(text string) (Root, error) {
	if text == "" || text[0] != '/' || strings.ContainsRune(text, 0) {
		return "", fmt.Errorf("registry root %q: want a path such as / or /kc/prod", text)
	}
	root := strings.TrimRight(text, "/")
	if strings.Contains(root, "//") {
		return "", fmt.Errorf("registry root %q has an empty path element", text)
	}
	return Root(root), nil
}

// String returns the root as its setting spells it.
func (r Root) String() string {
	if r == "" {
		return "/"
	}
	return string(r)
}

// Prefix is what every key of the registry begins with.
func (r Root) Prefix() string { return string(r) + "/" }

// Key returns the key of a path, which begins with a slash and counts from the root.
func (r Root) Key(path string) string { return string(r) + path }

func (r Root) ClusterID() string { return r.Key("/cluster/id") }

// Restoring is the marker of a restore that is under way.
func (r Root) Restoring() string { return r.Key("/restoring") }

func (r Root) ProducerIDs() string { return r.Key("/producer_ids/next") }

// Brokers is the prefix of the broker records; Topics that of all keys of topics.
func (r Root) Brokers() string { return r.Key("/brokers/ids/") }
func (r Root) Topics() string  { return r.Key("/brokers/topics/") }

func (r Root) Broker(id int32) string { return r.Brokers() + strconv.Itoa(int(id)) }

// Topic names are made of bytes that need no escape (ValidateTopicName); names
// from anywhere else are escaped all the same.
func (r Root) Topic(name string) string { return r.Topics() + element(name) }

// TopicBroker is the count of a topic's partitions on one broker.
func (r Root) TopicBroker(topic string, broker int32) string {
	return r.Topic(topic) + "/" + strconv.Itoa(int(broker))
}

// PartitionState is the leader and in-sync set of a partition.
func (r Root) PartitionState(topic string, partition int32) string {
	return r.Topic(topic) + "/partitions/" + strconv.Itoa(int(partition)) + "/state"
}

func (r Root) TopicConfig(topic string) string { return r.TopicConfigs() + element(topic) }

// TopicConfigs is the prefix of the settings of topics.
func (r Root) TopicConfigs() string { return r.Key("/config/topics/") }

// DeletedTopics is the prefix of the markers of topics that are to be deleted;
// DeletedTopic is the one of a topic.
func (r Root) DeletedTopics() string { return r.Key("/admin/delete_topics/") }

func (r Root) DeletedTopic(name string) string { return r.DeletedTopics() + element(name) }
func (r Root) GroupConfig(group string) string { return r.Key("/config/groups/") + element(group) }

// Groups is the prefix of all keys of consumer groups.
func (r Root) Groups() string { return r.Key("/consumers/") }

// Group returns the keys of one group. The name must not hold a NUL byte
// (ValidateGroupName).
func (r Root) Group(name string) GroupPaths {
	return GroupPaths{base: r.Groups() + element(name)}
}

// GroupPaths are the keys of one consumer group.
type GroupPaths struct{ base string }

// Prefix is what every key of the group begins with.
func (g GroupPaths) Prefix() string { return g.base + "/" }

// IDs is the prefix of the group's registrations.
func (g GroupPaths) IDs() string { return g.base + "/ids/" }

// ID is the registration of one consumer.
func (g GroupPaths) ID(consumer string) string { return g.IDs() + element(consumer) }

// Owners is the prefix of the group's owner keys; Owner the one of a partition.
func (g GroupPaths) Owners() string { return g.base + "/owners/" }

func (g GroupPaths) Owner(p Partition) string { return g.TopicOwners(p.Topic) + p.Name() }

// TopicOwners is the prefix of the group's owner keys of one topic.
func (g GroupPaths) TopicOwners(topic string) string { return g.Owners() + element(topic) + "/" }

// Offsets is the prefix of the group's offsets; Offset the one of a partition.
func (g GroupPaths) Offsets() string { return g.base + "/offsets/" }

func (g GroupPaths) Offset(p Partition) string { return g.TopicOffsets(p.Topic) + p.Name() }

// TopicOffsets is the prefix of the group's offsets of one topic.
func (g GroupPaths) TopicOffsets(topic string) string { return g.Offsets() + element(topic) + "/" }

// Target is the group's target record, for the strategy sticky.
func (g GroupPaths) Target() string { return g.base + "/target" }

// History is the prefix of what is told of the group's past, entry by entry.
func (g GroupPaths) History() string { return g.base + "/history/" }

// HistoryEntry is the entry that a member writes at ms, milliseconds since 1970, as
// its n-th. In byte order entries are ordered by time until the year 2286.
func (g GroupPaths) HistoryEntry(ms int64, member string, n uint64) string {
	return fmt.Sprintf("%s%013d-%s-%d", g.History(), max(ms, 0), element(member), n)
}

// ParsePartition reads the partition off an owner or offset key of the group.
func (g GroupPaths) ParsePartition(key string) (Partition, error) {
	p := g.locate(key)
	if p.Problem == nil && p.Kind != KindOwner && p.Kind != KindOffset {
		return Partition{}, fmt.Errorf("key %s names no partition of the group", key)
	}
	return p.Partition, p.Problem
}

// ParseID reads the consumer id off a registration key of the group.
func (g GroupPaths) ParseID(key string) (string, error) {
	p := g.locate(key)
	if p.Problem == nil && p.Kind != KindMember {
		return "", fmt.Errorf("key %s is no registration of the group", key)
	}
	return p.Member, p.Problem
}

// Partition identifies a partition: Number within its topic, and Home, the
// broker that was its first replica at creation, which never changes.
type Partition struct {
	Topic  string
	Home   int32
	Number int32
}

// Name is how keys spell the partition: "1-3" is partition 3 with home 1.
func (p Partition) Name() string {
	return strconv.Itoa(int(p.Home)) + "-" + strconv.Itoa(int(p.Number))
}

func (p Partition) String() string { return p.Topic + "/" + p.Name() }

// ComparePartitions orders by topic, then number, then home: as people read a list.
func ComparePartitions(a, b Partition) int {
	if c := strings.Compare(a.Topic, b.Topic); c != 0 {
		return c
	}
	if a.Number != b.Number {
		return int(a.Number) - int(b.Number)
	}
	return int(a.Home) - int(b.Home)
}

func parsePartitionName(name string) (home, number int32, err error) {
	h, n, ok := strings.Cut(name, "-")
	home, errHome := parseInt31(h)
	number, errNumber := parseInt31(n)
	if !ok || errHome != nil || errNumber != nil {
		return 0, 0, fmt.Errorf("partition name %q: want broker-partition, such as 1-3", name)
	}
	return home, number, nil
}

// element escapes a name that was validated. What cannot be a name at all maps
// to an element that no name escapes to, and so to no key that anybody writes.
func element(name string) string {
	e, err := EscapeName(name)
	if err != nil {
		return "%00"
	}
	return e
}
