package registry

import (
	"context"
	"fmt"
	"time"
)

// A Registration is an ephemeral key of this process: it lives as long as the
// session's lease. Revision, at which it was created, tells this registration
// from any other under the same key.
type Registration struct {
	Key      string
	Revision int64
}

// HeldError refuses a registration or a claim: a live holder has the key.
type HeldError struct {
	KV   KV
	Left time.Duration // until the holder's lease runs out if not renewed; 0 if unknown
}

func (e *HeldError) Error() string {
	held := fmt.Sprintf("%s is held by %q", e.KV.Key, clip(e.KV.Value))
	switch {
	case e.KV.Lease == 0:
		return held + " (without a lease: it stays until somebody deletes it)"
	case e.Left > 0:
		return fmt.Sprintf("%s (lease %s, %.1f s left)", held, LeaseText(e.KV.Lease), e.Left.Seconds())
	}
	return fmt.Sprintf("%s (lease %s)", held, LeaseText(e.KV.Lease))
}

// Register creates an ephemeral key under the session's lease. Where the key is
// there already under the same lease, the earlier call took effect though its
// reply was lost, and this one returns that registration. Under any other lease,
// or none, the error is a *HeldError that shows the holder: also when the value
// is our own, since it is then a former session's, and about to vanish.
func Register(ctx context.Context, st Store, s *Session, key string, value []byte) (Registration, error) {
	if !s.Alive() {
		return Registration{}, fmt.Errorf("register %s: %w", key, s.Err())
	}
	res, err := st.Txn(ctx, createOwned(key, value, s.Lease()))
	if err != nil {
		return Registration{}, fmt.Errorf("register %s: %w", key, err)
	}
	kv, mine := createdOrFound(key, s.Lease(), &res)
	if mine {
		return Registration{Key: key, Revision: kv.ModRevision}, nil
	}
	held := &HeldError{KV: kv}
	if kv.Lease != 0 {
		if left, err := st.Remaining(ctx, kv.Lease); err == nil {
			held.Left = max(left, 0)
		}
	}
	return Registration{}, fmt.Errorf("register: %w", held)
}

// createOwned creates a key if nobody has it, and else reads it.
func createOwned(key string, value []byte, lease LeaseID) Txn {
	return Txn{
		If:   []Cond{Absent(key)},
		Then: []Op{Put(key, value, lease)},
		Else: []Op{Get(key)},
	}
}

// createdOrFound reads the result of createOwned: the key as it stands now, and
// whether that is ours. A key is ours by its lease alone; a value can be copied.
func createdOrFound(key string, lease LeaseID, res *TxnResult) (kv KV, mine bool) {
	if res.Succeeded {
		return KV{Key: key, CreateRevision: res.Revision, ModRevision: res.Revision, Lease: lease}, true
	}
	if len(res.Items) == 1 && len(res.Items[0].KVs) == 1 {
		kv = res.Items[0].KVs[0]
		return kv, kv.Lease == lease
	}
	return KV{Key: key}, false
}
