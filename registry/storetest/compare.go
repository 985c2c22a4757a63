package storetest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/muster-io/muster/registry"
)

// CompareOptions say what Compare does.
type CompareOptions struct {
	Seed  uint64
	Steps int
	// Prefix is what all keys begin with. Nothing else may write to either store
	// while they are compared, under any prefix: revisions are counted.
	Prefix string
}

// Compare does the same random steps on two Stores, which must also be Compacters,
// and returns an error at the first answer in which they differ: results, errors by
// kind, revisions counted from the beginning, leases by the order in which they were
// granted, events, and at the end everything that is there. The steps depend on the
// seed alone.
//
// What the contract leaves open is not compared: how many revisions a response of a
// watch holds, the order of keys created in one revision when the oldest are asked
// for first, and at which moment a WatchKey begins.
func Compare(ctx context.Context, a, b registry.Store, o CompareOptions) (Compared, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c := &comparison{r: rand.New(rand.NewPCG(o.Seed, 0)), prefix: o.Prefix, put: map[string]bool{}}
	for i, st := range []registry.Store{a, b} {
		s, err := newSide(ctx, string(rune('a'+i)), st, o.Prefix)
		if err != nil {
			return c.done, err
		}
		defer s.close()
		c.sides[i] = s
	}
	for n := range o.Steps {
		if err := c.step(ctx, n); err != nil {
			return c.done, fmt.Errorf("seed %d, step %d: %w", o.Seed, n, err)
		}
	}
	if err := c.finish(ctx); err != nil {
		return c.done, fmt.Errorf("seed %d, at the end: %w", o.Seed, err)
	}
	return c.done, nil
}

// Compared tells what a comparison has met, so that a test can tell one that proves
// something from one that does not.
type Compared struct {
	Revisions, Events, Refused, Compacted, Expired int64
}

// comparison is the two stores and what the steps so far have led to. Revisions
// are counted from the first one of the comparison, leases from 1.
type comparison struct {
	r         *rand.Rand
	prefix    string
	sides     [2]*side
	leases    int // granted
	compacted int64
	taps      int // made
	live      []tapInfo
	trace     []string        // of the newest steps
	put       map[string]bool // keys, by the transaction that is being made
	done      Compared
}

// action is one step: run does it on one side and spells the answer, which must be
// the same on both.
type action struct {
	text string
	run  func(ctx context.Context, s *side) string
}

const traceLength = 12

// do runs an action on both sides.
func (c *comparison) do(ctx context.Context, a action) error {
	c.trace = append(c.trace, a.text)
	if len(c.trace) > traceLength {
		c.trace = c.trace[1:]
	}
	var answers [2]string
	for i, s := range c.sides {
		limited, cancel := context.WithTimeout(ctx, patience)
		answers[i] = a.run(limited, s)
		cancel()
		if s.broken != nil {
			return fmt.Errorf("%s: store %s: %w\nafter:\n%s", a.text, s.name, s.broken, strings.Join(c.trace, "\n"))
		}
	}
	if answers[0] != answers[1] {
		return fmt.Errorf("%s:\nstore a says %s\nstore b says %s\nafter:\n%s", a.text, answers[0], answers[1], strings.Join(c.trace, "\n"))
	}
	if slices.Contains(refusals, answers[0]) {
		c.done.Refused++
	}
	c.done.Revisions = c.now()
	return nil
}

// now is the newest revision, which both sides agree on.
func (c *comparison) now() int64 { return c.sides[0].now - c.sides[0].start }

// expireEvery steps a lease runs out by itself, for which a real store needs more
// than its shortest time to live; drainEvery steps all watches are compared.
const (
	expireEvery = 1000
	drainEvery  = 100
)

func (c *comparison) step(ctx context.Context, n int) error {
	switch {
	case n%expireEvery == expireEvery/2:
		return c.do(ctx, c.expire())
	case n%expireEvery == expireEvery/4:
		return c.do(ctx, c.large())
	case n%drainEvery == drainEvery-1:
		return c.drain(ctx)
	}
	switch p := c.r.IntN(100); {
	case p < 54:
		return c.do(ctx, c.txn())
	case p < 55:
		return c.do(ctx, c.bigTxn())
	case p < 56:
		return c.do(ctx, c.twice())
	case p < 77:
		return c.do(ctx, c.scan())
	case p < 80:
		return c.do(ctx, c.grant())
	case p < 84:
		return c.do(ctx, c.revoke())
	case p < 87:
		return c.do(ctx, c.remaining())
	case p < 90:
		return c.do(ctx, c.keepAlive())
	case p < 91:
		return c.compact(ctx)
	case p < 95:
		return c.watch(ctx, false)
	case p < 99:
		return c.watch(ctx, true)
	}
	return c.unwatch(ctx)
}

