package registry

import "time"

// renewal decides when a lease is renewed and when its session is dead. It has
// no clock and no stream: the time and what happened go in, what to do comes
// out. It is the machine behind Session.
//
// Its invariant: deadline = (time at which the renewal that was answered last was
// *sent*) + (time to live in that answer) - margin. The store counts from a moment
// after the sending, so the deadline is always before the store's own expiry.
type renewal struct {
	deadline time.Duration
	ttl      time.Duration
	renewed  time.Duration // when the request that was answered last was sent
	stalled  bool          // a renewal is overdue
	sentAt   time.Duration // of the request under way
	waiting  bool          // for the answer to the request under way
	open     bool          // a stream is there
	nextSend time.Duration
	backoff  time.Duration
}

const (
	// maxUnanswered requests are under way at a time: a second one before the
	// first is answered would prove nothing more.
	maxUnanswered = 1

	// The session dies this much before the store would let it: the larger of a
	// tenth of the time to live, for clocks that run at different speed, and
	// minMargin, for what the process is in the middle of.
	minMargin    = 200 * time.Millisecond
	marginShare  = 10
	renewalShare = 3 // a renewal every third of the time to live: two may fail

	// A renewal is overdue when half of the time to live has passed since the last:
	// the answer has then taken a sixth of it, and there is time left to act.
	stallShare = 2

	// A request that was sent less than checkPause ago is a check already.
	checkPause = 200 * time.Millisecond

	// A broken stream is opened again after a pause that doubles.
	minReopenPause = 50 * time.Millisecond
	maxReopenPause = time.Second
)

type renewalInput struct {
	answered bool
	ttl      time.Duration // with answered
	broken   bool
	check    bool // renew at once, on a new stream
}

type renewalAction struct {
	lost    error // the session is over
	reopen  bool  // first open a new stream in place of the present one
	send    bool  // send a renewal now
	stalled bool  // a renewal has become overdue
	resumed bool  // the overdue renewal was answered after all
	wake    time.Duration
}

func newRenewal(sentAt, ttl time.Duration) *renewal {
	m := &renewal{ttl: ttl, renewed: sentAt, backoff: minReopenPause}
	m.deadline = sentAt + ttl - margin(ttl)
	m.nextSend = sentAt + ttl/renewalShare
	return m
}

func margin(ttl time.Duration) time.Duration { return max(ttl/marginShare, minMargin) }

// step takes what happened up to now; without an input it is a tick.
func (m *renewal) step(now time.Duration, in renewalInput) renewalAction {
	// The deadline is looked at before anything else: whoever wakes up past it is
	// dead, even if an answer waits in the socket that would have moved it, and
	// even if the store would still renew the lease.
	if now >= m.deadline {
		return renewalAction{lost: ErrSessionExpired}
	}
	var act renewalAction
	switch {
	case in.answered && m.waiting:
		m.waiting = false
		if in.ttl <= 0 {
			return renewalAction{lost: ErrLeaseGone}
		}
		m.ttl, m.renewed = in.ttl, m.sentAt
		act.resumed, m.stalled = m.stalled, false
		m.deadline = max(m.deadline, m.sentAt+in.ttl-margin(in.ttl))
		m.nextSend = m.sentAt + in.ttl/renewalShare
		m.backoff = minReopenPause
	case in.broken:
		m.open, m.waiting = false, false
		m.nextSend = now + m.backoff
		m.backoff = min(2*m.backoff, maxReopenPause)
	case in.check && now >= m.sentAt+checkPause:
		m.open, m.waiting = false, false
		m.nextSend = now
	}
	if m.waiting && now >= m.sentAt+m.ttl/renewalShare {
		// The answer is overdue: another stream may reach another member.
		m.open, m.waiting = false, false
		m.nextSend = now
	}
	if !m.waiting && now >= m.nextSend {
		act.reopen = !m.open
		act.send = true
		m.open, m.waiting, m.sentAt = true, true, now
	}
	next := m.nextSend
	if m.waiting {
		next = m.sentAt + m.ttl/renewalShare
	}
	if overdue := m.renewed + m.ttl/stallShare; !m.stalled {
		if act.stalled = now >= overdue; act.stalled {
			m.stalled = true
		} else {
			next = min(next, overdue)
		}
	}
	act.wake = min(next, m.deadline) - now
	return act
}
