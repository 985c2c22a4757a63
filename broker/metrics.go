package broker

import (
	"cmp"
	"context"
	"errors"
	"runtime/debug"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	dto "github.com/prometheus/client_model/go"

	"github.com/muster-io/muster/broker/storage"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/vigil"
)

// metrics is what the daemon counts, whether or not anybody asks. What happens
// thousands of times a second is counted without a lock; what merely stands (offsets,
// times left) is read when it is asked for: see metrics_state.go.
//
// docs/metrics.md explains every name, and a test compares the two.
type metrics struct {
	registry *prometheus.Registry
	wire     *wireMetrics
	groups   *groupMetrics

	registrations *prometheus.CounterVec // by outcome
	sessionsLost  *prometheus.CounterVec // by reason
	sessionStalls prometheus.Counter
	viewTroubles  prometheus.Counter
	viewRelists   *prometheus.CounterVec // by reason
	producerIDs   prometheus.Counter
	startSeconds  *prometheus.GaugeVec // by step

	storeCalls [registry.CallKinds][storeResults]prometheus.Counter
	storeTimes [registry.CallKinds]prometheus.Observer

	appendedBytes, appendedRecords prometheus.Counter
	appendsUndone, cutBytes        prometheus.Counter
	syncTimes                      prometheus.Observer

	vigilDeaths  *prometheus.CounterVec // by result
	vigilRefused *prometheus.CounterVec // by reason
	vigilTimes   prometheus.Observer
}

// Labels of muster_registrations_total, muster_sessions_lost_total and
// muster_view_relists_total.
const (
	outcomeRegistered = "registered"
	outcomeHeld       = "held"
	outcomeFailed     = "failed"

	lostDeadline  = "deadline"
	lostLease     = "lease_gone"
	lostAbandoned = "abandoned"

	relistWatch     = "watch_ended"
	relistCompacted = "compacted"
)

// Buckets in seconds: from what a fast disk or etcd takes to what a client gives up at.
var (
	diskBuckets    = []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5}
	storeBuckets   = []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5}
	requestBuckets = []float64{.00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30}
)

