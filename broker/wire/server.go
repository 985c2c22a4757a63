package wire

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"
)

// Defaults of Options, and limits that are no option.
const (
	// DefaultMaxConnections leaves room below the usual limit of file descriptors
	// (systemd's 16,384 and more for services) for segments and etcd.
	DefaultMaxConnections = 10_000

	// DefaultIdleTimeout is Kafka's connections.max.idle.ms.
	DefaultIdleTimeout = 10 * time.Minute

	// DefaultMaxInFlight: clients pipeline 5 (Java, idempotent) to a few dozen
	// produce requests, librdkafka without bound.
	DefaultMaxInFlight = 128

	// DefaultMaxInFlightBytes lets a handful of full produce requests share an fsync.
	DefaultMaxInFlightBytes = 16 << 20

	// While accept fails (mostly: no file descriptor free) it is tried again at this
	// pace. Giving up would leave a daemon that lives but serves nobody.
	minAcceptBackoff = 5 * time.Millisecond
	maxAcceptBackoff = time.Second

	// refusedLogEvery keeps a client that reconnects in a loop from flooding the log.
	refusedLogEvery = 10 * time.Second

	// maxPooledBuffer is the largest response buffer that is kept for the next
	// response. A pool of the largest ever would hold memory that is rarely needed.
	maxPooledBuffer = 8 << 20
)

// Options configure a Server. The zero value of a field stands for its default.
type Options struct {
	// Logger gets one line for every connection that is closed for a fault of its
	// client, and for trouble with accepting. Default: nothing is logged.
	Logger *slog.Logger

	// Hooks are called as things happen.
	Hooks Hooks

	// MaxConnections bounds the open connections; one more is accepted and closed at
	// once, so that its client learns it and tries elsewhere or later.
	MaxConnections int

	// IdleTimeout closes a connection on which nothing moved for so long while no
	// request was pending. It is also how long a client may take none of an answer's
	// bytes, or send none of a request's: a consumer that processes what it has
	// fetched does not read for minutes, so this cannot be short.
	IdleTimeout time.Duration

	// MaxInFlight bounds the requests of one connection that are read but not
	// answered. At the bound the server stops reading from it.
	MaxInFlight int

	// MaxInFlightBytes bounds the same requests by their bytes. A larger request is
	// taken when it is the only one.
	MaxInFlightBytes int
}

func (o *Options) setDefaults() {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.MaxConnections <= 0 {
		o.MaxConnections = DefaultMaxConnections
	}
	if o.IdleTimeout <= 0 {
		o.IdleTimeout = DefaultIdleTimeout
	}
	if o.MaxInFlight <= 0 {
		o.MaxInFlight = DefaultMaxInFlight
	}
	if o.MaxInFlightBytes <= 0 {
		o.MaxInFlightBytes = DefaultMaxInFlightBytes
	}
}

// A Server serves Kafka's protocol on any number of listeners.
type Server struct {
	opts  Options
	table table

	draining chan struct{} // closed when Shutdown begins

	decodeBig chan struct{} // capacity 1: see bigFrame
	buffers   sync.Pool     // of *[]byte, for responses

	mu          sync.Mutex
	serving     map[net.Listener]chan struct{} // closed when that Serve has returned
	connections map[*conn]struct{}
	refused     int       // since the last log line about it
	refusedAt   time.Time // of that line
}

// New makes a server that serves no key yet.
func New(o Options) *Server {
	o.setDefaults()
	return &Server{
		opts:        o,
		draining:    make(chan struct{}),
		decodeBig:   make(chan struct{}, 1),
		serving:     make(map[net.Listener]chan struct{}),
		connections: make(map[*conn]struct{}),
	}
}

// Serve accepts connections until Shutdown (then it returns nil), until ctx ends
// (then it closes everything at once and returns the cause), or until the listener
// is closed by someone else. It closes the listener, and returns only when all of
// its connections have ended.
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	done, err := s.addListener(ln)
	if err != nil {
		return err
	}
	defer s.removeListener(ln, done)
	defer context.AfterFunc(ctx, func() { _ = ln.Close() })()

	var connections sync.WaitGroup
	err = s.accept(ctx, ln, &connections)
	_ = ln.Close()
	select {
	case <-s.draining: // the connections end by themselves, or when Shutdown loses patience
		err = nil
	default:
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		cancel(err)
	}
	connections.Wait()
	return err
}

