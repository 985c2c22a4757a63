package broker

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
)

// state collects what stands at the moment it is asked for. Nobody keeps these
// numbers up to date, so they cost nothing while nobody asks.
type state struct {
	d *Daemon

	ready                       *prometheus.Desc
	sessionLeft, sessionTTL     *prometheus.Desc
	viewLag, viewRevision       *prometheus.Desc
	brokers, topics             *prometheus.Desc
	led, open, failed           *prometheus.Desc
	logStart, logEnd, logLength *prometheus.Desc
	processes, sessions         *prometheus.Desc
}

func newState(d *Daemon) *state {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(namespace+"_"+name, help, labels, nil)
	}
	return &state{
		d:            d,
		ready:        desc("ready", "1 while /readyz answers 200, else 0."),
		sessionLeft:  desc("session_remaining_seconds", "Time until the daemon's session is dead unless it is renewed; 0 if it is dead."),
		sessionTTL:   desc("session_ttl_seconds", "Time to live that the registry granted the session."),
		viewLag:      desc("view_lag_seconds", "Time since the registry was last heard of about all brokers and topics."),
		viewRevision: desc("view_revision", "Revision of the registry up to which the daemon has followed it."),
		brokers:      desc("brokers", "Live brokers in the registry, as this daemon sees it."),
		topics:       desc("topics", "Topics in the registry, as this daemon sees it."),
		led:          desc("partitions_led", "Partitions whose leader is this daemon."),
		open:         desc("partitions_open", "Partitions whose log is open here and takes appends."),
		failed:       desc("partitions_failed", "Partitions whose log could not be opened here, or has failed and is read-only."),
		logStart:     desc("log_start_offset", "First offset that can be read.", "topic", "partition"),
		logEnd:       desc("log_end_offset", "Offset after the last record.", "topic", "partition"),
		processes:    desc("vigil_processes", "Processes on this host that are connected to be watched."),
		sessions:     desc("vigil_sessions", "Sessions of those processes."),
		logLength:    desc("log_size_bytes", "Bytes of the log that are on disk, indexes left out.", "topic", "partition"),
	}
}

// Describe implements prometheus.Collector.
func (s *state) Describe(to chan<- *prometheus.Desc) { prometheus.DescribeByCollect(s, to) }

// Collect implements prometheus.Collector.
func (s *state) Collect(to chan<- prometheus.Metric) {
	gauge := func(desc *prometheus.Desc, v float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, v, labels...)
	}
	ready, _ := s.d.Ready()
	gauge(s.ready, oneIf(ready))
	left, ttl := s.d.members.remaining()
	gauge(s.sessionLeft, left.Seconds())
	gauge(s.sessionTTL, ttl.Seconds())
	if s.d.phase.check().OK {
		lag, revision := s.d.heard()
		gauge(s.viewLag, lag.Seconds())
		gauge(s.viewRevision, float64(revision))
		gauge(s.processes, float64(s.d.vigil.Connections()))
		gauge(s.sessions, float64(s.d.vigil.Sessions()))
	}
	s.collectTopics(gauge)
}

func (s *state) collectTopics(gauge func(*prometheus.Desc, float64, ...string)) {
	t := s.d.topics
	snapshot := t.Snapshot()
	led := 0
	for topic := range snapshot.Topics.All() {
		for _, p := range topic.Partitions {
			if p.Leader == s.d.cfg.ID {
				led++
			}
		}
	}
	gauge(s.brokers, float64(len(snapshot.Brokers)))
	gauge(s.topics, float64(snapshot.Topics.Len()))
	gauge(s.led, float64(led))
	open, failed := 0, 0
	for tn, l := range t.locals() {
		if l.partition == nil {
			failed++
			continue
		}
		if l.partition.Failure() != nil {
			failed++
		} else {
			open++
		}
		number := strconv.Itoa(int(tn.number))
		gauge(s.logStart, float64(l.partition.Start()), tn.topic, number)
		gauge(s.logEnd, float64(l.partition.End()), tn.topic, number)
		gauge(s.logLength, float64(l.partition.Size()), tn.topic, number)
	}
	gauge(s.open, float64(open))
	gauge(s.failed, float64(failed))
}

func oneIf(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}
