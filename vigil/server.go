package vigil

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/muster-io/muster/registry"
)

// ServerOptions is what a daemon watches with.
type ServerOptions struct {
	Store     registry.Store // proofs are read there, and leases revoked
	Root      registry.Root
	ClusterID string
	Broker    int32
	// Path is a socket file to listen on besides the abstract socket, which is seen only
	// in the daemon's own network namespace: for containers. Empty for none. It is made
	// with mode 0660; that of a daemon that is gone is replaced.
	Path string
	// MaxConnections bounds the processes that are watched, each of which costs two open
	// files. 0 is DefaultMaxConnections.
	MaxConnections int
	Hooks          Hooks
	Logger         *slog.Logger // nil discards

	// For tests: how a process is found, and times in place of the limits below.
	peer               func(*net.UnixConn) (*process, error)
	idle, linger, call time.Duration
}

// Limits. A consumer that is refused loses nothing but that its death is noticed by
// its lease alone.
const (
	// DefaultMaxConnections is more consumers than one host has.
	DefaultMaxConnections = 4096
	// maxSessions bounds the sessions of one process.
	maxSessions = 4096

	// idleLimit is how long a connection may be without a session; and what a greeting
	// may take.
	idleLimit = 5 * time.Second
	// writeLimit is how long a consumer may take to read.
	writeLimit = 5 * time.Second
	// lingerLimit is how long a process is watched after its connection has ended
	// without a bye. A process that dies closes its files first and is gone then, a
	// moment later.
	lingerLimit = 5 * time.Second
)

// Hooks tell what the server does: metrics and tests hang on them. A nil function is
// not called. They are called on the server's goroutines, so they must be quick and
// safe for concurrent use.
type Hooks struct {
	// OnRefused: a connection or a session was not taken, or a connection was ended.
	OnRefused func(RefusalReason)
	// OnDeath: the session of a process that has ended is settled.
	OnDeath func(DeathInfo)
}

// RefusalReason says why something was refused.
type RefusalReason string

const (
	RefusedLimit   RefusalReason = "limit"   // there are as many as there may be
	RefusedPeer    RefusalReason = "peer"    // the process could not be found, or did not live
	RefusedMessage RefusalReason = "message" // a line was no message, or none came
	RefusedProof   RefusalReason = "proof"   // the registration is not there, or not the asker's
	RefusedStore   RefusalReason = "store"   // the registry did not answer
)

// RefusalReasons is all of them.
var RefusalReasons = []RefusalReason{RefusedLimit, RefusedPeer, RefusedMessage, RefusedProof, RefusedStore}

// Server watches the processes that ask for it. Use Serve, and Close it.
type Server struct {
	o         ServerOptions
	log       *slog.Logger
	listeners []*net.UnixListener
	ctx       context.Context
	cancel    context.CancelFunc
	work      sync.WaitGroup
	calls     chan struct{} // a place for each revocation under way
	sessions  atomic.Int64

	mu      sync.Mutex
	watches map[*watch]struct{}
}

// Serve begins to watch. It fails only over Path; without the abstract socket, which
// somebody else may have, it goes on. Where the system is not Linux there is nothing
// to listen on, and a Path is an error.
func Serve(o ServerOptions) (*Server, error) {
	if o.MaxConnections == 0 {
		o.MaxConnections = DefaultMaxConnections
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.peer == nil {
		o.peer = peerProcess
	}
	if o.idle == 0 {
		o.idle = idleLimit
	}
	if o.linger == 0 {
		o.linger = lingerLimit
	}
	if o.call == 0 {
		o.call = callLimit
	}
	s := &Server{o: o, log: o.Logger.With("part", "vigil"), watches: map[*watch]struct{}{}, calls: make(chan struct{}, maxCalls)}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	if o.Path != "" {
		ln, err := listenPath(o.Path)
		if err != nil {
			s.cancel()
			return nil, err
		}
		s.listeners = append(s.listeners, ln)
	}
	if supported {
		name := SocketName(o.ClusterID, o.Broker)
		ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: name, Net: "unix"})
		if err != nil {
			// It is worth a warning: who has that name is asked to watch in our place.
			s.log.Warn("consumers on this host are not watched by the usual socket", "socket", name, "error", err)
		} else {
			s.listeners = append(s.listeners, ln)
		}
	}
	for _, ln := range s.listeners {
		s.log.Info("watching consumers on this host", "socket", ln.Addr().String())
		s.work.Go(func() { s.accept(ln) })
	}
	return s, nil
}

// listenPath makes a socket file. One that nobody listens on is replaced: its daemon
// is gone. The directory is locked meanwhile, so that of two daemons that find such a
// file the second does not take away what the first has just made.
func listenPath(path string) (_ *net.UnixListener, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("listen on the local socket %s: %w", path, err)
		}
	}()
	unlock, err := lockDir(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer unlock()
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, err
	case info.Mode().Type() != fs.ModeSocket:
		return nil, errors.New("it is there, and no socket: choose another")
	default:
		c, err := net.Dial("unix", path) // which waits for nobody
		if err == nil {
			_ = c.Close()
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			return nil, errors.New("it is in use: stop what listens there, or choose another")
		}
		if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o660); err != nil {
		_ = ln.Close()
		return nil, err
	}
	return ln, nil
}

// acceptPause is the pause after a failure to accept, such as having no file left.
const acceptPause = 100 * time.Millisecond

func (s *Server) accept(ln *net.UnixListener) {
	for {
		c, err := ln.AcceptUnix()
		switch {
		case s.ctx.Err() != nil:
			if err == nil {
				_ = c.Close()
			}
			return
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			s.log.Warn("cannot accept a consumer", "error", err)
			sleep(s.ctx, acceptPause)
			continue
		}
		w := &watch{s: s, conn: c, sessions: map[registry.LeaseID]session{}}
		if !s.enter(w) {
			s.refused(RefusedLimit) // first: who sees the end finds it counted
			_ = c.Close()
			continue
		}
		s.work.Go(func() {
			defer s.leave(w)
			w.run()
		})
	}
}

// enter takes a place for a process, if there is one.
func (s *Server) enter(w *watch) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() != nil || len(s.watches) >= s.o.MaxConnections {
		return false
	}
	s.watches[w] = struct{}{}
	return true
}

func (s *Server) leave(w *watch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.watches, w)
}

func (s *Server) refused(r RefusalReason) {
	if f := s.o.Hooks.OnRefused; f != nil {
		f(r)
	}
}

// Connections is how many processes are connected or watched.
func (s *Server) Connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.watches)
}

// Sessions is how many sessions are watched.
func (s *Server) Sessions() int { return int(s.sessions.Load()) }

// Close stops watching: nothing is revoked any more, except where that has begun, which
// is waited for. Consumers look for another daemon.
func (s *Server) Close() error {
	var errs []error
	for _, ln := range s.listeners {
		if err := ln.Close(); err != nil {
			errs = append(errs, fmt.Errorf("close a local socket: %w", err))
		}
	}
	s.mu.Lock()
	s.cancel()
	for w := range s.watches {
		_ = w.conn.Close()
	}
	s.mu.Unlock()
	s.work.Wait()
	return errors.Join(errs...)
}

// sleep pauses; false if ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
