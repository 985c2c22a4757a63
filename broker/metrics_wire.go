package broker

import (
	"errors"
	"strconv"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/broker/api"
	"github.com/muster-io/muster/broker/wire"
)

// wireMetrics counts requests. A key and a version that are asked for the first
// time get their counters then; from there on a request costs a look into an array
// and a few atomic additions, and takes no lock. Client ids and addresses, of which
// there is no end, are no labels.
type wireMetrics struct {
	requests       *prometheus.CounterVec // by api, version, result
	errors         *prometheus.CounterVec // by api, error
	times          *prometheus.HistogramVec
	received, sent *prometheus.CounterVec // by api
	open           prometheus.Gauge
	accepted       prometheus.Counter
	refused        prometheus.Counter
	frames         *prometheus.CounterVec // by reason
	keys           [kmsg.MaxKey + 1]atomic.Pointer[keyMetrics]
}

// maxVersions of a key are told apart, more than any has.
const maxVersions = 32

// keyMetrics is what is counted of one key.
type keyMetrics struct {
	api            string
	time           prometheus.Observer
	received, sent prometheus.Counter
	versions       [maxVersions]atomic.Pointer[versionMetrics]
}

// versionMetrics counts the requests of one key in one version, by result.
type versionMetrics [wireResults]prometheus.Counter

type wireResult int

const (
	wireOK      wireResult = iota // answered without an error code, or without an answer as was asked
	wireError                     // answered with at least one error code
	wireDropped                   // the connection ended first

	wireResults
)

func (r wireResult) String() string { return [wireResults]string{"ok", "error", "dropped"}[r] }

// Why frames are refused.
var frameReasons = map[error]string{
	wire.ErrFrameSize:   "size",
	wire.ErrFrameCut:    "cut",
	wire.ErrHeader:      "header",
	wire.ErrBody:        "body",
	wire.ErrUnsupported: "unsupported",
}

func newWireMetrics(r prometheus.Registerer) *wireMetrics {
	w := &wireMetrics{
		requests: counters(r, "wire_requests_total", "Kafka requests, by key, version and result.", "api", "version", "result"),
		errors:   counters(r, "wire_errors_total", "Error codes in answers, one for each partition or topic they are about.", "api", "error"),
		times: histogram(r, "wire_request_duration_seconds",
			"Time from a request's last byte to its answer's last, the time it waits on purpose included.", requestBuckets, "api"),
		received: counters(r, "wire_received_bytes_total", "Bytes of requests.", "api"),
		sent:     counters(r, "wire_sent_bytes_total", "Bytes of answers.", "api"),
		open:     gauges(r, "wire_connections", "Connections that are open.").WithLabelValues(),
		accepted: counter(r, "wire_connections_accepted_total", "Connections that were accepted."),
		refused:  counter(r, "wire_connections_refused_total", "Connections closed at once since there were too many."),
		frames:   counters(r, "wire_frames_refused_total", "Frames that ended their connection, by reason.", "reason"),
	}
	for _, reason := range frameReasons {
		w.frames.WithLabelValues(reason)
	}
	return w
}

// hooks are what the Kafka server tells.
func (w *wireMetrics) hooks() wire.Hooks {
	return wire.Hooks{
		OnConnect:    func(string) { w.open.Inc(); w.accepted.Inc() },
		OnDisconnect: w.disconnect,
		OnRefused:    func(string) { w.refused.Inc() },
		OnAnswer:     w.answer,
		OnRequest:    w.request,
	}
}

func (w *wireMetrics) disconnect(_ string, err error) {
	w.open.Dec()
	for sentinel, reason := range frameReasons {
		if errors.Is(err, sentinel) {
			w.frames.WithLabelValues(reason).Inc()
			return
		}
	}
}

// answer counts error codes, and reports whether there are any.
func (w *wireMetrics) answer(key int16, resp kmsg.Response) (failed bool) {
	api.ErrorCodes(resp, func(code int16) {
		failed = true
		w.errors.WithLabelValues(kmsg.NameForKey(key), kerr.TypedErrorForCode(code).Message).Inc()
	})
	return failed
}

func (w *wireMetrics) request(i wire.RequestInfo) {
	k := w.key(i.Key)
	result := wireOK
	switch {
	case i.Err != nil:
		result = wireDropped
	case i.Failed:
		result = wireError
	}
	w.version(k, i.Version)[result].Inc()
	k.time.Observe(i.Duration.Seconds())
	k.received.Add(float64(i.RequestBytes))
	k.sent.Add(float64(i.ResponseBytes))
}

// key is what is counted of a key, which the server knows, so it is in the array.
// Two that come first at once make it of the same counters.
func (w *wireMetrics) key(key int16) *keyMetrics {
	k := w.keys[key].Load()
	if k == nil {
		name := kmsg.NameForKey(key)
		k = &keyMetrics{api: name, time: w.times.WithLabelValues(name),
			received: w.received.WithLabelValues(name), sent: w.sent.WithLabelValues(name)}
		if !w.keys[key].CompareAndSwap(nil, k) {
			k = w.keys[key].Load()
		}
	}
	return k
}

func (w *wireMetrics) version(k *keyMetrics, version int16) *versionMetrics {
	slot := &k.versions[min(int(version), maxVersions-1)]
	v := slot.Load()
	if v == nil {
		v = new(versionMetrics)
		for result := range wireResults {
			v[result] = w.requests.WithLabelValues(k.api, strconv.Itoa(int(version)), result.String())
		}
		slot.Store(v)
	}
	return v
}
