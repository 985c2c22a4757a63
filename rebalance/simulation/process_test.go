package simulation

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/muster-io/muster/offsets"
	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// process is one member: the real machine, and a driver that does what the real one
// does, in virtual time. It can be stopped for a while and it can crash.
type process struct {
	w       *world
	id      string
	machine *rebalance.Member
	link    link
	offsets *offsets.Registry
	record  registry.ConsumerRecord
	largest bool // reset policy; else smallest

	session    *session
	registered bool
	leaving    bool
	refused    string // why the group cannot be divided
	dead       bool   // it has crashed, or left
	standing   bool   // it is stopped: nothing of it happens
	backlog    []queued
	slow       time.Duration // until then its watches lag

	view    int // the last one that was taken, in world.views
	coming  int // the last one that is on its way
	wake    time.Duration
	watches map[registry.Partition]*ownerWatch
	table   map[registry.Partition]*delivery
	workers map[registry.Partition]*delivery
	lanes   map[lane]*laneState

	committing bool
	asks       []*delivery

	early map[registry.Partition]offsets.Position // with offsetsAfterClaim off
}

// channel keeps order among what comes by one way; free things come in any order.
type channel int

const (
	free channel = iota
	viewChannel
	firstWatch // and one more for each watch
)

type queued struct {
	from channel
	f    func()
}

func (p *process) at(at time.Duration, from channel, f func()) {
	p.w.at(at, func() { p.happen(from, f) })
}

func (p *process) happen(from channel, f func()) {
	switch {
	case p.dead:
	case p.standing:
		p.backlog = append(p.backlog, queued{from, f})
	default:
		f()
	}
}

// post lets the loop do something soon.
func (p *process) post(f func()) {
	p.at(p.w.now+p.w.between(0, 200*time.Microsecond), free, f)
}

// stop is SIGSTOP, and SIGCONT after a time.
func (p *process) stop(d time.Duration) {
	w := p.w
	if p.standing {
		return
	}
	w.tell("%s stands for %s", p.id, d)
	p.standing = true
	w.after(d, func() {
		if p.dead {
			return
		}
		w.tell("%s goes on", p.id)
		p.standing = false
		list := p.backlog
		p.backlog = nil
		at := w.now
		for _, q := range w.mixed(list) {
			p.at(at, q.from, q.f)
			at += w.between(0, 300*time.Microsecond)
		}
	})
}

// mixed brings what queued into any order, but for what came by one way.
func (w *world) mixed(list []queued) []queued {
	places := w.r.Perm(len(list))
	byChannel := map[channel][]int{}
	for i, q := range list {
		if q.from != free {
			byChannel[q.from] = append(byChannel[q.from], i)
		}
	}
	for _, mine := range byChannel {
		sorted := make([]int, len(mine))
		for i, at := range mine {
			sorted[i] = places[at]
		}
		slices.Sort(sorted)
		for i, at := range mine {
			places[at] = sorted[i]
		}
	}
	out := make([]queued, len(list))
	for i, q := range list {
		out[places[i]] = q
	}
	return out
}

func (w *world) start(id string, rec registry.ConsumerRecord, largest bool) *process {
	w.started++
	p := &process{w: w, id: id, machine: rebalance.NewMemberWithout(id, w.off.inMachine()), record: rec, largest: largest, view: -1,
		watches: map[registry.Partition]*ownerWatch{}, table: map[registry.Partition]*delivery{},
		workers: map[registry.Partition]*delivery{}, lanes: map[lane]*laneState{}, early: map[registry.Partition]offsets.Position{}}
	p.link = link{w, p}
	p.offsets = offsets.NewRegistry(p.link, w.group)
	w.procs = append(w.procs, p)
	w.tell("%s starts: %v %v", id, rec.Subscription, rec.Strategy)
	p.viewSoon(len(w.views) - 1)
	p.join(nil)
	p.tick()
	return p
}

