package broker

import (
	"fmt"
	"sync"
	"time"

	"github.com/muster-io/muster/internal/monitor"
	"github.com/muster-io/muster/registry"
)

// Check is one thing that a probe asks about, and what was found.
type Check = monitor.Check

// phase is what a daemon is about: it starts, step by step, serves, and stops. Until
// it serves, much of it is not there yet, so who asks from outside asks here first.
type phase struct {
	mu    sync.Mutex
	name  string // of the step under way, stepServing or stepStopping
	since time.Time
	steps []startStep
}

// startStep is a step of the start that is done, or under way.
type startStep struct {
	name string
	took time.Duration
}

// Steps of a start, in order, and what follows them.
const (
	stepDataDir  = "data_dir"
	stepListen   = "listen"
	stepEtcd     = "etcd"     // start the embedded server
	stepConnect  = "connect"  // find the registry, and that its version will do
	stepIdentify = "identify" // the cluster's id
	stepRegister = "register"
	stepTopics   = "topics" // read the registry, open the logs
	stepServe    = "serve"

	stepServing  = "serving"
	stepStopping = "stopping"
)

// enter ends the step under way and begins the next.
func (p *phase) enter(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	if p.name != "" && p.name != stepServing && p.name != stepStopping {
		p.steps = append(p.steps, startStep{p.name, now.Sub(p.since)})
	}
	p.name, p.since = name, now
}

// check is about the phase as a whole.
func (p *phase) check() Check {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := Check{Name: "phase", OK: p.name == stepServing, Reason: p.name}
	if !c.OK && p.name != stepStopping {
		c.Reason = fmt.Sprintf("starting: %s, for %.1f s", p.name, time.Since(p.since).Seconds())
	}
	return c
}

// taken is what the start took, step by step.
func (p *phase) taken() []startStep {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.steps
}

// logReady says that the daemon is up, and what that took.
func (d *Daemon) logReady() {
	var total time.Duration
	args := []any{"took", &total}
	for _, s := range d.phase.taken() {
		total += s.took
		args = append(args, s.name, s.took.Round(time.Microsecond))
	}
	args[1] = total.Round(time.Microsecond)
	d.log.Info("ready", args...)
	d.metrics.started(d.phase.taken())
}

// pulse is the sign of life of a loop: it beats whenever the loop comes round, at
// least each beatEvery.
type pulse struct {
	mu   sync.Mutex
	last time.Time
}

func (p *pulse) beat() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.last = time.Now()
}

// silent is the time since the last beat.
func (p *pulse) silent() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return time.Since(p.last)
}

const (
	beatEvery = time.Second
	// stuckAfter is above all that a loop may wait for in one go: a call to the
	// registry (registryCallLimit) or the recovery of a log.
	stuckAfter = time.Minute
)

// Healthy tells whether the process can be left alone: its loops turn, and nothing
// has failed for good. It does not ask for the registry, whose absence no restart
// would help.
func (d *Daemon) Healthy() (bool, []Check) {
	p := d.phase.check()
	checks := []Check{{Name: p.Name, OK: true, Reason: p.Reason}}
	if p.OK {
		for _, loop := range []struct {
			name  string
			pulse *pulse
		}{{"membership", &d.members.pulse}, {"topics", &d.topics.pulse}} {
			silent := loop.pulse.silent()
			checks = append(checks, Check{Name: "loop " + loop.name, OK: silent < stuckAfter,
				Reason: fmt.Sprintf("came round %.1f s ago", silent.Seconds())})
		}
	}
	c := Check{Name: "failure", OK: true, Reason: "none"}
	if err := d.failure.Load(); err != nil {
		c.OK, c.Reason = false, (*err).Error()
	}
	checks = append(checks, c)
	return monitor.Summary(checks) == "", checks
}

// Ready tells whether clients should come here: the daemon is up, it is alive to
// the registry and registered there, it has heard of the registry lately, and it
// takes connections.
func (d *Daemon) Ready() (bool, []Check) {
	checks := []Check{d.phase.check()}
	if checks[0].OK {
		checks = append(checks, d.checkSession(), d.checkRegistration(), d.checkView(), d.checkListener())
	}
	return monitor.Summary(checks) == "", checks
}

func (d *Daemon) checkSession() Check {
	left, ttl := d.members.remaining()
	c := Check{Name: "session", OK: left > 0, Reason: fmt.Sprintf("%.1f s of %.0f s left", left.Seconds(), ttl.Seconds())}
	if !c.OK {
		c.Reason = "lost; the daemon registers again as soon as the registry answers"
	}
	return c
}

// checkRegistration asks what the registry shows, not what the daemon has written.
func (d *Daemon) checkRegistration() Check {
	ours, shown := d.members.lease(), d.topics.registered()
	c := Check{Name: "registration", OK: shown != 0 && shown == ours, Reason: "stands"}
	switch {
	case c.OK:
	case shown == 0:
		c.Reason = "the registry shows no record of this broker"
	default:
		c.Reason = fmt.Sprintf("the record of this broker is under lease %s, not %s",
			registry.LeaseText(shown), registry.LeaseText(ours))
	}
	return c
}

func (d *Daemon) checkView() Check {
	lag, revision := d.heard()
	limit := d.cfg.SessionTimeout / 2
	c := Check{Name: "view", OK: lag <= limit, Reason: fmt.Sprintf("revision %d, heard of %.1f s ago", revision, lag.Seconds())}
	if !c.OK {
		c.Reason = fmt.Sprintf("nothing heard of the registry for %.1f s, limit %.1f s", lag.Seconds(), limit.Seconds())
	}
	return c
}

func (d *Daemon) checkListener() Check {
	c := Check{Name: "listener", OK: d.serving.Load(), Reason: "serving at " + d.Address()}
	if !c.OK {
		c.Reason = "takes no connections"
	}
	return c
}

// heard is how long ago the registry was heard of, and up to which revision. The
// daemon must be serving.
func (d *Daemon) heard() (time.Duration, int64) { return d.view.Heard(), d.view.Revision() }
