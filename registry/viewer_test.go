package registry_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

const stall = ttl / 2

func put(t *testing.T, st registry.Store, pairs ...string) int64 {
	t.Helper()
	var ops []registry.Op
	for i := 0; i < len(pairs); i += 2 {
		ops = append(ops, registry.Put(pairs[i], []byte(pairs[i+1]), 0))
	}
	return txn(t, st, ops...)
}

func txn(t *testing.T, st registry.Store, ops ...registry.Op) int64 {
	t.Helper()
	res, err := st.Txn(t.Context(), registry.Txn{Then: ops})
	if err != nil {
		t.Fatal(err)
	}
	return res.Revision
}

// journal keeps what a View tells.
type journal struct {
	mu    sync.Mutex
	lines []string
}

func (j *journal) note(_ registry.Snapshot, events []registry.Event) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, e := range events {
		if e.Deleted {
			j.lines = append(j.lines, "-"+e.Key)
		} else {
			j.lines = append(j.lines, e.Key+"="+string(e.Value))
		}
	}
}

// take returns the lines so far and forgets them.
func (j *journal) take() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	lines := strings.Join(j.lines, " ")
	j.lines = nil
	return lines
}

func openView(t *testing.T, st registry.Store, j *journal, prefixes ...string) *registry.View {
	t.Helper()
	v, err := registry.OpenView(t.Context(), st, prefixes, registry.ViewOptions{}, j.note)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func keys(s registry.Snapshot, parts int) string {
	var names []string
	for i := range parts {
		for _, kv := range s.Under(i) {
			names = append(names, kv.Key+"="+string(kv.Value))
		}
	}
	return strings.Join(names, " ")
}

func want(t *testing.T, what, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %q, want %q", what, got, want)
	}
}

func quiet(t *testing.T, v *registry.View) {
	t.Helper()
	select {
	case <-v.Trouble():
		t.Error("trouble")
	default:
	}
}

func TestViewFollows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		put(t, st, "/ids/a", "1", "/topics/t", "4", "/else", "x")
		var j journal
		v := openView(t, st, &j, "/ids/", "/topics/", "/brokers/")
		want(t, "at first", j.take(), "/ids/a=1 /topics/t=4")
		want(t, "first snapshot", keys(v.Snapshot(), 3), "/ids/a=1 /topics/t=4")
		<-v.Changed()
		// case 58: two prefixes changed in one revision take effect together.
		seen := make(chan registry.Snapshot, 1)
		go func() { <-v.Changed(); seen <- v.Snapshot() }()
		rev := put(t, st, "/ids/b", "2", "/topics/t", "8")
		s := <-seen
		want(t, "snapshot", keys(s, 3), "/ids/a=1 /ids/b=2 /topics/t=8")
		if s.Revision != rev {
			t.Errorf("revision %d, want %d", s.Revision, rev)
		}
		txn(t, st, registry.Delete("/ids/a"))
		time.Sleep(time.Second)
		want(t, "events", j.take(), "/ids/b=2 /topics/t=8 -/ids/a")
		quiet(t, v)
		v.Close()
		put(t, st, "/ids/c", "after Close")
		synctest.Wait()
		want(t, "after Close", j.take(), "")
	})
}

// Nothing is written for an hour: no trouble, nothing is listed again.
func TestViewOfAQuietStoreIsQuiet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		var ranges, asks atomic.Int64
		st.SetHooks(memory.Hooks{Before: func(_ context.Context, op string) error {
			switch op {
			case "range":
				ranges.Add(1)
			case "progress":
				asks.Add(1)
			}
			return nil
		}})
		v := openView(t, st, &journal{}, "/ids/", "/topics/")
		time.Sleep(time.Hour)
		quiet(t, v)
		v.Close()
		// One request more, at first, tells that the watches are up to date.
		if ranges.Load() != 2 || asks.Load() > 1+int64(time.Hour/(stall/4)) {
			t.Errorf("%d ranges and %d requests for progress", ranges.Load(), asks.Load())
		}
	})
}

// A View says when its watches have been brought up to the present, each of them.
func TestViewSaysWhenItIsWatching(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		st.HoldWatches(true)
		v := openView(t, st, &journal{}, "/ids/", "/topics/")
		defer v.Close()
		select {
		case <-v.Watching():
			t.Error("watching, and the store has said nothing")
		case <-time.After(stall / 4):
		}
		st.HoldWatches(false)
		began := time.Now()
		<-v.Watching()
		if took := time.Since(began); took > 10*time.Millisecond {
			t.Errorf("said so after %s", took)
		}
	})
}

