package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/muster-io/muster/rebalance/consumer"
	"github.com/muster-io/muster/registry"
)

// logged collects what a consumer logs from Warn up, as lines of text.
type logged struct {
	mu    sync.Mutex
	lines []string
}

func (l *logged) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelWarn}))
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, string(p))
	return len(p), nil
}

// says tells whether a line holds all of these.
func (l *logged) says(parts ...string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.ContainsFunc(l.lines, func(line string) bool {
		return !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(line, part) })
	})
}

// sequence watches that the records of each partition are handed over from a
// start on, none left out, none twice, in order; by whomsoever.
type sequence struct {
	t     *testing.T
	mu    sync.Mutex
	next  map[registry.Partition]int64
	count int
}

func newSequence(t *testing.T) *sequence {
	return &sequence{t: t, next: map[registry.Partition]int64{}}
}

func (s *sequence) handle(_ context.Context, r *consumer.Record) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if want := s.next[r.Partition]; r.Offset != want || string(r.Value) != fmt.Sprint(r.Offset) {
		s.t.Errorf("%s: offset %d with value %s, want offset %d", r.Partition, r.Offset, r.Value, want)
	}
	s.next[r.Partition] = r.Offset + 1
	s.count++
	return nil
}

func (s *sequence) from(p registry.Partition, offset int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next[p] = offset
}

// reach waits until every partition has come to an offset.
func (s *sequence) reach(partitions []registry.Partition, offset int64) {
	s.t.Helper()
	eventually(s.t, func() string {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, p := range partitions {
			if s.next[p] < offset {
				return fmt.Sprintf("%s is at %d of %d", p, s.next[p], offset)
			}
		}
		return ""
	})
}

// advance waits until every partition has come further than it is now.
func (s *sequence) advance(partitions []registry.Partition) {
	s.t.Helper()
	for _, p := range partitions {
		s.reach([]registry.Partition{p}, s.at(p)+1)
	}
}

func (s *sequence) at(p registry.Partition) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.next[p]
}

func write(t *testing.T, op registry.Op) {
	t.Helper()
	_, err := shared.store.Txn(t.Context(), registry.Txn{Then: []registry.Op{op}})
	must(t, err)
}

func committedAs(t *testing.T, group string, partitions []registry.Partition, want string) {
	t.Helper()
	eventually(t, func() string {
		for _, p := range partitions {
			if got := committed(t, group, p); got != want {
				return fmt.Sprintf("%s: committed %s, want %s", p, got, want)
			}
		}
		return ""
	})
}

// Committed offsets beyond the ends of several logs: each begins where the policy
// says, and what is written from then on arrives from the first record on. The
// registry is corrected at once. (A client that is left to find out begins at the
// end and says nothing; what is written up to the offset is lost.)
func TestCommittedBeyondTheEnd(t *testing.T) {
	const rounds, before, after = 4, 10, 10
	for _, reset := range []consumer.Reset{consumer.Smallest, consumer.Largest} {
		for round := range rounds {
			t.Run(fmt.Sprintf("%s-%d", reset, round), func(t *testing.T) {
				group := name(t, "g")
				var ps []registry.Partition
				cfg := consumer.Config{ID: "c", Group: group, Topics: map[string]int32{}, Reset: reset, CommitInterval: 20 * time.Millisecond}
				for _, topic := range []string{name(t, "a"), name(t, "b")} {
					ps = append(ps, createTopic(t, topic, 1)...)
					produce(t, topic, 1, 0, before)
					cfg.Topics[topic] = 1
				}
				for _, p := range ps {
					write(t, registry.Put(root.Group(group).Offset(p), []byte("500"), 0))
				}
				var log logged
				cfg.Logger = log.logger()
				begun := make(chan int64, 10)
				cfg.Listener.Assigned = func(_ context.Context, a consumer.Assignment) { begun <- a.Offset }
				s := newSequence(t)
				begin := int64(0)
				if reset == consumer.Largest {
					begin = before
					s.from(ps[0], before)
					s.from(ps[1], before)
				}
				start(t, cfg, s.handle)
				for range ps {
					if at := <-begun; at != begin {
						t.Errorf("begins at %d, want %d", at, begin)
					}
				}
				// With smallest the records before the end correct the offset; with largest
				// nothing is there to hand over, and it is corrected all the same.
				committedAs(t, group, ps, fmt.Sprint(before))
				for topic := range cfg.Topics {
					produce(t, topic, 1, before, after)
				}
				s.reach(ps, before+after)
				committedAs(t, group, ps, fmt.Sprint(before+after))
				if !log.says("offset out of range", "was=500") || log.says("somebody else") {
					t.Error("the log does not say what happened")
				}
			})
		}
	}
}

