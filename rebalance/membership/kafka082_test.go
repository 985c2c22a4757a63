package membership_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-io/muster/rebalance/membership"
	"github.com/muster-io/muster/registry"
)

// What Kafka 0.8.2 did wrong and a member of ours must not do; the numbers are the
// rows of docs/kafka-0.8.2.md.

// refusing is a store that refuses transactions that write below a prefix, while it is
// on, and counts calls.
type refusing struct {
	registry.Store
	prefix string
	on     atomic.Bool
	after  atomic.Int64 // so many more are let through first
	calls  atomic.Int64
	denied atomic.Int64
}

var errRefused = errors.New("refused in this test")

func (r *refusing) Txn(ctx context.Context, t registry.Txn) (registry.TxnResult, error) {
	r.calls.Add(1)
	below := func(op registry.Op) bool { return op.Kind == registry.OpPut && strings.HasPrefix(op.Key, r.prefix) }
	if r.on.Load() && slices.ContainsFunc(t.Then, below) && r.after.Add(-1) < 0 {
		r.denied.Add(1)
		return registry.TxnResult{}, errRefused
	}
	return r.Store.Txn(ctx, t)
}

func (r *refusing) Range(ctx context.Context, q registry.RangeRequest) (registry.RangeResult, error) {
	r.calls.Add(1)
	return r.Store.Range(ctx, q)
}

func (r *refusing) Watch(ctx context.Context, prefix string, from int64) <-chan registry.WatchResponse {
	r.calls.Add(1)
	return r.Store.Watch(ctx, prefix, from)
}

func (r *refusing) WatchKey(ctx context.Context, key string, from int64) <-chan registry.WatchResponse {
	r.calls.Add(1)
	return r.Store.WatchKey(ctx, key, from)
}

// Of 20 members none asks the registry for anything when others come and go that take
// nothing of theirs: one that would be the 21st owner, and one of another topic. Their
// partitions are not touched.
func TestF01(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		a.topic("t", 20)
		a.topic("u", 3)
		var members []*member
		var stores []*refusing
		var want []string
		for i := range 20 {
			id := fmt.Sprintf("c%02d", i)
			st := &refusing{Store: a.st}
			stores, members = append(stores, st), append(members, a.join(membership.Config{ID: id, Store: st}, nil))
			want = append(want, fmt.Sprintf("t/%d:%s-0", i, id))
		}
		all := strings.Join(want, " ")
		a.ownedAs(10*time.Second, all)
		time.Sleep(time.Second)
		for i, m := range members {
			m.story()
			stores[i].calls.Store(0)
		}
		spare := a.join(membership.Config{ID: "x"}, nil)
		other := a.join(membership.Config{ID: "y", Subscription: membership.Subscription{Topics: map[string]int32{"u": 1}}}, nil)
		a.ownedAs(time.Second, all+" u/0:y-0 u/1:y-0 u/2:y-0")
		spare.leave()
		other.leave()
		a.ownedAs(time.Second, all)
		for i, m := range members {
			if got := m.story(); got != "" {
				t.Errorf("%s was told: %s", m.ID(), got)
			}
			if n := stores[i].calls.Load(); n != 0 {
				t.Errorf("%s has asked the registry %d times", m.ID(), n)
			}
		}
		for _, m := range members {
			go m.cancel()
		}
		for _, m := range members {
			m.leave()
		}
		a.nothingLeft()
	})
}

// A member whose claims fail for a minute, many times longer than four attempts, has its share soon after, without any
// other event; meanwhile it is registered and says what is wrong.
func TestF04(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		a.topic("t", 2)
		st := &refusing{Store: a.st, prefix: a.group.Owners()}
		st.on.Store(true)
		m := a.join(membership.Config{ID: "c1", Store: st}, nil)
		time.Sleep(time.Minute)
		if a.owners() != "" || len(a.list(a.group.ID("c1"))) != 1 || !a.says("claim failed, trying again") {
			t.Errorf("owned: %q; registered: %d", a.owners(), len(a.list(a.group.ID("c1"))))
		}
		st.on.Store(false)
		a.ownedAs(5*time.Second, "t/0:c1-0 t/1:c1-0")
		m.leave()
		a.nothingLeft()
	})
}

