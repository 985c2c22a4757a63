package simulation

import (
	"maps"
	"slices"
	"time"

	"github.com/muster-io/muster/offsets"
	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// delivery is one ownership of a partition, from claim to release or loss: as the
// real driver's, but that its worker is a set of moments, not a goroutine.
type delivery struct {
	p         *process
	partition registry.Partition
	stream    int32
	token     int64
	session   *session
	former    *delivery
	lane      *laneState

	revoked  bool
	lost     bool // its context has ended
	taken    bool // so it has because the member lost it, not because it was given up
	exited   bool // the worker has ended
	begun    bool // where to start is known
	assigned bool
	inHand   bool // a record is with the handler
	queued   bool // it waits for the lane
	waiting  bool // it waits for records
	fetching bool
	fetched  int64 // records below are here

	log       *plog
	at        startAt
	next      int64
	committed offsets.Position
	done      func() // told when the worker has ended
}

type startAt struct {
	from      int64
	committed offsets.Position
	log       *plog
}

type ownership struct {
	partition registry.Partition
	token     int64
}

func (o *delivery) ownership() ownership { return ownership{o.partition, o.token} }

// alive tells whether the partition is owned at this moment.
func (o *delivery) alive() bool { return !o.lost && o.session.alive() }

// ended tells whether the delivery's context has ended: by loss, or by the end of the
// session, once that was noticed.
func (o *delivery) ended() bool { return o.lost || o.session.over }

// lane is one stream of one topic: at most one record of it is with the handler.
type lane struct {
	topic  string
	stream int32
}

type laneState struct {
	busy  bool
	queue []*delivery
}

func (p *process) deliver(a rebalance.Deliver) *delivery {
	l := lane{a.Partition.Topic, a.Stream}
	if p.lanes[l] == nil {
		p.lanes[l] = &laneState{}
	}
	o := &delivery{p: p, partition: a.Partition, stream: a.Stream, token: a.Token, session: p.session, lane: p.lanes[l], next: offsets.None,
		committed: offsets.Position{Offset: offsets.None}}
	if f := p.workers[a.Partition]; f != nil && !f.gone() {
		o.former = f
	}
	p.workers[a.Partition] = o
	p.table[a.Partition] = o
	return o
}

// deliveries are those in the table, in order.
func (p *process) deliveries() []*delivery {
	list := make([]*delivery, 0, len(p.table))
	for _, part := range slices.SortedFunc(maps.Keys(p.table), registry.ComparePartitions) {
		list = append(list, p.table[part])
	}
	return list
}

// gone tells whether no worker of the partition up to this one is left.
func (o *delivery) gone() bool {
	if o.former != nil && o.former.gone() {
		o.former = nil
	}
	return o.exited && o.former == nil
}

func (p *process) revoke(a rebalance.Revoke) {
	o := p.table[a.Partition]
	if o == nil || o.token != a.Token {
		return
	}
	o.revoked = true
	p.w.observer.revoked(o)
	if p.w.off == drainFirst {
		p.post(func() { p.step(rebalance.Drained{Partition: o.partition, Token: o.token}) })
		o.pump()
		return
	}
	drained := func() {
		p.post(func() {
			if !o.alive() {
				return
			}
			if p.table[o.partition] == o {
				delete(p.table, o.partition)
			}
			o.lost = true
			p.w.observer.released(o)
			p.step(rebalance.Drained{Partition: o.partition, Token: o.token})
		})
	}
	o.done = func() {
		if o.ended() {
			return // the member knows
		}
		if p.w.off == lastCommit {
			drained()
			return
		}
		o.done = drained
		p.asks = append(p.asks, o)
		p.commitSoon(0)
	}
	if o.exited {
		o.done()
		return
	}
	o.pump()
}

func (p *process) lose(a rebalance.Lose) {
	o := p.table[a.Partition]
	if o == nil || o.token != a.Token {
		return
	}
	p.w.observer.lost(o, a.Reason)
	o.lost, o.taken = true, true
	delete(p.table, a.Partition)
	p.w.counts[losses]++
	o.pump()
}

func (o *delivery) exit() {
	if o.exited {
		return
	}
	o.exited = true
	if o.done != nil {
		o.done()
	}
	if next := o.p.workers[o.partition]; next != o {
		next.pump()
	}
}

// pump is the worker: it goes as far as it can.
func (o *delivery) pump() {
	p, w := o.p, o.p.w
	if o.exited || o.inHand {
		return
	}
	if o.revoked || o.ended() {
		o.exit()
		return
	}
	if o.former != nil && !o.former.gone() {
		return
	}
	if !o.begun {
		return
	}
	if !o.assigned {
		if !o.alive() {
			o.exit()
			return
		}
		o.assigned = true
		o.committed, o.next, o.log, o.fetched = o.at.committed, o.at.from, o.at.log, o.at.from
	}
	if o.next >= o.fetched {
		o.fetch()
		return
	}
	if o.lane.busy {
		if !o.queued {
			o.queued = true
			o.lane.queue = append(o.lane.queue, o)
		}
		return
	}
	// The last look before the hand-over.
	if w.off != deliveryCheck && !o.alive() {
		o.exit()
		return
	}
	o.lane.busy, o.inHand = true, true
	offset := o.next
	w.observer.handOver(o, offset)
	p.at(w.now+w.handling(), free, func() {
		o.inHand = false
		w.observer.finished(o, offset)
		o.next = offset + 1
		o.lane.busy = false
		// Others of the lane come first.
		for !o.lane.busy && len(o.lane.queue) > 0 {
			next := o.lane.queue[0]
			o.lane.queue = o.lane.queue[1:]
			next.queued = false
			next.pump()
		}
		o.pump()
	})
}

// handling is what a handler takes for one record.
func (w *world) handling() time.Duration {
	if w.profile.storming && w.chance(200) {
		w.counts[slowHandlers]++
		return w.between(0, 2*w.profile.ttl)
	}
	return w.between(w.profile.handling/4, w.profile.handling*2)
}

// fetch brings the records that the log has, or waits for some.
func (o *delivery) fetch() {
	p, w := o.p, o.p.w
	if o.fetching {
		return
	}
	if o.log.deleted {
		return
	}
	if o.next >= o.log.end || w.down[o.partition.Home] {
		if !o.waiting {
			o.waiting = true
			o.log.waiters = append(o.log.waiters, o)
		}
		return
	}
	if o.next < o.log.start {
		// The broker says that the offset is out of range.
		o.next = o.log.start
		if p.largest {
			o.next = o.log.end
		}
		w.observer.reset(o, o.log, o.next)
		o.fetched = o.next
		if o.next >= o.log.end {
			o.fetch()
			return
		}
	}
	o.fetching = true
	p.at(w.now+w.latency(), free, func() {
		o.fetching = false
		o.fetched = max(o.fetched, o.log.end)
		o.pump()
	})
}

// readable wakes those that wait for records of a log.
func (l *plog) readable() {
	list := l.waiters
	l.waiters = nil
	for _, o := range list {
		o.waiting = false
		if !o.exited && !o.p.dead {
			o.p.at(o.p.w.now+o.p.w.latency(), free, o.pump)
		}
	}
}

// waitsForStart tells whether the delivery still waits for its start.
func (o *delivery) waitsForStart() bool { return !o.revoked && !o.exited && o.alive() }

// begin finds where partitions start, as the real driver's start does.
func (p *process) begin(t *task, list []*delivery) {
	for pause := minJoinPause; len(list) > 0; pause = min(2*pause, maxJoinPause) {
		list = p.beginOnce(t, list)
		if len(list) > 0 {
			t.sleep(pause)
		}
	}
}

func (p *process) beginOnce(t *task, list []*delivery) (again []*delivery) {
	w := p.w
	list = slices.DeleteFunc(list, func(o *delivery) bool { return !o.waitsForStart() })
	if len(list) == 0 {
		return nil
	}
	partitions := make([]registry.Partition, len(list))
	for i, o := range list {
		partitions[i] = o.partition
	}
	t.within(callLimit)
	found, err := p.offsets.Fetch(ctx, partitions)
	if err != nil {
		return list
	}
	// The brokers are asked for the ends of the logs.
	t.sleep(w.latency() + w.latency())
	var fresh []*delivery
	for i, o := range list {
		log := w.observer.log(o.partition)
		position := found[i].Position
		if w.off == offsetsAfterClaim {
			if early, ok := p.early[o.partition]; ok {
				position = early
			}
		}
		switch {
		case found[i].Err != nil:
			w.fail("%v", found[i].Err)
		case log == nil || w.down[o.partition.Home]:
			again = append(again, o)
		case position.Offset == offsets.None:
			fresh = append(fresh, o)
		default:
			at := startAt{from: position.Offset, committed: position, log: log}
			if at.from < log.start || at.from > log.end {
				w.counts[outOfRange]++
				at.from = log.start
				if p.largest {
					at.from = log.end
				}
				w.observer.reset(o, log, at.from)
			}
			o.start(at)
		}
	}
	return append(again, p.beginFresh(t, fresh)...)
}

func (o *delivery) start(at startAt) {
	if o.begun {
		o.p.w.fail("%s is told twice where %s begins", o.p.id, o.partition)
	}
	o.at, o.begun = at, true
	o.p.at(o.p.w.now, free, o.pump)
}

// beginFresh begins partitions for which nothing is committed, and commits that.
func (p *process) beginFresh(t *task, list []*delivery) (again []*delivery) {
	w := p.w
	if len(list) == 0 {
		return nil
	}
	t.within(callLimit)
	since, err := p.offsets.Since(ctx)
	if err != nil || p.view < 0 {
		return list
	}
	v := &w.views[p.view]
	if since == 0 || v.since != 0 && v.since < since {
		since = v.since
	}
	var ready []*delivery
	var starts []startAt
	var list2 []offsets.Commit
	for _, o := range list {
		log := w.observer.log(o.partition)
		if log == nil {
			again = append(again, o)
			continue
		}
		at := startAt{from: log.start, log: log}
		if p.largest && (since == 0 || v.changed[o.partition.Topic] <= since) {
			at.from = log.end
		}
		ready, starts = append(ready, o), append(starts, at)
		list2 = append(list2, offsets.Commit{Partition: o.partition, Offset: at.from, Token: o.token})
	}
	t.within(callLimit)
	outcomes, _ := p.offsets.Commit(ctx, list2)
	for i, o := range ready {
		switch {
		case i >= len(outcomes), !outcomes[i].Stored && !outcomes[i].Fenced:
			again = append(again, o)
		case outcomes[i].Fenced:
			p.fenced(o)
		default:
			starts[i].committed = outcomes[i].Now
			o.start(starts[i])
		}
	}
	return again
}

// readEarly is what offsetsAfterClaim forbids: to read before the claim.
func (p *process) readEarly(wants []rebalance.Want) {
	partitions := make([]registry.Partition, len(wants))
	for i, want := range wants {
		partitions[i] = want.Partition
	}
	found, err := p.offsets.Fetch(ctx, partitions)
	if err != nil {
		return
	}
	for i, f := range found {
		delete(p.early, partitions[i])
		if f.Offset != offsets.None {
			p.early[partitions[i]] = f.Position
		}
	}
}

// commitPause is how long a last commit waits before it is tried again.
const commitPause = 100 * ms

// tick is the committer's.
func (p *process) tick() {
	p.at(p.w.now+p.w.profile.commits, free, func() {
		p.tick()
		if !p.committing {
			p.commitNow(p.deliveries())
		}
	})
}

func (p *process) commitSoon(d time.Duration) {
	p.at(p.w.now+d, free, func() {
		if !p.committing && len(p.asks) > 0 {
			p.commitNow(nil)
		}
	})
}

// commitNow makes one attempt for a list, and settles the last commits.
func (p *process) commitNow(list []*delivery) {
	for _, o := range p.asks {
		if !slices.Contains(list, o) {
			list = append(list, o)
		}
	}
	if !slices.ContainsFunc(list, func(o *delivery) bool { return o.dirty() && o.alive() }) {
		p.settle()
		return
	}
	p.committing = true
	p.w.spawn(p, func(t *task) {
		p.commit(t, list)
		p.committing = false
		p.settle()
	})
}

func (p *process) settle() {
	asks := p.asks
	p.asks = nil
	for _, o := range asks {
		switch {
		case !o.alive():
		case o.dirty():
			p.asks = append(p.asks, o)
		default:
			o.done()
		}
	}
	if len(p.asks) > 0 {
		p.commitSoon(commitPause)
	}
}

func (o *delivery) dirty() bool {
	return o.assigned && o.next != o.committed.Offset
}

func (p *process) commit(t *task, list []*delivery) {
	var send []offsets.Commit
	var owners []*delivery
	for _, o := range list {
		if o.alive() && o.dirty() {
			owners = append(owners, o)
			send = append(send, offsets.Commit{Partition: o.partition, Offset: o.next, Token: o.token, Previous: o.committed.Revision})
		}
	}
	if p.w.off == commitFinished {
		for i, o := range owners {
			if o.inHand {
				send[i].Offset++
			}
		}
	}
	t.within(callLimit)
	outcomes, _ := p.offsets.Commit(ctx, send)
	for i, out := range outcomes {
		o := owners[i]
		switch {
		case out.Stored:
			o.committed = out.Now
		case out.Fenced:
			p.fenced(o)
		case out.Now.Offset == send[i].Offset:
			o.committed = out.Now
		default:
			o.committed.Revision = out.Now.Revision
		}
	}
}

func (p *process) fenced(o *delivery) {
	p.w.counts[fencedCommits]++
	p.post(func() { p.step(rebalance.Fenced{Partition: o.partition, Token: o.token}) })
}
