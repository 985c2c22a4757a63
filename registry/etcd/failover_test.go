package etcd

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// world is a cluster as a failover sees it: members that answer soon, late or that
// they cannot serve, addresses that lead elsewhere, and the answers under way.
type world struct {
	rnd     *rand.Rand
	now     time.Duration
	f       *failover
	members []*simMember
	flights []flight
}

type simMember struct {
	endpoint string
	id       uint64
	cluster  uint64
	state    simState
}

type simState int

const (
	serving simState = iota
	unable
	silent
	slow // it can serve, and takes longer than silence is taken for a sign
)

type flight struct {
	at     time.Duration
	answer *answer
}

// newWorld has three members of one cluster behind endpoints a, b and c, and an
// endpoint x that the cluster lists as one more of c's, but which leads to a member
// of another.
func newWorld(seed uint64, given ...string) *world {
	w := &world{rnd: rand.New(rand.NewPCG(seed, 0))}
	for i, e := range []string{"http://a", "http://b", "http://c", "http://x"} {
		m := &simMember{endpoint: e, id: uint64(i + 1), cluster: 1}
		if e == "http://x" {
			m.id, m.cluster = 1, 2
		}
		w.members = append(w.members, m)
	}
	w.f = newFailover(0, given, w.say(w.member(given[0])))
	return w
}

func (w *world) member(endpoint string) *simMember {
	return w.members[slices.IndexFunc(w.members, func(m *simMember) bool { return m.endpoint == endpoint })]
}

func (w *world) say(m *simMember) *answer {
	a := &answer{endpoint: m.endpoint, cluster: m.cluster, member: m.id, term: 1}
	if m.state == unable || m.state == silent {
		a.err = "no leader"
		return a
	}
	a.members = []member{{1, []string{"http://a"}}, {2, []string{"http://b"}}, {3, []string{"http://c", "http://x"}}}
	return a
}

// run lets time pass. It fails where the machine asks somebody twice at a time, turns
// to one that did not say it can serve, or has nothing more to do.
func (w *world) run(t *testing.T, until time.Duration) {
	t.Helper()
	in := failoverInput{}
	for {
		act := w.f.step(w.now, in)
		if act.use != "" {
			if in.answer == nil || in.answer.endpoint != act.use || in.answer.err != "" || act.use == "http://x" || w.f.current != act.use {
				t.Fatalf("at %s: turned to %s after %+v", w.now, act.use, in.answer)
			}
		}
		for _, e := range act.ask {
			if slices.ContainsFunc(w.flights, func(f flight) bool { return f.answer.endpoint == e }) {
				t.Fatalf("at %s: %s is asked twice at a time", w.now, e)
			}
			m := w.member(e)
			f := flight{at: w.now + time.Duration(1+w.rnd.IntN(50))*time.Millisecond, answer: w.say(m)}
			if m.state == silent {
				f = flight{w.now + questionLimit, &answer{endpoint: e, err: "no answer"}}
			}
			if m.state == slow {
				f.at = w.now + 3*silence
				if f.at > w.now+questionLimit {
					f = flight{w.now + questionLimit, &answer{endpoint: e, err: "no answer"}}
				}
			}
			w.flights = append(w.flights, f)
		}
		if act.wake <= 0 {
			t.Fatalf("at %s: wakes after %s", w.now, act.wake)
		}
		next := w.now + act.wake
		first := -1
		for i, f := range w.flights {
			if f.at < next {
				first, next = i, f.at
			}
		}
		if next > until {
			w.now = until
			return
		}
		w.now, in = next, failoverInput{}
		if first >= 0 {
			in.answer = w.flights[first].answer
			w.flights = slices.Delete(w.flights, first, first+1)
		}
	}
}

