package membership_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/rebalance/membership"
	"github.com/muster-io/muster/registry"
)

// history is what the group's history tells, in order.
func (a *arena) history() []registry.HistoryEntry {
	a.t.Helper()
	list, bad, err := registry.ReadHistory(context.Background(), a.st, a.group)
	a.must(errors.Join(append(bad, err)...))
	return list
}

// History tells who claimed and who released what, from the snapshot that it was
// computed from, at the revision at which it happened.
func TestHistory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		a.topic("t", 2)
		c1 := a.join(membership.Config{ID: "c1"}, nil)
		a.ownedAs(time.Second, "t/0:c1-0 t/1:c1-0")
		c2 := a.join(membership.Config{ID: "c2"}, nil)
		a.ownedAs(time.Second, "t/0:c1-0 t/1:c2-0")
		for _, kv := range a.list(a.group.Owners()) {
			if !slices.ContainsFunc(a.history(), func(e registry.HistoryEntry) bool {
				return e.Revision == kv.CreateRevision && e.Action == registry.ActionClaimed && strings.HasPrefix(string(kv.Value), e.Member+"-")
			}) {
				t.Errorf("history does not tell of %s, claimed at %d", kv.Key, kv.CreateRevision)
			}
		}
		c1.leave()
		a.ownedAs(time.Second, "t/0:c2-0 t/1:c2-0")
		c2.leave()
		var told []string
		for _, e := range a.history() {
			told = append(told, fmt.Sprint(e.Member, " ", e.Action, " ", e.Partitions["t"]))
			if e.Strategy != rebalance.StrategyRange || e.Snapshot <= 0 || e.Snapshot >= e.Revision {
				t.Errorf("strategy %s, snapshot %d at revision %d", e.Strategy, e.Snapshot, e.Revision)
			}
		}
		slices.Sort(told[max(len(told)-2, 0):]) // c2 has both drained at once, whichever is first
		if got := strings.Join(told, ", "); got != "c1 claimed [1-0 1-1], c1 released [1-1], c2 claimed [1-1], c1 released [1-0], c2 claimed [1-0], c2 released [1-0], c2 released [1-1]" {
			t.Errorf("history: %s", got)
		}
		a.nothingLeft()
	})
}

// History does not grow without end.
func TestHistoryIsPruned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		a.topic("t", 1)
		for i := range 1200 {
			a.write(registry.Put(a.group.HistoryEntry(int64(i), "x", 1), []byte("{}"), 0))
		}
		m := a.join(membership.Config{ID: "c1"}, nil)
		key := a.group.Owner(registry.Partition{Topic: "t", Home: 1})
		for range 101 {
			a.ownedAs(time.Second, "t/0:c1-0")
			a.write(registry.Delete(key))
		}
		a.ownedAs(time.Second, "t/0:c1-0")
		m.leave()
		if n := len(a.list(a.group.History())); n < 1000 || n > 1110 {
			t.Errorf("%d entries are left", n)
		}
	})
}

// A member that would break the precondition of roundrobin does not join, and says
// what differs; nothing of it was seen by the others.
func TestRoundRobinRefusesToJoin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		a.topic("t", 2)
		a.topic("u", 2)
		robin := []string{rebalance.StrategyRoundRobin, rebalance.StrategyRange}
		c1 := a.join(membership.Config{ID: "c1", Strategies: robin}, nil)
		a.ownedAs(time.Second, "t/0:c1-0 t/1:c1-0")
		before := a.st.Revision()
		other := a.join(membership.Config{ID: "c2", Strategies: robin, Subscription: membership.Subscription{Topics: map[string]int32{"u": 1}}}, nil)
		<-other.done
		if !errors.Is(other.err, rebalance.ErrNotUniform) || !strings.Contains(fmt.Sprint(other.err), "c2") {
			t.Errorf("ended with %v", other.err)
		}
		if now := a.st.Revision(); now != before {
			t.Errorf("revision %d, before %d", now, before)
		}
		// The same topics, or a strategy that divides any group, will do.
		c3 := a.join(membership.Config{ID: "c3", Strategies: robin}, nil)
		c4 := a.join(membership.Config{ID: "c4", Strategies: robin[1:], Subscription: membership.Subscription{Topics: map[string]int32{"u": 1}}}, nil)
		a.ownedAs(time.Second, "t/0:c1-0 t/1:c3-0 u/0:c4-0 u/1:c4-0")
		for _, m := range []*member{c1, c3, c4} {
			m.leave()
		}
		a.nothingLeft()
	})
}

