package api

import (
	"context"
	"errors"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/broker/wire"
)

// InitProducerId (key 22): gives an idempotent producer its id.
//
// Every request gets an id that nobody has had, with epoch 0. A producer that
// names its id and epoch (version 3) wants its epoch bumped, after an error that
// left it in doubt; a new id serves that as well, and needs no memory of the old.
//
// Not done: transactions. A transactional id is refused with
// TRANSACTIONAL_ID_AUTHORIZATION_FAILED, on which every client gives up at once
// (a coordinator's error they would retry for minutes). Most do not get so far,
// because FindCoordinator is not served.
//
// Versions:
//
//	0-1  transactional id and timeout in, id and epoch out
//	2    flexible
//	3    the producer's id and epoch in the request
//	4    PRODUCER_FENCED may be told: we never do
//	5    nothing in the encoding
const (
	initProducerIDMin = 0
	initProducerIDMax = 5
)

func (h *handlers) registerInitProducerID(srv *wire.Server) {
	srv.Register(int16(kmsg.InitProducerID), initProducerIDMin, initProducerIDMax, h.initProducerID)
}

func (h *handlers) initProducerID(_ context.Context, r *wire.Request) wire.Answer {
	req := r.Body.(*kmsg.InitProducerIDRequest)
	resp := kmsg.NewPtrInitProducerIDResponse()
	resp.ProducerID, resp.ProducerEpoch = -1, -1
	switch {
	case req.TransactionalID != nil && *req.TransactionalID == "":
		resp.ErrorCode = kerr.InvalidRequest.Code
		return wire.Ready(resp)
	case req.TransactionalID != nil:
		resp.ErrorCode = kerr.TransactionalIDAuthorizationFailed.Code
		return wire.Ready(resp)
	case (req.ProducerID < 0) != (req.ProducerEpoch < 0): // one without the other
		resp.ErrorCode = kerr.InvalidRequest.Code
		return wire.Ready(resp)
	}
	return func(ctx context.Context) (kmsg.Response, error) {
		wait, cancel := context.WithTimeout(ctx, registryWait)
		defer cancel()
		id, err := h.cluster.ProducerID(wait)
		switch {
		case err == nil:
			resp.ProducerID, resp.ProducerEpoch = id, 0
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		case errors.Is(err, context.DeadlineExceeded):
			// What Kafka says while it waits for a block of ids. Clients try again.
			resp.ErrorCode = kerr.CoordinatorLoadInProgress.Code
		default:
			resp.ErrorCode = h.code(err, "request", "init_producer_id")
		}
		return resp, nil
	}
}
