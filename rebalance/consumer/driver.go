package consumer

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/muster-io/muster/offsets"
	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// driver feeds the member's state machine and carries out its actions. Its loop
// owns all fields but those that say otherwise; whatever blocks runs in a
// goroutine of its own, which comes back to the loop through post.
type driver struct {
	c       *Consumer
	log     *slog.Logger
	store   registry.Store
	offsets *offsets.Registry
	member  *rebalance.Member

	ctx    context.Context // ends when the driver closes; everything hangs on it
	cancel context.CancelFunc
	work   sync.WaitGroup
	posts  chan func()

	view     *registry.View
	session  *registry.Session // nil while there is none
	table    *table            // safe for concurrent use
	fetch    *fetcher          // likewise
	commits  *committer        // likewise
	watches  map[registry.Partition]context.CancelFunc
	lanes    map[lane]chan struct{}
	workers  map[registry.Partition]<-chan struct{} // closed when no worker of the partition is left
	reported map[string]bool                        // bad records that were complained about
	timer    *time.Timer

	waits   map[registry.Partition]*wait
	silence time.Duration // when it was last complained of

	registered bool // under the present session
	// wasRegistered: under any session; also read by those that register.
	wasRegistered atomic.Bool

	leaving  bool
	finished bool
	err      error
}

// wait is a partition that this consumer is due and somebody else holds.
type wait struct {
	since  time.Duration
	holder *registry.HeldError
	warned time.Duration
}

// lane is one stream of one topic: at most one record of it is with the handler.
type lane struct {
	topic  string
	stream int32
}

func newDriver(c *Consumer) *driver {
	d := &driver{c: c, log: c.cfg.Logger, store: c.cfg.Store, offsets: offsets.NewRegistry(c.cfg.Store, c.group),
		member: rebalance.NewMember(c.cfg.ID), posts: make(chan func()), table: newTable(),
		watches: map[registry.Partition]context.CancelFunc{}, lanes: map[lane]chan struct{}{},
		workers: map[registry.Partition]<-chan struct{}{}, reported: map[string]bool{}, waits: map[registry.Partition]*wait{}}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	d.fetch = newFetcher(d)
	d.commits = newCommitter(d)
	d.timer = time.NewTimer(time.Hour)
	return d
}

// close ends whatever the driver started, and waits for it.
func (d *driver) close() {
	d.cancel()
	d.work.Wait()
	d.timer.Stop()
	if d.view != nil {
		d.view.Close()
	}
	d.fetch.close()
}

// post runs f in the loop; false if the driver closes before.
func (d *driver) post(f func()) bool {
	select {
	case d.posts <- f:
		return true
	case <-d.ctx.Done():
		return false
	}
}

// The prefixes of the driver's view, in order.
const (
	viewIDs = iota
	viewBrokers
	viewTopics
)

func (d *driver) run(ctx context.Context) error {
	root := d.c.cfg.Root
	prefixes := []string{viewIDs: d.c.group.IDs(), viewBrokers: root.Brokers(), viewTopics: root.Topics()}
	view, err := registry.OpenView(ctx, d.store, prefixes,
		registry.ViewOptions{Stall: d.c.cfg.SessionTimeout / 2, Logger: d.log}, nil)
	switch {
	case err == nil:
		d.view = view
	case ctx.Err() != nil:
		return nil // stopped before it was anybody
	default:
		return err
	}
	d.work.Go(d.fetch.run)
	d.work.Go(d.commits.run)
	d.takeSnapshot()
	d.join(nil)
	stop := ctx.Done()
	var patience <-chan time.Time
	overdue := time.NewTicker(d.c.cfg.SessionTimeout)
	defer overdue.Stop()
	for !d.finished {
		var lost <-chan struct{}
		if d.session != nil {
			lost = d.session.Done()
		}
		select {
		case f := <-d.posts:
			f()
		case <-view.Changed():
			d.takeSnapshot()
		case <-view.Trouble():
			d.warnOfSilence()
		case <-lost:
			d.sessionLost()
		case <-d.timer.C:
			d.step(rebalance.Tick{})
		case <-overdue.C:
			d.warnOfWaits()
		case <-stop:
			stop = nil
			d.leave(nil)
		case <-patience:
			d.giveUp()
		}
		if d.leaving && patience == nil {
			patience = time.After(d.c.cfg.LeaveTimeout)
		}
	}
	return d.err
}

// takeSnapshot tells the member, and the fetcher, what the registry looks like now.
func (d *driver) takeSnapshot() {
	s := d.view.Snapshot()
	d.fetch.seed(d.brokerAddresses(s.Under(viewBrokers)))
	snapshot, bad := rebalance.ReadSnapshot(d.c.cfg.Root, d.c.group, d.c.cfg.ID, s.Revision, s.Under(viewIDs), s.Under(viewTopics))
	d.complain(bad)
	d.fetch.topics(snapshot.Incarnations)
	d.step(snapshot)
}

// maxReported bounds what is remembered of bad records.
const maxReported = 1000

