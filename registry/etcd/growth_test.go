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
	const enough = 10_000 // puts; or up to four times that, where the machine kept the compaction waiting
	limit := 4 * time.Minute
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
	var half, size int64 // of the file when half of the puts were done, and in the end
	for next := int64(enough); ctx.Err() == nil; time.Sleep(20 * time.Millisecond) {
		n := puts.Load()
		if half == 0 && n >= next/2 {
			half = file.Size()
		}
		if size = file.Size(); measure == 0 && n >= next {
			if size <= half*3/2 || next >= 4*enough {
				break
			}
			next, half = 2*next, size
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
	writers.Wait()
	made, kept := kv.Rev(), func() int64 { return kv.Rev() - kv.FirstRev() }
	for end := time.Now().Add(longEnough); kept() > made/2 && time.Now().Before(end); {
		time.Sleep(20 * time.Millisecond)
	}
	t.Logf("%d puts in %s: file %d bytes at half of them, %d at the end", puts.Load(), time.Since(began).Round(time.Millisecond), half, size)
	if made < enough || kept() > made/2 {
		t.Errorf("%d of %d revisions are kept", kept(), made)
	}
	if size > half*3/2 {
		t.Errorf("the file has grown from %d to %d bytes in the second half", half, size)
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
