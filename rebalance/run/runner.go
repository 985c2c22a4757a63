package run

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/rebalance/membership"
	"github.com/muster-io/muster/registry"
)

// Config describes a run.
type Config struct {
	// Membership is the group to be a member of. The run sets its LeaveTimeout and
	// Watched.
	Membership membership.Config
	// Command is the program and its arguments. {partition}, {topic}, {group} and
	// {fence} in them are replaced.
	Command []string
	// Grace is how long a child has to stop after SIGTERM. Zero is no time at all.
	Grace  time.Duration
	OnExit Policy // empty means Restart
	// Prefix has each line that a child prints begin with "<topic> <home>-<partition> ".
	Prefix bool
	// Watchdog is the command line of a process that calls Watchdog and nothing else.
	Watchdog []string
	// Stdout and Stderr are the children's.
	Stdout, Stderr io.Writer

	limits limits // for tests; none means usualLimits
}

// limits are how long a watchdog is waited for.
type limits struct {
	missed  int           // feeds in a row without an answer: it is taken for one that is stopped
	start   int           // likewise, before it tells anything at all
	urgent  time.Duration // until it has killed a child whose partition is lost
	closing time.Duration // until it has ended by itself
}

// usualLimits let a watchdog be replaced while the children's leases last. Until it tells
// anything it has no children, and there is no hurry: on a slow machine the program takes
// seconds to start.
func usualLimits() limits {
	return limits{missed: 5, start: 50, urgent: 200 * time.Millisecond, closing: 2 * time.Second}
}

// Runner runs a child for each partition that it owns. Use New, then Run once.
type Runner struct {
	cfg    Config
	path   string // of the program; empty where it depends on the partition
	member *membership.Membership
	log    *slog.Logger
	posts  chan func()
	ended  chan struct{} // when Run takes no more posts

	// Of Run's goroutine:
	keeper   *keeper // nil between two of them
	units    map[*unit]struct{}
	byID     map[uint64]*unit // by the process that it has at present
	turns    map[registry.Partition][]*unit
	lease    registry.LeaseID // 0 or below for none
	lastID   uint64
	queue    []*unit         // to be started
	starting map[uint64]bool // started, and not answered
	timer    *time.Timer
	sent     uint64 // number of the last command that is to be answered
	missed   int    // feeds in a row without an answer
	answered bool   // the present watchdog has told anything
	urgent   urgency
	sweeping bool
	hurried  bool
	stop     context.CancelFunc
	err      error
}

// unit is one ownership and its child.
type unit struct {
	o       *membership.Ownership
	child   *child
	id      uint64        // of its process; 0 if it has none
	drained chan struct{} // to be closed when nothing of it runs, and nothing will; nil if nobody waits
}

// urgency is an answer that must be there soon; none if its number is 0.
type urgency struct {
	number uint64
	until  time.Duration
}

const (
	// maxStarting is how many children are started at a time, so that the watchdog is
	// always soon done with what it was told.
	maxStarting = 8
	// feedPause is how often the watchdog is told how long the children may live.
	feedPause = 200 * time.Millisecond
	// killMargin is how long before the session's own deadline, which is itself before
	// the lease's end, a child is killed: so that it is dead by then.
	killMargin = 100 * time.Millisecond
	// leaveMargin is beyond the grace for what was killed to be gone, until the
	// partitions are given up as lost.
	leaveMargin = 20 * time.Second
)

// New checks the configuration.
func New(cfg Config) (*Runner, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	r := &Runner{posts: make(chan func()), ended: make(chan struct{}), starting: map[uint64]bool{}, units: map[*unit]struct{}{},
		byID: map[uint64]*unit{}, turns: map[registry.Partition][]*unit{}, timer: time.NewTimer(time.Hour)}
	registered := cfg.Membership.Listener.Registered
	cfg.Membership.Listener.Registered = func(id string, lease registry.LeaseID) {
		r.post(func() { r.holds(lease) })
		if registered != nil {
			registered(id, lease)
		}
	}
	m, err := membership.New(cfg.Membership)
	if err != nil {
		return nil, err
	}
	r.cfg, r.member, r.log = cfg, m, m.Logger()
	return r, nil
}

// ID is the member's id in the registry.
func (r *Runner) ID() string { return r.member.ID() }

// Standing is how its membership stands; see membership.Membership.
func (r *Runner) Standing(ctx context.Context) (membership.Standing, error) {
	return r.member.Standing(ctx)
}

// Validate tells what New would refuse, before there is a store.
func (c Config) Validate() error {
	if err := c.complete(); err != nil {
		return err
	}
	return c.Membership.Validate()
}

