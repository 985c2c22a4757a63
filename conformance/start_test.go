package conformance

import (
	"bytes"
	"net"
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

// refuses starts a daemon that must not come up: exit status 1, nothing on stdout,
// and one line on stderr, which says what is wrong and what to do.
func (c *cluster) refuses(what string, argv []string, says ...string) {
	c.t.Helper()
	p := c.start("refused", nil, nil, argv...)
	p.exits(1, patience)
	stderr, err := os.ReadFile(p.stderr)
	if err != nil {
		c.t.Fatal(err)
	}
	if bytes.Count(stderr, []byte("\n")) != 1 || !bytes.HasSuffix(stderr, []byte("\n")) {
		c.t.Errorf("%s: want one line on stderr:\n%s", what, stderr)
	}
	for _, text := range says {
		if !regexp.MustCompile(text).Match(stderr) {
			c.t.Errorf("%s: the error does not say %q: %s", what, text, stderr)
		}
	}
	if p.size() != 0 {
		c.t.Errorf("%s: something on stdout", what)
	}
	c.t.Logf("%s: %s", what, bytes.TrimSpace(stderr))
}

// TestStartRefused: each reason not to start is a one-line error that says what to
// do, with exit status 1.
func TestStartRefused(t *testing.T) {
	b := newSandbox(t)
	c := newCluster(b)
	c.refuses("unknown flag", c.serverArgs("--no-such-flag"), "no-such-flag", "--help")
	c.refuses("value that is no number", c.serverArgs("--broker-id", "one"), "broker-id", "--help")
	c.refuses("argument", c.serverArgs("extra"), "extra", "--help")
	c.refuses("broker id below 0", c.serverArgs("--broker-id", "-1"), "--broker-id -1: want")
	c.refuses("impossible session timeout", c.serverArgs("--session-timeout", "1ms"), "--session-timeout 1ms: want")
	c.refuses("wildcard without an address for clients", c.serverArgs("--listen", "0.0.0.0:0"), "--listen 0.0.0.0:0", "--advertise")
	c.refuses("etcd open to the network", c.serverArgs("--etcd-listen-client", "http://0.0.0.0:0"), "--etcd-listen-client", "--insecure")
	c.refuses("etcd peers open to the network", c.serverArgs("--etcd-listen-peer", "http://0.0.0.0:0"), "--etcd-listen-peer", "--insecure")

	file := b.path("file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c.refuses("directory that cannot be made", c.serverArgs("--data-dir", file+"/data"), regexp.QuoteMeta(file+"/data"), "choose another --data-dir")

	for flag, at := range map[string]string{"--listen": c.kafka, "--etcd-listen-client": c.etcd, "--etcd-listen-peer": c.peer} {
		address := strings.TrimPrefix(at, "http://")
		ln, err := net.Listen("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		c.refuses("port of "+flag+" in use", c.serverArgs(), regexp.QuoteMeta(address)+" is in use", "another "+flag)
		ln.Close()
	}
	c.refuses("no etcd where it should be", c.serverArgs("--etcd-external", c.etcd), regexp.QuoteMeta(c.etcd))
}

// TestStartBesideAnother: what a running daemon holds, another does not get.
func TestStartBesideAnother(t *testing.T) {
	need(t, "etcdctl")
	b := newSandbox(t)
	c := newCluster(b)
	c.startDaemon("--session-timeout", "60s") // so that it is still there for one that starts slowly
	other := newCluster(b)
	c.refuses("directory of a running daemon", other.serverArgs("--data-dir", c.data), regexp.QuoteMeta(c.data), "in use by another daemon", "choose another --data-dir")
	c.refuses("broker id of a running daemon", other.serverArgs("--etcd-external", c.etcd),
		"broker id 1 is taken by "+regexp.QuoteMeta(c.kafka), `([1-9]|[1-5][0-9]|60) s left`, "choose another --broker-id")

	// With an id of its own the second one is welcome, in the directory in which it
	// was refused; and when it leaves its keys are gone at once, well before its lease
	// would have run out.
	h := c.watch()
	other.id = 2
	other.startDaemon("--etcd-external", c.etcd, "--session-timeout", "60s")
	key := "/brokers/ids/2"
	h.until(patience, "broker 2 is registered", func(tr tree) bool { return tr[key].Lease != 0 })
	lease := h.snapshot()[key].Lease
	c.tool("topics", "create", "both", "--partitions", "4")
	h.until(patience, "both brokers count their partitions", func(tr tree) bool {
		return string(tr["/brokers/topics/both/1"].Value) == "2" && string(tr["/brokers/topics/both/2"].Value) == "2"
	})
	since := time.Now()
	other.daemon.signal(syscall.SIGTERM)
	other.daemon.exits(0, patience)
	took := time.Since(since)
	for key, kv := range c.readTree() {
		if kv.Lease == lease {
			t.Errorf("%s is left after SIGTERM of its daemon", key)
		}
	}
	if c.leases()[lease] {
		t.Errorf("lease %x is left after SIGTERM of its daemon", lease)
	}
	t.Logf("broker 2 left without a trace, and exited, %v after SIGTERM", took.Round(time.Millisecond))
	h.p.kill()
	c.daemon.signal(syscall.SIGTERM)
	c.daemon.exits(0, patience)
	c.refuses("directory of another broker", c.serverArgs("--broker-id", "7"), regexp.QuoteMeta(c.data), "belongs to broker 1", "--broker-id 1")
}

// TestRestartAfterKill: a daemon that was killed is back under its id, without
// waiting for its own lease, as often as that happens; also when etcd is not its
// own, and has kept the lease running.
func TestRestartAfterKill(t *testing.T) {
	need(t, "etcdctl")
	b := newSandbox(t)
	etcd := newCluster(b)
	etcd.startDaemon()
	for _, external := range []bool{false, true} {
		c := newCluster(b)
		c.id = 3
		args := []string{"--session-timeout", "60s"}
		if external {
			args = append(args, "--etcd-external", etcd.etcd)
			c.etcd = etcd.etcd
		}
		c.startDaemon(args...)
		for range 2 {
			former := c.readTree()["/brokers/ids/3"]
			c.daemon.signal(syscall.SIGKILL)
			<-c.daemon.done
			took := c.startDaemon(args...)
			now := c.readTree()["/brokers/ids/3"]
			t.Logf("external etcd %v: ready %v after a start that follows kill -9", external, took.Round(time.Millisecond))
			if took > 30*time.Second { // of the lease two thirds at least are left at the kill
				t.Errorf("ready after %v: did it wait for its own lease of 60 s?", took)
			}
			if now.Lease == 0 || now.Lease == former.Lease || c.leases()[former.Lease] {
				t.Errorf("lease is %x, was %x, which is left: %v", now.Lease, former.Lease, c.leases()[former.Lease])
			}
		}
		c.daemon.signal(syscall.SIGTERM)
		c.daemon.exits(0, patience)
	}
}