// A partition that is given up and owned again by the same process, many times a
// second, while records flow: nothing is skipped, repeated or out of order, for
// nothing that was fetched for one ownership reaches the next.
func TestOwnedAgainAndAgain(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	ps := createTopic(t, topic, 4)
	s := newSequence(t)
	cfg := consumer.Config{Group: group, Topics: map[string]int32{topic: 1}, Reset: consumer.Smallest, CommitInterval: 50 * time.Millisecond,
		MaxBufferedBytes: 20 << 10}
	var assigned atomic.Int64
	run := func(id string) *running {
		cfg := cfg
		cfg.ID = id
		if id == "a" {
			cfg.Listener.Assigned = func(context.Context, consumer.Assignment) { assigned.Add(1) }
		}
		return start(t, cfg, s.handle)
	}
	a := run("a")
	ownedAs(t, group, topic, "0:a 1:a 2:a 3:a")

	var producing sync.WaitGroup
	k := newProducer(t)
	flapped := make(chan struct{})
	written := 0
	producing.Go(func() {
		for done := false; !done; {
			// Not so far ahead that a slow machine could not come after.
			const most = 2000
			behind := func(p registry.Partition) bool { return int64(written)-s.at(p) > most }
			select {
			case <-flapped:
				done = true
			case <-t.Context().Done():
				return
			default:
				if slices.ContainsFunc(ps, behind) {
					time.Sleep(time.Millisecond)
					continue
				}
			}
			var batch []*kgo.Record
			for i := range 20 {
				for p := range ps {
					batch = append(batch, &kgo.Record{Topic: topic, Partition: int32(p), Value: []byte(fmt.Sprint(written + i))})
				}
			}
			if err := k.ProduceSync(context.Background(), batch...).FirstErr(); err != nil {
				t.Error(err)
				return
			}
			written += 20
		}
	})
	// A registration that is there for a moment only: a gives up half, and is due it
	// again before, while or after it lets go.
	lease, err := shared.store.Grant(t.Context(), time.Hour)
	must(t, err)
	ghost := root.Group(group).ID("z")
	value, err := registry.Encode(registry.ConsumerRecord{Version: 1, Subscription: cfg.Topics, Pattern: registry.PatternStatic, Strategy: []string{"range"}})
	must(t, err)
	moved := int64(0)
	for round := range 12 {
		for range 4 {
			was := s.total()
			write(t, registry.Put(ghost, value, lease.ID))
			write(t, registry.Delete(ghost))
			eventually(t, func() string {
				if s.total() == was {
					return "nothing is handed over"
				}
				return ""
			})
		}
		s.advance(ps) // only a is there: all are its own again
		b := run("b")
		want := 1 + round%2 // in every second round it ends while it takes its share, of two
		moved += int64(want)
		eventually(t, func() string {
			n := 0
			for _, kv := range owners(t, group) {
				if string(kv.Value) == "b-0" {
					n++
				}
			}
			if n < want {
				return fmt.Sprintf("b owns %d, want %d", n, want)
			}
			return ""
		})
		b.stop(t)
		must(t, b.err)
	}
	close(flapped)
	producing.Wait()
	s.reach(ps, int64(written))
	a.stop(t)
	must(t, a.err)
	committedAs(t, group, ps, fmt.Sprint(written))
	if n := assigned.Load(); n < 4+moved { // what b had came back each time
		t.Errorf("a was assigned partitions %d times, want at least %d", n, 4+moved)
	}
	t.Logf("%d records of each partition, %d assignments to a", written, assigned.Load())
}

