package storetest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/muster-io/muster/registry"
)

// what package registry makes of a group's history and target.
func historyCases() []Case {
	return []Case{
		{"claim/with history", claimHistory},
		{"claim/one held, the rest together", claimAroundAHolder},
		{"claim/held by several, one after the other", claimContended},
		{"claim/as many as fit", claimFits},
		{"claim/reply lost", claimReplyLost},
		{"claim/target", claimTarget},
		{"claim/two lives of a topic", claimTwoLives},
		{"release/with history", releaseHistory},
		{"release/taken away meanwhile", releaseContended},
		{"release/as many as fit", releaseFits},
		{"target", targetCase},
		{"history/prune", pruneCase},
		{"history/read", readHistoryCase},
	}
}

// notes is a Note that counts the entries, and remembers what each was asked for.
type notes struct {
	m     *member
	asked [][]string
}

func (n *notes) note(keys []string) (string, []byte) {
	n.asked = append(n.asked, slices.Clone(keys))
	return n.m.group.HistoryEntry(1, n.m.name, uint64(len(n.asked))), []byte(strings.Join(keys, " "))
}

// entries wants the group's history to have these values, each of the revision at
// which the keys that it names were written, and nothing else.
func (m *member) entries(want map[int64]string) {
	m.t.Helper()
	kvs, _, err := registry.List(within(m.t), m.st, m.group.History(), 0)
	if err != nil {
		m.t.Fatal(err)
	}
	got := map[int64]string{}
	for _, kv := range kvs {
		got[kv.CreateRevision] = string(kv.Value)
		if kv.Lease != 0 || kv.CreateRevision != kv.ModRevision {
			m.t.Errorf("entry %+v: want it written once and without a lease", kv)
		}
	}
	if !maps.Equal(got, want) {
		m.t.Fatalf("history %v, want %v", got, want)
	}
}

func (m *member) keys(partitions ...int) string {
	var keys []string
	for _, n := range partitions {
		keys = append(keys, m.owner(n))
	}
	return strings.Join(keys, " ")
}

// counting counts the transactions of a store, and runs something before some of them.
type counting struct {
	registry.Store
	txns   int
	before map[int]func() // by number, from 1
}

func (c *counting) Txn(ctx context.Context, t registry.Txn) (registry.TxnResult, error) {
	c.txns++
	if do := c.before[c.txns]; do != nil {
		do()
	}
	return c.Store.Txn(ctx, t)
}

// Keys that are free are claimed in one transaction, and their entry is of the same
// one: a key that was there before is not in it.
func claimHistory(t *testing.T, st registry.Store, prefix string) {
	a := join(t, st, prefix, "a")
	n := &notes{m: a}
	counted := &counting{Store: st}
	results, revision, err := registry.Claim(within(t), counted, a.s.Lease(), a.guard(), a.claims(0, 1, 2), n.note)
	if err != nil || counted.txns != 1 {
		t.Fatalf("%d transactions, error %v", counted.txns, err)
	}
	for i, r := range results {
		if r.Token != revision || r.Revision != revision || r.Holder != nil || string(r.Value) != "a-0" || get(t, st, a.owner(i)).CreateRevision != revision {
			t.Errorf("claim %d: %+v at revision %d", i, r, revision)
		}
	}
	a.entries(map[int64]string{revision: a.keys(0, 1, 2)})
	// Again, with one more: only that one is news.
	_, second, err := registry.Claim(within(t), st, a.s.Lease(), a.guard(), a.claims(0, 1, 2, 3), n.note)
	if err != nil {
		t.Fatal(err)
	}
	a.entries(map[int64]string{revision: a.keys(0, 1, 2), second: a.keys(3)})
	// All are ours already: nothing is written at all.
	if _, third, err := registry.Claim(within(t), st, a.s.Lease(), a.guard(), a.claims(0, 1, 2, 3), n.note); err != nil || third != second {
		t.Errorf("a claim of what is ours is of revision %d, want still %d; error %v", third, second, err)
	}
	// A stale claim leaves no entry, and a note may have nothing to say.
	stale := a.guard()
	stale.Snapshot = a.reg.Revision - 1
	_, _, err = registry.Claim(within(t), st, a.s.Lease(), stale, a.claims(4), n.note)
	wantErr(t, err, registry.ErrStale)
	if _, _, err = registry.Claim(within(t), st, a.s.Lease(), a.guard(), a.claims(5), func([]string) (string, []byte) { return "", nil }); err != nil {
		t.Fatal(err)
	}
	a.entries(map[int64]string{revision: a.keys(0, 1, 2), second: a.keys(3)})
}

