package etcd

import (
	"context"
	"errors"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/muster-io/muster/registry"
)

// watchContext is the same for all of Watch and RequestProgress, since the
// client shares a stream among those whose metadata are equal. A watch on a
// member that lost its leader ends, in place of hanging in the past.
func watchContext(ctx context.Context) context.Context { return clientv3.WithRequireLeader(ctx) }

// Watch implements registry.Store.
//
// It begins one revision early and leaves that out: etcd answers no progress
// request of a stream as long as one of its watches begins in the future, and
// "after what I have read" is the future until somebody writes.
func (s *Store) Watch(ctx context.Context, prefix string, from int64) <-chan registry.WatchResponse {
	w := &watch{s: s, out: make(chan registry.WatchResponse), from: from}
	w.open = func(ctx context.Context, c *conn) clientv3.WatchChan {
		// Without a connection this blocks until there is one.
		return c.client.Watch(watchContext(ctx), prefix, clientv3.WithPrefix(), clientv3.WithRev(max(w.from-1, 1)),
			clientv3.WithPrevKV(), clientv3.WithProgressNotify())
	}
	go w.run(ctx)
	return w.out
}

// WatchKey implements registry.Store. Other metadata mean another stream: see
// Watch. It begins with the present and asks for the past: etcd brings a watch that
// begins in the past up to date only every 100 ms, and the holder of a partition
// that is waited for gives it up sooner than that.
func (s *Store) WatchKey(ctx context.Context, key string, from int64) <-chan registry.WatchResponse {
	w := &watch{s: s, out: make(chan registry.WatchResponse), from: from}
	w.open = func(ctx context.Context, c *conn) clientv3.WatchChan {
		stream := metadata.AppendToOutgoingContext(watchContext(ctx), "muster-watch", "keys")
		return c.client.Watch(stream, key, clientv3.WithCreatedNotify(), clientv3.WithPrevKV())
	}
	w.created = func(ctx context.Context) registry.WatchResponse { return s.present(ctx, key, w.from) }
	go w.run(ctx)
	return w.out
}

// maxRenewals tokens in a row may be refused to a watch, each after a longer pause,
// until its reader is told.
const (
	maxRenewals  = 5
	renewalPause = 100 * time.Millisecond
)

// watch is one watch, carried on where it was when the Store turns to another member.
type watch struct {
	s    *Store
	out  chan registry.WatchResponse
	from int64 // the first revision that has not been passed on
	open func(ctx context.Context, c *conn) clientv3.WatchChan
	// created reads what is there, once a watch that begins with the present stands.
	created func(ctx context.Context) registry.WatchResponse
}

func (w *watch) run(ctx context.Context) {
	defer close(w.out)
	for renewals := 0; ; {
		began := time.Now()
		c, _ := w.s.conns.use(ctx)
		over, err := w.follow(ctx, c)
		if over || ctx.Err() != nil {
			return
		}
		// A stream keeps the token that it was opened with, and etcd forgets tokens.
		if errors.Is(err, rpctypes.ErrInvalidAuthToken) || errors.Is(err, rpctypes.ErrAuthOldRevision) {
			if time.Since(began) > renewalPause*maxRenewals {
				renewals = 0
			}
			if renewals++; renewals <= maxRenewals && sleep(ctx, time.Duration(renewals-1)*renewalPause) {
				w.s.conns.renew(c)
			}
		}
		if w.s.conns.left(c) {
			continue
		}
		if err != nil {
			w.pass(ctx, registry.WatchResponse{Err: w.s.explain(err)})
		}
		return
	}
}

// follow passes on what a watch on one member brings, until that ends. over is true
// once the reader was told of the end; an error has not been passed on.
func (w *watch) follow(ctx context.Context, c *conn) (over bool, err error) {
	bound, release := bind(ctx, c.ctx)
	defer release()
	from := w.open(bound, c)
	for {
		var res clientv3.WatchResponse
		var more bool
		select {
		case res, more = <-from:
		// The client closes the channel then, but one that ended together with its
		// stream only when it has another stream: when the member is back.
		case <-bound.Done():
		}
		if !more {
			return false, nil
		}
		if res.CompactRevision == 0 && res.Err() != nil {
			return false, watchError(res.Err())
		}
		r := watchResponse(res, w.from)
		if w.created != nil && res.Created && r.Err == nil && r.Revision >= w.from {
			r = w.created(ctx)
			w.from = r.Revision + 1 // what the read has seen comes once more
		}
		if !w.pass(ctx, r) {
			return true, nil
		}
	}
}

// watchError reads the error that etcd ends a single watch with: it comes as text.
func watchError(err error) error {
	if _, text, ok := strings.Cut(err.Error(), " desc = "); ok {
		return rpctypes.Error(status.Error(codes.Unknown, text))
	}
	return err
}

// pass hands on a response that says anything; false if it was the last.
func (w *watch) pass(ctx context.Context, r registry.WatchResponse) bool {
	if r.Err == nil && !r.Progress && len(r.Events) == 0 {
		return true
	}
	select {
	case w.out <- r:
		w.from = max(w.from, r.Revision+1)
		return r.Err == nil
	case <-ctx.Done():
		return false
	}
}

// presentLimit bounds the read that begins a WatchKey; past it the watch ends, and
// whoever holds it begins another.
const presentLimit = 5 * time.Second

// present is what happened to a key since a revision, as far as the key shows it.
func (s *Store) present(ctx context.Context, key string, from int64) registry.WatchResponse {
	ctx, cancel := context.WithTimeout(ctx, presentLimit)
	defer cancel()
	kv, revision, err := registry.GetKey(ctx, s, key)
	r := registry.WatchResponse{Revision: revision, Err: err}
	switch {
	case err != nil:
	case kv == nil:
		r.Events = []registry.Event{{KV: registry.KV{Key: key, ModRevision: revision}, Deleted: true}}
	case kv.ModRevision >= from:
		r.Events = []registry.Event{{KV: *kv}}
	}
	return r
}

func watchResponse(res clientv3.WatchResponse, from int64) registry.WatchResponse {
	r := registry.WatchResponse{Revision: res.Header.Revision, Progress: res.IsProgressNotify(), CompactRevision: res.CompactRevision}
	if res.CompactRevision != 0 {
		r.Err = registry.ErrCompacted
	}
	for _, e := range res.Events {
		if e.Kv.ModRevision < from {
			continue
		}
		ev := registry.Event{KV: convertKV(e.Kv), Deleted: e.Type == clientv3.EventTypeDelete}
		if e.PrevKv != nil {
			was := convertKV(e.PrevKv)
			ev.Previous = &was
		}
		r.Events = append(r.Events, ev)
	}
	// A watch that catches up is sent in batches of whole revisions, each under the
	// header of the store's newest one: only what the events say has been reached.
	if n := len(r.Events); n > 0 {
		r.Revision = r.Events[n-1].ModRevision
	}
	return r
}

// RequestProgress implements registry.Store.
func (s *Store) RequestProgress(ctx context.Context) error {
	c, _ := s.conns.use(ctx)
	ctx, release := bind(ctx, c.ctx)
	defer release()
	return s.explain(c.client.RequestProgress(watchContext(ctx)))
}
