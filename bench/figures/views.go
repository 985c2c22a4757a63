package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	targetLoad     = 1.0 // seconds
	targetEvent    = 5.0 // ms, 99 of 100
	targetSessions = 5.0 // % of a core

	viewKeys      = 100_000
	viewKeysSmall = 100
	viewEvents    = 1000 // in each run
	sessionCount  = 1000
	sessionTTL    = 6 * time.Second
	sessionTime   = 30 * time.Second
	// probeLimit bounds one run of the probe.
	probeLimit = 2 * time.Minute
)

// measureViews measures what Go programs do that import package registry: views and
// sessions, in a process of their own, against the etcd of a daemon.
func (b *bench) measureViews(ctx context.Context) error {
	probe, err := b.buildProbe(ctx)
	if err != nil {
		return err
	}
	p, err := freePorts()
	if err != nil {
		return err
	}
	d, err := b.startDaemon(ctx, filepath.Join(b.dir, "views"), p)
	if err != nil {
		return err
	}
	defer func() { d.kill() }()
	for prefix, keys := range map[string]int{"/small/": viewKeysSmall, "/large/": viewKeys} {
		if _, err := d.probe(ctx, probe, "-do", "fill", "-prefix", prefix, "-keys", strconv.Itoa(keys)); err != nil {
			return err
		}
	}
	load := b.figure("views", "100,000 keys loaded", "s").target(targetLoad)
	r, err := d.probe(ctx, probe, "-do", "load", "-prefix", "/large/", "-runs", strconv.Itoa(b.runs))
	if err != nil {
		return err
	}
	used := b.figure("views", "… CPU of the process", "s")
	for i, v := range r.Load {
		load.add(v)
		used.add(r.CPU[i])
	}
	for range b.runs {
		if err := d.measureEvents(ctx, probe, "100 keys", "/small/", viewKeysSmall); err != nil {
			return err
		}
		if err := d.measureEvents(ctx, probe, "100,000 keys", "/large/", viewKeys); err != nil {
			return err
		}
	}
	if err := d.measureSessions(ctx, probe); err != nil {
		return err
	}
	return d.stop(ctx)
}

// probed is what the probe prints, as far as it is used here.
type probed struct {
	Load   []float64 `json:"load_seconds"`
	CPU    []float64 `json:"load_cpu_seconds"`
	Events []float64 `json:"event_seconds"`
	Puts   []float64 `json:"put_seconds"`
	Cores  []float64 `json:"cores"`
	Lost   int       `json:"sessions_lost"`
}

func (b *bench) buildProbe(ctx context.Context) (string, error) {
	root, err := repository()
	if err != nil {
		return "", err
	}
	out := filepath.Join(b.dir, "probe")
	cmd := exec.CommandContext(ctx, "go", "build", "-o", out, "./registry/internal/probe")
	cmd.Dir = root
	if text, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build ./registry/internal/probe in %s: %w\n%s", root, err, text)
	}
	return out, nil
}

func (d *daemon) probe(ctx context.Context, path string, args ...string) (r probed, err error) {
	var text strings.Builder
	p, err := d.b.start(spec{name: "probe", args: append([]string{path, "-etcd", d.etcd}, args...),
		lines: func(line string, _ time.Time) { text.WriteString(line) }})
	if err != nil {
		return r, err
	}
	defer p.kill()
	if err := p.wait(ctx, probeLimit); err != nil {
		return r, err
	}
	if err := json.Unmarshal([]byte(text.String()), &r); err != nil {
		return r, fmt.Errorf("probe %s printed %q: %w", strings.Join(args, " "), text.String(), err)
	}
	return r, nil
}

// measureEvents takes the way of a put to the event. Most of it is etcd's write to
// the disk, so what the view adds to the put itself is shown apart; it is below
// zero where the event is there before the put has returned.
func (d *daemon) measureEvents(ctx context.Context, probe, name, prefix string, keys int) error {
	r, err := d.probe(ctx, probe, "-do", "events", "-prefix", prefix, "-keys", strconv.Itoa(keys), "-runs", strconv.Itoa(viewEvents))
	if err != nil {
		return err
	}
	added := make([]float64, len(r.Events))
	for i := range r.Events {
		added[i] = r.Events[i] - r.Puts[i]
	}
	figure := func(what string) *figure { return d.b.figure("views", "put to event, view of "+name+", "+what, "ms") }
	figure("half").add(quantile(r.Events, 0.5) * 1e3)
	figure("99 of 100").target(targetEvent).add(quantile(r.Events, 0.99) * 1e3)
	figure("99 of 100, the put alone").add(quantile(r.Puts, 0.99) * 1e3)
	figure("99 of 100, after the put").add(quantile(added, 0.99) * 1e3)
	return nil
}

// quantile is the least value that so many of the list, as a share, do not exceed.
func quantile(list []float64, q float64) float64 {
	sorted := slices.Sorted(slices.Values(list))
	return sorted[max(int(math.Ceil(q*float64(len(sorted))-1e-9))-1, 0)]
}

func (d *daemon) measureSessions(ctx context.Context, probe string) error {
	used := d.b.figure("views", "1,000 sessions of 6 s kept alive, CPU of the process", "% of a core").target(targetSessions)
	lost := d.b.figure("views", "… of them lost", "").target(0)
	server := d.b.figure("views", "… CPU of the daemon with the etcd", "% of a core")
	before, err := d.cpu()
	if err != nil {
		return err
	}
	began := time.Now()
	r, err := d.probe(ctx, probe, "-do", "sessions", "-sessions", strconv.Itoa(sessionCount), "-ttl", sessionTTL.String(),
		"-for", sessionTime.String(), "-runs", "1")
	if err != nil {
		return err
	}
	after, err := d.cpu()
	if err != nil {
		return err
	}
	for _, c := range r.Cores {
		used.add(100 * c)
	}
	lost.add(float64(r.Lost))
	server.add(100 * (after - before).Seconds() / time.Since(began).Seconds())
	return nil
}
