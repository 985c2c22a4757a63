package etcd

import (
	"errors"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/server/v3/storage/mvcc"
)

const (
	// keepRevisions is how far back history reaches: minutes of a load that is heavy
	// for a registry, longer than any watch should lag.
	keepRevisions = 500_000
	// compactEvery is how often the leader looks. etcd's own compaction by revision
	// looks every five minutes, in which 20,000 writes a second make six million
	// revisions: gigabytes of file and memory, and a pause when they are dropped.
	compactEvery = 10 * time.Second
	// compactStep is the least that a compaction must drop, since each walks over all
	// keys.
	compactStep = 50_000
)

// compactTo decides up to which revision history is dropped, given the first revision
// that is kept now and the newest; 0 if that is not worth while.
func compactTo(first, newest int64) int64 {
	to := newest - keepRevisions
	if to-max(first, 1) < compactStep {
		return 0
	}
	return to
}

// compact drops history as long as the server runs; of several members the leader
// does it for all.
func (s *Server) compact() {
	tick := time.NewTicker(compactEvery)
	defer tick.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-tick.C:
		}
		server := s.etcd.Server
		if server.Leader() != server.MemberID() {
			continue
		}
		to := compactTo(server.KV().FirstRev(), server.KV().Rev())
		if to == 0 {
			continue
		}
		_, err := server.Compact(s.ctx, &pb.CompactionRequest{Revision: to})
		switch {
		case err == nil:
			s.log.log.Debug("compacted", "rev", to)
		case errors.Is(err, mvcc.ErrCompacted) || s.ctx.Err() != nil:
		default:
			s.log.log.Warn("cannot compact, trying again", "rev", to, "error", err)
		}
	}
}
