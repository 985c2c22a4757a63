package etcd

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// As many puts as go, to 1,000 keys: the file stops growing once history is dropped as
// fast as it is made, since etcd writes to the pages that became free. Compaction is
// scaled down, so that ten seconds are as telling as days; MUSTER_TEST_ETCD_GROWTH=60s
// takes as long, with the usual compaction.
func TestTheFileStopsGrowing(t *testing.T) {
	o := freePorts(t, t.TempDir())
	o.compaction = compaction{keep: 2000, every: 500 * time.Millisecond, step: 200}
	length := 10 * time.Second
	if d, err := time.ParseDuration(os.Getenv("MUSTER_TEST_ETCD_GROWTH")); err == nil {
		o.compaction, length = compaction{}, d
	}
	server, err := StartServer(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	st, err := Open(t.Context(), Options{Endpoints: []string{server.Endpoint}})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	ctx, cancel := context.WithTimeout(t.Context(), length)
	defer cancel()
	var puts atomic.Int64
	var writers sync.WaitGroup
	defer writers.Wait()
	value := strings.Repeat("v", 200)
	for i := range 128 {
		writers.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				if _, err := st.Client().Put(ctx, fmt.Sprintf("/k/%d", (i+n*128)%1000), value); err == nil {
					puts.Add(1)
				}
			}
		})
	}
	const looks = 10
	var sizes []int64
	tick := time.NewTicker(length / (looks + 1))
	defer tick.Stop()
	for began := time.Now(); len(sizes) < looks; {
		<-tick.C
		kv, file := server.etcd.Server.KV(), server.etcd.Server.Backend()
		sizes = append(sizes, file.Size())
		t.Logf("%4.0f s: %7d puts, %7d revisions kept, file %5.2f MiB of which in use %5.2f MiB, this process %s",
			time.Since(began).Seconds(), puts.Load(), kv.Rev()-kv.FirstRev(), float64(file.Size())/(1<<20), float64(file.SizeInUse())/(1<<20), residentMemory())
	}
	if o.compaction == (compaction{}) {
		return
	}
	kv := server.etcd.Server.KV()
	if made, kept := kv.Rev(), kv.Rev()-kv.FirstRev(); kept > made/2 {
		t.Errorf("%d of %d revisions are kept", kept, made)
	}
	if before, after := sizes[looks/2], sizes[looks-1]; after > before*3/2 {
		t.Errorf("the file has grown from %d to %d bytes in the second half", before, after)
	}
}

func residentMemory() string {
	data, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return "?"
	}
	pages, err := strconv.Atoi(strings.Fields(string(data))[1])
	if err != nil {
		return "?"
	}
	return fmt.Sprintf("%d MiB", pages*os.Getpagesize()>>20)
}
