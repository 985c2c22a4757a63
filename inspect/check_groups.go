package inspect

import (
	"fmt"
	"strconv"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

func (c *checker) checkGroup(name string, g *groupKeys) {
	for id, m := range g.members {
		if m.kv.Lease == 0 {
			f := c.find(CodeMemberWithoutLease, m.kv, "the registration of "+id+" has no lease")
			f.Repair = deleteKey(m.kv)
		}
	}
	owned := map[registry.Partition]bool{}
	for _, o := range g.owners {
		owned[o.partition] = true
		c.checkOwner(g, o)
	}
	for _, o := range g.offsets {
		c.checkOffset(o)
	}
	c.checkUnowned(name, g, owned)
}

func (c *checker) checkOwner(g *groupKeys, o partitionKey) {
	value := string(o.kv.Value)
	id, _, registered := rebalance.ParseThread(value, func(id string) bool {
		m, ok := g.members[id]
		return ok && m.kv.Lease != 0
	})
	member := g.members[id]
	switch {
	case c.deleted(o.partition.Topic):
		f := c.suspect(CodeOwnerOfDeletedTopic, o.kv, fmt.Sprintf("owned by %q; topic %s does not exist", value, o.partition.Topic),
			c.aroundTopic(o.partition.Topic)...)
		f.lease = 0 // its owner may be alive
		f.Repair = deleteKey(o.kv, c.noTopic(o.partition.Topic)...)
	case o.kv.Lease == 0:
		c.ownerWithoutLease(o, member.kv, registered)
	case !registered:
		f := c.suspect(CodeOwnerWithoutMember, o.kv, fmt.Sprintf("owned by %q, who is not registered", value), span{g.paths.IDs(), true})
		f.Repair = deleteKey(o.kv, nobodyNamed(g, value)...)
	case member.kv.Lease != o.kv.Lease:
		c.suspect(CodeOwnerOtherLease, o.kv, fmt.Sprintf("owned by %q under lease %s; that member is registered under lease %s",
			value, registry.LeaseText(o.kv.Lease), registry.LeaseText(member.kv.Lease)), span{member.kv.Key, false})
	case c.foreign(o.partition):
		t := c.topics[o.partition.Topic]
		f := c.suspect(CodeOwnerUnknownPartition, o.kv, fmt.Sprintf("owned by %q; the topic record has no partition %s", value, o.partition.Name()),
			span{t.record.Key, false})
		f.lease = 0
		f.Repair = deleteKey(o.kv, unchanged(*t.record))
	}
}

// foreign tells whether a topic is there, and its record has no such partition.
func (c *checker) foreign(p registry.Partition) bool {
	t := c.topics[p.Topic]
	return t != nil && t.rec != nil && !c.knows(p)
}

// ownerWithoutLease is not a matter of time: nobody writes an owner key like that.
func (c *checker) ownerWithoutLease(o partitionKey, member registry.KV, registered bool) {
	f := c.find(CodeOwnerWithoutLease, o.kv, fmt.Sprintf("owned by %q without a lease", o.kv.Value))
	if !registered {
		f.Repair = deleteKey(o.kv)
		return
	}
	// The key keeps its create-revision, the token that its owner holds.
	f.Repair = &Repair{
		Action: "bind it to lease " + registry.LeaseText(member.Lease) + " of the member that it names",
		txn: registry.Txn{
			If:   []registry.Cond{unchanged(o.kv), unchanged(member)},
			Then: []registry.Op{registry.Put(o.kv.Key, o.kv.Value, member.Lease)},
		}}
}

// nobodyNamed holds if no consumer is registered whom the value of an owner key could name.
func nobodyNamed(g *groupKeys, value string) []registry.Cond {
	conds := []registry.Cond{registry.Absent(g.paths.ID(value))}
	for i := len(value) - 1; i > 0; i-- {
		if value[i] == '-' {
			return append(conds, registry.Absent(g.paths.ID(value[:i])))
		}
	}
	return conds
}

func (c *checker) checkOffset(o partitionKey) {
	if n, below := belowZero(o.kv); below {
		f := c.find(CodeOffsetBelowZero, o.kv, fmt.Sprintf("the offset is %d", n))
		f.Repair = deleteKey(o.kv)
		return
	}
	offset, err := registry.ParseOffset(o.kv)
	if err != nil {
		return // a finding already
	}
	text := strconv.FormatInt(offset, 10)
	topic := o.partition.Topic
	end, endKnown := c.probes.Ends[o.partition]
	start, startKnown := c.probes.Starts[o.partition]
	switch {
	case c.deleted(topic):
		f := c.suspect(CodeOffsetOfDeletedTopic, o.kv, "offset "+text+"; topic "+topic+" does not exist", c.aroundTopic(topic)...)
		f.Repair = deleteKey(o.kv, c.noTopic(topic)...)
		f.Repair.Loses = "offset " + text
	case c.foreign(o.partition):
		t := c.topics[topic]
		f := c.suspect(CodeOffsetUnknownPartition, o.kv, "offset "+text+"; the topic record has no partition "+o.partition.Name(), span{t.record.Key, false})
		f.Repair = deleteKey(o.kv, unchanged(*t.record))
		f.Repair.Loses = "offset " + text
	case endKnown && offset > end:
		c.suspect(CodeOffsetPastEnd, o.kv, fmt.Sprintf("offset %d; the log ends at %d", offset, end), span{c.topics[topic].record.Key, false})
	case startKnown && offset < start:
		c.suspect(CodeOffsetBeforeStart, o.kv, fmt.Sprintf("offset %d; the log starts at %d", offset, start), span{c.topics[topic].record.Key, false})
	}
}

// checkUnowned notes partitions that a member is due and that have no owner key.
// While a group rebalances that is how it works, for a moment.
func (c *checker) checkUnowned(name string, g *groupKeys, owned map[registry.Partition]bool) {
	wanted := map[string]bool{}
	for _, m := range g.members {
		if m.rec != nil {
			for topic := range m.rec.Subscription {
				wanted[topic] = true
			}
		}
	}
	var topics []registry.KV
	for topic := range wanted {
		if t := c.topics[topic]; t != nil && t.rec != nil {
			topics = append(topics, *t.record)
		}
	}
	if len(topics) == 0 {
		return
	}
	// What cannot be read there was noted when the tree was read.
	s, _ := rebalance.ReadSnapshot(c.root, g.paths, "", 0, g.ids, topics)
	due, err := rebalance.Assign(s)
	if err != nil {
		return
	}
	for p, thread := range due.All() {
		if owned[p] {
			continue
		}
		f := c.suspect(CodePartitionUnowned, registry.KV{Key: g.paths.Owner(p)}, "no owner; "+thread+" is due it",
			span{g.paths.IDs(), true}, span{c.root.Topic(p.Topic), false})
		f.Group = &name
		// A member that was killed before it could claim is registered until its lease runs out.
		id, _, _ := rebalance.ParseThread(thread, func(id string) bool { _, ok := g.members[id]; return ok })
		f.lease = g.members[id].kv.Lease
	}
}
