package registry

import (
	"cmp"
	"maps"
	"slices"
)

// A Snapshot is what stood under a View's prefixes at one revision. It is
// immutable.
type Snapshot struct {
	Revision int64
	keys     []map[string]KV // by prefix, in the order of the View
}

// Under returns the keys under the i-th prefix of the View, in byte order.
func (s Snapshot) Under(i int) []KV {
	if i >= len(s.keys) {
		return nil
	}
	kvs := make([]KV, 0, len(s.keys[i]))
	for _, name := range slices.Sorted(maps.Keys(s.keys[i])) {
		kvs = append(kvs, s.keys[i][name])
	}
	return kvs
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
	keys    map[string]KV
	shared  bool // keys is part of a snapshot that was handed out: copy before writing
	reached int64
	ahead   []WatchResponse // events beyond the machine's revision
}

// load replaces everything by lists taken at one revision, and returns the
// difference as events: the one right answer to a gap in a watch.
func (m *viewMachine) load(revision int64, lists [][]KV) []Event {
	var events []Event
	parts := make([]viewPart, len(lists))
	for i, list := range lists {
		keys := make(map[string]KV, len(list))
		for _, kv := range list {
			keys[kv.Key] = kv
		}
		var old map[string]KV
		if i < len(m.parts) {
			old = m.parts[i].keys
		}
		events = append(events, difference(revision, old, keys)...)
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

func difference(revision int64, old, now map[string]KV) []Event {
	var events []Event
	for _, name := range slices.Sorted(maps.Keys(old)) {
		was := old[name]
		is, there := now[name]
		switch {
		case !there:
			events = append(events, Event{KV: KV{Key: name, ModRevision: revision}, Deleted: true, Previous: &was})
		case is.ModRevision != was.ModRevision:
			events = append(events, Event{KV: is, Previous: &was})
		}
	}
	for _, name := range slices.Sorted(maps.Keys(now)) {
		if _, there := old[name]; !there {
			events = append(events, Event{KV: now[name]})
		}
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
	if p.shared {
		p.keys, p.shared = maps.Clone(p.keys), false
	}
	if was, there := p.keys[e.Key]; there {
		e.Previous = &was
	}
	if e.Deleted {
		delete(p.keys, e.Key)
	} else {
		kv := e.KV
		p.keys[e.Key] = kv
	}
	return e
}

// snapshot hands out the present state.
func (m *viewMachine) snapshot() Snapshot {
	s := Snapshot{Revision: m.revision, keys: make([]map[string]KV, len(m.parts))}
	for i := range m.parts {
		m.parts[i].shared = true
		s.keys[i] = m.parts[i].keys
	}
	return s
}
