package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// ViewOptions are the settings of a View.
type ViewOptions struct {
	// Stall is how long the View may hear nothing from the store before it says
	// so with Trouble. It asks for progress four times in that time, and lists
	// again after half of it. Half of the session's granted time to live is right
	// where the View stands for the health of a session. Zero means 3 s.
	Stall time.Duration
	// Listener, which may be nil, is told how the View fares, by the View's
	// goroutine. It must not block, nor call Close.
	Listener func(ViewEvent)
	// Keep, if not nil, says which keys are of interest. The others are neither kept in
	// memory nor delivered; the store sends them all the same. It must give the same
	// answer for a key each time.
	Keep   func(key string) bool
	Logger *slog.Logger // nil discards
}

// ViewEventKind tells what happened to a View.
type ViewEventKind int

const (
	// ViewTrouble: the store has said nothing for ViewOptions.Stall, so what the
	// View shows may be old. Told once; Recovered follows when it is over. It is a
	// session's trouble too: Session.Check makes the session find out how it stands.
	ViewTrouble ViewEventKind = iota
	// ViewRecovered: the trouble is over, and the View shows what the store holds.
	ViewRecovered
	// ViewRelisted: a watch ended or was silent, so the prefixes were listed again
	// and the difference was delivered.
	ViewRelisted
)

// ViewEvent is told to ViewOptions.Listener.
type ViewEvent struct {
	Kind     ViewEventKind
	Revision int64         // of what the View shows
	Silent   time.Duration // how long the store has said nothing, or had when it was heard again
	Err      error         // the latest failure, or why the prefixes were listed again
}

func (e ViewEvent) String() string {
	switch e.Kind {
	case ViewTrouble:
		return fmt.Sprintf("view is in trouble: the registry has said nothing for %.1f s: %v", e.Silent.Seconds(), e.Err)
	case ViewRecovered:
		return fmt.Sprintf("view has recovered at revision %d after %.1f s", e.Revision, e.Silent.Seconds())
	}
	return fmt.Sprintf("view was listed again at revision %d: %v", e.Revision, e.Err)
}

// View keeps a live copy of what stands under some prefixes. It lists them at
// one revision, watches from the next, and after a compaction lists again and
// delivers the difference. Open starts it; Close ends it.
type View struct {
	store    Store
	prefixes []string
	o        ViewOptions
	cancel   context.CancelFunc
	stopped  chan struct{}
	changed  chan struct{} // holds a token after a change that nobody has taken
	trouble  chan struct{} // likewise after a stall
	heard    atomic.Int64  // when the store last said something about every prefix
	watching chan struct{} // closed when every watch has been brought up to the present
	troubled bool          // Trouble was told, Recovered not yet; of the View's goroutine

	mu       sync.Mutex
	machine  viewMachine
	onChange func(Snapshot, []Event)
}