// end takes the process away: crashed, or gone in order.
func (p *process) end() {
	p.dead = true
	p.w.procs = slices.DeleteFunc(p.w.procs, func(x *process) bool { return x == p })
	p.w.observer.gone(p)
	for _, w := range p.watches {
		w.ended = true
	}
}

// session is a lease with the deadline that registry.Session keeps.
type session struct {
	p        *process
	lease    registry.LeaseID
	ttl      time.Duration
	deadline time.Duration
	over     bool
}

// margin is registry's.
func margin(ttl time.Duration) time.Duration { return max(ttl/10, 200*ms) }

// alive is Session.Alive: death is final once it was looked at.
func (s *session) alive() bool {
	if !s.over && s.p.w.now >= s.deadline && s.p.w.off != ownDeadline {
		s.end("deadline")
	}
	return !s.over
}

func (s *session) end(why string) {
	if s.over {
		return
	}
	s.over = true
	p := s.p
	p.w.tell("%s session %x is over: %s", p.id, s.lease, why)
	for _, o := range p.deliveries() {
		if o.session == s {
			o.pump() // its context has ended
		}
	}
	p.post(func() {
		if p.session == s {
			p.sessionLost()
		}
	})
}

func (s *session) extend(sent, ttl time.Duration) {
	s.deadline = max(s.deadline, sent+ttl-margin(ttl))
	deadline := s.deadline
	s.p.at(deadline, free, func() {
		if s.deadline == deadline {
			s.alive()
		}
	})
}

// renew sends a renewal every third of the time to live.
func (s *session) renew() {
	p, w := s.p, s.p.w
	if p.session != s || !s.alive() {
		return
	}
	sent := w.now
	fate := p.link.fate()
	if fate == fine || fate == lostReply {
		w.after(w.latency(), func() {
			var ttl time.Duration
			ka, err := w.twin.KeepAlive(ctx, s.lease)
			w.must(err)
			w.must(ka.Send())
			ttl, err = ka.Recv()
			w.must(err)
			if fate == lostReply {
				w.counts[lostRenewals]++
				return
			}
			p.at(w.now+w.latency(), free, func() {
				switch {
				case !s.alive():
				case ttl <= 0:
					s.end("lease is gone")
				default:
					s.extend(sent, ttl)
				}
			})
		})
	} else {
		w.counts[lostRenewals]++
	}
	p.at(sent+s.ttl/3, free, s.renew)
}

const (
	minJoinPause = 100 * ms
	maxJoinPause = 2 * sec
)

// join opens a session and registers, once the former session is revoked.
func (p *process) join(former *session) {
	p.w.spawn(p, func(t *task) {
		for pause := minJoinPause; ; pause = min(2*pause, maxJoinPause) {
			s, err := p.open(t, former)
			if err == nil {
				p.session = s
				p.register(t, s, false)
				return
			}
			p.w.tell("%s cannot join: %v", p.id, err)
			t.sleep(pause)
		}
	})
}

func (p *process) open(t *task, former *session) (*session, error) {
	t.within(callLimit)
	if former != nil {
		if err := p.link.Revoke(ctx, former.lease); err != nil && !errors.Is(err, registry.ErrLeaseNotFound) {
			return nil, err
		}
	}
	asked := p.w.now
	lease, err := p.link.Grant(ctx, p.w.profile.ttl)
	if err != nil {
		return nil, err
	}
	s := &session{p: p, lease: lease.ID, ttl: lease.TTL}
	s.extend(asked, lease.TTL)
	p.at(asked+lease.TTL/3, free, s.renew)
	return s, nil
}

