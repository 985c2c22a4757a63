package etcd

import (
	"errors"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/server/v3/storage/mvcc"
)

// compaction is how history is kept short.
type compaction struct {
	keep  int64         // revisions
	every time.Duration // between two looks
	// step is the least that a compaction must drop, since each walks over all keys.
	step int64
}

// usualCompaction keeps 25 s at 20,000 writes a second, and hours of what a registry
// is written to usually: longer than any watch should lag. etcd's own compaction by
// revision looks every five minutes, in which 20,000 writes a second make six million
// revisions: a file and an index of ten times the size, and a pause when they are
// dropped.
//
// What is dropped leaves free pages in the file, which etcd writes to before it makes
// the file larger; so the file stays at the size of the busiest time and needs no
// defragmentation, which would stop the member meanwhile.
func usualCompaction() compaction {
	return compaction{keep: 500_000, every: 10 * time.Second, step: 50_000}
}

// to decides up to which revision history is dropped, given the first revision that is
// kept now and the newest; 0 if that is not worth while.
func (c compaction) to(first, newest int64) int64 {
	to := newest - c.keep
	if to-max(first, 1) < c.step {
		return 0
	}
	return to
}

// compact drops history as long as the server runs; of several members the leader
// does it for all.
func (s *Server) compact(c compaction) {
	tick := time.NewTicker(c.every)
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
		to := c.to(server.KV().FirstRev(), server.KV().Rev())
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
