package vigil

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/muster-io/muster/registry"
)

// watch is one process that has connected, and the sessions that it has named.
type watch struct {
	s    *Server
	conn *net.UnixConn
	p    *process // nil until it is found

	mu       sync.Mutex
	ended    bool // the process has; what is added from then on is revoked at once
	sessions map[registry.LeaseID]session
}

// run is the life of a connection. When it returns the process is watched no more.
func (w *watch) run() {
	defer w.conn.Close()
	p, err := w.s.o.peer(w.conn)
	if err != nil {
		w.refuse(RefusedPeer, err)
		return
	}
	w.p = p
	ended := make(chan struct{})
	var waiting sync.WaitGroup
	waiting.Go(func() {
		if yes, err := p.wait(); yes {
			w.end()
			close(ended)
		} else if err != nil {
			w.s.log.Warn("cannot watch a process", "error", err)
		}
	})
	defer waiting.Wait()
	defer w.forget()
	defer p.close()
	switch err := w.converse(); {
	case errors.Is(err, errGone):
		w.refuse(RefusedPeer, err)
	case err != nil:
		w.refuse(RefusedMessage, err)
	}
	_ = w.conn.Close() // a consumer that lives comes again
	if w.count() == 0 {
		return
	}
	linger := time.NewTimer(w.s.o.linger)
	defer linger.Stop()
	select {
	case <-ended:
	case <-linger.C:
	case <-w.s.ctx.Done():
	}
}

func (w *watch) refuse(r RefusalReason, err error) {
	w.s.refused(r)
	args := []any{"reason", string(r), "error", err}
	if w.p != nil {
		args = append(args, "pid", w.p.pid, "uid", w.p.uid)
	}
	w.s.log.Debug("a consumer is not watched", args...)
}

// converse reads what the process says until the connection ends, and answers. An
// error is one of the process.
func (w *watch) converse() error {
	// That this can be written shows that the peer had not closed its end when the pidfd
	// was open already: where it was found by its number, that was still its own.
	if err := w.write(greeting{Version: protocolVersion, Cluster: w.s.o.ClusterID, Broker: w.s.o.Broker}); err != nil {
		return errGone
	}
	r := bufio.NewReaderSize(w.conn, maxMessage)
	var idle time.Time // since when it has no session
	for {
		// Asking in vain is no way to keep a place.
		var limit time.Time
		if w.count() > 0 {
			idle = time.Time{}
		} else {
			if idle.IsZero() {
				idle = time.Now()
			}
			limit = idle.Add(w.s.o.idle)
		}
		_ = w.conn.SetReadDeadline(limit)
		line, err := readLine(r)
		if errors.Is(err, errMessage) {
			return err
		}
		if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
			return fmt.Errorf("%w: no session for %s", errMessage, w.s.o.idle)
		}
		if err != nil {
			return nil // gone, or Close
		}
		m, session, err := parseMessage(line)
		if err != nil {
			return err
		}
		switch m.Op {
		case opAdd:
			a := answer{Lease: m.Lease, Watched: true}
			if reason, err := w.add(session); err != nil {
				w.refuse(reason, err)
				a.Watched, a.Reason = false, err.Error()
			}
			if w.write(a) != nil {
				return nil
			}
		case opRemove:
			w.remove(session.lease)
		case opBye:
			w.forget()
			return nil
		}
	}
}

func (w *watch) write(m any) error {
	line, err := encodeLine(m)
	if err != nil {
		return err
	}
	_ = w.conn.SetWriteDeadline(time.Now().Add(writeLimit))
	_, err = w.conn.Write(line)
	return err
}

// Why a session is not watched, as the consumer is told. It is not told more, since it
// has not shown yet that it may know.
var (
	errGone    = errors.New("it had gone before it was greeted")
	errTooMany = errors.New("too many sessions")
	errProof   = errors.New("no such registration under that lease with that secret")
	errStore   = errors.New("the registry does not answer")
)

// add takes a session, if it is the asker's.
func (w *watch) add(a session) (RefusalReason, error) {
	if w.count() >= maxSessions {
		return RefusedLimit, errTooMany
	}
	stand, err := w.s.standing([]session{a})
	switch {
	case err != nil:
		w.s.log.Debug("cannot read the registration of a consumer", "key", a.key, "error", err)
		return RefusedStore, errStore
	case len(stand) == 0:
		return RefusedProof, errProof
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended {
		w.s.settle([]session{a}, w.p) // it has died while we asked
		return "", nil
	}
	if _, there := w.sessions[a.lease]; !there {
		w.s.sessions.Add(1)
	}
	w.sessions[a.lease] = a
	w.s.log.Debug("watching a consumer", "key", a.key, "lease", registry.LeaseText(a.lease), "pid", w.p.pid, "uid", w.p.uid)
	return "", nil
}

func (w *watch) remove(lease registry.LeaseID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, there := w.sessions[lease]; there {
		delete(w.sessions, lease)
		w.s.sessions.Add(-1)
	}
}

func (w *watch) count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.sessions)
}

// forget drops all sessions, and returns them.
func (w *watch) forget() []session {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.drop()
}

func (w *watch) drop() []session {
	list := make([]session, 0, len(w.sessions))
	for _, a := range w.sessions {
		list = append(list, a)
	}
	clear(w.sessions)
	w.s.sessions.Add(-int64(len(list)))
	return list
}

// end is called when the process has ended.
func (w *watch) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ended = true
	if list := w.drop(); len(list) > 0 {
		w.s.settle(list, w.p)
	}
}
