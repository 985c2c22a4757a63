package consumer

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/rebalance/membership"
)

// The fetch is paused once more than the limit is queued, and goes on when half of
// it is left, each said once.
func TestQueuePausesAndResumes(t *testing.T) {
	const limit = 100
	q := newQueue(&budget{limit: 1 << 30})
	if q.push(queued{bytes: 60}, limit) || q.push(queued{bytes: 40}, limit) {
		t.Error("paused at the limit")
	}
	if q.low(limit) || q.resume(limit) {
		t.Error("goes on without having been paused")
	}
	if !q.push(queued{bytes: 10}, limit) {
		t.Error("not paused past the limit")
	}
	if q.push(queued{bytes: 40}, limit) {
		t.Error("paused twice")
	}
	for _, want := range []struct {
		bytes, left int
		low         bool
	}{{60, 90, false}, {40, 50, true}, {10, 40, true}} {
		b, ok := q.pop()
		if !ok || b.bytes != want.bytes || q.bytes != want.left || q.low(limit) != want.low {
			t.Errorf("popped %d, %d left, low %v; want %+v", b.bytes, q.bytes, q.low(limit), want)
		}
	}
	if !q.resume(limit) || q.resume(limit) || q.low(limit) {
		t.Error("want to go on, once")
	}
	if _, ok := q.pop(); !ok {
		t.Error("one is left")
	}
	if _, ok := q.pop(); ok {
		t.Error("none is left")
	}
	if !q.push(queued{bytes: limit + 1}, limit) || q.resume(limit) {
		t.Error("a second pause: want it said, and that it lasts")
	}
}

// Past what all queues may hold together only an empty one goes on, so that none waits
// for another for ever.
func TestQueuesShareABudget(t *testing.T) {
	const limit = 100
	all := &budget{limit: 150}
	a, b, c := newQueue(all), newQueue(all), newQueue(all)
	if a.push(queued{bytes: 90}, limit) {
		t.Error("paused within both limits")
	}
	if !b.push(queued{bytes: 70}, limit) || !c.push(queued{bytes: 10}, limit) {
		t.Error("not paused past the limit of all")
	}
	if c.low(limit) || c.resume(limit) {
		t.Error("goes on past the limit of all")
	}
	c.pop()
	if !c.low(limit) || !c.resume(limit) {
		t.Error("an empty queue does not go on")
	}
	b.close()
	if all.bytes.Load() != 90 {
		t.Errorf("%d bytes in all", all.bytes.Load())
	}
	if b.push(queued{bytes: 500}, limit); all.bytes.Load() != 90 {
		t.Error("a closed queue takes more")
	}
}

// However much is pushed before anybody looks, there is word of it.
func TestQueueSaysThatThereIsSomething(t *testing.T) {
	q := newQueue(&budget{limit: 1 << 30})
	q.push(queued{}, 1)
	q.push(queued{}, 1)
	select {
	case <-q.ready:
	default:
		t.Error("no word")
	}
}

func TestTable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, time.Hour, quiet, nil)
		defer b.close()
		fresh := func() (*delivery, func()) {
			own, _, end := membership.NewOwnership(b.s, rebalance.Want{Partition: part(3)}, 5, nil)
			return newDelivery(own, nil, nil, &budget{limit: 1 << 30}), end
		}
		old, endOld := fresh()
		defer endOld()
		present, end := fresh()
		defer end()
		tab := newTable()
		if tab.get(part(3)) != nil || len(tab.all()) != 0 {
			t.Error("not empty")
		}
		tab.put(old)
		tab.put(present)
		tab.remove(old) // another's by now
		if all := tab.all(); tab.get(part(3)) != present || len(all) != 1 || all[0] != present {
			t.Error("the present delivery was removed as the old one")
		}
		tab.remove(present)
		if tab.get(part(3)) != nil || len(tab.all()) != 0 {
			t.Error("it is still there")
		}
	})
}

