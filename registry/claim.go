package registry

import (
	"context"
	"errors"
	"fmt"
)

// ErrStale refuses claims whose guard does not hold any more: the claimer's
// registration is not the one it believes in, a member registered after the
// snapshot that the claim was computed from, or a topic was deleted since.
var ErrStale = errors.New("claim was computed from a stale snapshot")

// Guard is what a claim is conditional on, besides the key being free.
type Guard struct {
	Registration Registration // of the claimer; must stand unchanged
	IDs          string       // prefix of the group's registrations
	Snapshot     int64        // no registration was written after this revision
}

// OwnerClaim asks for one owner key.
type OwnerClaim struct {
	Key   string
	Value []byte // consumer thread id
	// Topic is the key of the topic's record, which must be the one created at
	// Incarnation: a claim that comes late must not make an owner of a deleted topic,
	// nor of another one that has its name by then. Empty: no topic is looked at.
	Topic       string
	Incarnation int64
}

// ClaimResult is the outcome for one owner key. Token is the create-revision of
// the key: the fencing token of whoever holds it now. Holder is nil if the key is
// ours, by this claim or an earlier one under the same lease; Value tells which
// thread it names, for an earlier claim may have named another. Revision is that of
// the transaction that decided it: what happened to the key later is news.
type ClaimResult struct {
	Token    int64
	Value    []byte
	Holder   *HeldError
	Revision int64
}

// Claim writes owner keys: this is the one place where ownership comes into
// being. Each key is a nested create-if-absent, so that a slow holder blocks only
// its own partition; the guard is checked in the same transaction. A key is never
// put again once it is there, for its create-revision is the fencing token and a
// second put could drop the lease.
//
// More than MaxNested claims are split; each part is atomic, the whole is not:
// results holds what was decided before the error. revision is that of the last
// transaction.
func Claim(ctx context.Context, st Store, lease LeaseID, g Guard, claims []OwnerClaim) (results []ClaimResult, revision int64, err error) {
	if lease == 0 {
		return nil, 0, errors.New("claim: an owner key needs a lease")
	}
	for _, c := range claims {
		if len(c.Value) == 0 {
			return nil, 0, fmt.Errorf("claim %s: the owner key would name nobody", c.Key)
		}
	}
	for len(claims) > 0 {
		part := claims[:min(len(claims), MaxNested)]
		claims = claims[len(part):]
		t := Txn{If: []Cond{
			ModifiedAt(g.Registration.Key, g.Registration.Revision),
			UnmodifiedSince(g.IDs, g.Snapshot),
		}}
		looked := map[string]bool{}
		for _, c := range part {
			if c.Topic != "" && !looked[c.Topic] {
				looked[c.Topic] = true
				t.If = append(t.If, CreatedAt(c.Topic, c.Incarnation))
			}
			t.Then = append(t.Then, Nested(createOwned(c.Key, c.Value, lease)))
		}
		res, err := st.Txn(ctx, t)
		if err != nil {
			return results, revision, fmt.Errorf("claim %d partitions: %w", len(part), err)
		}
		revision = res.Revision
		if !res.Succeeded {
			return results, revision, fmt.Errorf("claim %d partitions: %w", len(part), ErrStale)
		}
		for i, c := range part {
			kv, mine := createdOrFound(c.Key, lease, res.Items[i].Txn)
			r := ClaimResult{Token: kv.CreateRevision, Value: kv.Value, Revision: res.Revision}
			if res.Items[i].Txn.Succeeded {
				r.Value = c.Value
			}
			if !mine {
				r.Holder = &HeldError{KV: kv}
			}
			results = append(results, r)
		}
	}
	return results, revision, nil
}

// OwnerRelease names an owner key to give up: the one created at Token, or if
// that is 0 whatever stands there under the releaser's lease (after a claim whose
// reply was lost).
type OwnerRelease struct {
	Key   string
	Token int64
}

// Release deletes owner keys that are still the releaser's, and leaves others
// alone: a key that somebody else created meanwhile has another create-revision.
// revision is that of the last transaction.
func Release(ctx context.Context, st Store, lease LeaseID, releases []OwnerRelease) (revision int64, err error) {
	for _, r := range releases {
		if r.Token == 0 && lease == 0 {
			// "Under no lease" would be true of a key that somebody made permanent.
			return 0, fmt.Errorf("release %s: neither token nor lease", r.Key)
		}
	}
	for len(releases) > 0 {
		part := releases[:min(len(releases), MaxNested)]
		releases = releases[len(part):]
		if part, revision, err = findTokens(ctx, st, lease, part); err != nil {
			return revision, err
		}
		if len(part) == 0 {
			continue
		}
		var t Txn
		for _, r := range part {
			t.Then = append(t.Then, Nested(Txn{If: []Cond{CreatedAt(r.Key, r.Token)}, Then: []Op{Delete(r.Key)}}))
		}
		res, err := st.Txn(ctx, t)
		if err != nil {
			return revision, fmt.Errorf("release %d partitions: %w", len(part), err)
		}
		revision = res.Revision
	}
	return revision, nil
}

// findTokens fills in the tokens of keys that are to be released whatever their
// token is, and leaves out those that are not under the lease. To delete by lease
// alone would not do: if such a deletion came late, after its reply was given up,
// it would hit a key that the same process has claimed since.
func findTokens(ctx context.Context, st Store, lease LeaseID, releases []OwnerRelease) ([]OwnerRelease, int64, error) {
	var t Txn
	for _, r := range releases {
		if r.Token == 0 {
			t.Then = append(t.Then, Get(r.Key))
		}
	}
	if len(t.Then) == 0 {
		return releases, 0, nil
	}
	res, err := st.Txn(ctx, t)
	if err != nil {
		return nil, 0, fmt.Errorf("look for %d partitions to release: %w", len(t.Then), err)
	}
	found := make([]OwnerRelease, 0, len(releases))
	items := res.Items
	for _, r := range releases {
		if r.Token == 0 {
			kvs := items[0].KVs
			items = items[1:]
			if len(kvs) == 0 || kvs[0].Lease != lease {
				continue
			}
			r.Token = kvs[0].CreateRevision
		}
		found = append(found, r)
	}
	return found, res.Revision, nil
}
