package rebalance

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/muster-io/muster/registry"
)

// Reader makes snapshots of one group for one member. It remembers what it parsed,
// by key and mod-revision, and what filters allowed, so that a change costs what it
// changed. What the snapshots hold is shared between them and must not be changed.
// A Reader must not be used concurrently.
type Reader struct {
	root  registry.Root
	group registry.GroupPaths
	self  string

	ids      []registration
	topics   []topicEntry
	byTopic  map[string]int // name -> index in topics
	filters  map[filterID]*expansion
	wanted   map[string]int // topic -> static registrations and filters that ask for it
	others   bool           // topics came into wanted or went out of it
	target   *Target
	targeted int64 // mod-revision of the target record that was read

	members      []MemberInfo
	topology     Topology
	incarnations map[string]int64
}

// registration is one key under the group's ids.
type registration struct {
	key      string
	modified int64
	usable   bool
	info     MemberInfo // of a filter: without its Subscription
	filter   *expansion // nil for a static registration
	streams  int32      // for a filter
}

// topicEntry is one topic's record. Its partitions are read only when asked for.
type topicEntry struct {
	kv         registry.KV
	name       string
	read       bool
	partitions []registry.Partition // nil: the record cannot be read
}

type filterID struct {
	pattern, text   string
	excludeInternal bool
}

// expansion is what one filter allows of the topics that are there. All members
// that state the filter share it.
type expansion struct {
	users     int
	filter    *Filter // nil: it allows nothing, for it cannot be used
	allowed   map[string]bool
	asked     map[string]bool            // topics whose names were looked at -> allowed
	byStreams map[int32]map[string]int32 // subscriptions of so many streams
}

// NewReader returns a reader for the consumer with id self, or for an observer if
// self is empty.
func NewReader(root registry.Root, group registry.GroupPaths, self string) *Reader {
	return &Reader{root: root, group: group, self: self, byTopic: map[string]int{}, filters: map[filterID]*expansion{},
		wanted: map[string]int{}, topology: Topology{}, incarnations: map[string]int64{}}
}

// Read makes the Snapshot of the registrations, topics and target record (nil if
// there is none) that a registry.View shows at one revision, in byte order. Only
// topics that somebody of the group subscribes to are in it; a filter is expanded
// alike by all members, as its registration has it. Records that cannot be used are
// left out, and reported once as errors that name their keys: one bad record must
// not stop a group. A filter that cannot be used subscribes to nothing.
func (r *Reader) Read(revision int64, ids, topics []registry.KV, target *registry.KV) (Snapshot, []error) {
	var errs []error
	renamed, renewed := r.readTopics(topics)
	registered, changed := r.readIDs(ids, &errs)
	// Names that came or went concern the filters; what they ask for concerns the rest.
	expanded := r.expand(renamed, &errs)
	if changed || expanded {
		r.listMembers()
	}
	r.listTopics(renewed, &errs)
	s := Snapshot{Revision: revision, Members: r.members, Topology: r.topology, Incarnations: r.incarnations, Registered: registered}
	if target == nil {
		r.target, r.targeted = nil, 0
		return s, errs
	}
	if target.ModRevision != r.targeted {
		var err error
		r.targeted = target.ModRevision
		if r.target, err = ReadTarget(*target); err != nil {
			r.target = nil
			errs = append(errs, err)
		}
	}
	s.Target, s.TargetRecord = r.target, r.targeted
	return s, errs
}

// readIDs brings the registrations up to date, and returns the revision of the
// reader's own, and whether any is another one.
func (r *Reader) readIDs(kvs []registry.KV, errs *[]error) (registered int64, changed bool) {
	selfKey := ""
	if r.self != "" {
		selfKey = r.group.ID(r.self)
	}
	old := r.ids
	next := make([]registration, 0, len(kvs))
	for _, kv := range kvs {
		if kv.Key == selfKey {
			registered = kv.ModRevision
		}
		for len(old) > 0 && old[0].key < kv.Key {
			r.release(old[0])
			changed, old = true, old[1:]
		}
		if len(old) > 0 && old[0].key == kv.Key {
			if old[0].modified == kv.ModRevision {
				next, old = append(next, old[0]), old[1:]
				continue
			}
			r.release(old[0])
			old = old[1:]
		}
		reg, err := r.parse(kv)
		if err != nil {
			*errs = append(*errs, err)
		}
		changed = true
		next = append(next, reg)
	}
	for _, reg := range old {
		r.release(reg)
		changed = true
	}
	r.ids = next
	return registered, changed
}

