package api

import (
	"iter"

	"github.com/tidwall/btree"
)

// TopicSet is topics by name, immutable. Another that differs in a few topics costs
// what those cost, however many there are. The zero value is empty.
type TopicSet struct{ m *btree.Map[string, Topic] }

// Get returns a topic.
func (s TopicSet) Get(name string) (Topic, bool) {
	if s.m == nil {
		return Topic{}, false
	}
	return s.m.Get(name)
}

// Len is how many topics there are.
func (s TopicSet) Len() int {
	if s.m == nil {
		return 0
	}
	return s.m.Len()
}

// All goes through the topics in the order of their names.
func (s TopicSet) All() iter.Seq[Topic] {
	return func(yield func(Topic) bool) {
		if s.m != nil {
			s.m.Scan(func(_ string, t Topic) bool { return yield(t) })
		}
	}
}

// Change returns a set with other topics put in place, and some left out.
func (s TopicSet) Change(put []Topic, leaveOut []string) TopicSet {
	m := &btree.Map[string, Topic]{}
	if s.m != nil {
		m = s.m.Copy()
	}
	for _, name := range leaveOut {
		m.Delete(name)
	}
	for _, t := range put {
		m.Set(t.Name, t)
	}
	return TopicSet{m}
}
