package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime/pprof"
	"strings"
	"sync"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/rebalance/membership"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/etcd"
)

// host is some members of the group, as lines on stdin have them join and leave:
// "join ID", "leave ID". It answers "ready", and "left ID". When stdin ends all leave.
type host struct {
	o    options
	view *membership.View // nil if each member has its own
	st   registry.Store   // likewise

	out sync.Mutex // of stdout

	mu      sync.Mutex
	leave   map[string]context.CancelFunc
	failed  error
	members sync.WaitGroup
}

func open(ctx context.Context, o options) (*etcd.Store, error) {
	return etcd.Open(ctx, etcd.Options{Endpoints: strings.Split(o.etcd, ",")})
}

func runHost(ctx context.Context, o options) error {
	if o.profile != "" {
		f, err := os.Create(o.profile)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := pprof.StartCPUProfile(f); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	h := &host{o: o, leave: map[string]context.CancelFunc{}}
	if !o.own {
		st, err := open(ctx, o)
		if err != nil {
			return err
		}
		defer st.Close()
		view, err := membership.OpenView(ctx, st, "", o.group, registry.ViewOptions{Stall: o.ttl / 2})
		if err != nil {
			return err
		}
		defer view.Close()
		h.st, h.view = st, view
	}
	h.say("ready")
	err := h.obey(ctx, os.Stdin)
	h.mu.Lock()
	for _, leave := range h.leave {
		leave()
	}
	h.mu.Unlock()
	h.members.Wait()
	return errors.Join(err, h.failed)
}

func (h *host) say(format string, args ...any) {
	h.out.Lock()
	defer h.out.Unlock()
	fmt.Printf(format+"\n", args...)
}

func (h *host) obey(ctx context.Context, in io.Reader) error {
	lines := bufio.NewScanner(in)
	for lines.Scan() && ctx.Err() == nil {
		verb, id, _ := strings.Cut(lines.Text(), " ")
		h.mu.Lock()
		leave := h.leave[id]
		delete(h.leave, id)
		switch {
		case verb == "join" && leave == nil:
			member, cancel := context.WithCancel(ctx)
			h.leave[id] = cancel
			h.members.Go(func() {
				defer cancel()
				h.member(member, id)
			})
		case verb == "leave" && leave != nil:
			leave()
		default:
			h.mu.Unlock()
			return fmt.Errorf("told to %q", lines.Text())
		}
		h.mu.Unlock()
	}
	return lines.Err()
}

// member is one member's life.
func (h *host) member(ctx context.Context, id string) {
	err := h.join(ctx, id)
	if err != nil {
		h.mu.Lock()
		h.failed = errors.Join(h.failed, fmt.Errorf("member %s: %w", id, err))
		h.mu.Unlock()
		h.say("failed %s", id)
		return
	}
	h.say("left %s", id)
}

func (h *host) join(ctx context.Context, id string) error {
	st := h.st
	if st == nil {
		own, err := open(ctx, h.o)
		if err != nil {
			return err
		}
		defer own.Close()
		st = own
	}
	m, err := membership.New(membership.Config{Store: st, Group: h.o.group, ID: id, View: h.view, SessionTimeout: h.o.ttl,
		Strategies: []string{h.o.strategy}, Subscription: membership.Subscription{Topics: map[string]int32{h.o.topic: 1}},
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))})
	if err != nil {
		return err
	}
	return m.Run(ctx, nothing{})
}

// nothing is what the members do.
type nothing struct{}

func (nothing) Snapshot(rebalance.Snapshot, registry.Snapshot) {}
func (nothing) Begin([]*membership.Ownership)                  {}
func (nothing) Drain(*membership.Ownership) bool               { return true }
func (nothing) Revoked(*membership.Ownership)                  {}
func (nothing) Lost(*membership.Ownership, string)             {}
