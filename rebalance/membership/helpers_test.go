package membership_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/rebalance/membership"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

// arena is a group on a store in memory, in virtual time. It watches that no two
// ownerships of a partition live at the same time, unless the test takes leases or
// keys away from under them.
type arena struct {
	t     *testing.T
	st    *memory.Store
	root  registry.Root
	group registry.GroupPaths

	mu      sync.Mutex
	holder  map[registry.Partition]*membership.Ownership
	damaged bool
	lines   bytes.Buffer // of all logs
}

func newArena(t *testing.T) *arena {
	return &arena{t: t, st: memory.New(), group: registry.Root("").Group("g"), holder: map[registry.Partition]*membership.Ownership{}}
}

func (a *arena) Write(p []byte) (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.lines.Write(p)
}

func (a *arena) says(text string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return strings.Contains(a.lines.String(), text)
}

func (a *arena) must(err error) {
	a.t.Helper()
	if err != nil {
		a.t.Fatal(err)
	}
}

func (a *arena) topic(name string, partitions int32) {
	a.t.Helper()
	_, err := registry.CreateTopic(context.Background(), a.st, a.root,
		registry.TopicSpec{Name: name, Partitions: partitions, ReplicationFactor: 1}, []int32{1})
	a.must(err)
}

func (a *arena) write(ops ...registry.Op) {
	a.t.Helper()
	_, err := a.st.Txn(context.Background(), registry.Txn{Then: ops})
	a.must(err)
}

func (a *arena) list(prefix string) []registry.KV {
	a.t.Helper()
	kvs, _, err := registry.List(context.Background(), a.st, prefix, 0)
	a.must(err)
	return kvs
}

// owners spells the owner keys: "t/0:c1-0 t/1:c2-0".
func (a *arena) owners() string {
	a.t.Helper()
	byPartition := map[registry.Partition]string{}
	var partitions []registry.Partition
	for _, kv := range a.list(a.group.Owners()) {
		p, err := a.group.ParsePartition(kv.Key)
		a.must(err)
		byPartition[p] = string(kv.Value)
		partitions = append(partitions, p)
	}
	slices.SortFunc(partitions, registry.ComparePartitions)
	var text []string
	for _, p := range partitions {
		text = append(text, fmt.Sprintf("%s/%d:%s", p.Topic, p.Number, byPartition[p]))
	}
	return strings.Join(text, " ")
}

// ownedAs lets so much time pass at most, on the virtual clock, until the owner
// keys are those.
func (a *arena) ownedAs(within time.Duration, want string) {
	a.t.Helper()
	for deadline := time.Now().Add(within); ; time.Sleep(time.Millisecond) {
		synctest.Wait()
		got := a.owners()
		if got == want {
			return
		}
		if !time.Now().Before(deadline) {
			a.t.Fatalf("after %s: owned as %q, want %q", within, got, want)
		}
	}
}

// nothingLeft fails if a member has left a key or a lease behind.
func (a *arena) nothingLeft() {
	a.t.Helper()
	for _, prefix := range []string{a.group.IDs(), a.group.Owners()} {
		for _, kv := range a.list(prefix) {
			a.t.Errorf("%s is left behind", kv.Key)
		}
	}
	if n := a.st.Leases(); n != 0 {
		a.t.Errorf("%d leases are left behind", n)
	}
}

// member is a member of the group, whose work is to note what it is told.
type member struct {
	*membership.Membership
	a      *arena
	cancel context.CancelFunc
	done   chan struct{}
	err    error
	drain  func(o *membership.Ownership) bool // nil: at once

	mu    sync.Mutex
	notes []note
	seen  []rebalance.Snapshot
}

func (a *arena) join(cfg membership.Config, drain func(o *membership.Ownership) bool) *member {
	a.t.Helper()
	if cfg.Store == nil {
		cfg.Store = a.st
	}
	cfg.Root, cfg.Group = a.root, "g"
	if cfg.Subscription.Topics == nil && cfg.Subscription.Pattern == "" {
		cfg.Subscription.Topics = map[string]int32{"t": 1}
	}
	cfg.Logger = slog.New(slog.NewTextHandler(a, &slog.HandlerOptions{Level: slog.LevelDebug}))
	m, err := membership.New(cfg)
	a.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	r := &member{Membership: m, a: a, cancel: cancel, done: make(chan struct{}), drain: drain}
	go func() {
		defer close(r.done)
		r.err = m.Run(ctx, r)
	}()
	return r
}

