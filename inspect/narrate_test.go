package inspect_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-io/muster/inspect"
	"github.com/muster-io/muster/registry"
)

// follow starts to follow a path and returns what takes the lines told so far.
func follow(t *testing.T, w *world, path string) (told func() []inspect.Line) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	started, done := make(chan struct{}), make(chan error, 1)
	var lines []inspect.Line // touched by emit, and by told while all are blocked
	go func() {
		f := inspect.Follower{Store: w.st, Root: root, Path: path, Started: func(int64) { close(started) }}
		done <- f.Follow(ctx, func(_ time.Time, l inspect.Line) bool { lines = append(lines, l); return true })
	}()
	<-started
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return func() []inspect.Line {
		time.Sleep(time.Second)
		synctest.Wait()
		taken := lines
		lines = nil
		return taken
	}
}

func TestNarration(t *testing.T) {
	const ids, owners, offsets = "/consumers/shop/ids/", "/consumers/shop/owners/orders/", "/consumers/shop/offsets/orders/"
	const record = `{"version":1,"subscription":{"orders":2},"pattern":"static","timestamp":"1"}`
	var second registry.LeaseID
	steps := []struct {
		do   func(w *world)
		want []string // kind: text; an asterisk before details
	}{
		{func(w *world) { second = w.grant(); w.put(ids+"node-b:1", record, second) },
			[]string{"joined: group=shop member=node-b:1 joined (lease 3): orders, streams 2"}},
		{func(w *world) { w.del(owners + "1-1") },
			[]string{"released: group=shop topic=orders partition=1-1 released by " + memberID + "-0"}},
		{func(w *world) { w.put(owners+"1-1", "node-b:1-0", second) },
			[]string{"claimed: group=shop topic=orders partition=1-1 claimed by node-b:1-0 (lease 3)"}},
		{func(w *world) { w.put(owners+"1-1", "node-b:1-0", 0) },
			[]string{"owner-rewritten: group=shop topic=orders partition=1-1 owner key rewritten: node-b:1-0 without a lease, was node-b:1-0"}},
		{func(w *world) { w.put(owners+"1-1", "node-b:1-0", second) },
			[]string{"owner-rewritten: group=shop topic=orders partition=1-1 owner key rewritten: node-b:1-0 (lease 3), was node-b:1-0"}},
		{func(w *world) { w.put(offsets+"1-1", "57", 0) },
			[]string{"*committed: group=shop topic=orders partition=1-1 committed offset 5 -> 57"}},
		{func(w *world) { w.put(offsets+"1-7", "0", 0) },
			[]string{"*committed: group=shop topic=orders partition=1-7 committed offset 0"}},
		{func(w *world) { w.put(offsets+"1-7", "x\ty", 0) },
			[]string{`offset-unreadable: group=shop topic=orders partition=1-7 offset cannot be read: "x\ty"`}},
		{func(w *world) { w.del(offsets + "1-7") },
			[]string{`offset-deleted: group=shop topic=orders partition=1-7 offset "x\ty" deleted`}},
		{func(w *world) { w.st.Expire(second) }, []string{
			"session-ended: group=shop member=node-b:1 lost: its session ended, lease 3 expired or was revoked",
			"lost: group=shop topic=orders partition=1-1 lost by node-b:1-0: its session ended"}},
		{func(w *world) { l := w.grant(); w.put(ids+"c%20d", record, l); w.st.Expire(l) }, []string{
			"joined: group=shop member=c d joined (lease 4): orders, streams 2", "left: group=shop member=c d left (lease 4)"}},
		{func(w *world) { w.put(ids+"zz", "{}", 0) },
			[]string{"member-unreadable: group=shop member=zz wrote a registration that cannot be read without a lease"}},
		{func(w *world) { w.put("/brokers/ids/2", `{"version":1,"host":"::1","port":9093}`, w.member) },
			[]string{"broker-registered: broker=2 registered at ::1 port 9093 (lease 2)"}},
		{func(w *world) { w.del("/brokers/ids/2") },
			[]string{"broker-gone: broker=2 gone: it stopped, or its session ended (lease 2)"}},
		{func(w *world) { create(w.t, w.st, "new", 1) }, []string{
			"topic-created: topic=new created with 1 partitions", "*config-changed: topic=new has no settings of its own",
			"*state-written: topic=new partition=0 led by broker 1, epoch 0, in sync [1]"}},
		{func(w *world) {
			if _, err := registry.AddPartitions(w.t.Context(), w.st, root, "new", 2, []int32{1}); err != nil {
				w.t.Fatal(err)
			}
		}, []string{"partitions-added: topic=new 1 partitions added: 1 -> 2",
			"*state-written: topic=new partition=1 led by broker 1, epoch 0, in sync [1]"}},
		{func(w *world) {
			w.put("/config/topics/new", `{"version":1,"config":{"retention.ms":"5","a":"1"}}`, 0)
			w.put("/config/topics/new", `{"version":1,"config":{"retention.ms":"6"}}`, 0)
		}, []string{"config-changed: topic=new settings: a=1; retention.ms=5",
			"config-changed: topic=new settings: a removed, was 1; retention.ms 5 -> 6"}},
		{func(w *world) {
			w.put("/brokers/topics/orders/partitions/0/state", `{"version":1,"leader":2,"leader_epoch":1,"isr":[2]}`, 0)
			w.put("/brokers/topics/orders/partitions/0/state", `{"version":1,"leader":2,"leader_epoch":1,"isr":[2,3]}`, 0)
		}, []string{"leader-changed: topic=orders partition=0 leader 1 -> 2, epoch 0 -> 1, in sync [2]",
			"in-sync-changed: topic=orders partition=0 in sync [2] -> [2 3]"}},
		{func(w *world) { w.put("/brokers/topics/orders/1", "3", w.broker) }, []string{"*count-written: topic=orders broker=1 states 3 partitions"}},
		{func(w *world) {
			if _, err := registry.DeleteTopic(w.t.Context(), w.st, root, "new", registry.DeleteOptions{KeepOffsets: true}); err != nil {
				w.t.Fatal(err)
			}
		}, []string{"topic-deleted: topic=new deleted", "deletion-begun: topic=new deletion begun; offsets are kept",
			"*state-deleted: topic=new partition=0 state deleted", "*state-deleted: topic=new partition=1 state deleted",
			"config-deleted: topic=new settings deleted", "deletion-finished: topic=new deletion finished"}},
		{func(w *world) {
			w.put("/consumers/shop/target", `{"version":1,"revision":3,"strategy":"sticky","members":["a"],"streams":[1],"topics":{"orders":{"created":1,"homes":[1],"owners":[0]}}}`, 0)
			w.put("/consumers/shop/target", "x", 0)
			w.del("/consumers/shop/target")
		}, []string{"target-written: group=shop is to be divided anew: 1 members, 1 topics", "target-unreadable: group=shop target cannot be read", "target-deleted: group=shop target deleted"}},
		{func(w *world) {
			w.put("/consumers/shop/history/1", `{"version":1,"timestamp":"1","member":"c d","action":"claimed","partitions":{"orders":["1-0","1-1"]},"reason":"joined"}`, 0)
			w.put("/consumers/shop/history/2", "x", 0)
			w.del("/consumers/shop/history/1")
		}, []string{"*history-written: group=shop member=c d claimed 2 partitions: joined", "history-unreadable: group=shop entry of history cannot be read", "*history-deleted: group=shop entry of history deleted"}},
		{func(w *world) { w.put("/consumers/shop/offsets/orders/3", "5", 0) }, []string{"created: /consumers/shop/offsets/orders/3 = 5"}},
		{func(w *world) { w.put("/else/where", "a\x1bb", 0); w.del("/else/where") },
			[]string{`created: /else/where = "a\x1bb"`, "deleted: /else/where deleted"}},
	}
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		told := follow(t, w, "")
		if got := told(); len(got) != 0 {
			t.Fatalf("what was there before is told: %v", got)
		}
		for _, s := range steps {
			s.do(w)
			var got []string
			for _, l := range told() {
				text := l.Kind + ": " + l.Text
				if l.Detail {
					text = "*" + text
				}
				got = append(got, text)
			}
			// Within a transaction the order is that of the keys or operations.
			if !sameSet(got, s.want) {
				t.Errorf("told\n  %s\nwant\n  %s", strings.Join(got, "\n  "), strings.Join(s.want, "\n  "))
			}
		}
	})
}

