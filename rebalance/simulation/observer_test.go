package simulation

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/muster-io/muster/offsets"
	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// observer sees what users would: which records are handed over by whom, and which
// commits are admitted. It judges by that, and by leases; not by what the machines
// believe.
type observer struct {
	w    *world
	logs map[registry.Partition]*plog
	// excused are ownerships that somebody ended by hand: until its member has heard of
	// it, it may hand over what another one owns by now. Its commits may not be admitted.
	excused map[ownership]time.Duration
	// born is when each topic was created last, whether or not it is there.
	born map[string]int64
	// spoiled are topics that were deleted by their record only.
	spoiled map[string]bool
	// releasing is what the release that takes effect now asks for.
	releasing []registry.Cond
	running   []*delivery // those with a record in the handler
	ended     map[ownership]int
}

// plog is the log of one partition of one topic, from its creation to its deletion.
type plog struct {
	partition registry.Partition
	created   int64
	start     int64
	end       int64
	deleted   bool
	// sloppy: the topic was deleted by somebody who knew of its record only, so that
	// offsets of the former one count for this one.
	sloppy    bool
	waiters   []*delivery
	finished  int64          // records below were finished, or skipped by name
	beyond    map[int64]bool // finished above that
	committed int64
	token     int64 // the newest ownership that handed over anything
	orderly   int64 // what is below was finished by owners that released in order
}

func (b *observer) log(p registry.Partition) *plog { return b.logs[p] }

// excuse is how long an ownership that was ended by hand may go unnoticed.
const excuse = 30 * sec

// handOver is a record going to a handler.
func (b *observer) handOver(o *delivery, offset int64) {
	w, l := b.w, o.log
	w.counts[handedOver]++
	if w.trace != nil {
		w.tell("%s hands over %s offset %d (token %d)", o.p.id, o.partition, offset, o.token)
	}
	if b.logs[o.partition] != l {
		return // of a former topic: nobody else can have it
	}
	since, excused := b.excused[o.ownership()]
	if excused && w.now-since > excuse {
		w.fail("%s hands over %s under token %d, which was ended by hand %s ago", o.p.id, o.partition, o.token, w.now-since)
	}
	if !excused {
		if _, err := w.twin.Remaining(ctx, o.session.lease); err != nil {
			w.fail("%s hands over %s offset %d after its lease ran out", o.p.id, o.partition, offset)
		}
		if l.token > o.token {
			w.fail("%s hands over %s offset %d under token %d, and another did under %d", o.p.id, o.partition, offset, o.token, l.token)
		}
	}
	for _, other := range b.running {
		if other.partition != o.partition || other.log != l {
			continue
		}
		if other.p == o.p {
			w.fail("%s hands over %s offset %d, and still has another record of it in hand", o.p.id, o.partition, offset)
		}
		if !b.over(other) && !excused {
			w.fail("%s and %s both deliver %s (tokens %d and %d)", o.p.id, other.p.id, o.partition, o.token, other.token)
		}
	}
	if offset < l.orderly && !l.sloppy && !excused {
		w.fail("%s hands over %s offset %d, which was finished by an owner that released it in order", o.p.id, o.partition, offset)
	}
	l.token = max(l.token, o.token)
	b.running = append(b.running, o)
}

// over tells whether an ownership is lost in truth: then its handler may still be at
// the record that it had.
func (b *observer) over(o *delivery) bool {
	if _, excused := b.excused[o.ownership()]; excused {
		return true
	}
	_, err := b.w.twin.Remaining(ctx, o.session.lease)
	return err != nil || o.taken
}

func (b *observer) finished(o *delivery, offset int64) {
	b.running = slices.DeleteFunc(b.running, func(x *delivery) bool { return x == o })
	l := o.log
	if l.foreign(o) {
		return
	}
	if offset < l.finished || l.beyond[offset] {
		b.w.counts[finishedAgain]++
		return
	}
	if l.beyond == nil {
		l.beyond = map[int64]bool{}
	}
	l.beyond[offset] = true
	l.advance()
}

func (l *plog) advance() {
	for l.beyond[l.finished] {
		delete(l.beyond, l.finished)
		l.finished++
	}
}

