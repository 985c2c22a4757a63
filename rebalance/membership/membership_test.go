package membership_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-io/muster/rebalance/membership"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

// Members come and go, some lose their leases, some their keys; after quiet each
// partition is owned as the strategy says, and in the end nothing is left.
func TestMembersComeAndGo(t *testing.T) {
	for range 20 {
		seed := rand.Uint64()
		synctest.Test(t, func(t *testing.T) { comeAndGo(t, seed) })
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

func comeAndGo(t *testing.T, seed uint64) {
	a, r := newArena(t), rand.New(rand.NewPCG(seed, 1))
	a.damaged = true
	a.topic("t", 7)
	members := map[string]*member{}
	for range 60 {
		id := fmt.Sprintf("c%d", r.IntN(5))
		switch m := members[id]; {
		case m == nil:
			slow := time.Duration(r.IntN(300)) * time.Millisecond
			members[id] = a.join(membership.Config{ID: id}, func(o *membership.Ownership) bool {
				select {
				case <-time.After(slow):
					return true
				case <-o.Context().Done():
					return false
				}
			})
		case r.IntN(3) == 0:
			m.leave()
			delete(members, id)
		case r.IntN(3) == 0:
			a.write(registry.Delete(a.group.ID(id)))
		default:
			if kvs := a.list(a.group.Owners()); len(kvs) > 0 {
				if kv := kvs[r.IntN(len(kvs))]; r.IntN(2) == 0 {
					a.write(registry.Delete(kv.Key))
				} else {
					a.st.Expire(kv.Lease)
				}
			}
		}
		time.Sleep(time.Duration(r.IntN(500)) * time.Millisecond)
	}
	var want []string
	left := len(members)
	for i := range 5 {
		if id := fmt.Sprintf("c%d", i); members[id] != nil {
			// What is left, divided among those that are left, rounded up: the first take one more.
			for range (7 - len(want) + left - 1) / left {
				want = append(want, fmt.Sprintf("t/%d:%s-0", len(want), id))
			}
			left--
		}
	}
	a.ownedAs(30*time.Second, strings.Join(want, " "))
	for _, m := range members {
		m.leave()
	}
	a.nothingLeft()
}

// The owner key outlives the work, and goes before the registration.
func TestOwnershipLastsUntilDrained(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		a.topic("t", 2)
		finish := make(chan struct{})
		m := a.join(membership.Config{ID: "c1"}, func(o *membership.Ownership) bool {
			<-finish
			return o.Alive()
		})
		a.ownedAs(time.Second, "t/0:c1-0 t/1:c1-0")
		if got := m.story(); got != "begin 0, begin 1" {
			t.Errorf("told: %s", got)
		}
		other := a.join(membership.Config{ID: "c2"}, nil)
		time.Sleep(20 * time.Second)
		a.ownedAs(0, "t/0:c1-0 t/1:c1-0")
		if got := m.story(); got != "" { // what does not move is not touched
			t.Errorf("told: %s", got)
		}
		if !a.says("partition is due and not released") {
			t.Error("nobody complains")
		}
		close(finish)
		a.ownedAs(time.Millisecond, "t/0:c1-0 t/1:c2-0")
		if got := m.story(); got != "revoked 1" {
			t.Errorf("told: %s", got)
		}
		m.leave()
		a.ownedAs(time.Millisecond, "t/0:c2-0 t/1:c2-0")
		if got := other.story(); got != "begin 0, begin 1" {
			t.Errorf("told: %s", got)
		}
		other.leave()
		a.nothingLeft()
	})
}

