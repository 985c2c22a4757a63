package storetest

import (
	"fmt"
	"slices"
	"testing"

	"github.com/muster-io/muster/registry"
)

func rangeCases() []Case {
	return []Case{
		{"range/pages", rangePages},
		{"range/order", rangeOrder},
		{"range/revisions", rangeRevisions},
		{"range/compacted", rangeCompacted},
	}
}

func scan(t *testing.T, st registry.Store, r registry.RangeRequest) registry.RangeResult {
	t.Helper()
	res, err := st.Range(within(t), r)
	if err != nil {
		t.Fatalf("range %+v: %v", r, err)
	}
	return res
}

func names(prefix string, kvs []registry.KV) (out []string) {
	for _, kv := range kvs {
		out = append(out, kv.Key[len(prefix):])
	}
	return out
}

func rangePages(t *testing.T, st registry.Store, prefix string) {
	do(t, st, puts(prefix+"p/", 10)...)
	put(t, st, prefix+"p", "not below p/")
	put(t, st, prefix+"p0", "after all of p/")
	var got []string
	after := ""
	for pages := 0; ; pages++ {
		res := scan(t, st, registry.RangeRequest{Key: prefix + "p/", Prefix: true, After: after, Limit: 4})
		got = append(got, names(prefix+"p/", res.KVs)...)
		if !res.More {
			if pages != 2 {
				t.Errorf("%d full pages, want 2", pages)
			}
			break
		}
		after = res.KVs[len(res.KVs)-1].Key
	}
	want := []string{"000", "001", "002", "003", "004", "005", "006", "007", "008", "009"}
	if !slices.Equal(got, want) {
		t.Errorf("pages hold %v, want %v", got, want)
	}
	if res := scan(t, st, registry.RangeRequest{Key: prefix + "p/", Prefix: true, Limit: 10}); res.More {
		t.Error("more is promised after the last key")
	}
	if res := scan(t, st, registry.RangeRequest{Key: prefix + "p/", Prefix: true, After: prefix, Limit: 1}); len(res.KVs) != 1 || res.KVs[0].Key != prefix+"p/000" {
		t.Errorf("after a key before the prefix: %v", names(prefix, res.KVs))
	}
	if res := scan(t, st, registry.RangeRequest{Key: prefix + "p/", Prefix: true, After: prefix + "p/009"}); len(res.KVs) != 0 {
		t.Errorf("after the last key: %v", names(prefix, res.KVs))
	}
	if res := scan(t, st, registry.RangeRequest{Key: prefix + "p"}); len(res.KVs) != 1 || string(res.KVs[0].Value) != "not below p/" {
		t.Errorf("one key: %v", names(prefix, res.KVs))
	}
	res := scan(t, st, registry.RangeRequest{Key: prefix + "p/", Prefix: true, KeysOnly: true})
	if len(res.KVs) != 10 || len(res.KVs[0].Value) != 0 || res.KVs[0].ModRevision == 0 {
		t.Errorf("keys only: %+v", res.KVs)
	}
}

func rangeOrder(t *testing.T, st registry.Store, prefix string) {
	for _, name := range []string{"10", "9", "a", "Z", "%C3%A4"} { // case 59: numbers sort as bytes
		put(t, st, prefix+name, name)
	}
	put(t, st, prefix+"9", "again")
	if got, want := names(prefix, scan(t, st, registry.RangeRequest{Key: prefix, Prefix: true}).KVs), []string{"%C3%A4", "10", "9", "Z", "a"}; !slices.Equal(got, want) {
		t.Errorf("by key %v, want %v", got, want)
	}
	if got, want := names(prefix, scan(t, st, registry.RangeRequest{Key: prefix, Prefix: true, ByCreated: true, Limit: 3}).KVs), []string{"10", "9", "a"}; !slices.Equal(got, want) {
		t.Errorf("by age %v, want %v", got, want)
	}
}

func rangeRevisions(t *testing.T, st registry.Store, prefix string) {
	key := prefix + "k"
	var at []int64
	at = append(at, put(t, st, prefix+"before", ""))
	at = append(at, put(t, st, key, "1"), put(t, st, key, "2"), do(t, st, registry.Delete(key)).Revision, put(t, st, key, "3"))
	for i, want := range []string{"", "1", "2", "", "3"} {
		res := scan(t, st, registry.RangeRequest{Key: key, Revision: at[i]})
		got := ""
		if len(res.KVs) == 1 {
			got = string(res.KVs[0].Value)
		}
		if got != want || res.Revision < at[4] {
			t.Errorf("at revision %d: %q of store revision %d, want %q of %d", at[i], got, res.Revision, want, at[4])
		}
	}
	if kv := scan(t, st, registry.RangeRequest{Key: key, Revision: at[2]}).KVs[0]; kv.CreateRevision != at[1] || kv.ModRevision != at[2] {
		t.Errorf("old revisions of the key: %+v", kv)
	}
	if _, err := st.Range(within(t), registry.RangeRequest{Key: key, Revision: at[4] + 1_000_000}); err == nil {
		t.Error("a revision that does not exist yet was read")
	}
	kvs, rev, err := registry.List(within(t), st, prefix, at[1])
	if err != nil || rev != at[1] || fmt.Sprint(names(prefix, kvs)) != "[before k]" {
		t.Errorf("list at %d: %v at %d, error %v", at[1], names(prefix, kvs), rev, err)
	}
}

func rangeCompacted(t *testing.T, st registry.Store, prefix string) {
	key := prefix + "k"
	r1, r2, r3 := put(t, st, key, "1"), put(t, st, key, "2"), put(t, st, key, "3")
	st.(Compacter).Compact(r2)
	_, err := st.Range(within(t), registry.RangeRequest{Key: key, Revision: r1})
	wantErr(t, err, registry.ErrCompacted)
	for rev, want := range map[int64]string{r2: "2", r3: "3"} {
		if res := scan(t, st, registry.RangeRequest{Key: key, Revision: rev}); string(res.KVs[0].Value) != want {
			t.Errorf("at %d: %q, want %q", rev, res.KVs[0].Value, want)
		}
	}
}
