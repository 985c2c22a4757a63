package broker

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/muster-io/muster/broker/api"
	"github.com/muster-io/muster/registry"
)

// errands is what the daemon writes into the registry of its own accord: ids for
// topics that have none, and the rest of deletions that nobody finishes.
type errands struct {
	d *Daemon

	mu        sync.Mutex
	adopt     map[string]adoption
	deletions map[string]time.Time // topic -> when it is this daemon's turn
	kick      chan struct{}
}

// adoption is what a topic without an id is to get, and when it is this daemon's turn.
type adoption struct {
	id string // that it had; "" to make one up
	at time.Time
}

func newErrands(d *Daemon) *errands {
	return &errands{d: d, adopt: map[string]adoption{}, deletions: map[string]time.Time{}, kick: make(chan struct{}, 1)}
}

const (
	// deletionTurn is how long a daemon leaves a deletion to whoever began it, and
	// again as long for each live daemon with a smaller id. Two that are at it do no
	// harm; this saves the work.
	deletionTurn = 5 * time.Second
	// deletionLimit bounds one attempt: it visits every group.
	deletionLimit = 2 * time.Minute
	errandPause   = 2 * time.Second
	// adoptionTurn is how long a daemon that would have to make up an id leaves that to
	// one that may have logs of the topic, which say what it was.
	adoptionTurn = 30 * time.Second
)

func (e *errands) wake() {
	select {
	case e.kick <- struct{}{}:
	default:
	}
}

// adoptIf notes whether a topic is to be given an id, the given one if it is known.
// Who leads its first partition makes one up at once.
func (e *errands) adoptIf(topic, id string, wanted, first bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !wanted {
		delete(e.adopt, topic)
		return
	}
	at := time.Now()
	if id == "" && !first {
		at = at.Add(adoptionTurn)
	}
	e.adopt[topic] = adoption{id, at}
	e.wake()
}

// follow notes what became of the markers of deletions. One for a topic that is
// still there was written by hand, and nobody else is at work on it.
func (e *errands) follow(changed map[string]bool, c *catalog, self int32) {
	if len(changed) == 0 {
		return
	}
	rank := slices.IndexFunc(c.list(), func(b api.Broker) bool { return b.ID == self })
	if rank < 0 {
		rank = len(c.brokers)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for topic := range changed {
		if _, there := c.deletions[topic]; !there {
			delete(e.deletions, topic)
			continue
		}
		wait := deletionTurn * time.Duration(rank+1)
		if _, there := c.topic(topic); there {
			wait -= deletionTurn
		}
		e.deletions[topic] = time.Now().Add(wait)
	}
	e.wake()
}

// run does the errands until ctx ends.
func (e *errands) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-e.kick:
		case <-timer.C:
		}
		timer.Reset(e.round(ctx))
	}
}

// round does what is due, and returns when to look again at the latest.
func (e *errands) round(ctx context.Context) time.Duration {
	adopt, due, wait := e.due(time.Now())
	if !e.d.members.alive() {
		return errandPause // a daemon that may be dead to the registry writes nothing
	}
	for topic, a := range adopt {
		if !e.adoptOne(ctx, topic, a) {
			wait = min(wait, errandPause)
		}
	}
	for topic, at := range due {
		if !e.finish(ctx, topic, at) {
			wait = min(wait, errandPause)
		}
	}
	return wait
}

func (e *errands) due(now time.Time) (adopt map[string]adoption, deletions map[string]time.Time, wait time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	wait = time.Hour
	isDue := func(at time.Time) bool {
		if left := at.Sub(now); left > 0 {
			wait = min(wait, left)
			return false
		}
		return true
	}
	adopt, deletions = map[string]adoption{}, map[string]time.Time{}
	for topic, a := range e.adopt {
		if isDue(a.at) {
			adopt[topic] = a
		}
	}
	for topic, at := range e.deletions {
		if isDue(at) {
			deletions[topic] = at
		}
	}
	return adopt, deletions, wait
}

func (e *errands) adoptOne(ctx context.Context, topic string, a adoption) bool {
	limited, cancel := context.WithTimeout(ctx, registryCallLimit)
	defer cancel()
	adopted, err := registry.AdoptTopic(limited, e.d.store, e.d.cfg.Root, topic, a.id)
	if err != nil {
		if ctx.Err() == nil {
			e.d.log.Warn("topic has no id and cannot be given one, trying again", "topic", topic, "error", err)
		}
		return false
	}
	if adopted {
		e.d.log.Info("topic had no id and was given one", "topic", topic)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.adopt[topic] == a { // else it has lost its id again
		delete(e.adopt, topic)
	}
	return true
}

func (e *errands) finish(ctx context.Context, topic string, at time.Time) bool {
	limited, cancel := context.WithTimeout(ctx, deletionLimit)
	defer cancel()
	done, err := registry.FinishDeletion(limited, e.d.store, e.d.cfg.Root, topic)
	switch {
	case errors.Is(err, registry.ErrNoTopic):
	case errors.Is(err, registry.ErrInternalTopic), errors.Is(err, registry.ErrRecord):
		e.d.log.Warn("deletion that was asked for is refused", "topic", topic, "error", err)
	case err != nil:
		if ctx.Err() == nil {
			e.d.log.Warn("deletion of a topic cannot be finished, trying again", "topic", topic, "error", err)
		}
		return false
	default:
		e.d.log.Info("topic deleted", "topic", topic, "partitions", done.Partitions, "groups", done.Groups, "owners", done.Owners, "offsets", done.Offsets)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.deletions[topic] == at { // else the topic was made and deleted again meanwhile
		delete(e.deletions, topic)
	}
	return true
}
