package consumer

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/muster-io/muster/offsets"
	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/rebalance/membership"
	"github.com/muster-io/muster/registry"
)

// driver is the work of a membership: it turns ownerships into deliveries. The
// functions that a membership.Work has are called by the membership's loop, which
// owns the fields but those that say otherwise.
type driver struct {
	c       *Consumer
	log     *slog.Logger
	store   registry.Store
	offsets *offsets.Registry

	ctx    context.Context // ends when the driver closes; everything hangs on it
	cancel context.CancelFunc
	work   sync.WaitGroup
	stop   context.CancelFunc // has the membership leave
	// failure is the first error of a handler; it is set once, by whoever fails first.
	failure error
	failing sync.Once

	view     atomic.Pointer[registry.Snapshot] // the newest
	table    *table                            // safe for concurrent use
	fetch    *fetcher                          // likewise
	commits  *committer                        // likewise
	buffered budget                            // likewise
	lanes    map[lane]chan struct{}
	workers  map[registry.Partition]<-chan struct{} // closed when no worker of the partition is left
	reported map[string]bool                        // bad records that were complained about
}

// lane is one stream: at most one record of it is with the handler.
type lane struct {
	topic  string // empty where a filter chooses the topics, which share the streams
	stream int32
}

func (d *driver) laneOf(own *membership.Ownership) lane {
	if d.c.filtered {
		return lane{stream: own.Stream}
	}
	return lane{own.Partition.Topic, own.Stream}
}

func newDriver(c *Consumer, stop context.CancelFunc) *driver {
	d := &driver{c: c, log: c.member.Logger(), store: c.cfg.Store, offsets: offsets.NewRegistry(c.cfg.Store, c.group),
		stop: stop, table: newTable(), lanes: map[lane]chan struct{}{},
		workers: map[registry.Partition]<-chan struct{}{}, reported: map[string]bool{}}
	d.buffered.limit = int64(c.cfg.MaxTotalBytes)
	d.view.Store(&registry.Snapshot{})
	d.ctx, d.cancel = context.WithCancel(context.Background())
	d.fetch = newFetcher(d)
	d.commits = newCommitter(d)
	return d
}

// close ends whatever the driver started, and waits for it.
func (d *driver) close() {
	d.cancel()
	d.work.Wait()
	d.fetch.close()
}

// fail has the consumer leave, in order, with an error.
func (d *driver) fail(err error) {
	d.failing.Do(func() { d.failure = err })
	d.stop()
}

// Snapshot tells the fetcher where the brokers are and what the topics are.
func (d *driver) Snapshot(s rebalance.Snapshot, view registry.Snapshot) {
	d.view.Store(&view)
	d.fetch.seed(d.brokerAddresses(view.Under(membership.ViewBrokers)))
	d.fetch.topics(s.Incarnations)
}

// brokerAddresses lists where the live brokers listen.
func (d *driver) brokerAddresses(kvs []registry.KV) []string {
	var list []string
	for _, kv := range kvs {
		_, rec, err := d.c.cfg.Root.ParseBroker(kv)
		if err != nil {
			d.complain(err)
			continue
		}
		list = append(list, net.JoinHostPort(rec.Host, strconv.Itoa(int(rec.Port))))
	}
	return list
}

// maxReported bounds what is remembered of bad records.
const maxReported = 1000

// complain logs a bad record once.
func (d *driver) complain(err error) {
	if text := err.Error(); !d.reported[text] && len(d.reported) < maxReported {
		d.reported[text] = true
		d.log.Warn("record skipped", "error", err)
	}
}

// Begin starts the deliveries. Those of one broker start together, and apart from
// the others': a broker that does not answer holds up its own only.
func (d *driver) Begin(list []*membership.Ownership) {
	maps.DeleteFunc(d.workers, func(_ registry.Partition, left <-chan struct{}) bool { // topics come and go
		select {
		case <-left:
			return true
		default:
			return false
		}
	})
	starts := map[int32][]*delivery{}
	for _, own := range list {
		if d.withoutLog(own) {
			continue
		}
		starts[own.Partition.Home] = append(starts[own.Partition.Home], d.deliver(own))
	}
	for _, list := range starts {
		d.work.Go(func() { d.start(list) })
	}
}

// withoutLog refuses a partition of which nothing can be read. Asking brokers for it
// would have no end. Where a filter chose the topic, the others are read all the same.
func (d *driver) withoutLog(own *membership.Ownership) bool {
	kv, _ := d.view.Load().Get(membership.ViewTopics, d.c.cfg.Root.Topic(own.Partition.Topic))
	_, rec, ok, err := d.c.cfg.Root.ParseTopic(kv)
	switch {
	case !ok || err != nil || !rec.NoLog:
		return false
	case d.c.filtered:
		d.log.Warn("partition is owned and not read: its topic has no log", "topic", own.Partition.Topic, "partition", own.Partition.Name())
	default:
		d.fail(fmt.Errorf("topic %s: %w", own.Partition.Topic, ErrNoLog))
	}
	return true
}

func (d *driver) deliver(own *membership.Ownership) *delivery {
	l := d.laneOf(own)
	if d.lanes[l] == nil {
		d.lanes[l] = make(chan struct{}, 1)
	}
	former := d.workers[own.Partition]
	if former == nil {
		former = closedChannel()
	}
	o := newDelivery(own, d.lanes[l], former, &d.buffered)
	left := make(chan struct{})
	d.workers[own.Partition] = left
	d.table.put(o)
	d.work.Go(func() {
		defer close(left)
		d.workOn(o)
		<-former // it may outlast this one
	})
	return o
}

func closedChannel() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

// Drain waits until the handler is done with the record in hand, and commits what
// it finished.
func (d *driver) Drain(own *membership.Ownership) bool {
	o := d.table.of(own)
	if o == nil {
		return own.Alive() // there was nothing to deliver
	}
	select {
	case <-o.done:
	case <-own.Context().Done():
		return false
	}
	if d.c.cfg.ManualCommit {
		return own.Alive()
	}
	return d.commits.last(o)
}

func (d *driver) Revoked(own *membership.Ownership) {
	o := d.table.of(own)
	if o == nil {
		return
	}
	d.end(o)
	d.log.Info("partition revoked", "topic", o.Partition.Topic, "partition", o.Partition.Name(), "offset", o.next.Load())
	if f := d.c.cfg.Listener.Revoked; f != nil {
		f(o.Partition, o.next.Load())
	}
}

func (d *driver) Lost(own *membership.Ownership, reason string) {
	o := d.table.of(own)
	if o == nil {
		return
	}
	d.end(o)
	if f := d.c.cfg.Listener.Lost; f != nil {
		f(own.Partition, reason)
	}
}

func (d *driver) end(o *delivery) {
	d.table.remove(o)
	d.fetch.remove(o)
	o.queue.close()
}

// Calls that fail are made again after a pause that doubles between these bounds.
const (
	minRetryPause = 100 * time.Millisecond
	maxRetryPause = 2 * time.Second
)

// callLimit bounds one call to the registry, so that a call into nowhere is
// noticed and made again; the session's deadline comes before harm does.
const callLimit = 5 * time.Second

func sleep(ctx context.Context, pause time.Duration) bool {
	t := time.NewTimer(pause)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
