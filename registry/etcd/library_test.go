package etcd_test

import (
	"sync"
	"testing"
	"time"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/registrytest"
)

// until waits for a condition that nothing signals.
func until(t *testing.T, d time.Duration, what string, holds func() bool) time.Duration {
	t.Helper()
	began := time.Now()
	for !holds() {
		if time.Since(began) > d {
			t.Fatalf("not within %s: %s", d, what)
		}
		time.Sleep(time.Millisecond)
	}
	return time.Since(began)
}

// viewLog keeps what the Views of a test tell of themselves.
type viewLog struct {
	mu     sync.Mutex
	events []registry.ViewEvent
}

func (l *viewLog) note(e registry.ViewEvent) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = append(l.events, e)
}

func (l *viewLog) count(kind registry.ViewEventKind) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.events {
		if e.Kind == kind {
			n++
		}
	}
	return n
}

// Where nobody writes after a restart of etcd, all Views of a process are soon
// current again, and stay so, without listing everything again.
func TestQuietViewsAfterARestart(t *testing.T) {
	t.Parallel()
	st := registrytest.Start(t)
	putKey(t, st, "/r/ids/a", "1")
	var log viewLog
	var views []*registry.View
	for range 3 {
		v, err := registry.OpenView(t.Context(), st, []string{"/r/ids/", "/r/topics/"}, registry.ViewOptions{Listener: log.note}, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer v.Close()
		views = append(views, v)
	}
	rev := putKey(t, st, "/r/ids/b", "2")
	until(t, 5*time.Second, "a change seen", func() bool { return views[0].Revision() >= rev })
	st.StopServer()
	if err := st.StartServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(8 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		for i, v := range views {
			if v.Heard() > registry.DefaultTTL/2 {
				t.Fatalf("view %d has heard nothing for %s", i, v.Heard())
			}
		}
	}
	// The client goes on with each watch in the future, and so once in silence.
	if n := log.count(registry.ViewRelisted); n > len(views)+1 || log.count(registry.ViewTrouble) != 0 {
		t.Errorf("%d lists and %d times trouble in %d views", n, log.count(registry.ViewTrouble), len(views))
	}
}