// complain logs bad records once each.
func (d *driver) complain(bad []error) {
	for _, err := range bad {
		if text := err.Error(); !d.reported[text] && len(d.reported) < maxReported {
			d.reported[text] = true
			d.log.Warn("record skipped", "error", err)
		}
	}
}

func (d *driver) step(e rebalance.Event) {
	// Those of one broker start together, and apart from the others': a broker that
	// does not answer holds up its own only.
	starts := map[int32][]*delivery{}
	for _, a := range d.member.Step(d.store.Now(), e) {
		if s := d.act(a); s != nil {
			starts[s.partition.Home] = append(starts[s.partition.Home], s)
		}
	}
	for _, list := range starts {
		d.work.Go(func() { d.start(list) })
	}
	if at, ok := d.member.Wake(); ok {
		d.timer.Reset(max(at-d.store.Now(), 0))
	}
}

// act carries out one action; a delivery that begins is returned, so that those
// of one step can be started together.
func (d *driver) act(a rebalance.Action) *delivery {
	switch a := a.(type) {
	case rebalance.Claim:
		s := d.session
		d.work.Go(func() { d.claim(s, a) })
	case rebalance.Release:
		s := d.session
		d.work.Go(func() { d.release(s, a) })
	case rebalance.Deliver:
		return d.deliver(a)
	case rebalance.Revoke:
		if o := d.table.get(a.Partition); o != nil && o.token == a.Token {
			o.revoke()
			d.work.Go(func() { d.drain(o) })
		}
	case rebalance.Lose:
		d.lose(a)
	case rebalance.Watch:
		d.watch(a)
	case rebalance.Unwatch:
		delete(d.waits, a.Partition)
		d.watches[a.Partition]()
		delete(d.watches, a.Partition)
	case rebalance.Reregister:
		s := d.session
		d.log.Warn("registration was deleted by somebody; registering again")
		d.work.Go(func() { d.register(s) })
	case rebalance.Rebalanced:
		d.log.Debug("rebalanced", "rev", a.Revision, "strategy", a.Strategy, "members", a.Members, "share", a.Share)
		if f := d.c.cfg.Listener.Rebalanced; f != nil {
			f(a)
		}
	case rebalance.Left:
		s := d.session
		d.work.Go(func() {
			err := d.unregister(s)
			d.post(func() { d.finish(err) })
		})
	}
	return nil
}

func (d *driver) deliver(a rebalance.Deliver) *delivery {
	l := lane{a.Partition.Topic, a.Stream}
	if d.lanes[l] == nil {
		d.lanes[l] = make(chan struct{}, 1)
	}
	former := d.workers[a.Partition]
	if former == nil {
		former = closedChannel()
	}
	o := newDelivery(d.session, a, d.lanes[l], former)
	left := make(chan struct{})
	d.workers[a.Partition] = left
	d.table.put(o)
	d.work.Go(func() {
		defer close(left)
		d.deliverAll(o)
		<-former // it may outlast this one
	})
	return o
}

func closedChannel() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

func (d *driver) lose(a rebalance.Lose) {
	o := d.table.get(a.Partition)
	if o == nil || o.token != a.Token {
		return
	}
	o.lose()
	d.table.remove(o)
	d.fetch.remove(o)
	d.log.Warn("partition lost", "topic", a.Partition.Topic, "partition", a.Partition.Name(), "reason", a.Reason)
	if f := d.c.cfg.Listener.Lost; f != nil {
		f(a.Partition, a.Reason)
	}
}

// callLimit bounds one call to the registry, so that a call into nowhere is
// noticed and made again; the session's deadline comes before harm does.
const callLimit = 5 * time.Second

func (d *driver) claim(s *registry.Session, a rebalance.Claim) {
	ctx, cancel := context.WithTimeout(d.ctx, callLimit)
	defer cancel()
	claims := make([]registry.OwnerClaim, len(a.Wants))
	for i, w := range a.Wants {
		claims[i] = registry.OwnerClaim{Key: d.c.group.Owner(w.Partition), Value: []byte(rebalance.ThreadID(d.c.cfg.ID, w.Stream)),
			Topic: d.c.cfg.Root.Topic(w.Partition.Topic), Incarnation: a.Incarnations[w.Partition.Topic]}
	}
	guard := registry.Guard{Registration: a.Registration, IDs: d.c.group.IDs(), Snapshot: a.Snapshot}
	results, revision, err := registry.Claim(ctx, d.store, s.Lease(), guard, claims, nil)
	answer := rebalance.ClaimAnswered{Number: a.Number, Revision: revision, Stale: errors.Is(err, registry.ErrStale)}
	answer.Unknown = err != nil && !answer.Stale
	for i, r := range results {
		o := rebalance.ClaimOutcome{Mine: r.Holder == nil, Token: r.Token, Stream: a.Wants[i].Stream, Revision: r.Revision}
		if string(r.Value) != string(claims[i].Value) {
			o.Stream = -1
		}
		answer.Outcomes = append(answer.Outcomes, o)
	}
	if answer.Unknown && d.ctx.Err() == nil {
		d.log.Warn("claim failed, trying again", "error", err)
		d.doubt(s, err)
	}
	d.post(func() {
		if d.session != s {
			return
		}
		for i, r := range results {
			d.noteWait(a.Wants[i].Partition, r.Holder)
		}
		if answer.Stale {
			d.log.Debug("claim was stale", "rev", a.Snapshot)
		}
		d.step(answer)
	})
}

