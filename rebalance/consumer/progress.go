package consumer

import (
	"sync"
	"sync/atomic"

	"github.com/muster-io/muster/offsets"
)

// progress is how far a delivery has come: where the next record to hand over is,
// which ones the application has, and up to where it has finished all of them.
type progress struct {
	// next is the offset up to which everything is finished, and so what is committed;
	// None until the start is known. It is written with mu held.
	next atomic.Int64

	mu       sync.Mutex
	position int64     // of the next record to hand over
	open     []handout // since the last seek, from the first that is not finished on; by offset
	inHand   int       // records that the application has, from before a seek too
	bytes    int       // of those
	seeks    uint64
	floor    uint64        // what was fetched for an earlier add of the fetcher is not handed over
	paused   bool          // by the application
	changed  chan struct{} // closed when a record is finished or the pause ends; nil if nobody waits
}

// handout is a record that was handed over.
type handout struct {
	offset   int64
	finished bool
}

func (p *progress) init() { p.next.Store(offsets.None) }

// moveTo says, with mu held, where to go on. That the records in hand get finished
// says nothing any more of how far the application has come.
func (p *progress) moveTo(offset int64) {
	p.position, p.open = offset, nil
	p.seeks++
	p.next.Store(offset)
}

// ticket is a record that is about to be handed over.
type ticket struct {
	p      *progress
	offset int64
	bytes  int
	seeks  uint64
	ended  bool // with p.mu held
}

type verdict int

const (
	handOver verdict = iota
	skip             // it is from before a restart of the fetch, or a seek
	wait             // there is a pause, or too much is in hand
	stop             // no more of the partition is to be handed over
)

// begin notes that a record is handed over now, unless it must not be.
func (p *progress) begin(offset int64, bytes, limit int, fetch uint64) (ticket, verdict) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case fetch < p.floor || offset < p.position:
		return ticket{}, skip
	case p.full(limit):
		return ticket{}, wait
	}
	p.position = offset + 1
	p.open = append(p.open, handout{offset: offset})
	p.inHand++
	p.bytes += bytes
	return ticket{p: p, offset: offset, bytes: bytes, seeks: p.seeks}, handOver
}

func (p *progress) full(limit int) bool { return p.paused || p.inHand > 0 && p.bytes > limit }

// end takes a record out of the application's hand, once: a handler may return an
// error for a record that it has held. Offsets advance only over what is finished
// without a gap.
func (t *ticket) end(finished bool) {
	p := t.p
	p.mu.Lock()
	defer p.mu.Unlock()
	if t.ended {
		return
	}
	t.ended = true
	p.inHand--
	p.bytes -= t.bytes
	if finished && t.seeks == p.seeks {
		p.finish(t.offset, t.offset+1)
	}
	p.signal()
}

// stands tells whether the record is still one to be handed over.
func (t *ticket) stands() bool {
	t.p.mu.Lock()
	defer t.p.mu.Unlock()
	return t.seeks == t.p.seeks && !t.p.paused
}

// putBack has the record handed over again as the next one, unless another place was
// sought. It is the last that was begun.
func (t *ticket) putBack() {
	t.end(false)
	p := t.p
	p.mu.Lock()
	defer p.mu.Unlock()
	// What is not open was finished by a commit that the application ordered.
	if last := len(p.open) - 1; t.seeks == p.seeks && last >= 0 && p.open[last].offset == t.offset {
		p.position, p.open = t.offset, p.open[:last]
	}
}

// finish marks the records from an offset to another, with mu held.
func (p *progress) finish(from, to int64) {
	for i := range p.open {
		if at := p.open[i].offset; from <= at && at < to {
			p.open[i].finished = true
		}
	}
	for len(p.open) > 0 && p.open[0].finished {
		p.open = p.open[1:]
	}
	if len(p.open) > 0 {
		p.next.Store(p.open[0].offset)
	} else {
		p.next.Store(p.position)
	}
}

// finishBelow counts as finished what is in hand and before the offset.
func (p *progress) finishBelow(offset int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.next.Load() != offsets.None {
		p.finish(0, offset)
	}
}

func (p *progress) signal() {
	if p.changed != nil {
		close(p.changed)
		p.changed = nil
	}
}

// wait returns what is closed when it is worth while to look again; nil if
// nothing is waited for.
func (p *progress) wait(waits func() bool) <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !waits() {
		return nil
	}
	if p.changed == nil {
		p.changed = make(chan struct{})
	}
	return p.changed
}

// room is nil when the next record may be handed over.
func (p *progress) room(limit int) <-chan struct{} {
	return p.wait(func() bool { return p.full(limit) })
}

// busy is nil when the application has no record in hand.
func (p *progress) busy() <-chan struct{} {
	return p.wait(func() bool { return p.inHand > 0 })
}

func (p *progress) pause(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.paused = on
	p.signal()
}
