package storage

import (
	"errors"
	"fmt"
	"io"
)

// TimedOffset is a record's offset with its timestamp and the leader epoch of its batch.
type TimedOffset struct {
	Offset    int64
	Timestamp int64
	Epoch     int32
}

// timesOf returns the time index of a segment and its latest batch.
func (v *view) timesOf(i int) (entries[timeEntry], timeEntry) {
	if i == len(v.segments)-1 {
		return v.times, v.latest
	}
	return v.segments[i].times, v.segments[i].latest
}

// OffsetForTime returns the first durable record whose timestamp is ts or later; ok
// is false if there is none.
func (l *Log) OffsetForTime(ts int64) (TimedOffset, bool, error) {
	if !l.readers.enter() {
		return TimedOffset{}, false, ErrClosed
	}
	defer l.readers.leave()
	v := l.view.Load()
	for i := range v.segments {
		times, latest := v.timesOf(i)
		// -1 stands for a segment without timestamps, which has no time index. Its
		// records can match only a time before 1970.
		if latest.timestamp < ts && ts >= 0 {
			continue
		}
		from, end := v.segments[i].base, v.durable
		if i+1 < len(v.segments) {
			end = v.segments[i+1].base
		}
		e, ok, err := lastNotAfter(times, func(e timeEntry) bool { return e.timestamp > ts })
		if err != nil {
			return TimedOffset{}, false, fmt.Errorf("look up time %d in %s: %w", ts, l.dir, err)
		}
		if ok && e.offset >= from && e.offset < end {
			from = e.offset
		}
		at, ok, err := l.firstSince(v, i, from, ts)
		if ok || err != nil {
			return at, ok, err
		}
	}
	return TimedOffset{}, false, nil
}

// firstSince walks over a segment from the batch that holds an offset on.
func (l *Log) firstSince(v *view, i int, from, ts int64) (TimedOffset, bool, error) {
	if from >= v.durable {
		return TimedOffset{}, false, nil
	}
	c, _, err := l.locate(v, i, from)
	if err != nil {
		return TimedOffset{}, false, err
	}
	for {
		h, err := c.header()
		if errors.Is(err, io.EOF) {
			return TimedOffset{}, false, nil
		}
		if err != nil {
			return TimedOffset{}, false, l.damaged(c.seg, c.position, from, err)
		}
		if h.MaxTimestamp >= ts {
			at, ok, err := l.recordSince(c, &h, ts)
			if ok || err != nil {
				return at, ok, err
			}
			// A compressed batch whose header claims more than its records hold.
		}
		c.skip(&h)
	}
}

// recordSince returns the first record with timestamp ts or later in the batch
// under the cursor.
func (l *Log) recordSince(c *cursor, h *Header, ts int64) (found TimedOffset, ok bool, err error) {
	err = l.visit(c, h, func(at TimedOffset) bool {
		if at.Timestamp >= ts {
			found, ok = at, true
		}
		return !ok
	})
	return found, ok, err
}

// visit calls f for the records of the batch under the cursor until it returns
// false. If it cannot read them, the start of the batch stands for them all.
func (l *Log) visit(c *cursor, h *Header, f func(TimedOffset) bool) error {
	b, err := c.batch(h)
	if err != nil {
		return err
	}
	if why := checkStored(b, h, h.BaseOffset); why != "" {
		return &CorruptionError{
			Dir: l.dir, Segment: c.seg.base, Position: c.position, Offset: h.BaseOffset, Reason: why}
	}
	start := TimedOffset{Offset: h.BaseOffset, Timestamp: h.MaxTimestamp, Epoch: h.LeaderEpoch}
	if h.Attributes&attrLogAppendTime != 0 {
		f(start) // all records have the batch's time
		return nil
	}
	records := b[headerSize:]
	if h.codec() != CodecNone {
		records, err = l.opts.Decompress(h.codec(), records, maxDecompressed)
	}
	if err == nil {
		err = visitRecords(records, h, f)
	}
	if err != nil {
		// Its producer has sent what nobody can read. Passing over it could pass
		// over records; the start of the batch is at most too early.
		tell(l.opts.Listener.BatchUndecodable, BatchUndecodable{Dir: l.dir, Offset: h.BaseOffset, Err: err})
		f(start)
	}
	return nil
}

func visitRecords(records []byte, h *Header, f func(TimedOffset) bool) error {
	r := recordReader{records}
	for i := range h.NumRecords {
		rec, why := r.next()
		if why == "" && rec.offsetDelta > h.LastOffsetDelta {
			why = "its offset lies outside the batch"
		}
		if why != "" {
			return fmt.Errorf("record %d: %s", i, why)
		}
		at := TimedOffset{
			Offset: h.BaseOffset + int64(rec.offsetDelta), Timestamp: h.FirstTimestamp + rec.timestampDelta, Epoch: h.LeaderEpoch,
		}
		if !f(at) {
			return nil
		}
	}
	return nil
}

// MaxTimestamp returns the first of the durable records with the largest timestamp.
// ok is false if no durable record has a timestamp.
func (l *Log) MaxTimestamp() (TimedOffset, bool, error) {
	if !l.readers.enter() {
		return TimedOffset{}, false, ErrClosed
	}
	defer l.readers.leave()
	v := l.view.Load()
	best, found := timeEntry{timestamp: -1}, -1
	for i := range v.segments {
		// The view is of a moment at which all that it holds was durable.
		if _, latest := v.timesOf(i); latest.timestamp > best.timestamp {
			best, found = latest, i
		}
	}
	if found < 0 {
		return TimedOffset{}, false, nil
	}
	c, h, err := l.locate(v, found, best.offset)
	if err != nil {
		return TimedOffset{}, false, err
	}
	// Not simply the one with the header's timestamp: a compressed batch was taken
	// at its word, and may claim more than its records hold.
	largest, ok := TimedOffset{}, false
	err = l.visit(c, &h, func(at TimedOffset) bool {
		if !ok || at.Timestamp > largest.Timestamp {
			largest, ok = at, true
		}
		return true
	})
	return largest, ok, err
}