// register puts the member into the group, as registry.Register does, or with again back
// into it: the session ends if another process has the id by then.
func (p *process) register(t *task, s *session, again bool) {
	key := p.w.group.ID(p.id)
	value, err := registry.Encode(p.record)
	p.w.must(err)
	for pause := minJoinPause; s.alive() && p.session == s; pause = min(2*pause, maxJoinPause) {
		t.within(callLimit)
		res, err := p.link.Txn(ctx, registry.Txn{
			If:   []registry.Cond{registry.Absent(key)},
			Then: []registry.Op{registry.Put(key, value, s.lease)},
			Else: []registry.Op{registry.Get(key)},
		})
		var reg registry.Registration
		switch {
		case err != nil:
			p.doubt(s, err)
		case res.Succeeded:
			reg = registry.Registration{Key: key, Revision: res.Revision}
		case res.Items[0].KVs[0].Lease == s.lease:
			reg = registry.Registration{Key: key, Revision: res.Items[0].KVs[0].ModRevision}
		case again:
			p.post(func() {
				if p.session == s && !p.leaving {
					s.end("another process has its id")
				}
			})
			return
		}
		if reg.Revision != 0 {
			p.post(func() {
				if p.session == s {
					p.w.tell("%s is registered at %d", p.id, reg.Revision)
					p.registered = true
					p.step(rebalance.Registered{Registration: reg})
				}
			})
			return
		}
		t.sleep(pause)
	}
}

func (p *process) doubt(s *session, err error) {
	if errors.Is(err, registry.ErrLeaseNotFound) {
		s.end("the store does not know the lease")
	}
}

func (p *process) sessionLost() {
	former := p.session
	p.session, p.registered = nil, false
	p.step(rebalance.SessionLost{})
	if !p.leaving {
		p.join(former)
		return
	}
	p.w.spawn(p, func(t *task) {
		t.within(callLimit)
		_ = p.link.Revoke(ctx, former.lease) // else it runs out
		p.end()
	})
}

// leaveTimeout bounds an orderly stop.
const leaveTimeout = 10 * sec

// leave is an orderly stop.
func (p *process) leave() {
	if p.leaving {
		return
	}
	p.w.tell("%s leaves", p.id)
	p.leaving = true
	switch {
	case p.session == nil:
		p.end()
		return
	case !p.registered:
		s := p.session
		s.over = true
		p.sessionLost()
	default:
		p.step(rebalance.Leaving{})
	}
	p.at(p.w.now+leaveTimeout, free, func() {
		// Those that take too long are lost, not released.
		p.w.tell("%s gives up leaving in order", p.id)
		if s := p.session; s != nil {
			s.over = true
			p.sessionLost()
		}
	})
}

func (p *process) unregister(s *session) {
	if p.w.off == leaveInOrder {
		p.end()
		return
	}
	p.w.spawn(p, func(t *task) {
		t.within(callLimit)
		key := p.w.group.ID(p.id)
		_, _ = p.link.Txn(ctx, registry.Txn{
			If:   []registry.Cond{registry.HeldBy(key, s.lease)},
			Then: []registry.Op{registry.Delete(key)},
			Else: []registry.Op{registry.Get(key)},
		})
		s.over = true
		_ = p.link.Revoke(ctx, s.lease) // else it runs out
		p.w.tell("%s has left", p.id)
		p.end()
	})
}

// viewSoon lets the view of the group come to a member: late, and several at once.
func (p *process) viewSoon(i int) {
	w := p.w
	if p.coming >= i && p.coming > 0 || i < 0 {
		return
	}
	p.coming = i
	p.at(w.now+p.lag(), viewChannel, func() {
		// Two changes that come together are seen as one.
		if last := len(w.views) - 1; last > i && w.chance(2) {
			i += w.r.IntN(last - i + 1)
		}
		if i <= p.view {
			return
		}
		p.view = i
		p.takeSnapshot(&w.views[i])
	})
}

// lag is what it takes until a watch tells.
func (p *process) lag() time.Duration {
	if w := p.w; w.outage > w.now {
		return w.outage - w.now + w.latency()
	}
	if p.slow > p.w.now {
		p.w.counts[lateWatches]++
		return p.w.between(0, 2*(p.slow-p.w.now))
	}
	return p.w.latency()
}

func (p *process) takeSnapshot(v *view) {
	s := v.snapshot
	s.Registered = v.registered[p.id]
	p.step(s)
}

