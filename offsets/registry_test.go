package offsets_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/muster-io/muster/offsets"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

var group = registry.Root("/r").Group("g")

func partition(n int) registry.Partition {
	return registry.Partition{Topic: "orders", Home: 1, Number: int32(n)}
}

// own creates owner keys and returns their token.
func own(t *testing.T, st registry.Store, numbers ...int) int64 {
	t.Helper()
	var token int64
	for _, n := range numbers {
		res, err := st.Txn(t.Context(), registry.Txn{Then: []registry.Op{registry.Put(group.Owner(partition(n)), []byte("c-0"), 0)}})
		if err != nil {
			t.Fatal(err)
		}
		token = res.Revision
	}
	return token
}

func write(t *testing.T, st registry.Store, op registry.Op) {
	t.Helper()
	if _, err := st.Txn(t.Context(), registry.Txn{Then: []registry.Op{op}}); err != nil {
		t.Fatal(err)
	}
}

func commitOne(t *testing.T, o *offsets.Registry, c offsets.Commit) offsets.Outcome {
	t.Helper()
	out, err := o.Commit(t.Context(), []offsets.Commit{c})
	if err != nil || len(out) != 1 {
		t.Fatal(out, err)
	}
	return out[0]
}

func value(t *testing.T, o *offsets.Registry, n int) int64 {
	t.Helper()
	got, err := o.Fetch(t.Context(), []registry.Partition{partition(n)})
	if err != nil || got[0].Err != nil {
		t.Fatal(err, got)
	}
	return got[0].Offset
}

func TestCommitAndFetch(t *testing.T) {
	st := memory.New()
	o := offsets.NewRegistry(st, group)
	token := own(t, st, 0)
	if got := value(t, o, 0); got != offsets.None {
		t.Fatalf("nothing is committed, fetched %d", got)
	}
	out := commitOne(t, o, offsets.Commit{Partition: partition(0), Offset: 0, Token: token})
	if !out.Stored || value(t, o, 0) != 0 {
		t.Fatalf("offset 0 is an offset: %+v", out)
	}
	out = commitOne(t, o, offsets.Commit{Partition: partition(0), Offset: 7, Token: token, Previous: out.Now.Revision})
	if !out.Stored || out.Now.Offset != 7 || value(t, o, 0) != 7 {
		t.Fatalf("%+v", out)
	}
	kv, _, err := registry.GetKey(t.Context(), st, "/r/consumers/g/offsets/orders/1-0")
	if err != nil || kv == nil || string(kv.Value) != "7" || kv.Lease != 0 {
		t.Fatalf("the key is %+v, %v", kv, err)
	}
}

// A commit under a token that the owner key does not have any more changes nothing.
func TestCommitOfAFormerOwnerIsFenced(t *testing.T) {
	st := memory.New()
	o := offsets.NewRegistry(st, group)
	token := own(t, st, 0)
	first := commitOne(t, o, offsets.Commit{Partition: partition(0), Offset: 50, Token: token})
	write(t, st, registry.Delete(group.Owner(partition(0))))
	if out := commitOne(t, o, offsets.Commit{Partition: partition(0), Offset: 60, Token: token, Previous: first.Now.Revision}); !out.Fenced || out.Stored {
		t.Errorf("without an owner: %+v", out)
	}
	next := own(t, st, 0)
	second := commitOne(t, o, offsets.Commit{Partition: partition(0), Offset: 70, Token: next, Previous: first.Now.Revision})
	if out := commitOne(t, o, offsets.Commit{Partition: partition(0), Offset: 60, Token: token, Previous: second.Now.Revision}); !out.Fenced {
		t.Errorf("with another owner: %+v", out)
	}
	if got := value(t, o, 0); got != 70 {
		t.Errorf("offset is %d, want that of the new owner", got)
	}
}

// A commit whose reply was lost and that lands late does not move the offset back.
func TestLateCommitDoesNotMoveBack(t *testing.T) {
	st := memory.New()
	o := offsets.NewRegistry(st, group)
	token := own(t, st, 0)
	late := offsets.Commit{Partition: partition(0), Offset: 10, Token: token}
	st.SetHooks(memory.Hooks{Before: func(context.Context, string) error { return errors.New("lost") }})
	if _, err := o.Commit(t.Context(), []offsets.Commit{late}); err == nil {
		t.Fatal("no error")
	}
	st.SetHooks(memory.Hooks{})
	commitOne(t, o, offsets.Commit{Partition: partition(0), Offset: 20, Token: token})
	if out := commitOne(t, o, late); out.Stored || out.Fenced || out.Now.Offset != 20 {
		t.Errorf("the late commit: %+v", out)
	}
	if got := value(t, o, 0); got != 20 {
		t.Errorf("offset is %d", got)
	}
}

