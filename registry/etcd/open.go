package etcd

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

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
	// DialTimeout bounds Open. Zero means 5 s.
	DialTimeout time.Duration
}

const (
	defaultDialTimeout = 5 * time.Second
	// A connection that is silent for this long is probed, and given up when the
	// probe has no answer. gRPC allows no shorter time; sessions notice a silent
	// member sooner, by their renewals.
	keepAliveTime    = 10 * time.Second
	keepAliveTimeout = 3 * time.Second
	// A member that is away is tried again at this pace. gRPC's own goes up to two
	// minutes, and every session would be over when it is found again.
	minReconnect = 50 * time.Millisecond
	maxReconnect = time.Second
	// The members of the cluster are learned anew this often.
	syncInterval = time.Minute
)

// Open connects to an etcd cluster and checks that it is fit to carry a registry.
func Open(ctx context.Context, o Options) (*Store, error) {
	if len(o.Endpoints) == 0 {
		return nil, errors.New("no etcd endpoint: set --etcd-endpoints")
	}
	if o.DialTimeout == 0 {
		o.DialTimeout = defaultDialTimeout
	}
	cfg := clientv3.Config{
		Endpoints:            o.Endpoints,
		Username:             o.User,
		Password:             o.Password,
		DialTimeout:          o.DialTimeout,
		DialKeepAliveTime:    keepAliveTime,
		DialKeepAliveTimeout: keepAliveTimeout,
		AutoSyncInterval:     syncInterval,
		Logger:               zap.NewNop(),
		BackoffWaitBetween:   50 * time.Millisecond,
		DialOptions: []grpc.DialOption{grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: minReconnect, Multiplier: 1.6, Jitter: 0.2, MaxDelay: maxReconnect},
			MinConnectTimeout: o.DialTimeout,
		})},
	}
	if o.CACert != "" || o.Cert != "" || o.Key != "" {
		info := transport.TLSInfo{TrustedCAFile: o.CACert, CertFile: o.Cert, KeyFile: o.Key}
		tls, err := info.ClientConfig()
		if err != nil {
			return nil, fmt.Errorf("etcd TLS files: %w", err)
		}
		cfg.TLS = tls
	}
	c, err := clientv3.New(cfg)
	if err != nil {
		return nil, fmt.Errorf("connect to etcd at %s: %w", strings.Join(o.Endpoints, ","), err)
	}
	limited, cancel := context.WithTimeout(ctx, o.DialTimeout)
	defer cancel()
	if err := checkVersion(limited, c, o.Endpoints); err != nil {
		c.Close()
		return nil, err
	}
	return &Store{client: c, leases: clientv3.RetryLeaseClient(c)}, nil
}

// oldestVersion has the fixes that a registry stands on: progress answers that
// never overtake events (3.5.8), no event lost in a compaction and no lease revoked
// by a leader that lost its place (3.5.13). Nothing older is trusted with ownership.
const oldestVersion = "3.5.13"

// ErrVersion refuses an etcd that is too old.
var ErrVersion = errors.New("etcd is too old")

// checkVersion asks all endpoints at once, since one that is down keeps silent for
// as long as it is given; the first that answers will do.
func checkVersion(ctx context.Context, c *clientv3.Client, endpoints []string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type answer struct {
		endpoint, version string
		err               error
	}
	answers := make(chan answer, len(endpoints))
	for _, e := range endpoints {
		go func() {
			status, err := c.Status(ctx, e)
			if err != nil {
				answers <- answer{e, "", err}
				return
			}
			answers <- answer{e, status.Version, nil}
		}()
	}
	var last error
	for range endpoints {
		a := <-answers
		if a.err != nil {
			last = a.err
			continue
		}
		if semver.Compare("v"+a.version, "v"+oldestVersion) < 0 {
			return fmt.Errorf("%w: %s at %s; need %s or later, in which watch progress and leases can be relied on",
				ErrVersion, a.version, a.endpoint, oldestVersion)
		}
		return nil
	}
	if errors.Is(last, context.DeadlineExceeded) {
		last = errors.New("no answer")
	}
	return fmt.Errorf("no etcd at %s: %w (start one with: muster server)", strings.Join(endpoints, ","), last)
}
