package storetest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/muster-io/muster/registry"
)

func claimCases() []Case {
	return []Case{
		{"register", registerCase},
		{"claim/twice, and by another", claimTwice},
		{"claim/race", claimRace},
		{"claim/stale", claimStale},
		{"claim/150 partitions", claimMany},
		{"claim/150 topics, one of them deleted", claimTopics},
		{"claim/lease ends", claimLeaseEnds},
		{"claim/refused", claimRefused},
		{"release", releaseCase},
		{"release/another key's token", releaseForeignToken},
		{"release/what is under the lease", releaseByLease},
		{"release/claimed again meanwhile", releaseOvertaken},
	}
}

// a member of a group in a test.
type member struct {
	t     *testing.T
	st    registry.Store
	s     *registry.Session
	group registry.GroupPaths
	reg   registry.Registration
	name  string
}

func groupOf(prefix string) registry.GroupPaths {
	return registry.Root(strings.TrimSuffix(prefix, "/")).Group("g")
}

func join(t *testing.T, st registry.Store, prefix, name string) *member {
	t.Helper()
	s, err := registry.OpenSession(within(t), st, registry.SessionOptions{TTL: patience})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := s.Close(ctx); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	m := &member{t: t, st: st, s: s, group: groupOf(prefix), name: name}
	m.reg, err = registry.Register(within(t), st, s, m.group.ID(name), []byte(name))
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func partition(n int) registry.Partition {
	return registry.Partition{Topic: "t", Home: 1, Number: int32(n)}
}

func (m *member) owner(n int) string { return m.group.Owner(partition(n)) }

// guard is of a snapshot taken now.
func (m *member) guard() registry.Guard {
	m.t.Helper()
	_, rev, err := registry.List(within(m.t), m.st, m.group.IDs(), 0)
	if err != nil {
		m.t.Fatal(err)
	}
	return registry.Guard{Registration: m.reg, IDs: m.group.IDs(), Snapshot: rev}
}

func (m *member) claims(partitions ...int) (claims []registry.OwnerClaim) {
	for _, n := range partitions {
		claims = append(claims, registry.OwnerClaim{Key: m.owner(n), Value: []byte(m.name + "-0")})
	}
	return claims
}

func (m *member) claim(partitions ...int) []registry.ClaimResult {
	m.t.Helper()
	results, _, err := registry.Claim(within(m.t), m.st, m.s.Lease(), m.guard(), m.claims(partitions...), nil)
	if err != nil || len(results) != len(partitions) {
		m.t.Fatalf("%d results, error %v", len(results), err)
	}
	return results
}

func registerCase(t *testing.T, st registry.Store, prefix string) {
	a := join(t, st, prefix, "a")
	kv := get(t, st, a.reg.Key)
	if kv.CreateRevision != a.reg.Revision || kv.ModRevision != a.reg.Revision || kv.Lease != a.s.Lease() {
		t.Fatalf("registered as %+v, the key is %+v", a.reg, kv)
	}
	// Again, as after a lost reply: nothing changes.
	again, err := registry.Register(within(t), st, a.s, a.reg.Key, []byte("a"))
	if err != nil || again != a.reg || get(t, st, a.reg.Key).ModRevision != a.reg.Revision {
		t.Fatalf("registered again as %+v, error %v; was %+v", again, err, a.reg)
	}
	// Another session, with the very same value: held, by whom and for how long.
	b := join(t, st, prefix, "b")
	_, err = registry.Register(within(t), st, b.s, a.reg.Key, []byte("a"))
	var held *registry.HeldError
	if !errors.As(err, &held) || held.KV.Lease != a.s.Lease() || string(held.KV.Value) != "a" || held.Left <= 0 || held.Left > a.s.TTL() {
		t.Fatalf("error %v (%+v), want that a holds it", err, held)
	}
	if text := err.Error(); !strings.Contains(text, a.reg.Key) || !strings.Contains(text, registry.LeaseText(a.s.Lease())) || !strings.Contains(text, "s left") {
		t.Errorf("error text: %s", text)
	}
	// A key without a lease is nobody's, so not ours either.
	put(t, st, prefix+"permanent", "x")
	if _, err = registry.Register(within(t), st, b.s, prefix+"permanent", []byte("b")); !errors.As(err, &held) || held.KV.Lease != 0 {
		t.Fatalf("error %v", err)
	}
	// After the session no registration is made under its lease.
	if err := a.s.Close(within(t)); err != nil {
		t.Fatal(err)
	}
	if _, err = registry.Register(within(t), st, a.s, a.reg.Key, []byte("a")); !errors.Is(err, registry.ErrSessionClosed) {
		t.Fatalf("registered in a closed session: error %v", err)
	}
}

// case 01: claiming twice is not an error, and another's claim is a conflict.
func claimTwice(t *testing.T, st registry.Store, prefix string) {
	a, b := join(t, st, prefix, "a"), join(t, st, prefix, "b")
	first := a.claim(0)[0]
	before := get(t, st, a.owner(0))
	if first.Holder != nil || first.Token != before.CreateRevision || string(before.Value) != "a-0" || before.Lease != a.s.Lease() {
		t.Fatalf("claimed %+v, the key is %+v", first, before)
	}
	again := a.claim(0)[0]
	if again.Holder != nil || again.Token != first.Token {
		t.Fatalf("second claim %+v, first %+v", again, first)
	}
	results := b.claim(0, 1)
	if h := results[0].Holder; h == nil || string(h.KV.Value) != "a-0" || h.KV.Lease != a.s.Lease() || results[0].Token != first.Token || !strings.Contains(h.Error(), "a-0") {
		t.Fatalf("b's claim of a's partition: %+v", results[0])
	}
	if results[1].Holder != nil {
		t.Fatalf("a holder of one partition blocks another: %+v", results[1])
	}
	if after := get(t, st, a.owner(0)); fmt.Sprint(*after) != fmt.Sprint(*before) {
		t.Fatalf("the key was touched: %+v, was %+v", after, before)
	}
}

// case 01: what a watcher sees while two claimers start and stop 50 times.
func claimRace(t *testing.T, st registry.Store, prefix string) {
	const rounds, partitions = 50, 4
	members := []*member{join(t, st, prefix, "a"), join(t, st, prefix, "b")}
	lease := map[string]registry.LeaseID{"a-0": members[0].s.Lease(), "b-0": members[1].s.Lease()}
	start := members[0].guard().Snapshot
	w := watch(t, st, members[0].group.Owners(), start+1)
	var racing sync.WaitGroup
	won := make([]int, len(members))
	for i, m := range members {
		racing.Go(func() {
			guard := registry.Guard{Registration: m.reg, IDs: m.group.IDs(), Snapshot: start}
			for range rounds {
				results, _, err := registry.Claim(t.Context(), st, m.s.Lease(), guard, m.claims(0, 1, 2, 3), nil)
				if err != nil {
					t.Errorf("claim: %v", err)
					return
				}
				var releases []registry.OwnerRelease
				for n, r := range results {
					if r.Holder == nil {
						releases = append(releases, registry.OwnerRelease{Key: m.owner(n), Token: r.Token})
					} else if string(r.Holder.KV.Value) == m.name+"-0" {
						t.Errorf("%s is told that itself holds partition %d", m.name, n)
					}
				}
				won[i] += len(releases)
				if _, err := registry.Release(t.Context(), st, m.s.Lease(), releases, nil); err != nil {
					t.Errorf("release: %v", err)
					return
				}
			}
		})
	}
	racing.Wait()
	if t.Failed() {
		return
	}
	holder := map[string]string{}
	for _, e := range w.events(2 * (won[0] + won[1])) {
		owner := holder[e.Key]
		switch {
		case e.Deleted && owner == "":
			t.Fatalf("revision %d deletes %s, which nobody holds", e.ModRevision, e.Key)
		case e.Deleted:
			delete(holder, e.Key)
		case owner != "":
			t.Fatalf("revision %d gives %s to %s while %s holds it", e.ModRevision, e.Key, e.Value, owner)
		case len(e.Value) == 0 || lease[string(e.Value)] == 0 || e.Lease != lease[string(e.Value)]:
			t.Fatalf("revision %d puts %s = %q under lease %d", e.ModRevision, e.Key, e.Value, e.Lease)
		default:
			holder[e.Key] = string(e.Value)
		}
	}
	t.Logf("a won %d, b %d", won[0], won[1])
}

func claimStale(t *testing.T, st registry.Store, prefix string) {
	a := join(t, st, prefix, "a")
	old := a.guard()
	join(t, st, prefix, "b")
	results, _, err := registry.Claim(within(t), st, a.s.Lease(), old, a.claims(0), nil)
	wantErr(t, err, registry.ErrStale)
	if len(results) != 0 || get(t, st, a.owner(0)) != nil {
		t.Fatalf("a stale claim gave %+v", results)
	}
	a.claim(0) // computed anew, it is good
	// My registration is not the one I made: its lease ended, and I am back.
	fresh := a.guard()
	do(t, st, registry.Delete(a.reg.Key))
	_, _, err = registry.Claim(within(t), st, a.s.Lease(), fresh, a.claims(1), nil)
	wantErr(t, err, registry.ErrStale)
	if _, err := registry.Register(within(t), st, a.s, a.reg.Key, []byte("a")); err != nil {
		t.Fatal(err)
	}
	fresh.Snapshot = a.guard().Snapshot // so it is the registration that is refused
	_, _, err = registry.Claim(within(t), st, a.s.Lease(), fresh, a.claims(1), nil)
	wantErr(t, err, registry.ErrStale)
	if get(t, st, a.owner(1)) != nil {
		t.Fatal("a claim under a replaced registration took effect")
	}
}

// case 62 (d): more claims than a transaction holds.
func claimMany(t *testing.T, st registry.Store, prefix string) {
	a, b := join(t, st, prefix, "a"), join(t, st, prefix, "b")
	held := b.claim(149)[0]
	all := make([]int, 150)
	for i := range all {
		all[i] = i
	}
	results := a.claim(all...)
	if results[149].Holder == nil || results[149].Token != held.Token {
		t.Fatalf("b's partition: %+v", results[149])
	}
	kvs, _, err := registry.List(within(t), st, a.group.Owners(), 0)
	if err != nil || len(kvs) != 150 {
		t.Fatalf("%d owner keys, error %v", len(kvs), err)
	}
	token := map[string]int64{}
	for _, kv := range kvs {
		token[kv.Key] = kv.CreateRevision
		if kv.Lease == 0 {
			t.Errorf("%s has no lease", kv.Key)
		}
	}
	var releases []registry.OwnerRelease
	for n, r := range results {
		if r.Token != token[a.owner(n)] {
			t.Errorf("partition %d: token %d, the key has %d", n, r.Token, token[a.owner(n)])
		}
		releases = append(releases, registry.OwnerRelease{Key: a.owner(n)}) // b's too: it is not a's to release
	}
	if _, err := registry.Release(within(t), st, a.s.Lease(), releases, nil); err != nil {
		t.Fatal(err)
	}
	if kvs, _, err = registry.List(within(t), st, a.group.Owners(), 0); err != nil || len(kvs) != 1 || kvs[0].CreateRevision != held.Token {
		t.Fatalf("left after the release: %v, error %v", kvs, err)
	}
}

// A claim is of a topic as it was seen: not of one that was deleted, nor of its
// successor of the same name.
func claimTopics(t *testing.T, st registry.Store, prefix string) {
	a := join(t, st, prefix, "a")
	root := registry.Root(strings.TrimSuffix(prefix, "/"))
	var claims []registry.OwnerClaim
	for i := range 150 {
		topic := fmt.Sprintf("t%d", i)
		created := put(t, st, root.Topic(topic), "x")
		claims = append(claims, registry.OwnerClaim{Key: a.group.Owner(registry.Partition{Topic: topic}), Value: []byte("a-0"),
			Topic: root.Topic(topic), Incarnation: created})
	}
	last := claims[149]
	refused := func() {
		t.Helper()
		_, _, err := registry.Claim(within(t), st, a.s.Lease(), a.guard(), []registry.OwnerClaim{last}, nil)
		wantErr(t, err, registry.ErrStale)
		if kv := get(t, st, last.Key); kv != nil {
			t.Fatalf("a refused claim left %+v", kv)
		}
	}
	do(t, st, registry.Delete(last.Topic))
	refused()
	claims[149].Incarnation = put(t, st, last.Topic, "x")
	refused()
	put(t, st, last.Topic, "y") // a new value is not a new topic
	results, _, err := registry.Claim(within(t), st, a.s.Lease(), a.guard(), claims, nil)
	if err != nil || len(results) != 150 {
		t.Fatalf("%d results, error %v", len(results), err)
	}
	for i, r := range results {
		if r.Holder != nil {
			t.Fatalf("claim %d: %v", i, r.Holder)
		}
	}
}

// case 63: no key without a lease, whenever the lease ends.
func claimLeaseEnds(t *testing.T, st registry.Store, prefix string) {
	a, b := join(t, st, prefix, "a"), join(t, st, prefix, "b")
	guard := a.guard()
	if err := st.Revoke(within(t), a.s.Lease()); err != nil {
		t.Fatal(err)
	}
	// With the lease its registration has gone, and the guard is the first to say no.
	_, _, err := registry.Claim(within(t), st, a.s.Lease(), guard, a.claims(0), nil)
	wantErr(t, err, registry.ErrStale)
	// A guard that does hold: the store itself refuses a put under no lease.
	_, _, err = registry.Claim(within(t), st, a.s.Lease(), b.guard(), a.claims(0), nil)
	wantErr(t, err, registry.ErrLeaseNotFound)
	if _, err := registry.Register(within(t), st, a.s, a.reg.Key, []byte("a")); !errors.Is(err, registry.ErrLeaseNotFound) && !errors.Is(err, registry.ErrLeaseGone) {
		t.Fatalf("registered under a lease that is gone: error %v", err)
	}
	if get(t, st, a.owner(0)) != nil || get(t, st, a.reg.Key) != nil {
		t.Fatal("a key stands without lease")
	}
	if r := b.claim(0)[0]; r.Holder != nil {
		t.Fatalf("the partition is not free: %+v", r)
	}
}

func claimRefused(t *testing.T, st registry.Store, prefix string) {
	a := join(t, st, prefix, "a")
	if _, _, err := registry.Claim(within(t), st, 0, a.guard(), a.claims(0), nil); err == nil {
		t.Error("an owner key without lease was claimed")
	}
	claims := a.claims(0, 1)
	claims[1].Value = nil
	if _, _, err := registry.Claim(within(t), st, a.s.Lease(), a.guard(), claims, nil); err == nil {
		t.Error("an owner key that names nobody was claimed")
	}
	put(t, st, a.owner(2), "somebody, for ever")
	if _, err := registry.Release(within(t), st, 0, []registry.OwnerRelease{{Key: a.owner(2)}}, nil); err == nil {
		t.Error("a release with neither token nor lease was accepted")
	}
	if get(t, st, a.owner(0)) != nil || get(t, st, a.owner(2)) == nil {
		t.Error("a refused call took effect")
	}
}

// case 03: whoever comes back late takes nothing from others.
func releaseCase(t *testing.T, st registry.Store, prefix string) {
	a, b := join(t, st, prefix, "a"), join(t, st, prefix, "b")
	old := a.claim(0, 1, 2)
	release := func(m *member, releases ...registry.OwnerRelease) {
		t.Helper()
		if _, err := registry.Release(within(t), st, m.s.Lease(), releases, nil); err != nil {
			t.Fatal(err)
		}
	}
	release(a, registry.OwnerRelease{Key: a.owner(0), Token: old[0].Token})
	if get(t, st, a.owner(0)) != nil {
		t.Fatal("the key is still there")
	}
	theirs := b.claim(0)[0]
	release(a, registry.OwnerRelease{Key: a.owner(0), Token: old[0].Token}) // late
	release(a, registry.OwnerRelease{Key: a.owner(0)})                      // and with nothing but the lease
	if kv := get(t, st, b.owner(0)); kv == nil || kv.CreateRevision != theirs.Token {
		t.Fatalf("b's key: %+v", kv)
	}
	// After a claim whose reply was lost there is no token, but the lease tells.
	release(a, registry.OwnerRelease{Key: a.owner(1)}, registry.OwnerRelease{Key: a.owner(7)})
	if get(t, st, a.owner(1)) != nil || get(t, st, a.owner(2)) == nil {
		t.Fatal("release by lease took the wrong keys")
	}
}

func (m *member) release(st registry.Store, releases ...registry.OwnerRelease) int64 {
	m.t.Helper()
	revision, err := registry.Release(within(m.t), st, m.s.Lease(), releases, nil)
	if err != nil {
		m.t.Fatal(err)
	}
	return revision
}

// owned wants these owner keys, and no others, to stand.
func (m *member) owned(partitions ...int) {
	m.t.Helper()
	kvs, _, err := registry.List(within(m.t), m.st, m.group.Owners(), 0)
	if err != nil {
		m.t.Fatal(err)
	}
	want := map[string]bool{}
	for _, n := range partitions {
		want[m.owner(n)] = true
	}
	got := map[string]bool{}
	for _, kv := range kvs {
		got[kv.Key] = true
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		m.t.Fatalf("owner keys %v, want %v", got, want)
	}
}

// A token is good for its own key, not for others under the same lease.
func releaseForeignToken(t *testing.T, st registry.Store, prefix string) {
	a := join(t, st, prefix, "a")
	first, second := a.claim(0)[0], a.claim(1)[0]
	a.release(st, registry.OwnerRelease{Key: a.owner(0), Token: second.Token}, registry.OwnerRelease{Key: a.owner(1), Token: first.Token})
	a.owned(0, 1)
	a.release(st, registry.OwnerRelease{Key: a.owner(0), Token: second.Token}, registry.OwnerRelease{Key: a.owner(1), Token: second.Token})
	a.owned(0)
}

// Without tokens, what stands under the lease is released: not what is another's,
// not what has no lease; in one call with others that have tokens, in any order.
func releaseByLease(t *testing.T, st registry.Store, prefix string) {
	a, b := join(t, st, prefix, "a"), join(t, st, prefix, "b")
	b.claim(1)
	put(t, st, a.owner(2), "somebody, for ever")
	mine := a.claim(0, 3, 4, 5)
	revision := a.release(st,
		registry.OwnerRelease{Key: a.owner(1)},
		registry.OwnerRelease{Key: a.owner(3), Token: mine[1].Token},
		registry.OwnerRelease{Key: a.owner(9)},
		registry.OwnerRelease{Key: a.owner(0)},
		registry.OwnerRelease{Key: a.owner(4), Token: mine[2].Token - 1},
		registry.OwnerRelease{Key: a.owner(2)},
	)
	a.owned(1, 2, 4, 5)
	// A revision that the answer holds at: news of the deletions is not newer.
	if _, now, err := registry.List(within(t), st, a.group.Owners(), 0); err != nil || revision != now {
		t.Errorf("released at %d, the store is at %d, error %v", revision, now, err)
	}
	if again := a.release(st, registry.OwnerRelease{Key: a.owner(1)}); again < revision {
		t.Errorf("nothing released at %d, before that at %d", again, revision)
	}
	a.owned(1, 2, 4, 5)
}

// between runs something after the next transaction of a store.
type between struct {
	registry.Store
	then func()
}

func (b *between) Txn(ctx context.Context, t registry.Txn) (registry.TxnResult, error) {
	res, err := b.Store.Txn(ctx, t)
	if then := b.then; then != nil {
		b.then = nil
		then()
	}
	return res, err
}

// A release without token comes late: the key that it found is gone, and the same
// process has claimed it again meanwhile. What it has now it keeps.
func releaseOvertaken(t *testing.T, st registry.Store, prefix string) {
	a := join(t, st, prefix, "a")
	old := a.claim(0, 1)
	var again registry.ClaimResult
	slow := &between{Store: st, then: func() {
		a.release(st, registry.OwnerRelease{Key: a.owner(0), Token: old[0].Token})
		again = a.claim(0)[0]
	}}
	a.release(slow, registry.OwnerRelease{Key: a.owner(0)}, registry.OwnerRelease{Key: a.owner(1)})
	if kv := get(t, st, a.owner(0)); again.Token == 0 || kv == nil || kv.CreateRevision != again.Token {
		t.Fatalf("the key is %+v, claimed again under %d", kv, again.Token)
	}
	a.owned(0)
}