// More partitions than fit into a transaction; results are true one by one.
func TestManyPartitions(t *testing.T) {
	st := memory.New()
	o := offsets.NewRegistry(st, group)
	const n = 200
	var commits []offsets.Commit
	var partitions []registry.Partition
	for i := range n {
		token := own(t, st, i)
		if i == 130 {
			token = 1 // another's
		}
		commits = append(commits, offsets.Commit{Partition: partition(i), Offset: int64(i), Token: token})
		partitions = append(partitions, partition(i))
	}
	out, err := o.Commit(t.Context(), commits)
	if err != nil || len(out) != n {
		t.Fatal(len(out), err)
	}
	got, err := o.Fetch(t.Context(), partitions)
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		if i == 130 {
			if !out[i].Fenced || got[i].Offset != offsets.None {
				t.Errorf("130: %+v %+v", out[i], got[i])
			}
		} else if !out[i].Stored || got[i].Offset != int64(i) {
			t.Errorf("%d: %+v %+v", i, out[i], got[i])
		}
	}
}

// What cannot be read is an error of that partition, not "nothing committed".
func TestUnreadableOffset(t *testing.T) {
	st := memory.New()
	o := offsets.NewRegistry(st, group)
	for i, text := range []string{"abc", "-5", "", "9223372036854775808", "1.5"} {
		write(t, st, registry.Put(group.Offset(partition(i)), []byte(text), 0))
		got, err := o.Fetch(t.Context(), []registry.Partition{partition(i), partition(99)})
		if err != nil {
			t.Fatal(err)
		}
		if !errors.Is(got[0].Err, registry.ErrRecord) || got[1].Err != nil || got[1].Offset != offsets.None {
			t.Errorf("%q: %+v", text, got)
		}
	}
	write(t, st, registry.Put(group.Offset(partition(9)), []byte("42\n"), 0))
	if got := value(t, o, 9); got != 42 {
		t.Errorf("a trailing newline, as a person leaves it: %d", got)
	}
	list, bad, err := o.List(t.Context())
	if err != nil || len(bad) != 5 || len(list) != 1 || list[partition(9)].Offset != 42 {
		t.Errorf("%v %v %v", list, bad, err)
	}
}

// A commit that comes upon a value that is no offset says None, and the revision
// from which the owner can write over it.
func TestConflictWithWhatIsNoOffset(t *testing.T) {
	st := memory.New()
	o := offsets.NewRegistry(st, group)
	token := own(t, st, 0)
	write(t, st, registry.Put(group.Offset(partition(0)), []byte("garbage"), 0))
	c := offsets.Commit{Partition: partition(0), Offset: 7, Token: token}
	out := commitOne(t, o, c)
	if want := (offsets.Outcome{Now: offsets.Position{Offset: offsets.None, Revision: st.Revision()}}); out != want {
		t.Fatalf("%+v, want %+v", out, want)
	}
	c.Previous = out.Now.Revision
	if out = commitOne(t, o, c); !out.Stored || value(t, o, 0) != 7 {
		t.Errorf("%+v", out)
	}
	// Nothing there is None too, at revision 0.
	write(t, st, registry.Delete(group.Offset(partition(0))))
	out = commitOne(t, o, c)
	if want := (offsets.Outcome{Now: offsets.Position{Offset: offsets.None}}); out != want {
		t.Errorf("%+v, want %+v", out, want)
	}
}

func TestSinceIsTheFirstCommit(t *testing.T) {
	st := memory.New()
	o := offsets.NewRegistry(st, group)
	since := func() int64 {
		n, err := o.Since(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	if since() != 0 {
		t.Error("nothing is committed")
	}
	write(t, st, registry.Put(group.Offset(partition(5)), []byte("1"), 0))
	first := st.Revision()
	for i := range 5 {
		write(t, st, registry.Put(group.Offset(partition(i)), []byte(fmt.Sprint(i)), 0))
	}
	if got := since(); got != first {
		t.Errorf("since %d, want %d", got, first)
	}
}
