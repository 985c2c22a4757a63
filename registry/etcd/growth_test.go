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
// scaled down, so that seconds are as telling as days; MUSTER_TEST_ETCD_GROWTH=60s takes
// as long, with the usual compaction.
func TestTheFileStopsGrowing(t *testing.T) {
	o := freePorts(t, t.TempDir())
	o.compaction = compaction{keep: 500, every: 100 * time.Millisecond, step: 50}
	const enough = 10_000 // puts
	limit := time.Minute
	measure, err := time.ParseDuration(os.Getenv("MUSTER_TEST_ETCD_GROWTH"))
	if err == nil {
		o.compaction, limit = compaction{}, measure
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
	ctx, cancel := context.WithTimeout(t.Context(), limit)
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
	kv, file := server.etcd.Server.KV(), server.etcd.Server.Backend()
	began, said := time.Now(), time.Now()
	var half int64 // size of the file when half of the puts were done
	for ctx.Err() == nil && (measure > 0 || puts.Load() < enough) {
		time.Sleep(20 * time.Millisecond)
		if half == 0 && puts.Load() >= enough/2 {
			half = file.Size()
		}
		if time.Since(said) > limit/12 {
			said = time.Now()
			t.Logf("%4.0f s: %7d puts, %7d revisions kept, file %5.2f MiB of which in use %5.2f MiB, this process %s",
				time.Since(began).Seconds(), puts.Load(), kv.Rev()-kv.FirstRev(), float64(file.Size())/(1<<20), float64(file.SizeInUse())/(1<<20), residentMemory())
		}
	}
	cancel()
	if measure > 0 {
		return
	}
	t.Logf("%d puts in %s: file %d bytes at half of them, %d at the end", puts.Load(), time.Since(began).Round(time.Millisecond), half, file.Size())
	if made, kept := kv.Rev(), kv.Rev()-kv.FirstRev(); made < enough || kept > made/2 {
		t.Errorf("%d of %d revisions are kept", kept, made)
	}
	if file.Size() > half*3/2 {
		t.Errorf("the file has grown from %d to %d bytes in the second half", half, file.Size())
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
