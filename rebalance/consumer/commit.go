package consumer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/muster-io/muster/offsets"
)

// committer writes what handlers have finished: every CommitInterval for all
// deliveries, and a last time for one that is given up. One goroutine does all of
// it, so that commits of a partition never overtake each other.
type committer struct {
	d      *driver
	asks   chan lastCommit
	orders chan *order
}

// commitPause is how long a last commit waits before it is tried again.
const commitPause = 100 * time.Millisecond

type lastCommit struct {
	o    *delivery
	done chan bool
}

func newCommitter(d *driver) *committer {
	return &committer{d: d, asks: make(chan lastCommit), orders: make(chan *order)}
}

func (c *committer) run() {
	tick := time.NewTicker(c.d.c.cfg.CommitInterval)
	defer tick.Stop()
	ticks := tick.C
	if c.d.c.cfg.ManualCommit {
		ticks = nil
	}
	var waiting []lastCommit // last commits that have not come through yet
	for {
		var retry <-chan time.Time
		if len(waiting) > 0 {
			retry = time.After(commitPause)
		}
		select {
		case <-c.d.ctx.Done():
			for _, w := range waiting {
				w.done <- false
			}
			return
		case o := <-c.orders:
			c.carryOut(o)
		case <-ticks:
			c.commit(c.d.table.all())
			waiting = c.settle(waiting) // the tick may come faster than the retry
		case ask := <-c.asks:
			waiting = c.settle(c.gather(append(waiting, ask)))
		case <-retry:
			waiting = c.settle(waiting)
		}
	}
}

// gather takes what else waits, so that partitions that are given up together
// are committed together.
func (c *committer) gather(list []lastCommit) []lastCommit {
	for {
		select {
		case ask := <-c.asks:
			list = append(list, ask)
		default:
			return list
		}
	}
}

// settle commits for deliveries that have ended, and answers those that are
// through; it returns the rest.
func (c *committer) settle(list []lastCommit) (rest []lastCommit) {
	if len(list) == 0 {
		return nil
	}
	deliveries := make([]*delivery, len(list))
	for i, w := range list {
		deliveries[i] = w.o
	}
	c.commit(deliveries)
	for _, w := range list {
		switch {
		case !w.o.Alive():
			w.done <- false
		case w.o.dirty():
			rest = append(rest, w)
		default:
			w.done <- true
		}
	}
	return rest
}

// last commits what a delivery has finished, whose worker has ended, and tries
// again until that is stored; false if ownership is over before.
func (c *committer) last(o *delivery) bool {
	ask := lastCommit{o, make(chan bool, 1)}
	select {
	case c.asks <- ask:
	case <-c.d.ctx.Done():
		return false
	}
	return <-ask.done
}

// dirty tells whether something else is finished than committed. What the
// application had committed stands until it finishes more.
func (o *delivery) dirty() bool {
	next := o.next.Load()
	return next != offsets.None && next != o.committed.Offset && next != o.ordered
}

// commit makes one attempt for those that need it and are still owned.
func (c *committer) commit(list []*delivery) {
	var commits []offsets.Commit
	var owners []*delivery
	for _, o := range list {
		if o.Alive() && o.dirty() {
			owners = append(owners, o)
			commits = append(commits, offsets.Commit{Partition: o.Partition, Offset: o.next.Load(), Token: o.Token, Previous: o.committed.Revision})
		}
	}
	if len(commits) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(c.d.ctx, callLimit)
	defer cancel()
	outcomes, err := c.d.offsets.Commit(ctx, commits)
	if err != nil && c.d.ctx.Err() == nil {
		c.d.log.Warn("commit failed, trying again", "partitions", len(commits)-len(outcomes), "error", err)
	}
	for i, out := range outcomes {
		c.enter(owners[i], commits[i], out)
	}
}

func (c *committer) enter(o *delivery, commit offsets.Commit, out offsets.Outcome) {
	log := c.d.log.With("topic", o.Partition.Topic, "partition", o.Partition.Name(), "offset", commit.Offset)
	switch {
	case out.Stored:
		o.committed, o.ordered = out.Now, offsets.None
		if f := c.d.c.cfg.Listener.Committed; f != nil {
			f(o.Partition, commit.Offset)
		}
	case out.Fenced:
		log.Warn("commit was fenced", "token", o.Token)
		o.Fenced()
	case out.Now.Offset == commit.Offset:
		o.committed = out.Now // an earlier attempt, whose reply was lost
	default:
		// Our own earlier attempt, or a writer that asks for no leave, such as a 0.8
		// tool. The owner's word counts; the next attempt is made from here.
		if out.Now.Offset != o.committed.Offset {
			log.Warn("somebody else wrote this offset; writing ours again", "theirs", out.Now.Offset, "rev", out.Now.Revision)
		}
		o.committed.Revision = out.Now.Revision
	}
}

// order is a commit that the application asked for.
type order struct {
	list []orderedOffset
	done chan struct{} // closed when all have their answer
}

type orderedOffset struct {
	o      *delivery
	offset int64
	err    error
}

// orderTries bounds how often an order is written again after another writer.
const orderTries = 3

var errOverwritten = errors.New("somebody else writes the offset all the time")

// carryOut makes one attempt to commit what was ordered.
func (c *committer) carryOut(ord *order) {
	defer close(ord.done)
	left := make([]*orderedOffset, len(ord.list))
	for i := range ord.list {
		left[i] = &ord.list[i]
	}
	for range orderTries {
		if left = c.orderOnce(left); len(left) == 0 {
			return
		}
	}
	for _, l := range left {
		l.err = errOverwritten
	}
}

// orderOnce returns those that have to be written again.
func (c *committer) orderOnce(list []*orderedOffset) (again []*orderedOffset) {
	var commits []offsets.Commit
	var alive []*orderedOffset
	for _, l := range list {
		if !l.o.Alive() {
			l.err = ErrNotOwned
			continue
		}
		alive = append(alive, l)
		commits = append(commits, offsets.Commit{Partition: l.o.Partition, Offset: l.offset, Token: l.o.Token, Previous: l.o.committed.Revision})
	}
	if len(commits) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(c.d.ctx, callLimit)
	defer cancel()
	outcomes, err := c.d.offsets.Commit(ctx, commits)
	for i, l := range alive {
		if i >= len(outcomes) {
			l.err = fmt.Errorf("commit %s: %w", l.o.Partition, err)
			continue
		}
		out := outcomes[i]
		next := l.o.next.Load()
		c.enter(l.o, commits[i], out)
		switch {
		case out.Fenced:
			l.err = ErrNotOwned
		case out.Stored, out.Now.Offset == l.offset:
			l.o.ordered = next
			if !c.d.c.cfg.ManualCommit {
				l.o.finishBelow(l.offset)
			}
		default:
			again = append(again, l)
		}
	}
	return again
}
