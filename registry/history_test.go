package registry_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

// A history that grew without bound, while nobody pruned it, is cut in bounded steps,
// and keeps what was written last, whatever the clocks of the writers said.
func TestPruneALongHistory(t *testing.T) {
	const all, keep = 11_000, 128
	for name, clock := range map[string]func(n int64) int64{
		"clocks that agree":      func(n int64) int64 { return n },
		"each later one is slow": func(n int64) int64 { return all - n },
	} {
		t.Run(name, func(t *testing.T) {
			st := memory.New()
			g := registry.Root("").Group("g")
			want := map[string]bool{}
			for n := int64(0); n < all; {
				want = map[string]bool{}
				var txn registry.Txn
				for ; len(txn.Then) < keep && n < all; n++ {
					key := g.HistoryEntry(clock(n), "m", 1)
					txn.Then = append(txn.Then, registry.Put(key, []byte("x"), 0))
					want[key] = true
				}
				if _, err := st.Txn(t.Context(), txn); err != nil {
					t.Fatal(err)
				}
			}
			if err := registry.PruneHistory(t.Context(), st, g, len(want)); err != nil {
				t.Fatal(err)
			}
			kvs, _, err := registry.List(t.Context(), st, g.History(), 0)
			if err != nil || len(kvs) != len(want) {
				t.Fatalf("%d entries are left, error %v", len(kvs), err)
			}
			for _, kv := range kvs {
				if !want[kv.Key] {
					t.Errorf("%s is left, which is an old one", kv.Key)
				}
			}
		})
	}
}

// Entries that were restored have one revision together; their keys tell the order.
// What is written later comes after them, whatever its writer's clock said.
func TestHistoryThatWasRestored(t *testing.T) {
	st := memory.New()
	g := registry.Root("").Group("g")
	write := func(times ...int64) {
		var txn registry.Txn
		for _, ms := range times {
			value := fmt.Sprintf(`{"version":1,"timestamp":"%d","member":"m","action":"claimed"}`, ms)
			txn.Then = append(txn.Then, registry.Put(g.HistoryEntry(ms, "m", 1), []byte(value), 0))
		}
		if _, err := st.Txn(t.Context(), txn); err != nil {
			t.Fatal(err)
		}
	}
	write(50, 10, 90, 30, 70, 20, 80, 40, 60, 55, 15, 95, 35, 75, 25, 85, 45, 65)
	for _, ms := range []int64{33, 77, 12, 5} {
		write(ms)
	}
	if err := registry.PruneHistory(t.Context(), st, g, 20); err != nil {
		t.Fatal(err)
	}
	list, _, err := registry.ReadHistory(t.Context(), st, g)
	var got []string
	for _, e := range list {
		got = append(got, e.Time)
	}
	if want := "[20 25 30 35 40 45 50 55 60 65 70 75 80 85 90 95 33 77 12 5]"; err != nil || fmt.Sprint(got) != want {
		t.Errorf("left is %v, want %s; error %v", got, want, err)
	}
}

// Keys of entries are ordered by time and never those of another writer.
func TestHistoryEntries(t *testing.T) {
	g := registry.Root("").Group("g")
	keys := []string{g.HistoryEntry(-5, "z", 9), g.HistoryEntry(999, "z", 9), g.HistoryEntry(1796009631365, "a", 10), g.HistoryEntry(1796009631366, "a", 9)}
	if !slices.IsSorted(keys) {
		t.Errorf("not by time: %v", keys)
	}
	if keys[2] != "/consumers/g/history/1796009631365-a-10" {
		t.Errorf("key %s", keys[2])
	}
	seen := map[string]bool{}
	for _, member := range []string{"a", "a-1", "a-1-1", "a/1", "a%2F1", ""} {
		for _, n := range []uint64{1, 11, 1 << 63} {
			key := g.HistoryEntry(1, member, n)
			if seen[key] {
				t.Errorf("%s is of two writers", key)
			}
			seen[key] = true
			if at := registry.Root("").Locate(key); at.Kind != registry.KindHistory || at.Problem != nil {
				t.Errorf("%s is located as %+v", key, at)
			}
		}
	}
}

func TestParseHistory(t *testing.T) {
	for _, text := range []string{
		``, `[]`, `{}`,
		`{"version":1,"timestamp":"x","member":"m","action":"claimed"}`,
		`{"version":1,"timestamp":1,"member":"m","action":"claimed"}`,
		`{"version":1,"timestamp":"1","member":"","action":"claimed"}`,
		`{"version":1,"timestamp":"1","member":"m","action":"seen"}`,
		`{"version":1,"timestamp":"1","member":"m","action":"claimed","partitions":{"t":["3"]}}`,
		`{"version":1,"timestamp":"1","member":"m","action":"claimed","snapshot":7}`,
	} {
		if rec, err := registry.ParseHistory(registry.KV{Key: "/k", Value: []byte(text)}); !errors.Is(err, registry.ErrRecord) {
			t.Errorf("%s is read as %+v, error %v", text, rec, err)
		}
	}
}
