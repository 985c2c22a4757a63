package simulation

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/muster-io/muster/registry"
)

// link is the way of one process to the twin: messages take time, answers are lost,
// requests take effect late. It also leaves out the condition whose loss is tried.
type link struct {
	w *world
	p *process // nil: an operator's, on which nothing goes wrong
}

var _ registry.Store = link{}

var (
	errLost    = errors.New("connection was lost")
	errTimeout = context.DeadlineExceeded
)

// callLimit bounds one call, as in the real driver.
const callLimit = 5 * sec

// maxLate is how late a request takes effect at most.
const maxLate = 12 * sec

// call carries out one request on the twin; the task that runs now waits for it.
func (l link) call(effect func() error) error {
	w, t := l.w, l.w.turn
	t.turns++
	turn := t.turns
	var answer error
	arrive := func() {
		w.operator = l.p == nil
		answer = effect()
		w.took()
		w.operator = false
	}
	resume := func() {
		if t.turns != turn {
			return
		}
		if t.limit != 0 && w.now > t.limit && w.chance(2) {
			answer = errTimeout // the process stood while the answer came
		}
		t.run()
	}
	lose := func(late time.Duration) {
		answer = nil
		fails := w.between(ms, 300*ms)
		lost := errLost
		if w.chance(4) {
			fails, lost = callLimit, errTimeout
		}
		if t.limit != 0 {
			fails = min(fails, max(t.limit-w.now, 0))
		}
		if late >= 0 {
			w.after(late, arrive)
		}
		t.at(w.now+fails, func() {
			if t.turns == turn {
				answer = lost
				t.run()
			}
		})
	}
	switch fate := l.fate(); fate {
	case fine:
		w.after(w.latency(), func() {
			arrive()
			t.at(w.now+w.latency(), resume)
		})
	case lostReply:
		w.counts[lostReplies]++
		lose(w.latency())
	case lateEffect:
		w.counts[lateEffects]++
		lose(w.between(0, maxLate))
	case lostRequest:
		w.counts[lostRequests]++
		lose(-1)
	}
	t.wait()
	return answer
}

type fate int

const (
	fine fate = iota
	lostReply
	lateEffect
	lostRequest
)

func (l link) fate() fate {
	w := l.w
	if l.p != nil && w.now < w.outage {
		return fate(1 + w.r.IntN(3))
	}
	if l.p == nil || !w.profile.storming || w.r.IntN(1000) >= w.profile.faults {
		return fine
	}
	return fate(1 + w.r.IntN(3))
}

func (l link) Txn(_ context.Context, t registry.Txn) (res registry.TxnResult, err error) {
	run := l.w.without(t)
	err = l.call(func() (err error) {
		l.w.observer.releasing = nil
		if l.p != nil && l.w.purpose(t) == releases {
			l.w.observer.releasing = t.If
		}
		res, err = l.w.twin.Txn(ctx, run)
		if err == nil && l.p != nil {
			l.w.observer.wrote(l.p, t, res)
		}
		return err
	})
	if err != nil {
		return registry.TxnResult{}, err
	}
	return res, nil
}

func (l link) Range(_ context.Context, r registry.RangeRequest) (res registry.RangeResult, err error) {
	err = l.call(func() (err error) {
		res, err = l.w.twin.Range(ctx, r)
		return err
	})
	return res, err
}

func (l link) Grant(_ context.Context, ttl time.Duration) (lease registry.Lease, err error) {
	err = l.call(func() (err error) {
		lease, err = l.w.twin.Grant(ctx, ttl)
		l.w.expire(l.w.now + lease.TTL + l.w.between(0, 300*ms))
		return err
	})
	return lease, err
}

func (l link) Revoke(_ context.Context, id registry.LeaseID) error {
	return l.call(func() error { return l.w.twin.Revoke(ctx, id) })
}

func (l link) Remaining(_ context.Context, id registry.LeaseID) (left time.Duration, err error) {
	err = l.call(func() (err error) {
		left, err = l.w.twin.Remaining(ctx, id)
		return err
	})
	return left, err
}

func (l link) Now() time.Duration { return l.w.now }

func (link) Watch(context.Context, string, int64) <-chan registry.WatchResponse {
	panic("the simulated driver does not watch by channels")
}

func (link) WatchKey(context.Context, string, int64) <-chan registry.WatchResponse {
	panic("the simulated driver does not watch by channels")
}

func (link) RequestProgress(context.Context) error { return nil }

func (link) KeepAlive(context.Context, registry.LeaseID) (registry.KeepAliver, error) {
	panic("the simulated driver renews by itself")
}

// purpose tells what a transaction of a member is about.
type purpose int

const (
	other purpose = iota
	claims
	releases
	commits
	proposals
)

func (w *world) purpose(t registry.Txn) purpose {
	for _, op := range t.Then {
		if op.Kind == registry.OpTxn && len(op.Txn.Then) > 0 {
			op = op.Txn.Then[0]
		}
		put := op.Kind == registry.OpPut
		switch {
		case put && strings.HasPrefix(op.Key, w.group.Owners()):
			return claims
		case op.Kind == registry.OpDelete && strings.HasPrefix(op.Key, w.group.Owners()):
			return releases
		case put && strings.HasPrefix(op.Key, w.group.Offsets()):
			return commits
		case put && op.Key == w.group.Target():
			return proposals
		}
	}
	return other
}

// without leaves out the condition of the guard that is off.
func (w *world) without(t registry.Txn) registry.Txn {
	if w.off == none {
		return t
	}
	p := w.purpose(t)
	drop := func(c registry.Cond) bool {
		owner, id := strings.HasPrefix(c.Key, w.group.Owners()), strings.HasPrefix(c.Key, w.group.IDs())
		switch w.off {
		case createIfAbsent:
			return p == claims && owner
		case ownRegistration:
			return p == claims && id && !c.Prefix
		case noNewRegistration:
			return p == claims && id && c.Prefix
		case topicIncarnation:
			return p == claims && strings.HasPrefix(c.Key, w.root.Topics())
		case claimTarget:
			return p == claims && c.Key == w.group.Target()
		case releaseCompare:
			return p == releases && owner
		case commitFence:
			return p == commits && owner
		case previousRevision:
			return p == commits && strings.HasPrefix(c.Key, w.group.Offsets())
		case targetCompare:
			return p == proposals && c.Key == w.group.Target()
		case targetNewest:
			return p == proposals && id && c.Prefix
		case targetRegistration:
			return p == proposals && id && !c.Prefix
		}
		return false
	}
	return strip(t, drop)
}

func strip(t registry.Txn, drop func(registry.Cond) bool) (out registry.Txn) {
	for _, c := range t.If {
		if !drop(c) {
			out.If = append(out.If, c)
		}
	}
	branch := func(ops []registry.Op) (list []registry.Op) {
		for _, op := range ops {
			if op.Kind == registry.OpTxn {
				inner := strip(*op.Txn, drop)
				op.Txn = &inner
			}
			list = append(list, op)
		}
		return list
	}
	out.Then, out.Else = branch(t.Then), branch(t.Else)
	return out
}
