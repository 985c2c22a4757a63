// Command probe uses a registry as a Go program does that imports package registry,
// against an etcd in another process, and prints what that took as JSON. The
// benchmarks of the repository run it.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"runtime/pprof"
	"strings"
	"syscall"
	"time"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/etcd"
)

// options are the flags, which explain them.
type options struct {
	etcd     string
	do       string
	prefix   string
	keys     int
	runs     int
	sessions int
	ttl      time.Duration
	lasts    time.Duration
	profile  string
}

// result is what is printed; what was not measured is left out.
type result struct {
	Load   []float64 `json:"load_seconds,omitempty"`
	CPU    []float64 `json:"load_cpu_seconds,omitempty"` // of this process, in the same time
	Events []float64 `json:"event_seconds,omitempty"`    // from the call of a put to its event
	Puts   []float64 `json:"put_seconds,omitempty"`      // to the return of the same puts
	Cores  []float64 `json:"cores,omitempty"`            // CPU time by time
	Lost   int       `json:"sessions_lost,omitempty"`
}

func main() {
	var o options
	flag.StringVar(&o.etcd, "etcd", "http://127.0.0.1:2379", "`URL` of etcd")
	flag.StringVar(&o.do, "do", "", "fill, load, events or sessions")
	flag.StringVar(&o.prefix, "prefix", "/probe/", "where the keys stand")
	flag.IntVar(&o.keys, "keys", 100_000, "how many keys to fill in, or to expect")
	flag.IntVar(&o.runs, "runs", 5, "how often to load; how many events")
	flag.IntVar(&o.sessions, "sessions", 1000, "how many sessions to keep alive")
	flag.DurationVar(&o.ttl, "ttl", registry.DefaultTTL, "of each session")
	flag.DurationVar(&o.lasts, "for", 30*time.Second, "how long CPU time is taken")
	flag.StringVar(&o.profile, "profile", "", "write a CPU profile of that time to `FILE`")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	r, err := run(ctx, o)
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(r)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) (result, error) {
	st, err := etcd.Open(ctx, etcd.Options{Endpoints: strings.Split(o.etcd, ",")})
	if err != nil {
		return result{}, err
	}
	defer st.Close()
	switch o.do {
	case "fill":
		return result{}, fill(ctx, st, o)
	case "load":
		return load(ctx, st, o)
	case "events":
		return events(ctx, st, o)
	case "sessions":
		return sessions(ctx, st, o)
	}
	return result{}, fmt.Errorf("-do %q: want fill, load, events or sessions", o.do)
}

func (o options) key(i int) string { return fmt.Sprintf("%s%06d", o.prefix, i) }

// value is a registration of a usual size.
func value(i int) []byte {
	return fmt.Appendf(nil, `{"version":1,"host":"node-%d.example.com","port":9092,"jmx_port":-1,"timestamp":"1417342600000"}`, i)
}

func fill(ctx context.Context, st registry.Store, o options) error {
	for from := 0; from < o.keys; from += registry.MaxTxnOps {
		var ops []registry.Op
		for i := from; i < min(o.keys, from+registry.MaxTxnOps); i++ {
			ops = append(ops, registry.Put(o.key(i), value(i), 0))
		}
		if _, err := st.Txn(ctx, registry.Txn{Then: ops}); err != nil {
			return fmt.Errorf("fill %s: %w", o.prefix, err)
		}
	}
	return nil
}

func (o options) open(ctx context.Context, st registry.Store, f func(registry.Snapshot, []registry.Event)) (*registry.View, error) {
	v, err := registry.OpenView(ctx, st, []string{o.prefix}, registry.ViewOptions{}, f)
	if err != nil {
		return nil, err
	}
	if n := v.Snapshot().Len(0); n != o.keys {
		v.Close()
		return nil, fmt.Errorf("view of %s has %d keys, want %d", o.prefix, n, o.keys)
	}
	return v, nil
}

// load opens a view again and again.
func load(ctx context.Context, st registry.Store, o options) (result, error) {
	var r result
	for range o.runs {
		began, used := time.Now(), cpu()
		v, err := o.open(ctx, st, nil)
		if err != nil {
			return r, err
		}
		r.Load, r.CPU = append(r.Load, time.Since(began).Seconds()), append(r.CPU, (cpu()-used).Seconds())
		v.Close()
	}
	return r, nil
}

// events puts one key after the other, over a connection of its own, and waits for
// the view to show each.
func events(ctx context.Context, st registry.Store, o options) (result, error) {
	writer, err := etcd.Open(ctx, etcd.Options{Endpoints: strings.Split(o.etcd, ",")})
	if err != nil {
		return result{}, err
	}
	defer writer.Close()
	type sight struct {
		revision int64
		at       time.Time
	}
	seen := make(chan sight, 16)
	v, err := o.open(ctx, st, func(s registry.Snapshot, list []registry.Event) {
		if len(list) == 1 {
			seen <- sight{s.Revision, time.Now()}
		}
	})
	if err != nil {
		return result{}, err
	}
	defer v.Close()
	var r result
	for i := range o.runs {
		// Not in step with anything that ticks.
		time.Sleep(rand.N(4 * time.Millisecond))
		began := time.Now()
		res, err := writer.Txn(ctx, registry.Txn{Then: []registry.Op{registry.Put(o.key(i%o.keys), value(i), 0)}})
		if err != nil {
			return r, err
		}
		r.Puts = append(r.Puts, time.Since(began).Seconds())
		for got := (sight{}); got.revision < res.Revision; {
			select {
			case got = <-seen:
				if got.revision >= res.Revision {
					r.Events = append(r.Events, got.at.Sub(began).Seconds())
				}
			case <-time.After(10 * time.Second):
				return r, errors.New("a put was never seen")
			case <-ctx.Done():
				return r, ctx.Err()
			}
		}
	}
	return r, nil
}

// sessions keeps many alive and takes the CPU time of this process.
func sessions(ctx context.Context, st registry.Store, o options) (r result, err error) {
	var list []*registry.Session
	defer func() {
		for _, s := range list {
			if s.Err() != nil {
				r.Lost++
			}
			err = errors.Join(err, s.Close(context.WithoutCancel(ctx)))
		}
	}()
	for range o.sessions {
		s, err := registry.OpenSession(ctx, st, registry.SessionOptions{TTL: o.ttl})
		if err != nil {
			return r, err
		}
		list = append(list, s)
	}
	if err := sleep(ctx, o.ttl); err != nil { // until their first renewals are past
		return r, err
	}
	if o.profile != "" {
		f, err := os.Create(o.profile)
		if err != nil {
			return r, err
		}
		defer f.Close()
		if err := pprof.StartCPUProfile(f); err != nil {
			return r, err
		}
		defer pprof.StopCPUProfile()
	}
	for range o.runs {
		began, used := time.Now(), cpu()
		if err := sleep(ctx, o.lasts); err != nil {
			return r, err
		}
		r.Cores = append(r.Cores, (cpu()-used).Seconds()/time.Since(began).Seconds())
	}
	return r, nil
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// cpu is the time that this process has used, of user and system.
func cpu() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err) // it cannot fail with these arguments
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
