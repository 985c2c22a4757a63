package storetest

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/muster-io/muster/registry"
)

func watchCases() []Case {
	return []Case{
		{"watch/from a revision", watchFrom},
		{"watch/one revision is one response", watchWhole},
		{"watch/one revision over two prefixes", watchViews},
		{"watch/one key", watchKey},
		{"watch/compacted", watchCompacted},
		{"watch/ends with its context", watchEnds},
		{"watch/progress never overtakes events", watchProgress},
		{"watch/progress in a quiet store", watchQuiet},
	}
}

func watchFrom(t *testing.T, st registry.Store, prefix string) {
	key := prefix + "k"
	put(t, st, key, "0")
	from := put(t, st, key, "1")
	put(t, st, prefix[:len(prefix)-1]+"x", "beside the prefix")
	put(t, st, key, "2")
	w := watch(t, st, prefix, from)
	past := w.events(2) // from the past, the first one included
	put(t, st, prefix+"new", "3")
	do(t, st, registry.Delete(key))
	all := append(past, w.events(2)...)
	var got []string
	for _, e := range all {
		text := string(e.Value)
		if e.Deleted {
			text = "deleted"
		}
		if e.Previous != nil {
			text += " was " + string(e.Previous.Value)
		}
		got = append(got, text)
	}
	if want := "1 was 0, 2 was 1, 3, deleted was 2"; strings.Join(got, ", ") != want {
		t.Errorf("events: %s; want: %s", strings.Join(got, ", "), want)
	}
	if e := all[3]; e.Key != key || e.ModRevision != all[2].ModRevision+1 || len(e.Value) != 0 {
		t.Errorf("deletion: %+v", e)
	}
	if all[0].ModRevision != from {
		t.Errorf("first event is of %d, want %d", all[0].ModRevision, from)
	}
}

// case 58.
func watchWhole(t *testing.T, st registry.Store, prefix string) {
	start := put(t, st, prefix[:len(prefix)-1]+"x", "beside the prefix")
	live := watch(t, st, prefix, start+1)
	live.reaches(start) // it is there before the writes come
	for range 5 {
		do(t, st, append(puts(prefix, 20), registry.Put(prefix+"last", nil, 0))...)
	}
	do(t, st, registry.Op{Kind: registry.OpDelete, Key: prefix, Prefix: true})
	for name, w := range map[string]*watching{"live": live, "from the past": watch(t, st, prefix, start+1)} {
		// A late watch may be given several revisions at once, but none in parts:
		// events has checked that.
		for i, e := range w.events(6 * 21) {
			if n := i / 21; e.ModRevision != start+1+int64(n) || e.Deleted != (n == 5) {
				t.Fatalf("%s: event %d is of revision %d, want %d", name, i, e.ModRevision, start+1+int64(n))
			}
		}
	}
}

// case 58, as its readers meet it: a member and a topic in one transaction. A View
// shows both or none.
func watchViews(t *testing.T, st registry.Store, prefix string) {
	root := registry.Root(strings.TrimSuffix(prefix, "/"))
	member, topic := root.Group("g").ID("c3"), root.Topic("T")
	do(t, st, registry.Put(member, []byte("0"), 0), registry.Put(topic, []byte("0"), 0))
	seen := make(chan string, 1000)
	v, err := registry.OpenView(within(t), st, []string{root.Group("g").IDs(), root.Topics()}, registry.ViewOptions{},
		func(s registry.Snapshot, events []registry.Event) {
			ids, topics := s.Under(0), s.Under(1)
			if len(ids) != 1 || len(topics) != 1 || string(ids[0].Value) != string(topics[0].Value) {
				t.Errorf("revision %d: %v and %v", s.Revision, ids, topics)
			}
			for i, e := range events { // whole revisions at a time, also where several come at once
				if i%2 == 0 && (i+1 == len(events) || events[i+1].ModRevision != e.ModRevision) {
					t.Errorf("half of revision %d: %v", e.ModRevision, spell(events))
				}
			}
			seen <- string(events[len(events)-1].Value)
		})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(v.Close)
	const rounds = 20
	for n := range rounds {
		value := fmt.Append(nil, n+1)
		do(t, st, registry.Put(topic, value, 0), registry.Put(member, value, 0))
	}
	late := time.After(patience)
	for last := ""; last != fmt.Sprint(rounds); {
		select {
		case last = <-seen:
		case <-late:
			t.Fatalf("the view has come to %s of %d", last, rounds)
		}
	}
}

