package groups

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/muster-io/muster/registry"
)

// ActionEnded is the action of an Entry that nobody wrote: an ownership was over
// without a release.
const ActionEnded = "ended"

// Entry is what one transaction did to the owners of a group, and why; or with
// ActionEnded what follows from those around it.
type Entry struct {
	Revision   int64           `json:"revision"` // of the transaction; with ActionEnded: by then it was over
	Time       *time.Time      `json:"time"`     // by the clock of the member that wrote it; nil with ActionEnded
	Member     string          `json:"member"`
	Action     string          `json:"action"`
	Partitions []PartitionName `json:"partitions"`
	Reason     *string         `json:"reason"`
	Strategy   *string         `json:"strategy"`
	Snapshot   *int64          `json:"snapshot"` // revision of what the member decided by
}

// PartitionName is a partition in JSON.
type PartitionName struct {
	Topic     string `json:"topic"`
	Partition int32  `json:"partition"`
	Broker    int32  `json:"broker"` // home
}

func nameOf(p registry.Partition) PartitionName { return PartitionName{p.Topic, p.Number, p.Home} }

func (n PartitionName) partition() registry.Partition {
	return registry.Partition{Topic: n.Topic, Number: n.Partition, Home: n.Broker}
}

// HistoryFilter selects entries.
type HistoryFilter struct {
	Topic     string // empty is all
	Partition *int32 // of Topic; nil is all
	Since     time.Time
	Limit     int // the newest so many; 0 is all
}

// History returns what the registry has kept of who owned what, and why it moved,
// oldest first, and what could not be read.
func History(ctx context.Context, st registry.Store, root registry.Root, group string, f HistoryFilter) ([]Entry, []error, error) {
	paths := root.Group(group)
	keys, revision, err := registry.List(ctx, st, paths.Prefix(), 0)
	if err != nil {
		return nil, nil, fmt.Errorf("history of group %s: %w", group, err)
	}
	if len(keys) == 0 {
		return nil, nil, fmt.Errorf("%w: %s", ErrNotFound, group)
	}
	past, bad := readPast(paths, keys)
	owners := map[registry.Partition]int64{}
	for _, kv := range under(keys, paths.Owners()) {
		if p, err := paths.ParsePartition(kv.Key); err == nil {
			owners[p] = kv.CreateRevision
		}
	}
	return f.of(past.told(revision, owners)), bad, nil
}

func (f HistoryFilter) of(entries []Entry) []Entry {
	found := []Entry{}
	var latest time.Time // an entry that nobody wrote has the time of the one before
	for _, e := range entries {
		if e.Time != nil {
			latest = *e.Time
		}
		if latest.Before(f.Since) {
			continue
		}
		e.Partitions = slices.DeleteFunc(slices.Clone(e.Partitions), func(p PartitionName) bool {
			return f.Topic != "" && (p.Topic != f.Topic || f.Partition != nil && p.Partition != *f.Partition)
		})
		if len(e.Partitions) > 0 {
			found = append(found, e)
		}
	}
	if f.Limit > 0 && len(found) > f.Limit {
		found = found[len(found)-f.Limit:]
	}
	return found
}

// past is the history of a group as its members wrote it, by revision.
type past []Entry

func readPast(paths registry.GroupPaths, keys []registry.KV) (past, []error) {
	var list past
	var bad []error
	for _, kv := range under(keys, paths.History()) {
		e, err := readEntry(paths, kv)
		if err != nil {
			bad = append(bad, err)
			continue
		}
		list = append(list, e)
	}
	slices.SortStableFunc(list, func(a, b Entry) int { return cmp.Compare(a.Revision, b.Revision) })
	return list, bad
}

func readEntry(paths registry.GroupPaths, kv registry.KV) (Entry, error) {
	rec, err := registry.ParseHistory(kv)
	if err != nil {
		return Entry{}, err
	}
	e := Entry{Revision: kv.CreateRevision, Member: rec.Member, Action: rec.Action, Partitions: []PartitionName{}}
	if ms, err := strconv.ParseInt(rec.Time, 10, 64); err == nil {
		at := time.UnixMilli(ms)
		e.Time = &at
	}
	if rec.Reason != "" {
		e.Reason = &rec.Reason
	}
	if rec.Strategy != "" {
		e.Strategy = &rec.Strategy
	}
	if rec.Snapshot != 0 {
		e.Snapshot = &rec.Snapshot
	}
	var list []registry.Partition
	for topic, names := range rec.Partitions {
		for _, name := range names {
			p, err := paths.ParsePartition(paths.TopicOwners(topic) + name)
			if err != nil {
				return Entry{}, fmt.Errorf("history %s: %w: partition %q", kv.Key, registry.ErrRecord, name)
			}
			list = append(list, p)
		}
	}
	slices.SortFunc(list, registry.ComparePartitions)
	for _, p := range list {
		e.Partitions = append(e.Partitions, nameOf(p))
	}
	return e, nil
}

// told adds what nobody could write: that an ownership was over though its owner had
// not released it. It is seen when the next one claims, or the owner key is not there
// any more. owners are the tokens of the present keys.
func (h past) told(revision int64, owners map[registry.Partition]int64) []Entry {
	type holding struct {
		member string
		since  int64
	}
	holds := map[registry.Partition]holding{}
	var list []Entry
	for _, e := range h {
		ended := map[string][]registry.Partition{}
		for _, name := range e.Partitions {
			p := name.partition()
			was, held := holds[p]
			switch {
			case e.Action == registry.ActionClaimed:
				if held {
					ended[was.member] = append(ended[was.member], p)
				}
				holds[p] = holding{e.Member, e.Revision}
			case held && was.member == e.Member:
				delete(holds, p)
			}
		}
		list = append(append(list, endings(e.Revision, ended)...), e)
	}
	ended := map[string][]registry.Partition{}
	for p, was := range holds {
		if owners[p] != was.since {
			ended[was.member] = append(ended[was.member], p)
		}
	}
	return append(list, endings(revision, ended)...)
}

func endings(revision int64, ended map[string][]registry.Partition) []Entry {
	var list []Entry
	for _, member := range slices.Sorted(maps.Keys(ended)) {
		why := "its session ended, or the owner key was deleted; nobody released it"
		e := Entry{Revision: revision, Member: member, Action: ActionEnded, Reason: &why}
		slices.SortFunc(ended[member], registry.ComparePartitions)
		for _, p := range ended[member] {
			e.Partitions = append(e.Partitions, nameOf(p))
		}
		list = append(list, e)
	}
	return list
}

// claims is when each ownership began, by token.
func (h past) claims() map[registry.Partition]map[int64]time.Time {
	found := map[registry.Partition]map[int64]time.Time{}
	for _, e := range h {
		if e.Action != registry.ActionClaimed || e.Time == nil {
			continue
		}
		for _, name := range e.Partitions {
			p := name.partition()
			if found[p] == nil {
				found[p] = map[int64]time.Time{}
			}
			// The entry is written in the transaction that creates the owner key.
			found[p][e.Revision] = *e.Time
		}
	}
	return found
}

// last is the newest entry about each partition.
func (h past) last() map[registry.Partition]Entry {
	found := map[registry.Partition]Entry{}
	for _, e := range h {
		for _, name := range e.Partitions {
			found[name.partition()] = e
		}
	}
	return found
}
