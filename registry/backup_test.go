package registry_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

func listed(t *testing.T, st registry.Store, root registry.Root) map[string]string {
	t.Helper()
	kvs, _, err := registry.List(t.Context(), st, root.Prefix(), 0)
	if err != nil {
		t.Fatal(err)
	}
	m := map[string]string{}
	for _, kv := range kvs {
		m[strings.TrimPrefix(kv.Key, string(root))] = string(kv.Value)
	}
	return m
}

// someKeys fills a root with keys and values of every kind, and some under a lease.
func someKeys(t *testing.T, st registry.Store, root registry.Root, n int) {
	t.Helper()
	lease, err := st.Grant(t.Context(), registry.DefaultTTL)
	if err != nil {
		t.Fatal(err)
	}
	values := [][]byte{nil, []byte("42"), []byte("{\"version\":1}"), []byte("<&>\u2028\n"), {0xff, 0, 0xfe}, bytes.Repeat([]byte("x"), 30_000)}
	for i := range n {
		for _, op := range []registry.Op{
			registry.Put(root.Key(fmt.Sprintf("/k/%d", i)), values[i%len(values)], 0),
			registry.Put(root.Key(fmt.Sprintf("/ids/%d", i)), nil, lease.ID),
		} {
			if _, err := st.Txn(t.Context(), registry.Txn{Then: []registry.Op{op}}); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, key := range []string{"/odd\xff/é", "/"} {
		if _, err := st.Txn(t.Context(), registry.Txn{Then: []registry.Op{registry.Put(root.Key(key), []byte("v"), 0)}}); err != nil {
			t.Fatal(err)
		}
	}
}

func backUp(t *testing.T, st registry.Store, root registry.Root) string {
	t.Helper()
	var out bytes.Buffer
	if _, err := registry.Backup(t.Context(), st, root, &out); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// What was restored is what was backed up, under another root too, without what was
// under a lease; and a backup of it has the same keys.
func TestBackupAndRestore(t *testing.T) {
	st := memory.New()
	someKeys(t, st, "/a", 500)
	text := backUp(t, st, "/a")
	h, err := registry.Restore(t.Context(), st, "/b", strings.NewReader(text))
	if err != nil || h.Root != "/a" || h.Keys != 502 {
		t.Fatalf("%+v, error %v", h, err)
	}
	want := listed(t, st, "/a")
	for k := range want {
		if strings.HasPrefix(k, "/ids/") {
			delete(want, k)
		}
	}
	got := listed(t, st, "/b")
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("restored %d keys, want %d", len(got), len(want))
	}
	cut := func(text string) string { return text[strings.Index(text, "\n"):strings.LastIndex(text, `{"end"`)] }
	if again := backUp(t, st, "/b"); cut(again) != cut(text) {
		t.Error("a backup of what was restored differs")
	}
	empty := backUp(t, st, "/nothing")
	if h, err := registry.Restore(t.Context(), memory.New(), "", strings.NewReader(empty)); err != nil || h.Keys != 0 {
		t.Errorf("an empty one: %+v, error %v", h, err)
	}
}

// The target of a group and its history stand in a backup under their names, as what
// is committed does; who is in the group and owns what does not.
func TestBackupHasTargetAndHistory(t *testing.T) {
	st := memory.New()
	lease, err := st.Grant(t.Context(), registry.DefaultTTL)
	if err != nil {
		t.Fatal(err)
	}
	p := registry.Partition{Topic: "t", Home: 1}
	group := func(root registry.Root) registry.GroupPaths { return root.Group("a b") }
	g := group("/a")
	txn(t, st, registry.Put(g.Target(), []byte("target"), 0), registry.Put(g.HistoryEntry(1796009568591, "c1", 7), []byte("entry"), 0),
		registry.Put(g.Offset(p), []byte("42"), 0), registry.Put(g.ID("c1"), []byte("{}"), lease.ID), registry.Put(g.Owner(p), []byte("c1-0"), lease.ID))
	text := backUp(t, st, "/a")
	if _, err := registry.Restore(t.Context(), st, "/b", strings.NewReader(text)); err != nil {
		t.Fatal(err)
	}
	g = group("/b")
	for key, want := range map[string]string{g.Target(): "target", g.HistoryEntry(1796009568591, "c1", 7): "entry", g.Offset(p): "42"} {
		if kv, _, err := registry.GetKey(t.Context(), st, key); err != nil || kv == nil || string(kv.Value) != want || kv.Lease != 0 {
			t.Errorf("%s: %+v, error %v", key, kv, err)
		}
		if line := `{"key":"` + strings.TrimPrefix(key, "/b") + `","value":"` + want + `"}`; !strings.Contains(text, line+"\n") {
			t.Errorf("%s is not in the backup:\n%s", line, text)
		}
	}
	if got := listed(t, st, "/b"); len(got) != 3 {
		t.Errorf("restored %v", got)
	}
}

// A registry that has any key is refused, one under a lease too; the same backup again
// changes nothing.
func TestRestoreRefusesWhatIsNotEmpty(t *testing.T) {
	st := memory.New()
	someKeys(t, st, "/a", 10)
	text := backUp(t, st, "/a")
	if _, err := registry.Restore(t.Context(), st, "/a", strings.NewReader(text)); !errors.Is(err, registry.ErrNotEmpty) {
		t.Errorf("onto itself, with keys under leases: %v", err)
	}
	lease, err := st.Grant(t.Context(), registry.DefaultTTL)
	if err != nil {
		t.Fatal(err)
	}
	for name, op := range map[string]registry.Op{"persistent": registry.Put("/p/x", nil, 0), "under a lease": registry.Put("/l/x", nil, lease.ID)} {
		if _, err := st.Txn(t.Context(), registry.Txn{Then: []registry.Op{op}}); err != nil {
			t.Fatal(err)
		}
		root := registry.Root(op.Key[:2])
		_, err := registry.Restore(t.Context(), st, root, strings.NewReader(text))
		if !errors.Is(err, registry.ErrNotEmpty) || !strings.Contains(err.Error(), op.Key) || len(listed(t, st, root)) != 1 {
			t.Errorf("%s: %v", name, err)
		}
	}
	for range 2 {
		if _, err := registry.Restore(t.Context(), st, "/b", strings.NewReader(text)); err != nil {
			t.Error(err)
		}
	}
	if got := len(listed(t, st, "/b")); got != 12 {
		t.Errorf("%d keys", got)
	}
}

// Whatever is cut off or changed in a backup, nothing is written.
func TestRestoreRefusesDamage(t *testing.T) {
	st := memory.New()
	someKeys(t, st, "/a", 6)
	text := backUp(t, st, "/a")
	refused := func(what, text string) {
		t.Helper()
		if _, err := registry.Restore(t.Context(), st, "/b", strings.NewReader(text)); !errors.Is(err, registry.ErrBackup) {
			t.Errorf("%s: %v", what, err)
		}
		if n := len(listed(t, st, "/b")); n != 0 {
			t.Fatalf("%s: %d keys were written", what, n)
		}
	}
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 0))
	for range 300 {
		// Without the last line break it is still whole.
		n := rnd.IntN(len(text) - 1)
		refused(fmt.Sprintf("seed %d, cut at %d", seed, n), text[:n])
		changed := []byte(text)
		changed[n] ^= byte(1 + rnd.IntN(255))
		refused(fmt.Sprintf("seed %d, changed at %d", seed, n), string(changed))
	}
	lines := strings.SplitAfter(text, "\n")
	refused("a line left out", strings.Join(append(append([]string{}, lines[:3]...), lines[4:]...), ""))
	refused("two lines swapped", strings.Join(append(append([]string{lines[0]}, lines[2], lines[1]), lines[3:]...), ""))
	refused("more after the end", text+"{}\n")
	refused("a newer version", strings.Replace(text, `"muster_backup":1`, `"muster_backup":2`, 1))
	refused("something else", "hello\n")
}

