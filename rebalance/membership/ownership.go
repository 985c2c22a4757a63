package membership

import (
	"context"
	"sync"
	"time"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// Ownership is one ownership of a partition, from claim to release or loss. A
// partition that is claimed again gets a new one. It may be used by any goroutine.
type Ownership struct {
	Partition registry.Partition
	Stream    int32
	// Token is the fencing token: it is larger for each later owner of the partition,
	// in whatever process.
	Token int64

	session *registry.Session
	ctx     context.Context
	cancel  context.CancelFunc
	revoked chan struct{}
	revokes sync.Once
	fenced  func()
}

// NewOwnership makes an ownership that hangs on a session, as a Membership does;
// revoke and end are what it does to it. It is there for tests of a Work.
func NewOwnership(s *registry.Session, w rebalance.Want, token int64, fenced func()) (o *Ownership, revoke, end func()) {
	o = newOwnership(s, w, token)
	o.fenced = fenced
	return o, o.revoke, o.cancel
}

func newOwnership(s *registry.Session, w rebalance.Want, token int64) *Ownership {
	o := &Ownership{Partition: w.Partition, Stream: w.Stream, Token: token, session: s, revoked: make(chan struct{})}
	o.ctx, o.cancel = s.Context(context.Background())
	return o
}

// Context ends with the ownership, whichever way that ends: not before Drain has
// returned where it is given up in order.
func (o *Ownership) Context() context.Context { return o.ctx }

// Alive tells whether the partition is owned at this moment. It is on the session's
// clock, so that a process that was stopped past its deadline is told no before
// any context has ended.
func (o *Ownership) Alive() bool { return o.ctx.Err() == nil && o.session.Alive() }

// Left is how long the partition stays owned if the session is not renewed any
// more, by the session's own deadline, which comes before the store's; 0 once it is
// not owned.
func (o *Ownership) Left() time.Duration {
	if o.ctx.Err() != nil {
		return 0
	}
	return o.session.Left()
}

// Revoked is closed when the partition is to be given up in order.
func (o *Ownership) Revoked() <-chan struct{} { return o.revoked }

// Fenced tells the member that a write under Token was refused: the owner key is
// not this ownership's any more. Work.Lost follows. It waits until the member has
// taken note, and so must not be called by what the member calls, but for Drain.
func (o *Ownership) Fenced() { o.fenced() }

func (o *Ownership) revoke() { o.revokes.Do(func() { close(o.revoked) }) }
