package groups

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/muster-io/muster/registry"
)

// ErrLiveMembers refuses to delete a group in which somebody is registered.
var ErrLiveMembers = errors.New("group has registered members")

// Delete removes a group with all its keys, its settings included, and returns
// how many those were. A group with members is refused and left as it is; one
// that does not exist is ErrNotFound.
//
// It is one transaction of two deletions by prefix, whatever the number of keys:
// a member that registers meanwhile finds the group either whole or gone, never
// a part of its offsets, and a call that was cut off is simply made again.
func Delete(ctx context.Context, st registry.Store, root registry.Root, group string) (int64, error) {
	if err := registry.ValidateGroupName(group); err != nil {
		return 0, fmt.Errorf("delete group: %w", err)
	}
	paths := root.Group(group)
	res, err := st.Txn(ctx, registry.Txn{
		If: []registry.Cond{nothingUnder(paths.IDs())},
		Then: []registry.Op{
			{Kind: registry.OpDelete, Key: paths.Prefix(), Prefix: true},
			registry.Delete(root.GroupConfig(group)),
		},
		Else: []registry.Op{{Kind: registry.OpGet, Key: paths.IDs(), Prefix: true}},
	})
	if err != nil {
		return 0, fmt.Errorf("delete group %s: %w", group, err)
	}
	if !res.Succeeded {
		return 0, fmt.Errorf("delete group %s: %w: %s", group, ErrLiveMembers, whoIsThere(paths, res.Items[0].KVs))
	}
	deleted := res.Items[0].Deleted + res.Items[1].Deleted
	if deleted == 0 {
		return 0, fmt.Errorf("%w: %s", ErrNotFound, group)
	}
	return deleted, nil
}

// nothingUnder holds if no key begins with prefix: every key that is there was
// created at some revision.
func nothingUnder(prefix string) registry.Cond {
	return registry.Cond{Key: prefix, Prefix: true, Field: registry.FieldCreateRevision, Relation: registry.Equal, Number: 0}
}

// shownMembers bounds how many members an error names.
const shownMembers = 3

func whoIsThere(paths registry.GroupPaths, kvs []registry.KV) string {
	var names []string
	for _, kv := range kvs {
		if len(names) == shownMembers {
			names = append(names, fmt.Sprintf("and %d more", len(kvs)-shownMembers))
			break
		}
		name, err := paths.ParseID(kv.Key)
		if err != nil {
			name = kv.Key
		}
		if kv.Lease == 0 {
			name += " (without a lease; see: muster registry doctor)"
		}
		names = append(names, name)
	}
	return strings.Join(names, ", ")
}
