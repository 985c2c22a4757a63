package broker

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/etcd"
)

// Config is the settings of a daemon. Each names its flag; MUSTER_ and the flag's
// name in capitals is its environment variable.
type Config struct {
	// ID is --broker-id, which no other live daemon may have. It is remembered in the
	// data directory, which then belongs to it.
	ID int32
	// DataDir is --data-dir: the log, the embedded etcd, and a lock.
	DataDir string
	// Listen is --listen, where Kafka clients connect: host:port. Port 0 takes a
	// free one.
	Listen string
	// Advertise is --advertise, the address that clients are told. Empty means Listen;
	// it is required where that is a wildcard.
	Advertise string

	// HTTP is --http, where probes and Prometheus read health and metrics: host:port.
	// Empty for none. It only reads, so it may be open to the network.
	HTTP string

	// LocalSocket is --local-socket, a socket file by which consumers in containers of
	// this host are watched. Empty for none; consumers outside of containers need none.
	LocalSocket string

	// Etcd is an existing cluster to use: --etcd-external and the flags of a client.
	// Without endpoints the daemon runs an etcd server itself.
	Etcd etcd.Options
	// The embedded server: --etcd-listen-client, --etcd-listen-peer,
	// --etcd-advertise-client, --etcd-name, --etcd-initial-cluster,
	// --etcd-initial-cluster-state. Empty name means muster-<broker id>. With https URLs
	// its TLS files are those of Etcd.
	EtcdListenClient        string
	EtcdListenPeer          string
	EtcdAdvertiseClient     string
	EtcdName                string
	EtcdInitialCluster      string
	EtcdInitialClusterState string
	// Insecure, --insecure, lets the embedded etcd listen where other machines can reach
	// it without TLS, and so without authentication.
	Insecure bool

	Root           registry.Root // --registry-root
	SessionTimeout time.Duration // --session-timeout; zero means 6 s

	AutoCreateTopics bool  // --auto-create-topics
	NumPartitions    int32 // --num-partitions of a topic that is created automatically; zero means 1
	SegmentBytes     int64 // --segment-bytes; zero means 1 GiB

	Logger *slog.Logger // nil discards
}

// ErrConfig marks a setting that cannot be.
var ErrConfig = errors.New("invalid setting")

// address is where clients connect, in its parts.
type address struct {
	host string
	port int32
}

// check fills in defaults and returns the address to listen on and the one to
// advertise, whose port is 0 if the listener's is to be used.
func (c *Config) check() (listen, advertise address, err error) {
	fail := func(format string, args ...any) (address, address, error) {
		return address{}, address{}, fmt.Errorf("%w: "+format, append([]any{ErrConfig}, args...)...)
	}
	if c.ID < 0 {
		return fail("--broker-id %d: want 0 or more", c.ID)
	}
	if c.DataDir == "" {
		return fail("--data-dir is empty")
	}
	if listen.host, listen.port, err = ParseAddress(c.Listen); err != nil {
		return fail("--listen: %w", err)
	}
	advertise = address{host: listen.host}
	switch {
	case c.Advertise != "":
		if advertise.host, advertise.port, err = ParseAddress(c.Advertise); err != nil {
			return fail("--advertise: %w", err)
		}
		if wildcard(advertise.host) || advertise.port == 0 {
			return fail("--advertise %s: no client can connect there", c.Advertise)
		}
	case wildcard(listen.host):
		return fail("--listen %s is a wildcard: say with --advertise host:port where clients reach this daemon", c.Listen)
	}
	if c.HTTP != "" {
		if _, _, err := ParseAddress(c.HTTP); err != nil {
			return fail("--http: %w", err)
		}
	}
	if c.SessionTimeout == 0 {
		c.SessionTimeout = registry.DefaultTTL
	}
	if c.SessionTimeout < registry.MinTTL || c.SessionTimeout > registry.MaxTTL {
		return fail("--session-timeout %s: want %s to %s", c.SessionTimeout, registry.MinTTL, registry.MaxTTL)
	}
	if c.NumPartitions == 0 {
		c.NumPartitions = 1
	}
	if c.NumPartitions < 1 || c.NumPartitions > registry.MaxPartitions {
		return fail("--num-partitions %d: want 1 to %d", c.NumPartitions, registry.MaxPartitions)
	}
	if c.SegmentBytes != 0 && (c.SegmentBytes < minSegmentBytes || c.SegmentBytes > maxSegmentBytes) {
		return fail("--segment-bytes %d: want %d to %d", c.SegmentBytes, minSegmentBytes, int64(maxSegmentBytes))
	}
	if c.EtcdName == "" {
		c.EtcdName = fmt.Sprintf("muster-%d", c.ID)
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return listen, advertise, nil
}

// A segment is at least one batch of the largest size, and at most what the
// positions of Kafka's index can say.
const (
	minSegmentBytes = 1 << 20
	maxSegmentBytes = 1 << 30
)
