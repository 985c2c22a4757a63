package membership

import (
	"context"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// watch follows one owner key, of a partition that is owned or waited for. The
// whole prefix is never watched: each member would hear of each claim of all.
func (m *Membership) watch(a rebalance.Watch) {
	ctx, cancel := context.WithCancel(m.ctx)
	m.watches[a.Partition] = cancel
	key := m.group.Owner(a.Partition)
	m.tasks.Go(func() {
		defer cancel()
		after := a.After
		for pause := minJoinPause; ; pause = min(2*pause, maxJoinPause) {
			after = m.followOwner(ctx, a.Partition, key, after)
			if !sleep(ctx, pause) {
				return
			}
			// The watch ended, perhaps by a compaction: what the key is now says all
			// that a member needs of what happened meanwhile.
			limited, cancel := context.WithTimeout(ctx, callLimit)
			kv, revision, err := registry.GetKey(limited, m.store, key)
			cancel()
			if err != nil {
				m.log.Debug("cannot read owner key", "key", key, "error", err)
				continue
			}
			seen := rebalance.OwnerSeen{Partition: a.Partition, Revision: revision}
			if kv != nil {
				seen.Exists, seen.Token = true, kv.CreateRevision
			}
			m.ownerSeen(ctx, seen, kv)
			after, pause = max(after, revision), minJoinPause
		}
	})
}

// followOwner reports changes until the watch ends, and returns the revision up
// to which they were reported.
func (m *Membership) followOwner(ctx context.Context, p registry.Partition, key string, after int64) int64 {
	for r := range m.store.WatchKey(ctx, key, after+1) {
		for _, e := range r.Events {
			seen := rebalance.OwnerSeen{Partition: p, Revision: e.ModRevision, Exists: !e.Deleted}
			if seen.Exists {
				seen.Token = e.CreateRevision
			}
			m.ownerSeen(ctx, seen, &e.KV)
		}
		if r.Err == nil {
			after = max(after, r.Revision)
		}
	}
	return after
}

func (m *Membership) ownerSeen(ctx context.Context, seen rebalance.OwnerSeen, kv *registry.KV) {
	m.post(func() {
		if ctx.Err() != nil || m.session == nil {
			return
		}
		if seen.Exists {
			seen.Mine, seen.Owner = kv.Lease == m.session.Lease(), string(kv.Value)
		}
		m.step(seen)
	})
}
