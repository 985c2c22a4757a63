package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/urfave/cli/v2"

	"github.com/muster-io/muster/broker"
	"github.com/muster-io/muster/internal/monitor"
	"github.com/muster-io/muster/rebalance/membership"
)

// memberHTTPFlag has no environment variable: that of the daemon may be set for both.
func memberHTTPFlag() cli.Flag {
	return &cli.StringFlag{Name: "http", Usage: "`HOST:PORT` where /healthz, /readyz and /metrics are served; without it, nowhere"}
}

// standingLimit is how soon a member's loop must come round for it to be healthy.
const standingLimit = 10 * time.Second

// standing is what --http shows.
type standing interface {
	ID() string
	Standing(ctx context.Context) (membership.Standing, error)
}

// serveMember serves health and metrics of a member, if --http asks for it, until stop.
func serveMember(c *cli.Context, log *slog.Logger, m standing, metrics *membership.Metrics) (stop func(), err error) {
	text := c.String("http")
	if text == "" {
		return func() {}, nil
	}
	host, port, err := broker.ParseAddress(text)
	if err != nil {
		return nil, wrongUse("--http: %w", err)
	}
	ln, err := broker.Listen("--http", host, port)
	if err != nil {
		return nil, err
	}
	return monitor.Serve(ln, memberPages(log, m, metrics, standingLimit), log), nil
}

func memberPages(log *slog.Logger, m standing, metrics *membership.Metrics, limit time.Duration) http.Handler {
	r := prometheus.NewRegistry()
	r.MustRegister(metrics, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	ask := func(ctx context.Context) (membership.Standing, monitor.Check) {
		ctx, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		s, err := m.Standing(ctx)
		if err != nil {
			return s, monitor.Check{Name: "loop", Reason: fmt.Sprintf("has not come round for %.0f s", limit.Seconds())}
		}
		return s, monitor.Check{Name: "loop", OK: true, Reason: "comes round"}
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", monitor.Metrics(r, log))
	mux.Handle("GET /healthz", monitor.Probe("healthy", func(ctx context.Context) []monitor.Check {
		_, loop := ask(ctx)
		return []monitor.Check{loop}
	}))
	mux.Handle("GET /readyz", monitor.Probe("ready", func(ctx context.Context) []monitor.Check {
		s, loop := ask(ctx)
		registration := monitor.Check{Name: "registration", OK: s.Registered, Reason: "there is none under a session that lives"}
		if s.Registered {
			registration.Reason = fmt.Sprintf("stands, %.1f s of its session are left, %d partitions owned", s.Left.Seconds(), s.Owned)
		}
		return []monitor.Check{loop, registration}
	}))
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "muster member "+m.ID()+": /metrics /healthz /readyz\n")
	})
	return mux
}