func (c *comparison) finish(ctx context.Context) error {
	if err := c.drain(ctx); err != nil {
		return err
	}
	log, _, _, _ := c.sides[0].log.state()
	c.done.Events = int64(len(log))
	if err := c.do(ctx, action{"all that is there", func(ctx context.Context, s *side) string {
		return s.scan(ctx, registry.RangeRequest{Key: c.prefix, Prefix: true})
	}}); err != nil {
		return err
	}
	for i := range c.leases {
		if err := c.do(ctx, remainingOf(i+1)); err != nil {
			return err
		}
		if err := c.do(ctx, revokeOf(i+1)); err != nil {
			return err
		}
	}
	for len(c.live) > 0 {
		if err := c.unwatch(ctx); err != nil {
			return err
		}
	}
	return nil
}

// keys, few of them, so that steps meet; the last two are beside the prefixes that
// are asked for, and one ends in the highest byte.
var keyNames = []string{"a", "a/", "a/1", "a/10", "a/2", "b", "b/x", "b/y", "c", "\xff", "\xff\xff", "a0", "0"}

var prefixNames = []string{"", "a", "a/", "a/1", "b/", "c", "\xff", "none"}

func (c *comparison) key() string { return c.prefix + keyNames[c.r.IntN(len(keyNames))] }

func (c *comparison) keyOrPrefix() (key string, prefix bool) {
	if c.r.IntN(3) == 0 {
		return c.prefix + prefixNames[c.r.IntN(len(prefixNames))], true
	}
	return c.key(), false
}

func (c *comparison) value() []byte {
	return []byte([]string{"", "1", "2", "3", "\x00", "\xff"}[c.r.IntN(6)])
}

// lease is the number of one that was granted, mostly none, and now and then one
// that never was.
func (c *comparison) lease() int {
	switch p := c.r.IntN(20); {
	case p < 12 || c.leases == 0:
		return 0
	case p < 19:
		return c.recentLease()
	}
	return neverGranted
}

// recentLease prefers those that probably live still.
func (c *comparison) recentLease() int { return max(1, c.leases-c.r.IntN(8)) }

// revision is one that was, is, or in rare cases will be.
func (c *comparison) revision() int64 {
	now := c.now()
	switch p := c.r.IntN(10); {
	case p < 1:
		return now + 1 + c.r.Int64N(3)
	case p < 3:
		return now
	case p < 5:
		return max(c.compacted-2+c.r.Int64N(5), 1)
	}
	return max(now-c.r.Int64N(20), 1)
}

// Numbers of leases and revisions are spelled in requests as those of the
// comparison, and each side puts its own in their place.
func (c *comparison) cond() registry.Cond {
	cond := registry.Cond{Field: registry.Field(c.r.IntN(4)), Relation: registry.Relation(c.r.IntN(4))}
	cond.Key, cond.Prefix = c.keyOrPrefix()
	switch cond.Field {
	case registry.FieldValue:
		cond.Value = c.value()
	case registry.FieldLease:
		cond.Number = int64(c.lease())
		if cond.Number != 0 { // which of two leases has the greater number is open
			cond.Relation = registry.Relation(c.r.IntN(2))
		}
	default:
		if c.r.IntN(3) > 0 {
			cond.Number = c.revision()
		}
	}
	return cond
}

func (c *comparison) plain(depth int) registry.Txn {
	var t registry.Txn
	for range c.r.IntN(6) / 2 {
		t.If = append(t.If, c.cond())
	}
	t.Then, t.Else = c.ops(depth), c.ops(depth)
	return t
}