// Claims of which some are refused, as by a role that may not write them: no owner key
// stands that nobody works for, and another member gets its share and then all.
func TestF09(t *testing.T) {
	for name, c := range map[string]struct {
		partitions int32
		prefix     string // that is refused
		after      int64  // so many transactions
	}{
		"some in one transaction": {4, "u/", 0},
		"the second transaction":  {300, "", 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newArena(t)
				a.topic("t", c.partitions)
				a.topic("u", c.partitions)
				both := membership.Subscription{Topics: map[string]int32{"t": 1, "u": 1}}
				st := &refusing{Store: a.st, prefix: a.group.Owners() + c.prefix}
				st.after.Store(c.after)
				st.on.Store(true)
				m := a.join(membership.Config{ID: "c1", Store: st, Subscription: both}, nil)
				time.Sleep(10 * time.Second)
				if n := len(a.list(a.group.Owners())); st.denied.Load() == 0 || n == 0 != (c.after == 0) {
					t.Fatalf("%d refused, %d owned", st.denied.Load(), n)
				}
				for _, kv := range a.list(a.group.Owners()) {
					p, err := a.group.ParsePartition(kv.Key)
					a.must(err)
					if o := a.holder[p]; o == nil || !o.Alive() || o.Token != kv.CreateRevision {
						t.Errorf("%s is owned and nobody works for it", p)
					}
				}
				other := a.join(membership.Config{ID: "c2", Subscription: both}, nil)
				count := func(id string) int { return strings.Count(a.owners(), ":"+id+"-0") }
				time.Sleep(10 * time.Second)
				if n := count("c2"); n != int(c.partitions) {
					t.Errorf("the other owns %d of %d partitions", n, c.partitions)
				}
				m.leave()
				time.Sleep(time.Second)
				if n := count("c2"); n != 2*int(c.partitions) {
					t.Errorf("alone the other owns %d of %d partitions", n, 2*c.partitions)
				}
				other.leave()
				a.nothingLeft()
			})
		})
	}
}

// An owner key that names this very thread under another lease, as of a former
// session, is not its own: it is waited for.
func TestF11(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		a.topic("t", 1)
		lease, err := a.st.Grant(t.Context(), 30*time.Second)
		a.must(err)
		a.write(registry.Put(a.group.Owner(registry.Partition{Topic: "t", Home: 1}), []byte("c1-0"), lease.ID))
		m := a.join(membership.Config{ID: "c1"}, nil)
		time.Sleep(29 * time.Second)
		if got := m.story(); got != "" {
			t.Errorf("told: %s", got)
		}
		time.Sleep(2 * time.Second)
		if got := m.story(); got != "begin 0" {
			t.Errorf("when the key was gone, told: %s", got)
		}
		m.leave()
		a.nothingLeft()
	})
}

// A member that is stopped while a rebalance does not come to its end, because a
// holder hangs or because claims fail, leaves at once.
func TestF32(t *testing.T) {
	for _, why := range []string{"a holder hangs", "claims fail"} {
		t.Run(why, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newArena(t)
				a.topic("t", 2)
				hang := make(chan struct{})
				holder := a.join(membership.Config{ID: "c1"}, func(*membership.Ownership) bool {
					<-hang
					return true
				})
				a.ownedAs(time.Second, "t/0:c1-0 t/1:c1-0")
				st := &refusing{Store: a.st, prefix: a.group.Owners()}
				st.on.Store(why == "claims fail")
				m := a.join(membership.Config{ID: "c2", Store: st}, nil)
				time.Sleep(10 * time.Second)
				began := time.Now()
				m.leave()
				if took := time.Since(began); took > 10*time.Millisecond {
					t.Errorf("left after %s", took)
				}
				close(hang)
				holder.leave()
				a.nothingLeft()
			})
		})
	}
}
