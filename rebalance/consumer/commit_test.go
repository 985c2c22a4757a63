package consumer

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-io/muster/offsets"
	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/rebalance/membership"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

// bench is a driver on a store in memory, without brokers and without a membership:
// the test does what that would do.
type bench struct {
	t      *testing.T
	st     *memory.Store
	d      *driver
	s      *registry.Session
	fenced chan *delivery // told of by Fenced
	stops  atomic.Int64   // how often the driver asked to leave
	// what a membership does to the ownership of a delivery
	revokes, ends map[*delivery]func()
	mu            sync.Mutex
	lines         bytes.Buffer // of the log
}

func (b *bench) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.lines.Write(p)
}

func (b *bench) log() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.lines.String()
}

func quiet(context.Context, *Record) error { return nil }

// newBench wraps the store if asked to. The caller closes the bench.
func newBench(t *testing.T, interval time.Duration, h Handler, wrap func(registry.Store) registry.Store) *bench {
	t.Helper()
	return newBenchOf(t, Config{CommitInterval: interval}, h, wrap)
}

func newBenchOf(t *testing.T, cfg Config, h Handler, wrap func(registry.Store) registry.Store) *bench {
	t.Helper()
	b := &bench{t: t, st: memory.New(), fenced: make(chan *delivery, 10), revokes: map[*delivery]func(){}, ends: map[*delivery]func(){}}
	var st registry.Store = b.st
	if wrap != nil {
		st = wrap(st)
	}
	cfg.Store, cfg.Group, cfg.ID, cfg.Logger = st, "g", "c", slog.New(slog.NewTextHandler(b, nil))
	if cfg.Include == "" {
		cfg.Topics = map[string]int32{"t": 2}
	}
	c, err := New(cfg, h)
	b.must(err)
	b.d = newDriver(c, func() { b.stops.Add(1) })
	c.driver.Store(b.d)
	b.s, err = registry.OpenSession(context.Background(), st, registry.SessionOptions{})
	b.must(err)
	return b
}

func (b *bench) close() {
	b.st.SetHooks(memory.Hooks{})
	b.must(b.s.Close(context.Background()))
	b.d.close()
}

func (b *bench) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) write(op registry.Op) int64 {
	b.t.Helper()
	res, err := b.st.Txn(context.Background(), registry.Txn{Then: []registry.Op{op}})
	b.must(err)
	return res.Revision
}

func part(n int32) registry.Partition { return registry.Partition{Topic: "t", Home: 1, Number: n} }

// own claims a partition and begins its delivery, with nothing committed.
func (b *bench) own(n, stream int32) *delivery {
	b.t.Helper()
	token := b.write(registry.Put(b.d.c.group.Owner(part(n)), []byte("c-0"), b.s.Lease()))
	var o *delivery
	own, revoke, end := membership.NewOwnership(b.s, rebalance.Want{Partition: part(n), Stream: stream}, token, func() { b.fenced <- o })
	o = b.d.deliver(own)
	b.revokes[o], b.ends[o] = revoke, end
	return o
}

// lose ends the ownership without asking.
func (b *bench) lose(o *delivery) {
	b.ends[o]()
	b.d.Lost(o.Ownership, "test")
}

// finished is a delivery whose worker has ended with that offset to commit.
func (b *bench) finished(n int32, next int64) *delivery {
	b.t.Helper()
	o := b.own(n, 0)
	b.revokes[o]()
	<-o.done
	o.next.Store(next)
	return o
}

func (b *bench) committed(n int32) string {
	b.t.Helper()
	kv, _, err := registry.GetKey(context.Background(), b.st, b.d.c.group.Offset(part(n)))
	b.must(err)
	if kv == nil {
		return "none"
	}
	return string(kv.Value)
}

// last asks for a last commit and returns the answer, when it comes.
func (b *bench) last(o *delivery) <-chan bool {
	answer := make(chan bool, 1)
	go func() { answer <- b.d.commits.last(o) }()
	return answer
}

// answered waits, on a virtual clock, for at most so long.
func (b *bench) answered(answer <-chan bool, want bool, within time.Duration) {
	b.t.Helper()
	select {
	case got := <-answer:
		if got != want {
			b.t.Errorf("the last commit is answered %v, want %v; log:\n%s", got, want, b.log())
		}
	case <-time.After(within):
		b.t.Fatalf("the last commit is not answered within %s; log:\n%s", within, b.log())
	}
}

func (b *bench) says(text string) {
	b.t.Helper()
	if !strings.Contains(b.log(), text) {
		b.t.Errorf("the log does not say %q:\n%s", text, b.log())
	}
}

// failFirst fails the first n transactions.
func failFirst(n int64) func(context.Context, string) error {
	var count atomic.Int64
	return func(_ context.Context, op string) error {
		if op == "txn" && count.Add(1) <= n {
			return errors.New("fails in this test")
		}
		return nil
	}
}

