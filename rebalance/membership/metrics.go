package membership

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// Metrics counts what happens to the memberships of a process, by group. It is a
// Collector of Prometheus: register it where the application registers its own.
// docs/metrics.md explains every name.
type Metrics struct {
	owned      *prometheus.GaugeVec
	rebalances *prometheus.CounterVec
	took       *prometheus.HistogramVec
	claims     *prometheus.CounterVec
	losses     *prometheus.CounterVec
}

// Outcomes of a claimed partition.
const (
	claimWon     = "claimed"
	claimHeld    = "held"    // somebody else owns it still
	claimStale   = "stale"   // the group had changed meanwhile
	claimUnknown = "unknown" // the answer was lost
)

// NewMetrics returns a Metrics that has counted nothing.
func NewMetrics() *Metrics {
	opts := func(name, help string) prometheus.Opts {
		return prometheus.Opts{Namespace: "muster", Subsystem: "member", Name: name, Help: help}
	}
	return &Metrics{
		owned: prometheus.NewGaugeVec(prometheus.GaugeOpts(opts("partitions_owned", "Partitions that members of this process own.")), []string{"group"}),
		rebalances: prometheus.NewCounterVec(prometheus.CounterOpts(opts("rebalances_total",
			"Rebalances that gave a member other partitions, by reason.")), []string{"group", "reason"}),
		took: prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: "muster", Subsystem: "member", Name: "rebalance_duration_seconds",
			Help:    "Time from a new division until a member owned its share and nothing else, by reason.",
			Buckets: []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30}}, []string{"reason"}),
		claims: prometheus.NewCounterVec(prometheus.CounterOpts(opts("claims_total",
			"Partitions that members tried to claim, by outcome.")), []string{"group", "outcome"}),
		losses: prometheus.NewCounterVec(prometheus.CounterOpts(opts("partitions_lost_total",
			"Partitions that were lost, not given up.")), []string{"group"}),
	}
}

func (m *Metrics) all() []prometheus.Collector {
	return []prometheus.Collector{m.owned, m.rebalances, m.took, m.claims, m.losses}
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(to chan<- *prometheus.Desc) {
	for _, c := range m.all() {
		c.Describe(to)
	}
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(to chan<- prometheus.Metric) {
	for _, c := range m.all() {
		c.Collect(to)
	}
}

// meter counts for one membership, in its loop but for claimed. Without Metrics it
// does nothing.
type meter struct {
	metrics *Metrics
	group   string
	shown   int // partitions in metrics.owned

	share   int
	pending bool // since: a division that is not carried out yet
	since   time.Duration
	kind    rebalance.CauseKind
	moved   bool // more than one step was needed
}

func (t *meter) rebalanced(now time.Duration, r rebalance.Rebalanced) {
	t.share = r.Share
	if !t.pending {
		t.pending, t.since, t.kind, t.moved = true, now, r.Kind, false
	}
}

// stepped is called after each step of the member.
func (t *meter) stepped(now time.Duration, owned map[registry.Partition]*Ownership) {
	if t.metrics == nil {
		return
	}
	if n := len(owned); n != t.shown {
		t.metrics.owned.WithLabelValues(t.group).Add(float64(n - t.shown))
		t.shown = n
	}
	if !t.pending {
		return
	}
	if len(owned) != t.share || draining(owned) {
		t.moved = true
		return
	}
	t.pending = false
	if t.moved { // else nothing had to move
		t.metrics.rebalances.WithLabelValues(t.group, string(t.kind)).Inc()
		t.metrics.took.WithLabelValues(string(t.kind)).Observe((now - t.since).Seconds())
	}
}

func draining(owned map[registry.Partition]*Ownership) bool {
	for _, o := range owned {
		select {
		case <-o.Revoked():
			return true
		default:
		}
	}
	return false
}

func (t *meter) claimed(asked int, results []registry.ClaimResult, a rebalance.ClaimAnswered) {
	if t.metrics == nil {
		return
	}
	count := func(outcome string, n int) {
		if n > 0 {
			t.metrics.claims.WithLabelValues(t.group, outcome).Add(float64(n))
		}
	}
	held := 0
	for _, r := range results {
		if r.Holder != nil {
			held++
		}
	}
	count(claimHeld, held)
	count(claimWon, len(results)-held)
	switch {
	case a.Stale:
		count(claimStale, asked-len(results))
	case a.Unknown:
		count(claimUnknown, asked-len(results))
	}
}

func (t *meter) lost() {
	if t.metrics != nil {
		t.metrics.losses.WithLabelValues(t.group).Inc()
	}
}

// closed takes back what merely stands.
func (t *meter) closed() {
	if t.metrics != nil && t.shown != 0 {
		t.metrics.owned.WithLabelValues(t.group).Sub(float64(t.shown))
		t.shown = 0
	}
}
