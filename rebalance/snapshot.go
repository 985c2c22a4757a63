package rebalance

import (
	"fmt"

	"github.com/muster-io/muster/registry"
)

// Reader makes snapshots of one group for one member. It remembers what it parsed,
// so that a change costs what it changed. It must not be used concurrently.
type Reader struct {
	root  registry.Root
	group registry.GroupPaths
	self  string
}

// NewReader returns a reader for the consumer with id self, or for an observer if
// self is empty.
func NewReader(root registry.Root, group registry.GroupPaths, self string) *Reader {
	return &Reader{root: root, group: group, self: self}
}

// Read makes the Snapshot of the registrations, topics and target record (nil if
// there is none) that a registry.View shows at one revision. The errors name the
// keys of records that cannot be used.
func (r *Reader) Read(revision int64, ids, topics []registry.KV, target *registry.KV) (Snapshot, []error) {
	return ReadSnapshot(r.root, r.group, r.self, revision, ids, topics)
}

// ReadSnapshot makes a member's Snapshot of the registrations, topics and
// brokers that a registry.View shows at one revision. Only topics that somebody
// of the group subscribes to are read. Records that cannot be parsed are left out
// and returned as errors that name their keys: one bad record must not stop a group.
func ReadSnapshot(root registry.Root, group registry.GroupPaths, self string, revision int64, ids, topics []registry.KV) (Snapshot, []error) {
	s := Snapshot{Revision: revision, Topology: Topology{}, Incarnations: map[string]int64{}}
	var errs []error
	wanted := map[string]bool{}
	for _, kv := range ids {
		id, err := group.ParseID(kv.Key)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if id == self {
			s.Registered = kv.ModRevision
		}
		if kv.Lease == 0 {
			// Its process could be long gone, and nothing would ever take it away.
			errs = append(errs, fmt.Errorf("registration %s has no lease: it counts for nobody; delete it", kv.Key))
			continue
		}
		rec, err := registry.ParseConsumer(kv)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		m := MemberInfo{ID: id, Strategies: rec.Strategy}
		if rec.Pattern == registry.PatternStatic {
			m.Subscription = rec.Subscription
		}
		for topic := range m.Subscription {
			wanted[topic] = true
		}
		s.Members = append(s.Members, m)
	}
	for _, kv := range topics {
		name, rec, ok, err := root.ParseTopic(kv)
		switch {
		case err != nil && wanted[name]:
			errs = append(errs, err)
		case ok && wanted[name]:
			s.Topology[name], s.Incarnations[name] = rec.List(name), kv.CreateRevision
		}
	}
	return s, errs
}
