package registry

import (
	"context"
	"errors"
	"fmt"
)

// WriteTarget writes a group's target record, key, in place of the one that was last
// written at revision replace, 0 if there is none. The guard must hold, so that no
// member's proposal rests on a group that is another by now; else, and if the record
// is another by now, the error is ErrStale. It returns the revision of the record.
//
// A call whose reply was lost may have taken effect; another one is then stale.
func WriteTarget(ctx context.Context, st Store, g Guard, key string, value []byte, replace int64) (revision int64, err error) {
	if len(value) == 0 {
		return 0, errors.New("write target: the record would be empty")
	}
	res, err := st.Txn(ctx, Txn{
		If:   append(g.conds(), ModifiedAt(key, replace)),
		Then: []Op{Put(key, value, 0)},
	})
	if err != nil {
		return 0, fmt.Errorf("write target: %w", err)
	}
	if !res.Succeeded {
		return 0, fmt.Errorf("write target: %w", ErrStale)
	}
	return res.Revision, nil
}
