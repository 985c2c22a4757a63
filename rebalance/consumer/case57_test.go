package consumer_test

import (
	"context"
	"net"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/muster-io/muster/rebalance/consumer"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/etcd"
)

// cable is a TCP connection to etcd that can be cut and mended.
type cable struct {
	mu    sync.Mutex
	mend  *sync.Cond
	cut   bool
	conns []net.Conn
}

func newCable(t *testing.T, endpoint string) (*cable, string) {
	t.Helper()
	u, err := url.Parse(endpoint)
	must(t, err)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	c := &cable{}
	c.mend = sync.NewCond(&c.mu)
	var work sync.WaitGroup
	carry := func(to, from net.Conn) {
		defer to.Close()
		defer from.Close()
		buf := make([]byte, 32<<10)
		for {
			n, err := from.Read(buf)
			c.wait()
			if _, errW := to.Write(buf[:n]); err != nil || errW != nil {
				return
			}
		}
	}
	work.Go(func() {
		for {
			near, err := ln.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", u.Host)
			if err != nil {
				near.Close()
				continue
			}
			c.mu.Lock()
			c.conns = append(c.conns, near, far)
			c.mu.Unlock()
			work.Go(func() { carry(near, far) })
			work.Go(func() { carry(far, near) })
		}
	})
	t.Cleanup(func() {
		ln.Close()
		c.set(false, true)
		work.Wait()
	})
	return c, "http://" + ln.Addr().String()
}

func (c *cable) wait() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.cut {
		c.mend.Wait()
	}
}

// set cuts or mends the cable; lose closes the connections that there are.
func (c *cable) set(cut, lose bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if lose {
		for _, conn := range c.conns {
			conn.Close()
		}
		c.conns = nil
	}
	c.cut = cut
	c.mend.Broadcast()
}

// Field case 57: while a member is cut off, another comes, one leaves, and history is
// compacted. When it is back it learns of both, and the group divides anew.
func TestCase57(t *testing.T) {
	topic, group := name(t, "t"), name(t, "g")
	createTopic(t, topic, 4)
	c, endpoint := newCable(t, shared.daemon.EtcdEndpoints()[0])
	far, err := etcd.Open(t.Context(), etcd.Options{Endpoints: []string{endpoint}})
	must(t, err)
	t.Cleanup(func() { far.Close() })
	quiet := func(context.Context, *consumer.Record) error { return nil }
	cfg := func(id string, st registry.Store) consumer.Config {
		return consumer.Config{ID: id, Group: group, Topics: map[string]int32{topic: 1}, Store: st}
	}
	c1 := start(t, cfg("c1", shared.store), quiet)
	c2 := start(t, cfg("c2", far), quiet)
	ownedAs(t, group, topic, "0:c1 1:c1 2:c2 3:c2")

	c.set(true, false)
	start(t, cfg("c3", shared.store), quiet)
	c1.stop(t)
	ids := root.Group(group).IDs()
	var revision int64
	eventually(t, func() string {
		kvs, rev, err := registry.List(t.Context(), shared.store, ids, 0)
		must(t, err)
		if len(kvs) != 2 || kvs[1].Key != root.Group(group).ID("c3") {
			return "c3 has not come"
		}
		revision = rev
		return ""
	})
	_, err = shared.store.Client().Compact(t.Context(), revision)
	must(t, err)
	c.set(false, true)
	back := time.Now()
	ownedAs(t, group, topic, "0:c2 1:c2 2:c3 3:c3")
	took := time.Since(back)
	t.Logf("divided anew %s after it was back", took.Round(time.Millisecond))
	// What is not heard from the watch is found out half a session after its last word.
	if took > registry.MaxTTL/3 {
		t.Errorf("that took %s", took)
	}
	select {
	case <-c2.done:
		t.Errorf("c2 has ended: %v", c2.err)
	default:
	}
}