// A lease that is gone, an owner key that was deleted, a write that was fenced: the
// work is told why, and begins anew under a larger token.
func TestLost(t *testing.T) {
	for what, reasons := range map[string][]string{
		"lease":  {"owner key was deleted", "session lost"}, // all its keys go at once: whichever is noticed first
		"key":    {"owner key was deleted"},
		"fenced": {"commit was fenced"},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newArena(t)
				a.topic("t", 1)
				m := a.join(membership.Config{ID: "c1"}, nil)
				a.ownedAs(time.Second, "t/0:c1-0")
				o := a.holder[registry.Partition{Topic: "t", Home: 1}]
				if left := o.Left(); left <= 0 || left >= registry.DefaultTTL {
					t.Errorf("%s left of a session of %s", left, registry.DefaultTTL)
				}
				switch kv := a.list(a.group.Owners())[0]; what {
				case "lease":
					a.st.Expire(kv.Lease)
				case "key":
					a.write(registry.Delete(kv.Key))
				case "fenced":
					a.st.HoldWatches(true)
					a.write(registry.Delete(kv.Key))
					o.Fenced()
					synctest.Wait()
					if o.Alive() {
						t.Error("still owned")
					}
					a.st.HoldWatches(false)
				}
				synctest.Wait()
				a.ownedAs(registry.DefaultTTL, "t/0:c1-0")
				got := m.story()
				if !slices.ContainsFunc(reasons, func(reason string) bool { return got == "begin 0, begin 0, lost 0: "+reason }) {
					t.Errorf("told: %s", got)
				}
				if now := a.holder[o.Partition]; now.Token <= o.Token {
					t.Errorf("token %d after %d", now.Token, o.Token)
				}
				m.leave()
				a.nothingLeft()
			})
		})
	}
}

// Work that does not come to its end is left behind: the partition is lost, not
// given up, and free for others.
func TestLeftBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		a.topic("t", 1)
		m := a.join(membership.Config{ID: "c1", LeaveTimeout: 3 * time.Second}, func(o *membership.Ownership) bool {
			<-o.Context().Done()
			return true // a lie
		})
		a.ownedAs(time.Second, "t/0:c1-0")
		began := time.Now()
		m.cancel()
		<-m.done
		if took := time.Since(began); !errors.Is(m.err, membership.ErrLeftBehind) || took != 3*time.Second {
			t.Errorf("stopped after %s: %v", took, m.err)
		}
		if got := m.story(); got != "begin 0, lost 0: session lost" {
			t.Errorf("told: %s", got)
		}
		a.nothingLeft()
	})
}

// A member that cannot register leaves at once, without an error.
func TestStopBeforeTheStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		a.st.SetHooks(memory.Hooks{Before: func(_ context.Context, op string) error {
			if op == "txn" {
				return errCut
			}
			return nil
		}})
		m := a.join(membership.Config{ID: "c1"}, nil)
		time.Sleep(time.Second)
		m.leave()
		a.nothingLeft()
	})
}

// slowGrant grants a lease to whoever waits for it no more.
type slowGrant struct {
	registry.Store
	asked, opened chan struct{}
}

func (s *slowGrant) Grant(_ context.Context, ttl time.Duration) (registry.Lease, error) {
	close(s.asked)
	<-s.opened
	return s.Store.Grant(context.Background(), ttl)
}

// A session that is opened when the member has been stopped is not left behind.
func TestStopWhileTheSessionOpens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		slow := &slowGrant{Store: a.st, asked: make(chan struct{}), opened: make(chan struct{})}
		m := a.join(membership.Config{ID: "c1", Store: slow}, nil)
		<-slow.asked
		m.cancel()
		synctest.Wait()
		close(slow.opened)
		m.leave()
		a.nothingLeft()
	})
}

// A member that gives up its session, though the store has its lease still, revokes it
// at once: it would be in its own way.
func TestFormerSessionIsRevoked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		a.topic("t", 1)
		c := &cable{Store: a.st}
		m := a.join(membership.Config{ID: "a", Store: c}, nil)
		a.ownedAs(time.Second, "t/0:a-0")
		m.story()
		former := a.list(a.group.Owners())[0].Lease
		c.still.Store(true)
		for m.story() == "" {
			time.Sleep(time.Millisecond)
		}
		c.still.Store(false)
		a.ownedAs(5*time.Millisecond, "t/0:a-0")
		if now := a.list(a.group.Owners())[0].Lease; now == former || a.st.Leases() != 1 {
			t.Errorf("lease %d after %d, of %d", now, former, a.st.Leases())
		}
		m.leave()
		a.nothingLeft()
	})
}

