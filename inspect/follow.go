package inspect

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/muster-io/muster/registry"
)

// Follower tells what changes in a registry, from now on.
type Follower struct {
	Store registry.Store
	Root  registry.Root
	// Path limits it to the keys at and below that path, counted from the root; "" is all.
	Path string
	// Started, if not nil, is called with the revision after which all is told.
	Started func(revision int64)
}

// maxQueued bounds the changes that wait for a slow reader.
const maxQueued = 200_000

// ErrSlowReader ends a Follower whose lines are not taken as fast as things change.
var ErrSlowReader = errors.New("the reader is too slow for the changes")

// Follow gives each line to emit, with the time at which it was learned, until ctx
// ends, which is no error, or emit returns false. History that is lost to a
// compaction is told by a line, after the difference that it made.
func (f *Follower) Follow(ctx context.Context, emit func(at time.Time, l Line) bool) error {
	q := &queue{root: f.Root, path: strings.TrimSuffix(f.Path, "/"), kick: make(chan struct{}, 1)}
	prefix := f.Root.Key(q.path)
	_, now, err := registry.GetKey(ctx, f.Store, f.Root.ClusterID()) // for the revision
	if err != nil {
		return fmt.Errorf("read the registry: %w", err)
	}
	q.begin = now
	if q.path == "" {
		prefix = f.Root.Prefix()
	}
	view, err := registry.OpenView(ctx, f.Store, []string{prefix}, registry.ViewOptions{Stall: silenceLimit, Listener: q.fares}, q.change)
	if err != nil {
		return fmt.Errorf("read the registry: %w", err)
	}
	defer view.Close()
	if f.Started != nil {
		f.Started(now)
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-q.kick:
		}
		items, full := q.take()
		for _, it := range items {
			if !emit(it.at, it.line) {
				return nil
			}
		}
		if full {
			return ErrSlowReader
		}
	}
}

type queued struct {
	at   time.Time
	line Line
}

// queue is between the View, which must not wait, and the reader.
type queue struct {
	root  registry.Root
	path  string
	begin int64 // changes up to this revision are not told
	kick  chan struct{}

	mu    sync.Mutex
	items []queued
	last  int64 // revision of the newest change
	full  bool
}

func (q *queue) change(s registry.Snapshot, events []registry.Event) {
	var news []registry.Event
	for _, e := range events {
		if e.ModRevision > q.begin && q.within(e.Key) {
			news = append(news, e)
		}
	}
	q.add(s.Revision, Narrate(q.root, news, func(key string) bool { _, ok := s.Get(0, key); return ok })...)
}

// within leaves out keys that only begin like the path.
func (q *queue) within(key string) bool {
	rest := strings.TrimPrefix(key, q.root.Key(q.path))
	return rest == "" || rest[0] == '/'
}

// fares is told how the View fares.
func (q *queue) fares(e registry.ViewEvent) {
	switch {
	case e.Kind == registry.ViewTrouble:
		q.add(0, Line{Revision: e.Revision, Kind: KindSilent,
			Text: fmt.Sprintf("the registry has said nothing for %.0f s; changes may be told late", e.Silent.Seconds())})
	case e.Kind == registry.ViewRecovered:
		q.add(0, Line{Revision: e.Revision, Kind: KindRecovered, Text: "the registry answers again"})
	case errors.Is(e.Err, registry.ErrCompacted):
		q.add(0, Line{Revision: e.Revision, Kind: KindMissed,
			Text: fmt.Sprintf("history was compacted before it was read: up to revision %d only the difference was told", e.Revision)})
	case e.Revision == q.newest():
		q.add(0, Line{Revision: e.Revision, Kind: KindMissed,
			Text: fmt.Sprintf("the keys were listed again: up to revision %d only the difference was told", e.Revision)})
	}
}

func (q *queue) newest() int64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.last
}

func (q *queue) add(revision int64, lines ...Line) {
	now := time.Now()
	q.mu.Lock()
	defer q.mu.Unlock()
	if revision != 0 {
		q.last = revision
	}
	for _, l := range lines {
		if len(q.items) == maxQueued {
			q.full = true
			break
		}
		q.items = append(q.items, queued{now, l})
	}
	select {
	case q.kick <- struct{}{}:
	default:
	}
}

func (q *queue) take() (items []queued, full bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	items, q.items = q.items, nil
	return items, q.full
}
