package storetest

import (
	"fmt"
	"testing"

	"github.com/muster-io/muster/registry"
)

func txnCases() []Case {
	return []Case{
		{"txn/branches", txnBranches},
		{"txn/nested", txnNested},
		{"txn/conditions", txnConditions},
		{"txn/limits", txnLimits},
		{"txn/duplicates", txnDuplicates},
		{"txn/leases", txnLeases},
	}
}

func txnBranches(t *testing.T, st registry.Store, prefix string) {
	a, b := prefix+"a", prefix+"b"
	first := do(t, st, registry.Put(a, []byte("1"), 0), registry.Put(b, []byte("2"), 0))
	if !first.Succeeded || len(first.Items) != 2 {
		t.Fatalf("got %+v", first)
	}
	for _, key := range []string{a, b} {
		if kv := get(t, st, key); kv == nil || kv.CreateRevision != first.Revision || kv.ModRevision != first.Revision {
			t.Fatalf("%s: %+v, want both revisions %d: one transaction is one revision", key, kv, first.Revision)
		}
	}
	again := put(t, st, a, "3")
	if kv := get(t, st, a); again <= first.Revision || kv.CreateRevision != first.Revision || kv.ModRevision != again || string(kv.Value) != "3" {
		t.Fatalf("second put at %d: %+v", again, kv)
	}
	read := must(t, st, registry.Txn{If: []registry.Cond{registry.Absent(a)},
		Then: []registry.Op{registry.Delete(a)},
		Else: []registry.Op{registry.Get(a), registry.Get(prefix + "no"), {Kind: registry.OpGet, Key: prefix, Prefix: true}}})
	if read.Succeeded || read.Revision != again {
		t.Fatalf("a read made revision %d of %d, or the condition held: %+v", read.Revision, again, read)
	}
	if got := []int{len(read.Items[0].KVs), len(read.Items[1].KVs), len(read.Items[2].KVs)}; fmt.Sprint(got) != "[1 0 2]" {
		t.Fatalf("numbers of keys read %v, want [1 0 2]", got)
	}
	gone := do(t, st, registry.Op{Kind: registry.OpDelete, Key: prefix, Prefix: true}, registry.Delete(a))
	if gone.Items[0].Deleted != 2 || gone.Items[1].Deleted != 0 {
		t.Fatalf("deleted %d and %d keys, want 2 and 0", gone.Items[0].Deleted, gone.Items[1].Deleted)
	}
	if none := do(t, st, registry.Delete(a)); none.Revision != gone.Revision {
		t.Fatalf("deleting nothing made revision %d after %d", none.Revision, gone.Revision)
	}
	if back := put(t, st, a, "4"); get(t, st, a).CreateRevision != back {
		t.Fatalf("a key that is created again keeps its old create-revision")
	}
}

func txnNested(t *testing.T, st registry.Store, prefix string) {
	free, taken, third := prefix+"free", prefix+"taken", prefix+"third"
	old := put(t, st, taken, "old")
	claim := func(key string) registry.Op {
		return registry.Nested(registry.Txn{If: []registry.Cond{registry.Absent(key)},
			Then: []registry.Op{registry.Put(key, []byte("new"), 0)}, Else: []registry.Op{registry.Get(key)}})
	}
	res := do(t, st, claim(free), registry.Get(taken), claim(taken))
	one, two := res.Items[0].Txn, res.Items[2].Txn
	if one == nil || two == nil || !one.Succeeded || two.Succeeded {
		t.Fatalf("got %+v", res)
	}
	if one.Revision != res.Revision || two.Revision != res.Revision || res.Revision != old+1 {
		t.Fatalf("nested revisions %d and %d, outer %d: want one, %d", one.Revision, two.Revision, res.Revision, old+1)
	}
	if kv := two.Items[0].KVs[0]; string(kv.Value) != "old" || kv.CreateRevision != old {
		t.Fatalf("the taken key reads %+v", kv)
	}
	if kv := get(t, st, free); kv.CreateRevision != one.Revision {
		t.Fatalf("create-revision %d, the nested result says %d", kv.CreateRevision, one.Revision)
	}
	// Conditions at every level are decided on the state before the transaction;
	// reads see what came before them.
	res = do(t, st, registry.Put(third, []byte("x"), 0),
		registry.Nested(registry.Txn{If: []registry.Cond{registry.Absent(third)}, Then: []registry.Op{registry.Get(third)}}))
	if n := res.Items[1].Txn; !n.Succeeded || len(n.Items[0].KVs) != 1 {
		t.Fatalf("nested condition was not decided on the state before: %+v", n)
	}
	// A guard that fails keeps everything inside from happening.
	res = must(t, st, registry.Txn{If: []registry.Cond{registry.Absent(taken)}, Then: []registry.Op{claim(prefix + "fourth")}})
	if res.Succeeded || len(res.Items) != 0 || get(t, st, prefix+"fourth") != nil {
		t.Fatalf("a nested transaction ran behind a guard that failed: %+v", res)
	}
}

