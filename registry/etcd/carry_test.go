package etcd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

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
	go w.run(within(t, longEnough))
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
	began := time.Now()
	st.conns.elected()
	if before.Err() != nil && time.Since(began) < electedLimit {
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
	const said = "asked of the former"
	m.tell(connEvent{conn: former, answer: failedAnswer(former.endpoint, errors.New(said))})
	m.tellAndWait(connEvent{}) // the one before has had its effect
	m.mu.Lock()
	defer m.mu.Unlock()
	if strings.Contains(m.why, said) { // a server that is kept from answering is another matter
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

// A write that was refused was not lost, also where the member is left at that moment.
func TestRefusalIsNotLost(t *testing.T) {
	st := openOwn(t)
	for fails, want := range map[error]error{rpctypes.ErrLeaseNotFound: registry.ErrLeaseNotFound, rpctypes.ErrTimeout: ErrUnknown,
		context.Canceled: ErrUnknown, status.Error(codes.Unavailable, "EOF"): ErrUnknown} {
		err := st.call(t.Context(), once, func(context.Context, *conn) error {
			_, endTerm := st.conns.current.term, st.conns.current.endTerm
			st.conns.elected()
			endTerm()
			return fails
		})
		if !errors.Is(err, want) {
			t.Errorf("%v became %v, want %v", fails, err, want)
		}
	}
}

// Nothing hangs for want of a deadline.
func TestCallWithoutDeadline(t *testing.T) {
	st := openOwn(t)
	if st.callLimit != callLimit {
		t.Errorf("the limit is %s", st.callLimit)
	}
	st.callLimit = 50 * time.Millisecond
	err := st.call(context.Background(), again, func(ctx context.Context, c *conn) error {
		select {
		case <-ctx.Done():
		case <-time.After(longEnough):
		}
		return ctx.Err()
	})
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "no answer from etcd in time") {
		t.Errorf("error %v", err)
	}
}

func TestPatience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for left, want := range map[time.Duration]time.Duration{100 * time.Millisecond: doubtLimit, 4 * time.Second: 3 * time.Second, time.Minute: patientLimit} {
			ctx, cancel := context.WithTimeout(t.Context(), left)
			if got := patience(ctx); got != want {
				t.Errorf("%s before its deadline a call waits for %s, want %s", left, got, want)
			}
			cancel()
		}
	})
	if got := patience(t.Context()); got != doubtLimit {
		t.Errorf("without a deadline a call waits for %s", got)
	}
	m := openOwn(t).conns
	m.tellAndWait(connEvent{}) // from now on nothing is to be done for long
	settled := make(chan struct{})
	m.mu.Lock()
	m.settled = settled
	m.mu.Unlock()
	began := time.Now()
	time.AfterFunc(doubtLimit+200*time.Millisecond, func() { close(settled) })
	if m.use(within(t, longEnough)); time.Since(began) < doubtLimit+200*time.Millisecond {
		t.Errorf("the call waited only for %s", time.Since(began))
	}
	m.mu.Lock()
	m.settled = nil
	m.mu.Unlock()
}

// A watch whose token is refused again and again is told to its reader, after a few
// tries.
func TestTokenRefusedForEver(t *testing.T) {
	st := openOwn(t)
	opens := 0
	w := &watch{s: st, out: make(chan registry.WatchResponse), from: 1}
	w.open = func(context.Context, *conn) clientv3.WatchChan {
		opens++
		ch := make(chan clientv3.WatchResponse, 1)
		ch <- clientv3.WatchResponse{Header: &pb.ResponseHeader{}, Canceled: true, CancelReason: rpctypes.ErrInvalidAuthToken.Error()}
		close(ch)
		return ch
	}
	began := time.Now()
	go w.run(within(t, longEnough))
	r, ok := <-w.out
	// A watch that has lived for so long is not refused again and again: on a machine that
	// stands still the tries are counted anew.
	const pauses, lived = renewalPause * maxRenewals * (maxRenewals - 1) / 2, renewalPause * maxRenewals
	most := maxRenewals + 1 + maxRenewals*int((time.Since(began)-pauses)/lived)
	if !ok || !errors.Is(r.Err, rpctypes.ErrInvalidAuthToken) || opens < 2 || opens > most {
		t.Errorf("after %d tries: %+v, %v", opens, r, ok)
	}
}

// breaker passes connections on to an address, and breaks them. With a delay the answers
// are late.
type breaker struct {
	endpoint string
	mu       sync.Mutex
	open     []net.Conn
}

func newBreaker(t *testing.T, to string, delay time.Duration) *breaker {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := &breaker{endpoint: "http://" + l.Addr().String()}
	t.Cleanup(func() { l.Close(); b.breakAll() })
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				in.Close()
				continue
			}
			b.mu.Lock()
			b.open = append(b.open, in, out)
			b.mu.Unlock()
			for _, way := range [][2]net.Conn{{in, out}, {out, in}} {
				go func() {
					if delay > 0 && way[1] == out {
						// The greeting passes, so that there is a connection.
						buf := make([]byte, 1<<10)
						n, _ := out.Read(buf)
						in.Write(buf[:n])
						time.Sleep(delay)
					}
					io.Copy(way[0], way[1])
					way[0].Close()
					way[1].Close()
				}()
			}
		}
	}()
	return b
}

func (b *breaker) breakAll() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range b.open {
		c.Close()
	}
	b.open = nil
}