// Field case 03, in virtual time: a member that is cut off past its lease has stopped by
// its own deadline before another owns, takes nothing back, and registers anew.
func TestCase03(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		a.topic("t", 4)
		c := &cable{Store: a.st}
		m := a.join(membership.Config{ID: "a", Store: c}, nil)
		b := a.join(membership.Config{ID: "b"}, nil)
		a.ownedAs(time.Second, "t/0:a-0 t/1:a-0 t/2:b-0 t/3:b-0")
		m.story()
		c.cut.Store(true)
		a.ownedAs(2*registry.DefaultTTL, "t/0:b-0 t/1:b-0 t/2:b-0 t/3:b-0")
		if got := m.story(); got != "lost 0: session lost, lost 1: session lost" {
			t.Errorf("the one cut off was told: %s", got)
		}
		held := a.list(a.group.Owners())
		time.Sleep(registry.DefaultTTL)
		c.cut.Store(false)
		a.ownedAs(10*time.Second, "t/0:a-0 t/1:a-0 t/2:b-0 t/3:b-0")
		if got := b.story(); !strings.HasSuffix(got, "revoked 0, revoked 1") {
			t.Errorf("the other was told: %s", got)
		}
		for _, kv := range a.list(a.group.Owners())[2:] {
			if kv.CreateRevision != held[2].CreateRevision && kv.CreateRevision != held[3].CreateRevision {
				t.Errorf("%s was taken from its owner", kv.Key)
			}
		}
		m.leave()
		b.leave()
		a.nothingLeft()
	})
}

// Field case 10, with members: another registers, or leaves, while a claim is under
// way that was computed without it.
func TestCase10(t *testing.T) {
	r := rand.New(rand.NewPCG(rand.Uint64(), 10))
	for round := range 100 {
		synctest.Test(t, func(t *testing.T) {
			a := newArena(t)
			a.topic("t", 2)
			delay := func() { time.Sleep(time.Duration(r.IntN(51)) * time.Millisecond) }
			slow := &slowClaims{Store: a.st, prefix: a.group.Owners(), pause: time.Duration(r.IntN(51)) * time.Millisecond}
			var c2 *member
			if round%2 == 1 {
				c2 = a.join(membership.Config{ID: "c2"}, nil)
				a.ownedAs(time.Second, "t/0:c2-0 t/1:c2-0")
			}
			c1 := a.join(membership.Config{ID: "c1", Store: slow}, nil)
			delay()
			if round%2 == 1 {
				c2.leave()
				a.ownedAs(time.Second, "t/0:c1-0 t/1:c1-0")
			} else {
				c2 = a.join(membership.Config{ID: "c2"}, nil)
				a.ownedAs(time.Second, "t/0:c1-0 t/1:c2-0")
				c2.leave()
			}
			c1.leave()
			a.nothingLeft()
		})
	}
}

// slowClaims holds each claim for a while before it takes effect.
type slowClaims struct {
	registry.Store
	prefix string
	pause  time.Duration
}

func (s *slowClaims) Txn(ctx context.Context, t registry.Txn) (registry.TxnResult, error) {
	if len(t.Then) > 0 && t.Then[0].Kind == registry.OpTxn && len(t.Then[0].Txn.If) > 0 && strings.HasPrefix(t.Then[0].Txn.If[0].Key, s.prefix) {
		time.Sleep(s.pause)
	}
	return s.Store.Txn(ctx, t)
}

