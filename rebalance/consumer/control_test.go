package consumer

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-io/muster/offsets"
	"github.com/muster-io/muster/registry"
)

// A paused partition hands over nothing, and does not keep others of its stream
// waiting.
func TestPauseAndResume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c *Consumer
		h := &handed{}
		h.then = func(_ context.Context, r *Record) error {
			if r.Partition.Number == 0 && r.Offset == 1 {
				if err := c.Pause(r.Partition); err != nil {
					t.Error(err)
				}
			}
			return nil
		}
		b := newBench(t, time.Hour, h.handle, nil)
		defer b.close()
		c = b.d.c
		if err := c.Pause(part(0)); !errors.Is(err, ErrNotOwned) {
			t.Errorf("paused before it is owned: %v", err)
		}
		o, other := b.own(0, 0), b.own(1, 0)
		o.starts <- startAt{from: 0}
		o.feed(0, 4)
		h.is(t, "[0@0 0@1]")
		other.starts <- startAt{from: 0}
		other.feed(0, 1)
		h.is(t, "[0@0 0@1 1@0]")
		if got := fmt.Sprint(c.Assigned()); got != fmt.Sprint([]registry.Partition{part(0), part(1)}) {
			t.Errorf("assigned are %s", got)
		}
		if err := c.Resume(part(9), part(0)); !errors.Is(err, ErrNotOwned) {
			t.Errorf("resumed what is not owned: %v", err)
		}
		h.is(t, "[0@0 0@1 1@0 0@2 0@3]")
		b.must(c.Pause(part(0)))
		o.feed(4, 5)
		synctest.Wait()
		b.revokes[o]()
		synctest.Wait()
		if !o.ended() {
			t.Error("a paused partition is not given up")
		}
	})
}

// fetched queues what the fetcher reads for the present place of a delivery.
func (b *bench) fetched(o *delivery, from, to int64) {
	b.d.fetch.mu.Lock()
	number := b.d.fetch.want[o.number()].number
	b.d.fetch.mu.Unlock()
	o.feedFor(number, from, to)
}

// Seek counts before the next record: what was fetched before is not handed over, and
// that the record in hand is finished says nothing any more. The commit follows, back too.
func TestSeek(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c *Consumer
		h := &handed{}
		h.then = func(_ context.Context, r *Record) error {
			if r.Offset == 12 {
				return c.Seek(r.Partition, 3)
			}
			return nil
		}
		b := newBench(t, time.Second, h.handle, nil)
		defer b.close()
		b.d.work.Go(b.d.commits.run)
		c = b.d.c
		if err := c.Seek(part(0), 3); !errors.Is(err, ErrNotOwned) {
			t.Errorf("sought before it is owned: %v", err)
		}
		o := b.own(0, 0)
		if err := c.Seek(part(0), 3); !errors.Is(err, ErrNotOwned) {
			t.Errorf("sought before its start is known: %v", err)
		}
		o.starts <- startAt{from: 10}
		synctest.Wait()
		old := b.d.fetch.want[o.number()]
		b.fetched(o, 10, 15)
		h.is(t, "[0@10 0@11 0@12]")
		if next := o.next.Load(); next != 3 {
			t.Errorf("next is %d", next)
		}
		if s := b.d.fetch.want[o.number()]; s.offset != 3 {
			t.Errorf("it is read from %d", s.offset)
		}
		o.feedFor(old.number, 15, 20) // on its way when the place changed
		b.d.fetch.again(old, 100)     // likewise
		o.queue.push(queued{number: old.number, reset: true, offset: 100}, 1<<20)
		if s := b.d.fetch.want[o.number()]; s.offset != 3 {
			t.Errorf("after a restart from before it is read from %d", s.offset)
		}
		b.fetched(o, 3, 5)
		h.is(t, "[0@10 0@11 0@12 0@3 0@4]")
		time.Sleep(time.Second)
		synctest.Wait()
		if got := b.committed(0); got != "5" {
			t.Errorf("committed %s", got)
		}
		if err := c.Seek(part(0), -1); err == nil {
			t.Error("sought a negative offset")
		}
		b.revokes[o]()
		if err := c.Seek(part(0), 0); !errors.Is(err, ErrNotOwned) {
			t.Errorf("sought while it is given up: %v", err)
		}
	})
}

