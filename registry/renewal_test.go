package registry

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"
)

// renewalWorld runs the machine against a store, a network and a process that
// stops now and then, all drawn from one seed.
type renewalWorld struct {
	t    *testing.T
	seed uint64
	r    *rand.Rand
	m    *renewal

	now      time.Duration
	ttl      time.Duration
	stream   int
	inFlight []renewalReply
	wakeAt   time.Duration

	proven     time.Duration // when the request that was answered last was sent
	storeEnds  time.Duration // when the store lets the lease go
	gone       bool          // it has said so
	lost       error
	sent       int
	unanswered int
}

type renewalReply struct {
	stream int
	at     time.Duration
	sentAt time.Duration
	in     renewalInput
}

func (w *renewalWorld) fail(format string, args ...any) {
	w.t.Helper()
	w.t.Logf("seed %d, at %s", w.seed, w.now)
	w.t.Fatalf(format, args...)
}

func (w *renewalWorld) between(low, high time.Duration) time.Duration {
	return low + time.Duration(w.r.Int64N(int64(high-low)+1))
}

// send takes a request through network and store.
func (w *renewalWorld) send(healthy bool) {
	w.sent++
	reply := renewalReply{stream: w.stream, sentAt: w.now, in: renewalInput{answered: true, ttl: w.ttl}}
	arrives := w.now + w.between(0, 50*time.Millisecond)
	reply.at = arrives + w.between(0, 50*time.Millisecond)
	if !healthy {
		if w.r.IntN(100) == 0 {
			w.gone = true // somebody revoked the lease
		}
		switch w.r.IntN(14) {
		case 0: // lost on the way
			reply = renewalReply{stream: w.stream, at: w.now + w.between(0, w.ttl), in: renewalInput{broken: true}}
			w.inFlight = append(w.inFlight, reply)
			return
		case 1: // arrives, the answer is lost
			reply.in = renewalInput{broken: true}
		case 2: // slow
			reply.at = arrives + w.between(0, w.ttl)
		case 3: // no answer at all
			return
		}
	}
	if w.gone || arrives >= w.storeEnds {
		w.gone = true
		if reply.in.answered {
			reply.in.ttl = 0
		}
	} else {
		w.storeEnds = arrives + w.ttl
	}
	w.inFlight = append(w.inFlight, reply)
}

func (w *renewalWorld) step(in renewalInput, sentAt time.Duration, healthy bool) {
	before := w.m.deadline
	act := w.m.step(w.now, in)
	if in.answered && in.ttl > 0 && act.lost == nil {
		w.proven = max(w.proven, sentAt)
		w.unanswered = 0
	}
	if act.lost != nil {
		if act.send || act.reopen {
			w.fail("a lost session acts: %+v", act)
		}
		if errors.Is(act.lost, ErrSessionExpired) && w.now < before {
			w.fail("given up %s before its deadline", before-w.now)
		}
		w.lost = act.lost
		return
	}
	if w.now >= before {
		w.fail("alive at %s, past the deadline %s", w.now, before)
	}
	if bound := w.proven + w.ttl - margin(w.ttl); w.m.deadline > bound {
		w.fail("deadline %s; the request answered last proves only %s", w.m.deadline, bound)
	}
	if !w.gone && w.m.deadline >= w.storeEnds {
		w.fail("deadline %s, the store lets go at %s", w.m.deadline, w.storeEnds)
	}
	if act.reopen {
		w.stream++
		w.unanswered = 0
		if !act.send {
			w.fail("a stream is opened for nothing")
		}
	}
	if act.send {
		if w.unanswered++; w.unanswered > maxUnanswered {
			w.fail("%d requests under way on one stream", w.unanswered)
		}
		w.send(healthy)
	}
	if act.wake <= 0 || w.now+act.wake > w.m.deadline {
		w.fail("wakes after %s, deadline in %s", act.wake, w.m.deadline-w.now)
	}
	w.wakeAt = w.now + act.wake
}

