package consumer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"testing/synctest"
	"time"
)

// nextIs asks a stream for its next record.
func nextIs(t *testing.T, s *Stream, want string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	r, err := s.Next(ctx)
	got := fmt.Sprint(err)
	if err == nil {
		got = fmt.Sprintf("%d@%d", r.Partition.Number, r.Offset)
	}
	if got != want {
		t.Errorf("next is %s, want %s", got, want)
	}
}

// A record counts as consumed when the next one is asked for.
func TestStreamFinishesWhatItReturnedLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, time.Hour, nil, nil)
		defer b.close()
		s := b.d.c.Streams()[0]
		if n := len(b.d.c.Streams()); n != 2 || s.Topic != "t" || s.Number != 0 {
			t.Fatalf("%d streams; the first is %s %d", n, s.Topic, s.Number)
		}
		o := b.own(0, 0)
		o.starts <- startAt{from: 5}
		o.feed(5, 7)
		nextIs(t, s, "0@5")
		synctest.Wait()
		if got := o.next.Load(); got != 5 {
			t.Errorf("next is %d while 5 is in hand", got)
		}
		nextIs(t, s, "0@6")
		synctest.Wait()
		if got := o.next.Load(); got != 6 {
			t.Errorf("next is %d while 6 is in hand", got)
		}
		nextIs(t, s, context.DeadlineExceeded.Error())
		if got := o.next.Load(); got != 7 {
			t.Errorf("next is %d in the end", got)
		}
		close(s.ended)
		nextIs(t, s, io.EOF.Error())
	})
}

// The record at which a loop is left is not consumed: whoever reads on gets it again.
func TestStreamLoopThatIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, time.Hour, nil, nil)
		defer b.close()
		s := b.d.c.Streams()[0]
		o := b.own(0, 0)
		o.starts <- startAt{from: 0}
		o.feed(0, 3)
		for r := range s.All(t.Context()) {
			if r.Offset == 1 {
				break
			}
		}
		synctest.Wait()
		if got := o.next.Load(); got != 1 {
			t.Errorf("next is %d, want the record that was left", got)
		}
		nextIs(t, s, "0@1")
		nextIs(t, s, "0@2")
	})
}

// A record that waits to be taken is not taken any more once its partition is paused or
// has been sought elsewhere; and does not keep the stream's other partitions waiting.
func TestStreamTakesNothingPausedOrSoughtAwayFrom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, time.Hour, nil, nil)
		defer b.close()
		c, s := b.d.c, b.d.c.Streams()[0]
		o := b.own(0, 0)
		o.starts <- startAt{from: 0}
		o.feed(0, 3)
		for range s.All(t.Context()) {
			break
		}
		synctest.Wait() // 0@0 is offered again
		b.must(c.Pause(part(0)))
		other := b.own(1, 0)
		other.starts <- startAt{from: 7}
		other.feed(7, 8)
		nextIs(t, s, "1@7")
		nextIs(t, s, context.DeadlineExceeded.Error())
		if got := o.next.Load(); got != 0 {
			t.Errorf("next is %d of what is paused", got)
		}
		b.must(c.Resume(part(0)))
		nextIs(t, s, "0@0")
		nextIs(t, s, "0@1")
		s.answer(false)
		synctest.Wait()
		b.must(c.Seek(part(0), 0))
		b.fetched(o, 0, 2)
		nextIs(t, s, "0@0")
		nextIs(t, s, "0@1")
		s.answer(false)
		synctest.Wait()
		b.must(c.Pause(part(0)))
		o.finishBelow(5) // as an ordered commit does, of a record that is then put back
		nextIs(t, s, context.DeadlineExceeded.Error())
		b.revokes[o]()
		synctest.Wait()
		if !o.ended() || o.next.Load() != 2 {
			t.Errorf("ended %v at %d", o.ended(), o.next.Load())
		}
	})
}

