package rebalance

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/muster-io/muster/rebalance/internal/guards"
	"github.com/muster-io/muster/registry"
)

// Member is the state machine of one consumer in a group: what it is due by the
// newest snapshot, what it holds, and the steps between. Events and the time go
// in, actions come out; the driver carries them out and reports back. Step must
// not be called concurrently.
//
// Each partition is in one of these states. Only owned and draining partitions
// are delivered, and only under the token by which they were claimed.
//
//	          want          granted            not due        drained         done
//	(none) ───────► claiming ─────► owned ──────────► draining ──────► releasing ──► (none)
//	                 │    ▲
//	            held ▼    │ owner key gone
//	                 waiting
//
// A claim is sent only from (none), one transaction at a time, so that every
// claim is computed from the newest snapshot; so are releases.
type Member struct {
	id           string
	registration *registry.Registration
	snapshot     *Snapshot
	share        map[registry.Partition]int32
	parts        map[registry.Partition]*part
	off          guards.Off
	leaving      bool
	left         bool
	asked        bool // Reregister is under way

	number   uint64 // of the last claim or release
	claim    *Claim // under way
	release  *Release
	retryAt  time.Duration // no claim or release before; 0 is now
	retrying time.Duration // the pause before the next retry
}

type partState int

const (
	idle      partState = iota // not held; claimed as soon as may be, if due
	claiming                   // in the claim under way
	waiting                    // somebody else holds it; watched
	owned                      // held and delivered
	draining                   // held; delivery is coming to its end
	releasing                  // held; delivery has ended
)

func (s partState) String() string {
	return [...]string{"idle", "claiming", "waiting", "owned", "draining", "releasing"}[s]
}

type part struct {
	state  partState
	stream int32
	token  int64
	seen   int64 // the revision up to which the owner key is known
	// watched: a watch is armed. It stays while the partition is held or waited for.
	watched bool
	// suspect: a claim was sent whose outcome never came. It may take effect at any
	// later time, so the watch stays as long as the session does.
	suspect bool
	// doubt: the key may stand under our lease though we do not hold it.
	doubt bool
	// news of the owner key that came while its fate was under way: it may be newer
	// than the answer.
	news *OwnerSeen
}

func (p *part) held() bool { return p.state >= owned }

// NewMember returns the machine of the consumer with that id, not yet registered.
func NewMember(id string) *Member {
	return &Member{id: id, parts: make(map[registry.Partition]*part), retrying: minRetryPause}
}

// NewMemberWithout is NewMember for simulations that leave out a check.
func NewMemberWithout(id string, off guards.Off) *Member {
	m := NewMember(id)
	m.off = off
	return m
}

// Owned returns the partitions that are delivered now.
func (m *Member) Owned() []registry.Partition {
	var list []registry.Partition
	for p, pt := range m.parts {
		if pt.state == owned || pt.state == draining {
			list = append(list, p)
		}
	}
	slices.SortFunc(list, registry.ComparePartitions)
	return list
}

// Settled tells whether the member holds exactly its share of the newest snapshot.
func (m *Member) Settled() bool {
	if m.registration == nil || m.snapshot == nil || m.claim != nil || m.release != nil {
		return false
	}
	for p, pt := range m.parts {
		stream, due := m.share[p]
		if due != (pt.state == owned) || due && stream != pt.stream || !due && pt.held() {
			return false
		}
	}
	for p := range m.share {
		if m.parts[p] == nil {
			return false
		}
	}
	return true
}

// String shows what the member holds and is due, for people.
func (m *Member) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "registered %v, leaving %v, claim under way %v, release under way %v", m.registration != nil, m.leaving, m.claim != nil, m.release != nil)
	for _, p := range m.sorted() {
		pt := m.parts[p]
		stream, due := m.share[p]
		fmt.Fprintf(&b, "; %s %s token %d", p, pt.state, pt.token)
		if due {
			fmt.Fprintf(&b, ", due to stream %d", stream)
		}
	}
	return b.String()
}

// Wake returns when the next Tick is due, on the clock of Step; ok is false if
// none is.
func (m *Member) Wake() (at time.Duration, ok bool) { return m.retryAt, m.retryAt != 0 }

// Step takes one event and returns what is to be done, in order.
func (m *Member) Step(now time.Duration, e Event) []Action {
	var out []Action
	switch e := e.(type) {
	case Registered:
		m.registration, m.asked = &e.Registration, false
		if m.snapshot != nil {
			out = m.divide() // a snapshot that shows the registration may have come first
		}
	case SessionLost:
		out = m.lose()
	case Snapshot:
		out = m.take(e)
	case ClaimAnswered:
		out = m.claimAnswered(now, e)
	case ReleaseAnswered:
		out = m.releaseAnswered(now, e)
	case Drained:
		out = m.drained(e)
	case OwnerSeen:
		out = m.ownerSeen(e)
	case Fenced:
		if pt := m.parts[e.Partition]; pt != nil && pt.held() && pt.token == e.Token {
			out = m.dropHeld(e.Partition, pt, "commit was fenced")
		}
	case Leaving:
		m.leaving, m.share = true, nil
	case Tick:
	}
	if m.retryAt != 0 && now >= m.retryAt {
		m.retryAt = 0
	}
	return append(out, m.reconcile()...)
}

