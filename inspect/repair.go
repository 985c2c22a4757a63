package inspect

import (
	"context"
	"errors"
	"fmt"

	"github.com/muster-io/muster/registry"
)

// Repair is a change that does no harm: it is conditional on all that it was
// derived from, so that it does nothing if that has changed.
type Repair struct {
	Action string `json:"action"`
	// Loses names what cannot be had back; "" if nothing. Such a repair is to be
	// asked for by its code.
	Loses string `json:"loses"`

	txn registry.Txn
}

// ErrChanged refuses a repair of what is not any more as it was examined.
var ErrChanged = errors.New("it has changed since it was examined; examine it again")

// Apply carries out the repair of a finding.
func Apply(ctx context.Context, st registry.Store, f Finding) error {
	if f.Repair == nil {
		return fmt.Errorf("repair %s: there is none that is safe", f.Key)
	}
	res, err := st.Txn(ctx, f.Repair.txn)
	if err != nil {
		return fmt.Errorf("repair %s: %w", f.Key, err)
	}
	if !res.Succeeded {
		return fmt.Errorf("repair %s: %w", f.Key, ErrChanged)
	}
	return nil
}

// Repairable returns the indexes of findings that can be repaired: those of the
// given codes, or if there are none, all whose repair loses nothing.
func Repairable(list []Finding, only []Code) []int {
	var found []int
	for i, f := range list {
		if f.Repair == nil || f.Repaired {
			continue
		}
		asked := false
		for _, c := range only {
			asked = asked || c == f.Code
		}
		if asked || len(only) == 0 && f.Repair.Loses == "" {
			found = append(found, i)
		}
	}
	return found
}

// unchanged holds if the key is as it was read.
func unchanged(kv registry.KV) registry.Cond { return registry.ModifiedAt(kv.Key, kv.ModRevision) }

func deleteKey(kv registry.KV, and ...registry.Cond) *Repair {
	return &Repair{Action: "delete it", txn: registry.Txn{
		If: append([]registry.Cond{unchanged(kv)}, and...), Then: []registry.Op{registry.Delete(kv.Key)}}}
}

func putRecord(action, key string, record any, conds ...registry.Cond) *Repair {
	value, err := registry.Encode(record)
	if err != nil {
		return nil
	}
	return &Repair{Action: action, txn: registry.Txn{If: conds, Then: []registry.Op{registry.Put(key, value, 0)}}}
}
