package groups_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/muster-io/muster/rebalance/groups"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

// count is how many keys stand under a prefix.
func count(t *testing.T, st registry.Store, prefix string) int {
	t.Helper()
	kvs, _, err := registry.List(t.Context(), st, prefix, 0)
	if err != nil {
		t.Fatal(err)
	}
	return len(kvs)
}

func offsetsOf(t *testing.T, st registry.Store, group string, n int) {
	t.Helper()
	for p := range n {
		put(t, st, root.Group(group).Offset(registry.Partition{Topic: "t", Home: 1, Number: int32(p)}), "0")
	}
}

// Field case 53, the half of it that the registry holds.
func TestCase53(t *testing.T) {
	st := memory.New()
	offsetsOf(t, st, "oldlive", 3)
	put(t, st, root.Group("oldlive").ID("c1"), "{}")
	offsetsOf(t, st, "olddead", 3)
	offsetsOf(t, st, "olddead2", 1) // begins like it
	put(t, st, root.GroupConfig("olddead"), "{}")
	put(t, st, root.Group("olddead").Target(), "x")
	put(t, st, root.Group("olddead").HistoryEntry(1, "m", 1), "x")

	before := count(t, st, root.Group("oldlive").Prefix())
	if _, err := groups.Delete(t.Context(), st, root, "oldlive"); !errors.Is(err, groups.ErrLiveMembers) {
		t.Errorf("a group with a member: %v", err)
	}
	if after := count(t, st, root.Group("oldlive").Prefix()); after != before {
		t.Errorf("the refused group has %d keys, had %d", after, before)
	}
	if n, err := groups.Delete(t.Context(), st, root, "olddead"); err != nil || n != 6 {
		t.Errorf("a dead group: %d keys, %v", n, err)
	}
	if n := count(t, st, root.GroupConfig("olddead")); n != 0 {
		t.Error("settings are left")
	}
	if n := count(t, st, root.Group("olddead").Prefix()); n != 0 {
		t.Errorf("%d keys are left", n)
	}
	list, _, err := groups.List(t.Context(), st, root)
	if got := fmt.Sprint(list); err != nil || got != "[{olddead2 0 0 1} {oldlive 1 0 3}]" {
		t.Errorf("list: %s, %v", got, err)
	}
	for _, name := range []string{"nosuch", "olddead"} {
		if _, err := groups.Delete(t.Context(), st, root, name); !errors.Is(err, groups.ErrNotFound) {
			t.Errorf("%s: %v", name, err)
		}
		if _, _, err := groups.Describe(t.Context(), st, root, name, nil); !errors.Is(err, groups.ErrNotFound) {
			t.Errorf("describe %s: %v", name, err)
		}
	}
}

// Field case 62 (c): 900 keys. The tool fails before or after each of its calls
// in turn; the same command again comes to the same end.
func TestCase62c(t *testing.T) {
	broken := errors.New("cut off")
	for fail := 0; ; fail++ {
		for _, after := range []bool{false, true} {
			st := memory.New()
			offsetsOf(t, st, "big", 900)
			calls := 0
			cut := func(context.Context, string) error {
				if calls++; calls == fail+1 {
					return broken
				}
				return nil
			}
			if after {
				st.SetHooks(memory.Hooks{After: cut})
			} else {
				st.SetHooks(memory.Hooks{Before: cut})
			}
			n, err := groups.Delete(t.Context(), st, root, "big")
			if calls <= fail {
				if err != nil || n != 900 {
					t.Fatalf("nothing failed: %d keys, %v", n, err)
				}
				if fail == 0 {
					t.Fatal("nothing was tried")
				}
				return
			}
			if !errors.Is(err, broken) {
				t.Fatalf("call %d failed: %v", fail, err)
			}
			st.SetHooks(memory.Hooks{})
			if left := count(t, st, root.Groups()); left != 0 && left != 900 {
				t.Errorf("call %d failed: %d keys are left, a part of the group", fail, left)
			}
			if _, err := groups.Delete(t.Context(), st, root, "big"); err != nil && !errors.Is(err, groups.ErrNotFound) {
				t.Error(err)
			}
			if left := count(t, st, root.Groups()); left != 0 {
				t.Errorf("%d keys are left", left)
			}
		}
	}
}

// A member that registers just before the deletion takes effect keeps its group.
func TestDeleteDoesNotHarmWhoJoins(t *testing.T) {
	st := memory.New()
	offsetsOf(t, st, "g", 200)
	st.SetHooks(memory.Hooks{Before: func(ctx context.Context, op string) error {
		st.SetHooks(memory.Hooks{})
		lease, err := st.Grant(ctx, time.Hour)
		if err == nil {
			_, err = st.Txn(ctx, registry.Txn{Then: []registry.Op{registry.Put(root.Group("g").ID("late"), []byte("{}"), lease.ID)}})
		}
		return err
	}})
	if _, err := groups.Delete(t.Context(), st, root, "g"); !errors.Is(err, groups.ErrLiveMembers) {
		t.Error(err)
	}
	if n := count(t, st, root.Group("g").Prefix()); n != 201 {
		t.Errorf("%d keys are left of 201", n)
	}
}