// lose forgets everything that hung on the session.
func (m *Member) lose() []Action {
	var out []Action
	for _, p := range m.sorted() {
		pt := m.parts[p]
		if pt.state == owned || pt.state == draining {
			out = append(out, Lose{p, pt.token, "session lost"})
		}
		if pt.watched {
			out = append(out, Unwatch{p})
		}
	}
	clear(m.parts)
	m.registration, m.claim, m.release, m.share, m.asked = nil, nil, nil, nil, false
	m.retryAt, m.retrying = 0, minRetryPause
	return out
}

// take computes the share from one snapshot.
func (m *Member) take(s Snapshot) []Action {
	if m.snapshot != nil && s.Revision < m.snapshot.Revision {
		return nil
	}
	m.snapshot = &s
	// A stale claim waits for this: it need not sit out its pause.
	m.retryAt = 0
	return append(m.outlive(), m.divide()...)
}

// outlive drops what is held of topics that were deleted and created again: the
// position reached in the former one means nothing in the new one, so that the
// owner key is given up without a commit, and claimed anew if due.
func (m *Member) outlive() []Action {
	var out []Action
	for _, p := range m.sorted() {
		pt := m.parts[p]
		if pt.state != owned && pt.state != draining || !m.outlived(p, pt.token) {
			continue
		}
		pt.state = releasing
		out = append(out, Lose{p, pt.token, "topic was deleted and created again"})
	}
	return out
}

// outlived tells whether an owner key is older than the topic it names.
func (m *Member) outlived(p registry.Partition, token int64) bool {
	return token < m.snapshot.Incarnations[p.Topic]
}

// divide is the rebalancing algorithm: for each topic that I subscribe to, the
// partitions and the consumers are those of the snapshot; both are sorted, my
// place is found and my slice taken, in Assign.
func (m *Member) divide() []Action {
	if m.leaving || m.registration == nil {
		return nil
	}
	if m.snapshot.Registered != m.registration.Revision {
		// Older than the registration: a newer snapshot is on its way. Newer: somebody
		// deleted the registration. What is held stays, for it stands under a lease that
		// lives; nothing is claimed until the registration is back.
		if m.snapshot.Revision > m.registration.Revision && !m.asked {
			m.asked = true
			return []Action{Reregister{}}
		}
		return nil
	}
	assignment, err := Assign(*m.snapshot)
	if err != nil {
		return nil
	}
	i := slices.IndexFunc(m.snapshot.Members, func(x MemberInfo) bool { return x.ID == m.id })
	if i < 0 {
		// The registration stands but cannot be read: nobody counts on us.
		m.share = nil
		return nil
	}
	m.share = assignment.Of(m.id)
	return []Action{Rebalanced{Revision: m.snapshot.Revision, Strategy: assignment.Strategy, Members: len(m.snapshot.Members), Share: len(m.share)}}
}

// reconcile compares the share with what is held: first it gives up what it
// must, then it claims what it lacks. What stays is not touched.
func (m *Member) reconcile() []Action {
	if m.registration == nil {
		return nil
	}
	var out []Action
	var wants []Want
	var give []Held
	for p := range m.share {
		if m.parts[p] == nil {
			m.parts[p] = &part{}
		}
	}
	for _, p := range m.sorted() {
		pt := m.parts[p]
		stream, due := m.share[p]
		switch {
		case pt.state == owned && (!due || stream != pt.stream):
			// Another stream of our own counts as another owner: the key names the thread.
			pt.state = draining
			out = append(out, Revoke{p, pt.token})
		case pt.state == releasing:
			give = append(give, Held{p, pt.token})
		case pt.state == idle && due:
			wants = append(wants, Want{p, stream})
		case pt.state == idle && !due && pt.doubt:
			// Claimed with unknown outcome, and not due any more: take it back.
			pt.state, pt.token = releasing, 0
			give = append(give, Held{p, 0})
		case (pt.state == idle || pt.state == waiting) && !due && !pt.suspect:
			out = append(out, m.forget(p, pt)...)
		}
	}
	out = append(out, m.sendRelease(give)...)
	out = append(out, m.sendClaim(wants)...)
	return append(out, m.leave()...)
}

