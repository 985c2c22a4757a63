package membership_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/rebalance/membership"
)

// How a member stands is answered at any time; only a loop that hangs has no answer.
func TestStanding(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		a.topic("t", 4)
		standing := func(m *membership.Membership) membership.Standing {
			t.Helper()
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			s, err := m.Standing(ctx)
			a.must(err)
			return s
		}
		hang := make(chan struct{})
		idle, err := membership.New(membership.Config{Store: a.st, Group: "g", Subscription: membership.Subscription{Topics: map[string]int32{"t": 1}}})
		a.must(err)
		if s := standing(idle); s != (membership.Standing{}) {
			t.Errorf("before Run: %+v", s)
		}
		m := a.join(membership.Config{ID: "c1"}, nil)
		a.ownedAs(time.Second, "t/0:c1-0 t/1:c1-0 t/2:c1-0 t/3:c1-0")
		synctest.Wait()
		if s := standing(m.Membership); !s.Registered || s.Owned != 4 || s.Left <= 0 || s.Left > 6*time.Second {
			t.Errorf("at work: %+v", s)
		}
		m.leave()
		if s := standing(m.Membership); s != (membership.Standing{}) {
			t.Errorf("after Run: %+v", s)
		}
		stuck := a.join(membership.Config{ID: "c2", Listener: membership.Listener{Rebalanced: func(rebalance.Rebalanced) { <-hang }}}, nil)
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if s, err := stuck.Standing(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("while it hangs: %+v, error %v", s, err)
		}
		close(hang)
		a.ownedAs(time.Second, "t/0:c2-0 t/1:c2-0 t/2:c2-0 t/3:c2-0")
		if s := standing(stuck.Membership); !s.Registered {
			t.Errorf("it has come round: %+v", s)
		}
		stuck.leave()
	})
}