// A record from before a seek that is held open is still waited for at the end.
func TestSeekWithARecordHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var done func(error)
		h := &handed{then: func(_ context.Context, r *Record) error {
			if r.Offset == 10 {
				done = r.Hold()
			}
			return nil
		}}
		b := newBench(t, time.Hour, h.handle, nil)
		defer b.close()
		o := b.own(0, 0)
		o.starts <- startAt{from: 10}
		synctest.Wait()
		b.fetched(o, 10, 12)
		synctest.Wait()
		before := done
		b.must(b.d.c.Seek(part(0), 10))
		b.fetched(o, 10, 11)
		h.is(t, "[0@10 0@11 0@10]")
		again := done
		done = before
		done(nil) // of the same offset, and not the one that is asked for
		if next := o.next.Load(); next != 10 {
			t.Errorf("next is %d", next)
		}
		again(nil)
		done = nil
		b.must(b.d.c.Seek(part(0), 10))
		b.fetched(o, 10, 11)
		synctest.Wait()
		b.must(b.d.c.Seek(part(0), 20))
		b.fetched(o, 20, 21)
		h.is(t, "[0@10 0@11 0@10 0@10 0@20]")
		if next := o.next.Load(); next != 21 {
			t.Errorf("next is %d", next)
		}
		b.revokes[o]()
		synctest.Wait()
		if o.ended() {
			t.Error("given up with a record held")
		}
		done(nil)
		synctest.Wait()
		if !o.ended() || o.next.Load() != 21 {
			t.Errorf("ended %v at %d", o.ended(), o.next.Load())
		}
	})
}

// Without auto-commit nothing is committed but what is asked for.
func TestManualCommit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var h handed
		b := newBenchOf(t, Config{ManualCommit: true, CommitInterval: time.Second}, h.handle, nil)
		defer b.close()
		b.d.work.Go(b.d.commits.run)
		c := b.d.c
		o := b.own(0, 0)
		o.starts <- startAt{from: 0, committed: offsets.Position{Offset: offsets.None}}
		o.feed(0, 9)
		h.is(t, "[0@0 0@1 0@2 0@3 0@4 0@5 0@6 0@7 0@8]")
		time.Sleep(5 * time.Second)
		if got := b.committed(0); got != "none" {
			t.Errorf("committed %s on its own", got)
		}
		for _, at := range []int64{4, 6, 2, 2} {
			answers := c.Commit(t.Context(), map[registry.Partition]int64{part(0): at, part(1): 1})
			if err := answers[part(0)]; err != nil || len(answers) != 2 || !errors.Is(answers[part(1)], ErrNotOwned) {
				t.Errorf("commit of %d: %v", at, answers)
			}
			if got := b.committed(0); got != fmt.Sprint(at) {
				t.Errorf("committed %s, want %d", got, at)
			}
		}
		if err := c.Commit(t.Context(), map[registry.Partition]int64{part(0): -1})[part(0)]; err == nil || errors.Is(err, ErrNotOwned) {
			t.Errorf("commit of -1: %v", err)
		}
		b.write(registry.Put(b.d.c.group.Offset(part(0)), []byte("77"), 0))
		b.must(c.Commit(t.Context(), map[registry.Partition]int64{part(0): 5})[part(0)])
		if got := b.committed(0); got != "5" {
			t.Errorf("committed %s over another writer", got)
		}
		b.revokes[o]()
		if !b.d.Drain(o.Ownership) {
			t.Error("not given up")
		}
		if got := b.committed(0); got != "5" {
			t.Errorf("committed %s at the end", got)
		}
	})
}