func (c *comparison) ops(depth int) (ops []registry.Op) {
	for range c.r.IntN(4) {
		switch p := c.r.IntN(10); {
		case p < 5:
			ops = append(ops, registry.Op{Kind: registry.OpPut, Key: c.putKey(), Value: c.value(), Lease: registry.LeaseID(c.lease())})
		case p < 6:
			op := registry.Op{Kind: registry.OpDelete}
			op.Key, op.Prefix = c.keyOrPrefix()
			ops = append(ops, op)
		case p < 8 || depth == 0:
			op := registry.Op{Kind: registry.OpGet}
			op.Key, op.Prefix = c.keyOrPrefix()
			ops = append(ops, op)
		default:
			ops = append(ops, registry.Nested(c.plain(depth-1)))
		}
	}
	if c.r.IntN(300) == 0 {
		ops = append(ops, registry.Op{Kind: registry.OpKind(c.r.IntN(3))}) // the empty key is refused
	}
	return ops
}

func (c *comparison) txn() action {
	c.put = map[string]bool{}
	return txnAction(c.plain(2))
}

// putKey is mostly one that the transaction does not put yet, for that is refused.
func (c *comparison) putKey() string {
	key := c.key()
	for range 5 {
		if !c.put[key] || c.r.IntN(10) == 0 {
			break
		}
		key = c.key()
	}
	c.put[key] = true
	return key
}

// bigTxn is around the limits.
func (c *comparison) bigTxn() action {
	outer := registry.MaxNested - 2 + c.r.IntN(4)
	inner := registry.MaxTxnOps - registry.MaxNested - 1 + c.r.IntN(3)
	if c.r.IntN(2) == 0 {
		return txnAction(registry.Txn{Then: puts(c.prefix+"a/", registry.MaxTxnOps-1+c.r.IntN(3))})
	}
	return txnAction(registry.Txn{If: []registry.Cond{c.cond()}, Then: nested(c.prefix+"b/", outer, inner), Else: c.ops(1)})
}

// twice puts and deletes one key in parts of one transaction, which is refused
// unless the put comes first.
func (c *comparison) twice() action {
	key := c.key()
	parts := []registry.Op{
		registry.Nested(registry.Txn{Then: []registry.Op{registry.Put(key, c.value(), registry.LeaseID(c.lease()))}}),
		registry.Nested(registry.Txn{Then: []registry.Op{registry.Delete(key), registry.Get(key)}}),
	}
	if c.r.IntN(4) == 0 {
		slices.Reverse(parts)
	}
	return txnAction(registry.Txn{Then: parts})
}

// large is more than a request may hold, in a branch that is not reached.
func (c *comparison) large() action {
	a := txnAction(registry.Txn{Else: []registry.Op{registry.Put(c.key(), make([]byte, 1600<<10), 0)}})
	a.text = "txn of 1600 KiB"
	return a
}

func txnAction(t registry.Txn) action {
	text := "txn " + spellTxn(t)
	if len(text) > 1000 {
		text = text[:1000] + "…"
	}
	return action{text, func(ctx context.Context, s *side) string {
		res, err := s.st.Txn(ctx, s.ownTxn(t))
		if err != nil {
			return kind(err)
		}
		s.now = max(s.now, res.Revision)
		return s.spellResult(res)
	}}
}

func (c *comparison) scan() action {
	r := registry.RangeRequest{Limit: c.r.Int64N(5), KeysOnly: c.r.IntN(4) == 0}
	r.Key, r.Prefix = c.keyOrPrefix()
	if c.r.IntN(3) > 0 {
		r.Key, r.Prefix = c.prefix+prefixNames[c.r.IntN(len(prefixNames))], true
	}
	if r.Prefix && c.r.IntN(3) == 0 {
		r.After = c.key()
	}
	if c.r.IntN(2) == 0 {
		r.Revision = c.revision()
	}
	r.ByCreated = c.r.IntN(4) == 0
	return action{fmt.Sprintf("range %+v", r), func(ctx context.Context, s *side) string { return s.scan(ctx, r) }}
}

func (c *comparison) grant() action {
	if c.r.IntN(5) == 0 {
		return grantShort([]time.Duration{-2 * time.Second, 0, time.Millisecond, 1001 * time.Millisecond, 2 * time.Second}[c.r.IntN(5)])
	}
	ttl := time.Hour + time.Duration(c.r.IntN(4000))*time.Millisecond
	c.leases++
	return action{fmt.Sprintf("grant %s", ttl), func(ctx context.Context, s *side) string {
		l, err := s.st.Grant(ctx, ttl)
		if err != nil {
			return kind(err)
		}
		s.leases = append(s.leases, l.ID)
		return l.TTL.String()
	}}
}

