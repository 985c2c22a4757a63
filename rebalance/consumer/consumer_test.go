package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/muster-io/muster/rebalance/consumer"
	"github.com/muster-io/muster/registry"
)

// Members come and go in order while records flow: each record is handed over
// exactly once, never two of a partition at a time.
func TestEachRecordOnceWhileMembersComeAndGo(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	partitions := createTopic(t, topic, 6)
	j := newJournal(t)
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 1))
	t.Logf("seed %d", seed)
	next := 0
	var members []*running
	join := func() {
		next++
		id := fmt.Sprintf("c%d", next)
		members = append(members, start(t, consumer.Config{ID: id, Group: group, Topics: map[string]int32{topic: int32(1 + r.IntN(2))},
			Reset: consumer.Smallest, CommitInterval: 50 * time.Millisecond}, j.handler(id, nil)))
	}
	join()
	const rounds, each = 12, 50
	for i := range rounds {
		produce(t, topic, 6, i*each, each)
		if len(members) > 1 && r.IntN(2) == 0 {
			n := r.IntN(len(members))
			members[n].stop(t)
			must(t, members[n].err)
			members = append(members[:n], members[n+1:]...)
		} else if len(members) < 5 {
			join()
		}
	}
	eventually(t, func() string {
		if n := j.total(); n < rounds*each*6 {
			return fmt.Sprintf("%d of %d records", n, rounds*each*6)
		}
		return ""
	})
	for _, m := range members {
		m.stop(t)
		must(t, m.err)
	}
	j.each(partitions, rounds*each, func(p registry.Partition, o int64, by []string) {
		if len(by) != 1 {
			t.Errorf("%s offset %d went to %v", p, o, by)
		}
	})
	for _, p := range partitions {
		if got := committed(t, group, p); got != fmt.Sprint(rounds*each) {
			t.Errorf("%s: committed %s, want %d", p, got, rounds*each)
		}
	}
	if left := owners(t, group); len(left) != 0 {
		t.Errorf("owner keys left behind: %v", left)
	}
}

// Field case 08: more consumers than partitions, all started together.
func TestCase08(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	createTopic(t, topic, 16)
	var members []*running
	for i := range 38 {
		id := fmt.Sprintf("c%02d", i)
		members = append(members, start(t, consumer.Config{ID: id, Group: group, Topics: map[string]int32{topic: 1}},
			func(context.Context, *consumer.Record) error { return nil }))
	}
	owned := func(skip int) string {
		var want []string
		for p, i := 0, 0; p < 16; i++ {
			if i != skip {
				want = append(want, fmt.Sprintf("%d:c%02d", p, i))
				p++
			}
		}
		return strings.Join(want, " ")
	}
	ownedAs(t, group, topic, owned(-1))
	members[5].stop(t)
	must(t, members[5].err)
	ownedAs(t, group, topic, owned(5))
	for i, m := range members {
		select {
		case <-m.done:
			if i != 5 {
				t.Errorf("c%02d gave up: %v", i, m.err)
			}
		default:
		}
	}
}

// Field case 11: topics are divided among their own subscribers; a topic that
// does not exist has no partitions and leaves no key.
func TestCase11(t *testing.T) {
	quiet := func(context.Context, *consumer.Record) error { return nil }
	test, other := name(t, "test"), name(t, "other")
	t1, t2, ghost := name(t, "t1"), name(t, "t2"), name(t, "ghost")
	createTopic(t, test, 2)
	createTopic(t, other, 2)
	createTopic(t, t1, 3)
	createTopic(t, t2, 3)
	a := name(t, "a")
	start(t, consumer.Config{ID: "c1", Group: a, Topics: map[string]int32{test: 1}}, quiet)
	start(t, consumer.Config{ID: "c2", Group: a, Topics: map[string]int32{other: 1}}, quiet)
	ownedAs(t, a, test, "0:c1 1:c1")
	ownedAs(t, a, other, "0:c2 1:c2")

	b := name(t, "b")
	start(t, consumer.Config{ID: "c1", Group: b, Topics: map[string]int32{t1: 1, t2: 1, ghost: 1}}, quiet)
	start(t, consumer.Config{ID: "c2", Group: b, Topics: map[string]int32{t1: 1, t2: 1}}, quiet)
	ownedAs(t, b, t1, "0:c1 1:c1 2:c2")
	ownedAs(t, b, t2, "0:c1 1:c1 2:c2")
	ownedAs(t, b, ghost, "")
}

