package membership

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

// idle is work that notes how ownerships begin and end.
type idle struct {
	mu            sync.Mutex
	begun         map[*Ownership]bool
	early         bool // a Drain was before its Begin
	revoked, lost []*Ownership
}

func (w *idle) Snapshot(rebalance.Snapshot, registry.Snapshot) {}

func (w *idle) Begin(list []*Ownership) {
	runtime.Gosched() // so that a Drain that does not wait for it comes first
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, o := range list {
		w.begun[o] = true
	}
}
func (w *idle) Drain(o *Ownership) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.early = w.early || !w.begun[o]
	return true
}
func (w *idle) Revoked(o *Ownership)        { w.revoked = append(w.revoked, o) }
func (w *idle) Lost(o *Ownership, _ string) { w.lost = append(w.lost, o) }

// bench is a membership without its loop: the test takes what is posted to it.
type bench struct {
	*Membership
	t    *testing.T
	st   *memory.Store
	work *idle
	reg  registry.Registration
}

func newBench(t *testing.T) *bench {
	t.Helper()
	b := &bench{t: t, st: memory.New(), work: &idle{begun: map[*Ownership]bool{}}}
	m, err := New(Config{Store: b.st, Group: "g", ID: "c", Subscription: Subscription{Topics: map[string]int32{"t": 1}}})
	b.must(err)
	m.ctx, m.cancel = context.WithCancel(context.Background())
	m.timer = time.NewTimer(time.Hour)
	m.work = b.work
	m.session, err = registry.OpenSession(context.Background(), b.st, registry.SessionOptions{})
	b.must(err)
	b.reg, err = registry.Register(context.Background(), b.st, m.session, m.group.ID("c"), []byte("{}"))
	b.must(err)
	b.Membership = m
	return b
}

func (b *bench) done() {
	s := b.session
	b.close()
	b.must(s.Close(context.Background()))
}

func (b *bench) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) put(key, value string) int64 {
	b.t.Helper()
	res, err := b.st.Txn(context.Background(), registry.Txn{Then: []registry.Op{registry.Put(key, []byte(value), 0)}})
	b.must(err)
	return res.Revision
}

func (b *bench) there(key string) bool {
	b.t.Helper()
	kv, _, err := registry.GetKey(context.Background(), b.st, key)
	b.must(err)
	return kv != nil
}

var p0 = registry.Partition{Topic: "t", Home: 1}

// Lose and Revoke name a token: that of a former ownership does nothing to the
// present one.
func TestLoseAndRevokeNameAToken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		defer b.done()
		o := b.own(rebalance.Deliver{Want: rebalance.Want{Partition: p0}, Token: 7})
		b.act(rebalance.Lose{Partition: p0, Token: 6})
		b.act(rebalance.Revoke{Partition: p0, Token: 6})
		select {
		case <-o.Revoked():
			t.Error("the present ownership is revoked")
		default:
		}
		if !o.Alive() || b.owned[p0] != o || len(b.work.lost) != 0 {
			t.Error("the present ownership is lost")
		}
		b.act(rebalance.Lose{Partition: p0, Token: 7})
		if o.Alive() || len(b.owned) != 0 || len(b.work.lost) != 1 {
			t.Error("the present ownership is not lost")
		}
	})
}

// An ownership that ends while the word of its drain is on its way was lost, not
// given up.
func TestLostWhileDrainIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		defer b.done()
		o := b.own(rebalance.Deliver{Want: rebalance.Want{Partition: p0}, Token: 7})
		b.act(rebalance.Revoke{Partition: p0, Token: 7})
		synctest.Wait() // drained
		b.act(rebalance.Lose{Partition: p0, Token: 7})
		(<-b.posts)()
		if len(b.work.revoked) != 0 || len(b.work.lost) != 1 || b.work.lost[0] != o {
			t.Errorf("%d revoked, %d lost", len(b.work.revoked), len(b.work.lost))
		}
	})
}

// A claim is conditional on the target record that it follows.
func TestClaimUnderATarget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		defer b.done()
		first := b.put(b.group.Target(), "1")
		second := b.put(b.group.Target(), "2")
		for _, target := range []int64{first, second} {
			claim := rebalance.Claim{Number: 1, Registration: b.reg, Snapshot: second, Wants: []rebalance.Want{{Partition: p0}}, Target: target}
			b.put(b.cfg.Root.Topic("t"), "x")
			kv, _, err := registry.GetKey(context.Background(), b.st, b.cfg.Root.Topic("t"))
			b.must(err)
			claim.Incarnations = map[string]int64{"t": kv.CreateRevision}
			b.tasks.Go(func() { b.claim(b.session, claim, nil) })
			(<-b.posts)()
			if got := b.there(b.group.Owner(p0)); got != (target == second) {
				t.Errorf("under the record of %d, where that of %d stands: claimed %v", target, second, got)
			}
		}
	})
}

