package broker

import (
	"context"
	"fmt"
	"net/http"

	"github.com/muster-io/muster/internal/monitor"
)

// serveHTTP serves health and metrics, if asked to, until the daemon has stopped
// everything else: probes see it start and stop.
func (d *Daemon) serveHTTP() error {
	if d.cfg.HTTP == "" {
		return nil
	}
	host, port, _ := ParseAddress(d.cfg.HTTP) // checked before
	ln, err := Listen("--http", host, port)
	if err != nil {
		return err
	}
	d.http = ln
	stop := monitor.Serve(ln, d.httpHandler(), d.log)
	d.undo = append(d.undo, func() error { stop(); return nil })
	return nil
}

// HTTPAddress is where health and metrics are served, "" if nowhere.
func (d *Daemon) HTTPAddress() string {
	if d.http == nil {
		return ""
	}
	return d.http.Addr().String()
}

func (d *Daemon) httpHandler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", monitor.Metrics(d.metrics.gatherer(len(d.cfg.Etcd.Endpoints) == 0), d.log))
	probe := func(word string, ask func() (bool, []Check)) http.Handler {
		return monitor.Probe(word, func(context.Context) []Check { _, checks := ask(); return checks })
	}
	mux.Handle("GET /healthz", probe("healthy", d.Healthy))
	mux.Handle("GET /readyz", probe("ready", d.Ready))
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintf(w, "muster broker %d: /metrics /healthz /readyz\n", d.cfg.ID)
	})
	return mux
}
