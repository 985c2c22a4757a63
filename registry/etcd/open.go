package etcd

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.etcd.io/etcd/client/pkg/v3/transport"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"golang.org/x/mod/semver"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
)

// Options say how to reach an etcd cluster.
type Options struct {
	Endpoints []string // such as http://127.0.0.1:2379; the cluster's other members are learned
	User      string
	Password  string
	CACert    string // PEM files; with any of them TLS is used
	Cert      string
	Key       string
	// DialTimeout bounds Open. Zero means 10 s. An endpoint that fails, in place of
	// being slow, is given up after half of it.
	DialTimeout time.Duration
	Logger      *slog.Logger // nil discards
}

const (
	defaultDialTimeout = 10 * time.Second
	connectTimeout     = 5 * time.Second
	// A connection that is silent for this long is probed, and given up when the
	// probe has no answer. gRPC allows no shorter time; sessions notice a silent
	// member sooner, by their renewals.
	keepAliveTime    = 10 * time.Second
	keepAliveTimeout = 3 * time.Second
	// A member that is away is tried again at this pace. gRPC's own goes up to two
	// minutes, and every session would be over when it is found again.
	minReconnect = 50 * time.Millisecond
	maxReconnect = time.Second
)

// Open connects to an etcd cluster and checks that it is fit to carry a registry. It
// asks all endpoints at once and uses the one that first says it can serve; the
// cluster's other members are learned from it, for when it cannot any more.
func Open(ctx context.Context, o Options) (*Store, error) {
	if len(o.Endpoints) == 0 {
		return nil, errors.New("no etcd endpoint: set --etcd-endpoints")
	}
	if o.DialTimeout == 0 {
		o.DialTimeout = defaultDialTimeout
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if (o.User == "") != (o.Password == "") {
		return nil, errors.New("etcd user and password go together: set --etcd-user and --etcd-password-file, or neither")
	}
	secrets, err := clientTLS(o)
	if err != nil {
		return nil, err
	}
	o.Endpoints = spelled(o.Endpoints, secrets != nil)
	dial := func(ctx context.Context, endpoint string) (*conn, error) { return o.dial(ctx, endpoint, secrets) }
	limited, cancel := context.WithTimeout(ctx, o.DialTimeout)
	defer cancel()
	c, first, err := o.first(limited, dial)
	if err != nil {
		return nil, err
	}
	return &Store{conns: newConns(o, dial, c, first), callLimit: callLimit}, nil
}

// spelled writes endpoints with their scheme, by which it is decided whom the password
// may be sent to. The client takes one without as it has TLS or not.
func spelled(endpoints []string, secure bool) []string {
	var list []string
	for _, e := range endpoints {
		scheme, rest, ok := strings.Cut(e, "://")
		switch {
		case ok:
			e = strings.ToLower(scheme) + "://" + strings.TrimRight(rest, "/")
		case strings.HasPrefix(e, "unix"):
		case secure:
			e = "https://" + e
		default:
			e = "http://" + e
		}
		list = append(list, e)
	}
	return list
}

func clientTLS(o Options) (*tls.Config, error) {
	if o.CACert == "" && o.Cert == "" && o.Key == "" {
		return nil, nil
	}
	info := transport.TLSInfo{TrustedCAFile: o.CACert, CertFile: o.Cert, KeyFile: o.Key}
	secrets, err := info.ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("etcd TLS files (--etcd-cacert, --etcd-cert, --etcd-key): %w", err)
	}
	return secrets, nil
}

// dial prepares a connection to one member. With a user it takes a token, which
// shows that the member is there; without, it returns at once.
func (o *Options) dial(ctx context.Context, endpoint string, secrets *tls.Config) (*conn, error) {
	c := &conn{endpoint: endpoint}
	c.ctx, c.leave = context.WithCancel(context.Background())
	stop := context.AfterFunc(ctx, c.leave)
	client, err := clientv3.New(clientv3.Config{
		Context:              c.ctx,
		Endpoints:            []string{endpoint},
		Username:             o.User,
		Password:             o.Password,
		TLS:                  secrets,
		DialKeepAliveTime:    keepAliveTime,
		DialKeepAliveTimeout: keepAliveTimeout,
		Logger:               zap.NewNop(),
		BackoffWaitBetween:   50 * time.Millisecond,
		DialOptions: []grpc.DialOption{grpc.WithChainStreamInterceptor(watchProgress), grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: minReconnect, Multiplier: 1.6, Jitter: 0.2, MaxDelay: maxReconnect},
			MinConnectTimeout: connectTimeout,
		})},
	})
	if !stop() && err == nil {
		client.Close()
		err = ctx.Err()
	}
	if err != nil {
		c.leave()
		return nil, err
	}
	c.calls, c.endCalls = context.WithCancel(context.Background())
	c.newTerm()
	c.client, c.leases = client, clientv3.RetryLeaseClient(client)
	return c, nil
}

