package storetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/muster-io/muster/registry"
)

// tapInfo is a watch as the comparison knows it.
type tapInfo struct {
	id    int
	key   string
	from  int64
	alone bool // WatchKey
}

// tap is a watch of one side, and what it has brought.
type tap struct {
	tapInfo
	cancel context.CancelFunc
	done   chan struct{} // closed when the watch's channel is

	mu      sync.Mutex
	events  []registry.Event
	reached int64
	err     error // that the watch ended with
	compact int64 // likewise
	broken  error // a rule of Watch that does not hold
}

func (s *side) open(ctx context.Context, i tapInfo) *tap {
	ctx, cancel := context.WithCancel(ctx)
	t := &tap{tapInfo: i, cancel: cancel, done: make(chan struct{})}
	open := s.st.Watch
	if i.alone {
		open = s.st.WatchKey
	}
	ch := open(ctx, i.key, s.ownRevision(i.from))
	go func() {
		defer close(t.done)
		for r := range ch {
			t.take(r)
		}
	}()
	return t
}

func (t *tap) close() {
	t.cancel()
	<-t.done
}

func (t *tap) take(r registry.WatchResponse) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err != nil {
		t.broken = fmt.Errorf("a response after the end: %+v", r)
	}
	if r.Err != nil {
		t.err, t.compact = r.Err, r.CompactRevision
		return
	}
	for _, e := range r.Events {
		// Of one response, for one revision may hold a key twice.
		if e.ModRevision <= t.reached {
			t.broken = fmt.Errorf("revision %d after %d was reached: in parts, or out of order", e.ModRevision, t.reached)
		}
		if e.ModRevision > r.Revision {
			t.broken = fmt.Errorf("a response of revision %d has an event of %d", r.Revision, e.ModRevision)
		}
	}
	if !slices.IsSortedFunc(r.Events, func(a, b registry.Event) int { return int(a.ModRevision - b.ModRevision) }) {
		t.broken = errors.New("events out of order")
	}
	t.events = append(t.events, r.Events...)
	t.reached = max(t.reached, r.Revision)
}

// state is everything so far.
func (t *tap) state() (events []registry.Event, reached int64, err, broken error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.events), t.reached, t.err, t.broken
}

// maxTaps watches are open at a time.
const maxTaps = 8

func (c *comparison) open(i tapInfo) action {
	c.taps++
	i.id = c.taps
	c.live = append(c.live, i)
	name := "watch"
	if i.alone {
		name = "watch the one key"
	}
	return action{fmt.Sprintf("%s %q from %d", name, i.key, i.from), func(ctx context.Context, s *side) string {
		// Not ended by the step's context.
		s.taps[i.id] = s.open(context.WithoutCancel(ctx), i)
		return ""
	}}
}

// watch opens a watch of a prefix, or of one key: half of those from the very
// revision that wrote it.
func (c *comparison) watch(ctx context.Context, alone bool) error {
	if len(c.live) >= maxTaps {
		return c.do(ctx, c.txn())
	}
	i := tapInfo{key: c.prefix + prefixNames[c.r.IntN(len(prefixNames))], from: c.revision() + c.r.Int64N(2), alone: alone}
	if alone {
		i.key = c.key()
		if c.r.IntN(2) == 0 {
			if err := c.do(ctx, txnAction(registry.Txn{Then: []registry.Op{registry.Put(i.key, c.value(), 0)}})); err != nil {
				return err
			}
			i.from = c.now()
		}
	}
	return c.do(ctx, c.open(i))
}

// unwatch ends a watch, and compares what it has brought first.
func (c *comparison) unwatch(ctx context.Context) error {
	if len(c.live) == 0 {
		return nil
	}
	if err := c.drain(ctx); err != nil {
		return err
	}
	if len(c.live) == 0 {
		return nil
	}
	n := c.r.IntN(len(c.live))
	i := c.live[n]
	c.live = slices.Delete(c.live, n, n+1)
	return c.do(ctx, action{fmt.Sprintf("end watch of %q from %d", i.key, i.from), func(ctx context.Context, s *side) string {
		t := s.taps[i.id]
		delete(s.taps, i.id)
		t.cancel()
		select {
		case <-t.done:
			return "closed"
		case <-ctx.Done():
			return "not closed"
		}
	}})
}

// drain waits until all watches have come to the present and compares what they
// have brought since they began.
func (c *comparison) drain(ctx context.Context) error {
	// No store need answer for progress while a watch begins in the future.
	for _, i := range c.live {
		for i.from-1 > c.now() {
			if err := c.do(ctx, txnAction(registry.Txn{Then: []registry.Op{registry.Put(c.prefix+"fill", nil, 0)}})); err != nil {
				return err
			}
		}
	}
	if err := c.do(ctx, action{"compare all watches", func(ctx context.Context, s *side) string { return s.drain(ctx, c.live) }}); err != nil {
		return err
	}
	c.live = slices.DeleteFunc(c.live, func(i tapInfo) bool {
		_, _, err, _ := c.sides[0].taps[i.id].state()
		if err == nil {
			return false
		}
		for _, s := range c.sides {
			<-s.taps[i.id].done // a watch that ends with an error is closed
			delete(s.taps, i.id)
		}
		return true
	})
	return nil
}