// The registration of a member with a filter is what 0.8 clients write and read.
func TestRegistrationWithAFilter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		for i, sub := range []membership.Subscription{
			{Pattern: registry.PatternWhiteList, Filter: "t.*,u", Streams: 3},
			{Pattern: registry.PatternBlackList, Filter: "t", Streams: 1, IncludeInternal: true},
		} {
			m := a.join(membership.Config{ID: "c", Strategies: []string{"sticky", "range"}, Subscription: sub}, nil)
			synctest.Wait()
			rec, err := registry.ParseConsumer(a.list(a.group.ID("c"))[0])
			a.must(err)
			exclude := rec.ExcludeInternalTopics == nil || *rec.ExcludeInternalTopics
			if rec.Pattern != sub.Pattern || len(rec.Subscription) != 1 || rec.Subscription[sub.Filter] != sub.Streams || exclude == sub.IncludeInternal ||
				strings.Join(rec.Strategy, " ") != "sticky range" {
				t.Errorf("%d: registered as %+v", i, rec)
			}
			m.leave()
		}
		a.nothingLeft()
	})
}

// Many members of a group share one view; each takes its own share, also after one
// of them has lost its session.
func TestSharedView(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		a.topic("t", 30)
		view, err := membership.OpenView(t.Context(), a.st, a.root, "g", registry.ViewOptions{})
		a.must(err)
		var members []*member
		var want []string
		for i := range 30 {
			members = append(members, a.join(membership.Config{ID: fmt.Sprintf("c%02d", i), View: view}, nil))
			want = append(want, fmt.Sprintf("t/%d:c%02d-0", i, i))
		}
		a.ownedAs(5*time.Second, strings.Join(want, " "))
		a.st.Expire(a.list(a.group.ID("c07"))[0].Lease)
		time.Sleep(5 * time.Second)
		a.ownedAs(5*time.Second, strings.Join(want, " "))
		for _, m := range members {
			go m.cancel()
		}
		for _, m := range members {
			m.leave()
		}
		a.nothingLeft()
		view.Close()
	})
}

// reasons are those of the entries of history, in order and without repetitions.
func (a *arena) reasons() string {
	a.t.Helper()
	var list []string
	for _, e := range a.history() {
		list = append(list, fmt.Sprintf("%s %s: %s", e.Member, e.Action, e.Reason))
	}
	return strings.Join(slices.Compact(list), "; ")
}

// In a group that is sticky members follow its target record: one that comes gets its
// share, and nothing else moves; what one that leaves had is shared by the others.
func TestSticky(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		a.topic("t", 6)
		sticky := membership.Config{Strategies: []string{rebalance.StrategySticky, rebalance.StrategyRange}}
		join := func(id string) *member {
			cfg := sticky
			cfg.ID = id
			return a.join(cfg, nil)
		}
		c1, c2 := join("c1"), join("c2")
		synctest.Wait()
		time.Sleep(time.Second)
		count := func() map[string]int {
			n := map[string]int{}
			for _, kv := range a.list(a.group.Owners()) {
				n[string(kv.Value)]++
			}
			return n
		}
		if got := fmt.Sprint(count()); got != "map[c1-0:3 c2-0:3]" {
			t.Fatalf("owned: %s", got)
		}
		c1.story()
		c2.story()
		c3 := join("c3")
		time.Sleep(time.Second)
		if got := fmt.Sprint(count()); got != "map[c1-0:2 c2-0:2 c3-0:2]" {
			t.Fatalf("owned: %s", got)
		}
		for _, m := range []*member{c1, c2} {
			if got := m.story(); strings.Contains(got, "begin") || strings.Count(got, "revoked") != 1 {
				t.Errorf("%s was told: %s", m.ID(), got)
			}
		}
		record := a.list(a.group.Target())
		if len(record) != 1 {
			t.Fatal("there is no target record")
		}
		target, err := rebalance.ReadTarget(record[0])
		a.must(err)
		for p, owner := range target.Assignment.All() {
			if kv := a.list(a.group.Owner(p)); len(kv) != 1 || string(kv[0].Value) != owner {
				t.Errorf("%s is due to %s and owned by %v", p, owner, kv)
			}
		}
		c2.leave()
		time.Sleep(time.Second)
		if got := fmt.Sprint(count()); got != "map[c1-0:3 c3-0:3]" {
			t.Errorf("owned: %s", got)
		}
		if got := a.reasons(); !strings.Contains(got, "c3 joined") || !strings.Contains(got, "c2 left") || !strings.Contains(got, "c2 released: leaving") {
			t.Errorf("reasons: %s", got)
		}
		c1.leave()
		c3.leave()
		a.nothingLeft()
	})
}