// failing fails all transactions from now on.
func (b *bench) failing() { b.st.SetHooks(memory.Hooks{Before: failFirst(1 << 40)}) }

func TestLastCommitIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, time.Hour, quiet, nil)
		defer b.close()
		b.d.work.Go(b.d.commits.run)
		o := b.finished(0, 7)
		b.st.SetHooks(memory.Hooks{Before: failFirst(3)})
		began := time.Now()
		b.answered(b.last(o), true, time.Second)
		if took := time.Since(began); took != 3*commitPause {
			t.Errorf("answered after %s, want three pauses", took)
		}
		if got := b.committed(0); got != "7" || o.dirty() {
			t.Errorf("committed %s, dirty %v", got, o.dirty())
		}
		b.says("commit failed, trying again")
	})
}

// With nothing finished beyond what is committed there is nothing to wait for.
func TestLastCommitOfNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, time.Hour, quiet, nil)
		defer b.close()
		b.d.work.Go(b.d.commits.run)
		o := b.finished(0, offsets.None)
		b.st.SetHooks(memory.Hooks{Before: func(context.Context, string) error { return errors.New("unreachable") }})
		b.answered(b.last(o), true, time.Millisecond)
		if got := o.next.Load(); got != offsets.None {
			t.Errorf("next is %d", got)
		}
	})
}

// A commit that took effect though its reply was lost is known when it is tried
// again, and not taken for somebody else's.
func TestLostReplyIsRecognised(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, time.Hour, quiet, nil)
		defer b.close()
		b.d.work.Go(b.d.commits.run)
		o := b.finished(0, 7)
		b.st.SetHooks(memory.Hooks{After: failFirst(1)})
		b.answered(b.last(o), true, time.Second)
		kv, _, err := registry.GetKey(context.Background(), b.st, b.d.c.group.Offset(part(0)))
		b.must(err)
		if kv == nil || string(kv.Value) != "7" || kv.ModRevision != kv.CreateRevision || o.committed.Revision != kv.ModRevision {
			t.Errorf("the key is %+v, known as %+v; want one write", kv, o.committed)
		}
		if strings.Contains(b.log(), "somebody else") {
			t.Error("our own commit is taken for another's")
		}
	})
}

// Somebody else wrote the offset meanwhile: the owner's value stands in the end,
// and the log shows the other one.
func TestForeignWriteIsWarnedOfAndOverwritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, time.Hour, quiet, nil)
		defer b.close()
		b.d.work.Go(b.d.commits.run)
		o := b.finished(0, 7)
		b.answered(b.last(o), true, time.Second)
		o.next.Store(9)
		b.write(registry.Put(b.d.c.group.Offset(part(0)), []byte("3"), 0))
		b.answered(b.last(o), true, time.Second)
		if got := b.committed(0); got != "9" {
			t.Errorf("committed %s, want the owner's 9", got)
		}
		b.says("somebody else wrote this offset; writing ours again")
		b.says("theirs=3")
	})
}

// Garbage that somebody puts there is overwritten too.
func TestGarbageIsOverwritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, time.Hour, quiet, nil)
		defer b.close()
		b.d.work.Go(b.d.commits.run)
		o := b.finished(0, 7)
		b.write(registry.Put(b.d.c.group.Offset(part(0)), []byte("garbage"), 0))
		b.answered(b.last(o), true, time.Second)
		if got := b.committed(0); got != "7" {
			t.Errorf("committed %s", got)
		}
	})
}

// A commit that finds the owner key gone, or another's, changes nothing: the
// member is told, and the last commit is answered false once the partition is lost.
func TestFencedCommit(t *testing.T) {
	for _, what := range []string{"deleted", "another's"} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t, time.Hour, quiet, nil)
				defer b.close()
				o := b.finished(0, 7)
				b.d.work.Go(b.d.commits.run)
				owner := b.d.c.group.Owner(part(0))
				b.write(registry.Delete(owner))
				if what == "another's" {
					b.write(registry.Put(owner, []byte("x-0"), 0))
				}
				answer := b.last(o)
				select {
				case told := <-b.fenced:
					if told != o {
						t.Errorf("told of %s", told.Partition)
					}
				case <-time.After(time.Second):
					t.Fatal("the member is not told")
				}
				b.lose(o)
				b.answered(answer, false, time.Second)
				if got := b.committed(0); got != "none" {
					t.Errorf("committed %s", got)
				}
				b.says("commit was fenced")
			})
		})
	}
}