// Field case 14: partitions that a topic gets while the group is stable are read from
// their start, though the group begins at the end where nothing is committed.
func TestCase14(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	old := createTopic(t, topic, 4)
	produce(t, topic, 4, 0, 3)
	got := make(chan string, 100)
	handler := func(id string) consumer.Handler {
		return func(_ context.Context, r *consumer.Record) error {
			got <- fmt.Sprintf("%s: partition %d offset %d", id, r.Partition.Number, r.Offset)
			return nil
		}
	}
	for _, id := range []string{"c1", "c2"} {
		start(t, consumer.Config{ID: id, Group: group, Topics: map[string]int32{topic: 1}}, handler(id))
	}
	ownedAs(t, group, topic, "0:c1 1:c1 2:c2 3:c2")
	// What nobody has begun to read is new to the group, as are the partitions to come.
	for _, p := range old {
		eventually(t, func() string {
			if got := committed(t, group, p); got != "3" {
				return fmt.Sprintf("partition %s: committed %q, want the end, 3", p.Name(), got)
			}
			return ""
		})
	}
	_, err := registry.AddPartitions(t.Context(), shared.store, root, topic, 8, []int32{1})
	must(t, err)
	k := newProducer(t)
	want := map[string]bool{}
	for p := int32(4); p < 8; p++ {
		want[fmt.Sprintf("c2: partition %d offset 0", p)] = true
		eventually(t, func() string { // the producer has to hear of them
			if err := k.ProduceSync(t.Context(), &kgo.Record{Topic: topic, Partition: p, Value: []byte("v")}).FirstErr(); err != nil {
				k.ForceMetadataRefresh()
				return err.Error()
			}
			return ""
		})
	}
	ownedAs(t, group, topic, "0:c1 1:c1 2:c1 3:c1 4:c2 5:c2 6:c2 7:c2")
	for len(want) > 0 {
		select {
		case line := <-got:
			if !want[line] {
				t.Fatalf("delivered to %s; want %v", line, want)
			}
			delete(want, line)
		case <-time.After(patience):
			t.Fatalf("not delivered: %v", want)
		}
	}
}

// groupEvents collects every change under a group's prefix until stop.
func groupEvents(t *testing.T, group string) (stop func() []registry.Event) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	prefix := root.Group(group).Prefix()
	_, revision, err := registry.List(ctx, shared.store, prefix, 0)
	must(t, err)
	watch := shared.store.Watch(ctx, prefix, revision+1)
	return func() []registry.Event {
		defer cancel()
		// The last event is one of our own.
		marker := prefix + "marker"
		_, err := shared.store.Txn(ctx, registry.Txn{Then: []registry.Op{registry.Put(marker, nil, 0)}})
		must(t, err)
		var events []registry.Event
		for r := range watch {
			must(t, r.Err)
			for _, e := range r.Events {
				if e.Key == marker {
					return events
				}
				events = append(events, e)
			}
		}
		t.Fatal("watch ended")
		return nil
	}
}

// Field case 15: drain, commit, give up ownership, unregister; in that order.
func TestCase15(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	p := createTopic(t, topic, 1)[0]
	produce(t, topic, 1, 0, 60)
	paths := root.Group(group)
	_, err := shared.store.Txn(t.Context(), registry.Txn{Then: []registry.Op{registry.Put(paths.Offset(p), []byte("41"), 0)}})
	must(t, err)
	inHand, finish := make(chan struct{}), make(chan struct{})
	const session = 9 * time.Second // is renewed every 3 s
	c1 := start(t, consumer.Config{ID: "c1", Group: group, Topics: map[string]int32{topic: 1}, SessionTimeout: session}, func(_ context.Context, r *consumer.Record) error {
		if r.Offset != 41 {
			t.Errorf("c1 was given offset %d", r.Offset)
		}
		close(inHand)
		<-finish
		return nil
	})
	<-inHand
	stop := groupEvents(t, group)
	first := make(chan int64, 1)
	start(t, consumer.Config{ID: "c2", Group: group, Topics: map[string]int32{topic: 1}}, func(_ context.Context, r *consumer.Record) error {
		select {
		case first <- r.Offset:
		default:
		}
		return nil
	})
	ids := func() string {
		kvs, _, err := registry.List(t.Context(), shared.store, paths.IDs(), 0)
		must(t, err)
		if len(kvs) != 2 {
			return fmt.Sprintf("%d members", len(kvs))
		}
		return ""
	}
	eventually(t, ids)
	c1.cancel()
	// Longer than a commit interval and a renewal: ownership must outlast the record.
	select {
	case o := <-first:
		t.Fatalf("c2 was given %d while c1 has 41 in hand", o)
	case <-time.After(session/3 + 500*time.Millisecond):
	}
	close(finish)
	c1.wait(t)
	must(t, c1.err)
	if o := <-first; o != 42 {
		t.Errorf("c2 began at %d, want 42", o)
	}
	var order []string
	for _, e := range stop() {
		switch {
		case e.Key == paths.Offset(p) && len(order) == 0:
			order = append(order, "commit "+string(e.Value))
		case e.Key == paths.Owner(p) && e.Deleted:
			order = append(order, "release")
		case e.Key == paths.ID("c1") && e.Deleted:
			order = append(order, "unregister")
		}
	}
	if got := strings.Join(order, ", "); got != "commit 42, release, unregister" {
		t.Errorf("c1 left in the order: %s", got)
	}
}