// A filter is expanded anew as topics come and go; internal topics are not in it.
func TestFilterFollowsTopics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		a.topic("u", 1)
		a.topic("x", 1)
		sub := membership.Subscription{Pattern: registry.PatternWhiteList, Filter: "t.*,u,__.*", Streams: 1}
		m := a.join(membership.Config{ID: "c", Subscription: sub}, nil)
		a.ownedAs(time.Second, "u/0:c-0")
		a.topic("t1", 2)
		a.topic("__consumer_offsets", 1)
		a.ownedAs(time.Second, "t1/0:c-0 t1/1:c-0 u/0:c-0")
		_, err := registry.DeleteTopic(t.Context(), a.st, a.root, "t1", registry.DeleteOptions{})
		a.must(err)
		a.ownedAs(time.Second, "u/0:c-0")
		m.leave()
		a.nothingLeft()
		time.Sleep(10 * time.Second) // the clock of package regexp2 stops when nothing is matched
	})
}

// A group that roundrobin cannot divide stays as it is, and says why, until it can.
func TestRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		a.topic("t", 2)
		told := make(chan string, 10)
		m := a.join(membership.Config{ID: "c1", Strategies: []string{rebalance.StrategyRoundRobin},
			Listener: membership.Listener{Refused: func(reason string) { told <- reason }}}, nil)
		a.ownedAs(time.Second, "t/0:c1-0 t/1:c1-0")
		// One that does not ask first.
		value, err := registry.Encode(registry.ConsumerRecord{Version: 1, Subscription: map[string]int32{"u": 1},
			Pattern: registry.PatternStatic, Strategy: []string{rebalance.StrategyRoundRobin}})
		a.must(err)
		a.write(registry.Put(a.group.ID("c2"), value, a.list(a.group.ID("c1"))[0].Lease))
		time.Sleep(time.Second)
		a.ownedAs(0, "t/0:c1-0 t/1:c1-0")
		if got := <-told; !strings.Contains(got, rebalance.ErrNotUniform.Error()) || !a.says("the group cannot be divided") {
			t.Errorf("refused for: %s", got)
		}
		a.write(registry.Delete(a.group.ID("c2")))
		if got := <-told; got != "" {
			t.Errorf("still refused: %s", got)
		}
		m.leave()
		a.nothingLeft()
	})
}

// misnamed puts, before the first claim of a partition, the owner key of another
// stream of the claimer: what an earlier claim may have left whose reply was lost.
type misnamed struct {
	registry.Store
	prefix string
	done   bool
}

func (s *misnamed) Txn(ctx context.Context, t registry.Txn) (registry.TxnResult, error) {
	if len(t.Then) > 0 && t.Then[0].Kind == registry.OpPut && strings.HasPrefix(t.Then[0].Key, s.prefix) && !s.done {
		s.done = true
		put := t.Then[0]
		if _, err := s.Store.Txn(ctx, registry.Txn{Then: []registry.Op{registry.Put(put.Key, []byte("c1-7"), put.Lease)}}); err != nil {
			return registry.TxnResult{}, err
		}
	}
	return s.Store.Txn(ctx, t)
}