// A burst on one prefix must not ask for progress once for each event: every answer
// goes to every watch of the process.
func TestViewAsksForProgressOneAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		v := openView(t, st, &journal{}, "/ids/", "/topics/", "/brokers/")
		var asks atomic.Int64
		st.SetHooks(memory.Hooks{Before: func(_ context.Context, op string) error {
			if op == "progress" {
				asks.Add(1)
				time.Sleep(20 * time.Millisecond) // as far as the store is away
			}
			return nil
		}})
		for i := range 1000 {
			put(t, st, fmt.Sprintf("/ids/%d", i), "x")
			time.Sleep(time.Millisecond)
		}
		time.Sleep(100 * time.Millisecond)
		if n := len(v.Snapshot().Under(0)); n != 1000 {
			t.Errorf("%d keys, want 1000", n)
		}
		if n := asks.Load(); n < 10 || n > 60 {
			t.Errorf("asked %d times in a second", n)
		}
		v.Close()
	})
}

// blockable is the network between a process and its store.
type blockable struct {
	*memory.Store
	mu      sync.Mutex
	blocked chan struct{}
}

func newBlockable() *blockable {
	b := &blockable{Store: memory.New()}
	b.SetHooks(memory.Hooks{Before: b.wait})
	return b
}

func (b *blockable) wait(ctx context.Context, op string) error {
	b.mu.Lock()
	blocked := b.blocked
	b.mu.Unlock()
	if blocked == nil || op == "txn" { // writes are others', who can reach the store
		return nil
	}
	select {
	case <-blocked:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (b *blockable) block() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.blocked = make(chan struct{})
	b.HoldWatches(true)
}

func (b *blockable) unblock() {
	b.mu.Lock()
	close(b.blocked)
	b.blocked = nil
	b.mu.Unlock()
	b.HoldWatches(false)
}

// case 57: cut off, others change, history is compacted. Short cuts end while the
// View still watches, long ones while it lists.
func TestViewAfterACompaction(t *testing.T) {
	for _, cut := range []time.Duration{100 * time.Millisecond, time.Second, 2 * time.Second, 10 * time.Second} {
		t.Run(cut.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				st := newBlockable()
				put(t, st, "/ids/c1", "1", "/ids/c2", "2", "/ids/c4", "4")
				var j journal
				v := openView(t, st, &j, "/ids/", "/topics/")
				j.take()
				st.block()
				put(t, st, "/ids/c3", "3")
				txn(t, st, registry.Delete("/ids/c1"))
				txn(t, st, registry.Delete("/ids/c4"))
				rev := put(t, st, "/ids/c4", "anew")
				st.Compact(rev)
				time.Sleep(cut)
				want(t, "while cut off", j.take(), "")
				st.unblock()
				time.Sleep(time.Second)
				want(t, "the difference", j.take(), "/ids/c3=3 -/ids/c1 /ids/c4=anew")
				want(t, "snapshot", keys(v.Snapshot(), 2), "/ids/c2=2 /ids/c3=3 /ids/c4=anew")
				put(t, st, "/ids/c5", "5")
				time.Sleep(time.Second)
				want(t, "afterwards", j.take(), "/ids/c5=5")
				select {
				case <-v.Trouble():
					if cut < stall {
						t.Errorf("trouble after %s", cut)
					}
				default:
					if cut > 2*stall {
						t.Error("no trouble")
					}
				}
				v.Close()
			})
		})
	}
}