// failing is a store that fails at a transaction, before or after it took effect.
type failing struct {
	registry.Store
	left  int
	after bool
}

var errCutShort = errors.New("crash")

func (f *failing) Txn(ctx context.Context, t registry.Txn) (registry.TxnResult, error) {
	if f.left--; f.left >= 0 {
		return f.Store.Txn(ctx, t)
	}
	if f.after {
		if _, err := f.Store.Txn(ctx, t); err != nil {
			return registry.TxnResult{}, err
		}
	}
	return registry.TxnResult{}, errCutShort
}

// Wherever a restore was cut short, the same backup finishes it, and no other does.
func TestRestoreAfterACrash(t *testing.T) {
	source := memory.New()
	someKeys(t, source, "/a", 250)
	text := backUp(t, source, "/a")
	other := backUp(t, source, "/nothing")
	crashes := 0
	for steps := range 100 {
		done := false
		for _, after := range []bool{false, true} {
			st := memory.New()
			_, err := registry.Restore(t.Context(), &failing{Store: st, left: steps, after: after}, "/b", strings.NewReader(text))
			if done = err == nil; done {
				continue
			}
			crashes++
			if !errors.Is(err, errCutShort) {
				t.Fatalf("%d steps: %v", steps, err)
			}
			_, marked := listed(t, st, "/b")["/restoring"]
			if marked {
				if _, err := registry.Restore(t.Context(), st, "/b", strings.NewReader(other)); !errors.Is(err, registry.ErrNotEmpty) {
					t.Errorf("%d steps: another backup: %v", steps, err)
				}
				if _, err := registry.Backup(t.Context(), st, "/b", &bytes.Buffer{}); err == nil {
					t.Errorf("%d steps: half a registry was backed up", steps)
				}
			}
			if _, err := registry.Restore(t.Context(), st, "/b", strings.NewReader(text)); err != nil {
				t.Errorf("%d steps, after %v: again: %v", steps, after, err)
			}
			if got := len(listed(t, st, "/b")); got != 252 {
				t.Errorf("%d steps, after %v: %d keys", steps, after, got)
			}
		}
		if done {
			break
		}
	}
	if t.Logf("%d crashes", crashes); crashes < 6 {
		t.Error("hardly any")
	}
}

