// Package memory is a registry.Store in this process, for tests and
// simulations: revisions, leases, watches and compaction behave as etcd's do, and
// time is that of package time, so that testing/synctest can make it virtual.
package memory

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/muster-io/muster/registry"
)

// Store is a registry.Store. Use New.
type Store struct {
	clock  func() time.Duration // of Now, lease deadlines included
	manual bool                 // no timers: leases end in ExpireDue

	mu        sync.Mutex
	hooks     Hooks
	revision  int64
	compacted int64
	keys      map[string]registry.KV
	history   []registry.Event // after compacted, in order of revision
	leases    map[registry.LeaseID]*lease
	lastLease registry.LeaseID
	watchers  map[*watcher]struct{}
	held      bool // watches are told nothing
}

// Hooks let a test stand between a caller and the store. They are called without
// a lock and may block; an error is returned to the caller. Nil hooks do nothing.
type Hooks struct {
	Before func(ctx context.Context, op string) error // before the operation takes effect
	After  func(ctx context.Context, op string) error // after: the reply is lost
	// KeepAlive sees each renewal when it is sent; ctx is that of the stream.
	KeepAlive func(ctx context.Context, id registry.LeaseID) error
}

type lease struct {
	ttl    time.Duration
	ends   time.Duration
	expiry *time.Timer // nil with a manual clock
	keys   map[string]struct{}
}

// New returns an empty store at revision 1, as a new etcd has.
func New() *Store {
	began := time.Now()
	return newStore(func() time.Duration { return time.Since(began) + time.Nanosecond })
}

// NewManual returns an empty store whose time is what the clock says, which starts
// above 0. It starts no timer, so that a simulation in one goroutine can make time a
// number: leases end when ExpireDue is called, and what changed is read with History.
func NewManual(clock func() time.Duration) *Store {
	s := newStore(clock)
	s.manual = true
	return s
}

func newStore(clock func() time.Duration) *Store {
	return &Store{
		clock:     clock,
		revision:  1,
		compacted: 0,
		keys:      make(map[string]registry.KV),
		leases:    make(map[registry.LeaseID]*lease),
		watchers:  make(map[*watcher]struct{}),
	}
}

// SetHooks replaces the hooks.
func (s *Store) SetHooks(h Hooks) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hooks = h
}

func (s *Store) around(ctx context.Context, op string, do func() error) error {
	s.mu.Lock()
	h := s.hooks
	s.mu.Unlock()
	if h.Before != nil {
		if err := h.Before(ctx, op); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	err := do()
	s.mu.Unlock()
	if err == nil && h.After != nil {
		return h.After(ctx, op)
	}
	return err
}

// Now implements registry.Store.
func (s *Store) Now() time.Duration { return s.clock() }

// History returns the changes after a revision, in order, as far back as they were
// not compacted. The list must not be changed.
func (s *Store) History(after int64) []registry.Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, _ := slices.BinarySearchFunc(s.history, after+1, func(e registry.Event, r int64) int { return sign(e.ModRevision - r) })
	return s.history[i:]
}

// Revision is the newest revision.
func (s *Store) Revision() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.revision
}

// Compact drops history up to and including a revision. A watch that still needs
// it, because it is held, ends when it is let go.
func (s *Store) Compact(revision int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.compacted = max(s.compacted, min(revision, s.revision))
	i := 0
	for i < len(s.history) && s.history[i].ModRevision <= s.compacted {
		i++
	}
	s.history = slices.Clone(s.history[i:])
}

// HoldWatches cuts all watches off, present and future ones, as a broken
// connection does: they hear nothing, not even progress, until they are let go.
// Then each goes on where it was, or ends if that was compacted.
func (s *Store) HoldWatches(hold bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held = hold
	if !hold {
		for w := range s.watchers {
			s.feed(w)
		}
	}
}

var (
	errTooManyOps = errors.New("too many operations in one transaction")
	errNoKey      = errors.New("key is not provided")
	errTooLarge   = errors.New("request is too large")
	errFuture     = errors.New("revision is in the future")
)

// Txn implements registry.Store. As in etcd, all conditions, those of nested
// transactions too, are decided on the state before the transaction.
func (s *Store) Txn(ctx context.Context, t registry.Txn) (res registry.TxnResult, err error) {
	err = s.around(ctx, "txn", func() error {
		if err := checkShape(t, registry.MaxTxnOps); err != nil {
			return err
		}
		for _, branch := range [][]registry.Op{t.Then, t.Else} {
			if _, _, err := checkKeys(branch); err != nil {
				return err
			}
		}
		if size(t) > maxRequest {
			return errTooLarge
		}
		way := s.decide(t)
		if err := s.checkLeases(way); err != nil {
			return err
		}
		tx := txn{s: s, revision: s.revision}
		res = tx.run(way)
		if len(tx.events) > 0 {
			s.revision++
			tx.settlePrevious()
			s.publish(tx.events)
		}
		tx.stamp(&res)
		return nil
	})
	if err != nil {
		return registry.TxnResult{}, err
	}
	return res, nil
}

// maxRequest is etcd's default limit in bytes.
const maxRequest = 3 << 19