// What is to be read follows the table: nothing is begun for a delivery that left
// it, nothing ended that is a later one's.
func TestWhatIsReadFollowsTheTable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, time.Hour, quiet, nil)
		defer b.close()
		f := b.d.fetch
		old := b.own(0, 0)
		f.add(old, 3)
		was := f.want[old.number()]
		if was.o != old || was.offset != 3 || len(f.wake) != 1 {
			t.Fatalf("wanted is %+v", was)
		}
		<-f.wake
		f.add(old, 3)
		if again := f.want[old.number()]; again == was {
			t.Error("begun anew at the same offset, it is not to be told from before")
		}
		b.d.table.remove(old)
		f.remove(old)
		if len(f.want) != 0 || len(f.wake) != 1 {
			t.Error("it is read on")
		}
		f.add(old, 4) // late, such as after a restart
		if len(f.want) != 0 {
			t.Error("it is read again though nobody would end it")
		}
		present := b.own(0, 0)
		f.add(old, 4)
		if len(f.want) != 0 {
			t.Error("it is read for the delivery before")
		}
		f.add(present, 7)
		f.remove(old)
		if s := f.want[present.number()]; s.o != present || s.offset != 7 {
			t.Errorf("wanted is %+v", s)
		}
	})
}

// A worker that has handed over enough of a paused partition wakes the fetcher.
func TestDrainedWakesTheFetcher(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, time.Hour, quiet, nil)
		defer b.close()
		f, limit := b.d.fetch, b.d.c.cfg.MaxBufferedBytes
		o := b.own(0, 0)
		o.queue.push(queued{bytes: limit / 2}, limit)
		f.drained(o)
		o.queue.push(queued{bytes: limit}, limit)
		f.drained(o)
		if len(f.resume) != 0 || len(f.wake) != 0 {
			t.Error("woken while too much is queued")
		}
		o.queue.pop()
		o.queue.pop()
		f.drained(o)
		if len(f.resume) != 1 || f.resume[0] != o || len(f.wake) != 1 {
			t.Errorf("to be resumed are %d, woken %d", len(f.resume), len(f.wake))
		}
	})
}

// What a poll brings goes to the delivery that the client reads for, and only
// while that is so. An offset before the one asked for says that the client has
// begun elsewhere on its own.
func TestDispatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, time.Hour, quiet, nil)
		defer b.close()
		f := b.d.fetch
		o, later := b.finished(0, 0), b.finished(1, 0)
		f.add(o, 5)
		s := f.want[o.number()]
		r := &reading{f: f, active: map[topicNumber]source{o.number(): s}, failed: map[topicNumber]time.Time{}}
		poll := func(n int32, err error, offsets ...int64) {
			p := kgo.FetchTopicPartition{Topic: "t", FetchPartition: kgo.FetchPartition{Partition: n, Err: err}}
			for _, at := range offsets {
				p.Records = append(p.Records, &kgo.Record{Offset: at, Value: make([]byte, 10)})
			}
			r.dispatch(b.d.ctx, p)
		}
		poll(0, nil, 5, 6)
		poll(1, nil, 5) // nobody reads it
		if q := o.queue; len(q.list) != 1 || q.bytes != 2*(10+recordOverhead) || len(later.queue.list) != 0 {
			t.Errorf("queued are %d with %d bytes, and %d", len(q.list), q.bytes, len(later.queue.list))
		}
		poll(0, fmt.Errorf("some failure"))
		if f.want[o.number()] != s {
			t.Error("a failure that passes ends the reading")
		}
		b.says("some failure")
		for _, what := range []string{"earlier", "out of range"} {
			f.add(o, 5)
			s = f.want[o.number()]
			r.active[o.number()] = s
			if what == "earlier" {
				poll(0, nil, 2, 3)
			} else {
				poll(0, kerr.OffsetOutOfRange)
			}
			if len(o.queue.list) != 1 {
				t.Errorf("%s: records are queued", what)
			}
			if _, reads := f.want[o.number()]; reads {
				t.Errorf("%s: it is read on", what)
			}
			f.add(o, 9) // begun anew meanwhile: old news
			present := f.want[o.number()]
			poll(0, kerr.OffsetOutOfRange)
			if f.want[o.number()] != present {
				t.Errorf("%s: old news ends the present reading", what)
			}
		}
	})
}