// A holder blocks only its own partition: the others are claimed together, and each
// result is of the transaction that decided it.
func claimAroundAHolder(t *testing.T, st registry.Store, prefix string) {
	a, b := join(t, st, prefix, "a"), join(t, st, prefix, "b")
	mine, theirs := a.claim(0)[0], b.claim(2)[0]
	n := &notes{m: a}
	var released int64
	counted := &counting{Store: st, before: map[int]func(){2: func() {
		// It is released before the second round; what that was for is news to the claimer.
		released = b.release(st, registry.OwnerRelease{Key: b.owner(2), Token: theirs.Token})
	}}}
	claims := a.claims(0, 1, 2, 3)
	claims[0].Value = []byte("a-7")
	results, revision, err := registry.Claim(within(t), counted, a.s.Lease(), a.guard(), claims, n.note)
	if err != nil || counted.txns != 2 || len(results) != 4 {
		t.Fatalf("%d transactions, %d results, error %v", counted.txns, len(results), err)
	}
	if r := results[0]; r.Holder != nil || r.Token != mine.Token || string(r.Value) != "a-0" || r.Revision >= released {
		t.Errorf("what was ours already: %+v", r)
	}
	if r := results[2]; r.Holder == nil || r.Holder.KV.CreateRevision != theirs.Token || r.Token != theirs.Token || r.Revision >= released {
		t.Errorf("what was held: %+v; it was released at %d", r, released)
	}
	for _, i := range []int{1, 3} {
		if r := results[i]; r.Holder != nil || r.Token != revision || r.Revision != revision {
			t.Errorf("free partition %d: %+v at %d", i, r, revision)
		}
	}
	a.entries(map[int64]string{revision: a.keys(1, 3)})
	a.owned(0, 1, 3)
}

// Others claim key after key in between: each round goes on with what is left, and
// ends when nothing is.
func claimContended(t *testing.T, st registry.Store, prefix string) {
	a, b := join(t, st, prefix, "a"), join(t, st, prefix, "b")
	n := &notes{m: a}
	counted := &counting{Store: st, before: map[int]func(){}}
	for i := range 3 {
		counted.before[i+1] = func() { b.claim(i) }
	}
	results, _, err := registry.Claim(within(t), counted, a.s.Lease(), a.guard(), a.claims(0, 1, 2), n.note)
	if err != nil || counted.txns != 3 {
		t.Fatalf("%d transactions, error %v", counted.txns, err)
	}
	for i, r := range results {
		if r.Holder == nil || string(r.Value) != "b-0" {
			t.Errorf("claim %d: %+v", i, r)
		}
	}
	a.entries(map[int64]string{})
	// The guard is looked at in each round, and a stale one leaves nothing.
	guard := a.guard()
	counted = &counting{Store: st, before: map[int]func(){1: func() { b.claim(3) }, 2: func() { join(t, st, prefix, "c") }}}
	_, _, err = registry.Claim(within(t), counted, a.s.Lease(), guard, a.claims(3, 4), n.note)
	wantErr(t, err, registry.ErrStale)
	a.owned(0, 1, 2, 3)
	a.entries(map[int64]string{})
}

