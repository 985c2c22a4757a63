package api_test

import (
	"context"
	"errors"
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/broker/api"
)

func initRequest(version int16) *kmsg.InitProducerIDRequest {
	req := kmsg.NewPtrInitProducerIDRequest()
	req.Version = version
	return req
}

func TestInitProducerIDEveryVersion(t *testing.T) {
	b := start(t, api.Options{})
	c := b.dial(t)
	for version := range int16(6) {
		resp := ask[*kmsg.InitProducerIDResponse](c, initRequest(version))
		if resp.ErrorCode != 0 || resp.ProducerID != int64(1001+version) || resp.ProducerEpoch != 0 {
			t.Errorf("version %d: %+v", version, resp)
		}
	}
	again := initRequest(3) // a bump
	again.ProducerID, again.ProducerEpoch = 1001, 4
	if resp := ask[*kmsg.InitProducerIDResponse](c, again); resp.ErrorCode != 0 || resp.ProducerID != 1007 || resp.ProducerEpoch != 0 {
		t.Errorf("bump: %+v", resp)
	}
}

func TestInitProducerIDRefuses(t *testing.T) {
	b := start(t, api.Options{})
	c := b.dial(t)
	for name, test := range map[string]struct {
		change func(*kmsg.InitProducerIDRequest)
		code   int16
	}{
		"transactional id":       {func(r *kmsg.InitProducerIDRequest) { r.TransactionalID = kmsg.StringPtr("tx") }, 53},
		"empty transactional id": {func(r *kmsg.InitProducerIDRequest) { r.TransactionalID = kmsg.StringPtr("") }, 42},
		"id without epoch":       {func(r *kmsg.InitProducerIDRequest) { r.ProducerID = 5 }, 42},
		"epoch without id":       {func(r *kmsg.InitProducerIDRequest) { r.ProducerEpoch = 5 }, 42},
	} {
		req := initRequest(4)
		test.change(req)
		if resp := ask[*kmsg.InitProducerIDResponse](c, req); resp.ErrorCode != test.code || resp.ProducerID != -1 || resp.ProducerEpoch != -1 {
			t.Errorf("%s: %+v", name, resp)
		}
	}
}

func TestInitProducerIDWithoutTheRegistry(t *testing.T) {
	for _, test := range []struct {
		err  error
		code int16
	}{{context.DeadlineExceeded, 14}, {kerr.CoordinatorNotAvailable, 15}, {errors.New("etcd is away"), -1}} {
		b := start(t, api.Options{})
		b.idErr = test.err
		if resp := ask[*kmsg.InitProducerIDResponse](b.dial(t), initRequest(4)); resp.ErrorCode != test.code || resp.ProducerID != -1 {
			t.Errorf("%v: %+v", test.err, resp)
		}
	}
}
