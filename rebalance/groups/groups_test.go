package groups_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/muster-io/muster/rebalance/groups"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

const root registry.Root = ""

func put(t *testing.T, st registry.Store, key, value string) {
	t.Helper()
	var lease registry.Lease
	if strings.Contains(key, "/ids/") {
		var err error
		if lease, err = st.Grant(t.Context(), time.Hour); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := st.Txn(t.Context(), registry.Txn{Then: []registry.Op{registry.Put(key, []byte(value), lease.ID)}}); err != nil {
		t.Fatal(err)
	}
}

func show[T any](v *T) string {
	if v == nil {
		return "nil"
	}
	return fmt.Sprint(*v)
}

// Field case 07: owners are found among the registered ids, whatever those look
// like; an owner that is not registered is shown as it stands, and flagged. The
// case has a topic of five partitions, of which the last has no owner.
func TestCase07(t *testing.T) {
	st := memory.New()
	first, second := "g_node-a-7-1761955200000-0b0c0d0e", "node-b-2:5c975c69-a251-4a52-9a6f-779738190012"
	put(t, st, "/brokers/topics/t", `{"version":1,"partitions":{"0":[1],"1":[1],"2":[1],"3":[1],"4":[1]}}`)
	put(t, st, "/consumers/g/ids/"+first, `{"version":1,"subscription":{"t":2},"pattern":"static","timestamp":"1"}`)
	put(t, st, "/consumers/g/ids/"+second, `{"version":1,"subscription":{"t":1},"pattern":"static","timestamp":"1","strategy":["range"]}`)
	for n, owner := range []string{first + "-0", first + "-1", second, "ghost-host-9"} {
		put(t, st, fmt.Sprintf("/consumers/g/owners/t/1-%d", n), owner)
	}
	d, bad, err := groups.Describe(t.Context(), st, root, "g", nil)
	if err != nil || len(bad) != 0 {
		t.Fatal(err, bad)
	}
	want := []string{
		first + "-0 stream 0 registered true host nil",
		first + "-1 stream 1 registered true host nil",
		second + " stream nil registered true host node-b-2",
		"ghost-host-9 stream nil registered false host nil",
		"nil stream nil registered nil host nil",
	}
	for i, r := range d.Partitions {
		got := fmt.Sprintf("%s stream %s registered %s host %s", show(r.Owner), show(r.Stream), show(r.OwnerRegistered), show(r.Host))
		if got != want[i] {
			t.Errorf("partition %d: %s\nwant %s", r.Partition, got, want[i])
		}
	}
	if show(d.Strategy) != "range-numeric" || len(d.Members) != 2 {
		t.Errorf("strategy %s, members %v", show(d.Strategy), d.Members)
	}
}

func TestDescribeShowsWhatIsKnownAndNull(t *testing.T) {
	st := memory.New()
	put(t, st, "/brokers/topics/t", `{"version":1,"partitions":{"0":[1],"1":[1],"2":[1]},"home":{"0":1,"1":2,"2":1}}`)
	put(t, st, "/consumers/g/ids/c", `{"version":1,"subscription":{"t":1},"pattern":"static","timestamp":"1"}`)
	put(t, st, "/consumers/g/ids/bad", `not a record`)
	put(t, st, "/consumers/g/offsets/t/1-0", "0")
	put(t, st, "/consumers/g/offsets/t/2-1", "120")
	put(t, st, "/consumers/g/offsets/gone/1-0", "9")
	put(t, st, "/consumers/g/offsets/t/odd", "9")
	ends := func(_ context.Context, ps []registry.Partition) map[registry.Partition]int64 {
		m := map[registry.Partition]int64{}
		for _, p := range ps {
			if p.Topic == "t" && p.Number < 2 {
				m[p] = 100
			}
		}
		return m
	}
	d, bad, err := groups.Describe(t.Context(), st, root, "g", ends)
	if err != nil || len(bad) != 2 {
		t.Fatal(err, bad)
	}
	want := []string{
		"gone/0 home 1: 9 nil nil",
		"t/0 home 1: 0 100 100",
		"t/1 home 2: 120 100 -20",
		"t/2 home 1: nil nil nil",
	}
	for i, r := range d.Partitions {
		got := fmt.Sprintf("%s/%d home %d: %s %s %s", r.Topic, r.Partition, r.Broker, show(r.Offset), show(r.LogEnd), show(r.Lag))
		if i >= len(want) || got != want[i] {
			t.Errorf("row %d: %s", i, got)
		}
	}
	if _, _, err := groups.Describe(t.Context(), st, root, "nosuch", nil); !errors.Is(err, groups.ErrNotFound) {
		t.Errorf("unknown group: %v", err)
	}
}

func TestList(t *testing.T) {
	st := memory.New()
	put(t, st, "/consumers/a/ids/c1", "x")
	put(t, st, "/consumers/a/owners/t/1-0", "c1-0")
	put(t, st, "/consumers/%E2%82%AC/offsets/t/1-0", "1")
	put(t, st, "/consumers/%zz/offsets/t/1-0", "1")
	list, bad, err := groups.List(t.Context(), st, root)
	if err != nil || len(bad) != 1 {
		t.Fatal(err, bad)
	}
	if got, want := fmt.Sprint(list), "[{€ 0 0 1} {a 1 1 0}]"; got != want && got != "[{a 1 1 0} {€ 0 0 1}]" {
		t.Errorf("got %s, want %s", got, want)
	}
}
