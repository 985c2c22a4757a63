// Command scriptmember is what package conformance runs beside muster itself: members
// of a group that stand on the library, a producer, and the child of muster run. It
// says what happens in lines on stdout, one write a line; times are in nanoseconds
// since 1970, and taken before it is seen that the partition is owned.
//
//	scriptmember consume …   delivered TOPIC PARTITION TOKEN TIME OFFSET VALUE
//	scriptmember own …       working TOPIC PARTITION TOKEN TIME, again and again while a partition is owned
//	scriptmember child       the same of the partition that MUSTER_PARTITION names, until SIGTERM
//	scriptmember produce …   acknowledged TOPIC PARTITION OFFSET VALUE
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/rebalance/consumer"
	"github.com/muster-io/muster/rebalance/membership"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/etcd"
)

// pace is how often one that only owns says that it works.
const pace = 10 * time.Millisecond

type options struct {
	etcd, brokers, group, id, topics, strategies, name string
	streams                                            int
	session                                            time.Duration
	rate                                               int
}

func main() {
	var o options
	flags := flag.NewFlagSet("scriptmember", flag.ExitOnError)
	flags.StringVar(&o.etcd, "etcd", "", "endpoints")
	flags.StringVar(&o.brokers, "brokers", "", "host:port,…")
	flags.StringVar(&o.group, "group", "", "")
	flags.StringVar(&o.id, "id", "", "")
	flags.StringVar(&o.topics, "topics", "", "with commas")
	flags.StringVar(&o.strategies, "strategies", "", "with commas; - registers without the field, as 0.8.2 did")
	flags.IntVar(&o.streams, "streams", 1, "")
	flags.DurationVar(&o.session, "session", 6*time.Second, "")
	flags.IntVar(&o.rate, "rate", 50, "records a second, of all topics together")
	flags.StringVar(&o.name, "name", "", "what the values of a producer begin with")
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "want a command")
		os.Exit(2)
	}
	_ = flags.Parse(os.Args[2:]) // it exits
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	run := map[string]func(context.Context, options) error{"consume": consume, "own": own, "child": child, "produce": produce}[os.Args[1]]
	if run == nil {
		fmt.Fprintln(os.Stderr, "unknown command", os.Args[1])
		os.Exit(2)
	}
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "scriptmember:", err)
		os.Exit(1)
	}
}

// say writes one line with one write, so that none is half there after a kill.
func say(format string, args ...any) {
	if _, err := os.Stdout.WriteString(fmt.Sprintf(format, args...) + "\n"); err != nil {
		panic(err)
	}
}

func (o options) open(ctx context.Context) (registry.Store, func(), *slog.Logger, error) {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	st, err := etcd.Open(ctx, etcd.Options{Endpoints: strings.Split(o.etcd, ","), Logger: log})
	if err != nil {
		return nil, nil, nil, err
	}
	var store registry.Store = st
	if o.strategies == "-" {
		store = silent{st, registry.Root("").Group(o.group).ID(o.id)}
	}
	return store, func() { _ = st.Close() }, log, nil
}

func (o options) subscription() map[string]int32 {
	topics := map[string]int32{}
	for _, t := range strings.Split(o.topics, ",") {
		topics[t] = int32(o.streams)
	}
	return topics
}

// list is what the member is told to state. One whose field is cut away divides as
// all do then.
func (o options) list() []string {
	if o.strategies == "-" {
		return []string{"range-numeric"}
	}
	return strings.Split(o.strategies, ",")
}

// silent is a registry to which a member registers without its strategies.
type silent struct {
	registry.Store
	key string
}

func (s silent) Txn(ctx context.Context, t registry.Txn) (registry.TxnResult, error) {
	t.Then = append([]registry.Op(nil), t.Then...)
	for i, op := range t.Then {
		if op.Kind != registry.OpPut || op.Key != s.key {
			continue
		}
		var rec map[string]any
		if err := json.Unmarshal(op.Value, &rec); err != nil {
			return registry.TxnResult{}, fmt.Errorf("own registration: %w", err)
		}
		delete(rec, "strategy")
		value, err := json.Marshal(rec)
		if err != nil {
			return registry.TxnResult{}, fmt.Errorf("own registration: %w", err)
		}
		t.Then[i].Value = value
	}
	return s.Store.Txn(ctx, t)
}

