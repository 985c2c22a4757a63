package main

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// counters are what etcd has counted of its clients: all of them, the observer and
// the daemon too. Renewals of leases are left out where they can be, for they come at
// their own pace.
type counters struct {
	Requests float64 `json:"requests"`       // calls that were answered, but for MemberList
	WatchIn  float64 `json:"watch_received"` // messages on watch streams: begin, end, say how far
	WatchOut float64 `json:"watch_sent"`     // messages on watch streams: created, events, progress
	BytesIn  float64 `json:"bytes_received"` // of all messages, renewals included
	BytesOut float64 `json:"bytes_sent"`
}

type reading struct {
	counters
	methods map[string]float64
}

// readCounters asks etcd's metrics.
func readCounters(ctx context.Context, o options) (r reading, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.Split(o.etcd, ",")[0]+"/metrics", nil)
	if err != nil {
		return r, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return r, fmt.Errorf("read the metrics of etcd: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return r, fmt.Errorf("read the metrics of etcd: %s", resp.Status)
	}
	r.methods = map[string]float64{}
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		name, text, _ := strings.Cut(lines.Text(), " ")
		name, labels, _ := strings.Cut(name, "{")
		to := r.counter(name, labels)
		if to == nil {
			continue
		}
		v, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return r, fmt.Errorf("metrics of etcd: %q: %w", lines.Text(), err)
		}
		*to += v
		if to == &r.Requests {
			r.methods[label(labels, "grpc_method")] += v
		}
	}
	return r, lines.Err()
}

// counter is where a line of the metrics counts; nil if nowhere.
func (r *reading) counter(name, labels string) *float64 {
	watch := label(labels, "grpc_method") == "Watch"
	switch name {
	case "grpc_server_handled_total":
		// Each connection asks for the members of the cluster, at its own pace.
		if label(labels, "grpc_type") == "unary" && label(labels, "grpc_method") != "MemberList" {
			return &r.Requests
		}
	case "grpc_server_msg_received_total":
		if watch {
			return &r.WatchIn
		}
	case "grpc_server_msg_sent_total":
		if watch {
			return &r.WatchOut
		}
	case "etcd_network_client_grpc_received_bytes_total":
		return &r.BytesIn
	case "etcd_network_client_grpc_sent_bytes_total":
		return &r.BytesOut
	}
	return nil
}

func label(labels, name string) string {
	_, rest, _ := strings.Cut(labels, name+`="`)
	value, _, _ := strings.Cut(rest, `"`)
	return value
}

// plus adds times another.
func (c counters) plus(times float64, d counters) counters {
	return counters{Requests: c.Requests + times*d.Requests, WatchIn: c.WatchIn + times*d.WatchIn, WatchOut: c.WatchOut + times*d.WatchOut,
		BytesIn: c.BytesIn + times*d.BytesIn, BytesOut: c.BytesOut + times*d.BytesOut}
}

func (r reading) since(before reading) reading {
	diff := reading{counters: r.plus(-1, before.counters), methods: map[string]float64{}}
	for method, n := range r.methods {
		if n -= before.methods[method]; n != 0 {
			diff.methods[method] = n
		}
	}
	return diff
}
