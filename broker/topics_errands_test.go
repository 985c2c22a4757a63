package broker

import (
	"log/slog"
	"testing"
	"time"

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
