package conformance

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// three are daemons whose embedded etcd servers form one cluster. The tools that it
// embeds are given the addresses of all.
type three struct {
	*cluster
	nodes []*cluster
	flags []string // of every daemon
}

func newThree(b *sandbox, flags ...string) *three {
	b.t.Helper()
	c := &three{flags: flags}
	var names, kafka, etcd []string
	for i := range 3 {
		n := newCluster(b)
		n.id = i + 1
		c.nodes = append(c.nodes, n)
		names = append(names, fmt.Sprintf("muster-%d=%s", n.id, n.peer))
		kafka, etcd = append(kafka, n.kafka), append(etcd, n.etcd)
	}
	c.flags = append([]string{"--etcd-initial-cluster", strings.Join(names, ",")}, flags...)
	front := *c.nodes[0]
	front.kafka, front.etcd = strings.Join(kafka, ","), strings.Join(etcd, ",")
	c.cluster = &front
	return c
}

// launch starts a daemon; ready waits for it, since none is ready without a second.
func (c *three) launch(n *cluster) {
	c.t.Helper()
	n.daemon = c.start("daemon-"+strconv.Itoa(n.id), nil, nil, n.serverArgs(c.flags...)...)
}

func (c *three) startAll() time.Duration {
	c.t.Helper()
	began := time.Now()
	for _, n := range c.nodes {
		c.launch(n)
	}
	for _, n := range c.nodes {
		c.ready(n.daemon)
	}
	return time.Since(began)
}

// leader is the daemon whose etcd leads the others. All must be up.
func (c *three) leader() *cluster {
	c.t.Helper()
	var answers []struct {
		Endpoint string
		Status   struct {
			Header struct {
				Member uint64 `json:"member_id"`
			} `json:"header"`
			Leader uint64 `json:"leader"`
		}
	}
	var found *cluster
	until(c.t, patience, "etcd has one leader", func() bool {
		if err := json.Unmarshal(c.etcdctl("endpoint", "status"), &answers); err != nil {
			c.t.Fatalf("etcdctl endpoint status: %v", err)
		}
		found = nil
		for i, a := range answers {
			if a.Status.Leader == 0 || a.Status.Leader != answers[0].Status.Leader {
				return false
			}
			if a.Status.Header.Member == a.Status.Leader {
				found = c.nodes[i]
			}
		}
		return found != nil && len(answers) == len(c.nodes)
	})
	return found
}

// brokerKey is the registration of a daemon.
func (c *cluster) brokerKey() string { return "/brokers/ids/" + strconv.Itoa(c.id) }

// stopAll ends the daemons one after the other. The second takes the quorum with it,
// and the last must end in order all the same.
func (c *three) stopAll() {
	c.t.Helper()
	for _, n := range c.nodes {
		began := time.Now()
		n.daemon.signal(syscall.SIGTERM)
		n.daemon.exits(0, patience)
		c.t.Logf("broker %d ended %v after SIGTERM", n.id, since(began))
	}
}

// follow reads what a file gets, line by line, and calls f with each whole line and
// the time at which it was seen, until stop is closed.
func follow(path string, stop <-chan struct{}, f func(line string, at time.Time)) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	var rest []byte
	buffer := make([]byte, 1<<16)
	for ended := false; ; {
		n, _ := file.Read(buffer) // at the end of the file 0, and an error that says so
		if n == 0 {
			if ended {
				return nil
			}
			select {
			case <-stop:
				ended = true // what came meanwhile is still read
			case <-time.After(5 * time.Millisecond):
			}
			continue
		}
		at := time.Now()
		rest = append(rest, buffer[:n]...)
		from := rest
		for {
			text, more, whole := bytes.Cut(from, []byte("\n"))
			if !whole {
				break
			}
			from = more
			f(string(text), at)
		}
		rest = append(rest[:0], from...)
	}
}