// Field case 01, through the front door: owner keys are never seen empty, nor
// without a lease, nor naming a thread that is not registered.
func TestCase01(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	createTopic(t, topic, 4)
	paths := root.Group(group)
	stop := groupEvents(t, group)
	quiet := func(context.Context, *consumer.Record) error { return nil }
	for i := range 50 {
		a := start(t, consumer.Config{ID: "a", Group: group, Topics: map[string]int32{topic: 1}}, quiet)
		b := start(t, consumer.Config{ID: "b", Group: group, Topics: map[string]int32{topic: 1}}, quiet)
		if i%10 == 0 {
			ownedAs(t, group, topic, "0:a 1:a 2:b 3:b")
		}
		a.stop(t)
		b.stop(t)
		must(t, errors.Join(a.err, b.err))
	}
	registered := map[string]registry.LeaseID{}
	puts := 0
	for _, e := range stop() {
		switch {
		case strings.HasPrefix(e.Key, paths.IDs()):
			id, err := paths.ParseID(e.Key)
			must(t, err)
			delete(registered, id)
			if !e.Deleted {
				registered[id] = e.Lease
			}
		case strings.HasPrefix(e.Key, paths.Owners()) && !e.Deleted:
			puts++
			id := strings.TrimSuffix(string(e.Value), "-0")
			if e.Lease == 0 || registered[id] != e.Lease {
				t.Errorf("rev %d: %s = %q under lease %x; registered are %v", e.ModRevision, e.Key, e.Value, e.Lease, registered)
			}
			if e.CreateRevision != e.ModRevision {
				t.Errorf("rev %d: %s was put again", e.ModRevision, e.Key)
			}
		}
	}
	if puts < 20 {
		t.Errorf("only %d claims were seen", puts)
	}
}

// An owner key, a registration or a lease that somebody takes away is noticed
// and comes back, without any other event in the group.
func TestWhatIsTakenAwayComesBack(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	p := createTopic(t, topic, 1)[0]
	paths := root.Group(group)
	lost := make(chan string, 10)
	isLost := func() string {
		t.Helper()
		select {
		case reason := <-lost:
			return reason
		case <-time.After(patience):
			t.Fatal("no loss is noticed")
			return ""
		}
	}
	c := start(t, consumer.Config{ID: "c", Group: group, Topics: map[string]int32{topic: 1},
		Listener: consumer.Listener{Lost: func(_ registry.Partition, reason string) { lost <- reason }}},
		func(context.Context, *consumer.Record) error { return nil })
	begun := func() { // the owner key comes before: what is taken away by then was not begun, and is not told to be lost
		t.Helper()
		eventually(t, func() string {
			if len(c.Assigned()) == 0 {
				return "partition is not handed over"
			}
			return ""
		})
	}
	begun()
	first := owners(t, group)[p]

	_, err := shared.store.Txn(t.Context(), registry.Txn{Then: []registry.Op{registry.Delete(paths.Owner(p))}})
	must(t, err)
	// Whichever says it first: the watch, or a commit.
	if reason := isLost(); reason != "owner key was deleted" && reason != "commit was fenced" {
		t.Errorf("lost: %s", reason)
	}
	eventually(t, func() string {
		if again := owners(t, group)[p]; again.CreateRevision <= first.CreateRevision {
			return "owner key is not back"
		}
		return ""
	})

	_, err = shared.store.Txn(t.Context(), registry.Txn{Then: []registry.Op{registry.Delete(paths.ID("c"))}})
	must(t, err)
	eventually(t, func() string {
		kv, _, err := registry.GetKey(t.Context(), shared.store, paths.ID("c"))
		must(t, err)
		if kv == nil || kv.Lease != first.Lease {
			return "registration is not back under its lease"
		}
		return ""
	})

	begun()
	must(t, shared.store.Revoke(t.Context(), first.Lease))
	isLost()
	eventually(t, func() string {
		if again, ok := owners(t, group)[p]; !ok || again.Lease == first.Lease {
			return "partition is not owned under a new lease"
		}
		return ""
	})
}

