package wire

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

// This file is about how a connection ends. Whichever side finds a reason first
// records it; it is reported once, when both goroutines have ended. There are two
// ways: abort cuts the connection off; otherwise the reader stops reading (a bad
// frame, a shutdown), the writer answers what was read before, and linger waits.

// setReason keeps the first reason.
func (c *conn) setReason(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reason == nil {
		c.reason = err
	}
}

// abort ends the connection now: answers that wait are cancelled, reads and writes fail.
func (c *conn) abort(err error) {
	c.setReason(err)
	c.cancel(err)
	_ = c.nc.Close()
}

// drain makes the reader stop at the next frame.
func (c *conn) drain() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.draining = true
	_ = c.nc.SetReadDeadline(time.Now())
}

func (c *conn) isDraining() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.draining
}

// armRead gives the next read its time. The lock keeps it from undoing drain.
func (c *conn) armRead() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.draining {
		return errDraining
	}
	if err := c.nc.SetReadDeadline(time.Now().Add(c.srv.opts.IdleTimeout)); err != nil {
		return c.gone(err)
	}
	return nil
}

// idle tells, when nothing was read for a whole idle timeout, whether nothing was
// written either and nobody waits for an answer.
func (c *conn) idle() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.window.empty() && time.Since(c.lastWrite) >= c.srv.opts.IdleTimeout
}

// finish is the writer's last act: it tells the client that nothing more comes,
// and ends the reader's wait in linger.
func (c *conn) finish() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.finished = true
	if tcp, ok := c.nc.(interface{ CloseWrite() error }); ok && tcp.CloseWrite() == nil {
		_ = c.nc.SetReadDeadline(time.Now().Add(lingerTime))
		return
	}
	_ = c.nc.Close()
}

// linger throws away what the client still sends while the writer finishes what
// was asked before the end, so that a client that goes away is noticed, and then
// gives it a moment to close its side.
func (c *conn) linger() {
	c.mu.Lock()
	if !c.finished {
		_ = c.nc.SetReadDeadline(time.Time{})
	}
	c.mu.Unlock()
	if _, err := io.Copy(io.Discard, c.br); !errors.Is(err, os.ErrDeadlineExceeded) {
		c.cancel(errClientGone)
	}
}

// gone classifies an error of the socket.
func (c *conn) gone(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("the client took nothing of its answers for %s", c.srv.opts.IdleTimeout)
	}
	return fmt.Errorf("%w: %w", errClientGone, err)
}

// ended says why the context has ended, and never blames the client for what the
// owner of Serve did.
func (c *conn) ended() error {
	err := context.Cause(c.ctx)
	if blameless(err) {
		return err
	}
	return fmt.Errorf("%w: %w", errStopped, err)
}

// name puts what is known of the request around an error that is the client's
// fault. The client id is that of the request before: clients do not change it.
func (c *conn) name(err error, key, version int16) error {
	var known *FrameError
	if blameless(err) || errors.As(err, &known) {
		return err
	}
	return &FrameError{Key: key, Version: version, ClientID: c.clientID, Err: err}
}

// blameless tells whether a connection ended in the ordinary course of things.
func blameless(err error) bool {
	for _, e := range []error{errClientGone, errIdle, errDraining, errStopped} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// report writes the one line about a connection that did not end in the ordinary
// course of things, and tells the hook.
func (c *conn) report() {
	c.mu.Lock()
	err := c.reason
	c.mu.Unlock()
	if !blameless(err) {
		frame := &FrameError{Key: unknown, Version: unknown, ClientID: c.clientID, Err: err}
		_ = errors.As(err, &frame)
		c.srv.opts.Logger.Warn("connection closed",
			"remote", c.remote,
			"client_id", strings.ToValidUTF8(frame.ClientID[:min(len(frame.ClientID), maxLoggedID)], "\uFFFD"),
			"key", frame.Key,
			"version", frame.Version,
			"error", frame.Err)
	}
	if errors.Is(err, errClientGone) || errors.Is(err, errIdle) {
		err = nil
	}
	if hook := c.srv.opts.Hooks.OnDisconnect; hook != nil {
		hook(c.remote, err)
	}
}
