package consumer

import (
	"context"
	"time"

	"github.com/muster-io/muster/offsets"
)

// committer writes what handlers have finished: every CommitInterval for all
// deliveries, and a last time for one that is given up. One goroutine does all of
// it, so that commits of a partition never overtake each other.
type committer struct {
	d    *driver
	asks chan lastCommit
}

// commitPause is how long a last commit waits before it is tried again.
const commitPause = 100 * time.Millisecond

type lastCommit struct {
	o    *delivery
	done chan bool
}

func newCommitter(d *driver) *committer {
	return &committer{d: d, asks: make(chan lastCommit)}
}

func (c *committer) run() {
	tick := time.NewTicker(c.d.c.cfg.CommitInterval)
	defer tick.Stop()
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
		case <-tick.C:
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

// dirty tells whether more is finished than committed.
func (o *delivery) dirty() bool {
	next := o.next.Load()
	return next != offsets.None && next != o.committed.Offset
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
		o.committed = out.Now
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
