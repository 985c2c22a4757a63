package broker

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/broker/wire"
	"github.com/muster-io/muster/registry"
)

func produceAnswer(partitions int, code int16) kmsg.Response {
	resp := kmsg.NewPtrProduceResponse()
	resp.Topics = []kmsg.ProduceResponseTopic{{Partitions: make([]kmsg.ProduceResponseTopicPartition, partitions)}}
	resp.Topics[0].Partitions[0].ErrorCode = code
	return resp
}

func counted(t *testing.T, c prometheus.Counter) float64 {
	t.Helper()
	var m dto.Metric
	if err := c.Write(&m); err != nil {
		t.Fatal(err)
	}
	return m.GetCounter().GetValue()
}

// A request counts once, by the worst that came of it.
func TestRequestsByResult(t *testing.T) {
	w := newWireMetrics(prometheus.NewRegistry())
	for _, r := range []struct {
		wire.RequestInfo
		resp kmsg.Response
	}{
		{wire.RequestInfo{Version: 7}, produceAnswer(3, 0)},
		{wire.RequestInfo{Version: 7}, produceAnswer(3, 56)},
		{wire.RequestInfo{Version: 7}, produceAnswer(3, 32000)},
		{wire.RequestInfo{Version: 7}, nil}, // acks=0 asks for no answer
		{wire.RequestInfo{Version: 7, Err: errors.New("gone")}, produceAnswer(3, 56)},
		{wire.RequestInfo{Version: 8, Err: errors.New("gone")}, nil},
	} {
		r.Failed = w.answer(0, r.resp)
		w.request(r.RequestInfo)
	}
	for labels, want := range map[[3]string]float64{
		{"Produce", "7", "ok"}:      2,
		{"Produce", "7", "error"}:   2,
		{"Produce", "7", "dropped"}: 1,
		{"Produce", "8", "dropped"}: 1,
		{"Produce", "8", "ok"}:      0,
	} {
		if got := counted(t, w.requests.WithLabelValues(labels[:]...)); got != want {
			t.Errorf("%v: %v, want %v", labels, got, want)
		}
	}
	for name, want := range map[string]float64{"KAFKA_STORAGE_ERROR": 2, "UNKNOWN_SERVER_ERROR": 1} {
		if got := counted(t, w.errors.WithLabelValues("Produce", name)); got != want {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
}

func TestStoreResults(t *testing.T) {
	for want, call := range map[storeResult]registry.Call{
		storeOK:        {},
		storeConflict:  {Refused: true},
		storeCompacted: {Err: fmt.Errorf("list: %w", registry.ErrCompacted)},
		storeNoLease:   {Err: fmt.Errorf("revoke: %w", registry.ErrLeaseNotFound)},
		storeTimeout:   {Err: fmt.Errorf("txn: %w", context.DeadlineExceeded)},
		storeCanceled:  {Err: context.Canceled},
		storeError:     {Err: errors.New("no leader")},
	} {
		if got := resultOf(call); got != want {
			t.Errorf("%+v: %s, want %s", call, got, want)
		}
	}
}

// What it costs to count one request, with as many at once as there are cores.
func BenchmarkCountRequest(b *testing.B) {
	w := newWireMetrics(prometheus.NewRegistry())
	info := wire.RequestInfo{Key: 0, Version: 9, RequestBytes: 1000, ResponseBytes: 60, Duration: 1500 * time.Microsecond}
	resp := produceAnswer(1, 0)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			info := info
			info.Failed = w.answer(0, resp)
			w.request(info)
		}
	})
}
