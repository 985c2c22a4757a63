package registry

import (
	"cmp"
	"iter"
	"slices"

	"github.com/tidwall/btree"
)

// keyMap is what stands under one prefix, in byte order. A copy costs nothing: the
// two share what neither has changed since.
type keyMap = btree.Map[string, KV]

// A Snapshot is what stood under a View's prefixes at one revision. It is
// immutable, and taking one costs no more in a big View than in a small one.
type Snapshot struct {
	Revision int64
	keys     []*keyMap // by prefix, in the order of the View
}

// Under returns the keys under the i-th prefix of the View, in byte order.
func (s Snapshot) Under(i int) []KV {
	kvs := make([]KV, 0, s.Len(i))
	return slices.AppendSeq(kvs, s.All(i))
}

// All goes through the keys under the i-th prefix of the View, in byte order,
// without copying them.
func (s Snapshot) All(i int) iter.Seq[KV] {
	return func(yield func(KV) bool) {
		if i < len(s.keys) {
			s.keys[i].Scan(func(_ string, kv KV) bool { return yield(kv) })
		}
	}
}

// Get returns one key under the i-th prefix of the View.
func (s Snapshot) Get(i int, key string) (KV, bool) {
	if i >= len(s.keys) {
		return KV{}, false
	}
	return s.keys[i].Get(key)
}

// Len is how many keys stand under the i-th prefix of the View.
func (s Snapshot) Len(i int) int {
	if i >= len(s.keys) {
		return 0
	}
	return s.keys[i].Len()
}

// viewMachine keeps several prefixes in step. Each has a watch of its own that
// comes along at its own pace; a snapshot is taken only at a revision that all of
// them have reached, since a decision over several prefixes must not mix an old
// state of one with a new state of another. What a watch brings from beyond that
// revision waits. It has no clock and does no I/O.
type viewMachine struct {
	parts    []viewPart
	revision int64 // of the state in parts[i].keys: the least that all have reached
}

type viewPart struct {
	keys    *keyMap
	reached int64
	ahead   []WatchResponse // events beyond the machine's revision
}

// load replaces everything by lists taken at one revision, each in byte order, and
// returns the difference as events: the one right answer to a gap in a watch.
func (m *viewMachine) load(revision int64, lists [][]KV) []Event {
	var events []Event
	parts := make([]viewPart, len(lists))
	for i, list := range lists {
		keys := &keyMap{}
		for _, kv := range list {
			keys.Load(kv.Key, kv)
		}
		old := &keyMap{}
		if i < len(m.parts) {
			old = m.parts[i].keys
		}
		events = appendDifference(events, revision, old, list)
		parts[i] = viewPart{keys: keys, reached: revision}
	}
	m.parts, m.revision = parts, revision
	inOrder(events)
	return events
}

// inOrder sorts by revision; within one the order of the prefixes stays.
func inOrder(events []Event) {
	slices.SortStableFunc(events, func(a, b Event) int { return cmp.Compare(a.ModRevision, b.ModRevision) })
}

// appendDifference walks the old state and the new list side by side.
func appendDifference(events []Event, revision int64, old *keyMap, now []KV) []Event {
	events = slices.Grow(events, max(len(now)-old.Len(), 0))
	gone := func(was KV) {
		events = append(events, Event{KV: KV{Key: was.Key, ModRevision: revision}, Deleted: true, Previous: &was})
	}
	before := old.Iter()
	more := before.First()
	for _, is := range now {
		for more && before.Key() < is.Key {
			gone(before.Value())
			more = before.Next()
		}
		if more && before.Key() == is.Key {
			if before.Value().ModRevision != is.ModRevision {
				was := before.Value()
				events = append(events, Event{KV: is, Previous: &was})
			}
			more = before.Next()
			continue
		}
		events = append(events, Event{KV: is})
	}
	for ; more; more = before.Next() {
		gone(before.Value())
	}
	return events
}

// step takes one response of the i-th watch. It returns the events that took
// effect, in order of revision.
func (m *viewMachine) step(i int, r WatchResponse) (events []Event) {
	p := &m.parts[i]
	if r.Revision > p.reached {
		p.reached = r.Revision
	}
	if len(r.Events) > 0 {
		p.ahead = append(p.ahead, r)
	}
	least := m.parts[0].reached
	for _, q := range m.parts[1:] {
		least = min(least, q.reached)
	}
	if least > m.revision {
		m.revision = least
		events = m.apply()
	}
	return events
}

// wanted is the newest revision of the events that are held back since some prefix
// has not come as far, so that progress should be asked for; 0 if there are none.
func (m *viewMachine) wanted() (revision int64) {
	for _, p := range m.parts {
		if n := len(p.ahead); n > 0 {
			revision = max(revision, p.ahead[n-1].Revision)
		}
	}
	return revision
}

// apply brings into effect what lies at or before the machine's revision.
func (m *viewMachine) apply() []Event {
	var events []Event
	for i := range m.parts {
		p := &m.parts[i]
		for len(p.ahead) > 0 {
			// A response may hold several revisions; one beyond the machine's splits it.
			r := &p.ahead[0]
			n := slices.IndexFunc(r.Events, func(e Event) bool { return e.ModRevision > m.revision })
			if n < 0 {
				n = len(r.Events)
			}
			for _, e := range r.Events[:n] {
				events = append(events, p.put(e))
			}
			if n < len(r.Events) {
				r.Events = r.Events[n:]
				break
			}
			p.ahead = p.ahead[1:]
		}
	}
	inOrder(events)
	return events
}

func (p *viewPart) put(e Event) Event {
	var was KV
	var there bool
	if e.Deleted {
		was, there = p.keys.Delete(e.Key)
	} else {
		was, there = p.keys.Set(e.Key, e.KV)
	}
	e.Previous = nil
	if there {
		e.Previous = &was
	}
	return e
}

// snapshot hands out the present state.
func (m *viewMachine) snapshot() Snapshot {
	s := Snapshot{Revision: m.revision, keys: make([]*keyMap, len(m.parts))}
	for i := range m.parts {
		s.keys[i] = m.parts[i].keys.Copy()
	}
	return s
}