// A partition whose reading is paused, since its handler is slow, is given up or
// lost, and owned again: the pause is not left behind.
func TestNoPauseIsLeftBehind(t *testing.T) {
	for _, how := range []string{"given up", "lost"} {
		t.Run(how, func(t *testing.T) {
			topic, group := name(t, "t"), name(t, "g")
			ps := createTopic(t, topic, 2)
			p := ps[0]
			produce(t, topic, 1, 0, 5)
			inHand, finish := make(chan struct{}), make(chan struct{})
			var first sync.Once
			s := newSequence(t)
			start(t, consumer.Config{ID: "c", Group: group, Topics: map[string]int32{topic: 2}, Reset: consumer.Smallest,
				CommitInterval: 20 * time.Millisecond, MaxBufferedBytes: 1}, func(ctx context.Context, r *consumer.Record) error {
				var lost error
				if r.Partition == p {
					first.Do(func() {
						close(inHand)
						<-finish
						lost = ctx.Err()
					})
				}
				if lost != nil {
					return lost
				}
				return s.handle(ctx, r)
			})
			<-inHand
			// What is fetched now is queued and more than a byte, so that reading is paused.
			// It has been, once a record of the other partition is there that came later.
			produce(t, topic, 1, 5, 5)
			must(t, newProducer(t).ProduceSync(t.Context(), &kgo.Record{Topic: topic, Partition: 1, Value: []byte("0")}).FirstErr())
			s.reach(ps[1:], 1)
			token := owners(t, group)[p].CreateRevision
			if how == "lost" {
				write(t, registry.Delete(root.Group(group).Owner(p)))
				eventually(t, func() string {
					if now := owners(t, group)[p].CreateRevision; now <= token {
						return "not owned again"
					}
					return ""
				})
				close(finish)
			} else {
				lease, err := shared.store.Grant(t.Context(), time.Hour)
				must(t, err)
				ghost := root.Group(group).ID("a")
				value, err := registry.Encode(registry.ConsumerRecord{Version: 1, Subscription: map[string]int32{topic: 2}, Pattern: registry.PatternStatic, Strategy: []string{"range"}})
				must(t, err)
				write(t, registry.Put(ghost, value, lease.ID))
				close(finish)
				eventually(t, func() string {
					if _, owned := owners(t, group)[p]; owned {
						return "not given up"
					}
					return ""
				})
				write(t, registry.Delete(ghost))
			}
			produce(t, topic, 1, 10, 5)
			s.reach([]registry.Partition{p}, 15)
		})
	}
}

func (s *sequence) total() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.count
}

// handmade writes the record of a topic whose partitions are on those brokers.
func handmade(t *testing.T, topic string, brokers ...int32) []registry.Partition {
	t.Helper()
	rec := registry.TopicRecord{Version: 1, Partitions: map[int32][]int32{}, Home: map[int32]int32{}, TopicID: uuid.NewString()}
	var ops []registry.Op
	for n, b := range brokers {
		p := int32(n)
		rec.Partitions[p], rec.Home[p] = []int32{b}, b
		state, err := registry.Encode(registry.InitialState([]int32{b}))
		must(t, err)
		ops = append(ops, registry.Put(root.PartitionState(topic, p), state, 0))
	}
	value, err := registry.Encode(rec)
	must(t, err)
	_, err = shared.store.Txn(t.Context(), registry.Txn{Then: append(ops, registry.Put(root.Topic(topic), value, 0))})
	must(t, err)
	return rec.List(topic)
}

