package etcd_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/registrytest"
)

const benchKeys = 100_000

// fill puts registrations of a usual size under prefix.
func fill(tb testing.TB, st registry.Store, prefix string, n int) {
	tb.Helper()
	for from := 0; from < n; from += registry.MaxTxnOps {
		var ops []registry.Op
		for i := from; i < min(n, from+registry.MaxTxnOps); i++ {
			value := fmt.Appendf(nil, `{"version":1,"host":"node-%d.example.com","port":9092,"jmx_port":-1,"timestamp":"1417342600000"}`, i)
			ops = append(ops, registry.Put(fmt.Sprintf("%s%06d", prefix, i), value, 0))
		}
		if _, err := st.Txn(tb.Context(), registry.Txn{Then: ops}); err != nil {
			tb.Fatal(err)
		}
	}
}

// From nothing to a View of 100,000 keys, everything included.
func BenchmarkViewLoad100k(b *testing.B) {
	st := registrytest.Start(b)
	fill(b, st, "/bench/ids/", benchKeys)
	for b.Loop() {
		v, err := registry.OpenView(b.Context(), st, []string{"/bench/ids/"}, registry.ViewOptions{}, nil)
		if err != nil {
			b.Fatal(err)
		}
		if n := v.Snapshot().Len(0); n != benchKeys {
			b.Fatalf("%d keys", n)
		}
		v.Close()
	}
}

// From the call of a put to the event of it, and a snapshot that has it, in a View of
// 100,000 keys under two prefixes.
func BenchmarkViewPutToEvent(b *testing.B) {
	st := registrytest.Start(b)
	fill(b, st, "/bench/ids/", benchKeys)
	for _, prefixes := range [][]string{{"/bench/ids/"}, {"/bench/ids/", "/bench/topics/"}} {
		b.Run(fmt.Sprintf("prefixes=%d", len(prefixes)), func(b *testing.B) { putToEvent(b, st, prefixes) })
	}
}

func putToEvent(b *testing.B, st registry.Store, prefixes []string) {
	seen := make(chan int64, 1000)
	v, err := registry.OpenView(b.Context(), st, prefixes, registry.ViewOptions{}, func(s registry.Snapshot, events []registry.Event) {
		if len(events) == 1 {
			seen <- s.Revision
		}
	})
	if err != nil {
		b.Fatal(err)
	}
	defer v.Close()
	var took []time.Duration
	i := 0
	for b.Loop() {
		i++
		key := fmt.Sprintf("/bench/ids/%06d", i%benchKeys)
		began := time.Now()
		rev := putKey(b, st, key, fmt.Sprint(i))
		for r := int64(0); r < rev; {
			select {
			case r = <-seen:
			case <-time.After(longEnough):
				b.Fatal("no event")
			}
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
}

func putKey(tb testing.TB, st registry.Store, key, value string) int64 {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), 10*time.Second)
	defer cancel()
	res, err := st.Txn(ctx, registry.Txn{Then: []registry.Op{registry.Put(key, []byte(value), 0)}})
	if err != nil {
		tb.Fatal(err)
	}
	return res.Revision
}
