package registry

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// ErrTakenAway ends an ownership, or a registration, whose key was deleted or
// replaced, or bound to another lease, by somebody else.
var ErrTakenAway = errors.New("key was taken away")

const (
	minWatchPause  = 20 * time.Millisecond
	maxWatchPause  = time.Second
	watchCallLimit = 5 * time.Second
)

// waitFree returns when a key that was seen is gone, or when it is to be looked at
// again since the watch has ended, or with ctx. It watches from the revision after
// the one seen, so that no deletion in between is missed.
func waitFree(ctx context.Context, st Store, seen KV) {
	watch, cancel := context.WithCancel(ctx)
	defer cancel()
	for r := range st.WatchKey(watch, seen.Key, seen.ModRevision+1) {
		if r.Err != nil {
			break
		}
		for _, e := range r.Events {
			// Created anew means that it was gone, whoever has it now.
			if e.Deleted || e.CreateRevision != seen.CreateRevision {
				return
			}
		}
	}
	sleep(ctx, minWatchPause)
}

// watchHeld watches a key that was created at a revision under a lease until that is
// true no more, and then returns an error that is ErrTakenAway; or until ctx ends,
// with the cause of that.
func watchHeld(ctx context.Context, st Store, key string, created int64, lease LeaseID) error {
	from := created + 1
	lost := func(kv KV) error {
		switch {
		case kv.CreateRevision == 0:
			return fmt.Errorf("%w: %s was deleted", ErrTakenAway, key)
		case kv.CreateRevision != created:
			return fmt.Errorf("%w: %w", ErrTakenAway, &HeldError{KV: kv})
		case kv.Lease != lease:
			return fmt.Errorf("%w: %s was bound to lease %s", ErrTakenAway, key, LeaseText(kv.Lease))
		}
		return nil
	}
	for pause := minWatchPause; ; pause = min(2*pause, maxWatchPause) {
		next, err := watchOnce(ctx, st, key, from, lost)
		if err != nil {
			return err
		}
		if next > from {
			pause = minWatchPause
		}
		from = next
		if !sleep(ctx, pause) {
			return context.Cause(ctx)
		}
		// History may be gone: what the key shows now takes its place.
		limited, cancel := context.WithTimeout(ctx, watchCallLimit)
		kv, revision, err := GetKey(limited, st, key)
		cancel()
		if err != nil {
			continue
		}
		if kv == nil {
			kv = &KV{Key: key}
		}
		if err := lost(*kv); err != nil {
			return err
		}
		from = max(from, revision+1)
	}
}

// watchOnce follows a key until its watch ends, and returns the revision to go on
// from, or the first error of lost.
func watchOnce(ctx context.Context, st Store, key string, from int64, lost func(KV) error) (int64, error) {
	watch, cancel := context.WithCancel(ctx)
	defer cancel()
	for r := range st.WatchKey(watch, key, from) {
		if r.Err != nil {
			break
		}
		for _, e := range r.Events {
			kv := e.KV
			if e.Deleted {
				kv = KV{Key: key}
			}
			if err := lost(kv); err != nil {
				return from, err
			}
		}
		from = max(from, r.Revision+1)
	}
	if ctx.Err() != nil {
		return from, context.Cause(ctx)
	}
	return from, nil
}
