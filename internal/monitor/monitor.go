// Package monitor serves health and metrics over HTTP: the probes of a process, and
// what Prometheus reads.
package monitor

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

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Limits of the HTTP server, which anybody may reach.
const (
	headerLimit = 5 * time.Second  // for a request to arrive
	writeLimit  = 30 * time.Second // for an answer to be taken
	idleLimit   = 2 * time.Minute
	headerBytes = 16 << 10
	stopLimit   = time.Second
	maxScrapes  = 4 // at a time
)

// Check is one thing that a probe asks about, and what was found.
type Check struct {
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Reason string `json:"reason"` // also when OK
}

// Summary is the reasons of the checks that failed; empty if none did.
func Summary(checks []Check) string {
	var bad []string
	for _, c := range checks {
		if !c.OK {
			bad = append(bad, c.Name+": "+c.Reason)
		}
	}
	return strings.Join(bad, "; ")
}

// Serve serves on ln, which it closes, until stop, which lets answers under way end.
func Serve(ln net.Listener, h http.Handler, log *slog.Logger) (stop func()) {
	srv := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: headerLimit,
		ReadTimeout:       headerLimit,
		WriteTimeout:      writeLimit,
		IdleTimeout:       idleLimit,
		MaxHeaderBytes:    headerBytes,
		ErrorLog:          slog.NewLogLogger(log.With("part", "http").Handler(), slog.LevelDebug),
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		// The process goes on without: what it is for does not hang on who watches.
		if err := srv.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
			log.Error("metrics and health are not served any more", "error", err)
		}
	}()
	if ip, ok := ln.Addr().(*net.TCPAddr); ok && ip.IP.IsLoopback() {
		log.Info("serving metrics and health", "listen", ln.Addr().String())
	} else {
		log.Info("serving metrics and health, read-only and without authentication, to the network", "listen", ln.Addr().String())
	}
	return func() {
		ctx, cancel := context.WithTimeout(context.Background(), stopLimit)
		defer cancel()
		if err := srv.Shutdown(ctx); err != nil {
			_ = srv.Close() // whoever still reads has had its time
		}
		<-done
	}
}

// Metrics is the page that Prometheus reads.
func Metrics(g prometheus.Gatherer, log *slog.Logger) http.Handler {
	return promhttp.HandlerFor(g, promhttp.HandlerOpts{
		ErrorLog:            slog.NewLogLogger(log.With("part", "http").Handler(), slog.LevelWarn),
		ErrorHandling:       promhttp.ContinueOnError, // what can be read is worth more than nothing
		MaxRequestsInFlight: maxScrapes,
	})
}

// Probe answers 200 or 503: in one line of text that names what failed, with
// ?verbose in one line for each check, or as JSON for those who accept that.
func Probe(word string, ask func(ctx context.Context) []Check) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		checks := ask(r.Context())
		ok := Summary(checks) == ""
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
			_, _ = io.WriteString(w, "not "+word+": "+Summary(checks)+"\n")
		}
		if _, verbose := r.URL.Query()["verbose"]; verbose && !wantJSON {
			for _, c := range checks {
				_, _ = fmt.Fprintf(w, "%s %s: %s\n", map[bool]string{true: "ok    ", false: "FAILED"}[c.OK], c.Name, c.Reason)
			}
		}
	})
}
