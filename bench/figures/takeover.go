package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	targetStopped = 0.03 // seconds
	targetJoined  = 0.05
	targetNoticed = 0.2
	// lease is zookeeper.session.timeout.ms by default; etcd notices that one has run
	// out in steps of half a second.
	lease        = 6 * time.Second
	targetKilled = 6.0 + 0.7

	// What the real 0.8.2.2 took for the same: medians on a machine with two cores,
	// brokers and ZooKeeper on it.
	kafkaStopped = 0.044
	kafkaJoined  = 0.11
	kafkaKilled  = 6.1

	takeoverTopic = "orders"

	settleLimit = 30 * time.Second
	// calm is how long nothing may have moved before the next consumer is ended.
	calm = 500 * time.Millisecond
)

// members of the group. In the order of the rule the middle one's partitions go to
// both neighbours and nothing else moves; without the first or the last, two
// partitions move from one survivor to the other, too.
var members = []string{"a", "b", "c"}

// measureTakeover ends one of three consumers again and again, and takes the time
// until the other two hold all partitions, each its share; and has it come back.
func (b *bench) measureTakeover(ctx context.Context) error {
	p, err := freePorts()
	if err != nil {
		return err
	}
	d, err := b.startDaemon(ctx, filepath.Join(b.dir, "takeover"), p)
	if err != nil {
		return err
	}
	defer d.kill()
	if err := d.createTopic(ctx, takeoverTopic, partitions); err != nil {
		return err
	}
	trickle, err := d.startTrickle(ctx)
	if err != nil {
		return err
	}
	defer trickle()
	for _, strategy := range []string{"range", "sticky"} {
		for _, noticed := range []bool{true, false} {
			if err := d.measureGroup(ctx, strategy, noticed); err != nil {
				return fmt.Errorf("%s: %w", strategy, err)
			}
		}
	}
	trickle()
	return d.stop(ctx)
}