// An ordered commit is fenced as any other.
func TestOrderedCommitIsFenced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBenchOf(t, Config{ManualCommit: true}, quiet, nil)
		defer b.close()
		b.d.work.Go(b.d.commits.run)
		o := b.own(0, 0)
		o.starts <- startAt{from: 0, committed: offsets.Position{Offset: offsets.None}}
		synctest.Wait()
		b.write(registry.Delete(b.d.c.group.Owner(part(0))))
		err := b.d.c.Commit(t.Context(), map[registry.Partition]int64{part(0): 1})[part(0)]
		if !errors.Is(err, ErrNotOwned) || b.committed(0) != "none" {
			t.Errorf("committed %s: %v", b.committed(0), err)
		}
		if told := <-b.fenced; told != o {
			t.Error("the member is not told")
		}
	})
}

// Nothing is committed for a partition whose ownership has ended by the time at which the
// order is carried out, though the store would still take it.
func TestOrderedCommitComesTooLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c clock
		b := newBenchOf(t, Config{ManualCommit: true}, quiet, c.wrap)
		defer b.close()
		o := b.own(0, 0)
		o.starts <- startAt{from: 0, committed: offsets.Position{Offset: offsets.None}}
		synctest.Wait()
		ord := &order{list: []orderedOffset{{o: o, offset: 1}}, done: make(chan struct{})}
		c.forward(time.Hour)
		b.d.commits.carryOut(ord)
		if err := ord.list[0].err; !errors.Is(err, ErrNotOwned) || b.committed(0) != "none" {
			t.Errorf("committed %s: %v", b.committed(0), err)
		}
	})
}

// With auto-commit an ordered offset stands until more is finished, and finishes what
// is in hand before it.
func TestOrderedCommitBesidesAutoCommit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var done []func(error)
		h := &handed{then: func(_ context.Context, r *Record) error { done = append(done, r.Hold()); return nil }}
		b := newBench(t, time.Second, h.handle, nil)
		defer b.close()
		b.d.work.Go(b.d.commits.run)
		c := b.d.c
		o := b.own(0, 0)
		o.starts <- startAt{from: 0, committed: offsets.Position{Offset: offsets.None}}
		o.feed(0, 4)
		synctest.Wait()
		commit := func(at int64) {
			t.Helper()
			b.must(c.Commit(t.Context(), map[registry.Partition]int64{part(0): at})[part(0)])
		}
		after := func(want string) {
			t.Helper()
			time.Sleep(5 * time.Second)
			synctest.Wait()
			if got := b.committed(0); got != want {
				t.Errorf("committed %s, want %s", got, want)
			}
		}
		commit(2)
		if next := o.next.Load(); next != 2 {
			t.Errorf("next is %d", next)
		}
		after("2")
		commit(1)
		after("1")
		done[2](nil)
		after("3")
		for _, d := range done {
			d(nil)
		}
		after("4")
	})
}

// A commit that cannot be made says so, and does not wait longer than it may.
func TestOrderedCommitThatFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBenchOf(t, Config{ManualCommit: true}, quiet, nil)
		defer b.close()
		o := b.own(0, 0)
		o.starts <- startAt{from: 0, committed: offsets.Position{Offset: offsets.None}}
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		// Nobody takes the order.
		if err := b.d.c.Commit(ctx, map[registry.Partition]int64{part(0): 1})[part(0)]; !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("answered %v", err)
		}
		b.d.work.Go(b.d.commits.run)
		b.failing()
		if err := b.d.c.Commit(t.Context(), map[registry.Partition]int64{part(0): 1})[part(0)]; err == nil || errors.Is(err, ErrNotOwned) {
			t.Errorf("answered %v", err)
		}
		b.d.cancel()
		synctest.Wait()
		if err := b.d.c.Commit(t.Context(), map[registry.Partition]int64{part(0): 1})[part(0)]; !errors.Is(err, ErrNotOwned) {
			t.Errorf("after the end: %v", err)
		}
	})
}
