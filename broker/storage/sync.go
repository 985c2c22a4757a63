package storage

import (
	"slices"
	"time"
)

// syncLoop makes durable what was appended. Appends that arrive while a sync runs
// gather for the next one, so the disk sets the pace: one sync at a time, each
// for all that is there. It ends when kick is closed.
func (l *Log) syncLoop() {
	defer close(l.syncDone)
	for range l.kick {
		l.mu.Lock()
		if l.durable.failure() != nil {
			l.mu.Unlock()
			continue
		}
		next := l.snapshot()
		l.syncMu.Lock() // before mu is let go: a roll must not come in between
		l.mu.Unlock()
		l.syncTo(next)
		l.syncMu.Unlock()
	}
}

// syncActive syncs with mu held: when a segment is sealed and at Close.
func (l *Log) syncActive() error {
	l.syncMu.Lock()
	defer l.syncMu.Unlock()
	if err := l.durable.failure(); err != nil {
		return err // of the sync that this one waited for
	}
	l.syncTo(l.snapshot())
	return l.durable.failure()
}

// snapshot is the view of readers once all that is appended now is durable. It is
// called with mu held.
func (l *Log) snapshot() *view {
	return &view{
		segments: l.view.Load().segments,
		durable:  l.end.Load(),
		position: l.position,
		index:    slices.Clip(l.tail.index),
		times:    slices.Clip(l.tail.times),
		latest:   l.tail.latest,
	}
}

// syncTo makes the active segment of a view durable, and shows it to readers. It
// is called with syncMu held.
func (l *Log) syncTo(next *view) {
	before := l.view.Load()
	if next.durable <= before.durable {
		return // an earlier sync has taken it along
	}
	began := time.Now()
	if err := next.segments[len(next.segments)-1].log.Sync(); err != nil {
		l.fail("sync", err)
		return
	}
	took := time.Since(began)
	// First the view, then the watermark: who was woken finds what it waited for.
	l.view.Store(next)
	l.durable.advance(next.durable)
	tell(l.opts.Listener.Synced, Synced{Dir: l.dir, From: before.durable, To: next.durable, Took: took})
}

// fail makes the log read-only for good. Who finds it failed finds that it was told.
func (l *Log) fail(op string, err error) *FailedError {
	failed := &FailedError{Dir: l.dir, Op: op, Err: err}
	l.durable.stop(failed, func() { tell(l.opts.Listener.Failed, failed) })
	return failed
}

// wakeSyncer asks for a sync. One request that waits is enough: the sync takes all
// that is there when it begins. It is called with mu held, and the log open.
func (l *Log) wakeSyncer() {
	select {
	case l.kick <- struct{}{}:
	default:
	}
}
