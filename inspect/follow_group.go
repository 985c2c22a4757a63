package inspect

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/muster-io/muster/rebalance/groups"
	"github.com/muster-io/muster/registry"
)

// GroupFollower tells what happens in one group, from now on: what its members do,
// as a Follower tells it, and how the group as a whole fares.
type GroupFollower struct {
	Store   registry.Store
	Root    registry.Root
	Group   string
	Offsets bool // tell of committed offsets too
	// Started, if not nil, is called with the revision after which all is told.
	Started func(revision int64)
}

// tickEvery is how often it is looked whether a partition has had no owner for long.
const tickEvery = 200 * time.Millisecond

// Follow gives each line to emit, as Follower.Follow does. The first one tells how the
// group stands.
func (f *GroupFollower) Follow(ctx context.Context, emit func(at time.Time, l Line) bool) error {
	if err := registry.ValidateGroupName(f.Group); err != nil {
		return fmt.Errorf("follow a group: %w", err)
	}
	paths := f.Root.Group(f.Group)
	g := &groupTeller{queue: queue{root: f.Root, kick: make(chan struct{}, 1)}, group: f.Group, paths: paths,
		painter: groups.NewPainter(f.Root, f.Group)}
	prefixes := []string{f.Root.Topics(), paths.IDs(), paths.Owners(), paths.Target(), paths.History()}
	if f.Offsets {
		prefixes = append(prefixes, paths.Offsets())
	}
	view, err := registry.OpenView(ctx, f.Store, prefixes, registry.ViewOptions{Stall: silenceLimit, Listener: g.fares}, g.change)
	if err != nil {
		return fmt.Errorf("read the registry: %w", err)
	}
	defer view.Close()
	begin := g.begin(view.Snapshot())
	if f.Started != nil {
		f.Started(begin)
	}
	tick := time.NewTicker(tickEvery)
	defer tick.Stop()
	var rested <-chan time.Time // nil unless a look was put off
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-g.kick:
		case now := <-tick.C:
			g.tellAll(g.tracker.Tick(now))
		case <-rested:
		}
		rested = nil
		if pause := g.look(time.Now()); pause > 0 {
			rested = time.After(pause)
		}
		items, full := g.take()
		for _, it := range items {
			if !emit(it.at, it.line) {
				return nil
			}
		}
		if full {
			return ErrSlowReader
		}
	}
}

// groupTeller is between the View of a group and the reader. What members do is told
// change by change; the group as a whole is looked at less often, when that is
// dear: a big one that rebalances changes faster than it is worth looking at.
type groupTeller struct {
	queue
	group string
	paths registry.GroupPaths

	// of Follow
	painter *groups.Painter
	tracker groups.Tracker
	lookAt  time.Time // not before

	unseenMu sync.Mutex
	first    *registry.Snapshot // how the group stood where nothing had changed yet
	begun    bool               // that was told
	early    []Line             // to be told after
	unseen   groupChanges
}

// groupChanges is what has happened since the group was looked at.
type groupChanges struct {
	snapshot *registry.Snapshot // the newest; nil if nothing has happened
	from, to time.Time
	owners   []ownerChange
}

type ownerChange struct {
	at        time.Time
	partition registry.Partition
	exists    bool
}

// lookPauseRatio keeps looking at the group to about a tenth of a processor.
const lookPauseRatio = 10

// begin tells how the group stands where nothing has changed yet, also if there is
// not a key of it. It returns the revision of that.
func (g *groupTeller) begin(s registry.Snapshot) int64 {
	g.unseenMu.Lock()
	if g.first == nil {
		g.first = &s
	}
	s = *g.first
	defer g.unseenMu.Unlock()
	now := time.Now()
	p := g.paint(s)
	due := 0
	for _, list := range p.Snapshot.Topology {
		due += len(list)
	}
	g.add(0, g.line(groups.GroupChange{Kind: groups.ChangeState, Revision: s.Revision, Text: fmt.Sprintf("%s: %d members, strategy %s, %d of %d partitions owned",
		p.State(p.Places()), len(p.Members), orNone(p.Strategy()), len(p.Owners), due)}))
	g.tellAll(g.tracker.Step(now, now, p))
	g.add(0, g.early...)
	g.begun, g.early = true, nil
	return s.Revision
}