// An owner key of ours that names another stream is not taken for the one that is due.
func TestOwnKeyOfAnotherStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		a.topic("t", 1)
		m := a.join(membership.Config{ID: "c1", Store: &misnamed{Store: a.st, prefix: a.group.Owners()}}, nil)
		a.ownedAs(time.Second, "t/0:c1-0")
		if got := m.story(); got != "begin 0" {
			t.Errorf("told: %s", got)
		}
		m.leave()
		a.nothingLeft()
	})
}

// A member whose id another process takes while it is registered gives up what it
// owns, for the group counts the other, and is back if that goes soon; but it ends if
// that lives on.
func TestIDTakenLater(t *testing.T) {
	for name, back := range map[string]bool{"the other goes soon": true, "the other lives on": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newArena(t)
				a.topic("t", 1)
				m := a.join(membership.Config{ID: "c1"}, nil)
				a.ownedAs(time.Second, "t/0:c1-0")
				thief, err := registry.OpenSession(t.Context(), a.st, registry.SessionOptions{})
				a.must(err)
				mine := a.list(a.group.ID("c1"))[0]
				a.write(registry.Delete(mine.Key))
				a.write(registry.Put(mine.Key, mine.Value, thief.Lease()))
				a.ownedAs(time.Second, "")
				if got := m.story(); got != "begin 0, lost 0: session lost" {
					t.Errorf("told: %s", got)
				}
				if !back {
					<-m.done
					if _, held := errors.AsType[*registry.HeldError](m.err); !held {
						t.Errorf("it ends with %v", m.err)
					}
					a.must(thief.Close(context.Background()))
					a.nothingLeft()
					return
				}
				a.must(thief.Close(t.Context()))
				a.ownedAs(5*time.Second, "t/0:c1-0")
				m.leave()
				a.nothingLeft()
			})
		})
	}
}

// A member that leaves does so in order, also when it finds by then that another
// process has its id.
func TestIDTakenWhileLeaving(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		a.topic("t", 1)
		way := &cable{Store: a.st}
		finish := make(chan struct{})
		m := a.join(membership.Config{ID: "c1", Store: way}, func(*membership.Ownership) bool { <-finish; return true })
		a.ownedAs(time.Second, "t/0:c1-0")
		thief, err := registry.OpenSession(t.Context(), a.st, registry.SessionOptions{})
		a.must(err)
		mine := a.list(a.group.ID("c1"))[0]
		way.cut.Store(true)
		a.write(registry.Delete(mine.Key))
		a.write(registry.Put(mine.Key, mine.Value, thief.Lease()))
		synctest.Wait() // it registers again, and gets no answer
		way.cut.Store(false)
		m.cancel()
		time.Sleep(10 * time.Second)
		if !a.says("another process has this consumer id") {
			t.Error("it has not found out")
		}
		close(finish)
		<-m.done
		if got := m.story(); got != "begin 0, revoked 0" {
			t.Errorf("told: %s", got)
		}
		a.must(thief.Close(t.Context()))
		a.nothingLeft()
	})
}

// A member registers when it sees at once what follows; while the store brings it
// nothing it waits a moment, and no longer.
func TestRegistersWhenItsViewIsUpToDate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		a.topic("t", 1)
		registered := func(began time.Time) time.Duration {
			for len(a.list(a.group.IDs())) == 0 && time.Since(began) < time.Second {
				time.Sleep(5 * time.Millisecond)
			}
			return time.Since(began)
		}
		began := time.Now()
		a.st.HoldWatches(true)
		m := a.join(membership.Config{ID: "c1"}, nil)
		if took := registered(began); took < 100*time.Millisecond || took > 200*time.Millisecond {
			t.Errorf("registered after %s, and its watches said nothing", took)
		}
		a.st.HoldWatches(false)
		a.ownedAs(time.Second, "t/0:c1-0")
		m.leave()

		began = time.Now()
		m = a.join(membership.Config{ID: "c2"}, nil)
		if took := registered(began); took > 50*time.Millisecond {
			t.Errorf("registered after %s", took)
		}
		m.leave()
		a.nothingLeft()
	})
}