// OpenView lists the prefixes, bounded by ctx, and then follows them until Close.
// onChange, which may be nil, is called with each change, in order and none left
// out: with what is there already before OpenView returns, later from the View's
// goroutine. It must not block, nor call the View. After a gap in the watch it is
// given the difference; there a key that was deleted and created again is one
// event whose Previous has another create-revision.
func OpenView(ctx context.Context, st Store, prefixes []string, o ViewOptions, onChange func(Snapshot, []Event)) (*View, error) {
	if o.Stall == 0 {
		o.Stall = DefaultTTL / 2
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	v := &View{store: st, prefixes: prefixes, o: o, onChange: onChange,
		stopped: make(chan struct{}), changed: make(chan struct{}, 1), trouble: make(chan struct{}, 1), watching: make(chan struct{})}
	if err := v.list(ctx, 0); err != nil {
		return nil, err
	}
	run, cancel := context.WithCancel(context.Background())
	v.cancel = cancel
	go v.run(run)
	return v, nil
}

// Snapshot is the newest consistent state.
func (v *View) Snapshot() Snapshot {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.machine.snapshot()
}

// Revision is that of Snapshot, without taking one.
func (v *View) Revision() int64 {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.machine.revision
}

// Heard is how long ago the store last said something about every prefix: that it
// changed, or that it did not. In a healthy View it stays below about a quarter of
// ViewOptions.Stall.
func (v *View) Heard() time.Duration { return v.store.Now() - time.Duration(v.heard.Load()) }

// Watching is closed when the store has brought every watch of the View up to the
// present for the first time. etcd does that every 100 ms; what is written before is
// seen so much later, and what is written after at once.
func (v *View) Watching() <-chan struct{} { return v.watching }

// Changed receives after one or more changes; take Snapshot then.
func (v *View) Changed() <-chan struct{} { return v.changed }

// Trouble receives when the store has said nothing for ViewOptions.Stall, and
// again as long as that lasts: what the View shows may be old. To be told once, and
// of the end too, use ViewOptions.Listener.
func (v *View) Trouble() <-chan struct{} { return v.trouble }

// Close ends the View and waits for its goroutines.
func (v *View) Close() {
	v.cancel()
	<-v.stopped
}

// list loads all prefixes at one revision. The whole is bounded by ctx, and each
// call of the store by limit if that is not 0: many keys may take their time, as
// long as the store goes on answering.
func (v *View) list(ctx context.Context, limit time.Duration) error {
	var revision int64
	lists := make([][]KV, len(v.prefixes))
	for i, prefix := range v.prefixes {
		kvs, at, err := listPages(ctx, v.store, prefix, revision, limit, v.o.Keep)
		if err != nil {
			return fmt.Errorf("list %s: %w", prefix, err)
		}
		lists[i], revision = kvs, at
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	events := v.machine.load(revision, lists)
	v.publish(events)
	v.heard.Store(int64(v.store.Now()))
	return nil
}

// publish is called with the lock held.
func (v *View) publish(events []Event) {
	if len(events) == 0 {
		return
	}
	if v.onChange != nil {
		v.onChange(v.machine.snapshot(), events)
	}
	notify(v.changed)
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

const (
	minRelistPause = 20 * time.Millisecond
	maxRelistPause = 2 * time.Second
	// The store ignores a request for progress while it brings a new watch up to
	// date, which etcd does ten times a second.
	progressRetry = 50 * time.Millisecond
	// The first answer tells that all watches are up to date, and somebody may wait for it.
	firstProgressRetry = 10 * time.Millisecond
)

// run follows the prefixes, and lists again whenever a watch ends.
func (v *View) run(ctx context.Context) {
	defer close(v.stopped)
	longest := min(maxRelistPause, v.o.Stall/4)
	pause := min(minRelistPause, longest)
	for {
		began := v.store.Now()
		why := v.follow(ctx)
		if v.store.Now()-began > maxRelistPause {
			pause = min(minRelistPause, longest)
		}
		limit := v.o.Stall / 4
		for listed := false; !listed; {
			if !sleep(ctx, pause) {
				return
			}
			pause = min(2*pause, longest)
			heard := time.Duration(v.heard.Load())
			err := v.list(ctx, limit)
			if ctx.Err() != nil {
				return
			}
			if listed = err == nil; listed {
				v.relisted(v.store.Now()-heard, why)
			} else {
				v.notListed(err)
			}
			if v.troubled {
				// The store may be slow for good: it is then shown late, but shown.
				limit = min(2*limit, 4*v.o.Stall)
			}
		}
	}
}

func (v *View) tell(e ViewEvent) {
	e.Revision = v.Revision()
	message := map[ViewEventKind]string{ViewTrouble: "view hears nothing from the store",
		ViewRecovered: "view hears from the store again", ViewRelisted: "view was listed again"}[e.Kind]
	v.o.Logger.Debug(message, "rev", e.Revision, "silent", e.Silent, "error", e.Err)
	if v.o.Listener != nil {
		v.o.Listener(e)
	}
}

func (v *View) relisted(silent time.Duration, why error) {
	v.tell(ViewEvent{Kind: ViewRelisted, Silent: silent, Err: why})
	if v.troubled {
		v.troubled = false
		v.tell(ViewEvent{Kind: ViewRecovered, Silent: silent})
	}
}

func (v *View) notListed(err error) {
	silent := v.Heard()
	if silent < v.o.Stall {
		return
	}
	if !v.troubled {
		v.troubled = true
		v.tell(ViewEvent{Kind: ViewTrouble, Silent: silent, Err: err})
	}
	notify(v.trouble)
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

type partResponse struct {
	part int
	WatchResponse
	closed bool
}

// errSilent ends a watch that brings not even progress. Often it is only that: etcd
// answers no request for progress while a watch of the stream begins in the future,
// as all do after the stream was opened again in a store where nobody writes.
var errSilent = errors.New("watch is silent")

// follow watches all prefixes from the machine's revision on until one of the
// watches ends, or nothing has been heard for half of ViewOptions.Stall.
func (v *View) follow(parent context.Context) error {
	ctx, cancel := context.WithCancel(parent)
	var readers sync.WaitGroup
	defer readers.Wait()
	defer cancel()
	responses := make(chan partResponse)
	heard := slices.Repeat([]int64{v.heard.Load()}, len(v.prefixes))
	from := v.Revision() + 1
	for i, prefix := range v.prefixes {
		ch := v.store.Watch(ctx, prefix, from)
		readers.Go(func() { pass(ctx, i, ch, responses) })
	}
	tick := time.NewTicker(v.o.Stall / 4)
	defer tick.Stop()
	retry := time.NewTimer(0)
	defer retry.Stop()
	spoke := map[int]bool{} // watches that have said something
	// One request is under way at a time, for the events held back so far: one for
	// each event would be answered to every watch of the process.
	var asked int64
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case r := <-responses:
			switch {
			case r.closed:
				return errors.New("watch closed")
			case r.Err != nil:
				return r.Err
			}
			heard[r.part] = int64(v.store.Now())
			v.heard.Store(slices.Min(heard)) // one watch that hangs must not hide behind the others
			if spoke[r.part] = true; len(spoke) == len(v.prefixes) {
				v.upToDate()
			}
			wanted, reached := v.take(r)
			if reached >= asked {
				asked = 0
			}
			if wanted == 0 || asked != 0 {
				continue
			}
			asked = wanted
		case <-retry.C:
			if asked == 0 && len(spoke) == len(v.prefixes) {
				continue
			}
		case <-tick.C:
			if v.Heard() >= v.o.Stall/2 {
				return errSilent
			}
		}
		if len(spoke) < len(v.prefixes) {
			retry.Reset(firstProgressRetry)
		} else {
			retry.Reset(progressRetry)
		}
		limited, cancelAsk := context.WithTimeout(ctx, v.o.Stall/4)
		if err := v.store.RequestProgress(limited); err != nil && ctx.Err() == nil {
			v.o.Logger.Debug("progress request failed", "error", err)
		}
		cancelAsk()
	}
}

// upToDate tells that every watch is; only the View's goroutine calls it.
func (v *View) upToDate() {
	select {
	case <-v.watching:
	default:
		close(v.watching)
	}
}

// pass hands on the responses of one watch, and that it ended.
func pass(ctx context.Context, part int, from <-chan WatchResponse, to chan<- partResponse) {
	for r := range from {
		select {
		case to <- partResponse{part: part, WatchResponse: r}:
		case <-ctx.Done():
		}
	}
	select {
	case to <- partResponse{part: part, closed: true}:
	case <-ctx.Done():
	}
}

// take gives a response to the machine. It returns up to where progress is wanted,
// and what the machine has reached.
func (v *View) take(r partResponse) (wanted, reached int64) {
	if v.o.Keep != nil {
		r.Events = v.kept(r.Events)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.publish(v.machine.step(r.part, r.WatchResponse))
	return v.machine.wanted(), v.machine.revision
}

// kept returns the events of keys that are of interest. The list is not ours to change.
func (v *View) kept(events []Event) (kept []Event) {
	for i := range events {
		if v.o.Keep(events[i].Key) {
			kept = append(kept, events[i])
		}
	}
	return kept
}