// A partition whose record nobody has taken is given up at once; one whose record is
// in hand when that is finished; one that is lost has no say.
func TestStreamAndTheEndOfOwnership(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, time.Hour, nil, nil)
		defer b.close()
		s := b.d.c.Streams()[0]
		waiting := b.own(0, 0)
		waiting.starts <- startAt{from: 0}
		waiting.feed(0, 2)
		synctest.Wait()
		b.revokes[waiting]()
		synctest.Wait()
		if !waiting.ended() || waiting.next.Load() != 0 || b.stops.Load() != 0 {
			t.Errorf("ended %v at %d, leaving %d", waiting.ended(), waiting.next.Load(), b.stops.Load())
		}
		inHand := b.own(1, 0)
		inHand.starts <- startAt{from: 0}
		inHand.feed(0, 2)
		nextIs(t, s, "1@0")
		b.revokes[inHand]()
		synctest.Wait()
		if inHand.ended() {
			t.Error("given up with a record in hand")
		}
		nextIs(t, s, context.DeadlineExceeded.Error())
		if !inHand.ended() || inHand.next.Load() != 1 {
			t.Errorf("ended %v at %d", inHand.ended(), inHand.next.Load())
		}
		lost := b.own(2, 0)
		lost.starts <- startAt{from: 0}
		lost.feed(0, 2)
		nextIs(t, s, "2@0")
		b.lose(lost)
		synctest.Wait()
		if !lost.ended() {
			t.Error("a lost partition is waited for")
		}
		nextIs(t, s, context.DeadlineExceeded.Error())
		if lost.next.Load() != 0 || b.stops.Load() != 0 {
			t.Errorf("next is %d, leaving %d", lost.next.Load(), b.stops.Load())
		}
	})
}

// A record that waits for a reader while the process is stopped past its deadline is
// not taken.
func TestStreamTakesNothingPastTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c clock
		b := newBench(t, time.Hour, nil, c.wrap)
		defer b.close()
		o := b.own(0, 0)
		o.starts <- startAt{from: 0}
		o.feed(0, 2)
		synctest.Wait()
		c.forward(time.Hour)
		nextIs(t, b.d.c.Streams()[0], context.DeadlineExceeded.Error())
		if !o.ended() || o.next.Load() != 0 {
			t.Errorf("ended %v at %d", o.ended(), o.next.Load())
		}
	})
}

// Where a filter chooses the topics, they share the streams.
func TestStreamsOfAFilter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBenchOf(t, Config{Include: "t.*", Streams: 2}, nil, nil)
		defer b.close()
		list := b.d.c.Streams()
		if len(list) != 2 || list[1].Topic != "" || list[1].Number != 1 {
			t.Fatalf("streams: %+v", list)
		}
		o := b.own(0, 1)
		o.starts <- startAt{from: 0}
		o.feed(0, 1)
		nextIs(t, list[1], "0@0")
	})
}

// Records that are held open are finished in any order; offsets advance over those
// that are finished without a gap.
func TestHeldRecords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var done []func(error)
		h := &handed{then: func(_ context.Context, r *Record) error {
			if r.Offset != 3 {
				done = append(done, r.Hold())
			}
			return nil
		}}
		b := newBench(t, time.Hour, h.handle, nil)
		defer b.close()
		o := b.own(0, 0)
		o.starts <- startAt{from: 0}
		o.feed(0, 5)
		h.is(t, "[0@0 0@1 0@2 0@3 0@4]")
		for _, step := range []struct{ finish, next int }{{1, 0}, {0, 2}, {0, 2}, {3, 2}, {2, 5}} {
			done[step.finish](nil)
			if got := o.next.Load(); got != int64(step.next) {
				t.Errorf("record %d of those held is finished: next is %d, want %d", step.finish, got, step.next)
			}
		}
	})
}

