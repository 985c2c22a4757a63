package registry

import (
	"fmt"
	"strconv"
	"strings"
)

// Kind is what a key is about.
type Kind int

const (
	KindForeign Kind = iota // outside the parts of the tree that are ours
	KindUnknown             // within them, and nothing that we write
	KindOpaque              // ours, and with nothing in it for others to read
	KindClusterID
	KindBroker
	KindTopic
	KindCount
	KindState
	KindTopicConfig
	KindGroupConfig
	KindDeletion
	KindMember
	KindOwner
	KindOffset
	KindTarget
	KindHistory
)

// Location is what a key says by its path alone. Only the fields of its kind are set.
type Location struct {
	Kind      Kind
	Path      string // from the root
	Group     string
	Member    string
	Topic     string
	Broker    int32
	Partition Partition // of an owner key or offset; for a state only topic and number are known
	// Problem is that a name or number in it is spelled as nothing is: nobody can read
	// it. It wraps ErrRecord, and what could not be read is empty or 0.
	Problem error
}

// Parts are the parts of the tree that are ours. Under the root "/" other tenants of
// the same store may have keys beside them.
func (r Root) Parts() []string {
	return []string{r.Key("/admin/"), r.Key("/brokers/"), r.Key("/cluster/"), r.Key("/config/"), r.Key("/consumers/"), r.Key("/producer_ids/")}
}

// Locate tells what a key is about.
func (r Root) Locate(key string) Location {
	path, ok := strings.CutPrefix(key, string(r))
	p := Location{Path: path}
	if !ok || !strings.HasPrefix(path, "/") {
		p.Path = key
		return p
	}
	parts := strings.Split(path[1:], "/")
	switch parts[0] {
	case "cluster", "producer_ids":
		p.Kind = KindOpaque
		if key == r.ClusterID() {
			p.Kind = KindClusterID
		}
	case "brokers":
		p.Kind = KindUnknown
		p.brokers(parts[1:])
	case "consumers":
		p.Kind = KindUnknown
		p.consumers(parts[1:])
	case "config", "admin":
		p.Kind = KindUnknown
		p.settings(parts)
	}
	return p.of(key)
}

// locate is Root.Locate for a key of the group; any other is KindForeign.
func (g GroupPaths) locate(key string) Location {
	var p Location
	if rest, ok := strings.CutPrefix(key, g.Prefix()); ok {
		p.Kind = KindUnknown
		p.ofGroup(strings.Split(rest, "/"))
	}
	return p.of(key)
}

// of completes the place of a key.
func (p Location) of(key string) Location {
	if p.Problem != nil {
		p.Problem = fmt.Errorf("key %s: %w: %w", key, ErrRecord, p.Problem)
	}
	return p
}

func (p *Location) brokers(parts []string) {
	switch {
	case len(parts) == 2 && parts[0] == "ids":
		p.Kind = KindBroker
		p.Broker = p.number(parts[1])
	case len(parts) == 2 && parts[0] == "topics":
		p.Kind = KindTopic
		p.Topic = p.name(parts[1])
	case len(parts) == 3 && parts[0] == "topics":
		p.Kind = KindCount
		p.Topic, p.Broker = p.name(parts[1]), p.number(parts[2])
	case len(parts) == 5 && parts[0] == "topics" && parts[2] == "partitions" && parts[4] == "state":
		p.Kind = KindState
		p.Topic = p.name(parts[1])
		p.Partition = Partition{Topic: p.Topic, Number: p.number(parts[3])}
	}
}

func (p *Location) consumers(parts []string) {
	if len(parts) < 2 {
		return
	}
	p.Group = p.name(parts[0])
	p.ofGroup(parts[1:])
}

func (p *Location) ofGroup(parts []string) {
	switch {
	case parts[0] == "ids" && len(parts) == 2:
		p.Kind = KindMember
		p.Member = p.name(parts[1])
	case (parts[0] == "owners" || parts[0] == "offsets") && len(parts) == 3:
		p.Kind = KindOwner
		if parts[0] == "offsets" {
			p.Kind = KindOffset
		}
		p.Topic = p.name(parts[1])
		home, number, err := parsePartitionName(parts[2])
		p.fail(err)
		p.Partition = Partition{Topic: p.Topic, Home: home, Number: number}
	case parts[0] == "target" && len(parts) == 1:
		p.Kind = KindTarget
	case parts[0] == "history" && len(parts) == 2:
		p.Kind = KindHistory
	case parts[0] == "migration" && len(parts) == 1, parts[0] == "resets":
		p.Kind = KindOpaque
	}
}

func (p *Location) settings(parts []string) {
	if len(parts) != 3 {
		return
	}
	switch parts[0] + "/" + parts[1] {
	case "config/topics":
		p.Kind = KindTopicConfig
		p.Topic = p.name(parts[2])
	case "config/groups":
		p.Kind = KindGroupConfig
		p.Group = p.name(parts[2])
	case "admin/delete_topics":
		p.Kind = KindDeletion
		p.Topic = p.name(parts[2])
	}
}

// fail keeps the first problem.
func (p *Location) fail(err error) {
	if p.Problem == nil {
		p.Problem = err
	}
}

func (p *Location) name(element string) string {
	name, err := UnescapeName(element)
	p.fail(err)
	return name
}

func (p *Location) number(element string) int32 {
	n, err := parseInt31(element)
	p.fail(err)
	return n
}

// parseInt31 reads a decimal from 0 to 2^31-1 in its only spelling.
func parseInt31(text string) (int32, error) {
	n, err := strconv.ParseInt(text, 10, 32)
	if err != nil || n < 0 || strconv.FormatInt(n, 10) != text {
		return 0, fmt.Errorf("%q is not a number from 0 to 2147483647", text)
	}
	return int32(n), nil
}
