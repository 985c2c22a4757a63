package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"time"
)

// calm is how long after one change the next begins, and how long what a change costs
// is counted after it has settled.
const calm = 300 * time.Millisecond

// scene is a group that has come to rest with all its members.
type scene struct {
	*group
	observer *observer
	all      map[string]bool
}

// setScene starts a group: nobody has joined yet.
func setScene(ctx context.Context, o options) (*scene, error) {
	w, err := openObserver(ctx, o)
	if err != nil {
		return nil, err
	}
	g, err := startGroup(ctx, o)
	if err != nil {
		return nil, errors.Join(err, w.close())
	}
	s := &scene{group: g, observer: w, all: map[string]bool{}}
	for n := range o.members {
		s.all[memberID(n)] = true
	}
	return s, nil
}

// fill has all members join at once, and returns when they have settled.
func (s *scene) fill(ctx context.Context) (moments, error) {
	s.observer.expect(s.all)
	for n := range s.o.members {
		if err := s.tell("join", n); err != nil {
			return moments{}, err
		}
	}
	return s.await(ctx)
}

func (s *scene) await(ctx context.Context) (moments, error) {
	return s.observer.await(ctx, s.o.limit, s.trouble)
}

// strike ends the group. Its members do not leave: all at once, that would take its
// time, and is not what is measured.
func (s *scene) strike(err *error) {
	s.stop()
	*err = errors.Join(*err, s.observer.close())
}

// leave has a member leave, and returns how long it took from the word to the member
// until the others have settled.
func (s *scene) leave(ctx context.Context, n int) (time.Duration, error) {
	rest := maps.Clone(s.all)
	delete(rest, memberID(n))
	s.observer.expect(rest)
	began := time.Now()
	if err := s.tell("leave", n); err != nil {
		return 0, err
	}
	m, err := s.await(ctx)
	if err != nil {
		return 0, fmt.Errorf("without %s: %w", memberID(n), err)
	}
	return m.settled.Sub(began), s.hasLeft(ctx)
}

// join has it come back, and returns how long it took from its registration.
func (s *scene) join(ctx context.Context, n int) (time.Duration, error) {
	s.observer.expect(s.all)
	if err := s.tell("join", n); err != nil {
		return 0, err
	}
	m, err := s.await(ctx)
	if err != nil {
		return 0, fmt.Errorf("with %s: %w", memberID(n), err)
	}
	return m.settled.Sub(m.registered), nil
}

// victim is a member for the i-th run: they are taken from all over the order of ids.
func victim(o options, i int) int {
	const step = 37 // has no divisor in common with usual numbers of members
	return (i*step + o.members/2) % o.members
}

func measureLeaves(ctx context.Context, o options) (r result, err error) {
	s, err := setScene(ctx, o)
	if err != nil {
		return r, err
	}
	defer s.strike(&err)
	if _, err := s.fill(ctx); err != nil {
		return r, err
	}
	for i := range o.runs {
		// Not in step with anything that ticks.
		if err := sleep(ctx, calm+rand.N(100*time.Millisecond)); err != nil {
			return r, err
		}
		left, err := s.leave(ctx, victim(o, i))
		if err != nil {
			return r, err
		}
		if err := sleep(ctx, calm+rand.N(100*time.Millisecond)); err != nil {
			return r, err
		}
		joined, err := s.join(ctx, victim(o, i))
		if err != nil {
			return r, err
		}
		r.Leave, r.Join = append(r.Leave, left.Seconds()), append(r.Join, joined.Seconds())
	}
	return r, nil
}

func measureCold(ctx context.Context, o options) (r result, err error) {
	for i := range o.runs {
		each := o
		each.group = fmt.Sprintf("%s-%d", o.group, i)
		if i > 0 {
			each.profile = ""
		}
		if err := coldStart(ctx, each, &r); err != nil {
			return r, err
		}
	}
	return r, nil
}

// coldStart has all members of a group that never was join at once.
func coldStart(ctx context.Context, o options, r *result) (err error) {
	s, err := setScene(ctx, o)
	if err != nil {
		return err
	}
	defer func() {
		s.strike(&err)
		if err == nil {
			r.CPU = append(r.CPU, s.cpu().Seconds())
		}
	}()
	before, err := readCounters(ctx, o)
	if err != nil {
		return err
	}
	m, err := s.fill(ctx)
	if err != nil {
		return err
	}
	after, err := readCounters(ctx, o)
	if err != nil {
		return err
	}
	r.Cold = append(r.Cold, m.settled.Sub(m.registered).Seconds())
	r.Spread = append(r.Spread, m.lastRegistered.Sub(m.registered).Seconds())
	diff := after.since(before)
	r.Costs = append(r.Costs, cost{"cold", m.settled.Sub(m.registered).Seconds(), diff.counters, diff.methods})
	return nil
}

// measureCosts counts what etcd has to do for each change, less what the group costs
// it in the same time when nothing happens.
func measureCosts(ctx context.Context, o options) (r result, err error) {
	s, err := setScene(ctx, o)
	if err != nil {
		return r, err
	}
	defer s.strike(&err)
	if _, err := s.fill(ctx); err != nil {
		return r, err
	}
	if err := sleep(ctx, 1*time.Second+calm); err != nil { // until new watches have caught up
		return r, err
	}
	count := func(change string, idle counters, f func() error) error {
		before, err := readCounters(ctx, o)
		if err != nil {
			return err
		}
		began := time.Now()
		if err := f(); err != nil {
			return err
		}
		if err := sleep(ctx, calm); err != nil {
			return err
		}
		after, err := readCounters(ctx, o)
		if err != nil {
			return err
		}
		took := time.Since(began).Seconds()
		diff := after.since(before)
		r.Costs = append(r.Costs, cost{change, took, diff.plus(-took, idle), diff.methods})
		return nil
	}
	if err := count("idle", counters{}, func() error { return sleep(ctx, o.idle-calm) }); err != nil {
		return r, err
	}
	idle := counters{}.plus(1/r.Costs[0].Seconds, r.Costs[0].Counted)
	for i := range o.runs {
		n := victim(o, i)
		if err := count("leave", idle, func() error { _, err := s.leave(ctx, n); return err }); err != nil {
			return r, err
		}
		if err := count("join", idle, func() error { _, err := s.join(ctx, n); return err }); err != nil {
			return r, err
		}
	}
	return r, nil
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
