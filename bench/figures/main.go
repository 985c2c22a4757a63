// Command figures measures what Muster promises in numbers: start, memory,
// throughput, the time until a consumer's partitions are taken over, what views and
// sessions cost a Go program, and large groups. It uses the program as its users do, through
// processes, pipes and signals; nothing of Muster is linked in.
//
//	main.go        flags, order, output
//	figure.go      what a figure is, and how it is printed
//	process.go     child processes, each bounded in time and ended by its pid
//	daemon.go      a daemon on free ports
//	start.go       start to ready; memory
//	throughput.go  records and bytes by the second
//	views.go       views and sessions, in the probe of package registry
//	takeover.go    from a signal, or a registration, to the last owner key
//	groups.go      large groups, in the probe of package rebalance: leaves, cold starts
//	growth.go      what a change costs etcd, the larger the group
//	assignment.go  who is to own what, in the benchmarks of package rebalance
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

// options are the flags, which explain them.
type options struct {
	binary  string
	only    string
	json    bool
	runs    int
	stops   int
	kills   int
	leaves  int
	colds   int
	changes int
	records int
	rate    int
	idle    time.Duration
	limit   time.Duration
	keep    bool
}

// bench is one run of this program.
type bench struct {
	options
	dir     string // temporary; everything that is written is below
	binary  string
	figures []*figure
	series  []*series
}

// sections in the order in which they run.
var sections = []struct {
	name string
	run  func(*bench, context.Context) error
}{
	{"start", (*bench).measureStart},
	{"memory", (*bench).measureMemory},
	{"throughput", (*bench).measureThroughput},
	{"views", (*bench).measureViews},
	{"takeover", (*bench).measureTakeover},
	{"assignment", (*bench).measureAssignment},
	{"leaves", (*bench).measureLeaves},
	{"cold", (*bench).measureCold},
	{"growth", (*bench).measureGrowth},
}

// The children ask the kernel to be killed when the thread that started them
// ends, so that one must last as long as the program: all are started from here.
func init() { runtime.LockOSThread() }

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "figures:", err)
		os.Exit(1)
	}
}

func parseFlags() (o options, err error) {
	var names []string
	for _, s := range sections {
		names = append(names, s.name)
	}
	flag.StringVar(&o.binary, "binary", "", "measure this `FILE` in place of one built from the repository")
	flag.StringVar(&o.only, "only", "", "`LIST` of sections, comma-separated, out of "+strings.Join(names, ", "))
	flag.BoolVar(&o.json, "json", false, "print JSON in place of a table")
	flag.IntVar(&o.runs, "runs", 5, "runs of each figure of start, memory, throughput and assignment")
	flag.IntVar(&o.stops, "stops", 12, "consumers ended by SIGTERM, with each strategy")
	flag.IntVar(&o.kills, "kills", 6, "consumers ended by SIGKILL, with each strategy, with a daemon that notices and without")
	flag.IntVar(&o.leaves, "leaves", 100, "members that leave a large group, with each strategy")
	flag.IntVar(&o.colds, "colds", 3, "cold starts of a large group, with each strategy")
	flag.IntVar(&o.changes, "changes", 3, "members that leave and join while etcd's requests are counted, in each group")
	flag.IntVar(&o.records, "records", 1_000_000, "records of a throughput run")
	flag.IntVar(&o.rate, "rate", 1000, "records produced in each second of the takeovers, so that there is something to commit; 0 for none")
	flag.DurationVar(&o.idle, "idle", time.Minute, "how long after the start memory is looked at")
	flag.DurationVar(&o.limit, "limit", 40*time.Minute, "give up after this time")
	flag.BoolVar(&o.keep, "keep", false, "keep the temporary directory, with the logs of all processes")
	flag.Parse()
	if flag.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q", flag.Arg(0))
	}
	if min(o.runs, o.stops, o.kills, o.leaves, o.colds, o.changes, o.records) < 1 || o.rate < 0 || o.idle < 0 {
		return o, errors.New("-runs, -stops, -kills, -leaves, -colds, -changes and -records must be at least 1, -rate and -idle at least 0")
	}
	for _, name := range selected(o.only) {
		if !slices.Contains(names, name) {
			return o, fmt.Errorf("-only: no section %q; there are %s", name, strings.Join(names, ", "))
		}
	}
	return o, nil
}

func selected(only string) []string {
	return strings.FieldsFunc(only, func(r rune) bool { return r == ',' || r == ' ' })
}

func run() (err error) {
	o, err := parseFlags()
	if err != nil {
		return err
	}
	if err := needPrograms(); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeoutCause(ctx, o.limit, fmt.Errorf("not done within -limit %s", o.limit))
	defer cancel()
	b := &bench{options: o}
	if b.dir, err = os.MkdirTemp("", "muster-figures-"); err != nil {
		return err
	}
	defer func() {
		if o.keep {
			fmt.Fprintln(os.Stderr, "kept:", b.dir)
			return
		}
		err = errors.Join(err, os.RemoveAll(b.dir))
	}()
	if b.binary, err = b.build(ctx); err != nil {
		return err
	}
	env := describeEnvironment()
	only := selected(o.only)
	var failed []error
	for _, s := range sections {
		if len(only) > 0 && !slices.Contains(only, s.name) {
			continue
		}
		b.progress("%s …", s.name)
		if err := s.run(b, ctx); err != nil {
			// What the others measure, and what this one has, is worth as much.
			failed = append(failed, fmt.Errorf("%s: %w", s.name, err))
			b.progress("%s has failed: %v", s.name, err)
		}
		if ctx.Err() != nil {
			break
		}
	}
	env.LoadAfter = loadAverage()
	print := printTable
	if o.json {
		print = printJSON
	}
	return errors.Join(append(failed, print(os.Stdout, env, b.figures, b.series))...)
}

// needPrograms says at once, and for all of them, what is not installed.
func needPrograms() error {
	var errs []error
	for _, need := range []struct{ program, debian string }{{"kcat", "kcat"}, {"etcdctl", "etcd-client"}} {
		if _, err := exec.LookPath(need.program); err != nil {
			errs = append(errs, fmt.Errorf("%s is not on PATH: install it (on Debian: apt-get install %s)", need.program, need.debian))
		}
	}
	return errors.Join(errs...)
}

// build makes the program as its users get it: without the race detector.
func (b *bench) build(ctx context.Context) (string, error) {
	if b.options.binary != "" {
		return filepath.Abs(b.options.binary)
	}
	root, err := repository()
	if err != nil {
		return "", err
	}
	b.progress("build %s …", root)
	out := filepath.Join(b.dir, "muster")
	cmd := exec.CommandContext(ctx, "go", "build", "-o", out, "./cmd/muster")
	cmd.Dir = root
	if text, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build ./cmd/muster in %s: %w\n%s", root, err, text)
	}
	return out, nil
}

// repository is the directory above this module's.
func repository() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "cmd", "muster")); err == nil {
			return dir, nil
		}
		if filepath.Dir(dir) == dir {
			return "", errors.New("cmd/muster is nowhere above this directory: run it from bench/, or give -binary")
		}
		dir = filepath.Dir(dir)
	}
}

// progress goes to stderr, so that stdout holds nothing but the result.
func (b *bench) progress(format string, args ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", args...)
}