func (s *Server) accept(ctx context.Context, ln net.Listener, connections *sync.WaitGroup) error {
	backoff := minAcceptBackoff
	for {
		nc, err := ln.Accept()
		switch {
		case err == nil:
			backoff = minAcceptBackoff
			if c := s.connect(ctx, nc); c != nil {
				connections.Go(c.serve)
			}
			continue
		case errors.Is(err, net.ErrClosed) || ctx.Err() != nil || isClosed(s.draining):
			return fmt.Errorf("accept on %s: %w", ln.Addr(), err)
		}
		s.opts.Logger.Error("accept failed", "listener", ln.Addr().String(), "retry_in", backoff, "error", err)
		select {
		case <-time.After(backoff):
		case <-s.draining:
		case <-ctx.Done():
		}
		backoff = min(2*backoff, maxAcceptBackoff)
	}
}

// connect takes a connection into the books, or closes it: then it returns nil.
func (s *Server) connect(ctx context.Context, nc net.Conn) *conn {
	c := newConn(ctx, s, nc)
	s.mu.Lock()
	full := len(s.connections) >= s.opts.MaxConnections
	draining := isClosed(s.draining)
	if !full && !draining {
		s.connections[c] = struct{}{}
	}
	report := 0
	if full && !draining {
		s.refused++
		if now := time.Now(); now.Sub(s.refusedAt) >= refusedLogEvery {
			report, s.refused, s.refusedAt = s.refused, 0, now
		}
	}
	s.mu.Unlock()

	if !full && !draining {
		call(s.opts.Hooks.OnConnect, c.remote)
		return c
	}
	if report > 0 {
		s.opts.Logger.Warn("connections refused: there are too many",
			"remote", c.remote, "refused", report, "max_connections", s.opts.MaxConnections)
	}
	if full {
		call(s.opts.Hooks.OnRefused, c.remote) // first: who sees the end finds it counted
	}
	c.abort(errDraining)
	return nil
}

func (s *Server) disconnect(c *conn) {
	s.mu.Lock()
	delete(s.connections, c)
	s.mu.Unlock()
}

// Shutdown stops accepting and reading, wakes long polls, lets every request that
// was read be answered, and closes the connections. When ctx ends first, what is
// left is cut off, and the error is that of ctx. After it the server cannot be
// used again.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	if !isClosed(s.draining) {
		close(s.draining)
	}
	var waitFor []chan struct{}
	for ln, done := range s.serving {
		_ = ln.Close()
		waitFor = append(waitFor, done)
	}
	for c := range s.connections {
		c.drain()
	}
	s.mu.Unlock()

	for _, done := range waitFor {
		select {
		case <-done:
		case <-ctx.Done():
			s.stop()
			// Serve still waits for its connections; they are on their way out unless
			// a handler is stuck, and then waiting here would not help either.
			return fmt.Errorf("shut down of the Kafka listeners: %w", context.Cause(ctx))
		}
	}
	return nil
}

// stop cuts off every connection.
func (s *Server) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.connections {
		c.abort(errStopped)
	}
}

func (s *Server) addListener(ln net.Listener) (chan struct{}, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if isClosed(s.draining) {
		_ = ln.Close()
		return nil, errors.New("serve: the server was shut down")
	}
	done := make(chan struct{})
	s.serving[ln] = done
	return done, nil
}

func (s *Server) removeListener(ln net.Listener, done chan struct{}) {
	s.mu.Lock()
	delete(s.serving, ln)
	s.mu.Unlock()
	close(done)
}

// buffer lends a buffer for one response.
func (s *Server) buffer() *[]byte {
	if b, ok := s.buffers.Get().(*[]byte); ok {
		return b
	}
	return new([]byte)
}

func (s *Server) release(b *[]byte) {
	if cap(*b) <= maxPooledBuffer {
		*b = (*b)[:0]
		s.buffers.Put(b)
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// call calls a hook, if there is one.
func call[T any](hook func(T), arg T) {
	if hook != nil {
		hook(arg)
	}
}