// grantShort is revoked at once, lest it run out sooner on one side than on the other.
func grantShort(ttl time.Duration) action {
	return action{fmt.Sprintf("grant %s and revoke it", ttl), func(ctx context.Context, s *side) string {
		l, err := s.st.Grant(ctx, ttl)
		if err != nil {
			return kind(err)
		}
		return l.TTL.String() + " " + kind(s.st.Revoke(ctx, l.ID))
	}}
}

func revokeOf(lease int) action {
	return action{fmt.Sprintf("revoke lease %d", lease), func(ctx context.Context, s *side) string {
		err := s.st.Revoke(ctx, s.ownLease(lease))
		return fmt.Sprint(kind(err), " at ", s.look(ctx))
	}}
}

func (c *comparison) revoke() action { return revokeOf(c.lease()) }

func remainingOf(lease int) action {
	return action{fmt.Sprintf("remaining of lease %d", lease), func(ctx context.Context, s *side) string {
		left, err := s.st.Remaining(ctx, s.ownLease(lease))
		if err != nil {
			return kind(err)
		}
		return left.Round(time.Hour).String() // one side is asked a little later, and the comparison may take minutes
	}}
}

func (c *comparison) remaining() action { return remainingOf(c.lease()) }

func (c *comparison) keepAlive() action {
	lease, n := c.lease(), 1+c.r.IntN(3)
	return action{fmt.Sprintf("renew lease %d, %d times", lease, n), func(ctx context.Context, s *side) string {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		ka, err := s.st.KeepAlive(ctx, s.ownLease(lease))
		if err != nil {
			return kind(err)
		}
		var got []string
		for range n {
			if err := ka.Send(); err != nil {
				return kind(err)
			}
			ttl, err := ka.Recv()
			if err != nil {
				return kind(err)
			}
			got = append(got, max(ttl, 0).String())
		}
		return strings.Join(got, ", ")
	}}
}

// expire grants a short lease, puts keys under it and waits until it has run out. The
// shortest could run out on a busy machine before the keys are there.
func (c *comparison) expire() action {
	c.leases++
	c.done.Expired++
	lease, keys := c.leases, []string{c.prefix + "b", c.prefix + "a/2", c.prefix + "a"}
	return action{fmt.Sprintf("let lease %d run out", lease), func(ctx context.Context, s *side) string {
		l, err := s.st.Grant(ctx, 3700*time.Millisecond)
		if err != nil {
			return kind(err)
		}
		s.leases = append(s.leases, l.ID)
		var t registry.Txn
		for _, key := range keys {
			t.Then = append(t.Then, registry.Put(key, []byte("short"), l.ID))
		}
		if _, err := s.st.Txn(ctx, t); err != nil {
			return kind(err)
		}
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for err == nil && ctx.Err() == nil {
			_, err = s.st.Remaining(ctx, l.ID)
			<-tick.C
		}
		return fmt.Sprintf("lived %s, then %s, and there is %s", l.TTL, kind(err),
			s.scan(ctx, registry.RangeRequest{Key: c.prefix, Prefix: true}))
	}}
}

// compact cuts history. The watches are brought to the present first: what becomes
// of one that is behind depends on how far it has come.
func (c *comparison) compact(ctx context.Context) error {
	if c.now() < 1 {
		return nil
	}
	if err := c.drain(ctx); err != nil {
		return err
	}
	now := c.now()
	to := max(now-c.r.Int64N(30), c.compacted)
	if to == c.compacted {
		return nil
	}
	c.compacted = to
	c.done.Compacted++
	return c.do(ctx, action{fmt.Sprintf("compact to %d", to), func(_ context.Context, s *side) string {
		s.st.(Compacter).Compact(s.ownRevision(to))
		return ""
	}})
}

// refusals are the kinds of errors: those that have a sentinel, then those that
// are told by their text.
var refusals = []string{"compacted", "lease not found", "duplicate key", "too many operations", "future", "key is not provided", "request is too large"}

// kind is an error as callers can tell it from others.
func kind(err error) string {
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, registry.ErrCompacted):
		return refusals[0]
	case errors.Is(err, registry.ErrLeaseNotFound):
		return refusals[1]
	}
	for _, text := range refusals[2:] {
		if strings.Contains(err.Error(), text) {
			return text
		}
	}
	return "error: " + err.Error()
}