func txnConditions(t *testing.T, st registry.Store, prefix string) {
	lease := grant(t, st, patience)
	key, other, none := prefix+"p/a", prefix+"p/b", prefix+"none"
	r1 := do(t, st, registry.Put(key, []byte("m"), lease)).Revision
	r2 := do(t, st, registry.Put(other, []byte("z"), 0)).Revision
	value := func(key string, rel registry.Relation, v string) registry.Cond {
		return registry.Cond{Key: key, Field: registry.FieldValue, Relation: rel, Value: []byte(v)}
	}
	for _, c := range []struct {
		cond registry.Cond
		want bool
	}{
		{registry.Absent(none), true},
		{registry.Absent(key), false},
		{registry.CreatedAt(key, r1), true},
		{registry.CreatedAt(key, r2), false},
		{registry.ModifiedAt(other, r2), true},
		{registry.ModifiedAt(none, r2), false},
		{registry.HeldBy(key, lease), true},
		{registry.HeldBy(other, lease), false},
		{registry.HeldBy(other, 0), true},
		{registry.HeldBy(none, 0), true}, // why Release refuses lease 0
		{registry.Cond{Key: key, Field: registry.FieldLease, Relation: registry.NotEqual}, true},
		{registry.Cond{Key: key, Field: registry.FieldCreateRevision, Relation: registry.Greater, Number: r1 - 1}, true},
		{registry.Cond{Key: key, Field: registry.FieldCreateRevision, Relation: registry.Greater, Number: r1}, false},
		{value(key, registry.Equal, "m"), true},
		{value(key, registry.NotEqual, "m"), false},
		{value(key, registry.Less, "n"), true},
		{value(key, registry.Greater, "l"), true},
		{value(none, registry.Equal, ""), false},
		{value(none, registry.NotEqual, "x"), false},
		{registry.UnmodifiedSince(prefix+"p/", r2), true},
		{registry.UnmodifiedSince(prefix+"p/", r1), false}, // one key of two is newer
		{registry.UnmodifiedSince(prefix+"p/", r1-1), false},
		{registry.UnmodifiedSince(prefix+"q/", 0), true}, // no key
		{registry.Cond{Key: prefix + "q/", Prefix: true, Field: registry.FieldModRevision, Relation: registry.Greater, Number: 1}, false},
		{registry.Cond{Key: prefix + "q/", Prefix: true, Field: registry.FieldValue, Relation: registry.NotEqual, Value: []byte("x")}, false},
	} {
		if res := must(t, st, registry.Txn{If: []registry.Cond{c.cond}}); res.Succeeded != c.want {
			t.Errorf("%+v: %t, want %t", c.cond, res.Succeeded, c.want)
		}
	}
	both := registry.Txn{If: []registry.Cond{registry.Absent(none), registry.Absent(key)}}
	if must(t, st, both).Succeeded {
		t.Errorf("one condition of two is not enough")
	}
}

func puts(prefix string, n int) (ops []registry.Op) {
	for i := range n {
		ops = append(ops, registry.Put(fmt.Sprintf("%s%03d", prefix, i), []byte("v"), 0))
	}
	return ops
}

func nested(prefix string, n, inner int) (ops []registry.Op) {
	for i := range n {
		ops = append(ops, registry.Nested(registry.Txn{Then: puts(fmt.Sprintf("%s%03d/", prefix, i), inner)}))
	}
	return ops
}

