package broker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Limits of the HTTP server, which anybody may reach.
const (
	httpHeaderLimit = 5 * time.Second  // for a request to arrive
	httpWriteLimit  = 30 * time.Second // for an answer to be taken
	httpIdleLimit   = 2 * time.Minute
	httpHeaderBytes = 16 << 10
	httpStopLimit   = time.Second
	maxScrapes      = 4 // at a time
)

// serveHTTP serves health and metrics, if asked to, until the daemon has stopped
// everything else: probes see it start and stop.
func (d *Daemon) serveHTTP() error {
	if d.cfg.HTTP == "" {
		return nil
	}
	var at address
	at.host, at.port, _ = ParseAddress(d.cfg.HTTP) // checked before
	ln, err := listenAt("--http", at)
	if err != nil {
		return err
	}
	d.http = ln
	srv := &http.Server{
		Handler:           d.httpHandler(),
		ReadHeaderTimeout: httpHeaderLimit,
		ReadTimeout:       httpHeaderLimit,
		WriteTimeout:      httpWriteLimit,
		IdleTimeout:       httpIdleLimit,
		MaxHeaderBytes:    httpHeaderBytes,
		ErrorLog:          slog.NewLogLogger(d.log.With("part", "http").Handler(), slog.LevelDebug),
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		// The daemon goes on without: what it is for does not hang on who watches.
		if err := srv.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
			d.log.Error("metrics and health are not served any more", "error", err)
		}
	}()
	d.undo = append(d.undo, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), httpStopLimit)
		defer cancel()
		if err := srv.Shutdown(ctx); err != nil {
			_ = srv.Close() // whoever still reads has had its time
		}
		<-done
		return nil
	})
	if ip, ok := ln.Addr().(*net.TCPAddr); ok && ip.IP.IsLoopback() {
		d.log.Info("serving metrics and health", "listen", ln.Addr().String())
	} else {
		d.log.Info("serving metrics and health, read-only and without authentication, to the network", "listen", ln.Addr().String())
	}
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
	mux.Handle("GET /metrics", promhttp.HandlerFor(d.metrics.gatherer(len(d.cfg.Etcd.Endpoints) == 0), promhttp.HandlerOpts{
		ErrorLog:            slog.NewLogLogger(d.log.With("part", "http").Handler(), slog.LevelWarn),
		ErrorHandling:       promhttp.ContinueOnError, // what can be read is worth more than nothing
		MaxRequestsInFlight: maxScrapes,
	}))
	mux.Handle("GET /healthz", probe("healthy", d.Healthy))
	mux.Handle("GET /readyz", probe("ready", d.Ready))
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintf(w, "muster broker %d: /metrics /healthz /readyz\n", d.cfg.ID)
	})
	return mux
}

// probe answers 200 or 503: in one line of text that names what failed, with
// ?verbose in one line for each check, or as JSON for those who accept that.
func probe(word string, ask func() (bool, []Check)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ok, checks := ask()
		wantJSON := strings.Contains(r.Header.Get("Accept"), "application/json")
		kind := "text/plain; charset=utf-8"
		if wantJSON {
			kind = "application/json"
		}
		w.Header().Set("Content-Type", kind)
		w.Header().Set("Cache-Control", "no-store")
		if !ok {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		// A client that does not take its answer has no other coming.
		switch {
		case wantJSON:
			_ = json.NewEncoder(w).Encode(map[string]any{word: ok, "checks": checks})
		case ok:
			_, _ = io.WriteString(w, word+"\n")
		default:
			_, _ = io.WriteString(w, "not "+word+": "+summary(checks)+"\n")
		}
		if _, verbose := r.URL.Query()["verbose"]; verbose && !wantJSON {
			for _, c := range checks {
				_, _ = fmt.Fprintf(w, "%s %s: %s\n", map[bool]string{true: "ok    ", false: "FAILED"}[c.OK], c.Name, c.Reason)
			}
		}
	})
}