// What is held is waited for before a partition is given up, and before the same
// partition is handed over anew after a loss; an error stops the consumer.
func TestHeldRecordsAndTheEndOfOwnership(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var done []func(error)
		h := &handed{then: func(_ context.Context, r *Record) error {
			done = append(done, r.Hold())
			return nil
		}}
		b := newBench(t, time.Hour, h.handle, nil)
		defer b.close()
		o := b.own(0, 0)
		o.starts <- startAt{from: 0}
		o.feed(0, 2)
		synctest.Wait()
		b.revokes[o]()
		synctest.Wait()
		done[0](nil)
		synctest.Wait()
		if o.ended() {
			t.Error("given up with a record held")
		}
		done[1](nil)
		synctest.Wait()
		if !o.ended() || o.next.Load() != 2 {
			t.Errorf("ended %v at %d", o.ended(), o.next.Load())
		}
		done = nil
		lost := b.own(1, 0)
		lost.starts <- startAt{from: 0}
		lost.feed(0, 1)
		synctest.Wait()
		b.lose(lost)
		synctest.Wait()
		if !lost.ended() {
			t.Error("a lost partition is waited for")
		}
		again := b.own(1, 1)
		again.starts <- startAt{from: 0}
		again.feed(0, 1)
		h.is(t, "[0@0 0@1 1@0]")
		done[0](errors.New("of no interest any more"))
		h.is(t, "[0@0 0@1 1@0 1@0]")
		if b.stops.Load() != 0 {
			t.Error("the error of a lost record stops the consumer")
		}
		done[1](errors.New("no"))
		synctest.Wait()
		if b.stops.Load() != 1 || again.next.Load() != 0 {
			t.Errorf("leaving %d, next is %d", b.stops.Load(), again.next.Load())
		}
		b.revokes[again]()
	})
}

// A record is finished once, whatever a handler says of it: by holding it twice, or by
// holding it and returning an error all the same. Others in hand are waited for still.
func TestHeldRecordIsFinishedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		done := map[int64][]func(error){}
		h := &handed{then: func(_ context.Context, r *Record) error {
			done[r.Offset] = append(done[r.Offset], r.Hold(), r.Hold())
			if r.Offset == 2 {
				return errors.New("no")
			}
			return nil
		}}
		b := newBench(t, time.Hour, h.handle, nil)
		defer b.close()
		o := b.own(0, 0)
		o.starts <- startAt{from: 0}
		o.feed(0, 5)
		h.is(t, "[0@0 0@1 0@2]")
		for _, finish := range done[2] {
			finish(nil)
		}
		for _, finish := range done[1] {
			finish(nil)
		}
		b.revokes[o]()
		synctest.Wait()
		if o.ended() || o.next.Load() != 0 {
			t.Errorf("with the first record in hand: ended %v at %d", o.ended(), o.next.Load())
		}
		done[0][1](nil)
		synctest.Wait()
		if !o.ended() || o.next.Load() != 2 || b.stops.Load() != 1 {
			t.Errorf("ended %v at %d, stopped %d times", o.ended(), o.next.Load(), b.stops.Load())
		}
	})
}

// The bytes of the records that are held are bounded.
func TestHeldRecordsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var done []func(error)
		h := &handed{then: func(_ context.Context, r *Record) error {
			done = append(done, r.Hold())
			return nil
		}}
		b := newBenchOf(t, Config{MaxBufferedBytes: 3 * recordOverhead}, h.handle, nil)
		defer b.close()
		o := b.own(0, 0)
		o.starts <- startAt{from: 0}
		o.feed(0, 9)
		h.is(t, "[0@0 0@1 0@2]")
		done[1](nil)
		h.is(t, "[0@0 0@1 0@2 0@3]")
		for i := 0; i < len(done); i++ {
			done[i](nil)
			synctest.Wait()
		}
		if o.next.Load() != 9 {
			t.Errorf("next is %d", o.next.Load())
		}
	})
}