func watchCompacted(t *testing.T, st registry.Store, prefix string) {
	key := prefix + "k"
	r1, r2 := put(t, st, key, "1"), put(t, st, key, "2")
	st.(Compacter).Compact(r2)
	w := watch(t, st, prefix, r1)
	if r := w.next(); r.CompactRevision != r2 {
		t.Errorf("ended with %+v, want compaction at %d", r, r2)
	} else {
		wantErr(t, r.Err, registry.ErrCompacted)
	}
	w.closed()
	// What is left can be watched.
	after := watch(t, st, prefix, r2+1)
	r3 := put(t, st, key, "3")
	if e := after.events(1)[0]; e.ModRevision != r3 {
		t.Errorf("got revision %d, want %d", e.ModRevision, r3)
	}
}

func watchEnds(t *testing.T, st registry.Store, prefix string) {
	w := watch(t, st, prefix, put(t, st, prefix+"k", "1"))
	w.events(1)
	put(t, st, prefix+"k", "nobody reads this one")
	w.ends()
	w.closed()
}

func watchProgress(t *testing.T, st registry.Store, prefix string) {
	const writes = 150
	start := put(t, st, prefix[:len(prefix)-1]+"x", "beside the prefix")
	watches := []*watching{watch(t, st, prefix+"a/", start+1), watch(t, st, prefix+"b/", start+1), watch(t, st, prefix, start+1)}
	want := []int{writes / 2, writes / 2, writes}
	written := make(chan error, 1)
	go func() {
		for i := range writes {
			key := fmt.Sprintf("%s%c/%d", prefix, 'a'+i%2, i)
			if _, err := st.Txn(t.Context(), registry.Txn{Then: []registry.Op{registry.Put(key, nil, 0)}}); err != nil {
				written <- err
				return
			}
			if err := st.RequestProgress(t.Context()); err != nil {
				written <- err
				return
			}
		}
		written <- nil
	}()
	if err := <-written; err != nil {
		t.Fatal(err)
	}
	for i, w := range watches {
		var told int64
		answers, events := 0, 0
		for events < want[i] {
			r, ok := <-w.ch
			if !ok || r.Err != nil {
				t.Fatalf("watch ended: %v", r.Err)
			}
			if r.Progress {
				told = max(told, r.Revision)
				answers++
			}
			for _, e := range r.Events {
				if e.ModRevision <= told {
					t.Fatalf("event of %d after progress to %d", e.ModRevision, told)
				}
			}
			events += len(r.Events)
		}
		w.reaches(start + writes)
		t.Logf("watch %d: %d events, %d answers between them", i, events, answers)
	}
}

// A watch from the next revision on must tell that it has come as far as there is
// anything: nobody may write for hours, and others wait for its word.
func watchQuiet(t *testing.T, st registry.Store, prefix string) {
	rev := put(t, st, prefix+"k", "1")
	other := watch(t, st, prefix+"other", rev)
	other.reaches(rev)
	w := watch(t, st, prefix, rev+1)
	w.reaches(rev)
	other.reaches(rev)
	put(t, st, prefix+"k", "2")
	if e := w.events(1)[0]; string(e.Value) != "2" {
		t.Errorf("first event is %q", e.Value)
	}
}

// A watch of one key does not see keys that begin with it.
func watchKey(t *testing.T, st registry.Store, prefix string) {
	key := prefix + "1-3"
	from := put(t, st, key, "0")
	put(t, st, key+"0", "another")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	w := &watching{t: t, st: st, ch: st.WatchKey(ctx, key, from), ends: cancel}
	events := w.events(1) // before the deletion: a watch of a key begins with the present
	do(t, st, registry.Delete(key+"0"))
	do(t, st, registry.Delete(key))
	var got []string
	for _, e := range append(events, w.events(1)...) {
		got = append(got, fmt.Sprintf("%s %v", strings.TrimPrefix(e.Key, prefix), e.Deleted))
	}
	if want := "1-3 false, 1-3 true"; strings.Join(got, ", ") != want {
		t.Errorf("events: %s; want: %s", strings.Join(got, ", "), want)
	}
}
