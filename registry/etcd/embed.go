package etcd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"google.golang.org/grpc"
)

// Server is an etcd server inside this process.
type Server struct {
	etcd *embed.Etcd
	log  *slogCore
	// Endpoint is the URL that clients on this machine use.
	Endpoint string

	ctx    context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup

	mu   sync.Mutex
	apis []*grpc.Server // what clients speak to, one a listener
}

// StartServer starts etcd and returns when it serves, or when ctx ends. Where it is
// one of several members, that is when most of them have started: until then it waits
// and says so in the log.
func StartServer(ctx context.Context, o ServerOptions) (*Server, error) {
	cfg, err := serverConfig(o)
	if err != nil {
		return nil, err
	}
	if err := checkMemberDir(o); err != nil {
		return nil, err
	}
	core := newLogCore(o.Logger)
	core.starting.Store(true) // what goes wrong now is returned, and to be said once
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.New(core, zap.WithFatalHook(core)))
	s := &Server{log: core, Endpoint: ownEndpoint(cfg)}
	cfg.ServiceRegister = func(api *grpc.Server) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.apis = append(s.apis, api)
	}
	e, err := startEtcd(cfg)
	if err != nil {
		return nil, explainStart(o, err)
	}
	s.etcd = e
	s.ctx, s.cancel = context.WithCancel(context.Background())
	differs, err := checkMembers(o, e)
	if err == nil {
		core.starting.Store(false)
		if differs != "" {
			core.log.Warn("--etcd-initial-cluster is not what the data say, and the data count; members are changed with etcdctl member",
				"initial_cluster", o.InitialCluster, "members", differs)
		}
		err = s.awaitReady(ctx, o)
	}
	if err == nil {
		err = saveMember(o)
	}
	if err != nil {
		e.Server.Stop() // closing waits for it to be ready, or stopped
		s.Close()
		return nil, err
	}
	if o.compaction == (compaction{}) {
		o.compaction = usualCompaction()
	}
	s.work.Go(func() { s.compact(o.compaction) })
	return s, nil
}

// startEtcd turns what ends a process into an error: a write-ahead log that cannot be
// read, data of a newer version. What etcd had opened by then stays open; the process
// is about to end.
func startEtcd(cfg *embed.Config) (e *embed.Etcd, err error) {
	defer func() {
		if r := recover(); r != nil {
			e, err = nil, fmt.Errorf("%v", r)
		}
	}()
	return embed.StartEtcd(cfg)
}

// waitSaid is how often a wait for the other members is said.
const waitSaid = 5 * time.Second

func (s *Server) awaitReady(ctx context.Context, o ServerOptions) error {
	said := time.NewTicker(waitSaid)
	defer said.Stop()
	began := time.Now()
	for {
		select {
		case <-s.etcd.Server.ReadyNotify():
			return nil
		case err := <-s.etcd.Err():
			return fmt.Errorf("start embedded etcd: %w", err)
		case <-s.etcd.Server.StopNotify():
			return errors.New("start embedded etcd: it stopped while starting")
		case <-ctx.Done():
			if o.InitialCluster != "" {
				return fmt.Errorf("embedded etcd %s has waited in vain for most of %s: %w", o.Name, o.InitialCluster, ctx.Err())
			}
			return fmt.Errorf("start embedded etcd: %w", ctx.Err())
		case <-said.C:
			s.log.log.Warn("waiting for most members of the etcd cluster: start them, and see that they reach each other",
				"name", o.Name, "initial_cluster", o.InitialCluster, "for", time.Since(began).Round(time.Second))
		}
	}
}

// Err receives an error if the server fails.
func (s *Server) Err() <-chan error { return s.etcd.Err() }

// closeGrace is how long calls under way have when the server is closed. etcd itself
// sometimes waits for 5.5 s, for watches that do not end by themselves; meanwhile
// nobody can connect, and the sessions run out.
const closeGrace = 200 * time.Millisecond

// Close stops the server and waits for it.
func (s *Server) Close() {
	s.cancel()
	s.work.Wait()
	s.log.mute()
	ctx, closed := context.WithCancel(context.Background())
	s.work.Go(func() {
		if sleep(ctx, closeGrace) {
			s.cut()
		}
	})
	s.etcd.Close()
	closed()
	s.work.Wait()
}

// cut ends all calls and streams of clients.
func (s *Server) cut() {
	s.mu.Lock()
	apis := s.apis
	s.mu.Unlock()
	for _, api := range apis {
		api.Stop()
	}
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
	log      *slog.Logger
	with     []zapcore.Field
	muted    *atomic.Bool
	starting *atomic.Bool
}

func newLogCore(log *slog.Logger) *slogCore {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &slogCore{log: log.With("part", "etcd"), muted: new(atomic.Bool), starting: new(atomic.Bool)}
}

// mute ends the output: a server that is being closed calls each of its own
// listeners an error.
func (c *slogCore) mute() { c.muted.Store(true) }

// Enabled: what ends the process is said also when muted, but not while starting,
// when it comes back from StartServer.
func (c *slogCore) Enabled(l zapcore.Level) bool {
	if c.starting.Load() {
		return false
	}
	return l > zapcore.ErrorLevel || l == zapcore.ErrorLevel && !c.muted.Load()
}

func (c *slogCore) With(fields []zapcore.Field) zapcore.Core {
	return &slogCore{log: c.log, muted: c.muted, starting: c.starting, with: append(c.with[:len(c.with):len(c.with)], fields...)}
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

// OnWrite is called after etcd has logged what ends the process.
func (c *slogCore) OnWrite(e *zapcore.CheckedEntry, fields []zapcore.Field) {
	if c.starting.Load() {
		enc := zapcore.NewMapObjectEncoder()
		for _, f := range fields {
			f.AddTo(enc)
		}
		panic(fmt.Sprint(e.Message, ": ", enc.Fields["error"]))
	}
	os.Exit(1)
}
