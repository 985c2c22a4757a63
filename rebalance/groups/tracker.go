package groups

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// Tracker follows one group and tells what happens to it as a whole: when it begins
// to rebalance and why, when it is stable again, which partitions nobody owns and
// for how long. It is a state machine: times and Pictures go in, Changes come out.
// The zero value has seen nothing yet.
type Tracker struct {
	picture *Picture
	places  []Place
	state   State

	began time.Time // of the rebalance under way; zero if there is none
	cause rebalance.CauseKind
	owned map[registry.Partition]Owner // before it

	gaps   map[registry.Partition]*gap
	closed time.Duration // of gaps that are over
	over   []ending      // gaps that were told of, not yet told to be over
}

type ending struct {
	registry.Partition
	took time.Duration
}

// gap is the time in which a partition that the group subscribes to has no owner key.
type gap struct {
	since  time.Time
	before string // of its owner before
	told   int    // how many of gapTold
}

// gapTold is after how long a partition without an owner is told of, and again.
var gapTold = []time.Duration{time.Second, 10 * time.Second, time.Minute, 10 * time.Minute, time.Hour}

// Causes of a rebalance that no difference of two Pictures tells.
const (
	CauseOwners rebalance.CauseKind = "owners_changed" // owner keys were written or deleted, and nothing else happened
	CauseFound  rebalance.CauseKind = "found"          // it was under way when the group was first seen
)

// Causes are all that a rebalance can have.
func Causes() []rebalance.CauseKind { return append(rebalance.CauseKinds(), CauseOwners, CauseFound) }

// ChangeKind tells what a GroupChange is.
type ChangeKind string

// Kinds of a GroupChange.
const (
	ChangeState       ChangeKind = "state" // how it stands where nothing has changed yet
	ChangeRebalancing ChangeKind = "rebalancing"
	ChangeStable      ChangeKind = "stable"
	ChangeEmpty       ChangeKind = "empty"
	ChangeStrategy    ChangeKind = "strategy"
	ChangeRefused     ChangeKind = "refused"
	ChangeDivided     ChangeKind = "divided" // it was refused before
	ChangeOwnerless   ChangeKind = "ownerless"
	ChangeOwned       ChangeKind = "owned" // it was told to be ownerless before
)

// GroupChange is something that happened to a group as a whole.
type GroupChange struct {
	Kind     ChangeKind
	Revision int64
	Text     string
	Cause    rebalance.CauseKind // of a rebalance
	Took     time.Duration       // a rebalance that is over, or a partition without an owner so far
	Topic    string              // of partitions without an owner
	Numbers  []int32
}

// Owner takes in that a partition's owner key came or went, so that gaps between two
// Steps count too.
func (t *Tracker) Owner(at time.Time, p registry.Partition, exists bool) {
	if t.picture == nil {
		return
	}
	if g := t.gaps[p]; g != nil && exists {
		t.close(at, p)
	} else if g == nil && !exists && t.picture.subscribed(p) {
		t.open(at, p, t.picture)
	}
}

func (t *Tracker) open(at time.Time, p registry.Partition, now *Picture) {
	if t.gaps == nil {
		t.gaps = map[registry.Partition]*gap{}
	}
	g := &gap{since: at}
	if t.picture != nil {
		if o, owned := t.picture.Owners[p]; owned {
			g.before = "owned by " + o.Value + " before"
			if _, there := now.Members[o.Member]; !there && o.Member != "" {
				g.before += ", which is gone"
			}
		}
	}
	t.gaps[p] = g
}

func (t *Tracker) close(at time.Time, p registry.Partition) {
	took := max(at.Sub(t.gaps[p].since), 0)
	t.closed += took
	if t.gaps[p].told > 0 {
		t.over = append(t.over, ending{p, took})
	}
	delete(t.gaps, p)
}

// Step takes in how the group stands, after changes that happened from one time to
// another.
func (t *Tracker) Step(from, to time.Time, p *Picture) []GroupChange {
	places := p.Places()
	state := p.State(places)
	var out []GroupChange
	say := func(c GroupChange) {
		c.Revision = p.Revision
		out = append(out, c)
	}
	before := t.picture
	cause, why := t.difference(p)
	if before != nil {
		if was, is := before.Strategy(), p.Strategy(); was != is && was != "" && is != "" {
			say(GroupChange{Kind: ChangeStrategy, Text: fmt.Sprintf("strategy %s, was %s", is, was)})
		}
	}
	wasRefused := before != nil && before.Refusal != nil
	if p.Refusal != nil && (!wasRefused || before.Refusal.Error() != p.Refusal.Error()) {
		say(GroupChange{Kind: ChangeRefused, Text: "cannot be divided: " + p.Refusal.Error()})
	}
	if wasRefused && p.Refusal == nil {
		say(GroupChange{Kind: ChangeDivided, Text: "can be divided again"})
	}
	restless := state == StateOwnerless || state == StateMoving
	moved := before != nil && t.began.IsZero() && tokensDiffer(before.Owners, p.Owners)
	if t.began.IsZero() && len(p.Members) > 0 && p.Refusal == nil && (restless || moved) {
		t.began, t.cause, t.owned = from, cause, map[registry.Partition]Owner{}
		if before != nil {
			t.owned = before.Owners
		}
		say(GroupChange{Kind: ChangeRebalancing, Cause: cause, Text: "rebalancing: " + why})
	} else if !t.began.IsZero() && cause != CauseOwners && cause != rebalance.CauseTarget { // which follow from what was told
		if t.cause == CauseOwners {
			t.cause = cause // whoever leaves in order releases first
		}
		say(GroupChange{Kind: ChangeRebalancing, Cause: t.cause, Text: "rebalancing anew: " + why})
	}
	out = append(out, t.settleGaps(from, to, p, places)...)
	if !t.began.IsZero() && !restless {
		took := max(to.Sub(t.began), 0)
		c := GroupChange{Kind: ChangeStable, Cause: t.cause, Took: took}
		c.Text = fmt.Sprintf("stable after %s: %d of %d partitions changed owners", seconds(took), changed(t.owned, p.Owners), len(p.Owners))
		if state == StateEmpty || state == StateRefused {
			c.Kind, c.Text = ChangeEmpty, "no members are left"
			if state == StateRefused {
				c.Kind, c.Text = ChangeRefused, "the rebalance is given up after "+seconds(took)
			}
		}
		say(c)
		t.began, t.owned = time.Time{}, nil
	} else if state == StateEmpty && before != nil && t.state != StateEmpty {
		say(GroupChange{Kind: ChangeEmpty, Text: "no members are left"})
	}
	t.picture, t.places, t.state = p, places, state
	return out
}