func newMetrics(d *Daemon) *metrics {
	r := prometheus.NewRegistry()
	m := &metrics{
		registry: r,
		wire:     newWireMetrics(r),
		groups:   newGroupMetrics(d.cfg.Root, r),
		registrations: counters(r, "registrations_total",
			"Attempts of the daemon to register itself, by outcome.", "outcome"),
		sessionsLost: counters(r, "sessions_lost_total", "Sessions of the daemon that were lost, by reason.", "reason"),
		sessionStalls: counter(r, "session_stalls_total",
			"Times that half of the session's time to live passed without a renewal."),
		viewTroubles: counter(r, "view_troubles_total", "Times that nothing was heard of the registry for half of a session timeout."),
		viewRelists: counters(r, "view_relists_total",
			"Times that brokers and topics were listed again since a watch could not go on, by reason.", "reason"),
		producerIDs:  counter(r, "producer_id_blocks_total", "Blocks of producer ids taken from the registry."),
		startSeconds: gauges(r, "start_seconds", "Time that each step of the daemon's start took.", "step"),
		appendedBytes: counter(r, "log_appended_bytes_total",
			"Bytes of record batches appended to the partitions of this daemon."),
		appendedRecords: counter(r, "log_appended_records_total", "Records appended to the partitions of this daemon."),
		appendsUndone:   counter(r, "log_appends_undone_total", "Appends taken back since the disk was full."),
		cutBytes:        counter(r, "log_cut_bytes_total", "Bytes, never acknowledged, that recovery cut from the ends of logs."),
		syncTimes:       histogram(r, "log_fsync_duration_seconds", "Time of each sync of a log to disk.", diskBuckets).WithLabelValues(),
	}
	m.vigilDeaths = counters(r, "vigil_revocations_total", "Sessions of consumers on this host whose process has ended, by what became of their lease.", "result")
	m.vigilRefused = counters(r, "vigil_refusals_total", "Processes and sessions on this host that are not watched though they asked, by reason.", "reason")
	m.vigilTimes = histogram(r, "vigil_revocation_duration_seconds",
		"Time from the end of a consumer's process until its lease is revoked.", storeBuckets).WithLabelValues()
	for _, result := range vigil.DeathResults {
		m.vigilDeaths.WithLabelValues(string(result))
	}
	for _, reason := range vigil.RefusalReasons {
		m.vigilRefused.WithLabelValues(string(reason))
	}
	for _, o := range []string{outcomeRegistered, outcomeHeld, outcomeFailed} {
		m.registrations.WithLabelValues(o)
	}
	for _, reason := range []string{relistWatch, relistCompacted} {
		m.viewRelists.WithLabelValues(reason)
	}
	for _, reason := range []string{lostDeadline, lostLease, lostAbandoned} {
		m.sessionsLost.WithLabelValues(reason)
	}
	calls := counters(r, "store_calls_total", "Calls to the registry's store, by call and result.", "call", "result")
	times := histogram(r, "store_call_duration_seconds", "Time of calls to the registry's store; watches are left out.", storeBuckets, "call")
	for kind := range registry.CallKinds {
		for result := range storeResults {
			if result == storeConflict && kind != registry.CallTxn {
				continue
			}
			m.storeCalls[kind][result] = calls.WithLabelValues(kind.String(), result.String())
		}
		if kind != registry.CallWatch {
			m.storeTimes[kind] = times.WithLabelValues(kind.String())
		}
	}
	gauges(r, "build_info", "Constant 1, labelled by what this program was built from.", "version", "revision", "go_version").
		WithLabelValues(buildInfo()).Set(1)
	r.MustRegister(newState(d), collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

const namespace = "muster"

func counters(r prometheus.Registerer, name, help string, labels ...string) *prometheus.CounterVec {
	c := prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels)
	r.MustRegister(c)
	return c
}

func counter(r prometheus.Registerer, name, help string) prometheus.Counter {
	return counters(r, name, help).WithLabelValues()
}

func gauges(r prometheus.Registerer, name, help string, labels ...string) *prometheus.GaugeVec {
	g := prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: namespace, Name: name, Help: help}, labels)
	r.MustRegister(g)
	return g
}

func histogram(r prometheus.Registerer, name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	h := prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: namespace, Name: name, Help: help, Buckets: buckets}, labels)
	r.MustRegister(h)
	return h
}

func buildInfo() (version, revision, goVersion string) {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown", "unknown", "unknown"
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			revision = s.Value
		}
	}
	return cmp.Or(info.Main.Version, "unknown"), cmp.Or(revision, "unknown"), info.GoVersion
}

// gatherer is what /metrics shows: our own, and with an etcd server inside this
// process that server's, which it registers with Prometheus' default registry.
func (m *metrics) gatherer(embedded bool) prometheus.Gatherer {
	if !embedded {
		return m.registry
	}
	return prometheus.Gatherers{m.registry, prometheus.GathererFunc(gatherEtcd)}
}

// gatherEtcd leaves out what else registers itself there, and etcd's metrics for
// debugging, whose names may change.
func gatherEtcd() ([]*dto.MetricFamily, error) {
	all, err := prometheus.DefaultGatherer.Gather()
	var own []*dto.MetricFamily
	for _, f := range all {
		if name := f.GetName(); strings.HasPrefix(name, "etcd_") && !strings.HasPrefix(name, "etcd_debugging_") {
			own = append(own, f)
		}
	}
	return own, err
}

// storeResult is how a call to the store ended.
type storeResult int

const (
	storeOK        storeResult = iota
	storeConflict              // a transaction whose condition did not hold
	storeCompacted             // the revision asked for is gone
	storeNoLease               // the lease is gone
	storeTimeout               // no answer in time
	storeCanceled              // the daemon did not want the answer any more
	storeError                 // anything else

	storeResults
)

