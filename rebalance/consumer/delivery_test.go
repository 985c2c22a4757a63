package consumer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/muster-io/muster/offsets"
	"github.com/muster-io/muster/registry"
)

// clock is a store whose clock can be put forward, as that of a process is which
// was stopped: the time is past, and no timer has fired yet.
type clock struct {
	registry.Store
	ahead atomic.Int64
}

func (c *clock) Now() time.Duration { return c.Store.Now() + time.Duration(c.ahead.Load()) }

func (c *clock) forward(d time.Duration) { c.ahead.Add(int64(d)) }

func (c *clock) wrap(st registry.Store) registry.Store {
	c.Store = st
	return c
}

// feed queues the records from an offset to another.
func (o *delivery) feed(from, to int64) { o.feedFor(0, from, to) }

// feedFor is feed of what was fetched for an add of the fetcher.
func (o *delivery) feedFor(number uint64, from, to int64) {
	b := queued{number: number}
	for n := from; n < to; n++ {
		b.records = append(b.records, &kgo.Record{Offset: n, Value: []byte(fmt.Sprint(n))})
	}
	b.bytes = len(b.records)
	o.queue.push(b, 1<<20)
}

func (o *delivery) ended() bool {
	select {
	case <-o.done:
		return true
	default:
		return false
	}
}

// handed collects what a handler is given.
type handed struct {
	mu   sync.Mutex
	list []string
	then func(ctx context.Context, r *Record) error
}

func (h *handed) handle(ctx context.Context, r *Record) error {
	h.mu.Lock()
	h.list = append(h.list, fmt.Sprintf("%d@%d", r.Partition.Number, r.Offset))
	h.mu.Unlock()
	if h.then == nil {
		return nil
	}
	return h.then(ctx, r)
}

func (h *handed) String() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return fmt.Sprint(h.list)
}

func (h *handed) is(t *testing.T, want string) {
	t.Helper()
	synctest.Wait()
	if got := h.String(); got != want {
		t.Errorf("handed over %s, want %s", got, want)
	}
}

// A process that was stopped past its session's deadline hands over nothing of
// what it holds, though it has not heard of anything yet.
func TestNothingIsHandedOverPastTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c clock
		h := &handed{then: func(_ context.Context, r *Record) error {
			if r.Offset == 2 {
				c.forward(time.Hour)
			}
			if r.Owned() != (r.Offset != 2) {
				t.Errorf("%d: owned %v", r.Offset, r.Owned())
			}
			return nil
		}}
		b := newBench(t, time.Hour, h.handle, c.wrap)
		defer b.close()
		o := b.own(0, 0)
		o.starts <- startAt{from: 0}
		o.feed(0, 500)
		h.is(t, "[0@0 0@1 0@2]")
		if !o.ended() {
			t.Error("the worker goes on")
		}
	})
}

// The same, between two fetches, and before the start.
func TestNothingBeginsPastTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c clock
		var h handed
		b := newBench(t, time.Hour, h.handle, c.wrap)
		defer b.close()
		b.d.c.cfg.Listener.Assigned = func(_ context.Context, a Assignment) {
			if a.Partition != part(0) {
				t.Errorf("%s is assigned", a.Partition)
			}
		}
		o, late := b.own(0, 0), b.own(1, 0)
		o.starts <- startAt{from: 0}
		o.feed(0, 2)
		h.is(t, "[0@0 0@1]")
		c.forward(time.Hour)
		o.feed(2, 4)
		late.starts <- startAt{from: 0}
		late.feed(0, 2)
		h.is(t, "[0@0 0@1]")
		if !o.ended() || !late.ended() || late.next.Load() != offsets.None {
			t.Errorf("the workers ended: %v, %v; the late one is at %d", o.ended(), late.ended(), late.next.Load())
		}
		if _, reads := b.d.fetch.want[late.number()]; reads {
			t.Error("a partition is read that is not owned")
		}
	})
}

// What a handler says of a record that is not owned any more does not count; what
// it says of one that is stops the consumer.
func TestHandlerErrorCountsWhileOwned(t *testing.T) {
	for _, past := range []bool{true, false} {
		t.Run(fmt.Sprintf("past the deadline %v", past), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var c clock
				h := &handed{then: func(context.Context, *Record) error {
					if past {
						c.forward(time.Hour)
					}
					return errors.New("handler says no")
				}}
				b := newBench(t, time.Hour, h.handle, c.wrap)
				defer b.close()
				o := b.own(0, 0)
				o.starts <- startAt{from: 0}
				o.feed(0, 5)
				h.is(t, "[0@0]")
				if !o.ended() || o.next.Load() != 0 {
					t.Errorf("ended %v, next is %d", o.ended(), o.next.Load())
				}
				if leaves := b.stops.Load() == 1; leaves == past || (b.d.failure != nil) == past {
					t.Errorf("leaving %v: %v", leaves, b.d.failure)
				}
			})
		})
	}
}