// reset is a position that the reset policy named to an owner.
func (b *observer) reset(o *delivery, l *plog, to int64) {
	if !l.foreign(o) {
		l.reset(to)
	}
}

func (l *plog) reset(to int64) {
	l.finished = max(l.finished, to)
	l.committed = min(l.committed, to)
	l.advance()
}

// foreign tells whether an ownership is of a former topic. Its member may not have
// heard of the deletion when it asks the brokers, who know the name only, and so it may
// read the new topic's log; for that log it neither skips nor finishes anything.
func (l *plog) foreign(o *delivery) bool { return o.token < l.created }

// gone is a process that has ended: its handlers have, too.
func (b *observer) gone(p *process) {
	b.running = slices.DeleteFunc(b.running, func(x *delivery) bool { return x.p == p })
}

// released is a partition that its owner gives up in order.
func (b *observer) released(o *delivery) {
	if o.assigned && b.logs[o.partition] == o.log && !o.log.foreign(o) {
		o.log.orderly = max(o.log.orderly, o.next)
	}
}

// lost is a partition that a member believes to have lost: its owner key must be
// another, or gone, or older than its topic.
func (b *observer) lost(o *delivery, reason string) {
	b.revoked(o)
	if o.session.over {
		return
	}
	kv, _ := b.w.owner(b.w.group.Owner(o.partition))
	if kv != nil && kv.CreateRevision == o.token && kv.Lease == o.session.lease && o.token >= b.born[o.partition.Topic] {
		b.w.fail("%s believes that %s is lost (%s), and still has its owner key", o.p.id, o.partition, reason)
	}
}

func (b *observer) revoked(o *delivery) {
	if b.ended != nil {
		b.ended[o.ownership()]++
	}
}

// wrote looks at what a member's transaction brought about.
func (b *observer) wrote(p *process, t registry.Txn, res registry.TxnResult) {
	if !res.Succeeded {
		return
	}
	w := b.w
	purpose := w.purpose(t)
	for i, op := range t.Then {
		switch purpose {
		case commits:
			if res.Items[i].Txn.Succeeded {
				part, err := w.group.ParsePartition(op.Txn.Then[0].Key)
				w.must(err)
				b.committed(p, part, op.Txn, res.Revision)
			}
		case claims:
			if strings.HasPrefix(op.Key, w.group.Owners()) {
				part, err := w.group.ParsePartition(op.Key)
				w.must(err)
				b.claimed(p, part, string(op.Value), res.Revision)
			}
		case proposals:
			b.proposed(p, registry.KV{Key: op.Key, Value: op.Value, ModRevision: res.Revision})
		}
	}
}

// committed is a commit that was admitted.
func (b *observer) committed(p *process, part registry.Partition, t *registry.Txn, revision int64) {
	w := b.w
	w.counts[admitted]++
	offset, err := registry.ParseOffset(registry.KV{Value: t.Then[0].Value})
	w.must(err)
	token, previous := t.If[0].Number, t.If[1].Number
	w.tell("%s commits %s offset %d (token %d, after %d) at %d", p.id, part, offset, token, previous, revision)
	l := b.logs[part]
	if l == nil || l.sloppy {
		return // while a topic is being deleted its owner keys go first, then its offsets
	}
	if token < l.created {
		w.fail("%s commits %s offset %d under token %d, older than the topic's %d", p.id, part, offset, token, l.created)
	}
	if l.token > token {
		w.fail("%s commits %s offset %d under token %d, after another has handed over under %d", p.id, part, offset, token, l.token)
	}
	if previous == 0 && l.committed == offsets.None {
		// Nothing was committed: the reset policy has named the start.
		if offset > l.end {
			w.fail("%s starts %s at %d beyond its end %d", p.id, part, offset, l.end)
		}
		l.reset(offset)
	}
	if offset < l.committed {
		w.fail("%s commits %s offset %d, and %d was committed", p.id, part, offset, l.committed)
	}
	if offset > l.finished {
		w.fail("%s commits %s offset %d, and record %d was never finished", p.id, part, offset, l.finished)
	}
	l.committed = offset
	l.token = max(l.token, token)
}

