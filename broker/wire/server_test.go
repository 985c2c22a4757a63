package wire

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/internal/freeport"
)

// patience is how long a test waits for what should happen at once.
const patience = time.Minute

// served is a server on a port, whose InitProducerId does what the test says.
type served struct {
	*Server
	t      *testing.T
	addr   string
	reach  func() (net.Conn, error)
	log    lockedBuffer
	handle Handler // of InitProducerId
	result chan error
	cancel context.CancelFunc

	requests chan RequestInfo
	ended    chan error
	refused  chan string
}

// serve starts a server; when the test ends, everything must have come to an end.
func serve(t *testing.T, o Options, handle Handler) *served {
	t.Helper()
	s := serveOn(t, newListener(t), o, handle)
	s.reach = func() (net.Conn, error) { return net.Dial("tcp", s.addr) }
	return s
}

// serveOn does so on a listener that need not be on a port.
func serveOn(t *testing.T, ln net.Listener, o Options, handle Handler) *served {
	t.Helper()
	s := &served{t: t, handle: handle, result: make(chan error, 1),
		requests: make(chan RequestInfo, 10_000), ended: make(chan error, 100), refused: make(chan string, 100)}
	o.Logger = slog.New(slog.NewTextHandler(&s.log, nil))
	ended := o.Hooks.OnDisconnect
	o.Hooks = Hooks{
		OnConnect: func(string) {},
		OnDisconnect: func(remote string, err error) {
			if ended != nil {
				ended(remote, err)
			}
			s.ended <- err
		},
		OnRefused: func(remote string) { s.refused <- remote },
		OnRequest: func(i RequestInfo) { s.requests <- i },
	}
	s.Server = New(o)
	for _, key := range servedKeys {
		if key == keyInit {
			s.Register(key, 0, 5, handle)
		} else {
			s.Register(key, 0, kmsg.RequestForKey(key).MaxVersion()-1, empty)
		}
	}
	s.addr = ln.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	go func() { s.result <- s.Serve(ctx, ln) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-s.result:
			s.result <- err
		case <-time.After(patience):
			t.Error("Serve does not return")
		}
	})
	return s
}

const keyInit = 22

// initRequest asks the handler under test; n comes out as the timeout.
func initRequest(n int) kmsg.Request {
	req := kmsg.NewPtrInitProducerIDRequest()
	req.TransactionTimeoutMillis = int32(n)
	return req
}

func number(r *Request) int {
	return int(r.Body.(*kmsg.InitProducerIDRequest).TransactionTimeoutMillis)
}

func answerTo(r *Request) kmsg.Response {
	resp := kmsg.NewPtrInitProducerIDResponse()
	resp.ProducerID = int64(number(r))
	return resp
}

type rawConn struct {
	net.Conn
	t *testing.T
}

func (s *served) dial() *rawConn {
	s.t.Helper()
	nc, err := s.reach()
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = nc.Close() })
	_ = nc.SetReadDeadline(time.Now().Add(patience))
	return &rawConn{nc, s.t}
}

func (c *rawConn) send(reqs ...kmsg.Request) {
	c.t.Helper()
	var b []byte
	for _, req := range reqs {
		b = append(b, kmsg.NewRequestFormatter(kmsg.FormatterClientID("test")).AppendRequest(nil, req, 77)...)
	}
	c.raw(b)
}

func (c *rawConn) raw(b []byte) {
	c.t.Helper()
	if _, err := c.Write(b); err != nil {
		c.t.Fatal(err)
	}
}

// frame reads the body of a response.
func (c *rawConn) frame() []byte {
	c.t.Helper()
	var head [8]byte
	if _, err := io.ReadFull(c, head[:]); err != nil {
		c.t.Fatalf("read a response: %v", err)
	}
	body := make([]byte, binary.BigEndian.Uint32(head[:])-4)
	if _, err := io.ReadFull(c, body); err != nil {
		c.t.Fatal(err)
	}
	return body
}