// parse reads one registration and counts what it asks for.
func (r *Reader) parse(kv registry.KV) (registration, error) {
	reg := registration{key: kv.Key, modified: kv.ModRevision}
	id, err := r.group.ParseID(kv.Key)
	if err != nil {
		return reg, err
	}
	if kv.Lease == 0 {
		// Its process could be long gone, and nothing would ever take it away.
		return reg, fmt.Errorf("registration %s has no lease: it counts for nobody; delete it", kv.Key)
	}
	rec, err := registry.ParseConsumer(kv)
	if err != nil {
		return reg, err
	}
	reg.usable = true
	reg.info = MemberInfo{ID: id, Strategies: rec.Strategy}
	if rec.Pattern != registry.PatternWhiteList && rec.Pattern != registry.PatternBlackList {
		// A pattern that is none of those means static, as for consumers of 0.8.2.
		reg.info.Subscription = rec.Subscription
		for topic := range rec.Subscription {
			r.want(topic, 1)
		}
		return reg, nil
	}
	if len(rec.Subscription) != 1 {
		return reg, fmt.Errorf("consumer record %s: %w: %d filters, want 1; it subscribes to nothing", kv.Key, registry.ErrRecord, len(rec.Subscription))
	}
	for text, streams := range rec.Subscription {
		fid := filterID{rec.Pattern, text, rec.ExcludesInternal()}
		reg.info.Filter = fmt.Sprintf("%s %s, internal excluded %v, %d streams", fid.pattern, fid.text, fid.excludeInternal, streams)
		reg.streams = streams
		if reg.filter = r.filters[fid]; reg.filter == nil {
			reg.filter = &expansion{}
			if reg.filter.filter, err = ParseFilter(fid.pattern, fid.text, fid.excludeInternal); err != nil {
				reg.filter.filter = nil
				err = fmt.Errorf("consumer record %s subscribes to nothing: %w", kv.Key, err)
			}
			r.filters[fid] = reg.filter
		}
	}
	reg.filter.users++
	return reg, err
}

// release takes back what a registration asked for.
func (r *Reader) release(reg registration) {
	if reg.filter != nil {
		reg.filter.users--
		return
	}
	for topic := range reg.info.Subscription {
		r.want(topic, -1)
	}
}

func (r *Reader) want(topic string, n int) {
	before := r.wanted[topic]
	if r.wanted[topic] += n; r.wanted[topic] == 0 {
		delete(r.wanted, topic)
	}
	r.others = r.others || before == 0 || before+n == 0
}

// readTopics brings the list of topics up to date. renamed: names came or went;
// renewed: some record is another one.
func (r *Reader) readTopics(kvs []registry.KV) (renamed, renewed bool) {
	old := r.topics
	prefix := len(r.root.Topics())
	same := 0 // the entries that stand where they stood
	var next []topicEntry
	keep := func(e topicEntry) {
		if next == nil && same < len(old) && old[same].kv.Key == e.kv.Key && old[same].kv.ModRevision == e.kv.ModRevision {
			same++
			return
		}
		if next == nil {
			next = append(make([]topicEntry, 0, len(old)+1), old[:same]...)
		}
		next = append(next, e)
	}
	i := 0
	for _, kv := range kvs {
		if len(kv.Key) <= prefix || strings.IndexByte(kv.Key[prefix:], '/') >= 0 {
			continue // a key below a topic
		}
		for i < len(old) && old[i].kv.Key < kv.Key {
			renamed, i = true, i+1
		}
		switch {
		case i < len(old) && old[i].kv.Key == kv.Key && old[i].kv.ModRevision == kv.ModRevision:
			keep(old[i])
			i++
			continue
		case i < len(old) && old[i].kv.Key == kv.Key:
			i++
		default:
			renamed = true
		}
		renewed = true
		name, err := registry.UnescapeName(kv.Key[prefix:])
		if err != nil {
			name = "" // no name that anybody could subscribe to
		}
		keep(topicEntry{kv: kv, name: name})
	}
	renamed = renamed || i < len(old)
	if next == nil && same == len(old) {
		return renamed, renewed
	}
	if next == nil {
		next = slices.Clone(old[:same])
	}
	r.topics = next
	clear(r.byTopic)
	for i, e := range next {
		r.byTopic[e.name] = i
	}
	return renamed, true
}

