package consumer

import (
	"errors"
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

	starts chan startAt    // where to start, once known
	done   chan struct{}   // closed when the worker has ended
	former <-chan struct{} // closed when no earlier worker of the partition in this process is left
	lane   chan struct{}   // held while a record is with the handler
	queue  *queue
	progress

	// committed belongs to the committer, and so does ordered: the value of next when
	// the application last had another offset committed, None if it has not.
	committed offsets.Position
	ordered   int64
	// bounds of the log by timestamp, as far as brokers said; they belong to start.
	bounds map[int64]logOffset
}

func newDelivery(own *membership.Ownership, lane chan struct{}, former <-chan struct{}, all *budget) *delivery {
	o := &delivery{Ownership: own, starts: make(chan startAt, 1), done: make(chan struct{}), former: former, lane: lane, queue: newQueue(all),
		committed: offsets.Position{Offset: offsets.None}, ordered: offsets.None, bounds: map[int64]logOffset{}}
	o.progress.init()
	return o
}

// workOn hands over until the partition is revoked or lost. Then it waits for what the
// application holds of it, which until then is not done.
func (d *driver) workOn(o *delivery) {
	d.deliverAll(o)
	over := o.Context().Done()
	for {
		busy := o.busy()
		if busy == nil {
			break
		}
		select {
		case <-busy:
		case <-over:
			over = nil
			close(o.done) // nothing more can come of it; only the next worker waits on
		}
	}
	if over != nil {
		close(o.done)
	}
}

// deliverAll hands over record by record until the partition is revoked or lost.
func (d *driver) deliverAll(o *delivery) {
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
	case at = <-o.starts:
	case <-o.Revoked():
		return
	case <-o.Context().Done():
		return
	}
	if !o.Alive() {
		return
	}
	o.committed = at.committed // before next is set: the committer looks at next first
	o.mu.Lock()
	o.moveTo(at.from)
	d.fetch.add(o, at.from)
	o.mu.Unlock()
	d.log.Info("partition assigned", "topic", o.Partition.Topic, "partition", o.Partition.Name(), "stream", o.Stream, "offset", at.from, "token", o.Token)
	if f := d.c.cfg.Listener.Assigned; f != nil {
		f(o.Context(), Assignment{Partition: o.Partition, Stream: o.Stream, Offset: at.from, Token: o.Token})
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
				o.restart(b)
				continue
			}
			d.fetch.drained(o)
			if !d.deliverBatch(o, b) {
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
func (d *driver) deliverBatch(o *delivery, b queued) bool {
	for len(b.records) > 0 {
		// Outside the lane: who waits must not keep the stream's other partitions waiting.
		if room := o.room(d.c.cfg.MaxBufferedBytes); room != nil {
			select {
			case <-room:
				continue
			case <-o.Revoked():
				return false
			case <-o.Context().Done():
				return false
			}
		}
		n, ok := d.deliverRun(o, b)
		if !ok {
			return false
		}
		b.records = b.records[n:]
	}
	return true
}

// deliverRun hands over the first records while it holds the lane. It returns how
// many it is done with.
func (d *driver) deliverRun(o *delivery, b queued) (n int, ok bool) {
	select {
	case o.lane <- struct{}{}:
		defer func() { <-o.lane }()
	case <-o.Revoked():
		return 0, false
	case <-o.Context().Done():
		return 0, false
	}
	began := time.Now()
	for _, r := range b.records[:min(len(b.records), laneRecords)] {
		select {
		case <-o.Revoked():
			return n, false
		default:
		}
		t, verdict := o.progress.begin(r.Offset, recordBytes(r), d.c.cfg.MaxBufferedBytes, b.number)
		if verdict == wait {
			return n, true
		}
		if verdict == handOver {
			switch d.deliverOne(o, r, &t) {
			case stop:
				return n, false
			case wait:
				return n, true
			}
		}
		if n++; time.Since(began) >= laneTime {
			break
		}
	}
	return n, true
}

// deliverOne returns handOver if it has, stop if nothing more is to be handed over, or
// wait if the record was put back.
func (d *driver) deliverOne(o *delivery, r *kgo.Record, t *ticket) verdict {
	rec := Record{Partition: o.Partition, Offset: r.Offset, Timestamp: r.Timestamp, Key: r.Key, Value: r.Value, owner: o, ticket: t}
	for _, h := range r.Headers {
		rec.Headers = append(rec.Headers, Header{Key: h.Key, Value: h.Value})
	}
	rec.finish = func(err error) bool { return d.finished(o, t, err) }
	// The last look before the hand-over. It is on the session's clock, so that a
	// process that was stopped past its deadline does not hand over what it holds.
	if !o.Alive() {
		t.end(false)
		return stop
	}
	err := d.handle(o, &rec)
	switch {
	case err == nil && rec.held: // it is finished by whoever holds it
	case errors.Is(err, errPutBack):
		t.putBack()
		return wait
	case !d.finished(o, t, err):
		return stop
	}
	return handOver
}

// handle gives the record to the handler, or to the stream that is read.
func (d *driver) handle(o *delivery, r *Record) error {
	if d.c.handler != nil {
		return d.c.handler(o.Context(), r)
	}
	return d.c.streams[d.laneOf(o.Ownership)].hand(o.Context(), r)
}

// finished takes the application's word on a record; false if no more of the
// partition is to be handed over.
func (d *driver) finished(o *delivery, t *ticket, err error) bool {
	switch {
	case err == nil:
		t.end(true)
		return true
	case errors.Is(err, errNotTaken):
		// nobody has it, and the partition is being given up
	case !o.Alive():
		// Whatever the handler says of it: the record is another owner's by now.
		d.log.Info("handler ended after its partition was lost", "topic", o.Partition.Topic, "partition", o.Partition.Name(), "offset", t.offset, "error", err)
	default:
		d.fail(fmt.Errorf("handler failed on %s offset %d: %w", o.Partition, t.offset, err))
	}
	t.end(false)
	return false
}

// restart goes on where the reset policy said, unless the application has sought
// another place meanwhile.
func (o *delivery) restart(b queued) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if b.number >= o.floor {
		o.moveTo(b.offset)
	}
}

