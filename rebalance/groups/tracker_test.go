package groups_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/muster-io/muster/rebalance/groups"
	"github.com/muster-io/muster/registry"
)

// tracked is a stage that a Tracker looks at.
type tracked struct {
	*stage
	painter *groups.Painter
	tracker groups.Tracker
	now     time.Time
}

func newTracked(t *testing.T) *tracked {
	return &tracked{stage: newStage(t), painter: groups.NewPainter(root, "g"), now: time.UnixMilli(1796009600000)}
}

func (tr *tracked) paint() *groups.Picture {
	tr.t.Helper()
	keys, revision, err := registry.List(tr.t.Context(), tr.st, tr.paths.Prefix(), 0)
	if err != nil {
		tr.t.Fatal(err)
	}
	topics, _, err := registry.List(tr.t.Context(), tr.st, root.Topics(), revision)
	if err != nil {
		tr.t.Fatal(err)
	}
	p, bad := tr.painter.Paint(revision, keys, topics)
	if len(bad) > 0 {
		tr.t.Fatal(bad)
	}
	return p
}

// tells lets time pass and wants what the Tracker then tells of how the group stands.
func (tr *tracked) tells(after time.Duration, want ...string) {
	tr.t.Helper()
	tr.now = tr.now.Add(after)
	tr.told(tr.tracker.Step(tr.now, tr.now, tr.paint()), want...)
}

// ticks lets time pass in which nothing changes.
func (tr *tracked) ticks(after time.Duration, want ...string) {
	tr.t.Helper()
	tr.now = tr.now.Add(after)
	tr.told(tr.tracker.Tick(tr.now), want...)
}

