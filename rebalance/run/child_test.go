package run

import (
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

// What one child is told and does, as a script: at second, input -> state, order.
func TestChild(t *testing.T) {
	const s = time.Second
	type line struct {
		at    time.Duration
		in    input
		state childState
		do    string
	}
	for name, c := range map[string]struct {
		policy Policy
		lines  []line
	}{
		"given up in order": {Restart, []line{
			{0, input{kind: inTurn}, childUp, "start"},
			{5 * s, input{kind: inRevoke}, childClosing, "term"},
			{6 * s, input{kind: inExited}, childClosing, ""},
			{6 * s, input{kind: inGone}, childOver, ""},
		}},
		"does not stop": {Restart, []line{
			{0, input{kind: inTurn}, childUp, "start"},
			{5 * s, input{kind: inRevoke}, childClosing, "term"},
			{14 * s, input{kind: inTick}, childClosing, ""},
			{15 * s, input{kind: inTick}, childKilling, "kill"},
			{15 * s, input{kind: inExited, failure: "signal: killed"}, childKilling, ""},
			{16 * s, input{kind: inGone}, childOver, ""},
		}},
		"leaves processes behind while it is owned": {Restart, []line{
			{0, input{kind: inTurn}, childUp, "start"},
			{5 * s, input{kind: inExited}, childClosing, "term"},
			{15 * s, input{kind: inTick}, childKilling, "kill"},
			{15 * s, input{kind: inGone}, childPausing, ""},
			{16 * s, input{kind: inTick}, childUp, "start"},
		}},
		"given up while what it left behind stops": {Restart, []line{
			{0, input{kind: inTurn}, childUp, "start"},
			{5 * s, input{kind: inExited}, childClosing, "term"},
			{6 * s, input{kind: inRevoke}, childClosing, ""},
			{15 * s, input{kind: inTick}, childKilling, "kill"},
			{15 * s, input{kind: inGone}, childOver, ""},
		}},
		"lost": {Restart, []line{
			{0, input{kind: inTurn}, childUp, "start"},
			{5 * s, input{kind: inLose}, childKilling, "kill"},
			{5 * s, input{kind: inRevoke}, childKilling, ""},
			{5 * s, input{kind: inGone}, childOver, ""},
		}},
		"lost while it stops": {Restart, []line{
			{0, input{kind: inTurn}, childUp, "start"},
			{5 * s, input{kind: inRevoke}, childClosing, "term"},
			{6 * s, input{kind: inLose}, childKilling, "kill"},
			{6 * s, input{kind: inGone}, childOver, ""},
		}},
		"revoked before its turn": {Restart, []line{
			{0, input{kind: inRevoke}, childWaiting, ""}, // a former child may run: the key must stay
			{1 * s, input{kind: inTurn}, childOver, ""},
		}},
		"lost before its turn": {Restart, []line{
			{0, input{kind: inLose}, childWaiting, ""},
			{1 * s, input{kind: inTurn}, childOver, ""},
		}},
		"second signal": {Restart, []line{
			{0, input{kind: inTurn}, childUp, "start"},
			{1 * s, input{kind: inRevoke}, childClosing, "term"},
			{2 * s, input{kind: inHurry}, childKilling, "kill"},
			{2 * s, input{kind: inGone}, childOver, ""},
		}},
		"pauses grow, and begin anew": {Restart, []line{
			{0, input{kind: inTurn}, childUp, "start"},
			{0, input{kind: inExited, failure: "exit status 1"}, childClosing, "term"},
			{0, input{kind: inGone}, childPausing, ""},
			{1 * s, input{kind: inTick}, childUp, "start"},
			{1 * s, input{kind: inExited}, childClosing, "term"},
			{1 * s, input{kind: inGone}, childPausing, ""},
			{2 * s, input{kind: inTick}, childPausing, ""},
			{3 * s, input{kind: inTick}, childUp, "start"},
			{33 * s, input{kind: inExited}, childClosing, "term"},
			{33 * s, input{kind: inGone}, childPausing, ""},
			{34 * s, input{kind: inTick}, childUp, "start"},
		}},
		"given up in a pause": {Restart, []line{
			{0, input{kind: inTurn}, childUp, "start"},
			{0, input{kind: inGone}, childPausing, ""},
			{0, input{kind: inRevoke}, childOver, ""},
		}},
		"cannot be started now": {Restart, []line{
			{0, input{kind: inTurn}, childUp, "start"},
			{0, input{kind: inFailed, failure: "resource temporarily unavailable"}, childPausing, ""},
		}},
		"cannot be started at all": {Restart, []line{
			{0, input{kind: inTurn}, childUp, "start"},
			{0, input{kind: inFailed, failure: "no such file", fatal: true}, childResting, "stop: it cannot be started: no such file"},
			{0, input{kind: inRevoke}, childOver, ""},
		}},
		"done": {RestartOnFailure, []line{
			{0, input{kind: inTurn}, childUp, "start"},
			{0, input{kind: inExited}, childClosing, "term"},
			{0, input{kind: inGone}, childResting, ""},
			{100 * s, input{kind: inTick}, childResting, ""},
			{100 * s, input{kind: inLose}, childOver, ""},
		}},
		"not done": {RestartOnFailure, []line{
			{0, input{kind: inTurn}, childUp, "start"},
			{0, input{kind: inExited, failure: "exit status 1"}, childClosing, "term"},
			{0, input{kind: inGone}, childPausing, ""},
		}},
		"its end is the end, done": {Stop, []line{
			{0, input{kind: inTurn}, childUp, "start"},
			{0, input{kind: inExited}, childClosing, "term"},
			{0, input{kind: inGone}, childResting, "stop"},
		}},
		"its end is the end, failed": {Stop, []line{
			{0, input{kind: inTurn}, childUp, "start"},
			{0, input{kind: inExited, failure: "exit status 3"}, childClosing, "term"},
			{0, input{kind: inGone}, childResting, "stop: it ended: exit status 3"},
		}},
		"killed in time and owned after all": {Stop, []line{
			{0, input{kind: inTurn}, childUp, "start"},
			{0, input{kind: inExited, failure: "signal: killed", ours: true}, childClosing, "term"},
			{0, input{kind: inGone}, childPausing, ""},
		}},
		"died with the watchdog": {Stop, []line{
			{0, input{kind: inTurn}, childUp, "start"},
			{0, input{kind: inGone, ours: true}, childPausing, ""},
		}},
	} {
		ch := newChild(c.policy, 10*s)
		for i, l := range c.lines {
			if do := spell(ch.step(l.at, l.in)); do != l.do || ch.state != l.state {
				t.Errorf("%s, line %d: state %d, %q; want %d, %q", name, i, ch.state, do, l.state, l.do)
			}
		}
	}
}

func spell(o order) string {
	var words []string
	for word, is := range map[string]bool{"start": o.start, "term": o.term, "kill": o.kill, "stop": o.stop} {
		if is {
			words = append(words, word)
		}
	}
	text := strings.Join(words, "+")
	if o.err != nil {
		text += ": " + o.err.Error()
	}
	return text
}

// Whatever happens in whatever order: a child is started only while it is owned and
// nothing of it runs, is asked before it is killed unless it is lost, is killed when its
// grace is over, and is over only when nothing of it runs and it is owned no more.
func TestChildRandomly(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	for range 20_000 {
		w := childWorld{t: t, r: r, seed: seed, grace: time.Duration(r.IntN(20)) * time.Second}
		w.c = newChild([]Policy{Restart, RestartOnFailure, Stop}[r.IntN(3)], w.grace)
		w.run()
	}
}

type childWorld struct {
	t     *testing.T
	r     *rand.Rand
	seed  uint64
	c     *child
	grace time.Duration

	now         time.Duration
	leader      bool // runs
	rest        bool // others run
	asked       time.Duration
	killed      bool
	lost, ended bool // the ownership
	hurried     bool
	trace       []string
}

func (w *childWorld) run() {
	for range 60 {
		w.happen()
		if w.c.state == childOver {
			if w.leader || w.rest || !w.ended {
				w.fail("over too early")
			}
			return
		}
	}
	// Now the ownership ends, and everything dies that is killed.
	w.step(input{kind: inTurn})
	if !w.ended {
		w.ended = true
		w.step(input{kind: inRevoke})
	}
	if at, ok := w.c.wake(); ok && w.c.state == childClosing {
		if at > w.now+w.grace {
			w.fail("more than the grace")
		}
		w.now = max(w.now, at)
		w.step(input{kind: inTick})
	}
	if w.killed && (w.leader || w.rest) {
		w.leader, w.rest = false, false
		w.step(input{kind: inGone})
	}
	if w.c.state != childOver {
		w.fail("not over")
	}
}

func (w *childWorld) happen() {
	w.now += time.Duration(w.r.IntN(3000)) * time.Millisecond
	if w.killed {
		// A kill is not survived.
		w.leader, w.rest, w.killed = false, false, false
		w.step(input{kind: inGone})
		return
	}
	switch w.r.IntN(12) {
	case 0:
		w.step(input{kind: inTurn})
	case 1:
		if !w.ended {
			w.ended = true
			w.step(input{kind: inRevoke})
		}
	case 2:
		if w.r.IntN(4) == 0 {
			w.ended, w.lost = true, true
			w.step(input{kind: inLose})
		}
	case 3:
		if w.r.IntN(8) == 0 {
			w.hurried = true
			w.step(input{kind: inHurry})
		}
	case 4, 5:
		if w.leader {
			others := w.rest
			w.leader, w.rest = false, true // until it is known that nothing is left
			failure := ""
			if w.r.IntN(2) == 0 {
				failure = "exit status 1"
			}
			w.step(input{kind: inExited, failure: failure, ours: w.r.IntN(8) == 0})
			if !others {
				w.rest = false
				w.step(input{kind: inGone})
			}
		}
	case 6:
		if w.rest {
			w.rest = false
			if !w.leader {
				w.step(input{kind: inGone})
			}
		}
	case 7:
		if w.leader {
			w.leader, w.rest = false, false
			w.step(input{kind: inGone, ours: true})
		}
	default:
		w.step(input{kind: inTick})
	}
}

func (w *childWorld) step(in input) {
	do := w.c.step(w.now, in)
	w.trace = append(w.trace, time.Duration.String(w.now)+" "+[]string{"turn", "failed", "exited", "gone", "revoke", "lose", "hurry", "tick"}[in.kind]+" -> "+spell(do))
	if do.start {
		if w.leader || w.rest || w.ended {
			w.fail("started though it runs or is not owned")
		}
		if w.r.IntN(6) == 0 {
			w.step(input{kind: inFailed, failure: "x", fatal: w.r.IntN(3) == 0})
			return
		}
		w.leader, w.rest, w.asked, w.killed = true, w.r.IntN(2) == 0, 0, false
	}
	if do.term {
		w.asked = w.now
	}
	if do.kill {
		if !w.leader && !w.rest {
			w.fail("killed though nothing runs")
		}
		if !w.lost && !w.hurried && w.now-w.asked < w.grace {
			w.fail("killed before the grace was over")
		}
		w.killed = true
	}
	if (w.leader || w.rest) != w.c.running() {
		w.fail("does not know whether it runs")
	}
}

func (w *childWorld) fail(why string) {
	w.t.Helper()
	w.t.Fatalf("seed %d: %s at %s, state %d:\n%s", w.seed, why, w.now, w.c.state, strings.Join(w.trace, "\n"))
}