// Keys that are of no interest are nowhere: not in the list, the events, the snapshots
// nor what is listed again; other Views have them. What is kept is as without.
func TestViewKeepsWhatIsOfInterest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := newBlockable()
		put(t, st, "/g/ids/a", "1", "/g/offsets/0", "10", "/t", "4")
		var j, whole journal
		all := openView(t, st.Store, &whole, "/g/")
		v, err := registry.OpenView(t.Context(), st, []string{"/g/", "/t"},
			registry.ViewOptions{Keep: func(key string) bool { return !strings.Contains(key, "/offsets/") }}, j.note)
		if err != nil {
			t.Fatal(err)
		}
		want(t, "at first", j.take(), "/g/ids/a=1 /t=4")
		whole.take()
		<-v.Changed()
		for range 3 {
			put(t, st, "/g/offsets/0", "11")
		}
		txn(t, st, registry.Delete("/g/offsets/0"))
		quiet(t, v)
		rev := put(t, st, "/g/offsets/0", "12", "/g/ids/b", "2", "/g/offsets/1", "5", "/t", "8")
		time.Sleep(time.Second)
		want(t, "events", j.take(), "/g/ids/b=2 /t=8")
		want(t, "snapshot", keys(v.Snapshot(), 2), "/g/ids/a=1 /g/ids/b=2 /t=8")
		if got := v.Revision(); got != rev {
			t.Errorf("revision %d, want %d", got, rev)
		}
		want(t, "events of all", whole.take(), "/g/offsets/0=11 /g/offsets/0=11 /g/offsets/0=11 -/g/offsets/0 /g/offsets/0=12 /g/ids/b=2 /g/offsets/1=5")
		st.block()
		put(t, st, "/g/offsets/2", "1", "/g/ids/c", "3")
		st.Compact(txn(t, st, registry.Delete("/g/offsets/0"), registry.Delete("/g/ids/a")))
		time.Sleep(10 * time.Second)
		st.unblock()
		time.Sleep(5 * time.Second)
		want(t, "the difference", j.take(), "/g/ids/c=3 -/g/ids/a")
		want(t, "listed again", keys(v.Snapshot(), 2), "/g/ids/b=2 /g/ids/c=3 /t=8")
		v.Close()
		all.Close()
	})
}

// gap writes between the list of a View and its watches.
type gap struct {
	*memory.Store
	write func()
}

func (g *gap) Watch(ctx context.Context, prefix string, from int64) <-chan registry.WatchResponse {
	if g.write != nil {
		write := g.write
		g.write = nil
		write()
	}
	return g.Store.Watch(ctx, prefix, from)
}

// case 57, second half: created after the list and before the watch; and also
// between the lists of two prefixes.
func TestViewMissesNothingBetweenListAndWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := &gap{Store: memory.New()}
		put(t, st, "/ids/c2", "2")
		st.write = func() { put(t, st, "/ids/c3", "3") }
		lists := 0
		st.SetHooks(memory.Hooks{Before: func(ctx context.Context, op string) error {
			if op == "range" {
				if lists++; lists == 2 { // /topics/ has been listed, /ids/ not yet
					put(t, st, "/topics/t", "4", "/ids/c1", "1")
				}
			}
			return nil
		}})
		var j journal
		st.HoldWatches(true) // what the view shows first is what it listed
		v := openView(t, st, &j, "/topics/", "/ids/")
		want(t, "one revision of all prefixes", keys(v.Snapshot(), 2), "/ids/c2=2")
		st.HoldWatches(false)
		time.Sleep(time.Second)
		want(t, "events", j.take(), "/ids/c2=2 /topics/t=4 /ids/c1=1 /ids/c3=3")
		v.Close()
	})
}

// Watches that hang in a store that answers everything else.
func TestViewListsAgainWhenItsWatchIsSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		v := openView(t, st, &journal{}, "/ids/", "/topics/")
		st.HoldWatches(true)
		put(t, st, "/ids/a", "1")
		<-v.Changed()
		want(t, "snapshot", keys(v.Snapshot(), 2), "/ids/a=1")
		time.Sleep(time.Minute)
		quiet(t, v) // what it shows is never older than half the stall
		put(t, st, "/ids/a", "2")
		began := time.Now()
		<-v.Changed()
		if took := time.Since(began); took > stall {
			t.Errorf("seen after %s", took)
		}
		st.HoldWatches(false)
		v.Close()
	})
}

// deaf is a store of which the watches on one prefix bring nothing.
type deaf struct {
	*memory.Store
	prefix string
}

func (d deaf) Watch(ctx context.Context, prefix string, from int64) <-chan registry.WatchResponse {
	if prefix != d.prefix {
		return d.Store.Watch(ctx, prefix, from)
	}
	nothing := make(chan registry.WatchResponse)
	context.AfterFunc(ctx, func() { close(nothing) })
	return nothing
}

// One watch that hangs does not hide behind another that is busy.
func TestViewHearsOfEveryPrefix(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := deaf{memory.New(), "/topics/"}
		v := openView(t, st, &journal{}, "/ids/", "/topics/")
		put(t, st, "/topics/t", "4")
		for i := range 20 {
			time.Sleep(100 * time.Millisecond)
			put(t, st, "/ids/a", fmt.Sprint(i))
		}
		if _, seen := v.Snapshot().Get(1, "/topics/t"); !seen || v.Heard() > stall/2 {
			t.Errorf("seen after 2 s: %t; heard %s ago", seen, v.Heard())
		}
		v.Close()
	})
}