func (m *Member) sendRelease(give []Held) []Action {
	if len(give) == 0 || m.release != nil || m.retryAt != 0 {
		return nil
	}
	m.number++
	m.release = &Release{Number: m.number, Held: give}
	return []Action{*m.release}
}

func (m *Member) sendClaim(wants []Want) []Action {
	if len(wants) == 0 || m.claim != nil || m.retryAt != 0 ||
		m.snapshot == nil || m.snapshot.Registered != m.registration.Revision {
		return nil
	}
	m.number++
	m.claim = &Claim{Number: m.number, Registration: *m.registration, Snapshot: m.snapshot.Revision,
		Incarnations: m.snapshot.Incarnations, Wants: wants}
	for _, w := range wants {
		pt := m.parts[w.Partition]
		pt.state, pt.stream = claiming, w.Stream
	}
	return []Action{*m.claim}
}

// leave says Left once nothing is held and nothing is under way.
func (m *Member) leave() []Action {
	if !m.leaving || m.left || m.claim != nil || m.release != nil {
		return nil
	}
	for _, pt := range m.parts {
		if pt.held() || pt.state == claiming || pt.doubt {
			return nil
		}
	}
	m.left = true
	return []Action{Left{}}
}

func (m *Member) claimAnswered(now time.Duration, e ClaimAnswered) []Action {
	c := m.claim
	if c == nil || c.Number != e.Number {
		return nil
	}
	m.claim = nil
	var out []Action
	for i, w := range c.Wants {
		pt := m.parts[w.Partition]
		if i < len(e.Outcomes) {
			out = append(out, m.outcome(w, pt, e.Revision, e.Outcomes[i])...)
			continue
		}
		if pt.news != nil && pt.news.Exists && pt.news.Mine {
			pt.doubt = true
		}
		pt.state, pt.news = idle, nil
		if e.Unknown {
			pt.suspect, pt.doubt, pt.token = true, true, 0
			out = append(out, m.watch(w.Partition, pt, max(pt.seen, c.Snapshot))...)
		}
	}
	if e.Unknown || e.Stale && m.snapshot.Revision == c.Snapshot {
		m.pause(now)
	} else if !e.Stale {
		m.retrying = minRetryPause
	}
	return out
}

// outcome enters what became of one claim.
func (m *Member) outcome(w Want, pt *part, revision int64, o ClaimOutcome) []Action {
	if o.Revision != 0 {
		revision = o.Revision
	}
	pt.seen, pt.doubt = max(pt.seen, revision), false
	out := m.watch(w.Partition, pt, pt.seen)
	pt.token = o.Token
	news := pt.news
	pt.news = nil
	stream, due := m.share[w.Partition]
	switch overtaken := news != nil && news.Revision > revision && (!news.Exists || news.Token != o.Token); {
	case overtaken && news.Mine:
		pt.state, pt.token, pt.doubt = idle, 0, true
	case overtaken && news.Exists:
		pt.state, pt.token = waiting, news.Token
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
		// A claim that was given up may have arrived after the release.
		pt.doubt = news != nil && news.Revision > e.Revision && news.Exists && news.Mine
		pt.seen = max(pt.seen, e.Revision)
	}
	return nil
}

func (m *Member) drained(e Drained) []Action {
	pt := m.parts[e.Partition]
	if pt == nil || pt.state != draining || pt.token != e.Token {
		return nil
	}
	if stream, due := m.share[e.Partition]; due && stream == pt.stream && !m.leaving {
		// Due again before it was given up: the key still stands, so go on under it.
		pt.state = owned
		return []Action{Deliver{Want{e.Partition, stream}, pt.token}}
	}
	pt.state = releasing
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
	case pt.state == waiting:
		pt.token = e.Token
	}
	return nil
}

// dropHeld notes that somebody took the owner key away.
func (m *Member) dropHeld(p registry.Partition, pt *part, reason string) []Action {
	var out []Action
	if pt.state != releasing {
		out = append(out, Lose{p, pt.token, reason})
	}
	pt.state, pt.token = idle, 0
	return out
}

func (m *Member) watch(p registry.Partition, pt *part, after int64) []Action {
	if pt.watched {
		return nil
	}
	pt.watched = true
	return []Action{Watch{p, after}}
}

func (m *Member) forget(p registry.Partition, pt *part) []Action {
	delete(m.parts, p)
	if pt.watched {
		return []Action{Unwatch{p}}
	}
	return nil
}

func (m *Member) pause(now time.Duration) {
	m.retryAt = now + m.retrying
	m.retrying = min(2*m.retrying, maxRetryPause)
}

// sorted lists the partitions in a fixed order, so that the same events always
// give the same actions.
func (m *Member) sorted() []registry.Partition {
	return slices.SortedFunc(maps.Keys(m.parts), registry.ComparePartitions)
}
