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
// claim is computed from the newest snapshot; so are releases. What a step costs
// grows with what it changes, not with what is held.
//
// The files: member_share.go, what is due (steps 1 to 7 of the rebalancing
// algorithm); member_storm.go, changes that come too fast for that; member_target.go,
// the target record of the strategy sticky; member_hold.go, giving up and claiming
// (steps 8 and 9); member_answers.go, what became of it.
type Member struct {
	id           string
	registration *registry.Registration
	share        map[registry.Partition]int32
	parts        map[registry.Partition]*part
	off          guards.Off
	leaving      bool
	left         bool
	asked        bool // Reregister is under way

	// snapshot is the newest; considered the newest that divide has looked at, which is
	// the same one unless others come too fast; shared the one that share comes from.
	snapshot, considered, shared *Snapshot
	// frozen: what is due cannot be told for now, so that share stays as it is and nothing
	// is claimed. refused says why, if it is that the group cannot be divided.
	frozen  bool
	refused string
	storm   storm

	number   uint64 // of the last claim, release or proposal
	claim    *Claim // under way
	release  *Release
	stales   int           // claims that were stale, since one was not
	claimAt  time.Duration // no claim before; 0 is now
	retryAt  time.Duration // no claim or release before; 0 is now
	retrying time.Duration // the pause before the next retry

	proposal  *Propose // under way
	outdated  bool     // the target record is not one for the snapshot considered
	awaited   int64    // mod-revision of the target record when that was decided
	adopted   *Target  // the last one that was written by us
	expecting bool     // a target; if there is none by proposeAt, it is proposed
	proposeAt time.Duration

	touched []registry.Partition            // by this step, to be reconciled
	wanting map[registry.Partition]struct{} // idle and due
	giving  map[registry.Partition]struct{} // releasing
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
	// holder is the thread that has what is waited for, as far as it is known; why the
	// partition is due or given up, for people.
	holder, why string
}

func (p *part) held() bool { return p.state >= owned }

// NewMember returns the machine of the consumer with that id, not yet registered.
func NewMember(id string) *Member {
	return &Member{id: id, retrying: minRetryPause, parts: make(map[registry.Partition]*part),
		wanting: make(map[registry.Partition]struct{}), giving: make(map[registry.Partition]struct{})}
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
	if m.registration == nil || m.snapshot == nil || m.considered != m.snapshot || m.frozen ||
		m.claim != nil || m.release != nil || m.proposal != nil {
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
func (m *Member) Wake() (at time.Duration, ok bool) {
	claimAt := m.claimAt
	if claimAt <= m.retryAt {
		claimAt = 0 // of no use before the other
	}
	proposeAt := m.proposeAt
	if !m.expecting {
		proposeAt = 0
	}
	for _, t := range []time.Duration{m.retryAt, claimAt, m.storm.divideAt, proposeAt} {
		if t != 0 && (at == 0 || t < at) {
			at = t
		}
	}
	return at, at != 0
}

// Step takes one event and returns what is to be done, in order. now is on a clock
// that never goes back; 0 is before all.
func (m *Member) Step(now time.Duration, e Event) []Action {
	var out []Action
	switch e := e.(type) {
	case Registered:
		// Registration step 5: a first rebalance is forced, as soon as a snapshot shows the
		// registration, which may have come before this.
		m.registration, m.asked = &e.Registration, false
		if m.snapshot != nil {
			out = m.divide(now)
		}
	case SessionLost:
		out = m.lose()
	case Snapshot:
		out = m.take(now, e)
	case ClaimAnswered:
		out = m.claimAnswered(now, e)
	case ProposeAnswered:
		out = m.proposeAnswered(now, e)
	case ReleaseAnswered:
		out = m.releaseAnswered(now, e)
	case Drained:
		out = m.drained(e)
	case OwnerSeen:
		out = m.ownerSeen(e)
	case Fenced:
		if pt := m.parts[e.Partition]; pt != nil && pt.held() && (pt.token == e.Token || m.off.Token) {
			out = m.dropHeld(e.Partition, pt, "commit was fenced")
		}
	case Leaving:
		m.leave()
	case Tick:
	}
	out = append(out, m.due(now)...)
	return append(out, m.reconcile()...)
}

// due does what time has come for.
func (m *Member) due(now time.Duration) []Action {
	for _, at := range []*time.Duration{&m.retryAt, &m.claimAt} {
		if now >= *at {
			*at = 0
		}
	}
	var out []Action
	if m.storm.over(now) {
		out = m.divide(now)
	}
	return append(out, m.propose(now)...)
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
	clear(m.wanting)
	clear(m.giving)
	m.registration, m.claim, m.release, m.share, m.asked = nil, nil, nil, nil, false
	m.considered, m.shared, m.frozen = nil, nil, false
	m.retryAt, m.retrying, m.claimAt, m.stales = 0, minRetryPause, 0, 0
	m.proposal, m.outdated, m.expecting = nil, false, false
	return out
}

// touch has a partition looked at by reconcile.
func (m *Member) touch(p registry.Partition) { m.touched = append(m.touched, p) }

// sorted lists the partitions in a fixed order, so that the same events always
// give the same actions.
func (m *Member) sorted() []registry.Partition {
	return slices.SortedFunc(maps.Keys(m.parts), registry.ComparePartitions)
}