// noteWait remembers since when a partition is waited for; holder is nil if it is
// waited for no more.
func (d *driver) noteWait(p registry.Partition, holder *registry.HeldError) {
	w := d.waits[p]
	switch {
	case holder == nil:
		delete(d.waits, p)
		return
	case w == nil:
		w = &wait{since: d.store.Now()}
		d.waits[p] = w
	}
	w.holder = holder
	d.log.Debug("waiting for the owner to release", "topic", p.Topic, "partition", p.Name(), "owner", string(holder.KV.Value))
	if f := d.c.cfg.Listener.Waiting; f != nil {
		f(p, string(holder.KV.Value))
	}
}

// warnPause is how often something is complained of that goes on.
const warnPause = time.Minute

// warnOfSilence says that the registry does not answer. Nothing else follows from
// it: what is owned is owned as long as the session lives, and no longer.
func (d *driver) warnOfSilence() {
	now := d.store.Now()
	if d.silence != 0 && now-d.silence < warnPause {
		return
	}
	d.silence = now
	d.log.Warn("registry does not answer; what is owned stays so until the session ends")
}

// warnOfWaits says what has been waited for longer than a dead owner's lease
// would have lasted. The waiting goes on: there is no giving up.
func (d *driver) warnOfWaits() {
	now := d.store.Now()
	for p, w := range d.waits {
		if now-w.since < d.c.cfg.SessionTimeout || w.warned != 0 && now-w.warned < warnPause {
			continue
		}
		w.warned = now
		d.log.Warn("partition is due and not released", "topic", p.Topic, "partition", p.Name(),
			"since", (now - w.since).Round(time.Second), "holder", w.holder)
	}
}

// doubt ends the session when the store says that its lease is gone: the next
// renewal would say the same, only later.
func (d *driver) doubt(s *registry.Session, err error) {
	if errors.Is(err, registry.ErrLeaseNotFound) {
		s.Abandon(registry.ErrLeaseGone)
	}
}

func (d *driver) release(s *registry.Session, a rebalance.Release) {
	ctx, cancel := context.WithTimeout(d.ctx, callLimit)
	defer cancel()
	list := make([]registry.OwnerRelease, len(a.Held))
	for i, h := range a.Held {
		list[i] = registry.OwnerRelease{Key: d.c.group.Owner(h.Partition), Token: h.Token}
	}
	revision, err := registry.Release(ctx, d.store, s.Lease(), list, nil)
	if err != nil && d.ctx.Err() == nil {
		d.log.Warn("release failed, trying again", "error", err)
	}
	d.post(func() {
		if d.session == s {
			d.step(rebalance.ReleaseAnswered{Number: a.Number, Revision: revision, Failed: err != nil})
		}
	})
}

// drain waits until the handler is done with the record in hand, commits what it
// finished, and only then lets the partition go: ownership outlives the last
// effect.
func (d *driver) drain(o *delivery) {
	select {
	case <-o.done:
	case <-o.ctx.Done():
		return // lost meanwhile; the member knows
	}
	if !d.commits.last(o) {
		return
	}
	d.post(func() {
		if !o.alive() {
			return
		}
		d.table.remove(o)
		d.fetch.remove(o)
		d.log.Info("partition revoked", "topic", o.partition.Topic, "partition", o.partition.Name(), "offset", o.next.Load())
		if f := d.c.cfg.Listener.Revoked; f != nil {
			f(o.partition, o.next.Load())
		}
		o.lose() // its context has no more use
		d.step(rebalance.Drained{Partition: o.partition, Token: o.token})
	})
}

// leave begins an orderly stop.
func (d *driver) leave(err error) {
	if d.err == nil {
		d.err = err
	}
	if d.leaving {
		return
	}
	d.leaving = true
	d.log.Info("leaving the group")
	switch {
	case d.session == nil:
		d.finished = true // nothing is owned without a session
	case !d.registered:
		// Nothing is owned without a registration either, which may never come: the
		// id may be another's.
		d.session.Abandon(registry.ErrSessionClosed)
		d.sessionLost()
	default:
		d.step(rebalance.Leaving{})
	}
}

// giveUp ends a stop that has taken too long: the partitions are lost, not
// released, so that no record that is still with a handler is committed.
func (d *driver) giveUp() {
	d.log.Warn("handlers did not finish in time; leaving without them", "timeout", d.c.cfg.LeaveTimeout)
	s := d.session
	if s != nil {
		s.Abandon(registry.ErrSessionClosed)
		d.sessionLost()
	}
	d.finish(errors.New("stopped before all handlers finished the record in hand; what they did not finish is not committed"))
}

func (d *driver) finish(err error) {
	if d.err == nil {
		d.err = err
	}
	d.finished = true
}