// complete checks what is not the membership's to check, and fills in what is left to it.
func (c *Config) complete() error {
	if len(c.Command) == 0 || len(c.Watchdog) == 0 {
		return errors.New("want a command to run")
	}
	if c.Grace < 0 {
		return fmt.Errorf("grace %s: want none below 0", c.Grace)
	}
	switch c.OnExit {
	case "":
		c.OnExit = Restart
	case Restart, RestartOnFailure, Stop:
	default:
		return fmt.Errorf("on exit %q: want %s, %s or %s", c.OnExit, Restart, RestartOnFailure, Stop)
	}
	if c.limits == (limits{}) {
		c.limits = usualLimits()
	}
	c.Membership.LeaveTimeout = c.Grace + leaveMargin
	// A daemon that revoked the lease as soon as this process has ended would be faster
	// than the watchdog, which does it when the children are dead.
	c.Membership.Watched = false
	return nil
}

// Run joins the group and runs children until ctx ends; then it has them stop, gives
// up their partitions, leaves, and returns nil. It returns an error where the program
// cannot be started or, with the policy Stop, where a child has failed: after leaving
// in the same order.
func (r *Runner) Run(ctx context.Context) error {
	defer close(r.ended)
	if !strings.Contains(r.cfg.Command[0], "{") {
		path, err := exec.LookPath(r.cfg.Command[0])
		if err != nil {
			return fmt.Errorf("no such program: %w", err)
		}
		r.path = path
	}
	var err error
	if r.keeper, err = startKeeper(&r.cfg); err != nil {
		return err
	}
	ctx, r.stop = context.WithCancel(ctx)
	defer r.stop()
	left := make(chan error, 1)
	go func() { left <- r.member.Run(ctx, r) }()
	feed := time.NewTicker(feedPause)
	defer feed.Stop()
	defer r.timer.Stop()
	for done := false; !done || len(r.units) > 0 || r.sweeping; {
		var reports <-chan report
		if r.keeper != nil {
			reports = r.keeper.reports
		}
		select {
		case err := <-left:
			done = true
			r.fail(err)
			r.holds(-1)
			if len(r.units) > 0 {
				r.log.Warn("left the group; waiting for the end of children that were killed", "children", len(r.units))
			}
		case f := <-r.posts:
			f()
		case p, ok := <-reports:
			if ok {
				r.take(p)
			} else {
				r.keeperEnded()
			}
		case <-feed.C:
			r.feed()
		case <-r.timer.C:
			r.tick()
		}
		r.setTimer()
	}
	if r.keeper != nil {
		r.fail(r.keeper.close())
	}
	return r.err
}

// Hurry ends the grace of all children, now and in future.
func (r *Runner) Hurry() {
	r.post(func() {
		r.hurried = true
		for u := range r.units {
			r.step(u, input{kind: inHurry})
		}
	})
}

// post runs f in Run's goroutine.
func (r *Runner) post(f func()) {
	select {
	case r.posts <- f:
	case <-r.ended:
	}
}

// holds tells the watchdog of the lease.
func (r *Runner) holds(lease registry.LeaseID) {
	r.lease = lease
	r.send(command{Lease: lease})
}

// fail keeps the first error.
func (r *Runner) fail(err error) {
	if r.err == nil {
		r.err = err
	}
}

// Snapshot implements membership.Work.
func (r *Runner) Snapshot(rebalance.Snapshot, registry.Snapshot) {}

// Begin implements membership.Work.
func (r *Runner) Begin(list []*membership.Ownership) {
	r.post(func() {
		for _, o := range list {
			u := &unit{o: o, child: newChild(r.cfg.OnExit, r.cfg.Grace)}
			r.units[u] = struct{}{}
			r.turns[o.Partition] = append(r.turns[o.Partition], u)
			if r.turns[o.Partition][0] == u {
				r.step(u, input{kind: inTurn})
			}
		}
	})
}

// Drain implements membership.Work.
func (r *Runner) Drain(o *membership.Ownership) bool {
	over := make(chan struct{})
	r.post(func() {
		u := r.unitOf(o)
		if u == nil {
			close(over)
			return
		}
		u.drained = over
		r.step(u, input{kind: inRevoke})
		if r.hurried {
			r.step(u, input{kind: inHurry})
		}
	})
	select {
	case <-over:
		return o.Context().Err() == nil
	case <-o.Context().Done():
		return false
	}
}

// Revoked implements membership.Work.
func (r *Runner) Revoked(o *membership.Ownership) {
	r.log.Info("partition given up", "topic", o.Partition.Topic, "partition", o.Partition.Name(), "fence", o.Token)
}