// Field case 13: a holder that is slow to release is waited for, however long; a key
// that goes between the claim and the watch is free.
func TestCase13(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		a.topic("t", 2)
		const slow = 4 * 2 * time.Second * 3 / 2 // rebalance.max.retries x rebalance.backoff.ms, and a half more
		m := a.join(membership.Config{ID: "a"}, func(*membership.Ownership) bool {
			time.Sleep(slow)
			return true
		})
		a.ownedAs(time.Second, "t/0:a-0 t/1:a-0")
		b := a.join(membership.Config{ID: "b"}, nil)
		a.ownedAs(slow+2*time.Second, "t/0:a-0 t/1:b-0")
		b.leave()
		m.leave()
	})
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		a.topic("t", 1)
		key := a.group.Owner(registry.Partition{Topic: "t", Home: 1})
		a.write(registry.Put(key, []byte("x-0"), 0))
		var once atomic.Bool
		c := &cable{Store: a.st, between: func(string) {
			if once.CompareAndSwap(false, true) {
				a.write(registry.Delete(key))
			}
		}}
		m := a.join(membership.Config{ID: "b", Store: c}, nil)
		a.ownedAs(time.Millisecond, "t/0:b-0")
		m.leave()
		a.nothingLeft()
	})
}

// Field case 14: the partitions of a topic grow in a group that is stable.
func TestCase14(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		a.topic("t", 4)
		c1, c2 := a.join(membership.Config{ID: "c1"}, nil), a.join(membership.Config{ID: "c2"}, nil)
		a.ownedAs(time.Second, "t/0:c1-0 t/1:c1-0 t/2:c2-0 t/3:c2-0")
		c1.story()
		_, err := registry.AddPartitions(t.Context(), a.st, a.root, "t", 8, []int32{1})
		a.must(err)
		a.ownedAs(time.Second, "t/0:c1-0 t/1:c1-0 t/2:c1-0 t/3:c1-0 t/4:c2-0 t/5:c2-0 t/6:c2-0 t/7:c2-0")
		if got := c1.story(); got != "begin 2, begin 3" {
			t.Errorf("c1 was told: %s", got)
		}
		c1.leave()
		c2.leave()
		a.nothingLeft()
	})
}

// Field case 58, with members: what changed in one revision is seen together.
func TestCase58(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		a.topic("t", 4)
		c1, c2 := a.join(membership.Config{ID: "c1"}, nil), a.join(membership.Config{ID: "c2"}, nil)
		a.ownedAs(time.Second, "t/0:c1-0 t/1:c1-0 t/2:c2-0 t/3:c2-0")
		lease, err := a.st.Grant(t.Context(), time.Minute)
		a.must(err)
		topic := a.list(a.root.Topic("t"))[0]
		rec, err := registry.Encode(registry.TopicRecord{Version: 1, Partitions: map[int32][]int32{0: {1}, 1: {1}, 2: {1}, 3: {1}, 4: {1}, 5: {1}, 6: {1}, 7: {1}}})
		a.must(err)
		id := a.list(a.group.ID("c1"))[0]
		a.write(registry.Put(a.group.ID("c3"), id.Value, lease.ID), registry.Put(topic.Key, rec, 0))
		a.ownedAs(time.Second, "t/0:c1-0 t/1:c1-0 t/2:c1-0 t/3:c2-0 t/4:c2-0 t/5:c2-0")
		for _, s := range c1.seen {
			if members, partitions := len(s.Members), len(s.Topology["t"]); (members == 3) != (partitions == 8) {
				t.Errorf("seen at %d: %d members, %d partitions", s.Revision, members, partitions)
			}
		}
		c1.leave()
		c2.leave()
	})
}