func (s *side) drain(ctx context.Context, live []tapInfo) string {
	s.look(ctx)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !s.settled(live) {
		if err := s.st.RequestProgress(ctx); err != nil && ctx.Err() == nil {
			s.broken = err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			s.broken = errors.New("a watch does not come to the present: " + s.late(live))
		}
		if s.broken != nil {
			return ""
		}
	}
	log, _, _, broken := s.log.state()
	s.broken = broken
	out := []string{s.spellEvents(log)}
	for _, i := range live {
		events, _, err, broken := s.taps[i.id].state()
		if broken == nil && i.alone {
			broken = s.checkKey(i, events, err, log)
			events = nil
		}
		if broken != nil {
			s.broken = fmt.Errorf("watch of %q from %d: %w", i.key, i.from, broken)
			return ""
		}
		out = append(out, fmt.Sprintf("watch of %q from %d: %s, compacted at %d: %s", i.key, i.from, kind(err), s.count(s.taps[i.id].compact), s.spellEvents(events)))
	}
	return strings.Join(out, "\n")
}

func (s *side) spellEvents(events []registry.Event) string {
	var out []string
	for _, e := range events {
		out = append(out, s.spellEvent(e))
	}
	return strings.Join(out, "\n")
}

// settled tells whether everything that the watches must still bring has come.
func (s *side) settled(live []tapInfo) bool { return s.late(live) == "" }

func (s *side) late(live []tapInfo) string {
	log, reached, err, _ := s.log.state()
	if err != nil || reached < s.now {
		return fmt.Sprintf("the one of everything is at %d of %d (error %v)", s.count(reached), s.count(s.now), err)
	}
	for _, i := range live {
		events, reached, err, _ := s.taps[i.id].state()
		if err != nil {
			continue
		}
		if !i.alone {
			if reached < s.now {
				return fmt.Sprintf("%q from %d is at %d of %d", i.key, i.from, s.count(reached), s.count(s.now))
			}
			continue
		}
		// Nothing tells how far a WatchKey is but the events, of which the last is known.
		last := lastOf(log, i.key)
		if last != nil && last.ModRevision >= s.ownRevision(i.from) && (len(events) == 0 || events[len(events)-1].ModRevision < last.ModRevision) {
			return fmt.Sprintf("%q from %d has not brought %s", i.key, i.from, s.spellEvent(*last))
		}
	}
	return ""
}

func lastOf(log []registry.Event, key string) *registry.Event {
	for i := len(log) - 1; i >= 0; i-- {
		if log[i].Key == key {
			return &log[i]
		}
	}
	return nil
}

// checkKey holds a WatchKey against everything that happened. It may begin with the
// present, and leave out what was before; from then on it must tell all.
func (s *side) checkKey(i tapInfo, events []registry.Event, err error, log []registry.Event) error {
	if err != nil {
		return fmt.Errorf("ended with %w", err)
	}
	if len(events) == 0 {
		return nil
	}
	for _, e := range events {
		if e.Key != i.key || e.ModRevision < s.ownRevision(i.from) {
			return fmt.Errorf("it brought %s", s.spellEvent(e))
		}
	}
	var history []registry.Event
	for _, e := range log {
		if e.Key == i.key {
			history = append(history, e)
		}
	}
	first := events[0]
	begin := slices.IndexFunc(history, func(e registry.Event) bool { return e.ModRevision > first.ModRevision })
	if begin < 0 {
		begin = len(history)
	}
	rest := history[begin:]
	if first.Deleted && first.Previous == nil {
		// The present: nothing is there.
		if begin > 0 && !history[begin-1].Deleted {
			return fmt.Errorf("it began with %s, and there was %s", s.spellEvent(first), s.spellEvent(history[begin-1]))
		}
		events = events[1:]
	} else {
		// An event of the key, perhaps the first of two in one revision.
		at := slices.IndexFunc(history, func(e registry.Event) bool {
			return e.ModRevision == first.ModRevision && e.Deleted == first.Deleted && s.spellKV(e.KV) == s.spellKV(first.KV)
		})
		if at < 0 {
			return fmt.Errorf("it brought %s, which never happened", s.spellEvent(first))
		}
		rest, events = history[at+1:], events[1:]
	}
	if got, want := s.spellEvents(events), s.spellEvents(rest); got != want {
		return fmt.Errorf("after its beginning it brought\n%s\nwant\n%s", got, want)
	}
	return nil
}