// One that is slow is waited for longer than one that fails.
func TestOpenWaitsForTheSlow(t *testing.T) {
	t.Parallel()
	const limit = 16 * time.Second
	b := newBreaker(t, strings.TrimPrefix(open(t).Client().Endpoints()[0], "http://"), limit*5/8)
	st, err := Open(t.Context(), Options{Endpoints: []string{b.endpoint}, DialTimeout: limit})
	if err != nil {
		t.Fatal(err)
	}
	st.Close()
	began := time.Now()
	_, err = Open(t.Context(), Options{Endpoints: []string{deadEndpoint()}, DialTimeout: limit})
	if took := time.Since(began); err == nil || !strings.Contains(err.Error(), "refused") || took > limit*7/8 || took < limit/2 {
		t.Errorf("after %s: %v", took, err)
	}
}

// Of 200 connections that break nothing is left behind. Writes fail seldom, and by
// themselves: the next one waits for a connection that works.
//
// It runs alone: a server that other programs keep from answering for 0.7 s is given up,
// too, and that may well be during the second write.
func TestConnectionsBreak(t *testing.T) {
	o := freePorts(t, t.TempDir())
	server, err := StartServer(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	address := strings.TrimPrefix(server.Endpoint, "http://")
	ways := map[string]*breaker{}
	var endpoints []string
	for range 3 {
		b := newBreaker(t, address, 0)
		ways[b.endpoint] = b
		endpoints = append(endpoints, b.endpoint)
	}
	st, err := Open(t.Context(), Options{Endpoints: endpoints})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	v := openView(t, st, registry.ViewOptions{}, "/breaks/")
	defer v.Close()
	s, err := registry.OpenSession(t.Context(), st, registry.SessionOptions{TTL: 30 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	failed, turned := 0, 0
	rounds := func(n int) {
		last := int64(0)
		for range n {
			before, _ := st.conns.use(t.Context())
			ways[before.endpoint].breakAll()
			var first error
			var failedAt time.Time
			for failures := 0; ; failures++ {
				res, err := st.Txn(within(t, longEnough), registry.Txn{Then: []registry.Op{registry.Put("/breaks/a", nil, 0)}})
				if err == nil {
					last = res.Revision
					break
				}
				if !errors.Is(err, ErrUnknown) {
					t.Errorf("not said to be unknown: %v", err)
				}
				// What comes after so long a silence is the machine's doing, not a break's.
				if failed++; failures > 0 && time.Since(failedAt) < silence {
					t.Fatalf("two writes in a row failed: %v; %v", first, err)
				}
				first, failedAt = err, time.Now()
			}
			if c, _ := st.conns.use(t.Context()); c != before {
				turned++
			}
		}
		until(t, v, longEnough, at(last))
	}
	rounds(20)
	mine := func() (n int) {
		buf := make([]byte, 1<<23)
		for g := range strings.SplitSeq(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
			// Those of a client, among them the ones that serve this Store alone.
			if strings.Contains(g, "etcd.(*conns)") || strings.Contains(g, "etcd.(*breaker)") || strings.Contains(g, "transport.(*http2Client).reader") {
				n++
			}
		}
		return n
	}
	before, files := mine(), openFiles(t)
	rounds(200)
	deadline := time.Now().Add(longEnough)
	for mine() > before+10 && time.Now().Before(deadline) {
		time.Sleep(50 * time.Millisecond)
	}
	t.Logf("%d connections were left and %d writes failed; goroutines %d, before %d; files %d, before %d", turned, failed, mine(), before, openFiles(t), files)
	if after := mine(); after > before+10 {
		t.Errorf("%d goroutines, %d before", after, before)
	}
	if turned < 100 {
		t.Errorf("the Store has turned away only %d times", turned)
	}
	if err := s.Close(within(t, longEnough)); err != nil || !errors.Is(s.Err(), registry.ErrSessionClosed) {
		t.Errorf("session: %v, close: %v", s.Err(), err)
	}
}

// What was lost a moment ago is not used though nobody has noticed yet.
func TestLostIsNotUsed(t *testing.T) {
	st := openOwn(t, silentEndpoint(t))
	m := st.conns
	c, _ := m.use(t.Context())
	lost, err := m.dial(t.Context(), c.endpoint) // as it is before it connects
	if err != nil {
		t.Fatal(err)
	}
	m.mu.Lock()
	m.current = lost
	m.mu.Unlock()
	defer c.close()
	for ctx := within(t, longEnough); ; {
		used, _ := m.use(ctx)
		current, _, settled := m.now()
		if !used.down() {
			break
		}
		// After patience a call is made all the same, while there is doubt.
		if settled == nil && current == used || ctx.Err() != nil {
			t.Error("a connection that does not work is used")
			break
		}
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// A batch of what was missed stands under the header of the store's newest revision,
// and reaches only as far as its last event.
func TestBatchReachesItsLastEvent(t *testing.T) {
	event := func(rev int64) *clientv3.Event { return &clientv3.Event{Kv: &mvccpb.KeyValue{ModRevision: rev}} }
	r := watchResponse(clientv3.WatchResponse{Header: &pb.ResponseHeader{Revision: 100}, Events: []*clientv3.Event{event(4), event(5), event(6)}}, 5)
	if r.Revision != 6 || len(r.Events) != 2 || r.Progress {
		t.Errorf("%+v", r)
	}
}

// A watch ends with its context though the client leaves its channel open.
func TestWatchEndsWithItsContext(t *testing.T) {
	st := openOwn(t, silentEndpoint(t))
	w := &watch{s: st, out: make(chan registry.WatchResponse), from: 1,
		open: func(context.Context, *conn) clientv3.WatchChan { return make(chan clientv3.WatchResponse) }}
	ctx, cancel := context.WithCancel(t.Context())
	go w.run(ctx)
	cancel()
	select {
	case r, more := <-w.out:
		if more {
			t.Errorf("it brought %+v", r)
		}
	case <-time.After(longEnough):
		t.Error("it goes on")
	}
}
