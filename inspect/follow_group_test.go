package inspect

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/muster-io/muster/rebalance/groups"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

const watchedGroup = "g"

func put(t *testing.T, st registry.Store, key, value string, lease registry.LeaseID) {
	t.Helper()
	if _, err := st.Txn(t.Context(), registry.Txn{Then: []registry.Op{registry.Put(key, []byte(value), lease)}}); err != nil {
		t.Error(err)
	}
}

// watchable is a group with one member, and a topic of so many partitions.
func watchable(t *testing.T, partitions int) (st registry.Store, claim func(n int)) {
	t.Helper()
	st = memory.New()
	lease, err := st.Grant(t.Context(), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for n := range partitions {
		list = append(list, fmt.Sprintf(`"%d":[1]`, n))
	}
	put(t, st, registry.Root("").Topic("t"), `{"version":1,"partitions":{`+strings.Join(list, ",")+`}}`, 0)
	paths := registry.Root("").Group(watchedGroup)
	put(t, st, paths.ID("a"), `{"version":1,"subscription":{"t":1},"pattern":"static","timestamp":"1","strategy":["range"]}`, lease.ID)
	return st, func(n int) {
		put(t, st, paths.Owner(registry.Partition{Topic: "t", Home: 1, Number: int32(n)}), "a-0", lease.ID)
	}
}

// After a look that was dear the next one is put off, and what has happened until
// then is told by it.
func TestLooksAtAGroupArePutOff(t *testing.T) {
	st, claim := watchable(t, 3)
	paths := registry.Root("").Group(watchedGroup)
	g := &groupTeller{queue: queue{kick: make(chan struct{}, 1)}, group: watchedGroup, paths: paths, painter: groups.NewPainter("", watchedGroup)}
	seen := make(chan int64, 10)
	view, err := registry.OpenView(t.Context(), st, []string{registry.Root("").Topics(), paths.IDs(), paths.Owners(), paths.Target(), paths.History()},
		registry.ViewOptions{}, func(s registry.Snapshot, events []registry.Event) { g.change(s, events); seen <- s.Revision })
	if err != nil {
		t.Fatal(err)
	}
	defer view.Close()
	<-seen
	told := func() (texts []string) {
		items, _ := g.take()
		for _, it := range items {
			text, _, _ := strings.Cut(strings.ReplaceAll(it.line.Text, "group=g ", ""), " (lease")
			text, _, _ = strings.Cut(text, " after")
			texts = append(texts, text)
		}
		return texts
	}
	expect := func(want ...string) {
		t.Helper()
		if got := told(); strings.Join(got, "\n") != strings.Join(want, "\n") {
			t.Errorf("told\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}
	claim(0)
	<-seen
	g.begin(view.Snapshot())
	expect("ownerless: 1 members, strategy range, 0 of 3 partitions owned", "rebalancing: it was under way", "topic=t partition=1-0 claimed by a-0")
	now := time.Now()
	if pause := g.look(now.Add(-time.Hour)); pause != 0 { // which took an hour
		t.Errorf("the first look is put off by %s", pause)
	}
	claim(1)
	<-seen
	claim(2)
	<-seen
	pause := g.look(now)
	if pause < 9*time.Hour || pause > 11*time.Hour {
		t.Errorf("the second look is put off by %s", pause)
	}
	expect("topic=t partition=1-1 claimed by a-0", "topic=t partition=1-2 claimed by a-0")
	if again := g.look(now.Add(pause)); again != 0 {
		t.Errorf("put off by another %s", again)
	}
	expect("stable")
	if pause := g.look(now); pause != 0 {
		t.Errorf("%s until a look at nothing new", pause)
	}
}

// However fast a big group changes, how it stands in the end is told.
func TestTheEndOfAStormIsTold(t *testing.T) {
	const partitions = 1000
	st, claim := watchable(t, partitions)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	f := GroupFollower{Store: st, Group: watchedGroup, Started: func(int64) {
		go func() {
			for n := range partitions {
				claim(n)
			}
		}()
	}}
	claimed, stable := 0, 0
	err := f.Follow(ctx, func(_ time.Time, l Line) bool {
		if l.Kind == KindClaimed {
			claimed++
		}
		if l.Kind == "group-"+string(groups.ChangeStable) {
			stable++
		}
		return stable == 0
	})
	if err != nil || claimed != partitions || stable != 1 {
		t.Errorf("%d claims told, stable %d times, error %v", claimed, stable, err)
	}
}
