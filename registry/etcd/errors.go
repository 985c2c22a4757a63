package etcd

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/muster-io/muster/registry"
)

// repeat tells whether a call may be made twice.
type repeat bool

const (
	once  repeat = false // it might take effect twice
	again repeat = true  // it changes nothing, or nothing more
)

// callLimit bounds a call whose context has no deadline: the client goes on for many
// minutes where the store gives no answer.
const callLimit = 30 * time.Second

// call makes a call to the member in use. One that may be repeated is made again
// when the Store turns to another member meanwhile, or the member to another leader.
func (s *Store) call(ctx context.Context, r repeat, f func(ctx context.Context, c *conn) error) error {
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, s.callLimit)
		defer cancel()
	}
	for {
		c, term := s.conns.use(ctx)
		bound, release := bind(ctx, term)
		err := f(bound, c)
		release()
		if transportFailed(err) {
			// The next call is to find what this one has found out. gRPC itself comes to
			// know a little later.
			s.conns.tellAndWait(connEvent{conn: c, lost: true})
		}
		if r == once && sentInVain(err) {
			return fmt.Errorf("%w (asked of %s): %w", ErrUnknown, c.endpoint, err)
		}
		if err == nil || ctx.Err() != nil || term.Err() == nil || s.conns.ctx.Err() != nil {
			return s.explain(err)
		}
		if r == once {
			if answered(err) {
				return s.explain(err)
			}
			return fmt.Errorf("%w (asked of %s)", ErrUnknown, c.endpoint)
		}
	}
}

// answered tells whether an error is etcd's own word that a call did nothing.
func answered(err error) bool {
	e, ok := errors.AsType[rpctypes.EtcdError](err)
	return ok && e.Code() != codes.Unavailable && e.Code() != codes.Canceled && e.Code() != codes.DeadlineExceeded
}

// transportFailed tells whether an error is not etcd's, but that of the way to it.
func transportFailed(err error) bool {
	if _, ok := errors.AsType[rpctypes.EtcdError](rpctypes.Error(err)); ok {
		return false
	}
	return status.Code(err) == codes.Unavailable
}

// sentInVain tells whether the connection was lost between question and answer. gRPC
// says the same of one that could not be had, but for the text.
func sentInVain(err error) bool {
	return transportFailed(err) && strings.Contains(err.Error(), "error reading from server")
}

// Errors of a Store that say what to do.
var (
	// ErrUnknown: a member, or its leader, was lost while a write was under way.
	ErrUnknown = errors.New("an etcd member was lost during the call, and whether it took effect is unknown: look, then try again")
	// ErrNoQuorum: most members are needed, and they do not answer.
	ErrNoQuorum = errors.New("etcd has no quorum: start the members that are down, or see why they do not reach each other")
	// ErrNoSpace: nothing can be written any more.
	ErrNoSpace = errors.New("etcd is full and takes no writes (alarm NOSPACE): delete what is not needed, then run etcdctl compact, defrag and alarm disarm")
)

// explain is convert, and says why the store does not answer where that is known.
func (s *Store) explain(err error) error {
	if err == nil {
		return nil
	}
	late := errors.Is(err, context.DeadlineExceeded) || status.Code(err) == codes.DeadlineExceeded
	switch why := s.conns.doubt(); {
	case late && why != "":
		return fmt.Errorf("%w (%s): %w", ErrNoQuorum, why, convert(err))
	case late:
		return fmt.Errorf("no answer from etcd in time: %w", err)
	}
	return convert(err)
}

// convert maps etcd's errors to the registry's.
func convert(err error) error {
	known := rpctypes.Error(err)
	is := func(list ...error) bool {
		for _, e := range list {
			if errors.Is(known, e) {
				return true
			}
		}
		return false
	}
	switch {
	case err == nil:
		return nil
	case is(rpctypes.ErrCompacted):
		return fmt.Errorf("%w: %w", registry.ErrCompacted, err)
	case is(rpctypes.ErrLeaseNotFound):
		return fmt.Errorf("%w: %w", registry.ErrLeaseNotFound, err)
	case is(rpctypes.ErrPermissionDenied):
		return fmt.Errorf("%w: %w", registry.ErrPermission, err)
	case is(rpctypes.ErrAuthFailed):
		return fmt.Errorf("etcd refuses the user or the password (--etcd-user, --etcd-password-file): %w", err)
	case is(rpctypes.ErrNoSpace):
		return fmt.Errorf("%w: %w", ErrNoSpace, err)
	case is(rpctypes.ErrNoLeader, rpctypes.ErrTimeoutDueToLeaderFail, rpctypes.ErrTimeoutDueToConnectionLost, rpctypes.ErrTimeout):
		return fmt.Errorf("%w: %w", ErrNoQuorum, err)
	}
	return err
}