func (tr *tracked) told(changes []groups.GroupChange, want ...string) {
	tr.t.Helper()
	var got []string
	for _, c := range changes {
		text := string(c.Kind) + ": "
		if c.Topic != "" {
			text += fmt.Sprintf("%s %v ", c.Topic, c.Numbers)
		}
		if c.Cause != "" {
			text += "(" + string(c.Cause) + ") "
		}
		got = append(got, text+c.Text)
	}
	if !slices.Equal(got, want) {
		tr.t.Errorf("told\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func (tr *tracked) ownerless(partitions int, total time.Duration) {
	tr.t.Helper()
	if n, d := tr.tracker.Ownerless(tr.now); n != partitions || d != total {
		tr.t.Errorf("%d partitions for %s, want %d for %s", n, d, partitions, total)
	}
}

const second = time.Second

func TestTracker(t *testing.T) {
	tr := newTracked(t)
	tr.topic("t", 2)
	tr.tells(0)
	tr.member("a", byRange, map[string]int32{"t": 1})
	tr.tells(second, "rebalancing: (member_joined) rebalancing: member a joined")
	tr.own("a", 0, "t", 0, 1)
	tr.tells(second, "stable: (member_joined) stable after 1 s: 2 of 2 partitions changed owners")
	tr.ownerless(0, 2*second)

	// One that gets nothing moves nothing; one that gets something does.
	tr.member("c", byRange, map[string]int32{"t": 1})
	tr.tells(second, "rebalancing: (member_joined) rebalancing: member c joined")
	tr.disown("t", 1)
	tr.tells(second)
	tr.own("c", 0, "t", 1)
	tr.tells(second, "stable: (member_joined) stable after 2 s: 1 of 2 partitions changed owners")
	tr.member("d", byRange, map[string]int32{"t": 1})
	tr.tells(second)
	tr.ownerless(0, 3*second)

	// It leaves in order: it releases, then it is gone.
	tr.disown("t", 1)
	tr.tells(second, "rebalancing: (owners_changed) rebalancing: owner keys changed")
	tr.dies("c")
	tr.tells(second, "rebalancing: (member_left) rebalancing anew: member c left")
	tr.ticks(4*second, "ownerless: t [1] ownerless for 1 s: d-0 is due it and has not claimed it; owned by c-0 before")
	tr.ticks(4 * second)
	tr.ticks(second, "ownerless: t [1] ownerless for 10 s: d-0 is due it and has not claimed it; owned by c-0 before")
	tr.ownerless(1, 13*second)
	tr.own("d", 0, "t", 1)
	tr.tracker.Owner(tr.now.Add(second), partition("t", 1), true)
	tr.tells(second, "owned: t [1] owned again after 11 s", "stable: (member_left) stable after 11 s: 1 of 2 partitions changed owners")
	tr.ownerless(0, 14*second)

	tr.topic("t", 3)
	tr.tells(second, "rebalancing: (topics_changed) rebalancing: topic t has 3 partitions, had 2")
	tr.disown("t", 1)
	tr.own("a", 0, "t", 1)
	tr.own("d", 0, "t", 2)
	tr.tells(second, "stable: (topics_changed) stable after 1 s: 2 of 3 partitions changed owners")

	// A session that ends takes everything at once.
	tr.dies("d")
	tr.tells(second, "rebalancing: (member_left) rebalancing: member d left")
	tr.ticks(second, "ownerless: t [2] ownerless for 1 s: a-0 is due it and has not claimed it; owned by d-0 before, which is gone")
	tr.dies("a")
	tr.tells(second, "rebalancing: (member_left) rebalancing anew: member a left", "empty: (member_left) no members are left")
	tr.ownerless(0, 17*second)
}

// What came and went between two looks counts all the same.
func TestTrackerBetweenLooks(t *testing.T) {
	tr := newTracked(t)
	tr.topic("t", 2)
	tr.member("a", byRange, map[string]int32{"t": 1})
	tr.member("b", byRange, map[string]int32{"t": 1})
	tr.own("a", 0, "t", 0)
	tr.own("b", 0, "t", 1)
	tr.tells(0)
	from := tr.now
	tr.disown("t", 1)
	tr.tracker.Owner(from.Add(second), partition("t", 1), false)
	tr.dies("b")
	tr.own("a", 0, "t", 1)
	tr.now = from.Add(3 * second)
	tr.tracker.Owner(tr.now, partition("t", 1), true)
	tr.told(tr.tracker.Step(from.Add(second), tr.now, tr.paint()), "rebalancing: (member_left) rebalancing: member b left",
		"stable: (member_left) stable after 2 s: 1 of 2 partitions changed owners")
	tr.ownerless(0, 2*second)
}

func TestTrackerOfStrategies(t *testing.T) {
	tr := newTracked(t)
	tr.topic("t", 1)
	tr.topic("u", 1)
	tr.member("a", []string{"roundrobin", "range"}, map[string]int32{"t": 1})
	tr.own("a", 0, "t", 0)
	tr.tells(0)
	tr.member("b", []string{"roundrobin"}, map[string]int32{"u": 1})
	p := tr.paint()
	tr.tells(second, "refused: cannot be divided: "+p.Refusal.Error())
	tr.dies("b")
	tr.tells(second, "divided: can be divided again")
	tr.member("c", []string{"range"}, map[string]int32{"u": 1})
	tr.tells(second, "strategy: strategy range, was roundrobin", "rebalancing: (strategy_changed) rebalancing: strategy changed to range; member c joined")
}

// Whatever happens, the time without owners never goes back, no more is counted than
// can be, and a rebalance that began ends when the group is stable.
func TestTrackerAtRandom(t *testing.T) {
	for seed := range uint64(300) {
		rnd := rand.New(rand.NewPCG(seed, 5))
		tr := newTracked(t)
		tr.topic("t", 3)
		var last time.Duration
		under := false
		for range 60 {
			switch id := string(rune('a' + rnd.IntN(3))); rnd.IntN(6) {
			case 0:
				tr.member(id+fmt.Sprint(rnd.IntN(1000)), byRange, map[string]int32{"t": 1})
			case 1:
				if ids := slices.Sorted(maps.Keys(tr.leases)); len(ids) > 0 {
					id := ids[rnd.IntN(len(ids))]
					tr.dies(id)
					delete(tr.leases, id)
				}
			case 2:
				tr.disown("t", int32(rnd.IntN(3)))
			default:
				for _, pl := range tr.paint().Places() {
					if id, _, ok := strings.Cut(pl.Due, "-"); ok && pl.Standing != groups.StandingRight {
						tr.disown("t", pl.Number)
						tr.own(id, 0, "t", pl.Number)
					}
				}
			}
			tr.now = tr.now.Add(time.Duration(rnd.IntN(1000)) * time.Millisecond)
			p := tr.paint()
			for _, c := range tr.tracker.Step(tr.now, tr.now, p) {
				switch c.Kind {
				case groups.ChangeRebalancing:
					under = true
				case groups.ChangeStable, groups.ChangeEmpty:
					under = false
				}
			}
			state := p.State(p.Places())
			if under != (state == groups.StateOwnerless || state == groups.StateMoving) {
				t.Fatalf("seed %d: rebalancing %v in state %s", seed, under, state)
			}
			n, total := tr.tracker.Ownerless(tr.now)
			if total < last || n > 3 || (n > 0) != (state == groups.StateOwnerless) {
				t.Fatalf("seed %d: %d partitions for %s, before %s, in state %s", seed, n, total, last, state)
			}
			last = total
		}
	}
}
