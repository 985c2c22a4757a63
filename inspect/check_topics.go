package inspect

import (
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/muster-io/muster/registry"
)

func (c *checker) brokersAnswer() {
	for id, b := range c.brokers {
		why, asked := c.probes.Answers[id]
		silent := asked && why != ""
		if b.kv.Lease == 0 {
			f := c.find(CodeBrokerWithoutLease, b.kv, "the broker record has no lease")
			if silent {
				f.What += fmt.Sprintf("; the broker does not answer: %s", why)
				f.Repair = deleteKey(b.kv)
			}
			continue
		}
		if silent {
			c.suspect(CodeBrokerSilent, b.kv, fmt.Sprintf("broker %d at %s port %d does not answer: %s", id, b.rec.Host, b.rec.Port, why))
		}
	}
}

func (c *checker) checkTopic(name string, t *topicKeys) {
	if t.record == nil {
		if c.deleted(name) {
			c.restOf(name, t)
		}
		return
	}
	if t.rec == nil {
		return // a finding already
	}
	// A topic without a log has no states: any is one too many.
	for _, n := range slices.Sorted(maps.Keys(t.rec.Partitions)) {
		s, ok := t.states[n]
		switch {
		case t.rec.NoLog:
		case !ok:
			c.stateMissing(name, t, n)
		case s.rec != nil:
			c.checkState(t, s, t.rec.Partitions[n])
		}
	}
	for n, s := range t.states {
		if _, ok := t.rec.Partitions[n]; !ok || t.rec.NoLog {
			f := c.suspect(CodeStateSurplus, s.kv, surplus(n, t.rec),
				span{t.record.Key, false})
			f.Repair = deleteKey(s.kv, unchanged(*t.record))
		}
	}
	c.checkCounts(name, t)
}

func surplus(n int32, rec *registry.TopicRecord) string {
	if rec.NoLog {
		return "the topic has no log, and so no states"
	}
	return fmt.Sprintf("partition %d is not among the %d of the topic record", n, len(rec.Partitions))
}

func (c *checker) stateMissing(name string, t *topicKeys, n int32) {
	kv := registry.KV{Key: c.root.PartitionState(name, n)}
	// The states of many partitions are written after the record, in parts.
	f := c.suspect(CodeStateMissing, kv, fmt.Sprintf("partition %d has no state", n),
		span{t.record.Key, false}, span{t.record.Key + "/partitions/", true})
	f.Repair = putRecord("write the initial state", kv.Key, registry.InitialState(t.rec.Partitions[n]),
		registry.Absent(kv.Key), unchanged(*t.record))
}

func (c *checker) checkState(t *topicKeys, s stateKey, replicas []int32) {
	quiet := span{t.record.Key, false}
	var f *Finding
	stranger := slices.IndexFunc(s.rec.ISR, func(id int32) bool { return !slices.Contains(replicas, id) })
	switch {
	case s.rec.Leader == -1:
		c.suspect(CodeNoLeader, s.kv, fmt.Sprintf("no leader; the replicas are on %v", replicas), quiet)
	case !slices.Contains(replicas, s.rec.Leader):
		f = c.suspect(CodeStateUnknownLeader, s.kv, fmt.Sprintf("leader %d is not among the replicas %v", s.rec.Leader, replicas), quiet)
	case stranger >= 0:
		f = c.suspect(CodeStateUnknownISR, s.kv, fmt.Sprintf("in sync %v is not within the replicas %v", s.rec.ISR, replicas), quiet)
	}
	if f == nil || len(replicas) != 1 {
		return
	}
	// With one replica there is no choice. The epoch goes up, as for any new leader.
	next := registry.InitialState(replicas)
	next.ControllerEpoch, next.LeaderEpoch = s.rec.ControllerEpoch, s.rec.LeaderEpoch+1
	f.Repair = putRecord(fmt.Sprintf("make its only replica, broker %d, the leader", replicas[0]), s.kv.Key, next,
		unchanged(s.kv), unchanged(*t.record))
}

