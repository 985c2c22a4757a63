package registry

import (
	"context"
	"errors"
	"fmt"
)

// ErrStale refuses what was computed from a state of the group that is not the
// present one: the claimer's registration is not the one it believes in, a member
// registered after the snapshot, the target record or a topic is another.
var ErrStale = errors.New("claim was computed from a stale snapshot")

// Guard is what a claim is conditional on, besides the key being free.
type Guard struct {
	Registration Registration // of the claimer; must stand unchanged
	// IDs is the prefix of the group's registrations, none of which may have been written
	// after the revision Snapshot: etcd reads them all for it. Empty: they are not looked at.
	IDs      string
	Snapshot int64
	// Target is the key of the group's target record, which must be the one last
	// written at TargetRevision, 0 if there is none. Empty: it is not looked at.
	Target         string
	TargetRevision int64
}

func (g Guard) conds() []Cond {
	conds := []Cond{ModifiedAt(g.Registration.Key, g.Registration.Revision)}
	if g.IDs != "" {
		conds = append(conds, UnmodifiedSince(g.IDs, g.Snapshot))
	}
	if g.Target != "" {
		conds = append(conds, ModifiedAt(g.Target, g.TargetRevision))
	}
	return conds
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

// A Note makes the entry of a group's history for one transaction, of the owner keys
// that it creates or deletes. The entry is written in that very transaction, so that
// history tells of nothing that did not happen, and leaves out nothing. A
// transaction that does not come about has its note made in vain. No key: no entry.
type Note func(keys []string) (key string, value []byte)

// write returns the operation that writes the entry, if there is to be one.
func (n Note) write(keys []string) []Op {
	if n == nil {
		return nil
	}
	key, value := n(keys)
	if key == "" {
		return nil
	}
	return []Op{Put(key, value, 0)}
}

// Claim writes owner keys: this is the one place where ownership comes into
// being. A key is created if nobody has it, and the guard is checked in the same
// transaction. A key is never put again once it is there, for its create-revision is
// the fencing token and a second put could drop the lease.
//
// Claims that fit into one transaction are made together, with their entry in the
// group's history. Where some of the keys are held it is made once more without
// those, so that a slow holder blocks only its own partition.
//
// More are split; each part is atomic, the whole is not: results holds what was
// decided before the error, in the order of the claims. revision is that of the last
// transaction.
func Claim(ctx context.Context, st Store, lease LeaseID, g Guard, claims []OwnerClaim, note Note) (results []ClaimResult, revision int64, err error) {
	if lease == 0 {
		return nil, 0, errors.New("claim: an owner key needs a lease")
	}
	for _, c := range claims {
		if len(c.Value) == 0 {
			return nil, 0, fmt.Errorf("claim %s: the owner key would name nobody", c.Key)
		}
	}
	for len(claims) > 0 {
		part := claims[:claimable(g, claims)]
		claims = claims[len(part):]
		decided, at, err := claimTogether(ctx, st, lease, g, part, note)
		if at != 0 {
			revision = at
		}
		if err != nil {
			return results, revision, fmt.Errorf("claim %d partitions: %w", len(part), err)
		}
		results = append(results, decided...)
	}
	return results, revision, nil
}

// topicLife is one life of a topic.
type topicLife struct {
	topic   string
	created int64
}

// claimable is how many of the claims fit into one transaction: its conditions are
// the guard, each topic and each key; guard and topics are looked at again below it.
func claimable(g Guard, claims []OwnerClaim) int {
	topics := map[topicLife]bool{}
	for n, c := range claims {
		if c.Topic != "" {
			topics[topicLife{c.Topic, c.Incarnation}] = true
		}
		if 2*(len(g.conds())+len(topics))+n+1 > MaxTxnOps {
			return n
		}
	}
	return len(claims)
}

// claimTogether claims keys in one transaction, and if some are held, those that are
// not. Each round decides some of them, or all.
func claimTogether(ctx context.Context, st Store, lease LeaseID, g Guard, claims []OwnerClaim, note Note) ([]ClaimResult, int64, error) {
	results := make([]ClaimResult, len(claims))
	open := make([]int, len(claims)) // not decided yet
	for i := range open {
		open[i] = i
	}
	var revision int64
	for len(open) > 0 {
		res, err := st.Txn(ctx, claimTxn(lease, g, claims, open, note))
		if err != nil {
			return nil, revision, err
		}
		revision = res.Revision
		if res.Succeeded {
			for _, i := range open {
				results[i] = ClaimResult{Token: revision, Value: claims[i].Value, Revision: revision}
			}
			return results, revision, nil
		}
		if !res.Items[0].Txn.Succeeded {
			return nil, revision, ErrStale
		}
		var free []int
		for n, i := range open {
			found := res.Items[1+n].KVs
			if len(found) == 0 {
				free = append(free, i)
				continue
			}
			kv := found[0]
			results[i] = ClaimResult{Token: kv.CreateRevision, Value: kv.Value, Revision: revision}
			if kv.Lease != lease { // a key is ours by its lease alone; a value can be copied
				results[i].Holder = &HeldError{KV: kv}
			}
		}
		if len(free) == len(open) {
			return nil, revision, errors.New("the store refuses a claim whose conditions it says hold")
		}
		open = free
	}
	return results, revision, nil
}

// claimTxn creates the keys of the open claims if guard, topics and keys allow it;
// else it tells whether guard and topics did, and how each key stands.
func claimTxn(lease LeaseID, g Guard, claims []OwnerClaim, open []int, note Note) Txn {
	guard := g.conds()
	looked := map[topicLife]bool{}
	var free []Cond
	var puts, gets []Op
	var keys []string
	for _, i := range open {
		c := claims[i]
		if in := (topicLife{c.Topic, c.Incarnation}); c.Topic != "" && !looked[in] {
			looked[in] = true
			guard = append(guard, CreatedAt(c.Topic, c.Incarnation))
		}
		free = append(free, Absent(c.Key))
		puts = append(puts, Put(c.Key, c.Value, lease))
		gets = append(gets, Get(c.Key))
		keys = append(keys, c.Key)
	}
	return Txn{
		If:   append(guard[:len(guard):len(guard)], free...),
		Then: append(puts, note.write(keys)...),
		Else: append([]Op{Nested(Txn{If: guard})}, gets...),
	}
}

// OwnerRelease names an owner key to give up: the one created at Token, or if
// that is 0 whatever stands there under the releaser's lease (after a claim whose
// reply was lost).
type OwnerRelease struct {
	Key   string
	Token int64
}

// maxReleases is how many keys are released together: with the entry of the group's
// history they fill a transaction.
const maxReleases = MaxTxnOps - 1

// Release deletes owner keys that are still the releaser's, and leaves others
// alone: a key that somebody else created meanwhile has another create-revision.
// Those that fit into one transaction go together, with their entry in the group's
// history. revision is that of the last transaction.
func Release(ctx context.Context, st Store, lease LeaseID, releases []OwnerRelease, note Note) (revision int64, err error) {
	for _, r := range releases {
		if r.Token == 0 && lease == 0 {
			// "Under no lease" would be true of a key that somebody made permanent.
			return 0, fmt.Errorf("release %s: neither token nor lease", r.Key)
		}
	}
	for len(releases) > 0 {
		part := releases[:min(len(releases), maxReleases)]
		releases = releases[len(part):]
		if part, revision, err = findTokens(ctx, st, lease, part); err != nil {
			return revision, err
		}
		for len(part) > 0 {
			res, err := st.Txn(ctx, releaseTxn(part, note))
			if err != nil {
				return revision, fmt.Errorf("release %d partitions: %w", len(part), err)
			}
			revision = res.Revision
			if res.Succeeded {
				break
			}
			left := stillThere(part, res.Items)
			if len(left) == len(part) {
				return revision, errors.New("the store refuses a release whose conditions it says hold")
			}
			part = left
		}
	}
	return revision, nil
}

// releaseTxn deletes the keys if all are the ones that are meant; else it reads them.
func releaseTxn(releases []OwnerRelease, note Note) Txn {
	var t Txn
	keys := make([]string, 0, len(releases))
	for _, r := range releases {
		t.If = append(t.If, CreatedAt(r.Key, r.Token))
		t.Then = append(t.Then, Delete(r.Key))
		t.Else = append(t.Else, Get(r.Key))
		keys = append(keys, r.Key)
	}
	t.Then = append(t.Then, note.write(keys)...)
	return t
}

// stillThere leaves those whose key, as read, is the one that is meant.
func stillThere(releases []OwnerRelease, items []TxnItem) []OwnerRelease {
	var left []OwnerRelease
	for i, r := range releases {
		if kvs := items[i].KVs; len(kvs) > 0 && kvs[0].CreateRevision == r.Token {
			left = append(left, r)
		}
	}
	return left
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
