package memory

import (
	"context"
	"strings"
	"sync"

	"github.com/muster-io/muster/registry"
)

// watcher is one watch: what the store offers is queued without bound, as an
// etcd client does, and a goroutine carries the queue to the reader.
type watcher struct {
	key   string
	alone bool  // one key, not all that begin with it
	began bool  // with alone: told how the key stands; guarded by the store's lock
	reach int64 // up to which everything has been queued; likewise
	ended bool  // likewise

	mu    sync.Mutex
	queue []registry.WatchResponse
	ready chan struct{}
}

// Watch implements registry.Store.
func (s *Store) Watch(ctx context.Context, prefix string, from int64) <-chan registry.WatchResponse {
	return s.watch(ctx, prefix, false, from)
}

// WatchKey implements registry.Store.
func (s *Store) WatchKey(ctx context.Context, key string, from int64) <-chan registry.WatchResponse {
	return s.watch(ctx, key, true, from)
}

func (s *Store) watch(ctx context.Context, key string, alone bool, from int64) <-chan registry.WatchResponse {
	from = max(from, 1)
	w := &watcher{key: key, alone: alone, reach: from - 1, ready: make(chan struct{}, 1)}
	s.mu.Lock()
	if !s.held {
		s.feed(w)
	}
	s.watchers[w] = struct{}{}
	s.mu.Unlock()

	out := make(chan registry.WatchResponse)
	go func() {
		defer close(out)
		defer func() {
			s.mu.Lock()
			delete(s.watchers, w)
			s.mu.Unlock()
		}()
		for {
			r, ok := w.next(ctx)
			if !ok {
				return
			}
			select {
			case out <- r:
			case <-ctx.Done():
				return
			}
			if r.Err != nil {
				return
			}
		}
	}()
	return out
}

// RequestProgress implements registry.Store.
func (s *Store) RequestProgress(ctx context.Context) error {
	return s.around(ctx, "progress", func() error {
		if s.held {
			return nil
		}
		for w := range s.watchers {
			if !w.alone {
				w.push(registry.WatchResponse{Revision: s.revision, Progress: true})
			}
		}
		return nil
	})
}

// feed brings a watch from where it is to the newest revision, or ends it where
// history begins only later.
func (s *Store) feed(w *watcher) {
	if w.ended {
		return
	}
	if w.alone && !w.began {
		w.began = true
		s.present(w)
		return
	}
	if w.reach < s.compacted {
		w.ended = true
		w.push(registry.WatchResponse{Err: registry.ErrCompacted, CompactRevision: s.compacted})
		return
	}
	for i := 0; i < len(s.history); {
		j := i + 1
		for j < len(s.history) && s.history[j].ModRevision == s.history[i].ModRevision {
			j++
		}
		w.offer(s.history[i].ModRevision, s.history[i:j])
		i = j
	}
}

// present queues how a key stands, if that is news to who has seen it at w.reach.
func (s *Store) present(w *watcher) {
	if s.revision <= w.reach {
		return
	}
	since := w.reach
	w.reach = s.revision
	e := registry.Event{KV: registry.KV{Key: w.key, ModRevision: s.revision}, Deleted: true}
	if kv, there := s.keys[w.key]; there {
		e = registry.Event{KV: kv}
	}
	if e.ModRevision > since {
		w.push(registry.WatchResponse{Revision: s.revision, Events: []registry.Event{e}})
	}
}

// offer queues what of one revision is the watch's, unless it was queued before.
func (w *watcher) offer(revision int64, events []registry.Event) {
	if w.ended || revision <= w.reach {
		return
	}
	w.reach = revision
	var mine []registry.Event
	for _, e := range events {
		if e.Key == w.key || !w.alone && strings.HasPrefix(e.Key, w.key) {
			mine = append(mine, e)
		}
	}
	if len(mine) > 0 {
		w.push(registry.WatchResponse{Revision: revision, Events: mine})
	}
}

func (w *watcher) push(r registry.WatchResponse) {
	w.mu.Lock()
	w.queue = append(w.queue, r)
	w.mu.Unlock()
	select {
	case w.ready <- struct{}{}:
	default:
	}
}

func (w *watcher) next(ctx context.Context) (registry.WatchResponse, bool) {
	for {
		w.mu.Lock()
		if len(w.queue) > 0 {
			r := w.queue[0]
			w.queue = w.queue[1:]
			w.mu.Unlock()
			return r, true
		}
		w.mu.Unlock()
		select {
		case <-w.ready:
		case <-ctx.Done():
			return registry.WatchResponse{}, false
		}
	}
}
