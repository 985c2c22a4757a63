package consumer

import (
	"context"
	"errors"
	"io"
	"iter"
	"maps"
	"slices"
	"strings"

	"github.com/muster-io/muster/rebalance/membership"
)

// Stream hands over records one after the other: those of the partitions of one
// topic that are assigned to it, or of all topics that a filter chooses. Its methods
// must not be called by several goroutines at the same time; each stream has its own.
//
// A record counts as consumed when the next one is asked for. Until then the consumer
// neither commits it nor gives its partition up.
type Stream struct {
	Topic  string // empty where a filter chooses
	Number int32

	offers chan *offer
	inHand *offer        // the record that was taken last, if it is not finished
	ended  chan struct{} // closed when the consumer has stopped
}

// offer is a record that waits to be taken, and then to be finished.
type offer struct {
	record   *Record
	finished chan bool // holds the answer; false: put down, not finished
}

var (
	// errNotTaken: the partition was given up before anybody took the record.
	errNotTaken = errors.New("record was not taken")
	// errPutBack: it is paused, or another place was sought, before anybody took it.
	errPutBack = errors.New("record is put back")
)

func newStreams(s membership.Subscription) map[lane]*Stream {
	streams := map[lane]*Stream{}
	add := func(topic string, n int32) {
		for i := range n {
			streams[lane{topic, i}] = &Stream{Topic: topic, Number: i, offers: make(chan *offer), ended: make(chan struct{})}
		}
	}
	if s.Pattern != "" {
		add("", s.Streams)
	}
	for topic, n := range s.Topics {
		add(topic, n)
	}
	return streams
}

// Streams are the streams of a consumer without a handler, by topic and number. All
// of them must be read, or their partitions stand still.
func (c *Consumer) Streams() []*Stream {
	return slices.SortedFunc(maps.Values(c.streams), func(a, b *Stream) int {
		if a.Topic != b.Topic {
			return strings.Compare(a.Topic, b.Topic)
		}
		return int(a.Number - b.Number)
	})
}

// Next finishes the record that it returned last, and waits for the next one. It
// returns io.EOF once the consumer has stopped, and the error of ctx when that ends.
func (s *Stream) Next(ctx context.Context) (*Record, error) {
	s.answer(true)
	for {
		select {
		case o := <-s.offers:
			// It may have waited here for long. See Record.Owned, Pause and Seek.
			if !o.record.Owned() || !o.record.ticket.stands() {
				o.finished <- false
				continue
			}
			s.inHand = o
			return o.record, nil
		case <-s.ended:
			return nil, io.EOF
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// All goes through the records until ctx ends or the consumer has stopped. A record
// counts as consumed when the loop comes round; one at which the loop is left does
// not, and is handed over again to whoever goes on reading the stream.
func (s *Stream) All(ctx context.Context) iter.Seq[*Record] {
	return func(yield func(*Record) bool) {
		for {
			r, err := s.Next(ctx)
			if err != nil {
				return
			}
			if !yield(r) {
				s.answer(false)
				return
			}
		}
	}
}

func (s *Stream) answer(finished bool) {
	if s.inHand != nil {
		s.inHand.finished <- finished
		s.inHand = nil
	}
}

// hand is the handler of a stream: it returns when the record is finished.
func (s *Stream) hand(ctx context.Context, r *Record) error {
	for {
		if !r.ticket.stands() {
			return errPutBack
		}
		o := &offer{record: r, finished: make(chan bool, 1)}
		select {
		case s.offers <- o:
		case <-r.owner.Revoked():
			return errNotTaken
		case <-ctx.Done():
			return ErrNotOwned
		}
		select {
		case finished := <-o.finished:
			if finished {
				return nil
			}
		case <-ctx.Done():
			return ErrNotOwned
		}
	}
}
