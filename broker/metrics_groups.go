package broker

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/rebalance/groups"
	"github.com/muster-io/muster/registry"
)

// groupMetrics is what this daemon sees of consumer groups. It follows their keys, for
// what is counted cannot be read off the registry when somebody asks. It looks at a
// group at its own pace: a big one that rebalances changes faster than it is worth
// looking at. Times are those at which changes were learned.
type groupMetrics struct {
	root registry.Root
	kick chan struct{}

	keysMu  sync.Mutex // of what the View writes
	keys    map[string]map[string]registry.KV
	topics  map[string]registry.KV
	sorted  []registry.KV // topics by key; nil if they have changed
	changes map[string]*groupChanges
	last    int64
	live    bool // what comes is news, not what was there when the View was opened

	mu      sync.Mutex // of what is shown
	tracked map[string]*trackedGroup
	shown   int // of those, under their own names
	// rest is of groups that were shown together and are forgotten. A sum does not go back.
	rest     groupCounts
	together bool

	took *prometheus.HistogramVec

	members, owned, ownerless, rebalancing *prometheus.Desc
	gaps, rebalances, claims               *prometheus.Desc
}

// groupChanges is what happened in a group since it was last looked at.
type groupChanges struct {
	from, to time.Time
	news     bool // the group was not there before the View was opened, or was seen by then
	owners   []ownerChange
}

type ownerChange struct {
	at        time.Time
	partition registry.Partition
	exists    bool
	claimed   bool
}

type trackedGroup struct {
	painter *groups.Painter
	tracker groups.Tracker
	emptied time.Time // zero while it has members
	shown   bool      // under its own name
	counts  groupCounts
}

type groupCounts struct {
	rebalances map[rebalance.CauseKind]int
	claims     int
	gaps       time.Duration
}

func (c *groupCounts) add(o groupCounts) {
	c.claims += o.claims
	c.gaps += o.gaps
	for cause, n := range o.rebalances {
		c.count(cause, n)
	}
}

func (c *groupCounts) count(cause rebalance.CauseKind, n int) {
	if c.rebalances == nil {
		c.rebalances = map[rebalance.CauseKind]int{}
	}
	c.rebalances[cause] += n
}

const (
	// maxShownGroups bounds the values of the label group. Groups beyond are added up
	// under the empty name, which no group can have.
	maxShownGroups = 100
	// A group without members is forgotten after a while.
	forgetAfter = time.Hour
	// Looking at groups takes at most about a tenth of a processor.
	minLookPause   = 20 * time.Millisecond
	lookPauseRatio = 10
)

func newGroupMetrics(root registry.Root, r prometheus.Registerer) *groupMetrics {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(namespace+"_group_"+name, help, labels, nil)
	}
	g := &groupMetrics{root: root, kick: make(chan struct{}, 1), keys: map[string]map[string]registry.KV{}, topics: map[string]registry.KV{},
		changes: map[string]*groupChanges{}, tracked: map[string]*trackedGroup{},
		took: histogram(r, "group_rebalance_duration_seconds",
			"Time from the first change until every partition had the owner that the strategy says, by reason.", requestBuckets, "reason"),
		members:     desc("members", "Registered members of a consumer group.", "group"),
		owned:       desc("partitions_owned", "Partitions of a consumer group that have an owner key.", "group"),
		ownerless:   desc("partitions_ownerless", "Partitions that a consumer group subscribes to and nobody owns.", "group"),
		rebalancing: desc("rebalancing", "1 while a partition of the group has another owner than the strategy says, or none.", "group"),
		gaps:        desc("ownerless_partition_seconds_total", "Time that partitions of a consumer group had no owner, all added up.", "group"),
		rebalances:  desc("rebalances_total", "Rebalances of a consumer group that came to an end, by reason.", "group", "reason"),
		claims:      desc("claims_total", "Owner keys of a consumer group that were created.", "group"),
	}
	for _, cause := range groups.Causes() {
		g.took.WithLabelValues(string(cause))
	}
	r.MustRegister(g)
	return g
}

