package main

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"
)

// daemon is a muster server on loopback.
type daemon struct {
	*process
	b      *bench
	kafka  string        // host:port
	etcd   string        // URL
	toward time.Duration // from start to ready
}

// ports are those of one daemon. They stay the same over its restarts: the etcd
// in the data directory remembers its own.
type ports struct{ kafka, client, peer int }

func freePorts() (p ports, err error) {
	for _, to := range []*int{&p.kafka, &p.client, &p.peer} {
		// All three are held until the last is found, so that they differ.
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return p, fmt.Errorf("find a free port: %w", err)
		}
		defer ln.Close()
		*to = ln.Addr().(*net.TCPAddr).Port
	}
	return p, nil
}

// startDaemon returns when the daemon is ready.
func (b *bench) startDaemon(ctx context.Context, dir string, p ports) (*daemon, error) {
	address := func(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
	d := &daemon{b: b, kafka: address(p.kafka), etcd: "http://" + address(p.client)}
	ready := make(chan time.Time, 1)
	var err error
	d.process, err = b.start(spec{
		name: "server",
		args: []string{b.binary, "server", "--data-dir", dir, "--listen", d.kafka,
			"--etcd-listen-client", d.etcd, "--etcd-listen-peer", "http://" + address(p.peer)},
		lines: func(line string, at time.Time) {
			if strings.HasPrefix(line, "ready") {
				select {
				case ready <- at:
				default: // only the first counts
				}
			}
		},
	})
	if err != nil {
		return nil, err
	}
	limit := time.NewTimer(startLimit)
	defer limit.Stop()
	select {
	case at := <-ready:
		d.toward = at.Sub(d.started)
		return d, nil
	case <-d.exited:
		err = d.alive()
	case <-limit.C:
		err = d.explain(fmt.Errorf("no ready line within %s", startLimit))
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	d.kill()
	return nil, err
}

// client is the command line of a client command of this daemon.
func (d *daemon) client(args ...string) []string {
	return append(append([]string{d.b.binary}, args...), "--etcd-endpoints", d.etcd)
}

func (d *daemon) createTopic(ctx context.Context, name string, partitions int) error {
	return d.b.call(ctx, "topics-create", d.client("topics", "create", name, "--partitions", strconv.Itoa(partitions))...)
}
