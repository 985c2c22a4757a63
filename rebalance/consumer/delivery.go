package consumer

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/muster-io/muster/offsets"
	"github.com/muster-io/muster/rebalance/membership"
	"github.com/muster-io/muster/registry"
)

// delivery is what is done under one ownership of a partition.
type delivery struct {
	*membership.Ownership

	begin  chan startAt    // where to start, once known
	done   chan struct{}   // closed when the worker has ended
	former <-chan struct{} // closed when no earlier worker of the partition in this process is left
	lane   chan struct{}   // held while a record is with the handler
	queue  *queue

	// next is the offset after the last record that the handler finished; None
	// until the start is known.
	next atomic.Int64
	// committed belongs to the committer.
	committed offsets.Position
	// bounds of the log by timestamp, as far as brokers said; they belong to start.
	bounds map[int64]logOffset
}

func newDelivery(own *membership.Ownership, lane chan struct{}, former <-chan struct{}) *delivery {
	o := &delivery{Ownership: own, begin: make(chan startAt, 1), done: make(chan struct{}),
		former: former, lane: lane, queue: newQueue(), committed: offsets.Position{Offset: offsets.None}, bounds: map[int64]logOffset{}}
	o.next.Store(offsets.None)
	return o
}

// deliverAll is the worker of one delivery: it hands over record by record until
// the partition is revoked or lost.
func (d *driver) deliverAll(o *delivery) {
	defer close(o.done)
	// An earlier worker's handler may still have a record, of a lost ownership, in
	// hand. It must not keep the partition from the group meanwhile.
	select {
	case <-o.former:
	case <-o.Revoked():
		return
	case <-o.Context().Done():
		return
	}
	var at startAt
	select {
	case at = <-o.begin:
	case <-o.Revoked():
		return
	case <-o.Context().Done():
		return
	}
	if !o.Alive() {
		return
	}
	o.committed = at.committed // before next is set: the committer looks at next first
	o.next.Store(at.from)
	d.fetch.add(o, at.from)
	d.log.Info("partition assigned", "topic", o.Partition.Topic, "partition", o.Partition.Name(), "stream", o.Stream, "offset", at.from, "token", o.Token)
	if f := d.c.cfg.Listener.Assigned; f != nil {
		f(o.Partition, o.Stream, at.from)
	}
	for {
		select {
		case <-o.queue.ready:
		case <-o.Revoked():
			return
		case <-o.Context().Done():
			return
		}
		for {
			b, ok := o.queue.pop()
			if !ok {
				break
			}
			if b.reset {
				o.next.Store(b.offset)
				continue
			}
			d.fetch.drained(o)
			if !d.deliverBatch(o, b.records) {
				return
			}
		}
	}
}

// A worker keeps its lane for so many records and, if the handler is slow, for so
// long: passing it on for each would cost more than the hand-over itself.
const (
	laneRecords = 64
	laneTime    = 5 * time.Millisecond
)

// deliverBatch hands over records; false when the worker is to end.
func (d *driver) deliverBatch(o *delivery, records []*kgo.Record) bool {
	for len(records) > 0 {
		n, ok := d.deliverRun(o, records)
		if !ok {
			return false
		}
		records = records[n:]
	}
	return true
}

// deliverRun hands over the first records while it holds the lane. It returns how
// many it is done with.
func (d *driver) deliverRun(o *delivery, records []*kgo.Record) (n int, ok bool) {
	select {
	case o.lane <- struct{}{}:
		defer func() { <-o.lane }()
	case <-o.Revoked():
		return 0, false
	case <-o.Context().Done():
		return 0, false
	}
	began := time.Now()
	for _, r := range records[:min(len(records), laneRecords)] {
		// A record before next is from before a restart of the fetch.
		if r.Offset >= o.next.Load() {
			if !d.deliverOne(o, r) {
				return n, false
			}
		}
		if n++; time.Since(began) >= laneTime {
			break
		}
	}
	return n, true
}

func (d *driver) deliverOne(o *delivery, r *kgo.Record) bool {
	rec := Record{Partition: o.Partition, Offset: r.Offset, Timestamp: r.Timestamp, Key: r.Key, Value: r.Value, owner: o}
	for _, h := range r.Headers {
		rec.Headers = append(rec.Headers, Header{Key: h.Key, Value: h.Value})
	}
	select {
	case <-o.Revoked():
		return false
	default:
	}
	// The last look before the hand-over. It is on the session's clock, so that a
	// process that was stopped past its deadline does not hand over what it holds.
	if !o.Alive() {
		return false
	}
	switch err := d.c.handler(o.Context(), &rec); {
	case err == nil:
		o.next.Store(r.Offset + 1)
		return true
	case !o.Alive():
		// Whatever the handler says of it: the record is another owner's by now.
		d.log.Info("handler ended after its partition was lost", "topic", o.Partition.Topic, "partition", o.Partition.Name(), "offset", r.Offset, "error", err)
		return false
	default:
		d.fail(fmt.Errorf("handler failed on %s offset %d: %w", o.Partition, r.Offset, err))
		return false
	}
}

// queue holds what was fetched and not handed over. Its bytes are bounded by
// whoever pushes: past the limit the fetch is paused.
type queue struct {
	ready chan struct{}

	mu     sync.Mutex
	list   []queued
	bytes  int
	paused bool
}

type queued struct {
	records []*kgo.Record
	bytes   int
	reset   bool // not records, but: go on at offset
	offset  int64
}

func newQueue() *queue { return &queue{ready: make(chan struct{}, 1)} }

// push adds to the queue; pause tells to stop fetching for now.
func (q *queue) push(b queued, limit int) (pause bool) {
	q.mu.Lock()
	q.list = append(q.list, b)
	q.bytes += b.bytes
	pause = q.bytes > limit && !q.paused
	q.paused = q.paused || pause
	q.mu.Unlock()
	select {
	case q.ready <- struct{}{}:
	default:
	}
	return pause
}

func (q *queue) pop() (queued, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.list) == 0 {
		return queued{}, false
	}
	b := q.list[0]
	q.list[0] = queued{}
	q.list = q.list[1:]
	q.bytes -= b.bytes
	return b, true
}

// low tells whether a paused fetch could go on.
func (q *queue) low(limit int) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.paused && q.bytes <= limit/2
}

// resume is low, and ends the pause.
func (q *queue) resume(limit int) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.paused || q.bytes > limit/2 {
		return false
	}
	q.paused = false
	return true
}

// table holds the deliveries that are going on.
type table struct {
	mu   sync.Mutex
	list map[registry.Partition]*delivery
}

func newTable() *table {
	return &table{list: map[registry.Partition]*delivery{}}
}

func (t *table) put(o *delivery) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.list[o.Partition] = o
}

func (t *table) get(p registry.Partition) *delivery {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.list[p]
}

// of returns the delivery of an ownership; nil if there is none any more.
func (t *table) of(own *membership.Ownership) *delivery {
	if o := t.get(own.Partition); o != nil && o.Ownership == own {
		return o
	}
	return nil
}

func (t *table) remove(o *delivery) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.list[o.Partition] == o {
		delete(t.list, o.Partition)
	}
}

func (t *table) all() []*delivery {
	t.mu.Lock()
	defer t.mu.Unlock()
	list := make([]*delivery, 0, len(t.list))
	for _, o := range t.list {
		list = append(list, o)
	}
	return list
}
