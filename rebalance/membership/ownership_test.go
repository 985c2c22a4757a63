package membership

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

// stopped is the store of a process that was stopped: time has passed, and no timer
// has fired yet.
type stopped struct {
	registry.Store
	ahead atomic.Int64
}

func (s *stopped) Now() time.Duration { return s.Store.Now() + time.Duration(s.ahead.Load()) }

// A process that was stopped past its deadline does not take a partition for its own,
// though no context has ended yet; and one that lost it alone has no time left.
func TestOwnershipPastTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := &stopped{Store: memory.New()}
		s, err := registry.OpenSession(t.Context(), st, registry.SessionOptions{})
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := s.Close(context.Background()); err != nil {
				t.Error(err)
			}
		}()
		synctest.Wait()
		lost, _, end := NewOwnership(s, rebalance.Want{Partition: p0}, 1, nil)
		o, _, _ := NewOwnership(s, rebalance.Want{Partition: p0}, 2, nil)
		end()
		if lost.Alive() || lost.Left() != 0 {
			t.Errorf("alive %v, %s left of what was lost", lost.Alive(), lost.Left())
		}
		if !o.Alive() || o.Left() <= 0 {
			t.Errorf("alive %v, %s left of what is owned", o.Alive(), o.Left())
		}
		st.ahead.Store(int64(time.Hour))
		if o.Alive() || o.Left() != 0 {
			t.Errorf("alive %v, %s left past the deadline", o.Alive(), o.Left())
		}
	})
}