// However many topics and conditions there are, no transaction is refused for its
// size, and as few are made as can be.
func claimFits(t *testing.T, st registry.Store, prefix string) {
	a, b := join(t, st, prefix, "a"), join(t, st, prefix, "b")
	root := registry.Root(strings.TrimSuffix(prefix, "/"))
	put(t, st, a.group.Target(), "x")
	topics := make([]int64, 130)
	for i := range topics {
		topics[i] = put(t, st, root.Topic(fmt.Sprint("t", i)), "x")
	}
	for _, c := range []struct{ keys, topics, txns int }{
		{120, 1, 1}, {121, 1, 2}, {118, 2, 1}, {119, 2, 2}, {40, 40, 1}, {41, 41, 2}, {130, 130, 4}, {122, 0, 1}, {123, 0, 2},
	} {
		var claims []registry.OwnerClaim
		for i := range c.keys {
			n := i % max(c.topics, 1)
			claim := registry.OwnerClaim{Key: a.group.Owner(registry.Partition{Topic: fmt.Sprint("t", n), Number: int32(i)}), Value: []byte("a-0")}
			if c.topics > 0 {
				claim.Topic, claim.Incarnation = root.Topic(fmt.Sprint("t", n)), topics[n]
			}
			claims = append(claims, claim)
		}
		guard := a.guard()
		guard.Target, guard.TargetRevision = a.group.Target(), get(t, st, a.group.Target()).ModRevision
		n := &notes{m: a}
		counted := &counting{Store: st}
		results, _, err := registry.Claim(within(t), counted, a.s.Lease(), guard, claims, n.note)
		if err != nil || len(results) != c.keys || counted.txns != c.txns {
			t.Fatalf("%d keys of %d topics: %d results in %d transactions, want %d; error %v", c.keys, c.topics, len(results), counted.txns, c.txns, err)
		}
		// The answer to a claim that fails is as large as can be.
		results, _, err = registry.Claim(within(t), st, b.s.Lease(), registry.Guard{Registration: b.reg, IDs: guard.IDs, Snapshot: guard.Snapshot,
			Target: guard.Target, TargetRevision: guard.TargetRevision}, claims, nil)
		if err != nil || len(results) != c.keys {
			t.Fatalf("%d keys of %d topics, all held: %d results, error %v", c.keys, c.topics, len(results), err)
		}
		var releases []registry.OwnerRelease
		for i, r := range results {
			if r.Holder == nil {
				t.Fatalf("claim %d: %+v", i, r)
			}
			releases = append(releases, registry.OwnerRelease{Key: claims[i].Key, Token: r.Token})
		}
		a.release(st, releases...)
		do(t, st, registry.Op{Kind: registry.OpDelete, Key: a.group.History(), Prefix: true})
	}
}

// Field case 01: a claim whose reply was lost is made again, among others: it changes
// nothing, and what is ours counts as ours.
func claimReplyLost(t *testing.T, st registry.Store, prefix string) {
	a, b := join(t, st, prefix, "a"), join(t, st, prefix, "b")
	lost := a.claim(0, 1)
	before := get(t, st, a.owner(0))
	results := a.claim(0, 1, 2)
	if r := results[0]; r.Holder != nil || r.Token != lost[0].Token || string(r.Value) != "a-0" {
		t.Errorf("claimed again: %+v, before %+v", r, lost[0])
	}
	if r := results[2]; r.Holder != nil || r.Token <= lost[0].Token {
		t.Errorf("claimed besides: %+v", r)
	}
	if after := get(t, st, a.owner(0)); fmt.Sprint(*after) != fmt.Sprint(*before) {
		t.Errorf("the key was touched: %+v, was %+v", after, before)
	}
	if r := b.claim(0)[0]; r.Holder == nil || r.Holder.KV.Lease != a.s.Lease() {
		t.Errorf("b's claim: %+v", r)
	}
}

// A claim is of the target record as it was seen, if it names one.
func claimTarget(t *testing.T, st registry.Store, prefix string) {
	a := join(t, st, prefix, "a")
	guard := a.guard()
	guard.Target = a.group.Target()
	claim := func(n int, want error) {
		t.Helper()
		results, _, err := registry.Claim(within(t), st, a.s.Lease(), guard, a.claims(n), nil)
		if !errors.Is(err, want) || (get(t, st, a.owner(n)) != nil) != (want == nil) {
			t.Fatalf("%+v, error %v, want %v", results, err, want)
		}
	}
	claim(0, nil) // there is none, as expected
	written := put(t, st, a.group.Target(), "x")
	claim(1, registry.ErrStale)
	guard.TargetRevision = written
	claim(1, nil)
	put(t, st, a.group.Target(), "y")
	claim(2, registry.ErrStale)
	do(t, st, registry.Delete(a.group.Target()))
	claim(2, registry.ErrStale)
	guard.Target = ""
	claim(2, nil)
}

// One claim of a topic that stands does not cover for another of its former life.
func claimTwoLives(t *testing.T, st registry.Store, prefix string) {
	a := join(t, st, prefix, "a")
	topic := prefix + "topic"
	created := put(t, st, topic, "x")
	claims := a.claims(0, 1)
	claims[0].Topic, claims[0].Incarnation = topic, created
	claims[1].Topic, claims[1].Incarnation = topic, created-1
	_, _, err := registry.Claim(within(t), st, a.s.Lease(), a.guard(), claims, nil)
	wantErr(t, err, registry.ErrStale)
	a.owned()
}