// Lost implements membership.Work.
func (r *Runner) Lost(o *membership.Ownership, _ string) {
	r.post(func() {
		if u := r.unitOf(o); u != nil {
			r.step(u, input{kind: inLose})
		}
	})
}

func (r *Runner) unitOf(o *membership.Ownership) *unit {
	for _, u := range r.turns[o.Partition] {
		if u.o == o {
			return u
		}
	}
	return nil
}

func (r *Runner) logOf(u *unit) *slog.Logger {
	return r.log.With("topic", u.o.Partition.Topic, "partition", u.o.Partition.Name(), "fence", u.o.Token)
}

// step tells a child what has happened and does what follows.
func (r *Runner) step(u *unit, in input) {
	do := u.child.step(boottime(), in)
	switch {
	case do.start:
		r.queue = append(r.queue, u)
		r.startSome()
	case (do.term || do.kill) && u.id == 0:
		r.queue = slices.DeleteFunc(r.queue, func(q *unit) bool { return q == u })
		r.step(u, input{kind: inGone, ours: true})
	case do.term:
		r.send(command{Term: u.id})
	case do.kill:
		r.sent++
		r.send(command{Kill: u.id, Number: r.sent})
		if in.kind == inLose && r.urgent.number == 0 && r.keeper != nil { // else it is killed by the sweep
			r.urgent = urgency{r.sent, boottime() + r.cfg.limits.urgent}
		}
	case do.stop:
		if do.err != nil {
			r.fail(fmt.Errorf("%s for partition %s of %s: %w", r.cfg.Command[0], u.o.Partition.Name(), u.o.Partition.Topic, do.err))
		}
		r.log.Info("stopping because of a child", "topic", u.o.Partition.Topic, "partition", u.o.Partition.Name(), "reason", do.err)
		r.stop()
	}
	if u.child.state == childOver {
		r.finish(u)
	}
}

// finish drops a unit; the next one of its partition has its turn.
func (r *Runner) finish(u *unit) {
	if _, there := r.units[u]; !there {
		return
	}
	delete(r.units, u)
	p := u.o.Partition
	rest := r.turns[p][1:]
	if len(rest) == 0 {
		delete(r.turns, p)
	} else {
		r.turns[p] = rest
	}
	if u.drained != nil {
		close(u.drained)
	}
	if len(rest) > 0 {
		r.step(rest[0], input{kind: inTurn})
	}
}

func (r *Runner) send(c command) {
	if r.keeper != nil {
		r.keeper.send(c)
	}
}

// deadline is until when a child of the ownership may live. The clock is read first:
// if the process is stopped before the next line, it only comes too early.
func deadline(o *membership.Ownership) time.Duration {
	now := boottime()
	return now + o.Left() - killMargin
}

// startSome starts what waits for it, as far as the watchdog keeps up.
func (r *Runner) startSome() {
	for len(r.queue) > 0 && len(r.starting) < maxStarting {
		u := r.queue[0]
		r.queue = r.queue[1:]
		r.start(u)
	}
}

func (r *Runner) start(u *unit) {
	if r.keeper == nil {
		r.step(u, input{kind: inFailed, ours: true})
		return
	}
	args, env := r.commandOf(u.o)
	path := r.path
	if path == "" {
		var err error
		if path, err = exec.LookPath(args[0]); err != nil {
			r.step(u, input{kind: inFailed, failure: err.Error(), fatal: true})
			return
		}
	}
	s := &startCommand{Path: path, Args: args, Env: env, Until: deadline(u.o)}
	if r.cfg.Prefix {
		s.Prefix = u.o.Partition.Topic + " " + u.o.Partition.Name() + " "
	}
	r.lastID++
	s.ID, u.id = r.lastID, r.lastID
	r.byID[u.id], r.starting[u.id] = u, true
	r.send(command{Start: s})
}

