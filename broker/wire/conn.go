package wire

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"
)

const (
	// readBuffer holds a few small requests; the body of a large one bypasses it.
	readBuffer = 4 << 10

	// firstBody is what is allocated for a body before any of it has arrived; the
	// rest follows as the bytes come. A client that claims 100 MiB and sends nothing
	// costs no more than this.
	firstBody = 1 << 20

	// writeChunk is how much of a response is written under one deadline, so that a
	// slow client is told from one that is stuck.
	writeChunk = 256 << 10

	// lingerTime bounds how long a connection that we end waits for the client to
	// end it too. Closing with unread bytes makes TCP throw away answers on the way.
	lingerTime = time.Second

	// maxLoggedID keeps a client id, which may be 32 KiB, from filling the log.
	maxLoggedID = 256
)

// Why a connection ended, where that is nobody's fault.
var (
	errClientGone = errors.New("the client closed the connection")
	errIdle       = errors.New("the connection was idle")
	errDraining   = errors.New("the server is shutting down")
	errStopped    = errors.New("the server stopped before the answer was ready")
)

// Request is what a Handler gets.
type Request struct {
	Body     kmsg.Request // its byte slices belong to the handler
	ClientID string       // "" for null
	Remote   string       // address of the client
	Received time.Time    // when its last byte arrived

	// Draining is closed when the server begins to shut down. A long poll then answers
	// with what it has.
	Draining <-chan struct{}

	correlationID int32
	bytes         int
}

// pending is a request on its way from the reader to the writer.
type pending struct {
	req    *Request
	answer Answer
}

// conn is one connection. serve is the reader; it owns the writer.
type conn struct {
	srv    *Server
	nc     net.Conn
	br     *bufio.Reader
	remote string
	window *window
	queue  chan pending // never full: window admits no more than its capacity

	ctx    context.Context // ends when the client is gone or the server must stop
	cancel context.CancelCauseFunc

	clientID string // of the latest request; the reader's own

	mu        sync.Mutex
	draining  bool // the reader is to stop
	finished  bool // the writer has written all it ever will
	lastWrite time.Time
	reason    error // the first reason to end
}

func newConn(ctx context.Context, s *Server, nc net.Conn) *conn {
	c := &conn{
		srv:    s,
		nc:     nc,
		br:     bufio.NewReaderSize(nc, readBuffer),
		remote: nc.RemoteAddr().String(),
		window: newWindow(s.opts.MaxInFlight, s.opts.MaxInFlightBytes),
		queue:  make(chan pending, s.opts.MaxInFlight),
	}
	c.ctx, c.cancel = context.WithCancelCause(ctx)
	return c
}

// serve reads until the connection ends, and returns when both goroutines have.
func (c *conn) serve() {
	// Whoever ends the context, both goroutines must come out of their socket calls.
	defer context.AfterFunc(c.ctx, func() { c.abort(c.ended()) })()

	var writer sync.WaitGroup
	writer.Go(c.write)
	err := c.read()
	c.setReason(err)
	close(c.queue)
	if errors.Is(err, errClientGone) {
		c.cancel(errClientGone)
	} else {
		c.linger()
	}
	writer.Wait()
	c.abort(errClientGone)
	c.srv.disconnect(c) // before its end is told: who hears of it may count on the place
	c.report()
}

// read reads requests and hands them on. Its error is never nil.
func (c *conn) read() error {
	for {
		size, err := c.readSize()
		if err != nil {
			return err
		}
		if err := c.window.enter(c.ctx, c.srv.draining, size); err != nil {
			return err
		}
		req, handler, err := c.readRequest(size)
		if err != nil {
			c.window.leave(size)
			return err
		}
		c.clientID = req.ClientID
		c.queue <- pending{req: req, answer: handler(c.ctx, req)}
	}
}

// readSize waits for the next frame and checks its size, for which it looks at the
// key, too.
func (c *conn) readSize() (int, error) {
	b, err := c.peek(4)
	if err != nil {
		return 0, c.name(err, unknown, unknown)
	}
	size := int32(binary.BigEndian.Uint32(b))
	if err := checkSize(size); err != nil {
		return 0, c.name(err, unknown, unknown)
	}
	if b, err = c.peek(4 + 2 + 2); err != nil {
		return 0, c.name(err, unknown, unknown)
	}
	key, version := int16(binary.BigEndian.Uint16(b[4:])), int16(binary.BigEndian.Uint16(b[6:]))
	if err := checkKeySize(key, size); err != nil {
		return 0, c.name(err, key, version)
	}
	_, _ = c.br.Discard(4) // cannot fail: they have been peeked
	return int(size), nil
}

// peek waits until n bytes are there, for as long as the connection may be idle.
func (c *conn) peek(n int) ([]byte, error) {
	for {
		if err := c.armRead(); err != nil {
			return nil, err
		}
		b, err := c.br.Peek(n)
		switch {
		case err == nil:
			return b, nil
		case !errors.Is(err, os.ErrDeadlineExceeded):
			return nil, c.gone(err)
		case c.isDraining():
			return nil, errDraining
		case len(b) == 0 && c.idle():
			return nil, errIdle
		case len(b) > 0:
			return nil, fmt.Errorf("%w: %d of its first %d bytes, then nothing", ErrFrameCut, len(b), n)
		}
	}
}

