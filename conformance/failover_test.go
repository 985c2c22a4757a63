package conformance

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestThreeDaemonsAreOneCluster: three daemons form one etcd cluster by flags and a
// fourth is only a client of it. Each of the three is killed, and started again, in
// turn; a consumer and a tool that were given the address of one go on, and the
// consumer keeps the registration it has from the beginning.
func TestThreeDaemonsAreOneCluster(t *testing.T) {
	need(t, "etcdctl")
	const session = 15 * time.Second // longer than a busy machine takes to elect a leader
	b := newSandbox(t)
	var nodes []*cluster
	var initial []string
	for i := range 3 {
		c := newCluster(b)
		c.id = i + 1
		nodes = append(nodes, c)
		initial = append(initial, fmt.Sprintf("node-%d=%s", c.id, c.peer))
	}
	args := func(c *cluster) []string {
		return c.serverArgs("--session-timeout", session.String(), "--etcd-name", fmt.Sprintf("node-%d", c.id), "--etcd-initial-cluster", strings.Join(initial, ","))
	}
	nodes[0].daemon = b.start("daemon-1", nil, nil, args(nodes[0])...)
	until(t, patience, "the first daemon says what it waits for", func() bool {
		return strings.Contains(tail(nodes[0].daemon.stderr), "waiting for most members of the etcd cluster")
	})
	for _, c := range nodes[1:] {
		c.daemon = b.start(fmt.Sprintf("daemon-%d", c.id), nil, nil, args(c)...)
	}
	for _, c := range nodes {
		c.ready(c.daemon)
	}
	// One endpoint: that of the first.
	fourth := newCluster(b)
	fourth.id, fourth.etcd = 4, nodes[0].etcd
	fourth.daemon = b.start("daemon-4", nil, nil, fourth.serverArgs("--session-timeout", session.String(), "--etcd-external", nodes[0].etcd)...)
	fourth.ready(fourth.daemon)

	fourth.tool("topics", "create", "orders", "--partitions", "8")
	consumer := fourth.startConsumer("consumer", "g", "orders", "--from-beginning", "--set", fmt.Sprintf("zookeeper.session.timeout.ms=%d", session.Milliseconds()))
	registration := func(at *cluster) (key string, lease int64) {
		for key, kv := range at.readTree() {
			if strings.HasPrefix(key, "/consumers/g/ids/") {
				return key, kv.Lease
			}
		}
		return "", 0
	}
	var lease int64
	until(t, patience, "the consumer is registered", func() bool {
		_, lease = registration(nodes[0])
		return lease != 0
	})
	for round, victim := range nodes {
		alive := nodes[(round+1)%3]
		victim.daemon.signal(syscall.SIGKILL)
		<-victim.daemon.done
		down := time.Now()
		// Past the consumer's deadline, had it lost its registry with the one endpoint.
		for time.Since(down) < session+time.Second {
			for _, id := range []int{4, alive.id} {
				key := fmt.Sprintf("/brokers/ids/%d", id)
				if _, there := alive.readTree()[key]; !there {
					t.Errorf("daemon %d is down: %s is gone", victim.id, key)
				}
			}
			time.Sleep(500 * time.Millisecond)
		}
		if _, now := registration(alive); now != lease {
			t.Errorf("daemon %d is down: the consumer's lease is %x, was %x", victim.id, now, lease)
		}
		began := time.Now()
		victim.daemon = b.start(fmt.Sprintf("daemon-%d", victim.id), nil, nil, args(victim)...)
		victim.ready(victim.daemon)
		t.Logf("daemon %d is back %v after its start", victim.id, time.Since(began).Round(time.Millisecond))
		record := fmt.Sprintf("round %d", round)
		alive.feed([]byte(record+"\n"), alive.muster, "produce", "--topic", "orders", "--etcd-endpoints", alive.etcd)
		until(t, patience, "the consumer has "+record, func() bool {
			out, err := os.ReadFile(consumer.stdout)
			return err == nil && strings.Contains(string(out), record)
		})
	}
	for _, p := range []*process{consumer, fourth.daemon, nodes[0].daemon, nodes[1].daemon} {
		p.signal(syscall.SIGTERM)
		p.exits(0, patience)
	}
	// The last one has no quorum any more in which to take its keys away.
	nodes[2].daemon.signal(syscall.SIGTERM)
	nodes[2].daemon.exits(0, patience)
	if says := tail(nodes[2].daemon.stderr); !strings.Contains(says, "left to run out") || !strings.Contains(says, "etcd has no quorum") {
		t.Errorf("the last daemon does not say why it could not leave: %s", says)
	}

	other := append(args(nodes[1]), "--etcd-name", "node-9", "--etcd-initial-cluster", "node-9="+nodes[1].peer)
	nodes[1].refuses("another etcd name than the data's", other, "belong to member node-2", "--etcd-name node-2")
	nodes[1].refuses("data of one of several, alone", nodes[1].serverArgs("--etcd-name", "node-2"), "node-1=", "--etcd-initial-cluster")
}