// size is that of the keys and values of a transaction, all branches included: a
// little less than what etcd counts.
func size(t registry.Txn) (n int) {
	for _, c := range t.If {
		n += len(c.Key) + len(c.Value)
	}
	for _, op := range slices.Concat(t.Then, t.Else) {
		n += len(op.Key) + len(op.Value)
		if op.Kind == registry.OpTxn {
			n += size(*op.Txn)
		}
	}
	return n
}

// checkShape refuses what etcd refuses: too many operations, where each level counts
// on top of the one around it, and empty keys.
func checkShape(t registry.Txn, room int) error {
	n := max(len(t.If), len(t.Then), len(t.Else))
	if n > room {
		return errTooManyOps
	}
	if slices.ContainsFunc(t.If, func(c registry.Cond) bool { return c.Key == "" }) {
		return errNoKey
	}
	for _, op := range slices.Concat(t.Then, t.Else) {
		if op.Kind == registry.OpTxn {
			if err := checkShape(*op.Txn, room-n); err != nil {
				return err
			}
		} else if op.Key == "" && !op.Prefix {
			return errNoKey
		}
	}
	return nil
}

// checkKeys refuses, as etcd does, a branch that may put a key twice, or put a key
// that it may also delete. The two branches of a nested transaction exclude each
// other, and so may put the same key.
func checkKeys(branch []registry.Op) (puts map[string]bool, deletes []registry.Op, err error) {
	puts = map[string]bool{}
	for _, op := range branch {
		if op.Kind == registry.OpDelete {
			deletes = append(deletes, op)
		}
	}
	add := func(key string) error {
		if puts[key] || slices.ContainsFunc(deletes, func(d registry.Op) bool { return d.Matches(key) }) {
			return fmt.Errorf("duplicate key %s in one transaction", key)
		}
		puts[key] = true
		return nil
	}
	for _, op := range branch {
		if op.Kind != registry.OpTxn {
			continue
		}
		then, deletedThen, err := checkKeys(op.Txn.Then)
		if err != nil {
			return nil, nil, err
		}
		otherwise, deletedElse, err := checkKeys(op.Txn.Else)
		if err != nil {
			return nil, nil, err
		}
		maps.Copy(then, otherwise)
		for key := range then {
			if err := add(key); err != nil {
				return nil, nil, err
			}
		}
		deletes = append(append(deletes, deletedThen...), deletedElse...)
	}
	for _, op := range branch {
		if op.Kind == registry.OpPut {
			if err := add(op.Key); err != nil {
				return nil, nil, err
			}
		}
	}
	return puts, deletes, nil
}

// decided is a transaction whose conditions have been looked at.
type decided struct {
	succeeded bool
	ops       []registry.Op
	nested    []decided // those of ops that are transactions, in order
}

func (s *Store) decide(t registry.Txn) decided {
	d := decided{succeeded: true, ops: t.Then}
	if slices.ContainsFunc(t.If, func(c registry.Cond) bool { return !s.holds(c) }) {
		d.succeeded, d.ops = false, t.Else
	}
	for _, op := range d.ops {
		if op.Kind == registry.OpTxn {
			d.nested = append(d.nested, s.decide(*op.Txn))
		}
	}
	return d
}

// checkLeases looks only at what will run: a put that is not reached needs no lease.
func (s *Store) checkLeases(d decided) error {
	for _, op := range d.ops {
		if op.Kind == registry.OpPut && op.Lease != 0 && s.leases[op.Lease] == nil {
			return registry.ErrLeaseNotFound
		}
	}
	for _, n := range d.nested {
		if err := s.checkLeases(n); err != nil {
			return err
		}
	}
	return nil
}

type txn struct {
	s        *Store
	revision int64 // before the transaction
	events   []registry.Event
}

func (tx *txn) run(d decided) registry.TxnResult {
	res := registry.TxnResult{Succeeded: d.succeeded}
	nested := d.nested
	for _, op := range d.ops {
		if op.Kind == registry.OpTxn {
			inner := tx.run(nested[0])
			nested = nested[1:]
			res.Items = append(res.Items, registry.TxnItem{Txn: &inner})
			continue
		}
		res.Items = append(res.Items, tx.apply(op))
	}
	return res
}

func (tx *txn) apply(op registry.Op) (item registry.TxnItem) {
	switch op.Kind {
	case registry.OpPut:
		tx.put(op)
	case registry.OpDelete:
		for _, key := range tx.s.matching(op) {
			tx.events = append(tx.events, tx.s.remove(key, tx.revision+1))
			item.Deleted++
		}
	case registry.OpGet:
		for _, key := range tx.s.matching(op) {
			item.KVs = append(item.KVs, tx.s.keys[key])
		}
	}
	return item
}

// settlePrevious makes what was before an event what was before the transaction,
// which may put a key in one nested part and delete it in a later one.
func (tx *txn) settlePrevious() {
	before := map[string]*registry.KV{}
	for i := range tx.events {
		e := &tx.events[i]
		if was, again := before[e.Key]; again {
			e.Previous = was
		}
		before[e.Key] = e.Previous
	}
}

