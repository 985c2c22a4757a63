package registry

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
)

// viewWorld is a store as a list of states, one for each revision, and watches
// that bring its changes at their own pace.
type viewWorld struct {
	t        *testing.T
	seed     uint64
	r        *rand.Rand
	prefixes []string
	states   []map[string]KV // by revision
	changes  [][]Event       // by revision
	sent     []int64         // to each watch: up to this revision

	m         viewMachine
	delivered []string
	expected  []string
	shadow    map[string]KV // made of the events delivered, nothing else
	kept      []keptSnapshot
}

type keptSnapshot struct {
	s    Snapshot
	want string
}

func newViewWorld(t *testing.T, seed uint64) *viewWorld {
	w := &viewWorld{t: t, seed: seed, r: rand.New(rand.NewPCG(seed, 2)), shadow: map[string]KV{}}
	w.prefixes = []string{"/ids/", "/topics/", "/brokers/"}[:1+w.r.IntN(3)]
	w.sent = make([]int64, len(w.prefixes))
	w.states, w.changes = []map[string]KV{{}}, [][]Event{nil}
	for range w.r.IntN(10) {
		w.write()
	}
	w.list()
	return w
}

func (w *viewWorld) fail(format string, args ...any) {
	w.t.Helper()
	w.t.Logf("seed %d, revision %d", w.seed, w.newest())
	w.t.Fatalf(format, args...)
}

func (w *viewWorld) newest() int64 { return int64(len(w.states) - 1) }

// write makes one revision of one to four changes.
func (w *viewWorld) write() {
	rev := int64(len(w.states))
	state := maps.Clone(w.states[rev-1])
	var events []Event
	used := map[string]bool{}
	for range 1 + w.r.IntN(4) {
		prefix := []string{"/ids/", "/topics/", "/brokers/", "/elsewhere/"}[w.r.IntN(4)]
		key := fmt.Sprintf("%s%d", prefix, w.r.IntN(4))
		if used[key] {
			continue
		}
		used[key] = true
		was, there := state[key]
		e := Event{KV: KV{Key: key, ModRevision: rev}}
		if there && w.r.IntN(2) == 0 {
			e.Deleted = true
			delete(state, key)
		} else {
			e.KV.Value, e.KV.CreateRevision = fmt.Appendf(nil, "%d", rev), rev
			if there {
				e.KV.CreateRevision = was.CreateRevision
			}
			state[key] = e.KV
		}
		events = append(events, e)
	}
	w.states, w.changes = append(w.states, state), append(w.changes, events)
}

func keysUnder(state map[string]KV, prefix string) (kvs []KV) {
	for _, key := range slices.Sorted(maps.Keys(state)) {
		if strings.HasPrefix(key, prefix) {
			kvs = append(kvs, state[key])
		}
	}
	return kvs
}

func spellKVs(kvs []KV) string {
	var b strings.Builder
	for _, kv := range kvs {
		fmt.Fprintf(&b, "%s=%s(%d,%d) ", kv.Key, kv.Value, kv.CreateRevision, kv.ModRevision)
	}
	return b.String()
}

func (w *viewWorld) want(rev int64) string {
	var b strings.Builder
	for _, prefix := range w.prefixes {
		b.WriteString(spellKVs(keysUnder(w.states[rev], prefix)) + "| ")
	}
	return b.String()
}

func (w *viewWorld) got(s Snapshot) string {
	var b strings.Builder
	for i := range w.prefixes {
		b.WriteString(spellKVs(s.Under(i)) + "| ")
	}
	return b.String()
}

// list is what the driver does at the beginning and after a gap.
func (w *viewWorld) list() {
	rev := w.newest()
	lists := make([][]KV, len(w.prefixes))
	for i, prefix := range w.prefixes {
		lists[i] = keysUnder(w.states[rev], prefix)
		w.sent[i] = rev
	}
	events := w.m.load(rev, lists)
	w.take(events, true)
	if w.m.revision != rev || w.m.wanted() != 0 {
		w.fail("after a list at %d: revision %d, wants %d", rev, w.m.revision, w.m.wanted())
	}
}

// response moves the i-th watch: events of one or more whole revisions, or progress.
func (w *viewWorld) response(i int) {
	upTo := w.sent[i] + int64(w.r.IntN(int(w.newest()-w.sent[i])+1))
	r := WatchResponse{Revision: upTo}
	for rev := w.sent[i] + 1; rev <= upTo; rev++ {
		for _, e := range w.changes[rev] {
			if strings.HasPrefix(e.Key, w.prefixes[i]) {
				r.Events = append(r.Events, e)
			}
		}
	}
	if n := len(r.Events); n == 0 {
		r.Progress = true
	} else if w.r.IntN(2) == 0 {
		r.Revision = r.Events[n-1].ModRevision // as the etcd store says it
		upTo = r.Revision
	}
	w.sent[i] = upTo
	before := w.m.revision
	w.take(w.m.step(i, r), false)
	if w.m.revision < before {
		w.fail("revision went from %d back to %d", before, w.m.revision)
	}
	if want := slices.Min(w.sent); w.m.revision != want {
		w.fail("revision %d, all watches have reached %d", w.m.revision, want)
	}
	for rev := before + 1; rev <= w.m.revision; rev++ {
		for _, prefix := range w.prefixes {
			for _, e := range w.changes[rev] {
				if strings.HasPrefix(e.Key, prefix) {
					w.expected = append(w.expected, fmt.Sprint(rev, e.Key, e.Deleted, string(e.Value)))
				}
			}
		}
	}
}

