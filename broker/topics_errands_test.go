package broker

import (
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

// What is asked for again while it is being done is not forgotten when that is done.
func TestErrandAskedForMeanwhile(t *testing.T) {
	st := memory.New()
	d := &Daemon{cfg: Config{ID: 1}, log: slog.New(slog.DiscardHandler), store: st}
	e := newErrands(d)
	marker := registry.Root("").DeletedTopic("t")
	c := newCatalog("")
	mark := func(revision int64) {
		c.apply([]registry.Event{{KV: registry.KV{Key: marker, ModRevision: revision, CreateRevision: revision}}})
		e.follow(map[string]bool{"t": true}, c, 1)
	}
	later := time.Now().Add(time.Minute)
	mark(2)
	_, due, _ := e.due(later)
	mark(5) // deleted, made and marked again
	if !e.finish(t.Context(), "t", due["t"]) {
		t.Fatal("the first was not done")
	}
	if _, due, _ = e.due(later); len(due) != 1 {
		t.Error("the second deletion is forgotten")
	}
	if !e.finish(t.Context(), "t", due["t"]) {
		t.Fatal("the second was not done")
	}
	if _, due, _ = e.due(later); len(due) != 0 {
		t.Errorf("still to be done: %v", due)
	}

	e.adoptIf("t", "", true, true)
	adopt, _, _ := e.due(later)
	e.adoptIf("t", "", true, true) // written without an id again
	if !e.adoptOne(t.Context(), "t", adopt["t"]) {
		t.Fatal("the first was not done")
	}
	if adopt, _, _ = e.due(later); len(adopt) != 1 {
		t.Error("the second adoption is forgotten")
	}
	if !e.adoptOne(t.Context(), "t", adopt["t"]) {
		t.Fatal("the second was not done")
	}
	if adopt, _, _ = e.due(later); len(adopt) != 0 {
		t.Errorf("still to be adopted: %v", adopt)
	}
}

// An id is made up at once only by the leader of the first partition: others may have
// logs of the topic that say what it was.
func TestWhoMakesUpAnID(t *testing.T) {
	for _, c := range []struct {
		id    string
		first bool
		now   int
	}{{"", true, 1}, {"", false, 0}, {"x", false, 1}} {
		e := newErrands(nil)
		e.adoptIf("t", c.id, true, c.first)
		if adopt, _, _ := e.due(time.Now()); len(adopt) != c.now {
			t.Errorf("%+v: adopts %v", c, adopt)
		}
		if adopt, _, _ := e.due(time.Now().Add(adoptionTurn)); len(adopt) != 1 {
			t.Errorf("%+v: after its turn it adopts %v", c, adopt)
		}
	}
}

// A daemon that may be dead to the registry writes nothing there.
func TestNothingIsWrittenWithoutASession(t *testing.T) {
	st := memory.New()
	follows := follower(t)
	follows.d.store = st
	if err := follows.CreateTopic(t.Context(), "t"); !errors.Is(err, kerr.RequestTimedOut) || !errors.Is(err, errNoSession) {
		t.Errorf("create: %v", err)
	}
	if _, err := st.Txn(t.Context(), registry.Txn{Then: []registry.Op{
		registry.Put("/admin/delete_topics/t", nil, 0), registry.Put("/brokers/topics/u", []byte(`{"version":1,"partitions":{"0":[9]}}`), 0)}}); err != nil {
		t.Fatal(err)
	}
	before := st.Revision()
	e := follows.errands
	e.deletions["t"], e.adopt["u"] = time.Now(), adoption{at: time.Now()}
	if wait := e.round(t.Context()); wait != errandPause || st.Revision() != before {
		t.Errorf("it waits %s, and the registry went from %d to %d", wait, before, st.Revision())
	}
}

// Each daemon has its turn at a deletion that nobody finishes, in the order of ids; one
// that was only asked for is begun a turn sooner.
func TestTurnsOfDeletions(t *testing.T) {
	c := newCatalog("")
	broker := func(id int) registry.Event {
		return registry.Event{KV: registry.KV{Key: fmt.Sprint("/brokers/ids/", id), Value: []byte(`{"version":1,"host":"h","port":1}`), CreateRevision: 2, ModRevision: 2}}
	}
	c.apply([]registry.Event{broker(1), broker(5), broker(7), record(2, 2, `{"version":1,"partitions":{"0":[9]}}`),
		{KV: registry.KV{Key: "/admin/delete_topics/t", ModRevision: 3, CreateRevision: 3}},
		{KV: registry.KV{Key: "/admin/delete_topics/u", ModRevision: 3, CreateRevision: 3}}})
	for id, rank := range map[int32]time.Duration{1: 0, 5: 1, 7: 2, 3: 3} {
		e := newErrands(nil)
		before := time.Now()
		e.follow(map[string]bool{"t": true, "u": true}, c, id)
		after := time.Now()
		for topic, want := range map[string]time.Duration{"t": rank * deletionTurn, "u": (rank + 1) * deletionTurn} {
			if at := e.deletions[topic]; at.Before(before.Add(want)) || at.After(after.Add(want)) {
				t.Errorf("broker %d begins with %s after %s, want %s", id, topic, at.Sub(before), want)
			}
		}
	}
}
