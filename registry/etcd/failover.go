package etcd

import (
	"maps"
	"slices"
	"strings"
	"time"
)

// failover decides which member of the cluster a Store speaks to. It has no clock
// and no connection: the time and what members answered go in, whom to ask and whom
// to use comes out.
//
// A Store speaks to one member at a time, so that what it has written it also sees in
// its watches, and so that there is one connection whose silence must be noticed. The
// member in use is asked now and then whether it can serve, which one cut off from
// its quorum cannot. When it gives no answer it is in doubt: all are asked, and the
// first that can serve is used, be it the old one.
type failover struct {
	given   []string // endpoints of the options
	current string
	cluster uint64
	term    uint64            // of its leader
	learned map[string]uint64 // endpoint -> id, of the other members of the cluster
	targets []string          // whom to ask when the current one is in doubt, that one included

	doubt bool
	asked map[string]time.Duration // questions under way, and since when
	next  map[string]time.Duration // when to ask again
	fails map[string]string        // why, of those that were asked last in vain
}

const (
	// askEvery is the pace of questions while there is no doubt. They cost little:
	// a member answers all that wait at once, after one round of its quorum. Where
	// there is nobody else to turn to, they are only to learn of new members.
	askEvery      = 500 * time.Millisecond
	askEveryAlone = 10 * time.Second
	// silence of that length puts a member in doubt. With askEvery it is noticed
	// well before a session of 6 s is in danger, which has 5.4 s and renews at 2 s.
	silence = 700 * time.Millisecond
	// askAgain is the pause before one that cannot serve is asked again.
	askAgain = 200 * time.Millisecond
)

// answer is what a member said to the question whether it can serve.
type answer struct {
	endpoint string
	err      string // why it cannot, or gave no answer; empty if it can
	refused  bool   // it does not know the user, which says nothing of what it can
	cluster  uint64
	member   uint64
	term     uint64   // of its leader
	members  []member // of its cluster
}

type member struct {
	id        uint64
	endpoints []string
}

type failoverInput struct {
	answer *answer
	broken string // endpoint to which the connection was lost
}

type failoverAction struct {
	ask []string // each in a question of its own, to be answered even if in vain
	use string   // turn to this one; empty: stay
	// elected: the member in use has a new leader, and has caught up with it. What it
	// had sent to the former leader has an answer by now, or is lost.
	elected bool
	wake    time.Duration
}

// newFailover begins with a member that has just said that it can serve.
func newFailover(now time.Duration, given []string, a *answer) *failover {
	f := &failover{given: given, current: a.endpoint, cluster: a.cluster, term: a.term,
		asked: map[string]time.Duration{}, next: map[string]time.Duration{}, fails: map[string]string{}}
	f.settle(now, a)
	return f
}

// alone tells whether there is nobody else to turn to.
func (f *failover) alone() bool { return len(f.targets) < 2 }

// settle makes the member that answered the one in use.
func (f *failover) settle(now time.Duration, a *answer) {
	f.current, f.doubt = a.endpoint, false
	clear(f.fails)
	clear(f.next)
	f.learned = map[string]uint64{}
	for _, m := range a.members {
		if m.id == a.member {
			continue // other names of the same one
		}
		for _, e := range m.endpoints {
			if f.trusted(e) {
				f.learned[e] = m.id
			}
		}
	}
	f.targets = []string{f.current}
	for _, e := range append(slices.Clone(f.given), slices.Sorted(maps.Keys(f.learned))...) {
		if !slices.Contains(f.targets, e) {
			f.targets = append(f.targets, e)
		}
	}
	f.next[f.current] = now + askEvery
	if f.alone() {
		f.next[f.current] = now + askEveryAlone
	}
}

// trusted keeps a Store that was told to use TLS from sending a password without.
func (f *failover) trusted(endpoint string) bool {
	plain := func(e string) bool { return !strings.HasPrefix(e, "https://") && !strings.HasPrefix(e, "unixs:") }
	return !plain(endpoint) || slices.ContainsFunc(f.given, plain)
}

// step takes what happened up to now; without an input it is a tick.
func (f *failover) step(now time.Duration, in failoverInput) failoverAction {
	var act failoverAction
	if in.answer != nil {
		act.use = f.heard(now, in.answer)
		if in.answer.endpoint == f.current && f.term != in.answer.term && in.answer.err == "" {
			f.term, act.elected = in.answer.term, true
		}
	}
	since, waiting := f.asked[f.current]
	if !f.alone() && !f.doubt && (in.broken == f.current || waiting && now-since >= silence) {
		f.doubt = true
		f.fails[f.current] = "no answer"
	}
	asks := f.targets
	if !f.doubt {
		asks = f.targets[:1]
	}
	wake := now + askEveryAlone
	for _, e := range asks {
		if since, waiting := f.asked[e]; waiting {
			if e == f.current && !f.doubt {
				wake = min(wake, since+silence)
			}
			continue
		}
		if due := f.next[e]; due > now {
			wake = min(wake, due)
			continue
		}
		f.asked[e] = now
		act.ask = append(act.ask, e)
		wake = min(wake, now+silence)
	}
	act.wake = wake - now
	return act
}

// heard takes an answer and returns whom to turn to, if it is another.
func (f *failover) heard(now time.Duration, a *answer) (use string) {
	delete(f.asked, a.endpoint)
	f.next[a.endpoint] = now + askAgain
	id, isLearned := f.learned[a.endpoint]
	switch {
	case a.refused && a.endpoint == f.current:
		f.doubt, f.next[f.current] = false, now+askEvery
		clear(f.fails)
		return ""
	case a.err != "":
	case a.cluster != f.cluster:
		// What an address means depends on where one stands: 127.0.0.1 is
		// somebody else here.
		a.err = "it belongs to another cluster"
	case isLearned && a.member != id:
		a.err = "it is another member"
	}
	if a.err != "" {
		if a.endpoint != f.current && !f.doubt {
			return ""
		}
		f.fails[a.endpoint] = a.err
		if a.endpoint == f.current && !f.alone() {
			f.doubt = true
		}
		return ""
	}
	if a.endpoint == f.current {
		f.settle(now, a)
		return ""
	}
	if !f.doubt {
		return ""
	}
	f.settle(now, a)
	return a.endpoint
}

// why spells what the members said last that cannot serve.
func (f *failover) why() string {
	var list []string
	for _, e := range f.targets {
		if reason, failed := f.fails[e]; failed {
			list = append(list, e+": "+reason)
		}
	}
	return strings.Join(list, "; ")
}