// commandOf is the child's command line and environment.
func (r *Runner) commandOf(o *membership.Ownership) (args, env []string) {
	number, fence := strconv.Itoa(int(o.Partition.Number)), strconv.FormatInt(o.Token, 10)
	group := r.cfg.Membership.Group
	replacer := strings.NewReplacer("{partition}", number, "{topic}", o.Partition.Topic, "{group}", group, "{fence}", fence)
	for _, arg := range r.cfg.Command {
		args = append(args, replacer.Replace(arg))
	}
	ours := map[string]string{
		"MUSTER_GROUP": group, "MUSTER_TOPIC": o.Partition.Topic, "MUSTER_PARTITION": number,
		"MUSTER_HOME": strconv.Itoa(int(o.Partition.Home)), "MUSTER_FENCE": fence,
		"MUSTER_MEMBER": r.member.ID(), "MUSTER_STREAM": strconv.Itoa(int(o.Stream)),
	}
	for _, v := range os.Environ() {
		// Most programs take the first of two variables of one name.
		name, _, _ := strings.Cut(v, "=")
		if _, replaced := ours[name]; !replaced && name != childVariable {
			env = append(env, v)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(ours)) {
		env = append(env, name+"="+ours[name])
	}
	return args, env
}

// take takes in what the watchdog tells.
func (r *Runner) take(p report) {
	switch {
	case p.Started != nil:
		delete(r.starting, p.Started.ID)
		if u := r.byID[p.Started.ID]; u != nil {
			r.logOf(u).Info("child started", "pid", p.Started.PID)
		}
	case p.Failed != nil:
		if u := r.drop(p.Failed.ID); u != nil {
			r.logOf(u).Warn("child not started", "error", p.Failed.Error)
			r.step(u, input{kind: inFailed, failure: p.Failed.Error, ours: p.Failed.Late, fatal: p.Failed.Fatal})
		}
	case p.Exited != nil:
		if u := r.byID[p.Exited.ID]; u != nil {
			r.noteExit(u, p.Exited)
			r.step(u, input{kind: inExited, failure: p.Exited.Failure, ours: p.Exited.Overdue})
		}
	case p.Gone != 0:
		if u := r.drop(p.Gone); u != nil {
			r.step(u, input{kind: inGone})
		}
	}
	if p.Number != 0 || !r.answered {
		r.missed, r.answered = 0, true
	}
	if p.Number != 0 && p.Number >= r.urgent.number {
		r.urgent = urgency{}
	}
	r.startSome()
}

func (r *Runner) noteExit(u *unit, e *exitedReport) {
	how := e.Failure
	if how == "" {
		how = "exit status 0"
	}
	switch {
	case e.Overdue:
		r.logOf(u).Warn("child was killed: the lease could not be renewed in time")
	case u.child.state == childUp:
		r.logOf(u).Warn("child ended by itself", "how", how)
	default:
		r.logOf(u).Info("child stopped", "how", how)
	}
}

// drop forgets a process, and returns whose it was.
func (r *Runner) drop(id uint64) *unit {
	delete(r.starting, id)
	u := r.byID[id]
	delete(r.byID, id)
	if u != nil {
		u.id = 0
	}
	return u
}

// feed tells the watchdog how long the children may live, and sees whether it answers.
func (r *Runner) feed() {
	if r.keeper == nil {
		return
	}
	limit := r.cfg.limits.missed
	if !r.answered {
		limit = r.cfg.limits.start
	}
	if r.missed++; r.missed > limit {
		r.log.Error("watchdog does not answer; killing it, and the children with it")
		r.keeper.kill()
		return
	}
	until := make(map[uint64]time.Duration, len(r.byID))
	for id, u := range r.byID {
		until[id] = deadline(u.o)
	}
	r.sent++
	r.send(command{Until: until, Number: r.sent})
}

// tick tells the children what time it is.
func (r *Runner) tick() {
	now := boottime()
	for u := range maps.Clone(r.units) {
		if at, ok := u.child.wake(); ok && now >= at {
			r.step(u, input{kind: inTick})
		}
	}
	if r.urgent.number != 0 && now >= r.urgent.until && r.keeper != nil {
		r.log.Error("watchdog does not kill a child that it has to; killing it, and all children with it")
		r.urgent = urgency{}
		r.keeper.kill()
	}
}

func (r *Runner) setTimer() {
	next := time.Hour
	now := boottime()
	for u := range r.units {
		if at, ok := u.child.wake(); ok {
			next = min(next, at-now)
		}
	}
	if r.urgent.number != 0 {
		next = min(next, r.urgent.until-now)
	}
	r.timer.Reset(max(next, 0))
}

// keeperEnded kills what a watchdog has left behind, before anything else is
// started. That may take its time, and the loop must not.
func (r *Runner) keeperEnded() {
	k := r.keeper
	r.keeper, r.missed, r.answered, r.urgent, r.sweeping = nil, 0, false, urgency{}, true
	r.log.Error("watchdog ended; killing what is left of the children and starting another")
	k.kill() // it may only have said what is not understood
	go func() {
		<-k.ended
		err := sweep()
		r.post(func() { r.swept(err) })
	}()
}

func (r *Runner) swept(err error) {
	r.sweeping = false
	if err == nil {
		r.keeper, err = startKeeper(&r.cfg)
	}
	if err == nil {
		r.holds(r.lease)
	}
	if err != nil {
		r.fail(err)
		r.stop()
	}
	for id := range maps.Clone(r.byID) {
		r.step(r.drop(id), input{kind: inGone, ours: true})
	}
}