func (p *process) step(e rebalance.Event) {
	w := p.w
	if w.trace != nil {
		w.tell("%s ← %s", p.id, eventText(e))
	}
	starts := map[int32][]*delivery{}
	homes := []int32(nil)
	for _, a := range p.machine.Step(w.now, e) {
		if w.trace != nil {
			w.tell("%s → %s", p.id, actionText(a))
		}
		if o := p.act(a); o != nil {
			home := o.partition.Home
			if starts[home] == nil {
				homes = append(homes, home)
			}
			starts[home] = append(starts[home], o)
		}
	}
	for _, home := range homes {
		list := starts[home]
		w.spawn(p, func(t *task) { p.begin(t, list) })
	}
	if at, ok := p.machine.Wake(); ok && at != p.wake {
		p.wake = at
		p.at(at, free, func() {
			if p.wake == at {
				p.wake = 0
				p.step(rebalance.Tick{})
			}
		})
	}
}

func (p *process) act(a rebalance.Action) *delivery {
	w := p.w
	switch a := a.(type) {
	case rebalance.Claim:
		s := p.session
		w.spawn(p, func(t *task) { p.claim(t, s, a) })
	case rebalance.Release:
		s := p.session
		w.spawn(p, func(t *task) { p.release(t, s, a) })
	case rebalance.Deliver:
		return p.deliver(a)
	case rebalance.Revoke:
		p.revoke(a)
	case rebalance.Lose:
		p.lose(a)
	case rebalance.Watch:
		p.watch(a)
	case rebalance.Unwatch:
		if p.watches[a.Partition] == nil {
			w.fail("%s unwatches %s, which it does not watch", p.id, a.Partition)
		}
		p.watches[a.Partition].ended = true
		delete(p.watches, a.Partition)
	case rebalance.Reregister:
		w.counts[reregistered]++
		if s := p.session; w.off != reregister {
			w.spawn(p, func(t *task) { p.register(t, s, true) })
		}
	case rebalance.Propose:
		s := p.session
		w.spawn(p, func(t *task) { p.propose(t, s, a) })
	case rebalance.Rebalanced:
		if w.off == keepFlowing {
			for _, o := range p.deliveries() {
				p.post(func() {
					if !o.revoked && o.alive() {
						p.step(rebalance.Fenced{Partition: o.partition, Token: o.token})
					}
				})
			}
		}
	case rebalance.Refused:
		w.counts[refusals]++
		p.refused = a.Reason
	case rebalance.Left:
		p.unregister(p.session)
	}
	return nil
}

func (p *process) claim(t *task, s *session, a rebalance.Claim) {
	w := p.w
	t.within(callLimit)
	list := make([]registry.OwnerClaim, len(a.Wants))
	for i, want := range a.Wants {
		topic := want.Partition.Topic
		list[i] = registry.OwnerClaim{Key: w.group.Owner(want.Partition), Value: []byte(rebalance.ThreadID(p.id, want.Stream)),
			Topic: w.root.Topic(topic), Incarnation: a.Incarnations[topic]}
	}
	if w.off == offsetsAfterClaim {
		p.readEarly(a.Wants)
	}
	guard := registry.Guard{Registration: a.Registration, IDs: w.group.IDs(), Snapshot: a.Snapshot}
	if a.Target != 0 {
		guard.IDs, guard.Target, guard.TargetRevision = "", w.group.Target(), a.Target
	}
	results, revision, err := registry.Claim(ctx, p.link, s.lease, guard, list, p.note(registry.ActionClaimed, a.Reason))
	for w.off == recomputeStale && errors.Is(err, registry.ErrStale) && s.alive() {
		guard.Snapshot = w.twin.Revision()
		results, revision, err = registry.Claim(ctx, p.link, s.lease, guard, list, p.note(registry.ActionClaimed, a.Reason))
	}
	answer := rebalance.ClaimAnswered{Number: a.Number, Revision: revision, Stale: errors.Is(err, registry.ErrStale)}
	answer.Unknown = err != nil && !answer.Stale
	if answer.Stale {
		w.counts[staleClaims]++
	}
	if w.off == claimDoubt && answer.Unknown {
		answer.Unknown, answer.Stale = false, true
	}
	for i, r := range results {
		o := rebalance.ClaimOutcome{Mine: r.Holder == nil, Token: r.Token, Stream: a.Wants[i].Stream, Revision: r.Revision}
		if string(r.Value) != string(list[i].Value) {
			o.Stream = -1
		}
		answer.Outcomes = append(answer.Outcomes, o)
	}
	if answer.Unknown {
		p.doubt(s, err)
	}
	p.post(func() {
		if p.session == s {
			p.step(answer)
		}
	})
}