// answer reads the number that answerTo has put into a response.
func (c *rawConn) answer() int {
	c.t.Helper()
	resp := kmsg.NewPtrInitProducerIDResponse()
	if err := resp.ReadFrom(c.frame()); err != nil {
		c.t.Fatal(err)
	}
	return int(resp.ProducerID)
}

func (c *rawConn) wantEnd() {
	c.t.Helper()
	if n, err := c.Read(make([]byte, 1)); err != io.EOF {
		c.t.Fatalf("%d bytes, error %v, want the end", n, err)
	}
}

func receive1[T any](t *testing.T, what string, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patience):
		t.Fatalf("waited too long for %s", what)
		panic("unreachable")
	}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func TestAnswersComeInTheOrderOfRequests(t *testing.T) {
	// Later answers are ready earlier.
	ready := make([]chan struct{}, 5)
	for i := range ready {
		ready[i] = make(chan struct{})
	}
	handled := make(chan int, len(ready))
	s := serve(t, Options{}, func(_ context.Context, r *Request) Answer {
		handled <- number(r)
		return func(ctx context.Context) (kmsg.Response, error) {
			select {
			case <-ready[number(r)]:
				return answerTo(r), nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
	})
	c := s.dial()
	c.send(initRequest(0), initRequest(1), initRequest(2), initRequest(3), initRequest(4))
	for i := range ready {
		if got := receive1(t, "a handler", handled); got != i { // all before the first is answered
			t.Fatalf("handler %d is called as number %d", got, i)
		}
	}
	for i := range ready {
		close(ready[len(ready)-1-i])
	}
	for i := range ready {
		if got := c.answer(); got != i {
			t.Fatalf("answer %d comes as number %d", got, i)
		}
		if info := receive1(t, "the hook", s.requests); info.Key != keyInit || info.ClientID != "test" || info.ResponseBytes == 0 || info.Err != nil {
			t.Errorf("%s", info)
		}
	}
}

func TestRequestsWithoutAResponse(t *testing.T) {
	s := serve(t, Options{}, func(_ context.Context, r *Request) Answer {
		switch number(r) {
		case 0:
			return nil
		case 1:
			return Ready(nil)
		}
		return Ready(answerTo(r))
	})
	c := s.dial()
	c.send(initRequest(0), initRequest(1), initRequest(2))
	if got := c.answer(); got != 2 {
		t.Errorf("answer %d", got)
	}
}

func TestBadFramesCloseTheirConnectionWithOneLine(t *testing.T) {
	frame := func(size int32, rest string) []byte {
		return append(binary.BigEndian.AppendUint32(nil, uint32(size)), rest...)
	}
	s := serve(t, Options{}, func(_ context.Context, r *Request) Answer { return Ready(answerTo(r)) })
	bystander := s.dial()
	bystander.send(initRequest(1))
	bystander.answer()
	for name, test := range map[string]struct {
		frame []byte
		log   []string
	}{
		"negative size":       {frame(-1, ""), []string{"key=-1 version=-1", "-1 bytes"}},
		"size 0":              {frame(0, ""), []string{"0 bytes"}},
		"too large for all":   {frame(MaxProduceFrame+1, ""), []string{"104857601 bytes"}},
		"too large for a key": {frame(MaxFrame+1, "\x00\x03\x00\x09"), []string{"key=3 version=9", "4194305 bytes"}},
		"TLS":                 {[]byte("\x16\x03\x01\x02\x00\x01"), []string{"TLS"}},
		"HTTP":                {[]byte("GET / HTTP/1.1\r\n\r\n"), []string{"HTTP"}},
		"key not served":      {frame(12, "\x00\x0b\x00\x02\x00\x00\x00\x01\x00\x02me"), []string{"key=11 version=2", "client_id=me"}},
		"version too new":     {frame(12, "\x00\x03\x00\x63\x00\x00\x00\x01\x00\x02me"), []string{"key=3 version=99", "client_id=me"}},
		"header cut":          {frame(10, "\x00\x03\x00\x09\x00\x00\x00\x01\x00\x02"), []string{"key=3 version=9", "client id"}},
		"body cut":            {frame(12, "\x00\x03\x00\x04\x00\x00\x00\x01\x00\x02me"), []string{"key=3 version=4", "client_id=me", "body"}},
		"array too long":      {frame(16, "\x00\x03\x00\x04\x00\x00\x00\x01\x00\x02me\x7f\xff\xff\xff"), []string{"key=3 version=4"}},
	} {
		before := len(s.log.String())
		c := s.dial()
		c.raw(test.frame)
		c.wantEnd()
		remote := c.LocalAddr().String()
		_ = c.Close()
		if err := receive1(t, "the end of the connection", s.ended); err == nil {
			t.Errorf("%s: no reason", name)
		}
		line := s.log.String()[before:]
		for _, want := range append(test.log, "remote="+remote, "error=") {
			if strings.Count(line, "\n") != 1 || !strings.Contains(line, want) {
				t.Errorf("%s: log %q, want one line with %q", name, line, want)
			}
		}
	}
	bystander.send(initRequest(2))
	if got := bystander.answer(); got != 2 {
		t.Errorf("the other connection: %d", got)
	}
}

func TestRequestsBeforeABadFrameAreAnswered(t *testing.T) {
	release := make(chan struct{})
	s := serve(t, Options{}, func(_ context.Context, r *Request) Answer {
		return func(context.Context) (kmsg.Response, error) { <-release; return answerTo(r), nil }
	})
	c := s.dial()
	c.send(initRequest(1), initRequest(2))
	c.raw([]byte{0xff, 0xff, 0xff, 0xff})
	close(release)
	if a, b := c.answer(), c.answer(); a != 1 || b != 2 {
		t.Errorf("answers %d, %d", a, b)
	}
	c.wantEnd()
}

func TestApiVersionsThatIsTooNewIsAnsweredInVersionZero(t *testing.T) {
	s := serve(t, Options{}, empty)
	s.entriesFor(t)
	c := s.dial()
	req := kmsg.NewPtrApiVersionsRequest()
	req.Version, req.ClientSoftwareName, req.ClientSoftwareVersion = 5, "new", "9"
	c.send(req)
	resp := kmsg.NewPtrApiVersionsResponse()
	if err := resp.ReadFrom(c.frame()); err != nil {
		t.Fatal(err)
	}
	if resp.ErrorCode != 35 || len(resp.ApiKeys) != len(servedKeys) {
		t.Fatalf("%+v", resp)
	}
	for _, k := range resp.ApiKeys {
		if k.ApiKey == keyApiVersions && k.MaxVersion != 4 {
			t.Errorf("%+v", k)
		}
	}
	req.Version = 4
	c.send(req) // the connection goes on, and the header is still without tags
	resp.Version = 4
	if err := resp.ReadFrom(c.frame()); err != nil || resp.ErrorCode != 0 {
		t.Fatalf("%v %+v", err, resp)
	}
}

// entriesFor checks that the table is what was registered.
func (s *served) entriesFor(t *testing.T) {
	t.Helper()
	versions := s.Versions()
	if len(versions) != len(servedKeys) {
		t.Fatalf("%+v", versions)
	}
	for i, v := range versions {
		if v.Key != servedKeys[i] || v.Min != 0 {
			t.Errorf("%+v", v)
		}
	}
}

// A client that goes away while its request is held must be noticed, also when it
// has sent more since.
func TestAClientThatGoesAwayReleasesWhatItHeld(t *testing.T) {
	held := make(chan struct{}, 1)
	released := make(chan error, 1)
	s := serve(t, Options{}, func(_ context.Context, r *Request) Answer {
		return func(ctx context.Context) (kmsg.Response, error) {
			held <- struct{}{}
			<-ctx.Done()
			released <- context.Cause(ctx)
			return nil, ctx.Err()
		}
	})
	c := s.dial()
	c.send(initRequest(1), initRequest(2), initRequest(3))
	receive1(t, "the long poll", held)
	_ = c.Close()
	if err := receive1(t, "its end", released); !errors.Is(err, errClientGone) {
		t.Errorf("cause %v", err)
	}
	if err := receive1(t, "the end of the connection", s.ended); err != nil {
		t.Errorf("reason %v", err)
	}
	for range 3 { // the other two are never asked, but reported
		if info := receive1(t, "the hook", s.requests); !errors.Is(info.Err, errClientGone) {
			t.Errorf("%s", info)
		}
	}
	if log := s.log.String(); log != "" {
		t.Errorf("log %q", log)
	}
}

func TestInFlightRequestsAreBounded(t *testing.T) {
	for name, test := range map[string]struct {
		opts Options
		want int64
	}{
		"by count":           {Options{MaxInFlight: 3}, 3},
		"by bytes":           {Options{MaxInFlightBytes: 45}, 2}, // of 20 bytes each
		"by fewer than each": {Options{MaxInFlightBytes: 1}, 1},
	} {
		const all = 10
		var inFlight, most atomic.Int64
		handled := make(chan int, all)
		step := make(chan struct{})
		s := serve(t, test.opts, func(_ context.Context, r *Request) Answer {
			now := inFlight.Add(1)
			most.Store(max(most.Load(), now)) // only the reader stores
			handled <- number(r)
			return func(context.Context) (kmsg.Response, error) {
				<-step
				inFlight.Add(-1)
				return answerTo(r), nil
			}
		})
		c := s.dial()
		for i := range all {
			c.send(initRequest(i))
		}
		for range test.want { // so many are read without an answer
			receive1(t, name, handled)
		}
		for i := range all {
			step <- struct{}{}
			if got := c.answer(); got != i {
				t.Fatalf("%s: answer %d, want %d", name, got, i)
			}
		}
		if got := most.Load(); got != test.want {
			t.Errorf("%s: %d at once, want %d", name, got, test.want)
		}
	}
}

func TestShutdownLetsRequestsFinish(t *testing.T) {
	read := make(chan int, 3)
	begun := make(chan struct{})
	release := make(chan struct{})
	s := serve(t, Options{}, func(_ context.Context, r *Request) Answer {
		read <- number(r)
		return func(ctx context.Context) (kmsg.Response, error) {
			if number(r) == 1 {
				close(begun)
				<-r.Draining // a long poll is woken
				<-release    // an fsync is waited for
			}
			return answerTo(r), ctx.Err()
		}
	})
	busy, idle := s.dial(), s.dial()
	idle.send(initRequest(5))
	idle.answer()
	busy.send(initRequest(1), initRequest(2))
	for _, want := range []int{5, 1, 2} { // a shutdown owes nothing to what it finds unread
		if got := receive1(t, "the request", read); got != want {
			t.Fatalf("request %d was read, want %d", got, want)
		}
	}
	receive1(t, "the answer", begun)
	stopped := make(chan error, 1)
	go func() { stopped <- s.Shutdown(context.Background()) }()
	idle.wantEnd() // while the other one is still busy
	_ = idle.Close()
	select {
	case err := <-stopped:
		t.Fatalf("shut down with a request in flight: %v", err)
	default:
	}
	close(release)
	if a, b := busy.answer(), busy.answer(); a != 1 || b != 2 {
		t.Errorf("answers %d, %d", a, b)
	}
	busy.wantEnd()
	_ = busy.Close()
	if err := receive1(t, "the shutdown", stopped); err != nil {
		t.Error(err)
	}
	if _, err := net.Dial("tcp", s.addr); err == nil {
		t.Error("the port is still open")
	}
	if err := s.Serve(context.Background(), newListener(t)); err == nil {
		t.Error("it serves again")
	}
	if log := s.log.String(); log != "" {
		t.Errorf("log %q", log)
	}
}

// newListener listens on a port that nobody else is given once it is closed.
func newListener(t *testing.T) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", freeport.Must())
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

func TestShutdownLosesPatience(t *testing.T) {
	begun := make(chan struct{})
	cause := make(chan error, 1)
	s := serve(t, Options{}, func(context.Context, *Request) Answer {
		return func(ctx context.Context) (kmsg.Response, error) {
			close(begun)
			<-ctx.Done()
			cause <- context.Cause(ctx)
			return nil, ctx.Err()
		}
	})
	c := s.dial()
	c.send(initRequest(1))
	receive1(t, "the request", begun)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := s.Shutdown(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("shutdown: %v", err)
	}
	if err := receive1(t, "the cause", cause); !errors.Is(err, errStopped) {
		t.Errorf("cause: %v", err)
	}
	if err := receive1(t, "Serve", s.result); err != nil {
		t.Errorf("serve: %v", err)
	}
	s.result <- nil // for the cleanup
}

func TestServeEndsWithItsContext(t *testing.T) {
	begun := make(chan struct{})
	s := serve(t, Options{}, func(context.Context, *Request) Answer {
		return func(ctx context.Context) (kmsg.Response, error) {
			close(begun)
			<-ctx.Done()
			return nil, ctx.Err()
		}
	})
	c := s.dial()
	c.send(initRequest(1))
	receive1(t, "the request", begun)
	s.cancel()
	if err := receive1(t, "Serve", s.result); !errors.Is(err, context.Canceled) {
		t.Errorf("serve: %v", err)
	}
	s.result <- nil
	if err := receive1(t, "the connection", s.ended); !errors.Is(err, errStopped) {
		t.Errorf("connection: %v", err)
	}
	if log := s.log.String(); log != "" {
		t.Errorf("log %q", log)
	}
}

func TestConnectionsAreBounded(t *testing.T) {
	s := serve(t, Options{MaxConnections: 2}, func(_ context.Context, r *Request) Answer { return Ready(answerTo(r)) })
	first, second := s.dial(), s.dial()
	for _, c := range []*rawConn{first, second} {
		c.send(initRequest(1))
		c.answer()
	}
	third := s.dial()
	if _, err := third.Read(make([]byte, 1)); err == nil {
		t.Error("the third connection is served")
	}
	receive1(t, "the refusal", s.refused)
	_ = first.Close()
	receive1(t, "its end", s.ended)
	again := s.dial()
	again.send(initRequest(7))
	if got := again.answer(); got != 7 {
		t.Errorf("answer %d", got)
	}
	if log := s.log.String(); strings.Count(log, "\n") != 1 || !strings.Contains(log, "max_connections=2") {
		t.Errorf("log %q", log)
	}
}

// Who is told that a connection has ended can count on its place.
func TestPlaceIsFreeWhenTheEndIsTold(t *testing.T) {
	telling, goOn := make(chan struct{}, 2), make(chan struct{})
	o := Options{MaxConnections: 1, Hooks: Hooks{OnDisconnect: func(string, error) { telling <- struct{}{}; <-goOn }}}
	s := serve(t, o, func(_ context.Context, r *Request) Answer { return Ready(answerTo(r)) })
	defer close(goOn)
	first := s.dial()
	first.send(initRequest(1))
	first.answer()
	_ = first.Close()
	receive1(t, "its end", telling)
	next := s.dial()
	next.send(initRequest(7))
	if n := next.answer(); n != 7 {
		t.Errorf("answer %d", n)
	}
}

// pipes is a listener without a port, for a bubble: there no time passes while
// anybody is at work.
type pipes struct {
	accepts chan net.Conn
	closed  context.Context
	close   context.CancelFunc
}

func newPipes() *pipes {
	l := &pipes{accepts: make(chan net.Conn)}
	l.closed, l.close = context.WithCancel(context.Background())
	return l
}

func (l *pipes) Accept() (net.Conn, error) {
	select {
	case nc := <-l.accepts:
		return nc, nil
	case <-l.closed.Done():
		return nil, net.ErrClosed
	}
}

func (l *pipes) Close() error { l.close(); return nil }

func (l *pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipes", Net: "unix"} }

func (l *pipes) reach() (net.Conn, error) {
	client, server := net.Pipe()
	l.accepts <- server
	return client, nil
}

func TestIdleConnectionsAreClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit = time.Second
		release := make(chan struct{})
		ln := newPipes()
		s := serveOn(t, ln, Options{IdleTimeout: limit}, func(_ context.Context, r *Request) Answer {
			return func(context.Context) (kmsg.Response, error) { <-release; return answerTo(r), nil }
		})
		s.reach = ln.reach
		began := time.Now()
		at := func(want time.Duration) {
			t.Helper()
			if got := time.Since(began); got != want {
				t.Errorf("it is %s, want %s", got, want)
			}
		}
		busy, idle, stalled := s.dial(), s.dial(), s.dial()
		busy.send(initRequest(1)) // waits for its answer, and so is not idle
		stalled.raw([]byte{0, 0}) // half a size
		idle.wantEnd()
		stalled.wantEnd()
		at(limit)
		time.Sleep(limit / 2)
		close(release)
		if got := busy.answer(); got != 1 {
			t.Errorf("answer %d", got)
		}
		at(limit * 3 / 2)
		busy.wantEnd()
		at(3 * limit) // it is looked every limit whether nothing has moved for so long
		for range 3 {
			receive1(t, "the end of a connection", s.ended)
		}
		if log := s.log.String(); strings.Count(log, "\n") != 1 || !strings.Contains(log, "2 of its first 4 bytes") {
			t.Errorf("log %q", log)
		}
	})
}