// What is released goes in one transaction with its entry, which names only what went.
func releaseHistory(t *testing.T, st registry.Store, prefix string) {
	a, b := join(t, st, prefix, "a"), join(t, st, prefix, "b")
	b.claim(1)
	mine := a.claim(0, 2, 3)
	n := &notes{m: a}
	revision, err := registry.Release(within(t), st, a.s.Lease(), []registry.OwnerRelease{
		{Key: a.owner(0), Token: mine[0].Token}, {Key: a.owner(1), Token: mine[0].Token}, {Key: a.owner(2)}, {Key: a.owner(9), Token: 1}}, n.note)
	if err != nil {
		t.Fatal(err)
	}
	a.owned(1, 3)
	a.entries(map[int64]string{revision: a.keys(0, 2)})
	counted := &counting{Store: st}
	last, err := registry.Release(within(t), counted, a.s.Lease(), []registry.OwnerRelease{{Key: a.owner(3), Token: mine[2].Token}}, n.note)
	if err != nil || counted.txns != 1 {
		t.Fatalf("%d transactions, error %v", counted.txns, err)
	}
	a.entries(map[int64]string{revision: a.keys(0, 2), last: a.keys(3)})
	// Again, after a lost reply: there is nothing to tell.
	if _, err := registry.Release(within(t), st, a.s.Lease(), []registry.OwnerRelease{{Key: a.owner(3), Token: mine[2].Token}}, n.note); err != nil {
		t.Fatal(err)
	}
	a.entries(map[int64]string{revision: a.keys(0, 2), last: a.keys(3)})
}

// Keys that are taken away between the rounds are left to whoever has them.
func releaseContended(t *testing.T, st registry.Store, prefix string) {
	a, b := join(t, st, prefix, "a"), join(t, st, prefix, "b")
	mine := a.claim(0, 1, 2)
	take := func(i int) func() {
		return func() {
			do(t, st, registry.Delete(a.owner(i)))
			b.claim(i)
		}
	}
	counted := &counting{Store: st, before: map[int]func(){1: take(0), 2: take(1)}}
	var releases []registry.OwnerRelease
	for i, r := range mine {
		releases = append(releases, registry.OwnerRelease{Key: a.owner(i), Token: r.Token})
	}
	n := &notes{m: a}
	revision, err := registry.Release(within(t), counted, a.s.Lease(), releases, n.note)
	if err != nil || counted.txns != 3 {
		t.Fatalf("%d transactions, error %v", counted.txns, err)
	}
	a.owned(0, 1)
	a.entries(map[int64]string{revision: a.keys(2)})
}

func releaseFits(t *testing.T, st registry.Store, prefix string) {
	a := join(t, st, prefix, "a")
	for _, c := range []struct{ keys, txns int }{{127, 1}, {128, 2}} {
		all := make([]int, c.keys)
		for i := range all {
			all[i] = i
		}
		var known, unknown []registry.OwnerRelease
		for i, r := range a.claim(all...) {
			known = append(known, registry.OwnerRelease{Key: a.owner(i), Token: r.Token})
			unknown = append(unknown, registry.OwnerRelease{Key: a.owner(i)})
		}
		n := &notes{m: a}
		counted := &counting{Store: st}
		if _, err := registry.Release(within(t), counted, a.s.Lease(), known, n.note); err != nil || counted.txns != c.txns {
			t.Fatalf("%d keys in %d transactions, want %d; error %v", c.keys, counted.txns, c.txns, err)
		}
		a.owned()
		a.claim(all...)
		if _, err := registry.Release(within(t), st, a.s.Lease(), unknown, n.note); err != nil {
			t.Fatal(err)
		}
		a.owned()
	}
}