// A partition that is given up, or lost, while its worker waits for its turn in
// the stream: nothing more of it is handed over.
func TestNothingIsHandedOverAfterWaitingForTheStream(t *testing.T) {
	for _, how := range []string{"revoked", "lost"} {
		t.Run(how, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var h handed
				b := newBench(t, time.Hour, h.handle, nil)
				defer b.close()
				o := b.own(0, 0)
				o.lane <- struct{}{} // another partition's handler
				o.starts <- startAt{from: 0}
				o.feed(0, 5)
				synctest.Wait()
				if how == "revoked" {
					b.revokes[o]()
				} else {
					b.ends[o]()
				}
				synctest.Wait()
				if !o.ended() {
					t.Error("the worker waits on")
				}
				<-o.lane
				h.is(t, "[]")
			})
		})
	}
}

// Given up while a record is with the handler: that one is finished and counts,
// and is the last, though more are queued.
func TestRevokedWithARecordInHand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		finish := make(chan struct{})
		h := &handed{then: func(ctx context.Context, r *Record) error {
			<-finish
			return ctx.Err()
		}}
		b := newBench(t, time.Hour, h.handle, nil)
		defer b.close()
		o := b.own(0, 0)
		o.starts <- startAt{from: 0}
		o.feed(0, 5)
		synctest.Wait()
		b.revokes[o]()
		b.revokes[o]() // harmless
		synctest.Wait()
		if o.ended() {
			t.Error("the worker does not wait for the handler")
		}
		close(finish)
		h.is(t, "[0@0]")
		if !o.ended() || o.next.Load() != 1 {
			t.Errorf("ended %v, next is %d", o.ended(), o.next.Load())
		}
	})
}

// Records before the point at which the fetch began again are not handed over
// again; a restart at another point is.
func TestRestartInTheQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var h handed
		b := newBench(t, time.Hour, h.handle, nil)
		defer b.close()
		o := b.own(0, 0)
		o.starts <- startAt{from: 3}
		o.feed(1, 5)
		o.queue.push(queued{reset: true, offset: 10}, 100)
		o.feed(8, 12)
		o.queue.push(queued{reset: true, offset: 0}, 100)
		o.feed(0, 1)
		h.is(t, "[0@3 0@4 0@10 0@11 0@0]")
	})
}

// One stream has one record with the handler at a time, whatever partitions it
// has; streams are independent of each other.
func TestOneRecordOfAStreamAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var inside [2]atomic.Int32
		var together atomic.Int32
		h := &handed{then: func(_ context.Context, r *Record) error {
			stream := r.Partition.Number % 2
			if n := inside[stream].Add(1); n != 1 {
				t.Errorf("%d records of stream %d at a time", n, stream)
			}
			if inside[1-stream].Load() > 0 {
				together.Add(1)
			}
			time.Sleep(time.Millisecond)
			inside[stream].Add(-1)
			return nil
		}}
		b := newBench(t, time.Hour, h.handle, nil)
		defer b.close()
		began := time.Now()
		var list []*delivery
		for n := range int32(4) {
			o := b.own(n, n%2)
			o.starts <- startAt{from: 0}
			o.feed(0, 50)
			list = append(list, o)
		}
		for _, o := range list {
			for o.next.Load() < 50 {
				time.Sleep(time.Millisecond)
			}
		}
		if together.Load() == 0 {
			t.Error("two streams have no record in hand at the same time")
		}
		if took := time.Since(began); took > 110*time.Millisecond {
			t.Errorf("two streams of 100 records of 1 ms took %s", took)
		}
	})
}

// A partition with much to hand over passes its stream on: after so many records,
// or if the handler is slow after so long.
func TestStreamIsPassedOn(t *testing.T) {
	for _, slow := range []bool{false, true} {
		t.Run(fmt.Sprintf("slow handler %v", slow), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var before, others atomic.Int64
				h := func(_ context.Context, r *Record) error {
					if r.Partition.Number == 1 {
						before.Store(others.Load())
					} else {
						others.Add(1)
					}
					if slow {
						time.Sleep(2 * time.Millisecond)
					}
					return nil
				}
				b := newBench(t, time.Hour, h, nil)
				defer b.close()
				busy, other := b.own(0, 0), b.own(1, 0)
				busy.lane <- struct{}{}
				busy.starts <- startAt{from: 0}
				busy.feed(0, 1000)
				synctest.Wait() // first in line
				other.starts <- startAt{from: 0}
				other.feed(0, 1)
				synctest.Wait()
				<-busy.lane
				for other.next.Load() < 1 || busy.next.Load() < 1000 {
					time.Sleep(time.Millisecond)
				}
				want := int64(laneRecords)
				if slow {
					want = int64(laneTime/(2*time.Millisecond)) + 1
				}
				if got := before.Load(); got != want {
					t.Errorf("%d records of the other partition came first, want %d", got, want)
				}
			})
		})
	}
}

