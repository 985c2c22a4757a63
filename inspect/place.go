package inspect

import (
	"strconv"
	"strings"

	"github.com/muster-io/muster/registry"
)

// kind is what a key is about.
type kind int

const (
	kindForeign kind = iota // outside the parts of the tree that are ours
	kindUnknown             // within them, and nothing that we write
	kindUnreadable
	kindOpaque // ours, and not looked into here
	kindClusterID
	kindBroker
	kindTopic
	kindCount
	kindState
	kindTopicConfig
	kindGroupConfig
	kindDeletion
	kindMember
	kindOwner
	kindOffset
)

// place is what a key says by its path alone. Only the fields of its kind are set.
type place struct {
	kind      kind
	path      string // from the root
	group     string
	member    string
	topic     string
	broker    int32
	partition registry.Partition // of an owner key or offset; for a state only the number is known
	problem   string             // of a name that cannot be read
}

// prefixes are the parts of the tree that are ours. Under the root "/" other
// tenants of the same store may have keys beside them.
func prefixes(root registry.Root) []string {
	return []string{root.Key("/admin/"), root.Key("/brokers/"), root.Key("/cluster/"), root.Key("/config/"),
		root.Key("/consumers/"), root.Key("/producer_ids/")}
}

func locate(root registry.Root, key string) place {
	path, ok := strings.CutPrefix(key, string(root))
	p := place{path: path}
	if !ok || !strings.HasPrefix(path, "/") {
		p.path = key
		return p
	}
	parts := strings.Split(path[1:], "/")
	switch parts[0] {
	case "cluster", "producer_ids":
		p.kind = kindOpaque
		if key == root.ClusterID() {
			p.kind = kindClusterID
		}
	case "brokers":
		p.kind = kindUnknown
		p.brokers(parts[1:])
	case "consumers":
		p.kind = kindUnknown
		p.consumers(root, key, parts[1:])
	case "config", "admin":
		p.kind = kindUnknown
		p.settings(parts)
	}
	return p
}

func (p *place) brokers(parts []string) {
	switch {
	case len(parts) == 2 && parts[0] == "ids":
		p.kind = kindBroker
		p.broker = p.number(parts[1])
	case len(parts) == 2 && parts[0] == "topics":
		p.kind = kindTopic
		p.topic = p.name(parts[1])
	case len(parts) == 3 && parts[0] == "topics":
		p.kind = kindCount
		p.topic, p.broker = p.name(parts[1]), p.number(parts[2])
	case len(parts) == 5 && parts[0] == "topics" && parts[2] == "partitions" && parts[4] == "state":
		p.kind = kindState
		p.topic, p.partition.Number = p.name(parts[1]), p.number(parts[3])
		p.partition.Topic = p.topic
	}
}

func (p *place) consumers(root registry.Root, key string, parts []string) {
	if len(parts) < 2 {
		return
	}
	p.group = p.name(parts[0])
	if p.kind == kindUnreadable {
		return
	}
	switch {
	case parts[1] == "ids" && len(parts) == 3:
		p.kind = kindMember
		p.member = p.name(parts[2])
	case (parts[1] == "owners" || parts[1] == "offsets") && len(parts) == 4:
		p.kind = kindOwner
		if parts[1] == "offsets" {
			p.kind = kindOffset
		}
		partition, err := root.Group(p.group).ParsePartition(key)
		if err != nil {
			p.kind, p.problem = kindUnreadable, err.Error()
			return
		}
		p.partition, p.topic = partition, partition.Topic
	case len(parts) == 2 && (parts[1] == "target" || parts[1] == "migration"), parts[1] == "resets", parts[1] == "history":
		p.kind = kindOpaque
	}
}

func (p *place) settings(parts []string) {
	if len(parts) != 3 {
		return
	}
	switch parts[0] + "/" + parts[1] {
	case "config/topics":
		p.kind = kindTopicConfig
		p.topic = p.name(parts[2])
	case "config/groups":
		p.kind = kindGroupConfig
		p.group = p.name(parts[2])
	case "admin/delete_topics":
		p.kind = kindDeletion
		p.topic = p.name(parts[2])
	}
}

func (p *place) name(element string) string {
	name, err := registry.UnescapeName(element)
	if err != nil {
		p.kind, p.problem = kindUnreadable, err.Error()
	}
	return name
}

// number reads a number from 0 to 2^31-1 in its only spelling.
func (p *place) number(element string) int32 {
	n, err := strconv.ParseInt(element, 10, 32)
	if err != nil || n < 0 || strconv.FormatInt(n, 10) != element {
		p.kind, p.problem = kindUnreadable, strconv.Quote(element)+" is not a number from 0 to 2147483647"
		return 0
	}
	return int32(n)
}
