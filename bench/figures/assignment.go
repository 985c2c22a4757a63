package main

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

// assignments are the benchmarks of package rebalance that promise something: 100,000
// partitions of one topic among 10,000 members, in any order.
var assignments = []struct {
	benchmark, name string
	target          float64 // ms; 0 is none
}{
	{"BenchmarkAssign/range/large", "range", 10},
	{"BenchmarkAssign/range-numeric/large", "range-numeric", 10},
	{"BenchmarkAssign/roundrobin/large", "roundrobin", 0},
	{"BenchmarkAssign/sticky/large", "sticky, all new", 25},
	{"BenchmarkStickyChange/leave/large", "sticky, one leaves", 10},
	{"BenchmarkStickyChange/join/large", "sticky, one joins", 10},
	{"BenchmarkOf/large", "… the share of one member", 0},
	{"BenchmarkAssign/range/topics", "range, 10,000 topics, 100 members", 0},
	{"BenchmarkAssign/sticky/topics", "sticky, 10,000 topics, 100 members, all new", 0},
	{"BenchmarkTargetRecord/encode", "target record written, 1,000 members", 0},
	{"BenchmarkTargetRecord/read", "target record read, 1,000 members", 0},
}

// measureAssignment runs the benchmarks of package rebalance: these are functions
// that no process offers by itself.
func (b *bench) measureAssignment(ctx context.Context) error {
	root, err := repository()
	if err != nil {
		return err
	}
	binary := filepath.Join(b.dir, "rebalance.test")
	build := exec.CommandContext(ctx, "go", "test", "-c", "-o", binary, "./rebalance")
	build.Dir = root
	if text, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("go test -c ./rebalance in %s: %w\n%s", root, err, text)
	}
	for _, a := range assignments {
		f := b.figure("assignment", a.name, "ms")
		if a.target > 0 {
			f.target(a.target)
		}
		times, err := b.runBenchmark(ctx, binary, a.benchmark)
		if err != nil {
			return err
		}
		for _, ns := range times {
			f.add(ns / 1e6)
		}
	}
	return nil
}

// runBenchmark returns the ns/op of each run.
func (b *bench) runBenchmark(ctx context.Context, binary, name string) (times []float64, err error) {
	pattern := "^" + strings.ReplaceAll(name, "/", "$/^") + "$"
	cmd := exec.CommandContext(ctx, binary, "-test.run", "^$", "-test.bench", pattern, "-test.count", strconv.Itoa(b.runs))
	cmd.Dir = b.dir
	text, err := cmd.CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", name, err, text)
	}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) < 4 || !strings.HasPrefix(fields[0], name) || fields[3] != "ns/op" {
			continue
		}
		ns, err := strconv.ParseFloat(fields[2], 64)
		if err != nil {
			return nil, fmt.Errorf("%s: %q: %w", name, line, err)
		}
		times = append(times, ns)
	}
	if len(times) != b.runs {
		return nil, fmt.Errorf("%s ran %d times in place of %d:\n%s", name, len(times), b.runs, text)
	}
	return times, nil
}