// run lets things happen until the session is lost or a time has passed.
func (w *renewalWorld) run(until time.Duration, healthy bool) {
	steps := 0
	for w.now < until && w.lost == nil {
		if steps++; steps > 200_000 {
			w.fail("busy: %d steps", steps)
		}
		next := w.wakeAt
		pick := -1
		for i, f := range w.inFlight {
			if f.at < next {
				next, pick = f.at, i
			}
		}
		w.now = max(w.now, next)
		if !healthy && w.r.IntN(300) == 0 { // the process is stopped; what has come meanwhile waits
			w.now += w.between(0, 3*w.ttl)
			if n := len(w.inFlight); n > 0 && w.r.IntN(2) == 0 {
				pick = w.r.IntN(n)
				w.now = max(w.now, w.inFlight[pick].at)
			}
		}
		if pick < 0 {
			w.step(renewalInput{}, 0, healthy)
			continue
		}
		f := w.inFlight[pick]
		w.inFlight = append(w.inFlight[:pick], w.inFlight[pick+1:]...)
		if f.stream == w.stream { // the driver leaves out former streams
			w.step(f.in, f.sentAt, healthy)
		}
	}
}

func newRenewalWorld(t *testing.T, seed uint64) *renewalWorld {
	w := &renewalWorld{t: t, seed: seed, r: rand.New(rand.NewPCG(seed, 1)), now: time.Hour}
	w.ttl = w.between(MinTTL, MaxTTL)
	asked := w.now
	w.now += w.between(0, time.Second) // granting takes time too
	w.proven, w.storeEnds = asked, asked+w.between(0, w.now-asked)+w.ttl
	w.m = newRenewal(asked, w.ttl)
	w.wakeAt = w.now
	return w
}

func TestRenewalIsNeverAliveLongerThanTheStoreHasPromised(t *testing.T) {
	lost := map[error]int{}
	for seed := range uint64(2000) {
		w := newRenewalWorld(t, seed)
		w.run(w.now+100*w.ttl, false)
		lost[w.lost]++
		if w.lost == nil {
			continue
		}
		// Once lost, nothing that arrives later makes it alive again: the driver has
		// stopped, but also a machine that is asked again says no.
		if errors.Is(w.lost, ErrSessionExpired) {
			for range 5 {
				w.now += w.between(0, time.Second)
				w.m.waiting = true
				if act := w.m.step(w.now, renewalInput{answered: true, ttl: w.ttl}); act.lost == nil {
					w.fail("alive again after it was lost")
				}
			}
		}
	}
	t.Logf("ends: %v", lost)
	for _, end := range []error{ErrSessionExpired, ErrLeaseGone} {
		if lost[end] == 0 {
			t.Errorf("no run ended with %v: the test is too kind", end)
		}
	}
}

func TestRenewalKeepsAHealthySessionForEver(t *testing.T) {
	for seed := range uint64(200) {
		w := newRenewalWorld(t, seed)
		w.run(w.now+200*w.ttl, true)
		if w.lost != nil {
			w.fail("lost: %v", w.lost)
		}
		if w.sent < 550 || w.sent > 605 {
			w.fail("%d renewals in 200 times to live, want three in each", w.sent)
		}
	}
}

func TestRenewalOutlivesTwoFailuresInARow(t *testing.T) {
	ttl := 6 * time.Second
	m := newRenewal(0, ttl)
	now := 2 * time.Second
	if act := m.step(now, renewalInput{}); !act.send || !act.reopen {
		t.Fatalf("%+v", act)
	}
	for range 2 {
		if act := m.step(now, renewalInput{broken: true}); act.lost != nil || act.send {
			t.Fatalf("%+v", act)
		} else {
			now += act.wake
		}
		if act := m.step(now, renewalInput{}); !act.send || !act.reopen {
			t.Fatalf("%+v", act)
		}
	}
	m.step(now+time.Millisecond, renewalInput{answered: true, ttl: ttl})
	if want := now + ttl - margin(ttl); m.deadline != want {
		t.Fatalf("deadline %s, want %s", m.deadline, want)
	}
}