// Whatever happened before, a member that can serve is in use soon after there is one.
func TestFailoverFindsWhoCanServe(t *testing.T) {
	for range 300 {
		seed := rand.Uint64()
		w := newWorld(seed, "http://a")
		for range 20 {
			for _, m := range w.members[:3] {
				m.state = simState(w.rnd.IntN(3))
			}
			w.run(t, w.now+time.Duration(w.rnd.IntN(4000))*time.Millisecond)
		}
		w.members[w.rnd.IntN(3)].state = serving
		// A question may be under way that is not answered, and its silence be noticed
		// only then.
		w.run(t, w.now+askEvery+silence+questionLimit+askAgain+50*time.Millisecond)
		if m := w.member(w.f.current); m.state != serving || w.f.doubt {
			t.Fatalf("seed %d: uses %s, which is in state %d; doubt %v: %s", seed, m.endpoint, m.state, w.f.doubt, w.f.why())
		}
	}
}

// Silence is noticed, and left behind, before a session of 6 s is in danger.
func TestFailoverIsInTime(t *testing.T) {
	var longest time.Duration
	for range 300 {
		seed := rand.Uint64()
		w := newWorld(seed, "http://a")
		w.run(t, time.Duration(w.rnd.IntN(2000))*time.Millisecond)
		w.member("http://a").state = silent
		began := w.now
		for w.f.current == "http://a" {
			if w.run(t, w.now+time.Millisecond); w.now-began > 3*time.Second {
				t.Fatalf("seed %d: still uses the silent one after %s", seed, w.now-began)
			}
		}
		longest = max(longest, w.now-began)
	}
	if t.Logf("at most %s", longest); longest > askEvery+silence+110*time.Millisecond {
		t.Errorf("took %s", longest)
	}
}

// A member that answers stays in use, whatever the others do; a lost connection is
// doubt at once; a cluster of one has no doubt, and is asked seldom.
func TestFailoverStays(t *testing.T) {
	w := newWorld(1, "http://a", "http://b")
	for range 50 {
		for _, m := range w.members[1:3] {
			m.state = simState(w.rnd.IntN(3))
		}
		if w.run(t, w.now+time.Second); w.f.current != "http://a" || w.f.doubt {
			t.Fatalf("at %s: uses %s, doubt %v", w.now, w.f.current, w.f.doubt)
		}
	}
	act := w.f.step(w.now, failoverInput{broken: "http://a"})
	if !w.f.doubt || !slices.Contains(act.ask, "http://b") || slices.Contains(act.ask, "http://nobody") {
		t.Errorf("after the loss of the connection: doubt %v, asks %v", w.f.doubt, act.ask)
	}

	w.f.step(w.now, failoverInput{answer: &answer{endpoint: "http://a", err: "user unknown", refused: true}})
	if w.f.doubt || w.f.current != "http://a" {
		t.Errorf("after it refused the user: doubt %v, uses %s", w.f.doubt, w.f.current)
	}

	alone := &answer{endpoint: "http://a", cluster: 1, member: 1, members: []member{{1, []string{"http://a", "http://other-name"}}}}
	f := newFailover(0, []string{"http://a"}, alone)
	act = f.step(askEvery, failoverInput{broken: "http://a"})
	if f.doubt || len(act.ask) != 0 || act.wake != askEveryAlone-askEvery {
		t.Errorf("alone: doubt %v, %+v", f.doubt, act)
	}
}

// No password goes to an address without TLS that was learned by way of TLS.
func TestFailoverTrusts(t *testing.T) {
	for given, want := range map[string]string{"https://a": "[https://a https://b]", "http://a": "[http://a http://b https://b]"} {
		f := newFailover(0, []string{given}, &answer{endpoint: given, member: 1, members: []member{{2, []string{"http://b", "https://b"}}}})
		if got := fmt.Sprint(f.targets); got != want {
			t.Errorf("given %s: targets %s, want %s", given, got, want)
		}
	}
}

// Where all are slow, as on a busy machine, none is taken for lost for good.
func TestFailoverBearsWithSlowMembers(t *testing.T) {
	w := newWorld(1, "http://a")
	for _, m := range w.members[:3] {
		m.state = slow
	}
	certain := 0
	for range 1000 {
		if w.run(t, w.now+10*time.Millisecond); !w.f.doubt {
			certain++
		}
	}
	if certain < 300 { // at first there is no doubt for 120
		t.Errorf("no doubt in only %d of 1000 looks", certain)
	}
}