func (r storeResult) String() string {
	return [storeResults]string{"ok", "conflict", "compacted", "lease_not_found", "timeout", "canceled", "error"}[r]
}

func resultOf(c registry.Call) storeResult {
	switch {
	case c.Err == nil && c.Refused:
		return storeConflict
	case c.Err == nil:
		return storeOK
	case errors.Is(c.Err, registry.ErrCompacted):
		return storeCompacted
	case errors.Is(c.Err, registry.ErrLeaseNotFound):
		return storeNoLease
	case errors.Is(c.Err, context.DeadlineExceeded):
		return storeTimeout
	case errors.Is(c.Err, context.Canceled):
		return storeCanceled
	}
	return storeError
}

// storeCall is told of each call to the store.
func (m *metrics) storeCall(c registry.Call) {
	m.storeCalls[c.Kind][resultOf(c)].Inc()
	if times := m.storeTimes[c.Kind]; times != nil {
		times.Observe(c.Duration.Seconds())
	}
}

// registration counts an attempt to register.
func (m *metrics) registration(err error) {
	outcome := outcomeRegistered
	if _, held := errors.AsType[*registry.HeldError](err); held {
		outcome = outcomeHeld
	} else if err != nil {
		outcome = outcomeFailed
	}
	m.registrations.WithLabelValues(outcome).Inc()
}

// sessionEvent is told of the life of each session.
func (m *metrics) sessionEvent(e registry.SessionEvent) {
	switch e.Kind {
	case registry.SessionStalled:
		m.sessionStalls.Inc()
	case registry.SessionLost:
		reason := lostAbandoned
		if errors.Is(e.Err, registry.ErrSessionExpired) {
			reason = lostDeadline
		} else if errors.Is(e.Err, registry.ErrLeaseGone) {
			reason = lostLease
		}
		m.sessionsLost.WithLabelValues(reason).Inc()
	}
}

// viewEvent is told when the View has trouble with the store.
func (m *metrics) viewEvent(e registry.ViewEvent) {
	switch e.Kind {
	case registry.ViewTrouble:
		m.viewTroubles.Inc()
	case registry.ViewRelisted:
		reason := relistWatch
		if errors.Is(e.Err, registry.ErrCompacted) {
			reason = relistCompacted
		}
		m.viewRelists.WithLabelValues(reason).Inc()
	}
}

// listen adds to what a partition's log tells what is counted of it.
func (m *metrics) listen(l storage.Listener) storage.Listener {
	l.Appended = func(s storage.Stored) {
		m.appendedBytes.Add(float64(s.Bytes))
		m.appendedRecords.Add(float64(s.To - s.From))
	}
	l.Synced = func(s storage.Synced) { m.syncTimes.Observe(s.Took.Seconds()) }
	l.AppendUndone = func(storage.AppendUndone) { m.appendsUndone.Inc() }
	l.Recovered = func(r storage.Recovery) { m.cutBytes.Add(float64(r.BytesCut)) }
	return l
}

// vigilHooks count what comes of watching the consumers on this host.
func (m *metrics) vigilHooks() vigil.Hooks {
	return vigil.Hooks{
		OnDeath: func(i vigil.DeathInfo) {
			m.vigilDeaths.WithLabelValues(string(i.Result)).Inc()
			if i.Result == vigil.DeathRevoked {
				m.vigilTimes.Observe(i.Took.Seconds())
			}
		},
		OnRefused: func(r vigil.RefusalReason) { m.vigilRefused.WithLabelValues(string(r)).Inc() },
	}
}

// started takes down what each step of the start took.
func (m *metrics) started(steps []startStep) {
	for _, s := range steps {
		m.startSeconds.WithLabelValues(s.name).Set(s.took.Round(time.Microsecond).Seconds())
	}
}