func tokensDiffer(a, b map[registry.Partition]Owner) bool {
	return !maps.EqualFunc(a, b, func(x, y Owner) bool { return x.Token == y.Token })
}

// changed counts the partitions that are not owned as they were.
func changed(before, now map[registry.Partition]Owner) int {
	n := 0
	for p, o := range now {
		if before[p].Value != o.Value {
			n++
		}
	}
	return n
}

// settleGaps opens and closes what Owner could not know of.
func (t *Tracker) settleGaps(from, to time.Time, p *Picture, places []Place) []GroupChange {
	ownerless := map[registry.Partition]bool{}
	for _, pl := range places {
		if pl.Standing == StandingOwnerless {
			ownerless[pl.Partition] = true
			if t.gaps[pl.Partition] == nil {
				t.open(from, pl.Partition, p)
			}
		}
	}
	for partition := range maps.Clone(t.gaps) {
		if !ownerless[partition] {
			t.close(to, partition)
		}
	}
	slices.SortFunc(t.over, func(a, b ending) int { return registry.ComparePartitions(a.Partition, b.Partition) })
	var out []GroupChange
	for _, e := range t.over {
		if !p.subscribed(e.Partition) {
			continue
		}
		text := "owned again after " + seconds(e.took)
		if n := len(out); n > 0 && out[n-1].Topic == e.Topic && out[n-1].Text == text {
			out[n-1].Numbers = append(out[n-1].Numbers, e.Number)
			continue
		}
		out = append(out, GroupChange{Kind: ChangeOwned, Revision: p.Revision, Topic: e.Topic, Numbers: []int32{e.Number}, Took: e.took, Text: text})
	}
	t.over = nil
	return out
}

// Tick tells of the partitions that have had no owner for long, once they pass each
// of some lengths of time.
func (t *Tracker) Tick(now time.Time) []GroupChange {
	type key struct {
		topic, why string
		at         int
	}
	var order []key
	numbers := map[key][]int32{}
	for _, pl := range t.places {
		g := t.gaps[pl.Partition]
		if g == nil {
			continue
		}
		passed := 0
		for passed < len(gapTold) && now.Sub(g.since) >= gapTold[passed] {
			passed++
		}
		if passed <= g.told {
			continue
		}
		g.told = passed
		why := pl.Why
		if g.before != "" {
			why += "; " + g.before
		}
		k := key{pl.Topic, why, passed}
		if numbers[k] == nil {
			order = append(order, k)
		}
		numbers[k] = append(numbers[k], pl.Number)
	}
	var out []GroupChange
	for _, k := range order {
		out = append(out, GroupChange{Kind: ChangeOwnerless, Revision: t.picture.Revision, Topic: k.topic, Numbers: numbers[k],
			Took: gapTold[k.at-1], Text: fmt.Sprintf("ownerless for %s: %s", seconds(gapTold[k.at-1]), k.why)})
	}
	return out
}

// Ownerless is how many partitions that the group subscribes to have no owner now,
// and for how long partitions have had none, all added up.
func (t *Tracker) Ownerless(now time.Time) (partitions int, total time.Duration) {
	total = t.closed
	for _, g := range t.gaps {
		total += max(now.Sub(g.since), 0)
	}
	return len(t.gaps), total
}

// Picture is the newest one; nil before the first Step.
func (t *Tracker) Picture() *Picture { return t.picture }

// State of the group at the newest Step.
func (t *Tracker) State() State { return t.state }

// difference tells what a rebalance that begins with this Picture is due to.
func (t *Tracker) difference(p *Picture) (kind rebalance.CauseKind, text string) {
	if t.picture == nil {
		return CauseFound, "it was under way"
	}
	if kind = rebalance.KindOfCause(t.picture.Snapshot, p.Snapshot); kind == "" {
		return CauseOwners, "owner keys changed"
	}
	return kind, rebalance.Cause(t.picture.Snapshot, p.Snapshot)
}

// seconds shows a length of time for people.
func seconds(d time.Duration) string {
	if d < time.Second {
		return fmt.Sprintf("%d ms", d.Milliseconds())
	}
	return fmt.Sprintf("%.0f s", d.Seconds())
}