// A handler that still has a record of a lost ownership in hand: the next
// ownership of the partition hands over nothing meanwhile, nor the one after, but
// each lets the partition go at once when it is to be given up.
func TestFormerHandlerIsWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		finish := make(chan struct{})
		var count atomic.Int32
		h := &handed{then: func(context.Context, *Record) error {
			if count.Add(1) == 1 {
				<-finish
			}
			return nil
		}}
		b := newBench(t, time.Hour, h.handle, nil)
		defer b.close()
		// Each in another stream, so that it is not that which is waited for.
		stream := int32(-1)
		again := func() *delivery {
			b.write(registry.Delete(b.d.c.group.Owner(part(0))))
			stream++
			o := b.own(0, stream)
			o.starts <- startAt{from: 0}
			o.feed(0, 2)
			return o
		}
		lost := again()
		h.is(t, "[0@0]")
		b.lose(lost)

		second := again()
		h.is(t, "[0@0]")
		b.revokes[second]()
		synctest.Wait()
		if !second.ended() {
			t.Error("the partition is not let go while a former handler is at work")
		}
		third := again()
		b.lose(third)
		synctest.Wait()
		if !third.ended() || lost.ended() {
			t.Errorf("ended: the first %v, the third %v", lost.ended(), third.ended())
		}
		fourth := again()
		h.is(t, "[0@0]")
		close(finish)
		h.is(t, "[0@0 0@0 0@1]")
		if fourth.ended() {
			t.Error("the last worker has ended")
		}
	})
}

// Giving up waits for the worker and the last commit; where the partition is lost
// meanwhile nothing is committed.
func TestDrain(t *testing.T) {
	for _, lost := range []bool{false, true} {
		t.Run(fmt.Sprintf("lost %v", lost), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				finish := make(chan struct{})
				h := &handed{then: func(context.Context, *Record) error { <-finish; return nil }}
				b := newBench(t, time.Hour, h.handle, nil)
				defer b.close()
				b.d.work.Go(b.d.commits.run)
				o := b.own(0, 0)
				o.starts <- startAt{from: 0, committed: offsets.Position{Offset: 0}}
				o.feed(0, 5)
				synctest.Wait()
				b.revokes[o]()
				drained := make(chan bool, 1)
				go func() { drained <- b.d.Drain(o.Ownership) }()
				synctest.Wait()
				if len(drained) != 0 {
					t.Fatal("it is let go with a record in hand")
				}
				if lost {
					b.lose(o)
					close(finish)
					if <-drained {
						t.Error("a lost partition is given up in order")
					}
					synctest.Wait()
					if got := b.committed(0); got != "none" {
						t.Errorf("committed %s after the loss", got)
					}
					if b.d.Drain(o.Ownership) {
						t.Error("what is over is drained")
					}
					return
				}
				close(finish)
				if !<-drained {
					t.Error("not given up in order")
				}
				if got := b.committed(0); got != "1" || b.d.table.get(part(0)) != o || len(b.d.fetch.want) != 1 {
					t.Errorf("committed %s before it is let go", got)
				}
				b.d.Revoked(o.Ownership)
				if b.d.table.get(part(0)) != nil || len(b.d.fetch.want) != 0 {
					t.Error("it is not let go")
				}
			})
		})
	}
}

// What has ended is not remembered for ever.
func TestFormerWorkersAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		b := newBench(t, time.Hour, func(context.Context, *Record) error { <-release; return nil }, nil)
		defer b.close()
		stuck := b.own(9, 0)
		stuck.starts <- startAt{from: 0}
		stuck.feed(0, 1)
		synctest.Wait()
		b.lose(stuck)
		for n := range int32(9) {
			b.lose(b.own(n, 0))
			synctest.Wait()
			b.d.Begin(nil)
		}
		if len(b.d.workers) != 1 || b.d.workers[part(9)] == nil {
			t.Errorf("%d workers are remembered", len(b.d.workers))
		}
		close(release)
	})
}
