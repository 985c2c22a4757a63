package storage

import (
	"context"
	"sync"
)

// watermark is an offset that only grows, and those who wait for it. It costs
// a channel for every offset that is waited for, not one for every waiter.
type watermark struct {
	mu      sync.Mutex
	offset  int64
	err     error // no more growth: why
	waiters map[int64]chan struct{}
	done    chan struct{} // closed: for those with nothing to wait for
}

func newWatermark(offset int64) *watermark {
	w := &watermark{offset: offset, waiters: map[int64]chan struct{}{}, done: make(chan struct{})}
	close(w.done)
	return w
}

func (w *watermark) load() int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.offset
}

func (w *watermark) failure() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

// passed returns a channel that is closed when the watermark is past offset, or
// will not grow any more.
func (w *watermark) passed(offset int64) <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.offset > offset || w.err != nil {
		return w.done
	}
	c := w.waiters[offset]
	if c == nil {
		c = make(chan struct{})
		w.waiters[offset] = c
	}
	return c
}

// advance moves the watermark up. Those who wait for offsets further on stay: they
// are few, as nobody waits for much more than what is being synced.
func (w *watermark) advance(offset int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if offset <= w.offset {
		return
	}
	w.offset = offset
	for at, c := range w.waiters {
		if at < offset {
			close(c)
			delete(w.waiters, at)
		}
	}
}

// stop ends all waiting; the first error stays. If it is this one, first is called,
// before anybody can see it.
func (w *watermark) stop(err error, first func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return
	}
	first()
	w.err = err
	for at, c := range w.waiters {
		close(c)
		delete(w.waiters, at)
	}
}

// await returns nil once the watermark is at least offset.
func (w *watermark) await(ctx context.Context, offset int64) error {
	for {
		w.mu.Lock()
		reached, err := w.offset >= offset, w.err
		w.mu.Unlock()
		if reached {
			return nil
		}
		if err != nil {
			return err
		}
		select {
		case <-w.passed(offset - 1):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