func TestViewSaysTroubleWhenTheStoreIsSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := newBlockable()
		var events eventLog[registry.ViewEvent]
		v, err := registry.OpenView(t.Context(), st, []string{"/ids/"}, registry.ViewOptions{Listener: events.note}, nil)
		if err != nil {
			t.Fatal(err)
		}
		for range 600 {
			time.Sleep(100 * time.Millisecond)
			if h := v.Heard(); h > stall/4+10*time.Millisecond {
				t.Fatalf("heard nothing for %s in a healthy store", h)
			}
		}
		quiet(t, v)
		want(t, "in a healthy store", fmt.Sprint(events.take()), "[]")
		st.block()
		began := time.Now()
		<-v.Trouble()
		if took := time.Since(began); took < stall*3/4 || took > stall*3/2 {
			t.Errorf("trouble after %s, want about %s", took, stall)
		}
		<-v.Trouble() // and again, as long as it lasts
		time.Sleep(time.Minute)
		if got := events.take(); len(got) != 1 || got[0].Kind != registry.ViewTrouble || got[0].Silent < stall || got[0].Err == nil || v.Heard() < time.Minute {
			t.Errorf("told %v, heard %s ago", got, v.Heard())
		}
		rev := put(t, st, "/ids/a", "1")
		st.unblock()
		<-v.Changed()
		synctest.Wait()
		want(t, "snapshot", keys(v.Snapshot(), 1), "/ids/a=1")
		if got := events.take(); len(got) != 2 || got[0].Kind != registry.ViewRelisted || got[0].Err == nil ||
			got[1].Kind != registry.ViewRecovered || got[1].Silent < time.Minute || got[1].Revision != rev {
			t.Errorf("told %v", got)
		}
		if v.Heard() > stall/4 || v.Revision() != rev {
			t.Errorf("heard %s ago, revision %d", v.Heard(), v.Revision())
		}
		for len(v.Trouble()) > 0 {
			<-v.Trouble()
		}
		time.Sleep(time.Minute)
		quiet(t, v)
		want(t, "afterwards", fmt.Sprint(events.take()), "[]")
		// It can be closed while it is cut off.
		st.block()
		time.Sleep(10 * time.Second)
		if got := events.take(); len(got) != 1 || got[0].Kind != registry.ViewTrouble {
			t.Errorf("the second time told %v", got)
		}
		v.Close()
	})
}

func TestViewCannotBeOpenedWithoutAStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := newBlockable()
		st.block()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := registry.OpenView(ctx, st, []string{"/ids/"}, registry.ViewOptions{}, nil); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "/ids/") {
			t.Errorf("error %v", err)
		}
	})
}

// More keys than List reads at a time, with writes between the pages.
func TestListReadsOneRevision(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		const n = 12_000
		for from := 0; from < n; from += registry.MaxTxnOps {
			var ops []registry.Op
			for i := from; i < min(n, from+registry.MaxTxnOps); i++ {
				ops = append(ops, registry.Put(fmt.Sprintf("/k/%05d", i), nil, 0))
			}
			txn(t, st, ops...)
		}
		before := st.Revision()
		pages := 0
		st.SetHooks(memory.Hooks{Before: func(_ context.Context, op string) error {
			if op == "range" {
				if pages++; pages > 1 {
					txn(t, st, registry.Delete(fmt.Sprintf("/k/%05d", n-pages)), registry.Put(fmt.Sprintf("/k/%05d+", n-pages), nil, 0))
				}
			}
			return nil
		}})
		kvs, rev, err := registry.List(t.Context(), st, "/k/", 0)
		if err != nil || len(kvs) != n || rev != before || pages != 3 {
			t.Errorf("%d keys at %d in %d pages, error %v; want %d at %d in 3", len(kvs), rev, pages, err, n, before)
		}
		if !slices.IsSortedFunc(kvs, func(a, b registry.KV) int { return strings.Compare(a.Key, b.Key) }) {
			t.Error("not in order")
		}
	})
}

