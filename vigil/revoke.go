package vigil

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/muster-io/muster/registry"
)

// DeathInfo is a session whose process has ended.
type DeathInfo struct {
	Lease  registry.LeaseID
	Key    string
	Result DeathResult
	Took   time.Duration // since the end of the process was noticed
}

// DeathResult is what became of the lease.
type DeathResult string

const (
	// DeathRevoked: the lease was revoked, and its keys are gone.
	DeathRevoked DeathResult = "revoked"
	// DeathOver: there was nothing to revoke, since the registration stood no more.
	DeathOver DeathResult = "over"
	// DeathFailed: the registry did not answer or did not allow it. The lease runs out.
	DeathFailed DeathResult = "failed"
)

// DeathResults is all of them.
var DeathResults = []DeathResult{DeathRevoked, DeathOver, DeathFailed}

const (
	// callLimit bounds one call to the registry.
	callLimit = 3 * time.Second
	// maxCalls is how many revocations are under way at a time, of all processes.
	maxCalls = 32
	// proofsAtOnce is how many registrations are read in one transaction.
	proofsAtOnce = 64
	// A revocation that failed is tried again after a pause that doubles between these
	// bounds, for as long as a lease can live without being renewed.
	minRevokePause = 20 * time.Millisecond
	maxRevokePause = time.Second
	revokeLimit    = registry.MaxTTL
)

// standing returns those sessions whose registration stands as the asker said.
func (s *Server) standing(list []session) ([]session, error) {
	// Not under the server's context: what has begun when it closes is finished.
	ctx, cancel := context.WithTimeout(context.Background(), s.o.call)
	defer cancel()
	var t registry.Txn
	for _, a := range list {
		t.Then = append(t.Then, registry.Get(a.key))
	}
	res, err := s.o.Store.Txn(ctx, t)
	if err != nil {
		return nil, err
	}
	var stand []session
	for i, a := range list {
		if kvs := res.Items[i].KVs; len(kvs) == 1 && s.proves(kvs[0], a) {
			stand = append(stand, a)
		}
	}
	return stand, nil
}

// proves tells whether a key is the registration of a consumer, under the lease and
// with the notice of the session. A key of any other kind may hold what its writer
// was given by somebody else.
func (s *Server) proves(kv registry.KV, a session) bool {
	if place := s.o.Root.Locate(kv.Key); place.Kind != registry.KindMember || kv.Lease != a.lease {
		return false
	}
	rec, err := registry.ParseConsumer(kv)
	return err == nil && rec.Notice == a.notice
}

// settle revokes the leases of a process that has ended, in a goroutine.
func (s *Server) settle(list []session, p *process) {
	noticed := time.Now()
	s.work.Go(func() {
		for pause := minRevokePause; ; pause = min(2*pause, maxRevokePause) {
			var err error
			if list, err = s.revokeAll(list, p, noticed); len(list) == 0 {
				return
			}
			if time.Since(noticed) > revokeLimit || !sleep(s.ctx, pause) {
				for _, a := range list {
					s.settled(a, p, DeathFailed, noticed, err)
				}
				return
			}
		}
	})
}

// revokeAll tries once, and returns those that are to be tried again, with an error
// of one of them.
func (s *Server) revokeAll(list []session, p *process, noticed time.Time) (again []session, err error) {
	var mu sync.Mutex
	failed := func(e error, which ...session) {
		mu.Lock()
		defer mu.Unlock()
		again, err = append(again, which...), e
	}
	var work sync.WaitGroup
	for len(list) > 0 {
		part := list[:min(len(list), proofsAtOnce)]
		list = list[len(part):]
		stand, err := s.standing(part)
		if err != nil {
			failed(err, part...)
			continue
		}
		lasting := make(map[registry.LeaseID]bool, len(stand))
		for _, a := range stand {
			lasting[a.lease] = true
		}
		for _, a := range part {
			if !lasting[a.lease] {
				s.settled(a, p, DeathOver, noticed, nil)
				continue
			}
			s.calls <- struct{}{}
			work.Go(func() {
				defer func() { <-s.calls }()
				switch err := s.revoke(a.lease); {
				case err == nil:
					s.settled(a, p, DeathRevoked, noticed, nil)
				case errors.Is(err, registry.ErrLeaseNotFound):
					s.settled(a, p, DeathOver, noticed, nil)
				case errors.Is(err, registry.ErrPermission):
					s.settled(a, p, DeathFailed, noticed, err)
				default:
					failed(err, a)
				}
			})
		}
	}
	work.Wait()
	return again, err
}

func (s *Server) revoke(lease registry.LeaseID) error {
	ctx, cancel := context.WithTimeout(context.Background(), s.o.call)
	defer cancel()
	return s.o.Store.Revoke(ctx, lease)
}

func (s *Server) settled(a session, p *process, result DeathResult, noticed time.Time, err error) {
	i := DeathInfo{Lease: a.lease, Key: a.key, Result: result, Took: time.Since(noticed)}
	args := []any{"key", a.key, "lease", registry.LeaseText(a.lease), "pid", p.pid, "uid", p.uid, "took", i.Took}
	switch result {
	case DeathRevoked:
		s.log.Info("a consumer's process has ended, its lease is revoked", args...)
	case DeathOver:
		s.log.Debug("a consumer's process has ended, its session was over", args...)
	case DeathFailed:
		s.log.Warn("a consumer's process has ended, its lease is left to run out", append(args, "error", err)...)
	}
	if f := s.o.Hooks.OnDeath; f != nil {
		f(i)
	}
}
