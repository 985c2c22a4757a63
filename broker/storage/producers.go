package storage

import (
	"fmt"
	"math"

	"github.com/twmb/franz-go/pkg/kerr"
)

const (
	// keptBatches is how many of its last batches a producer may send again and be
	// recognised: Kafka's clients have at most five requests under way.
	keptBatches = 5

	// maxProducers bounds the table of a partition; each entry takes about 300
	// bytes. Beyond it the producer that was silent for the longest time is
	// forgotten, and may go on: an unknown producer is accepted at any sequence.
	maxProducers = 100_000
)

// producers is what a partition knows about its idempotent producers. It has no
// clock and does no I/O: batches and times go in, answers come out.
//
// Its invariant: the state is a function of the batches in the log below its
// offset, apart from what was forgotten for age or room.
type producers struct {
	byID map[int64]*producer
	// A ring through every producer: idle.older appended last, idle.newer was silent
	// for the longest time.
	idle producer
	max  int
}

type producer struct {
	id      int64
	epoch   int16
	seen    int64 // milliseconds: when its last batch was appended
	n       int   // batches in use
	batches [keptBatches]producedBatch
	newer   *producer
	older   *producer
}

// producedBatch is one of the last batches of a producer, the oldest first.
type producedBatch struct {
	firstSequence, lastSequence int32
	base                        int64
	timestamp                   int64
}

// next is the offset after the batch. The number of records follows from the sequences.
func (b *producedBatch) next() int64 {
	return b.base + int64(sequenceDistance(b.firstSequence, b.lastSequence)) + 1
}

func newProducers(limit int) *producers {
	p := &producers{byID: map[int64]*producer{}, max: limit}
	p.idle.newer, p.idle.older = &p.idle, &p.idle
	return p
}

// addSequence adds to a sequence number; after the largest comes 0.
func addSequence(sequence, n int32) int32 {
	return int32((int64(sequence) + int64(n)) & math.MaxInt32)
}

func sequenceDistance(first, last int32) int32 {
	return int32((int64(last) - int64(first)) & math.MaxInt32)
}

// check says what to do with a batch: store it (nil, nil), answer with the
// batch that was stored the first time, or refuse it. It changes nothing.
func (p *producers) check(h *Header) (*producedBatch, error) {
	known := p.byID[h.ProducerID]
	if known == nil {
		// Its state may have been forgotten, so it cannot be told from a new one.
		return nil, nil
	}
	if h.ProducerEpoch < known.epoch {
		return nil, fmt.Errorf("producer %d has epoch %d, the partition has seen %d: %w",
			h.ProducerID, h.ProducerEpoch, known.epoch, kerr.InvalidProducerEpoch)
	}
	if h.ProducerEpoch > known.epoch {
		if h.BaseSequence != 0 {
			return nil, fmt.Errorf("producer %d begins epoch %d with sequence %d, not 0: %w",
				h.ProducerID, h.ProducerEpoch, h.BaseSequence, kerr.OutOfOrderSequenceNumber)
		}
		return nil, nil
	}
	for i := range known.n {
		b := &known.batches[i]
		if b.firstSequence == h.BaseSequence && b.lastSequence == h.lastSequence() {
			return b, nil
		}
	}
	if want := addSequence(known.batches[known.n-1].lastSequence, 1); h.BaseSequence != want {
		return nil, fmt.Errorf("producer %d sends sequence %d where %d is expected: %w",
			h.ProducerID, h.BaseSequence, want, kerr.OutOfOrderSequenceNumber)
	}
	return nil, nil
}

// apply notes a batch that is in the log. It accepts whatever the log holds: the
// checks were made before it was stored.
func (p *producers) apply(h *Header, now int64) {
	if !h.idempotent() {
		return
	}
	known := p.byID[h.ProducerID]
	if known == nil {
		known = &producer{id: h.ProducerID, epoch: h.ProducerEpoch}
		p.add(known)
	}
	if known.epoch != h.ProducerEpoch {
		known.epoch, known.n = h.ProducerEpoch, 0
	}
	if known.n == keptBatches {
		copy(known.batches[:], known.batches[1:])
		known.n--
	}
	known.batches[known.n] = producedBatch{
		firstSequence: h.BaseSequence, lastSequence: h.lastSequence(), base: h.BaseOffset, timestamp: h.MaxTimestamp,
	}
	known.n++
	known.seen = max(known.seen, now)
	known.unlink()
	known.linkAfter(&p.idle)
}

// add makes a producer the one that appended last.
func (p *producers) add(known *producer) {
	for len(p.byID) >= p.max {
		p.forget(p.idle.newer)
	}
	p.byID[known.id] = known
	known.linkAfter(&p.idle)
}

// expire forgets producers that were silent since before the given time.
func (p *producers) expire(before int64) int {
	n := 0
	for last := p.idle.newer; last != &p.idle && last.seen < before; last = p.idle.newer {
		p.forget(last)
		n++
	}
	return n
}

func (p *producers) forget(known *producer) {
	known.unlink()
	delete(p.byID, known.id)
}

// The ring: idle.older is the producer that appended last, and following older
// from there ends at idle.newer, the one silent for the longest time.
func (known *producer) linkAfter(at *producer) {
	known.newer, known.older = at, at.older
	at.older.newer = known
	at.older = known
}

func (known *producer) unlink() {
	known.newer.older, known.older.newer = known.older, known.newer
}
