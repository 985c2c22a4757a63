package run

import (
	"fmt"
	"time"
)

// Policy says what is done about a child that ends by itself while its partition is owned.
type Policy string

const (
	// Restart starts it again, whatever its exit status.
	Restart Policy = "restart"
	// RestartOnFailure takes status 0 for "nothing more to do": the partition stays
	// owned, and nothing runs until somebody owns it anew.
	RestartOnFailure Policy = "restart-on-failure"
	// Stop ends the whole run in order, so that the partitions go to other members.
	Stop Policy = "stop"
)

// A child that ends is started again after a pause that doubles between these
// bounds; one that had run for longer than the longer bound begins anew.
const (
	minRestartPause = time.Second
	maxRestartPause = 30 * time.Second
)

// child decides about the process of one ownership. It does no I/O and reads no
// clock: step takes what has happened and returns what to do.
type child struct {
	policy Policy
	grace  time.Duration

	state   childState
	owned   bool          // neither revoked nor lost
	until   time.Duration // when the grace ends, or the pause
	began   time.Duration // of the process
	pause   time.Duration // the last one
	failure string        // how the process ended by itself; "" for status 0
	ownEnd  bool          // it ended by itself
}

type childState int

const (
	childWaiting childState = iota // for its turn: a former child of the partition may be left
	childUp                        // started, as far as is known
	childClosing                   // told to stop, or what its leader left behind is
	childKilling
	childPausing // to be started again at until
	childResting // nothing runs, and nothing will while it is owned
	childOver    // nothing runs, and the ownership is no more
)

// input is what happened to a child.
type input struct {
	kind    inputKind
	failure string // with inExited, how it failed; with inFailed, why it did not start
	ours    bool   // with inExited, inFailed, inGone: it was not the program's fault
	fatal   bool   // with inFailed: it would fail again
}

type inputKind int

const (
	inTurn   inputKind = iota // nothing is left of the partition's former child
	inFailed                  // it could not be started
	inExited                  // the process that was started has ended; others that it started may be left
	inGone                    // nothing of it is left
	inRevoke
	inLose
	inHurry // no more grace
	inTick
)

// order is what is to be done.
type order struct {
	start, term, kill bool
	stop              bool  // end the whole run
	err               error // with stop: why; nil if the child was done
}

func newChild(policy Policy, grace time.Duration) *child {
	return &child{policy: policy, grace: grace, owned: true}
}

// wake is when the next inTick is due.
func (c *child) wake() (at time.Duration, ok bool) {
	return c.until, c.state == childClosing || c.state == childPausing
}

func (c *child) step(now time.Duration, in input) order {
	switch in.kind {
	case inTurn:
		if c.state == childWaiting {
			return c.begin(now)
		}
	case inFailed:
		if c.running() {
			c.ownEnd, c.failure = !in.ours, in.failure
			return c.end(now, in.fatal)
		}
	case inExited:
		return c.exited(now, in)
	case inGone:
		if c.running() {
			c.ownEnd = c.ownEnd && !in.ours
			return c.end(now, false)
		}
	case inRevoke:
		return c.revoke(now)
	case inLose:
		c.owned = false
		if c.running() {
			return c.kill()
		}
		c.rest()
	case inHurry:
		if c.running() {
			return c.kill()
		}
	case inTick:
		switch {
		case c.state == childClosing && now >= c.until:
			return c.kill()
		case c.state == childPausing && now >= c.until:
			return c.begin(now)
		}
	}
	return order{}
}

// running tells whether anything of the child may run.
func (c *child) running() bool {
	return c.state == childUp || c.state == childClosing || c.state == childKilling
}

func (c *child) begin(now time.Duration) order {
	if !c.owned {
		c.state = childOver
		return order{}
	}
	c.state, c.began, c.ownEnd, c.failure = childUp, now, false, ""
	return order{start: true}
}

// exited has what the process left behind come to its end, too: work that goes on
// beside a child that is started again would be done twice.
func (c *child) exited(now time.Duration, in input) order {
	if c.state != childUp {
		return order{}
	}
	c.ownEnd, c.failure = !in.ours, in.failure
	c.state, c.until = childClosing, now+c.grace
	return order{term: true}
}

func (c *child) revoke(now time.Duration) order {
	c.owned = false
	if c.state == childUp {
		c.state, c.until = childClosing, now+c.grace
		return order{term: true}
	}
	c.rest()
	return order{}
}

// rest is for an ownership that ends while nothing of the child runs. One that waits
// for its turn goes on waiting: what runs may be a former child.
func (c *child) rest() {
	if c.state == childPausing || c.state == childResting {
		c.state = childOver
	}
}

func (c *child) kill() order {
	c.state = childKilling
	return order{kill: true} // again, if it was: it costs nothing
}

// end is when nothing of the child is left.
func (c *child) end(now time.Duration, fatal bool) order {
	switch {
	case !c.owned:
		c.state = childOver
		return order{}
	case fatal:
		c.state = childResting
		return order{stop: true, err: fmt.Errorf("it cannot be started: %s", c.failure)}
	case c.ownEnd && c.policy == Stop:
		c.state = childResting
		if c.failure != "" {
			return order{stop: true, err: fmt.Errorf("it ended: %s", c.failure)}
		}
		return order{stop: true}
	case c.ownEnd && c.policy == RestartOnFailure && c.failure == "":
		c.state = childResting
		return order{}
	}
	if now-c.began >= maxRestartPause || c.pause == 0 {
		c.pause = minRestartPause
	} else {
		c.pause = min(2*c.pause, maxRestartPause)
	}
	c.state, c.until = childPausing, now+c.pause
	return order{}
}
