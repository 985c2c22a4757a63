package simulation

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

var (
	schedules = flag.Int("schedules", 0, "how many schedules TestSchedules runs; 0 is a modest number")
	seedFlag  = flag.Uint64("seed", 0, "the seed that TestReplay runs, or that TestSchedules begins with; 0 is none, or any")
	lenient   = flag.Bool("lenient", false, "do not judge claims and target records as such, only what comes of them: tells which guards are for economy")
	large     = flag.Bool("large", false, "large groups only, which are rare else")
	without   = flag.Int("without", 0, "number of the guard that TestReplay leaves out")
)

// runAll runs schedules on all processors until one fails or all are through.
func runAll(first uint64, n int, off guard) (total result, failed *result) {
	defer debug.SetGCPercent(debug.SetGCPercent(400)) // worlds are small and short-lived
	var next atomic.Int64
	var mu sync.Mutex
	var group sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		group.Go(func() {
			for {
				i := next.Add(1) - 1
				if i >= int64(n) {
					return
				}
				r := simulate(first+uint64(i), off, nil)
				mu.Lock()
				for k, c := range r.counts {
					total.counts[k] += c
				}
				total.virtual += r.virtual
				total.quiet = max(total.quiet, r.quiet)
				if r.failure != "" && (failed == nil || r.seed < failed.seed) {
					failed = &r
				}
				stop := failed != nil
				mu.Unlock()
				if stop {
					return
				}
			}
		})
	}
	group.Wait()
	return total, failed
}

func replay(seed uint64, off guard) string {
	more := ""
	if off != none {
		more = fmt.Sprintf(" -without %d", off)
	}
	return fmt.Sprintf("go test ./rebalance/simulation -run TestReplay -seed %d%s -v", seed, more)
}

// In random schedules no two members deliver a partition, nothing acknowledged is
// lost, no offset goes back, and after quiet all is owned as the strategy says.
func TestSchedules(t *testing.T) {
	n := *schedules
	if n == 0 {
		n = 1000
	}
	if testing.Short() {
		n = min(n, 200)
	}
	first := *seedFlag
	if first == 0 {
		first = rand.Uint64() >> 16
	}
	began := time.Now()
	total, failed := runAll(first, n, none)
	if failed != nil {
		t.Fatalf("seed %d: %s\nreplay with: %s", failed.seed, failed.failure, replay(failed.seed, none))
	}
	took := time.Since(began)
	t.Logf("%d schedules from seed %d in %s (%s each), %s of virtual time each, quiet at most %s after the storm\n%s", n, first, took.Round(time.Millisecond),
		(took * time.Duration(runtime.GOMAXPROCS(0)) / time.Duration(n)).Round(time.Microsecond), (total.virtual / time.Duration(n)).Round(time.Second), total.quiet, total.counts)
	for c, times := range total.counts {
		if times == 0 && n >= 1000 {
			t.Errorf("%s: never happened", countNames[c])
		}
	}
}

// A seed tells all: what happens is the same each time.
func TestSameSeed(t *testing.T) {
	for seed := range uint64(20) {
		var told [2]strings.Builder
		for i := range told {
			if r := simulate(seed+1, none, func(text string) { told[i].WriteString(text + "\n") }); r.failure != "" {
				t.Fatalf("seed %d: %s", r.seed, r.failure)
			}
		}
		first, second := strings.Split(told[0].String(), "\n"), strings.Split(told[1].String(), "\n")
		for i := range min(len(first), len(second)) {
			if first[i] != second[i] {
				t.Fatalf("seed %d is another one the second time:\n%s\n%s", seed+1, first[i], second[i])
			}
		}
		if len(first) != len(second) {
			t.Fatalf("seed %d tells %d lines, and then %d", seed+1, len(first), len(second))
		}
	}
}

// TestReplay runs one schedule and tells all that happens in it.
func TestReplay(t *testing.T) {
	if *seedFlag == 0 {
		t.Skip("no -seed")
	}
	r := simulate(*seedFlag, guard(*without), func(text string) { fmt.Println(text) })
	if r.failure != "" {
		t.Fatal(r.failure)
	}
}

// With a guard switched off something goes wrong in one of the first schedules.
func TestMutants(t *testing.T) {
	for off := none + 1; off < numGuards; off++ {
		t.Run(off.String(), func(t *testing.T) {
			_, failed := runAll(1, 2000, off)
			if failed == nil {
				t.Fatal("nothing goes wrong without it")
			}
			if r := simulate(failed.seed, none, nil); r.failure != "" {
				t.Fatalf("seed %d fails with all guards on: %s", r.seed, r.failure)
			}
			t.Logf("seed %d: %.300s\nreplay with: %s", failed.seed, failed.failure, replay(failed.seed, off))
		})
	}
}
