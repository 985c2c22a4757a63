package etcd

import (
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"slices"
	"strings"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/server/v3/embed"
)

// ServerOptions configure the etcd server inside this process.
type ServerOptions struct {
	Name         string // of this member
	Dir          string
	ListenClient string // URL with an IP address
	ListenPeer   string // URL with an IP address
	// AdvertiseClient is the URL by which clients elsewhere reach this member. Empty
	// means ListenClient, and for a wildcard the host of this member's entry in
	// InitialCluster.
	AdvertiseClient string
	// InitialCluster is NAME=PEERURL,… of all members, this one included; empty means
	// this member alone. It counts when the data directory is new.
	InitialCluster string
	// InitialClusterState is "new" (or empty), or "existing" for a member that joins a
	// cluster to which it was added.
	InitialClusterState string
	// PEM files of this member's certificate and of the authority that must have
	// signed those of clients and other members. Needed with https URLs.
	CACert, Cert, Key string
	Insecure          bool // allow addresses without TLS that other machines can reach
	Logger            *slog.Logger

	compaction compaction // zero means the usual one
	bcryptCost uint       // zero means etcd's default
}

const (
	// quotaBytes is the most that etcd recommends for a database.
	quotaBytes = 8 << 30
	tickMS     = 100
	electionMS = 1000
	// A server that is alone elects itself, and nothing but this time is between its
	// start and that: up to electionMS more, as etcd draws it at random.
	aloneTickMS     = 50
	aloneElectionMS = 250
	// snapshotEvery entries the raft log is cut; fewer entries than etcd's own
	// default, since all of them are kept in memory until then.
	snapshotEvery   = 5000
	snapshotCatchUp = 1000
)

// serverConfig checks the options. Its errors name the flag and say what to do.
func serverConfig(o ServerOptions) (*embed.Config, error) {
	client, err := o.parseListen("--etcd-listen-client", o.ListenClient)
	if err != nil {
		return nil, err
	}
	peer, err := o.parseListen("--etcd-listen-peer", o.ListenPeer)
	if err != nil {
		return nil, err
	}
	if o.CACert+o.Cert+o.Key != "" && client.Scheme == "http" && peer.Scheme == "http" {
		return nil, fmt.Errorf("--etcd-cacert, --etcd-cert and --etcd-key have no effect: begin --etcd-listen-client and --etcd-listen-peer with https, or leave them out")
	}
	members, err := parseInitialCluster(o)
	if err != nil {
		return nil, err
	}
	cfg := embed.NewConfig()
	cfg.Name, cfg.Dir = o.Name, o.Dir
	cfg.ListenClientUrls, cfg.ListenPeerUrls = []url.URL{client}, []url.URL{peer}
	own := reachable(peer)
	if len(members) > 0 {
		own = members[o.Name]
		if own.Scheme != peer.Scheme {
			return nil, fmt.Errorf("--etcd-initial-cluster says %s=%s and --etcd-listen-peer %s: begin both with http, or both with https", o.Name, own.String(), o.ListenPeer)
		}
	}
	cfg.AdvertisePeerUrls = []url.URL{own}
	advertised, err := o.advertiseClient(client, own)
	if err != nil {
		return nil, err
	}
	cfg.AdvertiseClientUrls = []url.URL{advertised}
	if cfg.InitialCluster = o.InitialCluster; len(members) == 0 {
		cfg.InitialCluster = o.Name + "=" + own.String()
	}
	if err := o.setState(cfg, len(members)); err != nil {
		return nil, err
	}
	if err := o.setTLS(cfg, client.Scheme == "https", peer.Scheme == "https"); err != nil {
		return nil, err
	}
	cfg.TickMs, cfg.ElectionMs = tickMS, electionMS
	if len(members) < 2 {
		cfg.TickMs, cfg.ElectionMs = aloneTickMS, aloneElectionMS
	}
	cfg.PreVote = true
	cfg.SnapshotCount, cfg.SnapshotCatchUpEntries = snapshotEvery, snapshotCatchUp
	cfg.QuotaBackendBytes = quotaBytes
	cfg.EnableGRPCGateway = false
	if o.bcryptCost != 0 {
		cfg.BcryptCost = o.bcryptCost
	}
	cfg.LogLevel = "error"
	return cfg, nil
}

// setTLS reads the files once, since etcd itself would start without them and fail on
// the first connection.
func (o *ServerOptions) setTLS(cfg *embed.Config, client, peer bool) error {
	secrets := transport.TLSInfo{CertFile: o.Cert, KeyFile: o.Key, TrustedCAFile: o.CACert, ClientCertAuth: true}
	if client || peer {
		if _, err := secrets.ServerConfig(); err != nil {
			return fmt.Errorf("--etcd-cacert %s, --etcd-cert %s, --etcd-key %s: %w", o.CACert, o.Cert, o.Key, err)
		}
	}
	if client {
		cfg.ClientTLSInfo = secrets
	}
	if peer {
		cfg.PeerTLSInfo = secrets
	}
	return nil
}