func TestAnAnswerThatFailsClosesTheConnection(t *testing.T) {
	s := serve(t, Options{}, func(context.Context, *Request) Answer { return Fail(errors.New("cannot be told")) })
	c := s.dial()
	c.send(initRequest(1))
	c.wantEnd()
	receive1(t, "its end", s.ended)
	if log := s.log.String(); strings.Count(log, "\n") != 1 || !strings.Contains(log, `key=22 version=0 error="cannot be told"`) {
		t.Errorf("log %q", log)
	}
}

// A claim of many bytes costs nothing until they come, and large bodies arrive whole.
func TestLargeFrames(t *testing.T) {
	s := serve(t, Options{}, empty)
	c := s.dial()
	req := kmsg.NewPtrProduceRequest()
	req.Version, req.Acks = 9, 1
	topic := kmsg.NewProduceRequestTopic()
	part := kmsg.NewProduceRequestTopicPartition()
	part.Records = bytes.Repeat([]byte("x"), 3*firstBody+17)
	topic.Partitions = append(topic.Partitions, part)
	req.Topics = append(req.Topics, topic)
	c.send(req)
	c.frame()
	if info := receive1(t, "the hook", s.requests); info.RequestBytes < 3*firstBody || info.Err != nil {
		t.Errorf("%s", info)
	}
	names := kmsg.NewPtrMetadataRequest()
	names.Version = 9
	for range 20_000 {
		topic := kmsg.NewMetadataRequestTopic()
		topic.Topic = kmsg.StringPtr("topic")
		names.Topics = append(names.Topics, topic)
	}
	c.send(names)
	c.frame()
}

// flakyListener fails before it accepts.
type flakyListener struct {
	net.Listener
	failures int
}

func (l *flakyListener) Accept() (net.Conn, error) {
	if l.failures--; l.failures >= 0 {
		return nil, errors.New("too many open files")
	}
	return l.Listener.Accept()
}

func TestAcceptIsTriedAgain(t *testing.T) {
	s := serve(t, Options{}, func(_ context.Context, r *Request) Answer { return Ready(answerTo(r)) })
	ln := &flakyListener{newListener(t), 3}
	result := make(chan error, 1)
	go func() { result <- s.Serve(context.Background(), ln) }()
	s.addr = ln.Addr().String()
	c := s.dial()
	c.send(initRequest(1))
	if got := c.answer(); got != 1 {
		t.Errorf("answer %d", got)
	}
	if log := s.log.String(); strings.Count(log, "accept failed") != 3 {
		t.Errorf("log %q", log)
	}
	_ = ln.Close() // by somebody else
	if err := receive1(t, "Serve", result); !errors.Is(err, net.ErrClosed) {
		t.Errorf("serve: %v", err)
	}
	c.wantEnd()
}