// A view so big that listing it takes longer than a call may: it is listed again
// all the same, since each call is answered in time.
func TestViewOfManyKeysIsListedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		const n = 12_000
		for from := 0; from < n; from += registry.MaxTxnOps {
			var ops []registry.Op
			for i := from; i < min(n, from+registry.MaxTxnOps); i++ {
				ops = append(ops, registry.Put(fmt.Sprintf("/k/%05d", i), nil, 0))
			}
			txn(t, st, ops...)
		}
		st.SetHooks(memory.Hooks{Before: func(ctx context.Context, op string) error {
			if op == "range" {
				return pauseFor(ctx, stall/6)
			}
			return nil
		}})
		var events eventLog[registry.ViewEvent]
		v, err := registry.OpenView(t.Context(), st, []string{"/k/"}, registry.ViewOptions{Listener: events.note}, nil)
		if err != nil {
			t.Fatal(err)
		}
		<-v.Changed()
		st.HoldWatches(true)
		st.Compact(put(t, st, "/k/new", "1"))
		<-v.Changed()
		synctest.Wait()
		if got := events.take(); v.Snapshot().Len(0) != n+1 || len(got) != 1 || got[0].Kind != registry.ViewRelisted {
			t.Errorf("%d keys, told %v", v.Snapshot().Len(0), got)
		}
		quiet(t, v)
		v.Close()
	})
}

// A Claim whose reply was lost is repeated, and finds what it did.
func TestClaimAfterALostReply(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		s := openSession(t, st)
		g := registry.Root("").Group("g")
		lose := errors.New("connection reset")
		st.SetHooks(memory.Hooks{After: func(_ context.Context, op string) error {
			if op == "txn" {
				return lose
			}
			return nil
		}})
		if _, err := registry.Register(t.Context(), st, s, g.ID("a"), []byte("a")); !errors.Is(err, lose) {
			t.Fatal(err)
		}
		st.SetHooks(memory.Hooks{})
		r, err := registry.Register(t.Context(), st, s, g.ID("a"), []byte("a"))
		if err != nil || r.Revision != st.Revision() {
			t.Fatalf("%+v at %d, error %v", r, st.Revision(), err)
		}
		guard := registry.Guard{Registration: r, IDs: g.IDs(), Snapshot: st.Revision()}
		claim := []registry.OwnerClaim{{Key: g.Owner(registry.Partition{Topic: "t", Home: 1}), Value: []byte("a-0")}}
		st.SetHooks(memory.Hooks{After: func(context.Context, string) error { return lose }})
		if _, _, err := registry.Claim(t.Context(), st, s.Lease(), guard, claim, nil); !errors.Is(err, lose) {
			t.Fatal(err)
		}
		st.SetHooks(memory.Hooks{})
		results, _, err := registry.Claim(t.Context(), st, s.Lease(), guard, claim, nil)
		if err != nil || results[0].Holder != nil || results[0].Token != st.Revision() || string(results[0].Value) != "a-0" {
			t.Fatalf("%+v at %d, error %v", results, st.Revision(), err)
		}
		closeSession(t, s)
	})
}

// A view in trouble makes its session ask how it stands, sooner than by a renewal.
func TestViewTroubleIsTheSessionsTrouble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		s, err := registry.OpenSession(t.Context(), st, registry.SessionOptions{TTL: registry.MaxTTL})
		if err != nil {
			t.Fatal(err)
		}
		v, err := registry.OpenView(t.Context(), st, []string{"/ids/"}, registry.ViewOptions{Listener: func(e registry.ViewEvent) {
			if e.Kind == registry.ViewTrouble {
				s.Check()
			}
		}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute + time.Second) // just after a renewal
		st.HoldWatches(true)
		st.SetHooks(memory.Hooks{Before: func(_ context.Context, op string) error {
			if op == "range" {
				return errors.New("unreachable")
			}
			return nil
		}})
		st.Expire(s.Lease())
		if took := ended(t, s, registry.ErrLeaseGone); took > 2*stall {
			t.Errorf("learned of it after %s; a renewal comes every %s", took, registry.MaxTTL/3)
		}
		st.SetHooks(memory.Hooks{})
		st.HoldWatches(false)
		v.Close()
		closeSession(t, s)
	})
}

// A store whose answers take longer than a View is used to is listed again all the
// same, after the trouble was told.
func TestViewOfASlowStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		put(t, st, "/ids/a", "1")
		var j journal
		v := openView(t, st, &j, "/ids/")
		defer v.Close()
		st.SetHooks(memory.Hooks{Before: func(ctx context.Context, op string) error {
			if op != "range" {
				return nil
			}
			select {
			case <-time.After(stall):
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}})
		st.HoldWatches(true)
		put(t, st, "/ids/b", "2")
		st.Compact(st.Revision())
		began := time.Now()
		<-v.Trouble()
		if took := time.Since(began); took > stall+stall/4 {
			t.Errorf("trouble was told after %s", took)
		}
		st.HoldWatches(false)
		time.Sleep(10 * stall)
		want(t, "snapshot", keys(v.Snapshot(), 1), "/ids/a=1 /ids/b=2")
	})
}