// take looks at events as a reader would, and at the snapshot after them.
func (w *viewWorld) take(events []Event, gap bool) {
	last := int64(0)
	for _, e := range events {
		if e.ModRevision < last {
			w.fail("event of %d after one of %d", e.ModRevision, last)
		}
		last = e.ModRevision
		was, there := w.shadow[e.Key]
		if there != (e.Previous != nil) || there && e.Previous.ModRevision != was.ModRevision {
			w.fail("%s: previous %+v, but it was %+v", e.Key, e.Previous, was)
		}
		if e.Deleted {
			if !there {
				w.fail("%s is deleted twice", e.Key)
			}
			delete(w.shadow, e.Key)
		} else {
			w.shadow[e.Key] = e.KV
		}
		if !gap {
			w.delivered = append(w.delivered, fmt.Sprint(e.ModRevision, e.Key, e.Deleted, string(e.Value)))
		}
	}
	s := w.m.snapshot()
	w.lookUp(s)
	if got, want := w.got(s), w.want(w.m.revision); got != want || s.Revision != w.m.revision {
		w.fail("snapshot at %d (%d): %s\nwant %s", s.Revision, w.m.revision, got, want)
	}
	var all []KV
	for _, prefix := range w.prefixes {
		all = append(all, keysUnder(w.shadow, prefix)...)
	}
	if got, want := spellKVs(all), strings.ReplaceAll(w.want(w.m.revision), "| ", ""); got != want {
		w.fail("the events delivered add up to %s\nwant %s", got, want)
	}
	if w.r.IntN(5) == 0 {
		w.kept = append(w.kept, keptSnapshot{s, w.got(s)})
	}
}

// lookUp holds the ways to look at a snapshot to each other.
func (w *viewWorld) lookUp(s Snapshot) {
	for i := range len(w.prefixes) + 1 { // one prefix too many
		kvs := s.Under(i)
		if all := slices.Collect(s.All(i)); spellKVs(all) != spellKVs(kvs) || s.Len(i) != len(kvs) {
			w.fail("prefix %d: %d keys by All, %d by Under, %d by Len", i, len(all), len(kvs), s.Len(i))
		}
		for range s.All(i) {
			break // may be left early
		}
		found := 0
		for _, kv := range kvs {
			if got, ok := s.Get(i, kv.Key); ok && spellKVs([]KV{got}) == spellKVs([]KV{kv}) {
				found++
			}
		}
		if _, ok := s.Get(i, "/ids/none"); ok || found != len(kvs) {
			w.fail("prefix %d: Get finds %d of %d keys", i, found, len(kvs))
		}
	}
}

// Snapshots are read by others while the View goes on.
func TestViewSnapshotsAreSafeToReadMeanwhile(t *testing.T) {
	var m viewMachine
	var list []KV
	for i := range 2000 {
		list = append(list, KV{Key: fmt.Sprintf("/k/%04d", i), ModRevision: 1})
	}
	m.load(1, [][]KV{list})
	var readers sync.WaitGroup
	for rev := int64(2); rev < 200; rev++ {
		s, sum := m.snapshot(), rev-1
		readers.Go(func() {
			newest := int64(0)
			for kv := range s.All(0) {
				newest = max(newest, kv.ModRevision)
			}
			if newest != sum {
				t.Errorf("snapshot at %d shows %d", sum, newest)
			}
		})
		kv := KV{Key: fmt.Sprintf("/k/%04d", rev*7), ModRevision: rev}
		m.step(0, WatchResponse{Revision: rev, Events: []Event{{KV: kv}}})
	}
	readers.Wait()
}

func TestViewEverySnapshotIsTheStoreAtOneRevision(t *testing.T) {
	for seed := range uint64(300) {
		w := newViewWorld(t, seed)
		for range 120 {
			switch n := w.r.IntN(20); {
			case n < 8:
				w.write()
			case n == 8 && w.r.IntN(3) == 0: // history is gone: list again
				w.list()
				w.expected, w.delivered = nil, nil
			default:
				w.response(w.r.IntN(len(w.prefixes)))
			}
			if !slices.Equal(w.delivered, w.expected) {
				w.fail("delivered %v\nwant %v", w.delivered, w.expected)
			}
			waiting := slices.ContainsFunc(w.m.parts, func(p viewPart) bool { return len(p.ahead) > 0 })
			if waiting != (w.m.wanted() > w.m.revision) || !waiting && w.m.wanted() != 0 {
				w.fail("events wait: %t; wants progress to %d at %d", waiting, w.m.wanted(), w.m.revision)
			}
		}
		for _, k := range w.kept {
			if got := w.got(k.s); got != k.want {
				w.fail("a snapshot at %d changed after it was handed out:\n%s\nwas %s", k.s.Revision, got, k.want)
			}
		}
	}
}