// note makes the history entry of one transaction.
func (p *process) note(action, reason string) registry.Note {
	w := p.w
	if !w.profile.history {
		return nil
	}
	return func(keys []string) (string, []byte) {
		rec := registry.HistoryRecord{Version: 1, Time: "1", Member: p.id, Action: action, Reason: reason, Partitions: map[string][]string{}}
		for _, key := range keys {
			part, err := w.group.ParsePartition(key)
			w.must(err)
			rec.Partitions[part.Topic] = append(rec.Partitions[part.Topic], part.Name())
		}
		value, err := registry.Encode(rec)
		w.must(err)
		w.entries++
		return w.group.HistoryEntry(1, p.id, w.entries), value
	}
}

func (p *process) propose(t *task, s *session, a rebalance.Propose) {
	t.within(callLimit)
	guard := registry.Guard{Registration: a.Registration, IDs: p.w.group.IDs(), Snapshot: a.Snapshot}
	revision, err := registry.WriteTarget(ctx, p.link, guard, p.w.group.Target(), a.Value, a.Replace)
	answer := rebalance.ProposeAnswered{Number: a.Number, Revision: revision, Stale: errors.Is(err, registry.ErrStale)}
	answer.Unknown = err != nil && !answer.Stale
	if answer.Stale {
		p.w.counts[staleProposals]++
	}
	p.post(func() {
		if p.session == s {
			p.step(answer)
		}
	})
}

func (p *process) release(t *task, s *session, a rebalance.Release) {
	t.within(callLimit)
	list := make([]registry.OwnerRelease, len(a.Held))
	for i, h := range a.Held {
		list[i] = registry.OwnerRelease{Key: p.w.group.Owner(h.Partition), Token: h.Token}
	}
	_, err := registry.Release(ctx, p.link, s.lease, list, p.note(registry.ActionReleased, a.Reason))
	failed := err != nil && p.w.off != releaseDoubt
	p.post(func() {
		if p.session == s {
			p.step(rebalance.ReleaseAnswered{Number: a.Number, Failed: failed})
		}
	})
}

// ownerWatch follows one owner key for one member.
type ownerWatch struct {
	p         *process
	partition registry.Partition
	key       string
	from      channel
	after     int64 // up to which the key is known
	next      time.Duration
	ended     bool // nobody wants it
	broken    bool // it hears nothing
}

func (p *process) watch(a rebalance.Watch) {
	w := p.w
	if p.watches[a.Partition] != nil {
		w.fail("%s watches %s twice", p.id, a.Partition)
	}
	w.seq++
	ow := &ownerWatch{p: p, partition: a.Partition, key: w.group.Owner(a.Partition), from: firstWatch + channel(w.seq), after: a.After}
	p.watches[a.Partition] = ow
	w.after(w.latency(), ow.begin)
}