// The session ends while last commits wait for a registry that does not answer:
// they are answered, with no, at the next try.
func TestLastCommitEndsWithTheSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, time.Hour, quiet, nil)
		defer b.close()
		b.d.work.Go(b.d.commits.run)
		o, p := b.finished(0, 7), b.finished(1, 8)
		b.st.SetHooks(memory.Hooks{Before: func(_ context.Context, op string) error { return errors.New("unreachable") }})
		first, second := b.last(o), b.last(p)
		time.Sleep(commitPause * 5 / 2)
		b.s.Abandon(registry.ErrLeaseGone)
		b.answered(first, false, commitPause)
		b.answered(second, false, commitPause)
	})
}

// The driver closes while last commits wait: all are answered.
func TestLastCommitEndsWithTheDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, time.Hour, quiet, nil)
		defer b.close()
		b.d.work.Go(b.d.commits.run)
		o, p := b.finished(0, 7), b.finished(1, 8)
		b.st.SetHooks(memory.Hooks{Before: func(context.Context, string) error { return errors.New("unreachable") }})
		first, second := b.last(o), b.last(p)
		synctest.Wait()
		b.d.cancel()
		b.answered(first, false, time.Millisecond)
		b.answered(second, false, time.Millisecond)
		b.answered(b.last(o), false, time.Millisecond) // nobody is there to ask
	})
}

// Commits at an interval that is shorter than the pause of a retry do not keep
// the retry from coming.
func TestShortIntervalDoesNotStarveLastCommits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, commitPause/5, quiet, nil)
		defer b.close()
		b.d.work.Go(b.d.commits.run)
		o := b.finished(0, 7)
		b.d.table.remove(o)
		b.st.SetHooks(memory.Hooks{Before: failFirst(2)})
		b.answered(b.last(o), true, time.Second)
		if got := b.committed(0); got != "7" {
			t.Errorf("committed %s", got)
		}
	})
}

// At each interval everything that is finished is committed, together, and what
// has not changed is left alone.
func TestCommitsAtTheInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, time.Second, quiet, nil)
		defer b.close()
		b.d.work.Go(b.d.commits.run)
		var list []*delivery
		for n := range int32(3) {
			list = append(list, b.finished(n, int64(10+n)))
		}
		list[2].next.Store(offsets.None) // its start is not known yet
		var txns atomic.Int64
		b.st.SetHooks(memory.Hooks{Before: func(_ context.Context, op string) error {
			if op == "txn" {
				txns.Add(1)
			}
			return nil
		}})
		time.Sleep(time.Second - time.Millisecond)
		synctest.Wait()
		if n := txns.Load(); n != 0 {
			t.Errorf("%d transactions before the interval is over", n)
		}
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if n := txns.Load(); n != 1 {
			t.Errorf("%d transactions, want one for both partitions", n)
		}
		for n, want := range []string{"10", "11", "none"} {
			if got := b.committed(int32(n)); got != want {
				t.Errorf("partition %d: committed %s, want %s", n, got, want)
			}
		}
	})
}

// Nothing is committed for a delivery that was lost, nor in a session that is over,
// though its owner key stands there still.
func TestNothingIsCommittedForTheDead(t *testing.T) {
	for _, how := range []string{"lost", "session past its deadline"} {
		t.Run(how, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t, 10*time.Millisecond, quiet, nil)
				defer b.close()
				b.d.work.Go(b.d.commits.run)
				o := b.finished(0, 7)
				if how == "lost" {
					b.ends[o]()
				} else {
					b.s.Abandon(registry.ErrSessionExpired)
				}
				time.Sleep(50 * time.Millisecond)
				synctest.Wait()
				b.answered(b.last(o), false, time.Millisecond)
				kv, _, err := registry.GetKey(context.Background(), b.st, b.d.c.group.Owner(part(0)))
				b.must(err)
				if got := b.committed(0); kv == nil || got != "none" {
					t.Errorf("owner key %+v, committed %s", kv, got)
				}
			})
		})
	}
}

// Last commits that are asked for together are made together.
func TestLastCommitsAreGathered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, time.Hour, quiet, nil)
		defer b.close()
		var list []*delivery
		for n := range int32(20) {
			list = append(list, b.finished(n, 5))
		}
		var txns atomic.Int64
		b.st.SetHooks(memory.Hooks{Before: func(context.Context, string) error { txns.Add(1); return nil }})
		var answers []<-chan bool
		for _, o := range list {
			answers = append(answers, b.last(o))
		}
		synctest.Wait() // all ask
		b.d.work.Go(b.d.commits.run)
		for _, a := range answers {
			b.answered(a, true, time.Second)
		}
		// One is taken first; what else waits by then goes along with it.
		if n := txns.Load(); n > int64(len(list))/2 {
			t.Errorf("%d transactions for %d commits", n, len(list))
		}
		for i := range list {
			if got := b.committed(int32(i)); got != "5" {
				t.Errorf("%d: committed %s", i, got)
			}
		}
	})
}