// readRequest reads the body of a frame and decodes it.
func (c *conn) readRequest(size int) (*Request, Handler, error) {
	frame, err := c.readBody(size)
	if err != nil {
		h, _, _ := readHeader(frame) // as far as it has come
		return nil, nil, c.name(err, h.key, h.version)
	}
	received := time.Now()
	h, body, err := c.decode(frame)
	handler := c.srv.table.downgrade
	switch {
	case err == nil:
		handler = c.srv.table.entries[h.key].handler
	case errors.Is(err, ErrUnsupported) && c.srv.table.apiVersionsTooNew(h):
		body = kmsg.NewPtrApiVersionsRequest() // in version 0, which its answer has
	default:
		return nil, nil, err
	}
	return &Request{
		Body:          body,
		ClientID:      h.clientID,
		Remote:        c.remote,
		Received:      received,
		Draining:      c.srv.draining,
		correlationID: h.correlationID,
		bytes:         size,
	}, handler, nil
}

// decode decodes a frame, big ones one at a time over all connections.
func (c *conn) decode(frame []byte) (header, kmsg.Request, error) {
	if len(frame) > bigFrame && int16(binary.BigEndian.Uint16(frame)) != keyProduce {
		select {
		case c.srv.decodeBig <- struct{}{}:
			defer func() { <-c.srv.decodeBig }()
		case <-c.ctx.Done():
			return header{}, nil, c.ended()
		}
	}
	return c.srv.table.decode(frame)
}

// readBody reads n bytes, and allocates as they come. With an error it returns
// what came before it.
func (c *conn) readBody(n int) (body []byte, err error) {
	body = make([]byte, 0, min(n, firstBody))
	for len(body) < n {
		if len(body) == cap(body) {
			grown := make([]byte, len(body), min(n, 2*cap(body)))
			copy(grown, body)
			body = grown
		}
		if err := c.armRead(); err != nil {
			return body, err
		}
		m, err := c.br.Read(body[len(body):cap(body)])
		body = body[:len(body)+m]
		switch {
		case err == nil:
		case errors.Is(err, os.ErrDeadlineExceeded) && c.isDraining():
			return body, errDraining
		case errors.Is(err, os.ErrDeadlineExceeded):
			return body, fmt.Errorf("%w: %d of %d bytes, then nothing", ErrFrameCut, len(body), n)
		default:
			return body, c.gone(err)
		}
	}
	return body, nil
}

// write answers the requests one by one. After the first failure it only
// discards, until the reader has noticed and closed the queue.
func (c *conn) write() {
	failed := false
	for p := range c.queue {
		if failed {
			c.done(p, false, 0, c.ended())
			continue
		}
		bad, n, err := c.answer(p)
		c.done(p, bad, n, err)
		if err != nil {
			failed = true
			c.abort(err)
		}
	}
	c.finish()
}

// answer runs one Answer and writes what it returns. failed is what the hook made of it.
func (c *conn) answer(p pending) (failed bool, written int, err error) {
	if p.answer == nil {
		return false, 0, nil
	}
	resp, err := p.answer(c.ctx)
	switch {
	case err != nil && c.ctx.Err() != nil:
		return false, 0, c.ended() // whatever it says, this is why
	case err != nil:
		return false, 0, &FrameError{Key: p.req.Body.Key(), Version: p.req.Body.GetVersion(), ClientID: p.req.ClientID, Err: err}
	case resp == nil:
		return false, 0, nil
	}
	resp.SetVersion(p.req.Body.GetVersion())
	if hook := c.srv.opts.Hooks.OnAnswer; hook != nil {
		failed = hook(p.req.Body.Key(), resp)
	}
	buf := c.srv.buffer()
	defer c.srv.release(buf)
	*buf = appendResponse(*buf, p.req.correlationID, resp)
	written, err = c.writeAll(*buf)
	return failed, written, err
}

func (c *conn) writeAll(b []byte) (int, error) {
	written := 0
	for written < len(b) {
		if err := c.nc.SetWriteDeadline(time.Now().Add(c.srv.opts.IdleTimeout)); err != nil {
			return written, c.gone(err)
		}
		n, err := c.nc.Write(b[written:min(len(b), written+writeChunk)])
		written += n
		if err != nil {
			return written, c.gone(err)
		}
	}
	c.mu.Lock()
	c.lastWrite = time.Now()
	c.mu.Unlock()
	return written, nil
}

// done takes a request off the books.
func (c *conn) done(p pending, failed bool, written int, err error) {
	c.window.leave(p.req.bytes)
	call(c.srv.opts.Hooks.OnRequest, RequestInfo{
		Key:           p.req.Body.Key(),
		Version:       p.req.Body.GetVersion(),
		ClientID:      p.req.ClientID,
		Remote:        c.remote,
		RequestBytes:  p.req.bytes,
		ResponseBytes: written,
		Duration:      time.Since(p.req.Received),
		Err:           err,
		Failed:        failed,
	})
}