// Between two polls the client's reading is brought to what is wanted, also where
// one delivery has begun anew; and only what is read is resumed.
func TestReconcile(t *testing.T) {
	b := newBench(t, time.Hour, quiet, nil)
	defer b.close()
	client, err := kgo.NewClient(kgo.SeedBrokers("127.0.0.1:1"), kgo.ConsumeResetOffset(kgo.NoResetOffset()))
	b.must(err)
	defer client.Close()
	f, limit := b.d.fetch, b.d.c.cfg.MaxBufferedBytes
	r := newReading(f, client)
	o := b.own(0, 0)
	read := func() (offset int64) {
		r.reconcile()
		if r.active[o.number()] != f.want[o.number()] {
			t.Errorf("read is %+v, wanted %+v", r.active[o.number()], f.want[o.number()])
		}
		return r.active[o.number()].offset
	}
	f.add(o, 3)
	if at := read(); at != 3 {
		t.Errorf("read from %d", at)
	}
	f.add(o, 5)
	if at := read(); at != 5 {
		t.Errorf("read from %d", at)
	}
	o.queue.push(queued{bytes: limit + 1}, limit)
	o.queue.pop()
	f.drained(o)
	read()
	if o.queue.paused || len(f.resume) != 0 {
		t.Error("not resumed")
	}
	o.queue.push(queued{bytes: limit + 1}, limit)
	o.queue.pop()
	f.drained(o)
	b.d.table.remove(o)
	f.remove(o)
	read()
	if !o.queue.paused || len(r.active) != 0 {
		t.Error("resumed though it is not read any more")
	}
}

// A fetch that ends where the offset is out of range takes its pause along: the client
// begins anew without one, and can be paused again.
func TestRestartedFetchCanBePaused(t *testing.T) {
	b := newBench(t, time.Hour, quiet, nil)
	defer b.close()
	client, err := kgo.NewClient(kgo.SeedBrokers("127.0.0.1:1"), kgo.ConsumeResetOffset(kgo.NoResetOffset()))
	b.must(err)
	defer client.Close()
	f, limit := b.d.fetch, b.d.c.cfg.MaxBufferedBytes
	r := newReading(f, client)
	o := b.own(0, 0)
	f.add(o, 3)
	r.reconcile()
	was := r.active[o.number()]
	o.queue.push(queued{bytes: limit + 1}, limit)
	client.PauseFetchPartitions(map[string][]int32{"t": {0}})
	r.restart(o.number(), was)
	r.reconcile()
	if paused := client.PauseFetchPartitions(nil); len(paused["t"]) != 0 {
		t.Errorf("the client keeps the pause of what it does not read: %v", paused)
	}
	f.again(was, 1)
	r.reconcile()
	if r.active[o.number()].offset != 1 {
		t.Fatalf("read is %+v", r.active[o.number()])
	}
	if !o.queue.push(queued{bytes: limit + 1}, limit) {
		t.Error("a full queue does not pause the fetch")
	}
}

// The client forgets a topic that was deleted once nothing of it is read any more, and
// before it is read under the id of a new one.
func TestDeletedTopicsAreForgotten(t *testing.T) {
	b := newBench(t, time.Hour, quiet, nil)
	defer b.close()
	client, err := kgo.NewClient(kgo.SeedBrokers("127.0.0.1:1"), kgo.ConsumeResetOffset(kgo.NoResetOffset()))
	b.must(err)
	defer client.Close()
	f := b.d.fetch
	r := newReading(f, client)
	o := b.own(0, 0)
	topic := o.Partition.Topic
	step := func(incarnation, want int64) {
		t.Helper()
		f.topics(map[string]int64{topic: incarnation})
		r.reconcile()
		if r.topics[topic] != want {
			t.Errorf("the client knows the topic of %d, want %d", r.topics[topic], want)
		}
		if known := slices.Contains(client.GetConsumeTopics(), topic); known != (want != 0) {
			t.Errorf("the client knows the topic: %v", known)
		}
	}
	step(7, 0)
	f.add(o, 3)
	step(7, 7)
	step(9, 7) // a delivery of the former topic is still there
	b.d.table.remove(o)
	f.remove(o)
	step(9, 0)
	o = b.own(0, 0)
	f.add(o, 0)
	step(9, 9)
	b.d.table.remove(o)
	f.remove(o)
	step(9, 9) // not read for now, but not deleted either
	step(0, 0)
}