// With nothing committed, a partition begins where the policy says, unless it is
// younger than the group: then none of it may be skipped.
func TestWhereItBegins(t *testing.T) {
	old, group := name(t, "old"), name(t, "g")
	createTopic(t, old, 1)
	produce(t, old, 1, 0, 10)
	young := name(t, "young")
	assigned := make(chan string, 10)
	start(t, consumer.Config{ID: "c", Group: group, Topics: map[string]int32{old: 1, young: 1},
		Listener: consumer.Listener{Assigned: func(_ context.Context, a consumer.Assignment) {
			assigned <- fmt.Sprintf("%s %d", a.Partition.Topic, a.Offset)
		}}}, func(context.Context, *consumer.Record) error { return nil })
	if got := <-assigned; got != old+" 10" {
		t.Errorf("got %s", got)
	}
	p := createTopic(t, young, 1)[0]
	if got := <-assigned; got != young+" 0" {
		t.Errorf("got %s", got)
	}
	eventually(t, func() string {
		if got := committed(t, group, p); got != "0" {
			return "the start is committed as " + got
		}
		return ""
	})
}

// An offset that is not in the log starts anew where the policy says.
func TestOffsetOutOfRange(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	p := createTopic(t, topic, 1)[0]
	produce(t, topic, 1, 0, 5)
	_, err := shared.store.Txn(t.Context(), registry.Txn{Then: []registry.Op{registry.Put(root.Group(group).Offset(p), []byte("1000"), 0)}})
	must(t, err)
	j := newJournal(t)
	start(t, consumer.Config{ID: "c", Group: group, Topics: map[string]int32{topic: 1}, Reset: consumer.Smallest,
		CommitInterval: 20 * time.Millisecond}, j.handler("c", nil))
	eventually(t, func() string {
		if got := committed(t, group, p); got != "5" {
			return "committed " + got
		}
		return ""
	})
}

// A value that is no offset holds up its own partition only, and is not taken
// for "nothing committed".
func TestBadOffsetHoldsUpItsOwnPartitionOnly(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	ps := createTopic(t, topic, 2)
	produce(t, topic, 2, 0, 3)
	paths := root.Group(group)
	_, err := shared.store.Txn(t.Context(), registry.Txn{Then: []registry.Op{registry.Put(paths.Offset(ps[0]), []byte("abc"), 0)}})
	must(t, err)
	j := newJournal(t)
	start(t, consumer.Config{ID: "c", Group: group, Topics: map[string]int32{topic: 1}, Reset: consumer.Smallest,
		CommitInterval: 20 * time.Millisecond}, j.handler("c", nil))
	eventually(t, func() string {
		if got := committed(t, group, ps[1]); got != "3" {
			return "partition 1 is at " + got
		}
		return ""
	})
	if n := j.total(); n != 3 {
		t.Errorf("%d records were handed over, want those of partition 1", n)
	}
	_, err = shared.store.Txn(t.Context(), registry.Txn{Then: []registry.Op{registry.Put(paths.Offset(ps[0]), []byte("1"), 0)}})
	must(t, err)
	eventually(t, func() string {
		if got := committed(t, group, ps[0]); got != "3" {
			return "partition 0 is at " + got
		}
		return ""
	})
	if n := j.total(); n != 5 {
		t.Errorf("%d records were handed over, want 3 + 2", n)
	}
}

