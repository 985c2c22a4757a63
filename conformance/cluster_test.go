package conformance

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"time"
)

// cluster is a daemon with an embedded etcd, and the tools set to it.
type cluster struct {
	*sandbox
	muster string
	kafka  string // host:port
	etcd   string // URL
	peer   string // URL
	data   string
	id     int
	daemon *process
}

// newCluster chooses ports and a directory; nothing runs yet.
func newCluster(b *sandbox) *cluster {
	b.t.Helper()
	bin, err := musterBinary()
	if err != nil {
		b.t.Fatal(err)
	}
	ports := freePorts(b, 3)
	return &cluster{sandbox: b, muster: bin, id: 1, data: b.path("data-" + ports[0]), kafka: "127.0.0.1:" + ports[0],
		etcd: "http://127.0.0.1:" + ports[1], peer: "http://127.0.0.1:" + ports[2]}
}

// freePorts finds ports below those that the kernel gives to outgoing
// connections. Among those a client that dials a daemon which is down could be
// given that daemon's own port, and keep it from coming back. A UDP socket of the same
// number keeps each from being found again, here or by the other tests of Muster, until
// the sandbox is closed.
func freePorts(b *sandbox, n int) []string {
	b.t.Helper()
	low := 32768
	if data, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range"); err == nil {
		if first, err := strconv.Atoi(strings.Fields(string(data))[0]); err == nil && first > 12000 {
			low = first
		}
	}
	var ports []string
	for len(ports) < n {
		port := 10000 + rand.IntN(low-10000)
		lock, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port})
		if err != nil {
			continue
		}
		ln, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(port))
		if err != nil {
			lock.Close()
			continue
		}
		ln.Close()
		b.ports = append(b.ports, lock)
		ports = append(ports, strconv.Itoa(port))
	}
	return ports
}

// serverArgs are the arguments of the daemon; later ones win.
func (c *cluster) serverArgs(more ...string) []string {
	args := []string{c.muster, "server", "--broker-id", strconv.Itoa(c.id), "--data-dir", c.data, "--listen", c.kafka,
		"--etcd-listen-client", c.etcd, "--etcd-listen-peer", c.peer}
	return append(args, more...)
}

// startDaemon starts the daemon and returns the time until it was ready.
func (c *cluster) startDaemon(more ...string) time.Duration {
	c.t.Helper()
	began := time.Now()
	c.daemon = c.start("daemon", nil, nil, c.serverArgs(more...)...)
	c.ready(c.daemon)
	return time.Since(began)
}

// ready waits for a daemon's line on stdout.
func (c *cluster) ready(p *process) {
	c.t.Helper()
	until(c.t, patience, p.name+" is ready", func() bool {
		if !p.running() {
			c.t.Fatalf("%s ended: %s; stderr: %s", p.name, p.state(), tail(p.stderr))
		}
		out, err := os.ReadFile(p.stdout)
		return err == nil && bytes.HasPrefix(out, []byte("ready")) && bytes.HasSuffix(out, []byte("\n"))
	})
}

// startConsumer starts a consumer process.
func (c *cluster) startConsumer(name, group, topic string, more ...string) *process {
	c.t.Helper()
	args := []string{c.muster, "consume", "--etcd-endpoints", c.etcd, "--group", group, "--topic", topic,
		"--format", `%p %o %k %s\n`}
	return c.start(name, nil, nil, append(args, more...)...)
}

// run runs a tool to its end and returns its output.
func (c *cluster) run(argv ...string) []byte {
	c.t.Helper()
	return c.feed(nil, argv...)
}

// feed is run with an input.
func (c *cluster) feed(stdin []byte, argv ...string) []byte {
	c.t.Helper()
	p := c.start("tool", bytes.NewReader(stdin), nil, argv...)
	p.exits(0, patience)
	out, err := os.ReadFile(p.stdout)
	if err != nil {
		c.t.Fatal(err)
	}
	return out
}

// tool runs one of Muster's client commands.
func (c *cluster) tool(args ...string) []byte {
	c.t.Helper()
	return c.run(append([]string{c.muster}, append(args, "--etcd-endpoints", c.etcd)...)...)
}

// description is what the test reads of groups describe -o json.
type description struct {
	Group    string `json:"group"`
	Strategy string `json:"strategy"`
	Members  []struct {
		ID string `json:"id"`
	} `json:"members"`
	Partitions []struct {
		Topic     string  `json:"topic"`
		Partition int     `json:"partition"`
		Broker    int     `json:"broker"`
		Offset    *int64  `json:"offset"`
		LogEnd    *int64  `json:"log_end"`
		Lag       *int64  `json:"lag"`
		Owner     *string `json:"owner"`
		Host      *string `json:"host"`
	} `json:"partitions"`
}

func (c *cluster) describe(group string) description {
	c.t.Helper()
	var d description
	if err := json.Unmarshal(c.tool("groups", "describe", group, "-o", "json"), &d); err != nil {
		c.t.Fatalf("groups describe: %v", err)
	}
	return d
}

// logEnds are the ends of the group's partitions, by number.
func (d description) logEnds() (map[int]int64, error) {
	ends := map[int]int64{}
	for _, r := range d.Partitions {
		if r.LogEnd == nil {
			return nil, fmt.Errorf("no log end of partition %d", r.Partition)
		}
		ends[r.Partition] = *r.LogEnd
	}
	return ends, nil
}
