package etcd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strings"
	"sync/atomic"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// ServerOptions configure the etcd server inside this process.
type ServerOptions struct {
	Name           string // of this member
	Dir            string
	ListenClient   string // URL
	ListenPeer     string // URL
	InitialCluster string // name=peer URL,…; empty: this member alone
	Insecure       bool   // allow addresses that other machines can reach
	Logger         *slog.Logger
}

// Server is an etcd server inside this process.
type Server struct {
	etcd *embed.Etcd
	log  *slogCore
	// Endpoint is the URL that clients on this machine use.
	Endpoint string
}

const (
	// quotaBytes is the most that etcd recommends for a database.
	quotaBytes = 8 << 30
	// keepRevisions is how far back history reaches: minutes of the heaviest load,
	// longer than any watch should lag, and small enough for months of running.
	keepRevisions = "500000"
	tickMS        = 100
	electionMS    = 1000
	// A server that is alone elects itself, and nothing but this time is between its
	// start and that: up to electionMS more, as etcd draws it at random.
	aloneTickMS     = 50
	aloneElectionMS = 250
	// snapshotEvery entries the raft log is cut; fewer entries than etcd's own
	// default, since all of them are kept in memory until then.
	snapshotEvery   = 5000
	snapshotCatchUp = 1000
)

// StartServer starts etcd and returns when it serves, or when ctx ends.
func StartServer(ctx context.Context, o ServerOptions) (*Server, error) {
	cfg, err := serverConfig(o)
	if err != nil {
		return nil, err
	}
	core := newLogCore(o.Logger)
	core.mute() // what goes wrong now is returned, and to be said once
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.New(core))
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		return nil, explainStart(o, err)
	}
	core.unmute()
	s := &Server{etcd: e, log: core, Endpoint: cfg.AdvertiseClientUrls[0].String()}
	select {
	case <-e.Server.ReadyNotify():
		return s, nil
	case err = <-e.Err():
	case <-e.Server.StopNotify():
		err = errors.New("etcd stopped while starting")
	case <-ctx.Done():
		err = ctx.Err()
	}
	e.Close()
	return nil, fmt.Errorf("start embedded etcd: %w", err)
}

// Err receives an error if the server fails.
func (s *Server) Err() <-chan error { return s.etcd.Err() }

// Close stops the server and waits for it.
func (s *Server) Close() {
	s.log.mute()
	s.etcd.Close()
}

func serverConfig(o ServerOptions) (*embed.Config, error) {
	client, err := parseListen("--etcd-listen-client", o.ListenClient, o.Insecure)
	if err != nil {
		return nil, err
	}
	peer, err := parseListen("--etcd-listen-peer", o.ListenPeer, o.Insecure)
	if err != nil {
		return nil, err
	}
	cfg := embed.NewConfig()
	cfg.Name = o.Name
	cfg.Dir = o.Dir
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{client}, []url.URL{reachable(client)}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{peer}, []url.URL{reachable(peer)}
	cfg.InitialCluster = o.InitialCluster
	if cfg.InitialCluster == "" {
		cfg.InitialCluster = o.Name + "=" + cfg.AdvertisePeerUrls[0].String()
	}
	cfg.TickMs, cfg.ElectionMs = tickMS, electionMS
	if !strings.Contains(cfg.InitialCluster, ",") {
		cfg.TickMs, cfg.ElectionMs = aloneTickMS, aloneElectionMS
	}
	cfg.PreVote = true
	cfg.SnapshotCount, cfg.SnapshotCatchUpEntries = snapshotEvery, snapshotCatchUp
	cfg.AutoCompactionMode, cfg.AutoCompactionRetention = embed.CompactorModeRevision, keepRevisions
	cfg.QuotaBackendBytes = quotaBytes
	cfg.EnableGRPCGateway = false
	cfg.LogLevel = "error"
	return cfg, nil
}

// parseListen refuses addresses that the network can reach unless that was said
// aloud: the server here has no authentication.
func parseListen(flag, text string, insecure bool) (url.URL, error) {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "http" || u.Port() == "" || u.Path != "" {
		return url.URL{}, fmt.Errorf("%s %q: want a URL such as http://127.0.0.1:2379", flag, text)
	}
	if !loopback(u.Hostname()) && !insecure {
		return url.URL{}, fmt.Errorf("%s %s is open to the network without authentication: use a loopback address, or add --insecure", flag, text)
	}
	return *u, nil
}

func loopback(host string) bool {
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

// reachable replaces a wildcard by loopback, which is where this process finds it.
func reachable(u url.URL) url.URL {
	if ip := net.ParseIP(u.Hostname()); ip != nil && ip.IsUnspecified() {
		host := "127.0.0.1"
		if ip.To4() == nil {
			host = "::1"
		}
		u.Host = net.JoinHostPort(host, u.Port())
	}
	return u
}

func explainStart(o ServerOptions, err error) error {
	text := err.Error()
	if strings.Contains(text, "address already in use") {
		where, flags := o.ListenClient+" or "+o.ListenPeer, "--etcd-listen-client or --etcd-listen-peer"
		for flag, listen := range map[string]string{"--etcd-listen-client": o.ListenClient, "--etcd-listen-peer": o.ListenPeer} {
			// The text names an address, such as 127.0.0.1:2380, and goes on with a colon.
			if u, err := url.Parse(listen); err == nil && strings.Contains(text, " "+u.Host+":") {
				where, flags = listen, flag
			}
		}
		return fmt.Errorf("embedded etcd: %s is in use: stop what listens there, or choose another %s, or use that etcd with --etcd-external",
			where, flags)
	}
	return fmt.Errorf("start embedded etcd in %s: %w", o.Dir, err)
}

// slogCore sends what etcd logs to the daemon's log.
type slogCore struct {
	log   *slog.Logger
	with  []zapcore.Field
	muted *atomic.Bool
}

func newLogCore(log *slog.Logger) *slogCore {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &slogCore{log: log.With("part", "etcd"), muted: new(atomic.Bool)}
}

// mute ends the output: a server that is being closed calls each of its own
// listeners an error.
func (c *slogCore) mute() { c.muted.Store(true) }

func (c *slogCore) unmute() { c.muted.Store(false) }

// Enabled: what ends the process is said also when muted.
func (c *slogCore) Enabled(l zapcore.Level) bool {
	return l > zapcore.ErrorLevel || l == zapcore.ErrorLevel && !c.muted.Load()
}

func (c *slogCore) With(fields []zapcore.Field) zapcore.Core {
	return &slogCore{log: c.log, muted: c.muted, with: append(c.with[:len(c.with):len(c.with)], fields...)}
}

func (c *slogCore) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return ce.AddCore(e, c)
	}
	return ce
}

func (c *slogCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	enc := zapcore.NewMapObjectEncoder()
	for _, f := range append(c.with[:len(c.with):len(c.with)], fields...) {
		f.AddTo(enc)
	}
	attrs := make([]any, 0, 2*len(enc.Fields))
	for k, v := range enc.Fields {
		attrs = append(attrs, k, v)
	}
	c.log.Error(e.Message, attrs...)
	return nil
}

func (c *slogCore) Sync() error { return nil }