func consume(ctx context.Context, o options) error {
	st, done, log, err := o.open(ctx)
	if err != nil {
		return err
	}
	defer done()
	c, err := consumer.New(consumer.Config{Store: st, Group: o.group, ID: o.id, Topics: o.subscription(), Strategies: o.list(),
		SessionTimeout: o.session, CommitInterval: 200 * time.Millisecond, Reset: consumer.Smallest, Logger: log},
		func(_ context.Context, r *consumer.Record) error {
			at := time.Now().UnixNano()
			if !r.Owned() {
				return consumer.ErrNotOwned
			}
			say("delivered %s %d %d %d %d %s", r.Partition.Topic, r.Partition.Number, r.Token(), at, r.Offset, r.Value)
			return nil
		})
	if err != nil {
		return err
	}
	return c.Run(ctx)
}

func own(ctx context.Context, o options) error {
	st, done, log, err := o.open(ctx)
	if err != nil {
		return err
	}
	defer done()
	m, err := membership.New(membership.Config{Store: st, Group: o.group, ID: o.id, Subscription: membership.Subscription{Topics: o.subscription()},
		Strategies: o.list(), SessionTimeout: o.session, Logger: log})
	if err != nil {
		return err
	}
	w := &owner{work: map[*membership.Ownership]chan struct{}{}}
	err = m.Run(ctx, w)
	w.all.Wait()
	return err
}

// owner works on each partition in a goroutine.
type owner struct {
	mu   sync.Mutex
	work map[*membership.Ownership]chan struct{} // closed when the work has ended
	all  sync.WaitGroup
}

func (w *owner) Snapshot(rebalance.Snapshot, registry.Snapshot) {}

func (w *owner) Begin(list []*membership.Ownership) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, o := range list {
		ended := make(chan struct{})
		w.work[o] = ended
		w.all.Go(func() {
			defer close(ended)
			tick := time.NewTicker(pace)
			defer tick.Stop()
			for {
				at := time.Now().UnixNano()
				if !o.Alive() {
					return
				}
				say("working %s %d %d %d", o.Partition.Topic, o.Partition.Number, o.Token, at)
				select {
				case <-tick.C:
				case <-o.Revoked():
					return
				case <-o.Context().Done():
					return
				}
			}
		})
	}
}

// Drain takes its time, so that others wait.
func (w *owner) Drain(o *membership.Ownership) bool {
	w.mu.Lock()
	ended := w.work[o]
	w.mu.Unlock()
	<-ended
	time.Sleep(4 * pace)
	return o.Alive()
}

func (w *owner) Revoked(o *membership.Ownership)        { w.forget(o) }
func (w *owner) Lost(o *membership.Ownership, _ string) { w.forget(o) }

func (w *owner) forget(o *membership.Ownership) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.work, o)
}

// child is killed as soon as its partition may be another's, so that it need not ask.
func child(ctx context.Context, _ options) error {
	tick := time.NewTicker(pace)
	defer tick.Stop()
	beat := func() {
		at := time.Now().UnixNano()
		say("working %s %s %s %d", os.Getenv("MUSTER_TOPIC"), os.Getenv("MUSTER_PARTITION"), os.Getenv("MUSTER_FENCE"), at)
	}
	for {
		beat()
		select {
		case <-tick.C:
		case <-ctx.Done():
			// Told to stop, it has something to finish.
			for range 4 {
				<-tick.C
				beat()
			}
			return nil
		}
	}
}

func produce(ctx context.Context, o options) error {
	topics := strings.Split(o.topics, ",")
	k, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(o.brokers, ",")...), kgo.ProducerLinger(0), kgo.MetadataMinAge(100*time.Millisecond),
		kgo.MetadataMaxAge(time.Second), kgo.RecordPartitioner(kgo.RoundRobinPartitioner()))
	if err != nil {
		return err
	}
	defer k.Close()
	tick := time.NewTicker(time.Second / time.Duration(o.rate))
	defer tick.Stop()
	for n := 0; ; n++ {
		r := &kgo.Record{Topic: topics[n%len(topics)], Value: fmt.Appendf(nil, "%s-%d", o.name, n)}
		k.Produce(context.Background(), r, func(r *kgo.Record, err error) {
			if err != nil {
				fmt.Fprintln(os.Stderr, "not stored:", string(r.Value), err)
				return
			}
			say("acknowledged %s %d %d %s", r.Topic, r.Partition, r.Offset, r.Value)
		})
		select {
		case <-tick.C:
		case <-ctx.Done():
			limit, cancel := context.WithTimeout(context.Background(), 30*time.Second)
			defer cancel()
			if err := k.Flush(limit); err != nil && !errors.Is(err, context.DeadlineExceeded) {
				return err
			}
			return nil
		}
	}
}
