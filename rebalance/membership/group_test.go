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
