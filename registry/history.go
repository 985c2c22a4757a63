package registry

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// What a HistoryRecord tells.
const (
	ActionClaimed  = "claimed"
	ActionReleased = "released"
)

// HistoryRecord is the value of /consumers/<group>/history/<entry>: what one
// transaction claimed or released, for example
//
//	{"version":1,"timestamp":"1796009631365","member":"node-b:5c97…","action":"claimed","partitions":{"orders":["1-0"]},"reason":"joined","strategy":"range","snapshot":"812"}
//
// Partitions lists by topic the names of the partitions (Partition.Name). Snapshot is
// the revision that the member had computed it from, Reason why the partitions moved.
type HistoryRecord struct {
	Version    int32               `json:"version"`
	Time       string              `json:"timestamp"`
	Member     string              `json:"member"`
	Action     string              `json:"action"`
	Partitions map[string][]string `json:"partitions"`
	Reason     string              `json:"reason"`
	Strategy   string              `json:"strategy"`
	Snapshot   int64               `json:"snapshot,string"`
}

// ParseHistory reads an entry.
func ParseHistory(kv KV) (HistoryRecord, error) {
	var rec HistoryRecord
	if err := decode(kv, &rec); err != nil {
		return rec, err
	}
	bad := func(format string, args ...any) (HistoryRecord, error) {
		return rec, fmt.Errorf("history entry %s: %w: %s", kv.Key, ErrRecord, fmt.Sprintf(format, args...))
	}
	if _, err := strconv.ParseInt(rec.Time, 10, 64); err != nil {
		return bad("timestamp %q", rec.Time)
	}
	if rec.Member == "" || rec.Action != ActionClaimed && rec.Action != ActionReleased {
		return bad("member %q, action %q", rec.Member, rec.Action)
	}
	for topic, names := range rec.Partitions {
		for _, name := range names {
			if _, _, err := parsePartitionName(name); err != nil {
				return bad("topic %s: %v", topic, err)
			}
		}
	}
	return rec, nil
}

// HistoryEntry is an entry with the revision of its transaction, which is the token
// of the partitions that it claimed.
type HistoryEntry struct {
	Revision int64
	HistoryRecord
}

// ReadHistory reads what is told of the group's past, the newest last, and what could
// not be read of it. The order is that of the transactions, whatever the clocks of
// the members said; of entries that were restored from a backup, that of their keys.
func ReadHistory(ctx context.Context, st Store, group GroupPaths) (list []HistoryEntry, bad []error, err error) {
	kvs, _, err := List(ctx, st, group.History(), 0)
	if err != nil {
		return nil, nil, fmt.Errorf("list history: %w", err)
	}
	for _, kv := range kvs {
		rec, err := ParseHistory(kv)
		if err != nil {
			bad = append(bad, err)
			continue
		}
		list = append(list, HistoryEntry{Revision: kv.CreateRevision, HistoryRecord: rec})
	}
	slices.SortStableFunc(list, func(a, b HistoryEntry) int { return cmp.Compare(a.Revision, b.Revision) })
	return list, bad, nil
}

// PruneHistory deletes the oldest entries of the group's history until keep are left.
// Several may do it at once: an entry is written once, so whichever was among the
// older ones stays so.
func PruneHistory(ctx context.Context, st Store, group GroupPaths, keep int) error {
	keep = max(keep, 0)
	req := RangeRequest{Key: group.History(), Prefix: true, KeysOnly: true, Limit: int64(keep + listPage)}
	for {
		res, err := st.Range(ctx, req)
		if err != nil {
			return fmt.Errorf("list history: %w", err)
		}
		slices.SortFunc(res.KVs, func(a, b KV) int {
			return cmp.Or(cmp.Compare(a.CreateRevision, b.CreateRevision), strings.Compare(a.Key, b.Key))
		})
		// Where there are more, these are old all the same: so many newer ones are here.
		old := res.KVs[:max(len(res.KVs)-keep, 0)]
		for part := range slices.Chunk(old, MaxTxnOps) {
			var t Txn
			for _, kv := range part {
				t.Then = append(t.Then, Delete(kv.Key))
			}
			if _, err := st.Txn(ctx, t); err != nil {
				return fmt.Errorf("delete %d entries of history: %w", len(part), err)
			}
		}
		if !res.More || len(old) == 0 {
			return nil
		}
	}
}