func (m *member) leave() {
	m.a.t.Helper()
	m.cancel()
	<-m.done
	m.a.must(m.err)
}

type note struct {
	at     time.Time
	what   string // # stands for the number
	number int32
}

func (m *member) note(what string, o *membership.Ownership) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.notes = append(m.notes, note{time.Now(), what, o.Partition.Number})
}

// story is what the member was told of partitions since it was asked last. What it
// was told at the same time comes by number.
func (m *member) story() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	slices.SortStableFunc(m.notes, func(a, b note) int {
		return cmp.Or(a.at.Compare(b.at), strings.Compare(a.what, b.what), cmp.Compare(a.number, b.number))
	})
	var list []string
	for _, n := range m.notes {
		list = append(list, strings.Replace(n.what, "#", fmt.Sprint(n.number), 1))
	}
	m.notes = nil
	return strings.Join(list, ", ")
}

func (m *member) Snapshot(s rebalance.Snapshot, _ registry.Snapshot) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.seen = append(m.seen, s)
}

func (m *member) Begin(list []*membership.Ownership) {
	for _, o := range list {
		m.a.mu.Lock()
		other := m.a.holder[o.Partition]
		if other != nil && !m.a.damaged && (other.Alive() || other.Token > o.Token) {
			m.a.t.Errorf("%s begins with %s, token %d, while token %d lives", m.ID(), o.Partition, o.Token, other.Token)
		}
		// What is taken away before the claimer has its answer may have gone to another by
		// then, who has begun already.
		if other == nil || o.Token > other.Token {
			m.a.holder[o.Partition] = o
		}
		m.a.mu.Unlock()
		m.note("begin #", o)
	}
}

func (m *member) Drain(o *membership.Ownership) bool {
	select {
	case <-o.Revoked():
	default:
		m.a.t.Errorf("%s is drained and not revoked", o.Partition)
	}
	if m.drain == nil {
		return true
	}
	return m.drain(o)
}

func (m *member) Revoked(o *membership.Ownership) {
	if !o.Alive() {
		m.a.t.Errorf("%s is revoked after its ownership has ended", o.Partition)
	}
	m.note("revoked #", o)
}

func (m *member) Lost(o *membership.Ownership, reason string) {
	if o.Alive() || o.Context().Err() == nil || o.Left() != 0 {
		m.a.t.Errorf("%s is lost and its ownership has not ended", o.Partition)
	}
	m.note("lost #: "+reason, o)
}

// cable is the way of one member to the store. It can be cut, for renewals alone too.
type cable struct {
	registry.Store
	cut, still atomic.Bool
	// between is called before a watch of an owner key begins.
	between func(key string)
}

var errCut = errors.New("cut off in this test")

func (c *cable) Txn(ctx context.Context, t registry.Txn) (registry.TxnResult, error) {
	if c.cut.Load() {
		<-ctx.Done()
		return registry.TxnResult{}, errCut
	}
	return c.Store.Txn(ctx, t)
}

func (c *cable) Revoke(ctx context.Context, id registry.LeaseID) error {
	if c.cut.Load() {
		<-ctx.Done()
		return errCut
	}
	return c.Store.Revoke(ctx, id)
}

func (c *cable) KeepAlive(ctx context.Context, id registry.LeaseID) (registry.KeepAliver, error) {
	ka, err := c.Store.KeepAlive(ctx, id)
	if err != nil {
		return nil, err
	}
	return &cutKeepAlive{c, ctx, ka}, nil
}

func (c *cable) WatchKey(ctx context.Context, key string, from int64) <-chan registry.WatchResponse {
	if c.between != nil {
		c.between(key)
	}
	return c.Store.WatchKey(ctx, key, from)
}

type cutKeepAlive struct {
	c   *cable
	ctx context.Context
	registry.KeepAliver
}

func (k *cutKeepAlive) Send() error {
	if k.c.cut.Load() || k.c.still.Load() {
		<-k.ctx.Done()
		return errCut
	}
	return k.KeepAliver.Send()
}