// The target record is replaced by compare-and-swap, under the guard.
func targetCase(t *testing.T, st registry.Store, prefix string) {
	a := join(t, st, prefix, "a")
	key := a.group.Target()
	write := func(g registry.Guard, value string, replace int64, want error) int64 {
		t.Helper()
		before := get(t, st, key)
		revision, err := registry.WriteTarget(within(t), st, g, key, []byte(value), replace)
		if !errors.Is(err, want) {
			t.Fatalf("error %v, want %v", err, want)
		}
		kv := get(t, st, key)
		if want != nil {
			if fmt.Sprint(kv) == fmt.Sprint(before) || kv != nil && before != nil && kv.ModRevision == before.ModRevision {
				return 0
			}
			t.Fatalf("a refused proposal was written: %+v", kv)
		}
		if kv.ModRevision != revision || string(kv.Value) != value || kv.Lease != 0 {
			t.Fatalf("written at %d: %+v", revision, kv)
		}
		return revision
	}
	old := a.guard()
	write(old, "x", 1, registry.ErrStale) // there is none to replace
	first := write(old, "x", 0, nil)
	write(old, "y", 0, registry.ErrStale) // there is one by now: another member was first
	second := write(old, "y", first, nil)
	write(old, "z", first, registry.ErrStale)
	join(t, st, prefix, "b")
	write(old, "z", second, registry.ErrStale) // it would leave out b
	fresh := a.guard()
	do(t, st, registry.Delete(a.reg.Key))
	write(fresh, "z", second, registry.ErrStale)
	if _, err := registry.WriteTarget(within(t), st, fresh, key, nil, second); err == nil || errors.Is(err, registry.ErrStale) {
		t.Errorf("an empty record: error %v", err)
	}
}

// The newest entries stay, by the order of the transactions and not of the clocks.
func pruneCase(t *testing.T, st registry.Store, prefix string) {
	g := groupOf(prefix)
	const all = 300
	key := func(i int) string { return g.HistoryEntry(int64(1000-i), "m", uint64(i)) } // clocks run backwards
	for from := 0; from < all; from += 100 {
		for i := from; i < from+100; i++ {
			put(t, st, key(i), "{}")
		}
	}
	put(t, st, g.Target(), "x")
	other := put(t, st, registry.Root(strings.TrimSuffix(prefix, "/")).Group("gg").HistoryEntry(1, "m", 1), "{}")
	left := func(want int) {
		t.Helper()
		kvs, _, err := registry.List(within(t), st, g.History(), 0)
		if err != nil || len(kvs) != want {
			t.Fatalf("%d entries are left, want %d; error %v", len(kvs), want, err)
		}
		for i := all - want; i < all; i++ {
			if get(t, st, key(i)) == nil {
				t.Fatalf("entry %d of %d is gone", i, all)
			}
		}
	}
	prune := func(keep int) {
		t.Helper()
		if err := registry.PruneHistory(within(t), st, g, keep); err != nil {
			t.Fatal(err)
		}
	}
	prune(all)
	left(all)
	errs := make(chan error)
	for range 3 { // at once
		go func() { errs <- registry.PruneHistory(t.Context(), st, g, 10) }()
	}
	for range 3 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	left(10)
	prune(10)
	left(10)
	prune(0)
	left(0)
	if get(t, st, g.Target()) == nil || other == 0 {
		t.Error("more than history was pruned")
	}
	if kvs, _, err := registry.List(within(t), st, prefix+"consumers/gg/", 0); err != nil || len(kvs) != 1 {
		t.Errorf("another group's history: %v, error %v", kvs, err)
	}
}

// History is read in the order of the transactions, around what cannot be read.
func readHistoryCase(t *testing.T, st registry.Store, prefix string) {
	g := groupOf(prefix)
	entry := func(ms int64, n uint64, value string) int64 { return put(t, st, g.HistoryEntry(ms, "m", n), value) }
	const form = `{"version":1,"timestamp":"5","member":"m","action":"%s","partitions":{"t":["1-0"]},"reason":"%s","strategy":"range","snapshot":"7"}`
	first := entry(9, 1, fmt.Sprintf(form, "claimed", "one"))
	entry(3, 2, "x")
	second := entry(5, 3, fmt.Sprintf(form, "released", "two"))
	list, bad, err := registry.ReadHistory(within(t), st, g)
	if err != nil || len(list) != 2 || len(bad) != 1 || !errors.Is(bad[0], registry.ErrRecord) || !strings.Contains(bad[0].Error(), g.HistoryEntry(3, "m", 2)) {
		t.Fatalf("%+v, bad %v, error %v", list, bad, err)
	}
	if list[0].Revision != first || list[0].Reason != "one" || list[1].Revision != second || list[1].Action != registry.ActionReleased || list[1].Snapshot != 7 {
		t.Errorf("%+v", list)
	}
}