// queue holds what was fetched and not handed over. Its bytes are bounded by
// whoever pushes: past the limit, its own or that of all, the fetch is paused.
type queue struct {
	ready chan struct{}
	all   *budget

	mu     sync.Mutex
	list   []queued
	bytes  int
	paused bool
	closed bool
}

type queued struct {
	records []*kgo.Record
	bytes   int
	number  uint64 // of the add of the fetcher that it was fetched for
	reset   bool   // not records, but: go on at offset
	offset  int64
}

func newQueue(all *budget) *queue { return &queue{all: all, ready: make(chan struct{}, 1)} }

// budget is what all queues of a consumer hold together.
type budget struct {
	bytes atomic.Int64
	limit int64
}

func (b *budget) over() bool { return b.bytes.Load() > b.limit }

// push adds to the queue; pause tells to stop fetching for now.
func (q *queue) push(b queued, limit int) (pause bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return false
	}
	q.list = append(q.list, b)
	q.add(b.bytes)
	pause = (q.bytes > limit || q.all.over()) && !q.paused
	q.paused = q.paused || pause
	select {
	case q.ready <- struct{}{}:
	default:
	}
	return pause
}

func (q *queue) add(bytes int) {
	q.bytes += bytes
	q.all.bytes.Add(int64(bytes))
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
	q.add(-b.bytes)
	return b, true
}

// low tells whether a paused fetch could go on.
func (q *queue) low(limit int) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.paused && q.lowNow(limit)
}

// lowNow: an empty queue may fetch whatever others hold, for those may be held up by
// what only its records can end.
func (q *queue) lowNow(limit int) bool {
	return q.bytes == 0 || q.bytes <= limit/2 && !q.all.over()
}

// resume is low, and ends the pause.
func (q *queue) resume(limit int) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.paused || !q.lowNow(limit) {
		return false
	}
	q.paused = false
	return true
}

// fetchBegins: the client begins to read the partition, and does so without a pause,
// whatever has been pushed since it ended.
func (q *queue) fetchBegins() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.paused = false
}

// close empties the queue for good.
func (q *queue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.add(-q.bytes)
	q.list, q.closed = nil, true
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