func sameSet(a, b []string) bool {
	count := map[string]int{}
	for _, s := range a {
		count[s]++
	}
	for _, s := range b {
		count[s]--
	}
	for _, n := range count {
		if n != 0 {
			return false
		}
	}
	return true
}

// Field case 07: whom an owner key names is found among the registered ids, also
// when they vanish together.
func TestNarrationResolvesOwners(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		const odd = "node-b-2:5c975c69-a251-4a52-9a6f-000000000012"
		record := `{"version":1,"subscription":{"t":1},"pattern":"static","timestamp":"1"}`
		told := follow(t, w, "/consumers")
		l := w.grant()
		w.put("/consumers/g/ids/"+odd, record, l)
		w.put("/consumers/g/owners/t/1-2", odd, l)
		w.put("/consumers/g/owners/t/1-3", "ghost-host-9", l)
		w.st.Expire(l)
		var got []string
		for _, l := range told() {
			if l.Owner != nil {
				got = append(got, fmt.Sprint(l.Kind, " ", *l.Owner, " ", l.Member != nil && *l.Member == odd))
			}
		}
		want := "claimed " + odd + " true, claimed ghost-host-9 false, lost " + odd + " true, lost ghost-host-9 false"
		if s := strings.Join(got, ", "); s != want {
			t.Errorf("%s\nwant %s", s, want)
		}
	})
}

// A path takes in what is below it, and not what only begins like it.
func TestFollowAPath(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		told := follow(t, w, "/consumers/shop/")
		w.put("/consumers/shop/offsets/orders/1-0", "6", 0)
		w.put("/consumers/shop2/offsets/orders/1-0", "6", 0)
		w.put("/brokers/ids/9", "6", 0)
		if got := told(); len(got) != 1 || got[0].Path != "/consumers/shop/offsets/orders/1-0" || *got[0].PreviousOffset != 5 || *got[0].Offset != 6 {
			t.Errorf("%+v", got)
		}
	})
}

// After a compaction of what was not read, the difference is told, and that it is one.
func TestFollowSaysWhatItMissed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		told := follow(t, w, "/consumers")
		w.st.HoldWatches(true)
		for n := range 10 {
			w.put("/consumers/shop/offsets/orders/1-0", fmt.Sprint(10+n), 0)
		}
		w.del("/consumers/shop/owners/orders/1-1")
		w.st.Compact(w.st.Revision())
		w.st.HoldWatches(false)
		var got []string
		for _, l := range told() {
			got = append(got, l.Kind+" "+l.Text)
		}
		want := []string{"released group=shop topic=orders partition=1-1 released by " + memberID + "-0",
			"committed group=shop topic=orders partition=1-0 committed offset 5 -> 19"}
		if len(got) != 3 || !sameSet(got[:2], want) || !strings.Contains(got[2], "missed history was compacted") {
			t.Errorf("told\n  %s", strings.Join(got, "\n  "))
		}
	})
}
