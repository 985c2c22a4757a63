package wire

import (
	"context"
	"sync"
)

// window bounds the requests of a connection that are read but not answered. The
// reader enters, the writer leaves; only the reader ever waits.
type window struct {
	maxCount, maxBytes int

	mu           sync.Mutex
	count, bytes int

	left chan struct{} // capacity 1: somebody has left since the reader last looked
}

func newWindow(maxCount, maxBytes int) *window {
	return &window{maxCount: maxCount, maxBytes: maxBytes, left: make(chan struct{}, 1)}
}

// enter waits until a request of n bytes fits. One that is larger than the whole
// window fits when it is alone. stop ends the wait like ctx does, with errDraining.
func (w *window) enter(ctx context.Context, stop <-chan struct{}, n int) error {
	for !w.tryEnter(n) {
		select {
		case <-w.left:
		case <-stop:
			return errDraining
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

func (w *window) tryEnter(n int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.count > 0 && (w.count >= w.maxCount || w.bytes+n > w.maxBytes) {
		return false
	}
	w.count++
	w.bytes += n
	return true
}

func (w *window) leave(n int) {
	w.mu.Lock()
	w.count--
	w.bytes -= n
	w.mu.Unlock()
	select {
	case w.left <- struct{}{}:
	default: // the reader has not looked since; one wake-up is enough
	}
}

// empty tells whether every request has been answered.
func (w *window) empty() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.count == 0
}