// A small buffer only slows down: everything arrives, in order.
func TestBackPressure(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	partitions := createTopic(t, topic, 3)
	const n = 2000
	produce(t, topic, 3, 0, n)
	last := map[registry.Partition]int64{}
	j := newJournal(t)
	start(t, consumer.Config{ID: "c", Group: group, Topics: map[string]int32{topic: 1}, Reset: consumer.Smallest, MaxBufferedBytes: 1},
		j.handler("c", func(_ context.Context, r *consumer.Record) error {
			// One stream: the handler is never called twice at a time.
			if want := last[r.Partition]; r.Offset != want || string(r.Value) != fmt.Sprint(want) {
				t.Errorf("%s: offset %d, value %s; want %d", r.Partition, r.Offset, r.Value, want)
			}
			last[r.Partition]++
			return nil
		}))
	eventually(t, func() string {
		if got := j.total(); got < n*len(partitions) {
			return fmt.Sprintf("%d records", got)
		}
		return ""
	})
}

// A handler's error stops the consumer in order: what was finished is committed,
// what failed is not, and the group goes on without it.
func TestHandlerErrorLeavesInOrder(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	p := createTopic(t, topic, 1)[0]
	produce(t, topic, 1, 0, 10)
	c := start(t, consumer.Config{ID: "c", Group: group, Topics: map[string]int32{topic: 1}, Reset: consumer.Smallest},
		func(_ context.Context, r *consumer.Record) error {
			if r.Offset == 7 {
				return errHandler
			}
			return nil
		})
	c.wait(t)
	if !errors.Is(c.err, errHandler) {
		t.Errorf("Run returned %v", c.err)
	}
	if got := committed(t, group, p); got != "7" {
		t.Errorf("committed %s, want 7", got)
	}
	kvs, _, err := registry.List(t.Context(), shared.store, root.Group(group).IDs(), 0)
	must(t, err)
	if len(kvs)+len(owners(t, group)) != 0 {
		t.Error("keys are left behind")
	}
}

// A handler that does not come back loses its partition when the patience of the
// stop is over; its record is not committed.
func TestStuckHandlerIsLeftBehind(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	p := createTopic(t, topic, 1)[0]
	produce(t, topic, 1, 0, 10)
	inHand, finish := make(chan struct{}), make(chan struct{})
	c := start(t, consumer.Config{ID: "c", Group: group, Topics: map[string]int32{topic: 1}, Reset: consumer.Smallest,
		LeaveTimeout: 100 * time.Millisecond}, func(ctx context.Context, r *consumer.Record) error {
		if r.Offset == 3 {
			close(inHand)
			<-ctx.Done() // ownership is lost
			if r.Owned() {
				t.Error("still owned after the context ended")
			}
			<-finish
		}
		return nil
	})
	<-inHand
	c.cancel()
	eventually(t, func() string {
		if n := len(owners(t, group)); n != 0 {
			return "the partition is still owned"
		}
		return ""
	})
	close(finish)
	c.wait(t)
	if c.err == nil {
		t.Error("Run says nothing of the record left behind")
	}
	// What was finished before it, or a part of that, or only where it began.
	if got := committed(t, group, p); len(got) != 1 || got > "3" {
		t.Errorf("committed %s: the record in hand was not finished in time", got)
	}
}

// A consumer that has stopped leaves no goroutine, lease or key.
func TestNothingIsLeftBehind(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	createTopic(t, topic, 4)
	produce(t, topic, 4, 0, 10)
	leases := func() int {
		res, err := shared.store.Client().Leases(t.Context())
		must(t, err)
		return len(res.Leases)
	}
	run := func() {
		j := newJournal(t)
		c := start(t, consumer.Config{Group: group, Topics: map[string]int32{topic: 2}, Reset: consumer.Smallest}, j.handler("c", nil))
		eventually(t, func() string {
			if n := len(owners(t, group)); n < 4 {
				return fmt.Sprintf("%d partitions owned", n)
			}
			return ""
		})
		c.stop(t)
		must(t, c.err)
	}
	run() // what the shared etcd client keeps is there from now on
	goroutines, held := runtime.NumGoroutine(), leases()
	// One goroutine left behind by each run is more than what the daemon begins
	// meanwhile: its first renewal alone comes with four, on a stream.
	const runs, others = 12, 9
	for range runs {
		run()
	}
	eventually(t, func() string {
		if n := runtime.NumGoroutine(); n > goroutines+others {
			return fmt.Sprintf("%d goroutines, before %d", n, goroutines)
		}
		return ""
	})
	if n := leases(); n > held {
		t.Errorf("%d leases, before %d", n, held)
	}
}
