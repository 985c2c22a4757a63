package membership

import (
	"context"
	"hash/fnv"
	"strconv"
	"time"

	"github.com/muster-io/muster/registry"
)

const (
	// historyKept is how many entries of a group's history are kept.
	historyKept = 1000
	// pruneEvery: after so many entries of its own a member deletes the old ones. Each
	// begins to count elsewhere, so that many members that write few do it as often.
	pruneEvery = 100
)

// note returns what writes the group's history: an entry for each transaction that
// claims or releases, in that transaction.
func (m *Membership) note(action, reason, strategy string, snapshot int64) registry.Note {
	return func(keys []string) (string, []byte) {
		partitions := map[string][]string{}
		for _, key := range keys {
			p, err := m.group.ParsePartition(key)
			if err != nil {
				continue // it is a key of ours: it can be parsed
			}
			partitions[p.Topic] = append(partitions[p.Topic], p.Name())
		}
		now := time.Now().UnixMilli()
		value, err := registry.Encode(registry.HistoryRecord{Version: 1, Time: strconv.FormatInt(now, 10), Member: m.cfg.ID, Action: action,
			Partitions: partitions, Reason: reason, Strategy: strategy, Snapshot: snapshot})
		if err != nil {
			m.log.Warn("history is left without an entry", "error", err)
			return "", nil
		}
		n := m.entries.Add(1)
		if (n+m.pruneFrom)%pruneEvery == 0 {
			m.pruneDue.Store(true)
		}
		return m.group.HistoryEntry(now, m.cfg.ID, n), value
	}
}

// prune deletes old entries now and then.
func (m *Membership) prune() {
	if !m.pruneDue.Swap(false) {
		return
	}
	ctx, cancel := context.WithTimeout(m.ctx, callLimit)
	defer cancel()
	if err := registry.PruneHistory(ctx, m.store, m.group, historyKept); err != nil && m.ctx.Err() == nil {
		m.log.Debug("history is left to others to prune", "error", err)
	}
}

// pruneStart is where a member begins to count.
func pruneStart(id string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(id))
	return h.Sum64() % pruneEvery
}