// case 62: the limits that Claim, Release and others stay under.
func txnLimits(t *testing.T, st registry.Store, prefix string) {
	do(t, st, puts(prefix+"a/", registry.MaxTxnOps)...)
	wantRefused(t, st, registry.Txn{Then: puts(prefix+"b/", registry.MaxTxnOps+1)}, "one operation too many")
	wantRefused(t, st, registry.Txn{Else: puts(prefix+"b/", registry.MaxTxnOps+1)}, "one operation too many, not reached")
	do(t, st, nested(prefix+"c/", registry.MaxNested, registry.MaxTxnOps-registry.MaxNested)...)
	wantRefused(t, st, registry.Txn{Then: nested(prefix+"b/", registry.MaxNested, registry.MaxTxnOps-registry.MaxNested+1)}, "one nested operation too many")
	if kvs, _, err := registry.List(within(t), st, prefix+"b/", 0); err != nil || len(kvs) != 0 {
		t.Fatalf("a refused transaction left %d keys (error %v)", len(kvs), err)
	}
}

func txnDuplicates(t *testing.T, st registry.Store, prefix string) {
	a, b := prefix+"a", prefix+"b"
	pa, pb := registry.Put(a, []byte("v"), 0), registry.Put(b, []byte("v"), 0)
	in := func(ops ...registry.Op) registry.Op { return registry.Nested(registry.Txn{Then: ops}) }
	for why, ops := range map[string][]registry.Op{
		"put twice":                     {pa, pb, pa},
		"put here and nested":           {pa, in(pa)},
		"put in two nested":             {in(pa), in(pa)},
		"put and delete":                {pa, registry.Delete(a)},
		"put and delete of the prefix":  {{Kind: registry.OpDelete, Key: prefix, Prefix: true}, pb},
		"delete here, put nested":       {registry.Delete(a), in(pa)},
		"put here, delete nested":       {pa, in(registry.Delete(a))},
		"put nested, delete in another": {in(registry.Delete(a)), in(pa)},
	} {
		wantRefused(t, st, registry.Txn{Then: ops}, why)
		wantRefused(t, st, registry.Txn{If: []registry.Cond{registry.Absent(a)}, Else: ops}, why+", not reached")
	}
	if kvs, _, err := registry.List(within(t), st, prefix, 0); err != nil || len(kvs) != 0 {
		t.Fatalf("a refused transaction left %d keys (error %v)", len(kvs), err)
	}
	// Branches exclude each other, and deleting twice is deleting.
	do(t, st, registry.Nested(registry.Txn{Then: []registry.Op{pa}, Else: []registry.Op{pa}}))
	if res := do(t, st, registry.Delete(a), registry.Delete(a)); res.Items[0].Deleted != 1 || res.Items[1].Deleted != 0 {
		t.Fatalf("got %+v", res)
	}
}

func txnLeases(t *testing.T, st registry.Store, prefix string) {
	lease := grant(t, st, patience)
	if err := st.Revoke(within(t), lease); err != nil {
		t.Fatal(err)
	}
	a, b := prefix+"a", prefix+"b"
	_, err := st.Txn(within(t), registry.Txn{Then: []registry.Op{registry.Put(a, []byte("v"), 0), registry.Put(b, []byte("v"), lease)}})
	wantErr(t, err, registry.ErrLeaseNotFound)
	_, err = st.Txn(within(t), registry.Txn{Then: []registry.Op{registry.Put(a, []byte("v"), 0),
		registry.Nested(registry.Txn{Then: []registry.Op{registry.Put(b, []byte("v"), lease)}})}})
	wantErr(t, err, registry.ErrLeaseNotFound)
	if get(t, st, a) != nil || get(t, st, b) != nil {
		t.Fatal("a transaction that was refused for its lease took effect in part")
	}
	// Only what is reached needs its lease.
	must(t, st, registry.Txn{If: []registry.Cond{registry.CreatedAt(a, 1)}, Then: []registry.Op{registry.Put(b, []byte("v"), lease)},
		Else: []registry.Op{registry.Put(a, []byte("v"), 0)}})
	if get(t, st, a) == nil {
		t.Fatal("the other branch did not run")
	}
}