// expand brings the filters up to date, and tells whether one allows other topics.
func (r *Reader) expand(renamed bool, errs *[]error) (changed bool) {
	for id, x := range r.filters {
		if x.users == 0 {
			for topic := range x.allowed {
				r.want(topic, -1)
			}
			delete(r.filters, id)
			continue
		}
		if x.asked != nil && !renamed {
			continue
		}
		allowed, err := x.look(r.topics)
		if err != nil {
			*errs = append(*errs, fmt.Errorf("%s %s subscribes to nothing: %w", id.pattern, id.text, err))
		}
		if x.byStreams != nil && maps.Equal(allowed, x.allowed) {
			continue
		}
		for topic := range x.allowed {
			if !allowed[topic] {
				r.want(topic, -1)
			}
		}
		for topic := range allowed {
			if !x.allowed[topic] {
				r.want(topic, 1)
			}
		}
		x.allowed, x.byStreams, changed = allowed, map[int32]map[string]int32{}, true
	}
	return changed
}

// look asks the filter for the names that it was not asked for yet.
func (x *expansion) look(topics []topicEntry) (map[string]bool, error) {
	asked := make(map[string]bool, len(topics))
	allowed := map[string]bool{}
	for _, t := range topics {
		if t.name == "" || x.filter == nil {
			continue
		}
		yes, known := x.asked[t.name]
		if !known {
			var err error
			if yes, err = x.filter.Allows(t.name); err != nil {
				x.filter, x.asked = nil, asked
				return nil, err
			}
		}
		if asked[t.name] = yes; yes {
			allowed[t.name] = true
		}
	}
	x.asked = asked
	return allowed, nil
}

// of is the subscription of a member with the filter and so many streams.
func (x *expansion) of(streams int32) map[string]int32 {
	sub := x.byStreams[streams]
	if sub == nil {
		sub = make(map[string]int32, len(x.allowed))
		for topic := range x.allowed {
			sub[topic] = streams
		}
		x.byStreams[streams] = sub
	}
	return sub
}

func (r *Reader) listMembers() {
	list := make([]MemberInfo, 0, len(r.ids))
	for _, reg := range r.ids {
		if !reg.usable {
			continue
		}
		if reg.filter != nil {
			reg.info.Subscription = reg.filter.of(reg.streams)
		}
		list = append(list, reg.info)
	}
	// Keys are escaped, so that their order need not be that of the ids.
	slices.SortFunc(list, func(a, b MemberInfo) int { return strings.Compare(a.ID, b.ID) })
	r.members = list
}

// listTopics brings topology and incarnations up to date. They are made anew only
// if something in them is another.
func (r *Reader) listTopics(renewed bool, errs *[]error) {
	if !renewed && !r.others {
		return
	}
	r.others = false
	topology, incarnations := make(Topology, len(r.wanted)), make(map[string]int64, len(r.wanted))
	for topic := range r.wanted {
		i, found := r.byTopic[topic]
		if !found {
			continue
		}
		e := &r.topics[i]
		r.readTopic(e, errs)
		if e.partitions != nil {
			topology[topic], incarnations[topic] = e.partitions, e.kv.CreateRevision
		}
	}
	if maps.Equal(incarnations, r.incarnations) && maps.EqualFunc(topology, r.topology, slices.Equal[[]registry.Partition]) {
		return
	}
	r.topology, r.incarnations = topology, incarnations
}

func (r *Reader) readTopic(e *topicEntry, errs *[]error) {
	if e.read {
		return
	}
	e.read = true
	name, rec, ok, err := r.root.ParseTopic(e.kv)
	switch {
	case err != nil:
		*errs = append(*errs, err)
	case ok:
		e.partitions = rec.List(name)
	}
	e.kv.Value = nil // of no more use
}

// ReadSnapshot is Read for those who look once.
func ReadSnapshot(root registry.Root, group registry.GroupPaths, self string, revision int64, ids, topics []registry.KV) (Snapshot, []error) {
	return NewReader(root, group, self).Read(revision, ids, topics, nil)
}