// measureGroup does so with one group, which is watched by the daemon, so that it
// notices at once when a consumer has been killed, or is not.
func (d *daemon) measureGroup(ctx context.Context, strategy string, noticed bool) error {
	t := &takeovers{b: d.b, d: d, strategy: strategy, noticed: noticed, group: "takeover-" + strategy, running: map[string]*process{}}
	if !noticed {
		t.group += "-unnoticed"
	}
	d.b.progress("takeover: group %s …", t.group)
	t.owners = newOwners("/consumers/" + t.group + "/")
	w, err := d.b.start(spec{name: "watch", lines: t.owners.line,
		// From the first revision on, so that nothing is missed while it connects.
		args: []string{"etcdctl", "--endpoints", d.etcd, "watch", "--rev", "1", "--prefix", t.owners.prefix}})
	if err != nil {
		return err
	}
	defer w.kill()
	defer t.kill()
	if noticed {
		for i := range d.b.stops {
			if err := t.once(ctx, syscall.SIGTERM, i); err != nil {
				return err
			}
			if err := t.join(ctx, members[i%len(members)]); err != nil {
				return err
			}
		}
	}
	for i := range d.b.kills {
		if err := t.once(ctx, syscall.SIGKILL, i); err != nil {
			return err
		}
	}
	for _, name := range members {
		if c := t.running[name]; c != nil {
			if err := c.stop(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// startTrickle produces a few records all the time.
func (d *daemon) startTrickle(ctx context.Context) (stop func(), err error) {
	if d.b.rate == 0 {
		return func() {}, nil
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	p, err := d.b.start(spec{name: "trickle", args: d.kcat(takeoverTopic), stdin: r})
	if err != nil {
		w.Close()
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	var work sync.WaitGroup
	work.Go(func() {
		defer w.Close()
		writeTrickle(ctx, w, d.b.rate)
	})
	return func() {
		cancel()
		p.kill()
		work.Wait()
	}, nil
}

func writeTrickle(ctx context.Context, w io.Writer, rate int) {
	const every = 20 * time.Millisecond
	tick := time.NewTicker(every)
	defer tick.Stop()
	began, sent := time.Now(), 0
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		var text strings.Builder
		for due := int(time.Since(began).Seconds() * float64(rate)); sent < due; sent++ {
			fmt.Fprintf(&text, "%d%sa record of the trickle, number %d\n", sent, separator, sent)
		}
		if _, err := io.WriteString(w, text.String()); err != nil {
			return // kcat is gone; the takeovers go on without
		}
	}
}

// takeovers is the group under test.
type takeovers struct {
	b        *bench
	d        *daemon
	strategy string
	noticed  bool
	group    string
	owners   *owners
	running  map[string]*process
}

func (t *takeovers) kill() {
	for _, c := range t.running {
		c.kill()
	}
}

// complete starts the consumers that are missing, and waits until the group has
// come to rest.
func (t *takeovers) complete(ctx context.Context) error {
	for _, name := range members {
		if t.running[name] == nil {
			if err := t.start(name); err != nil {
				return err
			}
		}
	}
	return t.settle(ctx, members)
}

func (t *takeovers) start(name string) error {
	s := spec{name: "consumer-" + name, args: t.d.client("consume", "--group", t.group, "--topic", takeoverTopic, "--strategy", t.strategy,
		"--set", "consumer.id="+name, "--set", fmt.Sprintf("zookeeper.session.timeout.ms=%d", lease.Milliseconds()), "--log-level", "debug")}
	if !t.noticed {
		// With a socket of its own, at which nobody listens, it asks at no other.
		s.env = []string{"MUSTER_LOCAL_SOCKET=" + filepath.Join(t.b.dir, "nobody.sock")}
	}
	c, err := t.b.start(s)
	if err != nil {
		return err
	}
	t.running[name] = c
	return nil
}

// join starts a consumer that is missing and takes the time.
func (t *takeovers) join(ctx context.Context, name string) error {
	if err := sleep(ctx, calm); err != nil {
		return err
	}
	t.owners.begin(name)
	if err := t.start(name); err != nil {
		return err
	}
	if err := t.settle(ctx, members); err != nil {
		return err
	}
	m := t.owners.moments()
	if m.registered.IsZero() {
		return fmt.Errorf("the watch has not shown the registration of %s", name)
	}
	figure := func(name string) *figure { return t.b.figure("takeover", t.strategy+", join: "+name, "s") }
	figure("from its registration until all is shared").target(targetJoined).kafka(kafkaJoined).addTime(m.lastPut.Sub(m.registered))
	figure("… first partition owned anew").addTime(m.firstPut.Sub(m.registered))
	figure("from the start of the process until all is shared").addTime(m.lastPut.Sub(t.running[name].started))
	return nil
}

func (t *takeovers) settle(ctx context.Context, names []string) error {
	err := until(ctx, 5*time.Millisecond, settleLimit, "share the partitions among "+strings.Join(names, ", "), func() (bool, error) {
		for _, name := range names {
			if err := t.running[name].alive(); err != nil {
				return false, err
			}
		}
		return t.owners.shared(names), nil
	})
	if err != nil {
		return fmt.Errorf("%w; owners: %s", err, t.owners)
	}
	return nil
}

// once ends one consumer.
func (t *takeovers) once(ctx context.Context, how syscall.Signal, run int) error {
	if err := t.complete(ctx); err != nil {
		return err
	}
	// A lease is renewed every third of its time. The runs are spread over that, so
	// that what is left of the lease at the kill is neither always long nor short.
	spread := lease / 3 * time.Duration(run) / time.Duration(t.b.kills)
	if how == syscall.SIGTERM || t.noticed {
		spread = 0
	}
	if err := sleep(ctx, calm+spread); err != nil {
		return err
	}
	victim := members[run%len(members)]
	rest := slices.DeleteFunc(slices.Clone(members), func(name string) bool { return name == victim })
	c := t.running[victim]
	delete(t.running, victim)
	defer c.kill()
	t.owners.begin(victim)
	at := time.Now()
	if err := c.signal(how); err != nil {
		return err
	}
	if err := t.settle(ctx, rest); err != nil {
		return err
	}
	t.report(how, at)
	if how == syscall.SIGTERM {
		if err := c.wait(ctx, stopLimit); err != nil {
			return err
		}
		t.figure(how, "consumer has exited").addTime(time.Since(at)) // at most: it may have while we looked elsewhere
	}
	return nil
}

func (t *takeovers) figure(how syscall.Signal, name string) *figure {
	end := "SIGTERM"
	switch {
	case how == syscall.SIGKILL && t.noticed:
		end = "kill -9 on a daemon's host"
	case how == syscall.SIGKILL:
		end = "kill -9, no daemon near"
	}
	return t.b.figure("takeover", t.strategy+", "+end+": "+name, "s")
}

// report enters the whole and its parts, all counted from the signal.
func (t *takeovers) report(how syscall.Signal, at time.Time) {
	m := t.owners.moments()
	target, kafka := targetStopped, kafkaStopped
	if how == syscall.SIGKILL {
		target, kafka = targetKilled, kafkaKilled
		if t.noticed {
			target = targetNoticed
		}
	}
	t.figure(how, "all partitions owned again").target(target).kafka(kafka).addTime(m.lastPut.Sub(at))
	if how == syscall.SIGKILL && !t.noticed {
		t.figure(how, "lease").addTime(lease)
	}
	t.figure(how, "… its last owner key deleted").addTime(m.lastDelete.Sub(at))
	t.figure(how, "… its registration deleted").addTime(m.unregistered.Sub(at))
	t.figure(how, "… first partition owned anew").addTime(m.firstPut.Sub(at))
}

// owners is what the registry says about the group, as the watch reports it. An
// event counts from when its last line arrives.
type owners struct {
	prefix string // of the group's keys

	mu    sync.Mutex
	lines []string // of the event that is being read
	held  map[string]string
	seen  moments
	whose string // the consumer that is being ended, or started
}

// moments since begin.
type moments struct {
	lastDelete   time.Time // of an owner key of the one that is being ended
	unregistered time.Time
	registered   time.Time
	firstPut     time.Time // of any owner key
	lastPut      time.Time
}

func newOwners(prefix string) *owners { return &owners{prefix: prefix, held: map[string]string{}} }

// line takes the watch's output: three lines for each event, with an empty value
// for a deletion.
func (o *owners) line(text string, at time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.lines = append(o.lines, text); len(o.lines) < 3 {
		return
	}
	kind, key, value := o.lines[0], strings.TrimPrefix(o.lines[1], o.prefix), o.lines[2]
	o.lines = o.lines[:0]
	switch {
	case kind == "DELETE" && key == "ids/"+o.whose:
		o.seen.unregistered = at
	case key == "ids/"+o.whose:
		o.seen.registered = at
	case !strings.HasPrefix(key, "owners/"):
	case kind == "DELETE":
		if consumerOf(o.held[key]) == o.whose {
			o.seen.lastDelete = at
		}
		delete(o.held, key)
	default:
		o.held[key] = value
		if o.seen.firstPut.IsZero() {
			o.seen.firstPut = at
		}
		o.seen.lastPut = at
	}
}

// consumerOf strips the number of the thread.
func consumerOf(thread string) string {
	if i := strings.LastIndexByte(thread, '-'); i >= 0 {
		return thread[:i]
	}
	return thread
}

func (o *owners) begin(whose string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.whose, o.seen = whose, moments{}
}

func (o *owners) moments() moments {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.seen
}

// shared tells whether every partition is owned, by just these consumers, and by
// each as many as by the others.
func (o *owners) shared(names []string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	count := map[string]int{}
	for _, thread := range o.held {
		count[consumerOf(thread)]++
	}
	for _, name := range names {
		if count[name] != partitions/len(names) {
			return false
		}
	}
	return len(count) == len(names)
}

func (o *owners) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	var list []string
	for key, thread := range o.held {
		list = append(list, strings.TrimPrefix(key, "owners/")+"="+thread)
	}
	slices.Sort(list)
	return strings.Join(list, " ")
}