// change takes in events of the View, which it must not hold up.
func (g *groupTeller) change(s registry.Snapshot, events []registry.Event) {
	g.unseenMu.Lock()
	defer g.unseenMu.Unlock()
	if g.first == nil {
		g.first = &s
		return
	}
	now := time.Now()
	reasons := map[int64]string{}
	var news []registry.Event
	for _, e := range events {
		switch {
		case strings.HasPrefix(e.Key, g.paths.History()):
			if rec, err := registry.ParseHistory(e.KV); err == nil && !e.Deleted {
				reasons[e.ModRevision] = rec.Reason
			}
		case strings.HasPrefix(e.Key, g.paths.Prefix()):
			news = append(news, e)
		}
		if p, err := g.paths.ParsePartition(e.Key); err == nil && strings.HasPrefix(e.Key, g.paths.Owners()) {
			g.unseen.owners = append(g.unseen.owners, ownerChange{now, p, !e.Deleted})
		}
	}
	there := func(key string) bool {
		return slices.ContainsFunc([]int{1, 2}, func(i int) bool { _, ok := s.Get(i, key); return ok })
	}
	lines := Narrate(g.root, news, there)
	for i, l := range lines {
		if reason := reasons[l.Revision]; reason != "" && (l.Kind == KindClaimed || l.Kind == KindReleased) {
			lines[i].Text += ": " + reason
			lines[i].Reason = &reason
		}
	}
	if g.unseen.snapshot == nil {
		g.unseen.from = now
	}
	g.unseen.snapshot, g.unseen.to = &s, now
	if !g.begun {
		g.early = append(g.early, lines...)
		lines = nil
	}
	g.add(s.Revision, lines...)
}

// look looks at the group if it has changed. If it was looked at just now, it returns
// how long that is to be put off instead.
func (g *groupTeller) look(now time.Time) (pause time.Duration) {
	g.unseenMu.Lock()
	if g.unseen.snapshot == nil || now.Before(g.lookAt) {
		defer g.unseenMu.Unlock()
		if g.unseen.snapshot != nil {
			pause = g.lookAt.Sub(now)
		}
		return pause
	}
	ch := g.unseen
	g.unseen = groupChanges{}
	g.unseenMu.Unlock()
	for _, o := range ch.owners {
		g.tracker.Owner(o.at, o.partition, o.exists)
	}
	g.tellAll(g.tracker.Step(ch.from, ch.to, g.paint(*ch.snapshot)))
	ended := time.Now()
	g.lookAt = ended.Add(lookPauseRatio * ended.Sub(now))
	return 0
}

func (g *groupTeller) paint(s registry.Snapshot) *groups.Picture {
	var keys []registry.KV
	for i := 1; i <= 3; i++ {
		keys = append(keys, s.Under(i)...)
	}
	p, _ := g.painter.Paint(s.Revision, keys, s.Under(0)) // what cannot be read is told when it is written
	return p
}

func (g *groupTeller) tellAll(changes []groups.GroupChange) {
	for _, c := range changes {
		g.add(0, g.line(c))
	}
}

func (g *groupTeller) line(c groups.GroupChange) Line {
	l := Line{Revision: c.Revision, Kind: "group-" + string(c.Kind), Path: strings.TrimSuffix(strings.TrimPrefix(g.paths.Prefix(), string(g.root)), "/"),
		Group: &g.group}
	where := "group=" + g.group + " "
	if c.Topic != "" {
		l.Topic = &c.Topic
		where += "topic=" + c.Topic + " partitions=" + numbers(c.Numbers) + " "
		if len(c.Numbers) == 1 {
			l.Partition = &c.Numbers[0]
		}
	}
	l.Text = where + c.Text
	return l
}

func orNone(text string) string {
	if text == "" {
		return "none"
	}
	return text
}

// numbers shows partitions, not all if they are many.
func numbers(list []int32) string {
	const most = 10
	var parts []string
	for _, n := range list[:min(len(list), most)] {
		parts = append(parts, strconv.Itoa(int(n)))
	}
	text := strings.Join(parts, ",")
	if len(list) > most {
		text += fmt.Sprintf(",… (%d)", len(list))
	}
	return text
}
