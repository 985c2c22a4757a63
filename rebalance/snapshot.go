package rebalance

import (
	"fmt"
	"hash/maphash"
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
	topics   []*topicEntry
	byTopic  map[string]*topicEntry
	filters  map[filterID]*expansion
	statics  map[uint64][]*staticSubscription // by hash
	seed     maphash.Seed                     // of that
	wanted   map[string]int                   // topic -> static subscriptions and filters that ask for it
	dirty    map[string]bool                  // topics that are others, or asked for by others, than when last listed
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
	info     MemberInfo          // of a filter: without its Subscription
	static   *staticSubscription // or
	filter   *expansion
	streams  int32 // for a filter
}

// staticSubscription is shared by all members that state it: two are then compared,
// and their topics counted, without a look at each of thousands of topics.
type staticSubscription struct {
	users   int
	hash    uint64
	streams map[string]int32
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
	err       error   // why not
	asked     bool    // for all topics that were there
	allowed   map[string]bool
	byStreams map[int32]map[string]int32 // subscriptions of so many streams
}

// NewReader returns a reader for the consumer with id self, or for an observer if
// self is empty.
func NewReader(root registry.Root, group registry.GroupPaths, self string) *Reader {
	return &Reader{root: root, group: group, self: self, byTopic: map[string]*topicEntry{}, filters: map[filterID]*expansion{},
		statics: map[uint64][]*staticSubscription{}, seed: maphash.MakeSeed(), wanted: map[string]int{}, dirty: map[string]bool{}, topology: Topology{}, incarnations: map[string]int64{}}
}

// Read makes the Snapshot of the registrations, topics and target record (nil if
// there is none) that a registry.View shows at one revision, in byte order. Only
// topics that somebody of the group subscribes to are in it; a filter is expanded
// alike by all members, as its registration has it. Records that cannot be used are
// left out, and reported once as errors that name their keys: one bad record must
// not stop a group. A filter that cannot be used subscribes to nothing.
func (r *Reader) Read(revision int64, ids, topics []registry.KV, target *registry.KV) (Snapshot, []error) {
	var errs []error
	came, went := r.readTopics(topics)
	registered, changed := r.readIDs(ids, &errs)
	// Names that came or went concern the filters; what they ask for concerns the rest.
	expanded := r.expand(came, went, &errs)
	if changed || expanded {
		r.listMembers()
	}
	r.listTopics(&errs)
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
	var replaced []registration
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
			replaced = append(replaced, old[0])
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
	for _, reg := range replaced { // last: mostly they ask for what is asked for again
		r.release(reg)
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
		reg.static = r.share(rec.Subscription)
		reg.info.Subscription = reg.static.streams
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
			reg.filter = &expansion{allowed: map[string]bool{}, byStreams: map[int32]map[string]int32{}}
			reg.filter.filter, reg.filter.err = ParseFilter(fid.pattern, fid.text, fid.excludeInternal)
			r.filters[fid] = reg.filter
		}
	}
	reg.filter.users++
	if err := reg.filter.err; err != nil {
		return reg, fmt.Errorf("consumer record %s subscribes to nothing: %w", kv.Key, err)
	}
	return reg, nil
}

// release takes back what a registration asked for.
func (r *Reader) release(reg registration) {
	switch {
	case reg.filter != nil:
		reg.filter.users--
	case reg.static != nil:
		x := reg.static
		if x.users--; x.users > 0 {
			return
		}
		for topic := range x.streams {
			r.want(topic, -1)
		}
		r.statics[x.hash] = slices.DeleteFunc(r.statics[x.hash], func(y *staticSubscription) bool { return x == y })
		if len(r.statics[x.hash]) == 0 {
			delete(r.statics, x.hash)
		}
	}
}

// share returns what stands for the subscription, for one more user.
func (r *Reader) share(streams map[string]int32) *staticSubscription {
	hash := hashSubscription(streams, r.seed)
	for _, x := range r.statics[hash] {
		if maps.Equal(x.streams, streams) {
			x.users++
			return x
		}
	}
	x := &staticSubscription{users: 1, hash: hash, streams: streams}
	r.statics[hash] = append(r.statics[hash], x)
	for topic := range streams {
		r.want(topic, 1)
	}
	return x
}

func (r *Reader) want(topic string, n int) {
	before := r.wanted[topic]
	if r.wanted[topic] += n; r.wanted[topic] == 0 {
		delete(r.wanted, topic)
	}
	if before == 0 || before+n == 0 {
		r.dirty[topic] = true
	}
}

