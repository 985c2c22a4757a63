package conformance

import (
	"bytes"
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"
)

// TestLongOutage: the only daemon, and with it the registry, is away for much
// longer than a lease. The consumers' sessions end; they neither give up nor hand
// over anything meanwhile, and are back soon after it is, not after the pauses that
// a connection takes that has failed for long.
func TestLongOutage(t *testing.T) {
	need(t, "etcdctl")
	c := newCluster(newSandbox(t))
	c.startDaemon()
	c.tool("topics", "create", "t", "--partitions", "4")
	short := []string{"--from-beginning", "--set", "zookeeper.session.timeout.ms=10000"}
	a, b := c.startConsumer("a", "g", "t", short...), c.startConsumer("b", "g", "t", short...)
	var all []string
	produce := func(from, n int) {
		var in bytes.Buffer
		for i := from; i < from+n; i++ {
			fmt.Fprintf(&in, "%d\n", i)
			all = append(all, fmt.Sprint(i))
		}
		c.feed(in.Bytes(), c.muster, "produce", "--etcd-endpoints", c.etcd, "--topic", "t")
	}
	printed := func() int {
		n := 0
		for _, p := range []*process{a, b} {
			out, err := os.ReadFile(p.stdout)
			if err != nil {
				t.Fatal(err)
			}
			n += bytes.Count(out, []byte("\n"))
		}
		return n
	}
	settled := func(when string) {
		t.Helper()
		until(t, patience, "all partitions are owned and consumed "+when, func() bool {
			d := c.describe("g")
			for _, r := range d.Partitions {
				if r.Owner == nil || r.Lag == nil || *r.Lag != 0 {
					return false
				}
			}
			return len(d.Partitions) == 4 && len(d.Members) == 2
		})
	}
	produce(0, 1000)
	settled("before the outage")
	if n := printed(); n != len(all) {
		t.Errorf("%d lines printed, want %d", n, len(all))
	}
	c.daemon.signal(syscall.SIGKILL)
	<-c.daemon.done
	away := time.Now()
	until(t, patience, "both consumers have lost their sessions", func() bool {
		for _, p := range []*process{a, b} {
			log, err := os.ReadFile(p.stderr)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Contains(log, []byte("session lost")) {
				return false
			}
		}
		return true
	})
	// Long enough for a connection that makes each pause 1.6 times as long as the one before
	// to be in one of 27 s: the pauses up to then take 43 s.
	time.Sleep(max(0, 46*time.Second-time.Since(away)))
	c.startDaemon()
	began := time.Now()
	produce(1000, 1000)
	settled("after it")
	took := time.Since(began)
	t.Logf("all owned and consumed %v after the daemon was ready again", took.Round(time.Millisecond))
	if took > 8*time.Second { // it takes two, most of them for a commit, of which one comes each second
		t.Errorf("back only %v after the daemon", took)
	}
	if n := printed(); n != len(all) {
		t.Errorf("%d lines printed, want %d: nothing was uncommitted when the outage began", n, len(all))
	}
	for _, p := range []*process{a, b} {
		p.signal(syscall.SIGTERM)
		p.exits(0, patience)
	}
}
