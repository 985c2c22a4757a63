package registry_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/muster-io/muster/offsets"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

// groupLife is a consumer that goes on claiming and committing, by what it knows
// of a topic at some time or other, while the topic is deleted and made again.
type groupLife struct {
	t       *testing.T
	r       *rand.Rand
	st      *memory.Store
	lease   registry.LeaseID
	reg     registry.Registration
	known   []int64                      // incarnations seen
	token   map[registry.Partition]int64 // of owner keys believed to be held
	epoch   map[registry.Partition]int64 // incarnation of those
	offsets map[registry.Partition]int64 // committed last under the newest incarnation
	stored  map[registry.Partition]offsets.Position
	aside   bool // within a call of the consumer
}

const raced = "orders"

func newGroupLife(t *testing.T, r *rand.Rand) *groupLife {
	st := memory.New()
	l, err := st.Grant(t.Context(), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	key := root.Group("g").ID("c")
	g := &groupLife{t: t, r: r, st: st, lease: l.ID, token: map[registry.Partition]int64{}, epoch: map[registry.Partition]int64{},
		offsets: map[registry.Partition]int64{}, stored: map[registry.Partition]offsets.Position{}}
	g.reg = registry.Registration{Key: key, Revision: txn(t, st, registry.Put(key, []byte("c"), l.ID))}
	return g
}

func (g *groupLife) partition() registry.Partition {
	return registry.Partition{Topic: raced, Home: 1, Number: int32(g.r.IntN(3))}
}

// incarnation is the create-revision of the record, 0 if there is none.
func (g *groupLife) incarnation() int64 {
	kv, _, err := registry.GetKey(g.t.Context(), g.st, root.Topic(raced))
	if err != nil {
		g.t.Fatal(err)
	}
	if kv == nil {
		return 0
	}
	return kv.CreateRevision
}

func (g *groupLife) create() {
	_, err := registry.CreateTopic(g.t.Context(), g.st, root, registry.TopicSpec{Name: raced, Partitions: 3, ReplicationFactor: 1}, []int32{1})
	switch {
	case err == nil:
		g.known = append(g.known, g.incarnation())
		clear(g.offsets)
	case !errors.Is(err, registry.ErrTopicExists) && !errors.Is(err, registry.ErrTopicDeleting):
		g.t.Fatal(err)
	}
}

// claim claims under an incarnation that may be gone.
func (g *groupLife) claim() {
	if len(g.known) == 0 {
		return
	}
	p, of := g.partition(), g.known[g.r.IntN(len(g.known))]
	res, _, err := registry.Claim(g.t.Context(), g.st, g.lease,
		registry.Guard{Registration: g.reg, IDs: root.Group("g").IDs(), Snapshot: g.reg.Revision},
		[]registry.OwnerClaim{{Key: root.Group("g").Owner(p), Value: []byte("c-0"), Topic: root.Topic(raced), Incarnation: of}}, nil)
	if err != nil && !errors.Is(err, registry.ErrStale) {
		g.t.Fatal(err)
	}
	if err == nil {
		if of != g.incarnation() {
			g.t.Fatalf("claimed %s of incarnation %d, it is %d", p, of, g.incarnation())
		}
		g.token[p], g.epoch[p] = res[0].Token, of
		delete(g.stored, p)
	}
}

// commit commits as an owner that may have lost its key. The offset tells the
// incarnation of the topic that it was claimed under.
func (g *groupLife) commit() {
	p := g.partition()
	token, held := g.token[p]
	if !held {
		return
	}
	o := offsets.NewRegistry(g.st, root.Group("g"))
	previous := g.stored[p].Revision
	out, err := o.Commit(g.t.Context(), []offsets.Commit{{Partition: p, Offset: g.epoch[p], Token: token, Previous: previous}})
	if err != nil {
		g.t.Fatal(err)
	}
	if !out[0].Stored {
		g.stored[p] = out[0].Now
		return
	}
	g.stored[p] = out[0].Now
	if g.epoch[p] == g.incarnation() {
		g.offsets[p] = g.epoch[p]
	}
}

func (g *groupLife) act() {
	switch g.r.IntN(8) {
	case 0:
		g.create()
	case 1, 2, 3:
		g.claim()
	default:
		g.commit()
	}
}

// Between any two steps of a deletion, and between those of others that are at the
// same, a group claims and commits, topics are made, and calls fail. In the end
// nothing of a deleted topic is there, and of the one that has its name now nothing
// is missing.
func TestDeletionAmongClaimsAndCommits(t *testing.T) {
	for range 400 {
		seed := rand.Uint64()
		if !t.Run(fmt.Sprint(seed), func(t *testing.T) { raceDeletion(t, seed) }) {
			return
		}
	}
}

func raceDeletion(t *testing.T, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 7))
	g := newGroupLife(t, r)
	g.create()
	depth := 0
	var crashed bool
	disturb := func(ctx context.Context, _ string) error {
		if g.aside || ctx.Value(deleter{}) == nil {
			return nil
		}
		g.aside = true
		for range r.IntN(6) {
			g.act()
		}
		g.aside = false
		if depth < 2 && r.IntN(4) == 0 {
			depth++
			_, err := registry.FinishDeletion(ctx, g.st, root, raced)
			if errors.Is(err, registry.ErrNoTopic) && r.IntN(2) == 0 {
				_, err = registry.DeleteTopic(ctx, g.st, root, raced, registry.DeleteOptions{})
			}
			depth--
			if err != nil && !errors.Is(err, registry.ErrNoTopic) && !errors.Is(err, errCrash) {
				t.Fatal(err)
			}
		}
		if r.IntN(12) == 0 {
			crashed = true
			return errCrash
		}
		return nil
	}
	ctx := context.WithValue(t.Context(), deleter{}, true)
	g.st.SetHooks(memory.Hooks{Before: disturb, After: disturb})
	for range 1 + r.IntN(3) {
		for range r.IntN(20) {
			g.act()
		}
		crashed = false
		_, err := registry.DeleteTopic(ctx, g.st, root, raced, registry.DeleteOptions{})
		if err != nil && !errors.Is(err, registry.ErrNoTopic) && !(crashed && errors.Is(err, errCrash)) {
			t.Fatal(err)
		}
	}
	g.st.SetHooks(memory.Hooks{})
	for range r.IntN(10) {
		g.act()
	}
	if _, err := registry.FinishDeletion(t.Context(), g.st, root, raced); err != nil && !errors.Is(err, registry.ErrNoTopic) {
		t.Fatal(err)
	}
	for range r.IntN(10) {
		g.act()
	}
	g.check()
}

type deleter struct{}

func (g *groupLife) check() {
	now := g.incarnation()
	group := root.Group("g")
	all := everything(g.t, g.st)
	for key, value := range all {
		if !of(key, raced) {
			continue
		}
		p, err := group.ParsePartition(key)
		switch {
		case now == 0:
			g.t.Errorf("%s is left of the deleted topic", key)
		case err != nil:
		case key == group.Offset(p) && value != fmt.Sprint(now):
			g.t.Errorf("offset %s is %s, the topic is of revision %d", key, value, now)
		case key == group.Owner(p) && g.epoch[p] != now:
			g.t.Errorf("owner of %s is of incarnation %d, now is %d", p, g.epoch[p], now)
		}
	}
	if now == 0 {
		return
	}
	for p, offset := range g.offsets {
		if all[group.Offset(p)] != fmt.Sprint(offset) {
			g.t.Errorf("offset of %s is %q, want %d", p, all[group.Offset(p)], offset)
		}
	}
	for n := range int32(3) {
		if _, there := all[root.PartitionState(raced, n)]; !there {
			g.t.Errorf("state %d is gone", n)
		}
	}
	if _, there := all[root.TopicConfig(raced)]; !there {
		g.t.Error("settings are gone")
	}
}
