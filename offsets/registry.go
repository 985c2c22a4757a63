// Package offsets keeps the positions of consumer groups. So far they live in
// the registry, one key per partition.
package offsets

import (
	"context"
	"fmt"

	"github.com/muster-io/muster/registry"
)

// None is the offset of a partition for which nothing is committed.
const None int64 = -1

// Position is a committed offset: of the next record to read. Revision is that
// of the key's last change, 0 if there is no key; it makes the next commit
// conditional on nothing having come between.
type Position struct {
	Offset   int64
	Revision int64
}

// Registry is the offsets of one group in the registry.
type Registry struct {
	store registry.Store
	group registry.GroupPaths
}

// NewRegistry returns the offsets of a group.
func NewRegistry(st registry.Store, group registry.GroupPaths) *Registry {
	return &Registry{store: st, group: group}
}

// Fetched is the position of one partition, or why it cannot be read: a value
// that is no offset must not be taken for "nothing committed".
type Fetched struct {
	Position
	Err error
}

// Fetch reads the positions of partitions, in order; those without one are None.
// An owner must fetch only after it has claimed, so that nothing that its
// predecessor committed is missed.
func (r *Registry) Fetch(ctx context.Context, partitions []registry.Partition) ([]Fetched, error) {
	list := make([]Fetched, 0, len(partitions))
	for len(partitions) > 0 {
		part := partitions[:min(len(partitions), registry.MaxNested)]
		partitions = partitions[len(part):]
		var t registry.Txn
		for _, p := range part {
			t.Then = append(t.Then, registry.Get(r.group.Offset(p)))
		}
		res, err := r.store.Txn(ctx, t)
		if err != nil {
			return nil, fmt.Errorf("fetch offsets of %d partitions: %w", len(part), err)
		}
		for _, item := range res.Items {
			f := Fetched{Position: Position{Offset: None}}
			if len(item.KVs) > 0 {
				f.Position, f.Err = position(item.KVs[0])
			}
			list = append(list, f)
		}
	}
	return list, nil
}

func position(kv registry.KV) (Position, error) {
	offset, err := registry.ParseOffset(kv)
	return Position{Offset: offset, Revision: kv.ModRevision}, err
}

// Commit is a commit by the owner of a partition.
type Commit struct {
	Partition registry.Partition
	Offset    int64 // of the next record to read
	Token     int64 // create-revision of the owner key
	Previous  int64 // Position.Revision as the owner knows it
}

// Outcome is what became of a Commit. If it was not stored, either the
// committer is Fenced, since the owner key is not that of its token; or somebody
// else wrote the offset meanwhile, and Now is what stands there.
type Outcome struct {
	Stored bool
	Fenced bool
	Now    Position
}

// Commit stores offsets, each in a nested transaction that compares the owner
// key, so that a commit of a former owner changes nothing, and the offset's
// revision, so that a commit whose reply was lost cannot land after a later one.
// outcomes holds those that were decided before an error.
func (r *Registry) Commit(ctx context.Context, commits []Commit) (outcomes []Outcome, err error) {
	for len(commits) > 0 {
		// Two reads in the failing branch: half as many fit.
		part := commits[:min(len(commits), registry.MaxNested/2)]
		commits = commits[len(part):]
		var t registry.Txn
		for _, c := range part {
			owner, offset := r.group.Owner(c.Partition), r.group.Offset(c.Partition)
			t.Then = append(t.Then, registry.Nested(registry.Txn{
				If:   []registry.Cond{registry.CreatedAt(owner, c.Token), registry.ModifiedAt(offset, c.Previous)},
				Then: []registry.Op{registry.Put(offset, registry.FormatOffset(c.Offset), 0)},
				Else: []registry.Op{registry.Get(owner), registry.Get(offset)},
			}))
		}
		res, err := r.store.Txn(ctx, t)
		if err != nil {
			return outcomes, fmt.Errorf("commit offsets of %d partitions: %w", len(part), err)
		}
		for i, item := range res.Items {
			outcomes = append(outcomes, outcome(part[i], item.Txn))
		}
	}
	return outcomes, nil
}

func outcome(c Commit, res *registry.TxnResult) Outcome {
	if res.Succeeded {
		return Outcome{Stored: true, Now: Position{Offset: c.Offset, Revision: res.Revision}}
	}
	out := Outcome{Now: Position{Offset: None}}
	if owner := res.Items[0].KVs; len(owner) == 0 || owner[0].CreateRevision != c.Token {
		out.Fenced = true
	}
	if kvs := res.Items[1].KVs; len(kvs) > 0 {
		pos, err := position(kvs[0])
		if err != nil {
			pos.Offset = None // whatever stands there is no offset; the commit may replace it
		}
		out.Now = pos
	}
	return out
}

// List reads all positions of the group. Keys that cannot be parsed are left out
// and returned as errors.
func (r *Registry) List(ctx context.Context) (map[registry.Partition]Position, []error, error) {
	kvs, _, err := registry.List(ctx, r.store, r.group.Offsets(), 0)
	if err != nil {
		return nil, nil, fmt.Errorf("list offsets: %w", err)
	}
	list := make(map[registry.Partition]Position, len(kvs))
	var bad []error
	for _, kv := range kvs {
		p, err := r.group.ParsePartition(kv.Key)
		if err != nil {
			bad = append(bad, err)
			continue
		}
		pos, err := position(kv)
		if err != nil {
			bad = append(bad, err)
			continue
		}
		list[p] = pos
	}
	return list, bad, nil
}

// Since returns the revision at which the group first committed anything, 0 if
// it never did.
func (r *Registry) Since(ctx context.Context) (int64, error) {
	res, err := r.store.Range(ctx, registry.RangeRequest{Key: r.group.Offsets(), Prefix: true, ByCreated: true, Limit: 1, KeysOnly: true})
	if err != nil {
		return 0, fmt.Errorf("look for the first commit: %w", err)
	}
	if len(res.KVs) == 0 {
		return 0, nil
	}
	return res.KVs[0].CreateRevision, nil
}
