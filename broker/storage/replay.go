package storage

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
)

// walk calls f for the header of every batch from an offset on, in order.
func (l *Log) walk(from int64, f func(*Header)) error {
	v := l.view.Load()
	for i, s := range v.segments {
		if i+1 < len(v.segments) && v.segments[i+1].base <= from {
			continue
		}
		index, end := v.indexOf(i)
		position, err := s.seek(index, max(from, s.base), end)
		if err != nil {
			return err
		}
		c := newCursor(s, position, end, lookupChunk)
		for {
			h, err := c.header()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return l.damaged(s, c.position, from, err)
			}
			if h.BaseOffset >= from {
				f(&h)
			}
			c.skip(&h)
		}
	}
	return nil
}

// damaged makes a CorruptionError of an error about a bad batch.
func (l *Log) damaged(s *segment, position, offset int64, err error) error {
	if !errors.Is(err, errBadBatch) {
		return fmt.Errorf("log %s: %w", l.dir, err)
	}
	return &CorruptionError{Dir: l.dir, Segment: s.base, Position: position, Offset: offset, Reason: err.Error()}
}

// loadProducers takes the newest snapshot that can be read, and what the batches
// after it add. Without one it walks over the whole log.
func (l *Log) loadProducers(now int64) error {
	offsets, err := listOffsets(l.opts.FS, l.dir, producersSuffix)
	if err != nil {
		return err
	}
	from := l.Start()
	l.producers = newProducers(l.opts.MaxProducers)
	for i := len(offsets) - 1; i >= 0; i-- {
		name := filepath.Base(fileName(l.dir, offsets[i], producersSuffix))
		loaded, err := l.readSnapshot(name, offsets[i])
		if err == nil {
			l.producers, from = loaded, offsets[i]
			break
		}
		tell(l.opts.Listener.Repaired, Repaired{Dir: l.dir, What: "the table of producers", Reason: name + ": " + err.Error()})
		// It will not get better, and must not take the place of one that can be
		// fallen back on.
		if err := removeIfThere(l.opts.FS, filepath.Join(l.dir, name)); err != nil {
			return fmt.Errorf("remove a bad snapshot of producers: %w", err)
		}
	}
	err = l.walk(from, func(h *Header) { l.producers.apply(h, now) })
	l.producers.expire(now - l.opts.ProducerExpiry.Milliseconds())
	return err
}

func (l *Log) readSnapshot(name string, offset int64) (*producers, error) {
	if offset < l.Start() || offset > l.End() {
		return nil, fmt.Errorf("offset %d is outside the log, %d to %d", offset, l.Start(), l.End())
	}
	data, err := readSmallFile(l.opts.FS, l.dir, name)
	if err != nil {
		return nil, err
	}
	return decodeProducers(data, offset, l.opts.MaxProducers)
}

// loadEpochs reads the checkpoint of leader epochs, drops what describes batches
// that are gone, and makes it again from the batches if it cannot be read.
func (l *Log) loadEpochs() error {
	data, err := readSmallFile(l.opts.FS, l.dir, epochsName)
	var list epochs
	if err == nil {
		list, err = decodeEpochs(data)
	}
	if errors.Is(err, ErrNotExist) && l.End() == l.Start() {
		return nil
	}
	if err == nil {
		kept := list.before(l.End())
		l.epochs = kept
		if len(kept) == len(list) {
			return nil
		}
	} else {
		reason := err
		err = l.walk(l.Start(), func(h *Header) {
			if h.LeaderEpoch > l.epochs.latest() {
				l.epochs = l.epochs.with(h.LeaderEpoch, h.BaseOffset)
			}
		})
		if err != nil {
			return err
		}
		tell(l.opts.Listener.Repaired, Repaired{Dir: l.dir, What: epochsName, Reason: reason.Error()})
	}
	return writeSmallFile(l.opts.FS, l.dir, epochsName, l.epochs.encode())
}