// begin is when the request to watch arrives: it begins with how the key stands, if
// that is news.
func (ow *ownerWatch) begin() {
	w := ow.p.w
	if ow.ended || ow.p.dead {
		return
	}
	list := slices.DeleteFunc(w.watches[ow.key], func(x *ownerWatch) bool { return x.ended || x.p.dead })
	w.watches[ow.key] = append(list, ow)
	kv, revision := w.owner(ow.key)
	if w.off == watchFromClaim {
		return
	}
	switch {
	case kv == nil && revision > ow.after:
		ow.tell(rebalance.OwnerSeen{Partition: ow.partition, Revision: revision}, nil)
	case kv != nil && kv.ModRevision > ow.after:
		ow.tell(rebalance.OwnerSeen{Partition: ow.partition, Revision: kv.ModRevision, Exists: true, Token: kv.CreateRevision, Owner: string(kv.Value)}, kv)
	}
}

func (w *world) owner(key string) (*registry.KV, int64) {
	kv, revision, err := registry.GetKey(ctx, w.twin, key)
	w.must(err)
	return kv, revision
}

// tell lets the member hear of the key, after what it was told before.
func (ow *ownerWatch) tell(seen rebalance.OwnerSeen, kv *registry.KV) {
	p, w := ow.p, ow.p.w
	at := max(w.now+p.lag(), ow.next)
	ow.next = at
	p.at(at, ow.from, func() {
		if ow.ended || p.session == nil {
			return
		}
		seen.Mine = seen.Exists && kv.Lease == p.session.lease
		p.step(seen)
	})
}

// ownerChanged tells of one change of an owner key.
func (w *world) ownerChanged(e *registry.Event) {
	w.observer.ownerChanged(e)
	for _, ow := range w.watches[e.Key] {
		if ow.ended || ow.broken || ow.p.dead {
			continue
		}
		seen := rebalance.OwnerSeen{Partition: ow.partition, Revision: e.ModRevision, Exists: !e.Deleted}
		if seen.Exists {
			seen.Token, seen.Owner = e.CreateRevision, string(e.Value)
		}
		kv := e.KV
		ow.tell(seen, &kv)
	}
}

// cut breaks the watch: nothing is heard until it is noticed, and then the key is
// read, which says all that the member needs.
func (ow *ownerWatch) cut() {
	p, w := ow.p, ow.p.w
	ow.broken = true
	if w.off == rewatch {
		return
	}
	p.at(w.now+w.between(ms, 2*sec), free, func() {
		if ow.ended {
			return
		}
		w.spawn(p, func(t *task) {
			for pause := minJoinPause; !ow.ended; pause = min(2*pause, maxJoinPause) {
				t.sleep(pause)
				t.within(callLimit)
				kv, revision, err := registry.GetKey(ctx, p.link, ow.key)
				if err != nil {
					continue
				}
				if ow.ended || p.session == nil {
					return
				}
				seen := rebalance.OwnerSeen{Partition: ow.partition, Revision: revision}
				if kv != nil {
					seen.Exists, seen.Token, seen.Owner = true, kv.CreateRevision, string(kv.Value)
				}
				ow.tell(seen, kv)
				ow.broken, ow.after = false, revision
				w.after(w.latency(), ow.begin)
				return
			}
		})
	})
}

func eventText(e rebalance.Event) string {
	if s, ok := e.(rebalance.Snapshot); ok {
		text := fmt.Sprintf("Snapshot at %d (registered %d):", s.Revision, s.Registered)
		for _, m := range s.Members {
			text += fmt.Sprintf(" %s%v%v", m.ID, m.Subscription, m.Strategies)
		}
		for _, name := range sortedKeys(s.Topology) {
			text += fmt.Sprintf("; %s has %d, since %d", name, len(s.Topology[name]), s.Incarnations[name])
		}
		return text
	}
	return fmt.Sprintf("%T%+v", e, e)[len("rebalance."):]
}

func actionText(a rebalance.Action) string {
	if p, ok := a.(rebalance.Propose); ok {
		return fmt.Sprintf("Propose %d, from the group at %d, in place of the one of %d: %s", p.Number, p.Snapshot, p.Replace, p.Value)
	}
	return fmt.Sprintf("%T%+v", a, a)[len("rebalance."):]
}