// stamp writes the revision after the transaction into all its results.
func (tx *txn) stamp(res *registry.TxnResult) {
	res.Revision = tx.s.revision
	for i := range res.Items {
		if res.Items[i].Txn != nil {
			tx.stamp(res.Items[i].Txn)
		}
	}
}

func (tx *txn) put(op registry.Op) {
	s := tx.s
	kv := registry.KV{Key: op.Key, Value: slices.Clone(op.Value), CreateRevision: tx.revision + 1,
		ModRevision: tx.revision + 1, Lease: op.Lease}
	e := registry.Event{}
	if was, there := s.keys[op.Key]; there {
		kv.CreateRevision = was.CreateRevision
		e.Previous = &was
		s.detach(was)
	}
	if op.Lease != 0 {
		s.leases[op.Lease].keys[op.Key] = struct{}{}
	}
	s.keys[op.Key] = kv
	e.KV = kv
	tx.events = append(tx.events, e)
}

func (s *Store) detach(kv registry.KV) {
	if l := s.leases[kv.Lease]; l != nil {
		delete(l.keys, kv.Key)
	}
}

func (s *Store) remove(key string, revision int64) registry.Event {
	was := s.keys[key]
	s.detach(was)
	delete(s.keys, key)
	return registry.Event{KV: registry.KV{Key: key, ModRevision: revision}, Deleted: true, Previous: &was}
}

func (s *Store) matching(op registry.Op) []string {
	if !op.Prefix {
		if _, there := s.keys[op.Key]; there {
			return []string{op.Key}
		}
		return nil
	}
	var found []string
	for key := range s.keys {
		if op.Matches(key) {
			found = append(found, key)
		}
	}
	slices.Sort(found)
	return found
}

func (s *Store) holds(c registry.Cond) bool {
	if !c.Prefix {
		return compare(c, s.keys[c.Key])
	}
	found := false
	for key, kv := range s.keys {
		if c.Matches(key) {
			found = true
			if !compare(c, kv) {
				return false
			}
		}
	}
	return found || compare(c, registry.KV{}) // etcd: no keys are compared as one missing key
}

func compare(c registry.Cond, kv registry.KV) bool {
	var order int
	switch c.Field {
	case registry.FieldCreateRevision:
		order = sign(kv.CreateRevision - c.Number)
	case registry.FieldModRevision:
		order = sign(kv.ModRevision - c.Number)
	case registry.FieldLease:
		order = sign(int64(kv.Lease) - c.Number)
	case registry.FieldValue:
		if kv.Key == "" {
			return false // etcd: a missing key has no value to compare
		}
		order = strings.Compare(string(kv.Value), string(c.Value))
	}
	switch c.Relation {
	case registry.Equal:
		return order == 0
	case registry.NotEqual:
		return order != 0
	case registry.Less:
		return order < 0
	}
	return order > 0
}

func sign(n int64) int { return int(min(max(n, -1), 1)) }

// Range implements registry.Store. An older revision is computed back from the
// history.
func (s *Store) Range(ctx context.Context, r registry.RangeRequest) (res registry.RangeResult, err error) {
	err = s.around(ctx, "range", func() error {
		res = registry.RangeResult{Revision: s.revision}
		keys := s.keys
		if r.Key == "" && !r.Prefix {
			return errNoKey
		}
		if r.Revision > s.revision {
			return errFuture
		}
		if r.Revision != 0 && r.Revision < s.revision {
			if r.Revision < s.compacted {
				return registry.ErrCompacted
			}
			keys = s.at(r.Revision)
		}
		op := registry.Op{Key: r.Key, Prefix: r.Prefix}
		var names []string
		if _, there := keys[r.Key]; there && !r.Prefix {
			names = append(names, r.Key)
		}
		for name := range keys {
			if !r.Prefix {
				break
			}
			if op.Matches(name) && name > r.After {
				names = append(names, name)
			}
		}
		slices.Sort(names)
		for _, name := range names {
			kv := keys[name]
			if r.KeysOnly {
				kv.Value, kv.Lease = nil, 0
			}
			res.KVs = append(res.KVs, kv)
		}
		if r.ByCreated {
			slices.SortStableFunc(res.KVs, func(a, b registry.KV) int { return sign(a.CreateRevision - b.CreateRevision) })
		}
		if r.Limit > 0 && int64(len(res.KVs)) > r.Limit {
			res.KVs, res.More = res.KVs[:r.Limit], true
		}
		return nil
	})
	return res, err
}

func (s *Store) at(revision int64) map[string]registry.KV {
	keys := maps.Clone(s.keys)
	for i := len(s.history) - 1; i >= 0 && s.history[i].ModRevision > revision; i-- {
		if e := s.history[i]; e.Previous != nil {
			keys[e.Key] = *e.Previous
		} else {
			delete(keys, e.Key)
		}
	}
	return keys
}

func (s *Store) publish(events []registry.Event) {
	s.history = append(s.history, events...)
	if s.held {
		return
	}
	for w := range s.watchers {
		w.offer(s.revision, events)
	}
}
