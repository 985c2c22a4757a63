// Command probe measures a large group: members that do nothing with their
// partitions, in a few processes, and an observer with a connection of its own that
// takes the time by what etcd tells it. It prints JSON; the benchmarks of the
// repository run it.
//
//	main.go      flags and output
//	host.go      members in a process of their own, which is this program again
//	group.go     the hosts of a group, and what they are told
//	observer.go  owner keys, and whether they are what the strategy says
//	measure.go   leaves, cold starts, requests
//	etcd.go      what etcd has counted
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"github.com/muster-io/muster/registry"
)

// options are the flags, which explain them.
type options struct {
	etcd     string
	do       string
	group    string
	topic    string
	strategy string
	members  int
	hosts    int
	own      bool
	ttl      time.Duration
	runs     int
	limit    time.Duration
	idle     time.Duration
	profile  string
}

// result is what is printed; what was not measured is left out.
type result struct {
	Leave  []float64 `json:"leave_seconds,omitempty"` // from the word to the member until all is owned
	Join   []float64 `json:"join_seconds,omitempty"`  // from its registration
	Cold   []float64 `json:"cold_seconds,omitempty"`  // from the first registration
	Spread []float64 `json:"cold_registrations_seconds,omitempty"`
	CPU    []float64 `json:"cold_cpu_seconds,omitempty"` // of all hosts
	Costs  []cost    `json:"costs,omitempty"`
}

// cost is what etcd counted in one change.
type cost struct {
	Change  string             `json:"change"` // join, leave or cold
	Seconds float64            `json:"seconds"`
	Counted counters           `json:"counted"`
	Methods map[string]float64 `json:"methods"` // requests by method
}

// The hosts ask the kernel to be killed when the thread that started them ends.
func init() { runtime.LockOSThread() }

func main() {
	var o options
	flag.StringVar(&o.etcd, "etcd", "http://127.0.0.1:2379", "`URL` of etcd")
	flag.StringVar(&o.do, "do", "", "leave, cold, or costs; host is what this program starts by itself")
	flag.StringVar(&o.group, "group", "probe", "group; for cold the first of several names")
	flag.StringVar(&o.topic, "topic", "probe", "topic, which must be there")
	flag.StringVar(&o.strategy, "strategy", "range", "how partitions are shared")
	flag.IntVar(&o.members, "members", 100, "how many members the group has")
	flag.IntVar(&o.hosts, "hosts", 4, "how many processes they are in")
	flag.BoolVar(&o.own, "own", false, "give each member a connection and a view of its own, as if it were a process")
	flag.DurationVar(&o.ttl, "ttl", registry.DefaultTTL, "of the sessions")
	flag.IntVar(&o.runs, "runs", 1, "how many leaves, each followed by a join, or cold starts")
	flag.DurationVar(&o.limit, "limit", time.Minute, "give up when the group takes longer than this to settle")
	flag.DurationVar(&o.idle, "idle", 3*time.Second, "how long the group is left alone, to know what it costs when nothing happens")
	flag.StringVar(&o.profile, "profile", "", "write a CPU profile of the first host to `FILE`")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	if o.members < 1 || o.hosts < 1 || o.runs < 1 {
		return fmt.Errorf("-members %d -hosts %d -runs %d: want at least 1 of each", o.members, o.hosts, o.runs)
	}
	var r result
	var err error
	switch o.do {
	case "host":
		return runHost(ctx, o)
	case "leave":
		r, err = measureLeaves(ctx, o)
	case "cold":
		r, err = measureCold(ctx, o)
	case "costs":
		r, err = measureCosts(ctx, o)
	default:
		err = fmt.Errorf("-do %q: want leave, cold or costs", o.do)
	}
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(r)
}