// first asks all endpoints at once, since one that is down keeps silent for as long
// as it is given, and returns the first that can serve.
func (o *Options) first(given context.Context, dial func(context.Context, string) (*conn, error)) (*conn, *answer, error) {
	ctx, cancel := context.WithCancel(given)
	defer cancel()
	type result struct {
		endpoint string
		conn     *conn
		answer   *answer
		err      error
	}
	results := make(chan result, len(o.Endpoints))
	for _, e := range o.Endpoints {
		go func() {
			c, a, err := firstAnswer(ctx, dial, e, o.DialTimeout/2)
			results <- result{e, c, a, err}
		}()
	}
	var found result
	var final error
	var failed []string
	for range o.Endpoints {
		switch r := <-results; {
		case found.conn != nil || final != nil: // too late
			if r.conn != nil {
				r.conn.close()
			}
		case r.err == nil:
			found = r
			cancel()
		case refused(r.err):
			final = fmt.Errorf("etcd at %s: %w", r.endpoint, o.advise(r.err))
			cancel()
		default:
			failed = append(failed, r.endpoint+": "+reason(r.err))
		}
	}
	// A caller that gave up has learned nothing of them.
	if found.conn == nil && final == nil && errors.Is(given.Err(), context.Canceled) {
		final = fmt.Errorf("look for etcd at %s: %w", strings.Join(o.Endpoints, ", "), given.Err())
	}
	if found.conn == nil && final == nil {
		final = fmt.Errorf("no etcd at %s", strings.Join(failed, "; "))
		if strings.Contains(final.Error(), "connection refused") {
			final = fmt.Errorf("%w (start one with: muster server)", final)
		}
	}
	return found.conn, found.answer, final
}

var errNoQuorum = errors.New("it answers, but most members of its cluster do not: start them")

// firstAnswer asks one endpoint until it answers. One that is slow, as where passwords
// are checked on a busy machine, has until ctx ends; one that fails is tried again for
// patience. Its error is what went wrong last before that.
func firstAnswer(ctx context.Context, dial func(context.Context, string) (*conn, error), endpoint string, patience time.Duration) (_ *conn, _ *answer, err error) {
	var c *conn
	began := time.Now()
	defer func() {
		if err != nil && c != nil {
			c.close()
		}
	}()
	for err = errors.New("no answer"); ; {
		var failed error
		if c == nil {
			c, failed = dial(ctx, endpoint)
		}
		if failed == nil {
			if failed = c.checkVersion(ctx); failed == nil {
				break
			}
		}
		if ctx.Err() == nil {
			err = failed
		}
		if refused(failed) || time.Since(began) > patience || !sleep(ctx, retryOpen) {
			return nil, nil, err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	a, err := c.ask(ctx)
	if err != nil && !refused(err) {
		err = errNoQuorum
	}
	return c, a, err
}

// retryOpen is the pause before an endpoint is tried again.
const retryOpen = 100 * time.Millisecond

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// refused tells whether trying again is in vain.
func refused(err error) bool {
	for _, e := range []error{rpctypes.ErrAuthFailed, rpctypes.ErrUserEmpty, rpctypes.ErrInvalidAuthToken, rpctypes.ErrPermissionDenied} {
		if errors.Is(rpctypes.Error(err), e) {
			return true
		}
	}
	return errors.Is(err, ErrVersion)
}

// advise adds what to do about it.
func (o *Options) advise(err error) error {
	switch {
	case errors.Is(err, rpctypes.ErrAuthFailed):
		return fmt.Errorf("user %q is refused: %w: check --etcd-user and --etcd-password-file", o.User, err)
	case errors.Is(rpctypes.Error(err), rpctypes.ErrUserEmpty):
		return fmt.Errorf("it wants a user: %w: set --etcd-user and --etcd-password-file", err)
	}
	return err
}

// oldestVersion has the fixes that a registry stands on: progress answers that
// never overtake events (3.5.8), no event lost in a compaction and no lease revoked
// by a leader that lost its place (3.5.13). Nothing older is trusted with ownership.
const oldestVersion = "3.5.13"

// ErrVersion refuses an etcd that is too old.
var ErrVersion = errors.New("etcd is too old")

// checkVersion asks without the client's own retries, which hide why they are needed.
func (c *conn) checkVersion(ctx context.Context) error {
	status, err := pb.NewMaintenanceClient(c.client.ActiveConnection()).Status(ctx, &pb.StatusRequest{})
	if err != nil {
		return rpctypes.Error(err)
	}
	if semver.Compare("v"+status.Version, "v"+oldestVersion) < 0 {
		return fmt.Errorf("%w: %s; need %s or later, in which watch progress and leases can be relied on", ErrVersion, status.Version, oldestVersion)
	}
	return nil
}
