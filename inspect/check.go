package inspect

import (
	"github.com/muster-io/muster/registry"
)

// Probes is what the brokers said when they were asked, after the tree was read.
type Probes struct {
	// Answers tells for each broker that was asked why it did not answer; "" if it did.
	Answers map[int32]string
	// Starts and Ends of logs; those that are not known are missing.
	Starts, Ends map[registry.Partition]int64
}

// Questions is what a tree gives reason to ask the brokers.
type Questions struct {
	Brokers    map[int32]registry.BrokerRecord
	Partitions []registry.Partition // with an offset, of topics that exist
}

// Questions returns what Check would like to know.
func (t Tree) Questions() Questions { return t.read().questions() }

func (m *model) questions() Questions {
	q := Questions{Brokers: map[int32]registry.BrokerRecord{}}
	for id, b := range m.brokers {
		if b.rec.Host != "" {
			q.Brokers[id] = b.rec
		}
	}
	asked := map[registry.Partition]bool{}
	for _, g := range m.groups {
		for _, o := range g.offsets {
			if m.knows(o.partition) && !asked[o.partition] {
				asked[o.partition] = true
				q.Partitions = append(q.Partitions, o.partition)
			}
		}
	}
	return q
}

// knows tells whether the topic record has the partition.
func (m *model) knows(p registry.Partition) bool {
	t := m.topics[p.Topic]
	if t == nil || t.rec == nil {
		return false
	}
	home, ok := t.homes[p.Number]
	return ok && home == p.Home
}

// Check returns all that looks wrong. Some of it is only suspicion, since a
// registry that changes looks so for a moment: see Confirm.
func Check(t Tree, p Probes) []Finding { return t.read().check(p) }

func (m *model) check(p Probes) []Finding {
	c := checker{model: m, probes: p}
	c.brokersAnswer()
	for name, topic := range m.topics {
		c.checkTopic(name, topic)
	}
	c.leadersAlive()
	for topic, kv := range m.deletions {
		c.deletion(topic, kv)
	}
	for name, g := range m.groups {
		c.checkGroup(name, g)
	}
	list := append(m.found, c.found...)
	inOrder(list)
	return list
}

type checker struct {
	*model
	probes Probes
	found  []Finding
}

// find notes a finding about a key. It returns a pointer that is good until the next one.
func (c *checker) find(code Code, kv registry.KV, what string) *Finding {
	f := newFinding(code, c.root.Locate(kv.Key), what)
	f.quiet = []span{{kv.Key, false}}
	f.lease = kv.Lease
	c.found = append(c.found, f)
	return &c.found[len(c.found)-1]
}

// suspect is find for what a change under way could look like: it counts only if
// neither the key nor any of the others changes until a second look.
func (c *checker) suspect(code Code, kv registry.KV, what string, others ...span) *Finding {
	f := c.find(code, kv, what)
	f.suspicion = true
	f.quiet = append(f.quiet, others...)
	return f
}
