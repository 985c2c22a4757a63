package main

import (
	"log/slog"
	"sync"
	"time"

	systemd "github.com/coreos/go-systemd/v22/daemon"

	"github.com/muster-io/muster/broker"
)

// statusEvery is how soon a change of the daemon's state is told.
const statusEvery = time.Second

// health is what a *broker.Daemon says of itself.
type health interface {
	Ready() (bool, []broker.Check)
	Healthy() (bool, []broker.Check)
}

// notify tells systemd, if it has started this process and wants to know, that the
// daemon is ready, from then on whether it serves, and, if a watchdog is set, that it
// lives. The function that it returns ends that, and says that the daemon stops.
func notify(d health, log *slog.Logger) (stopping func()) {
	told, err := systemd.SdNotify(false, systemd.SdNotifyReady+"\n"+status(d))
	if err != nil {
		log.Warn("cannot notify systemd", "error", err)
	}
	if !told {
		return func() {}
	}
	n := notifier{d: d, status: status(d), end: make(chan struct{})}
	if n.watchdog, err = systemd.SdWatchdogEnabled(false); err != nil {
		log.Warn("cannot read the watchdog's interval, it gets no sign of life", "error", err)
	}
	n.work.Go(n.run)
	return func() {
		close(n.end)
		n.work.Wait()
		n.tell(systemd.SdNotifyStopping + "\nSTATUS=stopping")
	}
}

type notifier struct {
	d        health
	status   string        // as told last
	watchdog time.Duration // 0: none
	end      chan struct{}
	work     sync.WaitGroup
}

func (n *notifier) run() {
	every := statusEvery
	if n.watchdog > 0 {
		every = min(every, n.watchdog/3) // two may come late
	}
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		if healthy, _ := n.d.Healthy(); healthy && n.watchdog > 0 {
			n.tell(systemd.SdNotifyWatchdog)
		}
		if s := status(n.d); s != n.status && n.tell(s) {
			n.status = s
		}
		select {
		case <-n.end:
			return
		case <-ticker.C:
		}
	}
}

// tell reports false if the message did not go out; the next round tries again.
func (n *notifier) tell(state string) bool {
	_, err := systemd.SdNotify(false, state)
	return err == nil
}

// status is the line that systemctl status shows.
func status(d health) string {
	ready, checks := d.Ready()
	if ready {
		return "STATUS=serving"
	}
	for _, c := range checks {
		if !c.OK {
			return "STATUS=not ready: " + c.Name + ": " + c.Reason
		}
	}
	return "STATUS=not ready"
}
