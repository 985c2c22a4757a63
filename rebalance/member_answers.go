package rebalance

import (
	"time"

	"github.com/muster-io/muster/registry"
)

// Claims and releases whose outcome is unknown are repeated after a pause that
// doubles between these bounds.
const (
	minRetryPause = 50 * time.Millisecond
	maxRetryPause = 2 * time.Second
)

// A claim that was stale is made again at once from a newer snapshot. If that one
// was stale too, many members are at it, and each further claim waits for a pause
// that doubles from this to longestPause.
const minHerdPause = 5 * time.Millisecond

func (m *Member) claimAnswered(now time.Duration, e ClaimAnswered) []Action {
	c := m.claim
	if c == nil || c.Number != e.Number {
		return nil
	}
	m.claim = nil
	var out []Action
	for i, w := range c.Wants {
		pt := m.parts[w.Partition]
		m.touch(w.Partition)
		if i < len(e.Outcomes) {
			out = append(out, m.outcome(w, pt, e.Revision, e.Outcomes[i])...)
			continue
		}
		if pt.news != nil && pt.news.Exists && pt.news.Mine {
			pt.doubt = true
		}
		pt.state, pt.news = idle, nil
		if e.Stale && m.off.Recompute {
			pt.state = waiting
		}
		if e.Unknown && !m.off.Doubt {
			pt.suspect, pt.doubt, pt.token = true, true, 0
			out = append(out, m.watch(w.Partition, pt, max(pt.seen, c.Snapshot))...)
		}
	}
	switch {
	case e.Stale:
		m.stale(now, c)
	case e.Unknown:
		m.pause(now)
	default:
		m.retrying, m.stales = minRetryPause, 0
	}
	return out
}

// stale sets when the next claim may be sent.
func (m *Member) stale(now time.Duration, c *Claim) {
	m.stales++
	if m.snapshot.Revision == c.Snapshot {
		m.pause(now) // a newer snapshot ends this
	}
	if m.stales > 1 {
		m.claimAt = now + min(minHerdPause<<min(m.stales-2, 10), longestPause(len(m.snapshot.Members)))
	}
}

// outcome enters what became of one claim.
func (m *Member) outcome(w Want, pt *part, last int64, o ClaimOutcome) []Action {
	revision := last
	if o.Revision != 0 {
		revision = o.Revision
	}
	pt.seen, pt.doubt = max(pt.seen, revision), false
	from := pt.seen
	if m.off.WatchFrom {
		from = max(from, last)
	}
	out := m.watch(w.Partition, pt, from)
	pt.token, pt.holder = o.Token, o.Holder
	news := pt.news
	pt.news = nil
	stream, due := m.share[w.Partition]
	switch overtaken := news != nil && news.Revision > revision && (!news.Exists || news.Token != o.Token); {
	case overtaken && news.Mine:
		pt.state, pt.token, pt.doubt = idle, 0, true
	case overtaken && news.Exists:
		pt.state, pt.token, pt.holder = waiting, news.Token, news.Owner
	case overtaken:
		pt.state, pt.token = idle, 0
	case !o.Mine:
		pt.state = waiting
	case !due || stream != o.Stream || m.outlived(w.Partition, o.Token):
		// Not due any more, or claimed for another stream or a former topic by a claim
		// whose reply was lost. It was never delivered: nothing to drain.
		pt.state = releasing
	default:
		pt.state, pt.stream = owned, stream
		out = append(out, Deliver{Want{w.Partition, stream}, o.Token})
	}
	return out
}

func (m *Member) releaseAnswered(now time.Duration, e ReleaseAnswered) []Action {
	r := m.release
	if r == nil || r.Number != e.Number {
		return nil
	}
	m.release = nil
	for _, h := range r.Held {
		m.touch(h.Partition)
	}
	if e.Failed {
		m.pause(now)
		return nil
	}
	m.retrying = minRetryPause
	for _, h := range r.Held {
		pt := m.parts[h.Partition]
		if pt == nil || pt.state != releasing || pt.token != h.Token {
			continue
		}
		news := pt.news
		pt.state, pt.token, pt.news = idle, 0, nil
		// A claim that was given up may have arrived after the release, or between its
		// transactions.
		pt.doubt = news != nil && news.Exists && news.Mine
	}
	return nil
}

// ownerSeen takes news of an owner key: what was waited for is free, what was
// held is gone, or a claim that was given up has arrived after all.
func (m *Member) ownerSeen(e OwnerSeen) []Action {
	pt := m.parts[e.Partition]
	if pt == nil || e.Revision <= pt.seen {
		return nil // our own doing, known from the answer
	}
	pt.seen = e.Revision
	m.touch(e.Partition)
	switch {
	case pt.state == claiming || pt.state == releasing && pt.token == 0:
		pt.news = &e
	case pt.held():
		if !e.Exists || e.Token != pt.token {
			out := m.dropHeld(e.Partition, pt, "owner key was deleted")
			pt.doubt = e.Exists && e.Mine
			return out
		}
	case e.Exists && e.Mine:
		// A claim that was given up has arrived. If it is due, the next claim will find
		// it ours; if not, it is taken back.
		pt.state, pt.token, pt.doubt = idle, 0, true
	case pt.state == waiting && !e.Exists:
		pt.state, pt.token = idle, 0
		pt.why = m.gone(pt.holder, e.Revision)
	case pt.state == waiting:
		pt.token, pt.holder = e.Token, e.Owner
	}
	return nil
}

// dropHeld notes that somebody took the owner key away.
func (m *Member) dropHeld(p registry.Partition, pt *part, reason string) []Action {
	var out []Action
	if pt.state != releasing { // else it may be our own release, whose answer is to come
		out = append(out, Lose{p, pt.token, reason})
		pt.why = reason
	}
	pt.state, pt.token = idle, 0
	m.touch(p)
	return out
}

func (m *Member) pause(now time.Duration) {
	m.retryAt = now + m.retrying
	m.retrying = min(2*m.retrying, maxRetryPause)
}