// run follows all groups until ctx ends.
func (g *groupMetrics) run(ctx context.Context, st registry.Store, stall time.Duration, log *slog.Logger) {
	var view *registry.View
	for view == nil {
		limited, cancel := context.WithTimeout(ctx, startLimit) // many keys take their time
		var err error
		view, err = registry.OpenView(limited, st, []string{g.root.Topics(), g.root.Groups()},
			registry.ViewOptions{Stall: stall, Logger: log, Keep: g.concerns}, func(s registry.Snapshot, events []registry.Event) { g.take(time.Now(), s.Revision, events) })
		cancel()
		if err == nil {
			break
		}
		log.Debug("cannot follow groups, trying again", "error", err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Second):
		}
	}
	defer view.Close()
	g.keysMu.Lock()
	g.live = true
	g.keysMu.Unlock()
	for {
		select {
		case <-ctx.Done():
			return
		case <-g.kick:
		}
		began := time.Now()
		g.look()
		cost := time.Since(began)
		select {
		case <-ctx.Done():
			return
		case <-time.After(max(minLookPause, lookPauseRatio*cost)):
		}
	}
}

// take takes in events of the View, which it must not hold up.
func (g *groupMetrics) take(now time.Time, revision int64, events []registry.Event) {
	g.keysMu.Lock()
	defer g.keysMu.Unlock()
	g.last = revision
	for i := range events {
		e := &events[i]
		if strings.HasPrefix(e.Key, g.root.Topics()) {
			g.topicKey(now, e)
		} else {
			g.groupKey(now, e)
		}
	}
	if len(g.changes) > 0 {
		select {
		case g.kick <- struct{}{}:
		default:
		}
	}
}

// concerns leaves out offsets and history, which are many and change all the time, and
// what stands below topics.
func (g *groupMetrics) concerns(key string) bool {
	switch g.root.Locate(key).Kind {
	case registry.KindTopic, registry.KindMember, registry.KindOwner, registry.KindTarget:
		return true
	}
	return false
}

// topicKey has all groups with members looked at: a filter may want any topic.
func (g *groupMetrics) topicKey(now time.Time, e *registry.Event) {
	g.sorted = nil
	if e.Deleted {
		delete(g.topics, e.Key)
	} else {
		g.topics[e.Key] = e.KV
	}
	for group := range g.keys {
		g.changed(now, group)
	}
}

func (g *groupMetrics) changed(now time.Time, group string) *groupChanges {
	ch := g.changes[group]
	if ch == nil {
		ch = &groupChanges{from: now, news: g.live}
		g.changes[group] = ch
	}
	ch.to = now
	return ch
}

func (g *groupMetrics) groupKey(now time.Time, e *registry.Event) {
	place := g.root.Locate(e.Key)
	if place.Problem != nil {
		return // the doctor has words for it
	}
	group := place.Group
	if e.Deleted {
		delete(g.keys[group], e.Key)
		if len(g.keys[group]) == 0 {
			delete(g.keys, group)
		}
	} else {
		if g.keys[group] == nil {
			g.keys[group] = map[string]registry.KV{}
		}
		g.keys[group][e.Key] = e.KV
	}
	ch := g.changed(now, group)
	if place.Kind == registry.KindOwner {
		claimed := !e.Deleted && (e.Previous == nil || e.Previous.CreateRevision != e.CreateRevision)
		ch.owners = append(ch.owners, ownerChange{now, place.Partition, !e.Deleted, claimed})
	}
}

// look looks at the groups that have changed.
func (g *groupMetrics) look() {
	g.keysMu.Lock()
	changes, revision := g.changes, g.last
	g.changes = map[string]*groupChanges{}
	keys := make(map[string][]registry.KV, len(changes))
	for group := range changes {
		for _, kv := range g.keys[group] {
			keys[group] = append(keys[group], kv)
		}
	}
	if g.sorted == nil {
		for _, kv := range g.topics {
			g.sorted = append(g.sorted, kv)
		}
		slices.SortFunc(g.sorted, compareKeys)
	}
	topics := g.sorted
	g.keysMu.Unlock()
	for group, ch := range changes {
		slices.SortFunc(keys[group], compareKeys)
		g.lookAt(group, ch, revision, keys[group], topics)
	}
	g.forget(time.Now())
}