// readTopics brings the list of topics up to date, and returns the names that came
// and those that went.
func (r *Reader) readTopics(kvs []registry.KV) (came, went []string) {
	old := r.topics
	prefix := len(r.root.Topics())
	var next []*topicEntry // nil as long as all stands where it stood
	i := 0
	change := func() {
		if next == nil {
			next = append(make([]*topicEntry, 0, len(old)+1), old[:i]...)
		}
	}
	drop := func() {
		change()
		delete(r.byTopic, old[i].name)
		r.dirty[old[i].name] = true
		i++
	}
	same := func(kv *registry.KV) bool {
		if i == len(old) || old[i].kv.Key != kv.Key || old[i].kv.ModRevision != kv.ModRevision {
			return false
		}
		if next != nil {
			next = append(next, old[i])
		}
		i++
		return true
	}
	for k := range kvs {
		kv := &kvs[k]
		if same(kv) || len(kv.Key) <= prefix || strings.IndexByte(kv.Key[prefix:], '/') >= 0 {
			continue // as it was, or a key below a topic
		}
		for i < len(old) && old[i].kv.Key < kv.Key {
			went = append(went, old[i].name)
			drop()
		}
		if same(kv) {
			continue
		}
		e := &topicEntry{kv: *kv}
		var err error
		if e.name, err = registry.UnescapeName(kv.Key[prefix:]); err != nil {
			e.name = kv.Key // which is no name that anybody could subscribe to
		}
		if i < len(old) && old[i].kv.Key == kv.Key {
			drop()
		} else {
			change()
			came = append(came, e.name)
		}
		r.byTopic[e.name], r.dirty[e.name] = e, true
		next = append(next, e)
	}
	for i < len(old) {
		went = append(went, old[i].name)
		drop()
	}
	if next != nil {
		r.topics = next
	}
	return came, went
}

// expand brings the filters up to date, and tells whether one allows other topics.
func (r *Reader) expand(came, went []string, errs *[]error) (changed bool) {
	for id, x := range r.filters {
		var err error
		before := len(x.byStreams)
		switch {
		case x.users == 0:
			r.allowNothing(x)
			delete(r.filters, id)
			continue
		case x.filter == nil:
		case x.asked:
			for _, name := range went {
				if x.allowed[name] {
					delete(x.allowed, name)
					r.want(name, -1)
					clear(x.byStreams)
				}
			}
			err = r.ask(x, came)
		default:
			x.asked = true
			names := make([]string, len(r.topics))
			for i, t := range r.topics {
				names[i] = t.name
			}
			err = r.ask(x, names)
		}
		if err != nil {
			// Members with the same filter, and machines as fast, come to the same; if not,
			// they claim different shares, which costs moves but never two owners.
			x.filter, x.err = nil, err
			r.allowNothing(x)
			*errs = append(*errs, fmt.Errorf("%s %s subscribes to nothing: %w", id.pattern, id.text, err))
		}
		changed = changed || len(x.byStreams) < before
	}
	return changed
}

// ask lets the filter look at names that are new to it.
func (r *Reader) ask(x *expansion, names []string) error {
	for _, name := range names {
		yes, err := x.filter.Allows(name)
		if err != nil {
			return err
		}
		if yes {
			x.allowed[name] = true
			r.want(name, 1)
			clear(x.byStreams)
		}
	}
	return nil
}

func (r *Reader) allowNothing(x *expansion) {
	for name := range x.allowed {
		r.want(name, -1)
	}
	clear(x.allowed)
	clear(x.byStreams)
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
// if something in them is another, for former snapshots have them too.
func (r *Reader) listTopics(errs *[]error) {
	fresh := false
	change := func() {
		if !fresh {
			fresh, r.topology, r.incarnations = true, maps.Clone(r.topology), maps.Clone(r.incarnations)
		}
	}
	for topic := range r.dirty {
		was, listed := r.topology[topic]
		e := r.byTopic[topic]
		if e == nil || r.wanted[topic] == 0 || !r.readTopic(e, errs) {
			if listed {
				change()
				delete(r.topology, topic)
				delete(r.incarnations, topic)
			}
			continue
		}
		if !listed || r.incarnations[topic] != e.kv.CreateRevision || !slices.Equal(was, e.partitions) {
			change()
			r.topology[topic], r.incarnations[topic] = e.partitions, e.kv.CreateRevision
		}
	}
	clear(r.dirty)
}

// readTopic tells whether the record can be read.
func (r *Reader) readTopic(e *topicEntry, errs *[]error) bool {
	if e.read {
		return e.partitions != nil
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
	return e.partitions != nil
}

// ReadSnapshot is Read for those who look once.
func ReadSnapshot(root registry.Root, group registry.GroupPaths, self string, revision int64, ids, topics []registry.KV) (Snapshot, []error) {
	return NewReader(root, group, self).Read(revision, ids, topics, nil)
}
