package main

import (
	"bufio"
	"context"
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
// "join ID", "leave ID". It answers "ready", and "left ID". When stdin ends so does the
// process, without a word to the group.
type host struct {
	o    options
	view *membership.View // nil if each member has its own
	st   registry.Store   // likewise

	out sync.Mutex // of stdout

	leave map[string]context.CancelFunc
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
		view, err := membership.OpenView(ctx, st, "", o.group, registry.ViewOptions{Stall: o.ttl / 2})
		if err != nil {
			return err
		}
		h.st, h.view = st, view
	}
	h.say("ready")
	return h.obey(ctx, os.Stdin)
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
		leave := h.leave[id]
		delete(h.leave, id)
		switch {
		case verb == "join" && leave == nil:
			member, cancel := context.WithCancel(ctx)
			h.leave[id] = cancel
			go h.member(member, id) // until the process ends
		case verb == "leave" && leave != nil:
			leave()
		default:
			return fmt.Errorf("told to %q", lines.Text())
		}
	}
	return lines.Err()
}

// member is one member's life.
func (h *host) member(ctx context.Context, id string) {
	if err := h.join(ctx, id); err != nil {
		fmt.Fprintf(os.Stderr, "member %s: %v\n", id, err)
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
	return m.Run(ctx, nothing{h, id})
}

// nothing is what the members do.
type nothing struct {
	h  *host
	id string
}

func (nothing) Snapshot(rebalance.Snapshot, registry.Snapshot) {}
func (nothing) Begin([]*membership.Ownership)                  {}
func (nothing) Drain(*membership.Ownership) bool               { return true }
func (nothing) Revoked(*membership.Ownership)                  {}

func (n nothing) Lost(o *membership.Ownership, reason string) {
	fmt.Fprintf(os.Stderr, "member %s has lost %s: %s\n", n.id, o.Partition, reason)
	n.h.say("failed %s", n.id)
}