func (c *checker) checkCounts(name string, t *topicKeys) {
	want := map[int32]int{}
	for _, replicas := range t.rec.Partitions {
		if t.rec.NoLog {
			break
		}
		for _, id := range replicas {
			want[id]++
		}
	}
	record := span{t.record.Key, false}
	for id, kv := range t.counts {
		switch stated := string(kv.Value); {
		case kv.Lease == 0:
			f := c.find(CodeCountWithoutLease, kv, "the count has no lease")
			f.Repair = deleteKey(kv)
		case stated != strconv.Itoa(want[id]):
			f := c.suspect(CodeCountMismatch, kv, fmt.Sprintf("broker %d states %s partitions, the topic record has %d there", id, stated, want[id]), record)
			f.Repair = &Repair{Action: fmt.Sprintf("write %d", want[id]), txn: registry.Txn{
				If:   []registry.Cond{unchanged(kv), unchanged(*t.record)},
				Then: []registry.Op{registry.Put(kv.Key, strconv.AppendInt(nil, int64(want[id]), 10), kv.Lease)}}}
			f.lease = 0 // the broker may be alive and well: its lease tells nothing
		}
	}
	for id, n := range want {
		b, alive := c.brokers[id]
		if _, stated := t.counts[id]; alive && !stated && b.kv.Lease != 0 {
			kv := registry.KV{Key: c.root.TopicBroker(name, id)}
			c.suspect(CodeCountMissing, kv, fmt.Sprintf("broker %d has %d partitions and does not state it", id, n), record, span{b.kv.Key, false})
		}
	}
}

// leadersAlive notes brokers that lead and are not registered, once each: one that
// is away may lead thousands.
func (c *checker) leadersAlive() {
	type led struct {
		partitions int
		topic      string
	}
	away := map[int32]led{}
	for name := range c.topics {
		c.eachPartition(name, func(_, leader int32, replicas []int32) {
			if _, alive := c.brokers[leader]; alive || !slices.Contains(replicas, leader) {
				return
			}
			l := away[leader]
			if l.partitions++; l.topic == "" || name < l.topic {
				l.topic = name
			}
			away[leader] = l
		})
	}
	for id, l := range away {
		c.suspect(CodeLeaderNotAlive, registry.KV{Key: c.root.Broker(id)},
			fmt.Sprintf("broker %d is not registered and leads %d partitions, of topic %s for one", id, l.partitions, l.topic))
	}
}

// restOf notes what is left of a topic that does not exist.
func (c *checker) restOf(name string, t *topicKeys) {
	var left []registry.KV
	if t.config != nil {
		left = append(left, *t.config)
	}
	for _, n := range slices.Sorted(maps.Keys(t.states)) {
		left = append(left, t.states[n].kv)
	}
	for _, id := range slices.Sorted(maps.Keys(t.counts)) {
		left = append(left, t.counts[id])
	}
	for _, kv := range left {
		f := c.suspect(CodeRestOfDeletedTopic, kv, "topic "+name+" does not exist", c.aroundTopic(name)...)
		f.Repair = deleteKey(kv, c.noTopic(name)...)
		f.lease = 0
	}
}

// aroundTopic is what changes while a topic is created or deleted.
func (c *checker) aroundTopic(name string) []span {
	return []span{{c.root.Topic(name), false}, {c.root.DeletedTopic(name), false}}
}

// noTopic holds if there is no such topic, nor a deletion that would see to the rest.
func (c *checker) noTopic(name string) []registry.Cond {
	return []registry.Cond{registry.Absent(c.root.Topic(name)), registry.Absent(c.root.DeletedTopic(name))}
}

// deletion notes one that has come to a standstill.
func (c *checker) deletion(topic string, kv registry.KV) {
	// What a deletion that goes on touches, one after the other.
	quiet := []span{{c.root.Topic(topic), false}, {c.root.Topic(topic) + "/", true}, {c.root.TopicConfig(topic), false}}
	for _, g := range c.groups {
		quiet = append(quiet, span{topicPrefix(g.paths.Owners(), topic), true}, span{topicPrefix(g.paths.Offsets(), topic), true})
	}
	c.suspect(CodeDeletionUnfinished, kv, "the deletion of topic "+topic+" does not go on", quiet...)
}

func topicPrefix(prefix, topic string) string { return prefix + escaped(topic) + "/" }

// escaped escapes a name that was read off a key, and so has a spelling.
func escaped(name string) string {
	element, err := registry.EscapeName(name)
	if err != nil {
		return "%00"
	}
	return element
}