func compareKeys(a, b registry.KV) int { return strings.Compare(a.Key, b.Key) }

func (g *groupMetrics) lookAt(group string, ch *groupChanges, revision int64, keys, topics []registry.KV) {
	g.mu.Lock()
	defer g.mu.Unlock()
	t := g.tracked[group]
	if t == nil {
		if len(keys) == 0 {
			return
		}
		// A group keeps its name as long as it is known, so that its counters never jump.
		t = &trackedGroup{painter: groups.NewPainter(g.root, group), shown: g.shown < maxShownGroups && utf8.ValidString(group)}
		if t.shown {
			g.shown++
		}
		g.tracked[group] = t
		if ch.news {
			nobody, _ := t.painter.Paint(revision, nil, topics)
			t.tracker.Step(ch.from, ch.from, nobody)
		}
	}
	seen := t.tracker.Picture() != nil
	for _, o := range ch.owners {
		t.tracker.Owner(o.at, o.partition, o.exists)
		if o.claimed && seen {
			t.counts.claims++
		}
	}
	p, _ := t.painter.Paint(revision, keys, topics)
	for _, c := range t.tracker.Step(ch.from, ch.to, p) {
		if c.Cause != "" && c.Kind != groups.ChangeRebalancing {
			t.counts.count(c.Cause, 1)
			g.took.WithLabelValues(string(c.Cause)).Observe(c.Took.Seconds())
		}
	}
	if len(p.Members) > 0 {
		t.emptied = time.Time{}
	} else if t.emptied.IsZero() {
		t.emptied = ch.to
	}
}

// forget drops groups that have been empty for long.
func (g *groupMetrics) forget(now time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for group, t := range g.tracked {
		switch {
		case t.emptied.IsZero() || now.Sub(t.emptied) <= forgetAfter:
			continue
		case t.shown:
			g.shown--
		default:
			g.rest.add(t.now(now).groupCounts)
			g.together = true
		}
		delete(g.tracked, group)
	}
}

// Describe implements prometheus.Collector.
func (g *groupMetrics) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{g.members, g.owned, g.ownerless, g.rebalancing, g.gaps, g.rebalances, g.claims} {
		to <- d
	}
}

// groupNow is how one group stands, or some together.
type groupNow struct {
	members, owned, ownerless, rebalancing int
	groupCounts
}

// Collect implements prometheus.Collector.
func (g *groupMetrics) Collect(to chan<- prometheus.Metric) {
	now := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	var rest groupNow
	rest.add(g.rest)
	together := g.together
	for group, t := range g.tracked {
		n := t.now(now)
		if t.shown {
			g.collect(to, group, n)
			continue
		}
		together = true
		rest.members += n.members
		rest.owned += n.owned
		rest.ownerless += n.ownerless
		rest.rebalancing += n.rebalancing
		rest.add(n.groupCounts)
	}
	if together {
		g.collect(to, "", rest)
	}
}

func (t *trackedGroup) now(now time.Time) (n groupNow) {
	p := t.tracker.Picture()
	n.members, n.owned = len(p.Members), len(p.Owners)
	n.groupCounts = t.counts
	n.ownerless, n.gaps = t.tracker.Ownerless(now)
	if s := t.tracker.State(); s == groups.StateMoving || s == groups.StateOwnerless {
		n.rebalancing = 1
	}
	return n
}

func (g *groupMetrics) collect(to chan<- prometheus.Metric, group string, n groupNow) {
	send := func(d *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, kind, v, append([]string{group}, labels...)...)
	}
	send(g.members, prometheus.GaugeValue, float64(n.members))
	send(g.owned, prometheus.GaugeValue, float64(n.owned))
	send(g.ownerless, prometheus.GaugeValue, float64(n.ownerless))
	send(g.rebalancing, prometheus.GaugeValue, float64(n.rebalancing))
	send(g.gaps, prometheus.CounterValue, n.gaps.Seconds())
	send(g.claims, prometheus.CounterValue, float64(n.claims))
	for _, cause := range groups.Causes() {
		send(g.rebalances, prometheus.CounterValue, float64(n.rebalances[cause]), string(cause))
	}
}
