package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

const (
	targetReady  = 1.0  // seconds
	targetMemory = 48.0 // MiB

	// partitions of every topic here; three consumers share them evenly.
	partitions = 12
	// An existing data directory holds a topic with this many records.
	existingRecords = 100_000
)

// measureStart takes the time from the start of the process to its ready line.
func (b *bench) measureStart(ctx context.Context) error {
	empty := b.figure("start", "to ready, empty data directory", "s").target(targetReady)
	for i := range b.runs {
		p, err := freePorts()
		if err != nil {
			return err
		}
		d, err := b.startDaemon(ctx, filepath.Join(b.dir, fmt.Sprintf("empty-%d", i)), p)
		if err != nil {
			return err
		}
		empty.addTime(d.toward)
		if err := d.addSteps("… empty data directory: "); err != nil {
			return err
		}
		if err := d.stop(ctx); err != nil {
			return err
		}
	}
	return b.measureRestart(ctx)
}

// measureRestart does the same on one data directory with records in it.
func (b *bench) measureRestart(ctx context.Context) error {
	clean := b.figure("start", "to ready, existing, after a clean stop", "s").target(targetReady)
	stop := b.figure("start", "clean stop: SIGTERM to exit", "s")
	crash := b.figure("start", "to ready, existing, after kill -9", "s").target(targetReady)
	parts := map[*figure]string{clean: "… after a clean stop: ", crash: "… after kill -9: "}
	dir := filepath.Join(b.dir, "existing")
	p, err := freePorts()
	if err != nil {
		return err
	}
	d, err := b.startDaemon(ctx, dir, p)
	if err != nil {
		return err
	}
	defer func() { d.kill() }()
	if err := d.fill(ctx, "orders", existingRecords); err != nil {
		return err
	}
	for i := range 2 * b.runs {
		into := clean
		if i%2 == 0 {
			asked := time.Now()
			if err := d.stop(ctx); err != nil {
				return err
			}
			stop.addTime(time.Since(asked))
		} else {
			into = crash
			if err := d.signal(syscall.SIGKILL); err != nil {
				return err
			}
			<-d.exited
		}
		next, err := b.startDaemon(ctx, dir, p)
		if err != nil {
			return err
		}
		d = next
		into.addTime(d.toward)
		if err := d.addSteps(parts[into]); err != nil {
			return err
		}
		// After a crash the log is scanned; the records written now are what is found.
		if err := d.produce(ctx, "orders", existingRecords/10); err != nil {
			return err
		}
	}
	return d.stop(ctx)
}

// addSteps adds where the time to ready went, as the daemon itself logs it, step by
// step, and what is left: the start of the process, and the way of its ready line.
func (d *daemon) addSteps(name string) error {
	var line string
	for text := range strings.Lines(readText(d.log)) {
		if strings.Contains(text, " msg=ready ") {
			line = text
		}
	}
	rest := d.toward
	steps := 0
	for _, field := range strings.Fields(line) {
		step, value, _ := strings.Cut(field, "=")
		took, err := time.ParseDuration(value)
		if err != nil || step == "took" {
			continue // not a step
		}
		d.b.figure("start", name+step, "s").addTime(took)
		rest -= took
		steps++
	}
	if steps == 0 {
		return d.explain(errors.New("it does not log the steps of its start"))
	}
	d.b.figure("start", name+"the process itself", "s").addTime(rest)
	return nil
}

// measureMemory looks at daemons that have done nothing since they started. They
// run side by side, so that the wait is there only once.
func (b *bench) measureMemory(ctx context.Context) error {
	name := fmt.Sprintf("daemon, idle for %s, ", b.idle)
	fields := []struct {
		status string
		into   *figure
	}{
		{"VmRSS", b.figure("memory", name+"VmRSS", "MiB").target(targetMemory)},
		{"RssAnon", b.figure("memory", name+"RssAnon", "MiB")},
	}
	var list []*daemon
	defer func() {
		for _, d := range list {
			d.kill()
		}
	}()
	for i := range b.runs {
		p, err := freePorts()
		if err != nil {
			return err
		}
		d, err := b.startDaemon(ctx, filepath.Join(b.dir, fmt.Sprintf("memory-%d", i)), p)
		if err != nil {
			return err
		}
		list = append(list, d)
	}
	for _, d := range list {
		if err := sleep(ctx, time.Until(d.started.Add(b.idle))); err != nil {
			return err
		}
		for _, f := range fields {
			mib, err := d.memory(f.status)
			if err != nil {
				return err
			}
			f.into.add(mib)
		}
	}
	for _, d := range list {
		if err := d.stop(ctx); err != nil {
			return err
		}
	}
	return nil
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