// A broker that is away holds up its own partitions only: those of others begin
// at once, with an offset committed or none. One that takes connections and never
// answers may hold up the rest until its lease runs out, for the client asks any
// broker where partitions are; not much longer.
func TestDeadBrokerHoldsUpItsOwnPartitionsOnly(t *testing.T) {
	for _, kind := range []string{"unregistered", "silent"} {
		for _, offset := range []string{"", "2"} {
			if kind == "silent" && (offset == "" || testing.Short()) {
				continue // it takes seconds
			}
			t.Run(kind+"-"+offset, func(t *testing.T) {
				began, stopped := 4*time.Second, 8*time.Second // the first is less than the limit of one call to a broker
				if kind == "silent" {
					began *= 3
				}
				// A machine that stands still may need another attempt.
				for attempt := 1; ; attempt++ {
					begin, stop := besideADeadBroker(t, kind == "silent", offset)
					t.Logf("the first records came after %s, the end after %s", begin.Round(time.Millisecond), stop.Round(time.Millisecond))
					if begin <= began && stop <= stopped {
						break
					}
					if attempt == 3 {
						t.Error("too late, each time")
						break
					}
				}
			})
		}
	}
}

// besideADeadBroker reads what is on a broker that lives, and measures how long it takes
// until that has begun, and until the consumer has ended.
func besideADeadBroker(t *testing.T, silent bool, offset string) (begin, stop time.Duration) {
	t.Helper()
	topic, group := name(t, "t"), name(t, "g")
	ps := handmade(t, topic, 1, 99)
	here := slices.IndexFunc(ps, func(p registry.Partition) bool { return p.Home == 1 })
	from := int64(0)
	for _, p := range ps {
		if offset != "" {
			write(t, registry.Put(root.Group(group).Offset(p), []byte(offset), 0))
			from = 2
		}
	}
	produce(t, topic, 1, 0, 5)
	if silent {
		silentBroker(t, 99)
	}
	s := newSequence(t)
	s.from(ps[here], from)
	began := time.Now()
	c := start(t, consumer.Config{ID: "c", Group: group, Topics: map[string]int32{topic: 1}, Reset: consumer.Smallest,
		CommitInterval: 20 * time.Millisecond}, s.handle)
	s.reach(ps[here:here+1], 5)
	begin = time.Since(began)
	began = time.Now()
	c.stop(t)
	must(t, c.err)
	return begin, time.Since(began)
}

// silentBroker registers a broker that accepts and says nothing, as one does that
// is stopped, until its lease runs out.
func silentBroker(t *testing.T, id int32) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { ln.Close() })
	value, err := registry.Encode(registry.BrokerRecord{Version: 1, Host: "127.0.0.1", Port: int32(ln.Addr().(*net.TCPAddr).Port), JMXPort: -1, Timestamp: "1"})
	must(t, err)
	lease, err := shared.store.Grant(t.Context(), registry.MinTTL)
	must(t, err)
	write(t, registry.Put(root.Broker(id), value, lease.ID))
	t.Cleanup(func() {
		if err := shared.store.Revoke(context.Background(), lease.ID); err != nil && !errors.Is(err, registry.ErrLeaseNotFound) {
			t.Error(err)
		}
	})
}

// A handler that hands back the end of its context, because the lease is gone,
// does not stop the consumer: the record is handed over again under the next one.
func TestHandlerErrorAfterLossDoesNotStop(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	p := createTopic(t, topic, 1)[0]
	produce(t, topic, 1, 0, 3)
	var first sync.Once
	inHand, again := make(chan struct{}), make(chan struct{})
	c := start(t, consumer.Config{ID: "c", Group: group, Topics: map[string]int32{topic: 1}, Reset: consumer.Smallest,
		CommitInterval: 20 * time.Millisecond}, func(ctx context.Context, r *consumer.Record) error {
		var err error
		first.Do(func() {
			close(inHand)
			<-ctx.Done()
			err = ctx.Err()
		})
		if err == nil && r.Offset == 0 {
			close(again)
		}
		return err
	})
	<-inHand
	must(t, shared.store.Revoke(t.Context(), owners(t, group)[p].Lease))
	select {
	case <-again:
	case <-c.done:
		t.Fatalf("the consumer stopped: %v", c.err)
	case <-time.After(patience):
		t.Fatal("the record is not handed over again")
	}
	committedAs(t, group, []registry.Partition{p}, "3")
	c.stop(t)
	must(t, c.err)
}

