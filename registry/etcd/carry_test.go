package etcd

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/muster-io/muster/registry"
)

// openOwn opens a Store of the test's own, with endpoints besides so that it is not
// alone.
func openOwn(t *testing.T, more ...string) *Store {
	t.Helper()
	st, err := Open(t.Context(), Options{Endpoints: append([]string{open(t).Client().Endpoints()[0]}, more...)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	return st
}

// A watch whose reader was told an error is over, also where the Store turns to another
// member at that moment.
func TestWatchEndsWithItsError(t *testing.T) {
	st := openOwn(t)
	w := &watch{s: st, out: make(chan registry.WatchResponse), from: 1}
	w.open = func(_ context.Context, c *conn) clientv3.WatchChan {
		c.leave()
		ch := make(chan clientv3.WatchResponse, 1)
		ch <- clientv3.WatchResponse{Header: &pb.ResponseHeader{Revision: 9}, CompactRevision: 5, Canceled: true}
		close(ch)
		return ch
	}
	go w.run(within(t, 5*time.Second))
	var all []registry.WatchResponse
	for r := range w.out {
		if all = append(all, r); len(all) > 1 {
			break
		}
	}
	if len(all) != 1 || !errors.Is(all[0].Err, registry.ErrCompacted) {
		t.Errorf("the watch brought %+v, want one ErrCompacted", all)
	}
}

// Calls of before an election end with their connection, not only with their term.
func TestCloseEndsEarlierTerms(t *testing.T) {
	st := openOwn(t)
	c, before := st.conns.use(t.Context())
	st.conns.elected()
	if before.Err() != nil {
		t.Error("the calls of before an election ended at once")
	}
	c.close()
	if before.Err() == nil {
		t.Error("the calls of before the election go on though their connection is closed")
	}
}

// A question that was under way when the connection was renewed says nothing about the
// member.
func TestRenewIsNoDoubt(t *testing.T) {
	st := openOwn(t, silentEndpoint(t))
	m := st.conns
	former, _ := m.use(t.Context())
	m.renew(former)
	if c, _ := m.use(t.Context()); c == former {
		t.Fatal("the connection was not renewed")
	}
	m.tell(connEvent{conn: former, answer: failedAnswer(former.endpoint, context.Canceled)})
	m.tell(connEvent{}) // the one before has been taken
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.settled != nil {
		t.Errorf("in doubt: %s", m.why)
	}
}

// The scheme of an endpoint decides whether others may be sent a password without TLS.
func TestSpelled(t *testing.T) {
	given := []string{"10.0.0.1:2379", "HTTPS://a:1", "http://a:1/", "unixs:/run/etcd"}
	for secure, want := range map[bool]string{
		true:  "[https://10.0.0.1:2379 https://a:1 http://a:1 unixs:/run/etcd]",
		false: "[http://10.0.0.1:2379 https://a:1 http://a:1 unixs:/run/etcd]",
	} {
		if got := fmt.Sprint(spelled(given, secure)); got != want {
			t.Errorf("with TLS %v: %s, want %s", secure, got, want)
		}
	}
	f := newFailover(0, spelled([]string{"10.0.0.1:2379"}, true), &answer{endpoint: "https://10.0.0.1:2379", member: 1,
		members: []member{{2, []string{"http://b", "https://b"}}}})
	if got := fmt.Sprint(f.targets); got != "[https://10.0.0.1:2379 https://b]" {
		t.Errorf("targets %s: a password would be sent in the clear", got)
	}
}

// What others answer while the member in use is well is no reason for anything.
func TestFailoverSaysWhyOnlyInDoubt(t *testing.T) {
	f := newFailover(0, []string{"http://a", "http://b"}, &answer{endpoint: "http://a", cluster: 1, member: 1})
	f.step(10*time.Millisecond, failoverInput{answer: &answer{endpoint: "http://b", err: "no answer"}})
	if f.doubt || f.why() != "" {
		t.Errorf("doubt %v, why %q", f.doubt, f.why())
	}
}
