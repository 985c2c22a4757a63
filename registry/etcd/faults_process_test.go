package etcd

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/muster-io/muster/registry"
)

// newProcess starts an etcd of its own in a process that can be killed or stopped.
func newProcess(t *testing.T) *process {
	t.Helper()
	p := &process{t: t, o: freePorts(t, t.TempDir()), log: filepath.Join(t.TempDir(), "etcd.log")}
	p.start()
	p.await()
	return p
}

// tryPut is one write that may take so long.
func tryPut(t *testing.T, st registry.Store, d time.Duration, key, value string) (int64, error) {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	res, err := st.Txn(ctx, registry.Txn{Then: []registry.Op{registry.Put(key, []byte(value), 0)}})
	return res.Revision, err
}

// putAgain writes until it succeeds and returns how long that took.
func putAgain(t *testing.T, st registry.Store, key, value string) (revision int64, took time.Duration) {
	t.Helper()
	began := time.Now()
	for {
		revision, err := tryPut(t, st, 5*time.Second, key, value)
		if err == nil {
			return revision, time.Since(began)
		}
		if time.Since(began) > longEnough {
			t.Fatalf("no write succeeds again: %v", err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// failsInTime wants a write to fail with its deadline, long before callLimit.
func failsInTime(t *testing.T, st registry.Store, d time.Duration, key string) {
	t.Helper()
	began := time.Now()
	_, err := tryPut(t, st, d, key, "")
	took := time.Since(began)
	if err == nil || took > d+callLimit/2 || !strings.Contains(err.Error(), "etcd") {
		t.Errorf("a write with a deadline of %s ended after %s: %v", d, took, err)
	}
	t.Logf("a write with a deadline of %s fails after %s: %v", d, took.Round(time.Millisecond), err)
}

// announced is a key that is kept registered, and what is told of that.
type announced struct {
	*registry.Announcement
	t      *testing.T
	events chan registry.AnnounceEvent
	closed sync.Once
}

func announce(t *testing.T, st registry.Store, key string, ttl time.Duration) *announced {
	t.Helper()
	a := &announced{t: t, events: make(chan registry.AnnounceEvent, 1000)}
	var err error
	a.Announcement, err = registry.Announce(within(t, longEnough), st, registry.AnnounceOptions{
		Key: key, Value: []byte("a"), TTL: ttl, Listener: func(e registry.AnnounceEvent) { a.events <- e }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.close)
	a.next(registry.AnnounceRegistered, longEnough)
	return a
}

func (a *announced) close() {
	a.closed.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), longEnough)
		defer cancel()
		if err := a.Close(ctx); err != nil {
			a.t.Error(err)
		}
	})
}

// next waits for an event of that kind, and returns how long that took. Attempts that
// failed may come before it.
func (a *announced) next(kind registry.AnnounceEventKind, d time.Duration) (registry.AnnounceEvent, time.Duration) {
	a.t.Helper()
	began := time.Now()
	late := time.After(d)
	for {
		select {
		case e := <-a.events:
			if e.Kind == kind {
				return e, time.Since(began).Round(time.Millisecond)
			}
			if e.Kind != registry.AnnounceFailed {
				a.t.Fatalf("told of %s", e)
			}
		case <-late:
			a.t.Fatalf("event %d does not come within %s", kind, d)
		}
	}
}

func endSession(t *testing.T, s *registry.Session) {
	ctx, cancel := context.WithTimeout(context.Background(), longEnough)
	defer cancel()
	if err := s.Close(ctx); err != nil {
		t.Errorf("close the session: %v", err)
	}
}

// lost waits for the end of a session and returns how long that took.
func lost(t *testing.T, s *registry.Session, d time.Duration, want error) time.Duration {
	t.Helper()
	began := time.Now()
	select {
	case <-s.Done():
	case <-time.After(d):
		t.Fatalf("the session is not lost within %s", d)
	}
	if !errors.Is(s.Err(), want) || s.Alive() {
		t.Errorf("the session ended with %v, want %v; alive: %t", s.Err(), want, s.Alive())
	}
	return time.Since(began)
}

// The only etcd is killed while it is written to, and started again within the time to
// live: nothing that was acknowledged is lost, the session survives, views go on.
func TestEtcdKilledAndStarted(t *testing.T) {
	t.Parallel()
	server := newProcess(t)
	st, err := Open(t.Context(), Options{Endpoints: []string{server.o.ListenClient}})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	s, err := registry.OpenSession(t.Context(), st, registry.SessionOptions{TTL: 30 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer endSession(t, s)
	reg, err := registry.Register(t.Context(), st, s, "/k/ids/a", nil)
	if err != nil {
		t.Fatal(err)
	}
	m := newMirror(t, st, registry.ViewOptions{}, "/k/")

	acknowledged := make(chan int, 1)
	kill := make(chan struct{})
	go func() {
		for n := 0; ; n++ {
			if n == 200 {
				close(kill)
			}
			if _, err := tryPut(t, st, 5*time.Second, fmt.Sprintf("/k/n/%05d", n), ""); err != nil {
				acknowledged <- n
				return
			}
		}
	}()
	select {
	case <-kill:
	case n := <-acknowledged:
		t.Fatalf("write %d fails, and nobody was killed", n)
	}
	server.signal(syscall.SIGKILL)
	down := time.Now()
	n := <-acknowledged
	failsInTime(t, st, time.Second, "/k/down")
	server.back(syscall.SIGKILL)
	t.Logf("killed after %d acknowledged writes; ready again %s later", n, time.Since(down).Round(time.Millisecond))
	rev, took := putAgain(t, st, "/k/up", "")
	t.Logf("written to again %s after that; in the view %s later", took.Round(time.Millisecond), m.reaches(longEnough, rev).Round(time.Millisecond))
	m.equalsList()
	for i := range n {
		if _, there := m.keys()[fmt.Sprintf("/k/n/%05d", i)]; !there {
			t.Fatalf("write %d of %d acknowledged ones is lost", i, n)
		}
	}
	if kv := m.keys()[reg.Key]; !s.Alive() || kv.CreateRevision != reg.Revision {
		t.Errorf("the session is alive: %t (%v), its key %+v; registered at %d", s.Alive(), s.Err(), kv, reg.Revision)
	}
}

// The only etcd is away for three times the time to live, stopped or dead: the session
// is declared lost before that by its own deadline; afterwards the process registers
// again under the same key, and views are right.
func TestEtcdAwayForThreeLeases(t *testing.T) {
	t.Parallel()
	for name, signal := range map[string]syscall.Signal{"paused": syscall.SIGSTOP, "killed": syscall.SIGKILL} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			awayForThreeLeases(t, signal)
		})
	}
}