// A consumer whose id another process has is nobody: it says why, and its stop
// is not held up, nor blamed on handlers.
func TestSameIDTwice(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	createTopic(t, topic, 1)
	quiet := func(context.Context, *consumer.Record) error { return nil }
	cfg := consumer.Config{ID: "c", Group: group, Topics: map[string]int32{topic: 1}}
	start(t, cfg, quiet)
	ownedAs(t, group, topic, "0:c")
	before := owners(t, group)
	var log logged
	cfg.Logger = log.logger()
	second := start(t, cfg, quiet)
	eventually(t, func() string {
		if !log.says("another process has this consumer id") {
			return "the second does not say why it cannot register"
		}
		return ""
	})
	began := time.Now()
	second.stop(t)
	if took := time.Since(began); second.err != nil || took > consumer.DefaultLeaveTimeout/2 {
		t.Errorf("stopped after %s: %v", took, second.err)
	}
	if log.says("handlers") {
		t.Error("handlers are blamed")
	}
	for p, kv := range owners(t, group) {
		if kv.CreateRevision != before[p].CreateRevision {
			t.Errorf("%s changed hands", p)
		}
	}
}

// An id whose holder goes on living ends the second consumer, with an error that
// names the holder; one whose holder is dead is waited for.
func TestSameIDIsNotWaitedForForEver(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	createTopic(t, topic, 1)
	quiet := func(context.Context, *consumer.Record) error { return nil }
	cfg := consumer.Config{ID: "c", Group: group, Topics: map[string]int32{topic: 1}, SessionTimeout: 8 * time.Second}
	first := start(t, cfg, quiet)
	ownedAs(t, group, topic, "0:c")
	second := start(t, cfg, quiet)
	select {
	case <-second.done:
	case <-time.After(patience):
		t.Fatal("the second waits for ever")
	}
	held, ok := errors.AsType[*registry.HeldError](second.err)
	if !ok || held.KV.Key != root.Group(group).ID("c") || held.Left == 0 {
		t.Errorf("the second ends with %v", second.err)
	}
	first.stop(t)
	must(t, first.err)

	lease, err := shared.store.Grant(t.Context(), registry.MinTTL) // that nobody renews
	must(t, err)
	write(t, registry.Put(root.Group(group).ID("c"), []byte("x"), lease.ID))
	third := start(t, cfg, quiet)
	ownedAs(t, group, topic, "0:c")
	third.stop(t)
	must(t, third.err)
}

