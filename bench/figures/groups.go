package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

const (
	targetLeaveSticky = 0.1 // seconds, 99 of 100
	targetLeaveRange  = 0.5
	targetCold        = 4.0

	leaveMembers    = 100
	leavePartitions = 1000
	leaveHosts      = 4

	coldMembers    = 500
	coldPartitions = 5000
	coldHosts      = 10

	// groupLimit bounds one run of the probe of groups.
	groupLimit = 4 * time.Minute
)

// strategies that large groups use.
var strategies = []string{"sticky", "range"}

// grouped is what the probe of package rebalance prints, as far as it is used here.
type grouped struct {
	Leave  []float64 `json:"leave_seconds"`
	Join   []float64 `json:"join_seconds"`
	Cold   []float64 `json:"cold_seconds"`
	Spread []float64 `json:"cold_registrations_seconds"`
	CPU    []float64 `json:"cold_cpu_seconds"`
	Costs  []struct {
		Change  string  `json:"change"`
		Seconds float64 `json:"seconds"`
		Counted struct {
			Requests float64 `json:"requests"`
			WatchIn  float64 `json:"watch_received"`
			WatchOut float64 `json:"watch_sent"`
			BytesIn  float64 `json:"bytes_received"`
			BytesOut float64 `json:"bytes_sent"`
		} `json:"counted"`
	} `json:"costs"`
}

// groupProbe is a daemon, topics without a log, and the probe that makes groups.
type groupProbe struct {
	*daemon
	probe  string
	topics map[int]string // by number of partitions
	groups int
}

func (b *bench) startGroups(ctx context.Context, name string) (*groupProbe, error) {
	root, err := repository()
	if err != nil {
		return nil, err
	}
	g := &groupProbe{probe: filepath.Join(b.dir, "groups-probe"), topics: map[int]string{}}
	cmd := exec.CommandContext(ctx, "go", "build", "-o", g.probe, "./rebalance/internal/probe")
	cmd.Dir = root
	if text, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("go build ./rebalance/internal/probe in %s: %w\n%s", root, err, text)
	}
	p, err := freePorts()
	if err != nil {
		return nil, err
	}
	g.daemon, err = b.startDaemon(ctx, filepath.Join(b.dir, name), p)
	return g, err
}

// topic returns one of so many partitions.
func (g *groupProbe) topic(ctx context.Context, partitions int) (string, error) {
	name := g.topics[partitions]
	if name != "" {
		return name, nil
	}
	name = fmt.Sprintf("t%d", partitions)
	err := g.b.call(ctx, "topics-create", g.client("topics", "create", name, "--partitions", strconv.Itoa(partitions), "--no-log")...)
	g.topics[partitions] = name
	return name, err
}

// run makes a group that has never been.
func (g *groupProbe) run(ctx context.Context, do, strategy string, members, partitions, hosts int, args ...string) (r grouped, err error) {
	topic, err := g.topic(ctx, partitions)
	if err != nil {
		return r, err
	}
	g.groups++
	g.b.progress("%s: %s, %d members, %d partitions …", do, strategy, members, partitions)
	args = append([]string{g.probe, "-etcd", g.etcd, "-do", do, "-strategy", strategy, "-group", fmt.Sprintf("%s-%d", do, g.groups), "-topic", topic,
		"-members", strconv.Itoa(members), "-hosts", strconv.Itoa(hosts)}, args...)
	var text strings.Builder
	p, err := g.b.start(spec{name: "groups-probe", args: args, lines: func(line string, _ time.Time) { text.WriteString(line) }})
	if err != nil {
		return r, err
	}
	defer p.kill()
	if err := p.wait(ctx, groupLimit); err != nil {
		return r, err
	}
	if err := json.Unmarshal([]byte(text.String()), &r); err != nil {
		return r, fmt.Errorf("probe %s printed %q: %w", strings.Join(args[1:], " "), text.String(), err)
	}
	return r, nil
}

// measureLeaves has members of a large group leave and come back, one after the
// other. The target is for 99 of 100 leaves.
func (b *bench) measureLeaves(ctx context.Context) error {
	g, err := b.startGroups(ctx, "leaves")
	if err != nil {
		return err
	}
	defer g.kill()
	var failed []error
	for _, strategy := range strategies {
		if err := g.leaves(ctx, strategy); err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", strategy, err))
		}
	}
	return errors.Join(append(failed, g.stop(ctx))...)
}

func (g *groupProbe) leaves(ctx context.Context, strategy string) error {
	r, err := g.run(ctx, "leave", strategy, leaveMembers, leavePartitions, leaveHosts, "-runs", strconv.Itoa(g.b.leaves))
	if err != nil {
		return err
	}
	target := targetLeaveRange
	if strategy == "sticky" {
		target = targetLeaveSticky
	}
	figure := func(what string) *figure { return g.b.figure("leaves", strategy+": "+what, "s") }
	leave, join := figure("one leaves until all is owned"), figure("one joins, from its registration until all is owned")
	for _, v := range r.Leave {
		leave.add(v)
	}
	figure("one leaves, 99 of 100").target(target).add(quantile(r.Leave, 0.99))
	for _, v := range r.Join {
		join.add(v)
	}
	figure("one joins, 99 of 100").add(quantile(r.Join, 0.99))
	return nil
}

// measureCold has all members of a group that never was join at once.
func (b *bench) measureCold(ctx context.Context) error {
	g, err := b.startGroups(ctx, "cold")
	if err != nil {
		return err
	}
	defer g.kill()
	var failed []error
	for _, strategy := range strategies {
		for range b.colds {
			if err := g.coldStart(ctx, strategy); err != nil {
				failed = append(failed, fmt.Errorf("%s: %w", strategy, err))
			}
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
		}
	}
	return errors.Join(append(failed, g.stop(ctx))...)
}

func (g *groupProbe) coldStart(ctx context.Context, strategy string) error {
	before, err := g.cpu()
	if err != nil {
		return err
	}
	r, err := g.run(ctx, "cold", strategy, coldMembers, coldPartitions, coldHosts)
	if err != nil {
		return err
	}
	after, err := g.cpu()
	if err != nil {
		return err
	}
	if len(r.Cold) != 1 || len(r.Spread) != 1 || len(r.CPU) != 1 || len(r.Costs) != 1 {
		return errors.New("the probe has not said how the cold start was")
	}
	figure := func(what, unit string) *figure { return g.b.figure("cold", strategy+": "+what, unit) }
	figure("from the first registration until all is owned", "s").target(targetCold).add(r.Cold[0])
	figure("… until all are registered", "s").add(r.Spread[0])
	figure("… CPU of the members' processes", "s").add(r.CPU[0])
	figure("… CPU of the daemon with the etcd", "s").addTime(after - before)
	figure("… requests to etcd", "").add(r.Costs[0].Counted.Requests)
	return nil
}