// Field case 62 (d): more partitions fall to one member than one transaction holds;
// they are all claimed, and all given up.
func TestCase62(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		a.topic("t", 150)
		share := func(c1 int) string {
			var text []string
			for p := range 150 {
				owner := "c1"
				if p >= c1 {
					owner = "c2"
				}
				text = append(text, fmt.Sprintf("t/%d:%s-0", p, owner))
			}
			return strings.Join(text, " ")
		}
		c1 := a.join(membership.Config{ID: "c1"}, nil)
		a.ownedAs(time.Second, share(150))
		c2 := a.join(membership.Config{ID: "c2"}, nil)
		a.ownedAs(time.Second, share(75))
		c1.leave()
		a.ownedAs(time.Second, share(0))
		c2.leave()
		a.nothingLeft()
	})
}

// Field case 63: the session of a member ends while it waits for a partition. It
// stops waiting, and registers before it claims.
func TestCase63(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		a.topic("t", 1)
		lease, err := a.st.Grant(t.Context(), 30*time.Second)
		a.must(err)
		key := a.group.Owner(registry.Partition{Topic: "t", Home: 1})
		id, err := registry.Encode(registry.ConsumerRecord{Version: 1, Subscription: map[string]int32{"other": 1}, Pattern: registry.PatternStatic})
		a.must(err)
		a.write(registry.Put(a.group.ID("a"), id, lease.ID), registry.Put(key, []byte("a-0"), lease.ID))
		c := &cable{Store: a.st}
		b := a.join(membership.Config{ID: "b", Store: c, SessionTimeout: 5 * time.Second}, nil)
		synctest.Wait()
		before := a.list(a.group.ID("b"))[0]
		over, cancel := context.WithCancel(t.Context())
		defer cancel()
		go func() {
			for range a.st.Watch(over, a.group.Prefix(), 1) {
				for _, kv := range a.list(a.group.Owners()) {
					owner, _, _ := strings.Cut(string(kv.Value), "-")
					if len(a.list(a.group.ID(owner))) == 0 {
						t.Errorf("%s is owned by %s, who is not registered", kv.Key, owner)
					}
				}
			}
		}()
		c.still.Store(true)
		time.Sleep(6 * time.Second)
		c.still.Store(false)
		synctest.Wait()
		if !a.says("session lost") {
			t.Fatal("the waiter does not notice that its session is over")
		}
		time.Sleep(14 * time.Second)
		a.must(a.st.Revoke(t.Context(), lease.ID))
		a.ownedAs(time.Second, "t/0:b-0")
		if now := a.list(a.group.ID("b"))[0]; now.Lease == before.Lease || now.Lease != a.list(a.group.Owners())[0].Lease {
			t.Errorf("registered under %x, before %x", now.Lease, before.Lease)
		}
		b.leave()
		a.nothingLeft()
	})
}

func TestConfig(t *testing.T) {
	good := membership.Config{Store: newArena(t).st, Group: "g", Subscription: membership.Subscription{Topics: map[string]int32{"t": 1}}}
	for name, spoil := range map[string]func(*membership.Config){
		"no group":        func(c *membership.Config) { c.Group = "" },
		"no store":        func(c *membership.Config) { c.Store = nil },
		"no topic":        func(c *membership.Config) { c.Subscription.Topics = nil },
		"bad topic":       func(c *membership.Config) { c.Subscription.Topics = map[string]int32{"a/b": 1} },
		"no stream":       func(c *membership.Config) { c.Subscription.Topics = map[string]int32{"t": 0} },
		"strategy":        func(c *membership.Config) { c.Strategies = []string{"best"} },
		"short session":   func(c *membership.Config) { c.SessionTimeout = time.Millisecond },
		"negative leave":  func(c *membership.Config) { c.LeaveTimeout = -1 },
		"id with a NUL":   func(c *membership.Config) { c.ID = "a\x00" },
		"negative pauses": func(c *membership.Config) { c.ComplaintPause = -1 },
	} {
		cfg := good
		spoil(&cfg)
		if _, err := membership.New(cfg); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if m, err := membership.New(good); err != nil || m.ID() == "" {
		t.Errorf("refused: %v", err)
	}
}