// A registration that somebody writes anew, without a lease, stands for nobody:
// the others say so and assign nothing to it, its member claims nothing more, and
// is back when it is deleted.
func TestRegistrationWithoutLease(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	createTopic(t, topic, 2)
	paths := root.Group(group)
	quiet := func(context.Context, *consumer.Record) error { return nil }
	var log logged
	waits := make(chan string, 100)
	start(t, consumer.Config{ID: "c1", Group: group, Topics: map[string]int32{topic: 1}, Logger: log.logger(),
		Listener: consumer.Listener{Waiting: func(p registry.Partition, holder string) { waits <- fmt.Sprintf("%d held by %s", p.Number, holder) }}}, quiet)
	ownedAs(t, group, topic, "0:c1 1:c1")
	var own logged
	start(t, consumer.Config{ID: "c2", Group: group, Topics: map[string]int32{topic: 1}, Logger: own.logger()}, quiet)
	ownedAs(t, group, topic, "0:c1 1:c2")

	kv, _, err := registry.GetKey(t.Context(), shared.store, paths.ID("c2"))
	must(t, err)
	write(t, registry.Put(kv.Key, kv.Value, 0))
	// c2 counts for nobody: all is due to c1.
	select {
	case got := <-waits:
		if got != "1 held by c2-0" {
			t.Errorf("c1 waits for %s", got)
		}
	case <-time.After(patience):
		t.Fatal("c1 goes on assigning to c2")
	}
	if !log.says("level=WARN", paths.ID("c2"), "no lease") {
		t.Error("no warning")
	}
	// c2 notices that the registration is not its own any more, and keeps what it has.
	eventually(t, func() string {
		if !own.says("another process has this consumer id", "without a lease") {
			return "c2 does not say what is wrong"
		}
		return ""
	})
	ownedAs(t, group, topic, "0:c1 1:c2")
	// What c2 holds and somebody deletes it does not claim again: c1 gets it.
	p1 := registry.Partition{Topic: topic, Home: 1, Number: 1}
	write(t, registry.Delete(paths.Owner(p1)))
	ownedAs(t, group, topic, "0:c1 1:c1")

	write(t, registry.Delete(paths.ID("c2")))
	ownedAs(t, group, topic, "0:c1 1:c2")
	back, _, err := registry.GetKey(t.Context(), shared.store, paths.ID("c2"))
	must(t, err)
	if back == nil || back.Lease == 0 || back.Lease != kv.Lease {
		t.Errorf("registration of c2: %+v", back)
	}
}

// failing is the shared store, whose commits of offsets can be made to fail.
type failing struct {
	registry.Store
	prefix string // of the offsets
	fail   atomic.Bool
	failed atomic.Int64
}

func (f *failing) Txn(ctx context.Context, t registry.Txn) (registry.TxnResult, error) {
	for _, op := range t.Then {
		if op.Kind != registry.OpTxn || !f.fail.Load() {
			continue
		}
		for _, inner := range op.Txn.Then {
			if inner.Kind == registry.OpPut && strings.HasPrefix(inner.Key, f.prefix) {
				f.failed.Add(1)
				return registry.TxnResult{}, errors.New("commit fails in this test")
			}
		}
	}
	return f.Store.Txn(ctx, t)
}

// Commits that come faster than the pause of a retry, and fail: a stop still
// commits all that is finished, as soon as it can.
func TestFailingCommitAtAShortInterval(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	ps := createTopic(t, topic, 2)
	produce(t, topic, 2, 0, 5)
	st := &failing{Store: shared.store, prefix: root.Group(group).Offsets()}
	s := newSequence(t)
	var log logged
	c := start(t, consumer.Config{ID: "c", Group: group, Store: st, Topics: map[string]int32{topic: 1}, Reset: consumer.Smallest,
		CommitInterval: 20 * time.Millisecond, Logger: log.logger()}, s.handle)
	s.reach(ps, 5)
	committedAs(t, group, ps, "5")
	st.fail.Store(true)
	produce(t, topic, 2, 5, 5)
	s.reach(ps, 10)
	failed := st.failed.Load()
	c.cancel()
	eventually(t, func() string {
		if n := st.failed.Load() - failed; n < 10 {
			return fmt.Sprintf("%d commits failed", n)
		}
		return ""
	})
	select {
	case <-c.done:
		t.Fatalf("stopped with something not committed: %v", c.err)
	default:
	}
	if n := len(owners(t, group)); n != 2 {
		t.Errorf("%d partitions are owned while their last commits wait", n)
	}
	st.fail.Store(false)
	c.wait(t)
	must(t, c.err)
	committedAs(t, group, ps, "10")
	if !log.says("commit failed, trying again") {
		t.Error("no word of the failed commits")
	}
}