// Compaction during a backup is an error that callers can tell, never two revisions in
// one file.
func TestBackupDuringACompaction(t *testing.T) {
	st := &compacting{Store: memory.New()}
	for i := range 6000 { // more than List reads at a time
		if _, err := st.Txn(t.Context(), registry.Txn{Then: []registry.Op{registry.Put(fmt.Sprintf("/a/%d", i), nil, 0)}}); err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	if _, err := registry.Backup(t.Context(), st, "/a", &out); !errors.Is(err, registry.ErrCompacted) || out.Len() != 0 {
		t.Errorf("error %v, %d bytes written", err, out.Len())
	}
}

type compacting struct{ *memory.Store }

func (c *compacting) Range(ctx context.Context, r registry.RangeRequest) (registry.RangeResult, error) {
	res, err := c.Store.Range(ctx, r)
	if r.After == "" && err == nil {
		var put registry.TxnResult
		if put, err = c.Txn(ctx, registry.Txn{Then: []registry.Op{registry.Put("/a/new", nil, 0)}}); err == nil {
			c.Compact(put.Revision)
		}
	}
	return res, err
}

// sealed is a backup of these lines, whole by its hash.
func sealed(version int, lines ...string) string {
	text := fmt.Sprintf(`{"muster_backup":%d,"root":"/a","revision":7,"time":"2026-05-01T12:00:00Z","keys":%d}`+"\n", version, len(lines))
	for _, l := range lines {
		text += l + "\n"
	}
	return text + fmt.Sprintf(`{"end":%d,"sha256":"%x"}`+"\n", len(lines), sha256.Sum256([]byte(text)))
}

// A file may be whole and still not be a backup that can be restored.
func TestRestoreRefusesWhatNobodyWrote(t *testing.T) {
	st := memory.New()
	const one = `{"key":"/x","value":"1"}`
	for name, text := range map[string]string{
		"a key twice":                  sealed(1, one, `{"key":"/x","value":"2"}`),
		"a key that leaves the root":   sealed(1, `{"key":"x","value":"1"}`),
		"a newer version":              sealed(2, one),
		"a field that nobody knows":    sealed(1, `{"key":"/x","lease":"7"}`),
		"fewer keys than it speaks of": strings.Replace(sealed(1, one), `"keys":1`, `"keys":2`, 1),
	} {
		_, err := registry.Restore(t.Context(), st, "/b", strings.NewReader(text))
		if !errors.Is(err, registry.ErrBackup) || len(listed(t, st, "/b")) != 0 {
			t.Errorf("%s: error %v, keys %v", name, err, listed(t, st, "/b"))
		}
	}
	if _, err := registry.Restore(t.Context(), st, "/b", strings.NewReader(sealed(1, one))); err != nil || len(listed(t, st, "/b")) != 1 {
		t.Errorf("what is right: error %v, keys %v", err, listed(t, st, "/b"))
	}
}

// Some keys of the backup, with their very values, are not the work of an earlier try:
// neither are they all, nor may they be under a lease.
func TestRestoreRefusesAPart(t *testing.T) {
	st := memory.New()
	lease, err := st.Grant(t.Context(), registry.DefaultTTL)
	if err != nil {
		t.Fatal(err)
	}
	text := sealed(1, `{"key":"/x","value":"1"}`, `{"key":"/y","value":"2"}`)
	for root, ops := range map[registry.Root][]registry.Op{
		"/part":  {registry.Put("/part/x", []byte("1"), 0)},
		"/lease": {registry.Put("/lease/x", []byte("1"), lease.ID), registry.Put("/lease/y", []byte("2"), 0)},
	} {
		if _, err := st.Txn(t.Context(), registry.Txn{Then: ops}); err != nil {
			t.Fatal(err)
		}
		_, err := registry.Restore(t.Context(), st, root, strings.NewReader(text))
		if !errors.Is(err, registry.ErrNotEmpty) || len(listed(t, st, root)) != len(ops) {
			t.Errorf("%s: error %v, keys %v", root, err, listed(t, st, root))
		}
	}
}

// thief takes the marker of a restore away before its second transaction.
type thief struct {
	registry.Store
	txns int
}

func (s *thief) Txn(ctx context.Context, t registry.Txn) (registry.TxnResult, error) {
	if s.txns++; s.txns == 2 {
		if _, err := s.Store.Txn(ctx, registry.Txn{Then: []registry.Op{registry.Delete("/b/restoring")}}); err != nil {
			return registry.TxnResult{}, err
		}
	}
	return s.Store.Txn(ctx, t)
}

func TestRestoreWritesNothingWithoutItsMarker(t *testing.T) {
	st := memory.New()
	_, err := registry.Restore(t.Context(), &thief{Store: st}, "/b", strings.NewReader(sealed(1, `{"key":"/x","value":"1"}`)))
	if err == nil || !strings.Contains(err.Error(), "marker") || len(listed(t, st, "/b")) != 0 {
		t.Errorf("error %v, keys %v", err, listed(t, st, "/b"))
	}
}