func (o *ServerOptions) setState(cfg *embed.Config, members int) error {
	switch o.InitialClusterState {
	case "", embed.ClusterStateFlagNew:
		cfg.ClusterState = embed.ClusterStateFlagNew
		return nil
	case embed.ClusterStateFlagExisting:
		if members < 2 {
			return fmt.Errorf("--etcd-initial-cluster-state existing: name the members of that cluster with --etcd-initial-cluster")
		}
		cfg.ClusterState = embed.ClusterStateFlagExisting
		return nil
	}
	return fmt.Errorf("--etcd-initial-cluster-state %q: want new or existing", o.InitialClusterState)
}

// parseListen refuses addresses that the network can reach unless clients must show a
// certificate there, or that was said aloud: there is no other authentication.
func (o *ServerOptions) parseListen(flag, text string) (url.URL, error) {
	u, err := parseURL(flag, text)
	if err != nil {
		return u, err
	}
	if u.Hostname() != "localhost" && net.ParseIP(u.Hostname()) == nil {
		return u, fmt.Errorf("%s %s: an IP address is needed to listen on, such as %s://0.0.0.0:%s; names belong into --etcd-advertise-client and --etcd-initial-cluster",
			flag, text, u.Scheme, u.Port())
	}
	if u.Scheme == "https" {
		for name, file := range map[string]string{"--etcd-cacert": o.CACert, "--etcd-cert": o.Cert, "--etcd-key": o.Key} {
			if file == "" {
				return u, fmt.Errorf("%s %s: https needs --etcd-cacert, --etcd-cert and --etcd-key, and %s is missing", flag, text, name)
			}
		}
		return u, nil
	}
	if !loopback(u.Hostname()) && !o.Insecure {
		return u, fmt.Errorf("%s %s is open to the network without authentication: begin it with https and set --etcd-cacert, --etcd-cert and --etcd-key, or use a loopback address, or add --insecure",
			flag, text)
	}
	return u, nil
}

func parseURL(flag, text string) (url.URL, error) {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.Port() == "" || u.Path != "" || u.User != nil || u.RawQuery != "" {
		return url.URL{}, fmt.Errorf("%s %q: want a URL such as http://127.0.0.1:2379", flag, text)
	}
	return *u, nil
}

// parseInitialCluster reads the peer URLs of all members; none if this one is alone.
func parseInitialCluster(o ServerOptions) (map[string]url.URL, error) {
	const flag = "--etcd-initial-cluster"
	if o.InitialCluster == "" {
		return nil, nil
	}
	members := map[string]url.URL{}
	var hosts []string
	for entry := range strings.SplitSeq(o.InitialCluster, ",") {
		name, text, ok := strings.Cut(entry, "=")
		if !ok || name == "" {
			return nil, fmt.Errorf("%s: entry %q: want NAME=URL, such as %s=http://10.0.0.1:2380", flag, entry, o.Name)
		}
		u, err := parseURL(flag+": entry "+name+"=", text)
		if err != nil {
			return nil, err
		}
		if wildcard(u) {
			return nil, fmt.Errorf("%s: entry %s: no other member can connect to %s", flag, entry, u.Host)
		}
		if _, twice := members[name]; twice || slices.Contains(hosts, u.Host) {
			return nil, fmt.Errorf("%s: entry %s: its name or address is there twice", flag, entry)
		}
		members[name], hosts = u, append(hosts, u.Host)
	}
	if _, ok := members[o.Name]; !ok {
		return nil, fmt.Errorf("%s has no entry for this member, %s: add %s=URL, or set --etcd-name to one of its names", flag, o.Name, o.Name)
	}
	return members, nil
}

// advertiseClient is where clients elsewhere are told to find this member.
func (o *ServerOptions) advertiseClient(listen, ownPeer url.URL) (url.URL, error) {
	if o.AdvertiseClient == "" {
		if wildcard(listen) {
			listen.Host = net.JoinHostPort(ownPeer.Hostname(), listen.Port())
		}
		return listen, nil
	}
	u, err := parseURL("--etcd-advertise-client", o.AdvertiseClient)
	switch {
	case err != nil:
		return u, err
	case wildcard(u):
		return u, fmt.Errorf("--etcd-advertise-client %s: no client can connect there", o.AdvertiseClient)
	case u.Scheme != listen.Scheme:
		return u, fmt.Errorf("--etcd-advertise-client %s and --etcd-listen-client %s: begin both with http, or both with https", o.AdvertiseClient, o.ListenClient)
	}
	return u, nil
}

// ownEndpoint is where this process finds its server: where the certificate is right,
// else where no network is needed.
func ownEndpoint(cfg *embed.Config) string {
	u := cfg.AdvertiseClientUrls[0]
	if u.Scheme == "http" {
		u = reachable(cfg.ListenClientUrls[0])
	}
	return u.String()
}

func loopback(host string) bool {
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

func wildcard(u url.URL) bool {
	ip := net.ParseIP(u.Hostname())
	return ip != nil && ip.IsUnspecified()
}

// reachable replaces a wildcard by loopback, which is where this process finds it.
func reachable(u url.URL) url.URL {
	if wildcard(u) {
		host := "127.0.0.1"
		if net.ParseIP(u.Hostname()).To4() == nil {
			host = "::1"
		}
		u.Host = net.JoinHostPort(host, u.Port())
	}
	return u
}