// claimed is an owner key that came into being: it must be what the strategy says by
// the registrations as they are, at some moment since the last of them was written; or
// what the target record says, which stands whoever has registered since.
func (b *observer) claimed(p *process, part registry.Partition, thread string, revision int64) {
	w := b.w
	w.counts[claimedKeys]++
	w.tell("%s owns %s as %s, token %d", p.id, part, thread, revision)
	if l := b.logs[part]; l == nil {
		w.fail("%s becomes the owner of %s, whose topic is deleted", p.id, part)
	}
	if w.lenient {
		return
	}
	if reg := w.ids[p.id]; reg.Lease != b.lease(part) {
		w.fail("%s becomes the owner of %s, and is not registered under the same lease", p.id, part)
	}
	now := &w.views[len(w.views)-1]
	newest, stands := now.newest, now.snapshot.Target
	var record int64
	if w.target != nil {
		record = w.target.ModRevision
	}
	since := true
	for i := len(w.views) - 1; i >= 0 && (since || w.views[i].snapshot.Revision >= record); i-- {
		v := &w.views[i]
		if (since || v.follows(record)) && v.gives(part, thread, stands) {
			return
		}
		since = since && v.snapshot.Revision > newest
	}
	w.fail("%s becomes the owner of %s as %s, which is not its share by any state since the last registration, nor by the target", p.id, part, thread)
}

// proposed is a target record that was written: it must leave out no member that is
// registered, and be what follows the record that it replaces.
func (b *observer) proposed(p *process, kv registry.KV) {
	w := b.w
	w.counts[proposed]++
	target, err := rebalance.ReadTarget(kv)
	w.must(err)
	w.tell("%s writes the target at %d, from the group at %d", p.id, kv.ModRevision, target.Snapshot)
	if w.lenient {
		return
	}
	if _, registered := w.ids[p.id]; !registered {
		w.fail("%s writes a target, and is not registered", p.id)
	}
	if now := w.views[len(w.views)-1]; now.newest > target.Snapshot {
		for _, m := range now.snapshot.Members {
			if _, found := slices.BinarySearch(target.Assignment.Members, m.ID); !found {
				w.fail("%s writes a target that leaves out %s", p.id, m.ID)
			}
		}
	}
	i := len(w.views) - 1
	for w.views[i].snapshot.Revision > target.Snapshot {
		i--
	}
	s := w.views[i].snapshot
	s.Revision, s.Target = target.Snapshot, w.views[len(w.views)-1].snapshot.Target
	want, err := rebalance.NextTarget(s).Encode()
	w.must(err)
	if string(want) != string(kv.Value) {
		w.fail("%s writes a target that does not follow from the one that it replaces: %s, want %s", p.id, kv.Value, want)
	}
}

// lease is that of a partition's owner key.
func (b *observer) lease(part registry.Partition) registry.LeaseID {
	kv, _ := b.w.owner(b.w.group.Owner(part))
	return kv.Lease
}

func (b *observer) ownerChanged(e *registry.Event) {
	if !e.Deleted {
		return
	}
	for _, c := range b.releasing {
		if c.Key == e.Key && c.Number != e.Previous.CreateRevision {
			b.w.fail("a release that came late takes %s from %s", e.Key, e.Previous.Value)
		}
	}
	if !b.w.operator {
		return
	}
	p, err := b.w.group.ParsePartition(e.Key)
	b.w.must(err)
	b.excused[ownership{p, e.Previous.CreateRevision}] = b.w.now
}

// offsetChanged notes offsets that somebody deleted.
func (b *observer) offsetChanged(e *registry.Event) {
	p, err := b.w.group.ParsePartition(e.Key)
	b.w.must(err)
	if l := b.logs[p]; l != nil && e.Deleted {
		l.committed = offsets.None
	}
}

// topicsChanged brings the logs to what the topics are.
func (b *observer) topicsChanged() {
	w := b.w
	there := map[registry.Partition]bool{}
	for _, name := range sortedKeys(w.topics) {
		created := w.topics[name].CreateRevision
		b.born[name] = created
		for _, p := range w.lists[name] {
			there[p] = true
			l := b.logs[p]
			if l != nil && l.created == created {
				continue
			}
			b.logs[p] = &plog{partition: p, created: created, committed: offsets.None, sloppy: b.spoiled[p.Topic]}
			if kv, _, err := registry.GetKey(ctx, w.twin, w.group.Offset(p)); err != nil || kv != nil && !b.logs[p].sloppy {
				w.fail("topic %s is new, and an offset of %s is there (%v)", name, p, err)
			}
		}
	}
	for p, l := range b.logs {
		if !there[p] {
			l.deleted = true
			delete(b.logs, p)
		}
	}
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }

// verify tells why the group is not as it must be once it is quiet; "" if it is.
func (w *world) verify() string {
	var why strings.Builder
	complain := func(text string) {
		if why.Len() < 500 {
			why.WriteString(text + "; ")
		}
	}
	for _, p := range w.procs {
		switch {
		case p.standing || p.leaving:
			complain(p.id + " is not running")
		case p.session == nil || !p.registered || w.ids[p.id].ModRevision == 0:
			complain(p.id + " is not registered")
		}
	}
	if why.Len() > 0 {
		return why.String()
	}
	v := &w.views[len(w.views)-1]
	due, err := v.assign()
	if err != nil {
		for _, p := range w.procs {
			if p.refused == "" {
				complain(p.id + " does not say that the group cannot be divided")
			}
		}
		return why.String()
	}
	for _, p := range w.procs {
		if !p.machine.Settled() {
			complain(p.id + " is not settled: " + p.machine.String())
		}
		if p.refused != "" {
			complain(p.id + " says that the group cannot be divided: " + p.refused)
		}
	}
	if !v.divided() {
		complain("the target record is not current")
	}
	if why.Len() > 0 {
		return why.String()
	}
	if len(w.ids) != len(w.procs) {
		complain("registrations of members that are gone")
	}
	if n := w.twin.Leases(); n != len(w.procs) {
		complain("leases of members that are gone")
	}
	kvs, _, err := registry.List(ctx, w.twin, w.group.Owners(), 0)
	w.must(err)
	owners := map[string]registry.KV{}
	for _, kv := range kvs {
		owners[kv.Key] = kv
	}
	n := 0
	for part, thread := range due.All() {
		n++
		kv, there := owners[w.group.Owner(part)]
		switch {
		case !there:
			complain(part.String() + " has no owner, is due to " + thread)
			continue
		case string(kv.Value) != thread:
			complain(part.String() + " is owned by " + string(kv.Value) + ", is due to " + thread)
			continue
		case kv.CreateRevision < w.topics[part.Topic].CreateRevision:
			complain(part.String() + " has an owner key of a former topic")
		}
		var o *delivery
		for _, p := range w.procs {
			if p.session.lease == kv.Lease {
				o = p.table[part]
			}
		}
		if o == nil || o.token != kv.CreateRevision || !o.assigned || o.exited {
			complain(part.String() + " is not delivered by its owner " + thread)
		}
	}
	if n != len(owners) {
		complain("owner keys of nobody's partitions")
	}
	return why.String()
}

// consumed tells what of the logs is not finished and committed yet; "" if all is.
func (w *world) consumed() string {
	v := &w.views[len(w.views)-1]
	due, err := v.assign()
	if err != nil {
		return ""
	}
	for part := range due.All() {
		l := w.observer.logs[part]
		if !l.sloppy && (l.finished < l.end || l.committed < l.end) {
			return part.String() + " is not read to its end"
		}
	}
	return ""
}

// recorded tells how history differs from what happened; "" if it does not.
func (w *world) recorded() string {
	if !w.profile.history {
		return ""
	}
	entries, bad, err := registry.ReadHistory(ctx, w.twin, w.group)
	w.must(err)
	if len(bad) > 0 {
		return bad[0].Error()
	}
	told := map[string]registry.HistoryEntry{}
	for _, e := range entries {
		for topic, names := range e.Partitions {
			for _, name := range names {
				key := w.group.TopicOwners(topic) + name
				if e.Action == registry.ActionReleased && told[key].Member != e.Member {
					return key + " is released by " + e.Member + ", which had not claimed it"
				}
				if told[key] = e; e.Action == registry.ActionReleased {
					delete(told, key)
				}
			}
		}
	}
	for part, is := range w.owners() {
		e := told[w.group.Owner(part)]
		if e.Revision != is.token || !strings.HasPrefix(is.thread, e.Member+"-") {
			return "history does not tell that " + is.thread + " has claimed " + part.String()
		}
	}
	return ""
}