func awayForThreeLeases(t *testing.T, signal syscall.Signal) {
	server := newProcess(t)
	st, err := Open(t.Context(), Options{Endpoints: []string{server.o.ListenClient}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	key := "/p/ids/a"
	a := announce(t, st, key, 8*time.Second) // a pause of seconds is not to cost it before
	old, _ := a.Registration()
	ttl := a.Session().TTL()
	put(t, st, "/p/topics/t", "1")
	m := newMirror(t, st, registry.ViewOptions{}, "/p/ids/", "/p/topics/")
	for troubled(m.view) {
	}

	server.signal(signal)
	stopped := time.Now()
	e, took := a.next(registry.AnnounceLost, 3*ttl)
	t.Logf("lost %s after the stop, time to live %s: %v", took, ttl, e.Err)
	if !errors.Is(e.Err, registry.ErrSessionExpired) || a.Alive() {
		t.Errorf("lost for %v; alive: %t", e.Err, a.Alive())
	}
	failsInTime(t, st, time.Second, "/p/topics/x")
	select {
	case <-m.view.Trouble():
		t.Logf("the view says that it hears nothing %s after the stop", time.Since(stopped).Round(time.Millisecond))
	case <-time.After(longEnough):
		t.Error("the view does not say that it hears nothing")
	}
	time.Sleep(time.Until(stopped.Add(3 * ttl)))
	server.back(signal)

	e, took = a.next(registry.AnnounceRegistered, longEnough)
	t.Logf("registered again %s after it went on", took)
	rev, _ := putAgain(t, st, "/p/topics/u", "2")
	m.reaches(longEnough, max(rev, e.Registration.Revision))
	m.equalsList()
	if kv := m.keys()[key]; kv.Lease != e.Lease || kv.CreateRevision != e.Registration.Revision || kv.CreateRevision <= old.Revision || !a.Alive() {
		t.Errorf("the key is %+v, registered as %+v, before as %+v; alive: %t", kv, e, old, a.Alive())
	}
	a.close() // before the etcd that was started last is ended
}