// The answer to a claim of a session that is over says nothing of the present one.
func TestAnswerOfAFormerSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		defer b.done()
		b.put(b.group.Owner(p0), "x-0")
		topic := b.put(b.cfg.Root.Topic("t"), "x")
		claim := rebalance.Claim{Number: 1, Registration: b.reg, Snapshot: topic, Wants: []rebalance.Want{{Partition: p0}}, Incarnations: map[string]int64{"t": topic}}
		s := b.session
		b.tasks.Go(func() { b.claim(s, claim, nil) })
		b.session = nil
		(<-b.posts)()
		if len(b.waits) != 0 {
			t.Error("it is waited for in the name of a session that is over")
		}
		b.session = s
		b.tasks.Go(func() { b.claim(s, claim, nil) })
		(<-b.posts)()
		if len(b.waits) != 1 {
			t.Error("it is not waited for")
		}
	})
}

// A proposal replaces the record that it was made from, by a member that is registered,
// while nobody else has registered since.
func TestWriteTarget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		defer b.done()
		propose := func(replace, snapshot int64) rebalance.ProposeAnswered {
			a := b.writeTarget(rebalance.Propose{Number: 3, Value: []byte("x"), Replace: replace, Registration: b.reg, Snapshot: snapshot})
			if a.Number != 3 || a.Unknown {
				t.Errorf("answered %+v", a)
			}
			return a
		}
		first := propose(0, b.reg.Revision)
		if first.Stale || first.Revision != b.st.Revision() {
			t.Errorf("the first is answered %+v", first)
		}
		if a := propose(0, b.reg.Revision); !a.Stale {
			t.Errorf("one that takes no account of the first is answered %+v", a)
		}
		if a := propose(first.Revision, b.reg.Revision); a.Stale {
			t.Errorf("one in place of the first is answered %+v", a)
		}
		latest := b.st.Revision()
		b.put(b.group.ID("other"), "{}")
		if a := propose(latest, latest); !a.Stale {
			t.Errorf("one that takes no account of another member is answered %+v", a)
		}
		b.st.SetHooks(memory.Hooks{After: func(context.Context, string) error { return context.DeadlineExceeded }})
		if a := b.writeTarget(rebalance.Propose{Value: []byte("x"), Replace: latest, Registration: b.reg, Snapshot: b.st.Revision()}); !a.Unknown || a.Stale {
			t.Errorf("one whose reply was lost is answered %+v", a)
		}
		b.st.SetHooks(memory.Hooks{})
	})
}

// A claim may be answered when the time has come to look at a change that was put
// off: the same step delivers the partition and takes it back. The work is told so in
// that order, or it would begin with what has been given up.
func TestClaimedAndRevokedInOneStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		defer b.done()
		const others = 40
		snapshot := func(after int64, partitions int32, names string) rebalance.Snapshot {
			s := rebalance.Snapshot{Revision: b.reg.Revision + after, Registered: b.reg.Revision, Topology: rebalance.Topology{"t": nil},
				Incarnations: map[string]int64{"t": 1}, Members: []rebalance.MemberInfo{{ID: "c", Subscription: map[string]int32{"t": 1}}}}
			for n := range partitions {
				s.Topology["t"] = append(s.Topology["t"], registry.Partition{Topic: "t", Home: 1, Number: n})
			}
			for n := range others {
				s.Members = append(s.Members, rebalance.MemberInfo{ID: fmt.Sprintf("%s%03d", names, n), Subscription: map[string]int32{"t": 1}})
			}
			return s
		}
		b.step(rebalance.Registered{Registration: b.reg})
		b.step(snapshot(0, others+1, "x")) // each member has one
		b.step(snapshot(1, others+2, "x")) // a change, looked at once; ours stays
		b.step(snapshot(2, others, "a"))   // put off: nothing is left for us
		time.Sleep(time.Second)
		b.step(rebalance.ClaimAnswered{Number: 1, Revision: b.reg.Revision, Outcomes: []rebalance.ClaimOutcome{{Mine: true, Token: b.reg.Revision}}})
		o := b.owned[p0]
		if o == nil {
			t.Fatal("nothing is delivered")
		}
		<-o.Revoked()
		synctest.Wait()
		b.work.mu.Lock()
		defer b.work.mu.Unlock()
		if !b.work.begun[o] || b.work.early {
			t.Errorf("begun %v, drained before %v", b.work.begun[o], b.work.early)
		}
	})
}
