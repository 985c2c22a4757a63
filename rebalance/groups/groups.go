// Package groups looks at consumer groups from outside: who is in them, who owns
// what, how far they are; and deletes those that nobody is in.
package groups

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/muster-io/muster/registry"
)

// Summary is one group in a list.
type Summary struct {
	Group   string `json:"group"`
	Members int    `json:"members"`
	Owned   int    `json:"owned"`   // partitions with an owner key
	Offsets int    `json:"offsets"` // partitions with a committed offset
}

// List returns all groups that have any key, by name, and what could not be read.
func List(ctx context.Context, st registry.Store, root registry.Root) ([]Summary, []error, error) {
	kvs, _, err := registry.List(ctx, st, root.Groups(), 0)
	if err != nil {
		return nil, nil, fmt.Errorf("list groups: %w", err)
	}
	found := map[string]*Summary{}
	var bad []error
	for _, kv := range kvs {
		at := root.Locate(kv.Key)
		if at.Problem != nil {
			bad = append(bad, at.Problem)
		}
		if at.Group == "" {
			continue
		}
		s := found[at.Group]
		if s == nil {
			s = &Summary{Group: at.Group}
			found[at.Group] = s
		}
		switch at.Kind {
		case registry.KindMember:
			s.Members++
		case registry.KindOwner:
			s.Owned++
		case registry.KindOffset:
			s.Offsets++
		}
	}
	list := make([]Summary, 0, len(found))
	for _, name := range slices.Sorted(maps.Keys(found)) {
		list = append(list, *found[name])
	}
	return list, bad, nil
}

// ErrNotFound says that no key of the group exists.
var ErrNotFound = errors.New("group not found")
