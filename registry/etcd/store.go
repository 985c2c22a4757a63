// Package etcd is the registry.Store on etcd, and opens it: a server inside this
// process, or an existing cluster.
package etcd

import (
	"context"
	"errors"
	"fmt"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/muster-io/muster/registry"
)

// Store is a registry.Store. Use Open, and Close it.
type Store struct {
	conns     *conns
	clock     bootClock
	callLimit time.Duration
}

// Client is the connection in use, for what the Store has no word for. It is closed
// when the Store turns to another member.
func (s *Store) Client() *clientv3.Client {
	c, _ := s.conns.use(context.Background())
	return c.client
}

// Close closes the connection. It waits for the goroutines of the Store.
func (s *Store) Close() error {
	s.conns.close()
	return nil
}

// Now implements registry.Store.
func (s *Store) Now() time.Duration { return s.clock.now() }

// Txn implements registry.Store.
func (s *Store) Txn(ctx context.Context, t registry.Txn) (registry.TxnResult, error) {
	cmps, then, els := translate(t)
	var res *clientv3.TxnResponse
	err := s.call(ctx, once, func(ctx context.Context, c *conn) (err error) {
		res, err = c.client.Txn(ctx).If(cmps...).Then(then...).Else(els...).Commit()
		return err
	})
	if err != nil {
		return registry.TxnResult{}, err
	}
	return txnResult((*pb.TxnResponse)(res), res.Header.Revision), nil
}

func translate(t registry.Txn) (cmps []clientv3.Cmp, then, els []clientv3.Op) {
	for _, c := range t.If {
		cmps = append(cmps, condition(c))
	}
	for _, op := range t.Then {
		then = append(then, operation(op))
	}
	for _, op := range t.Else {
		els = append(els, operation(op))
	}
	return cmps, then, els
}

func condition(c registry.Cond) clientv3.Cmp {
	relation := [...]string{registry.Equal: "=", registry.NotEqual: "!=", registry.Less: "<", registry.Greater: ">"}[c.Relation]
	var cmp clientv3.Cmp
	switch c.Field {
	case registry.FieldCreateRevision:
		cmp = clientv3.Compare(clientv3.CreateRevision(c.Key), relation, c.Number)
	case registry.FieldModRevision:
		cmp = clientv3.Compare(clientv3.ModRevision(c.Key), relation, c.Number)
	case registry.FieldLease:
		cmp = clientv3.Compare(clientv3.LeaseValue(c.Key), relation, c.Number)
	case registry.FieldValue:
		cmp = clientv3.Compare(clientv3.Value(c.Key), relation, string(c.Value))
	}
	if c.Prefix {
		cmp = cmp.WithPrefix()
	}
	return cmp
}

func operation(op registry.Op) clientv3.Op {
	var opts []clientv3.OpOption
	if op.Prefix {
		opts = append(opts, clientv3.WithPrefix())
	}
	switch op.Kind {
	case registry.OpDelete:
		return clientv3.OpDelete(op.Key, opts...)
	case registry.OpGet:
		return clientv3.OpGet(op.Key, opts...)
	case registry.OpTxn:
		return clientv3.OpTxn(translate(*op.Txn))
	}
	if op.Lease != 0 {
		opts = append(opts, clientv3.WithLease(clientv3.LeaseID(op.Lease)))
	}
	return clientv3.OpPut(op.Key, string(op.Value), opts...)
}

// txnResult takes the revision from the outermost header: nested answers have none.
func txnResult(res *pb.TxnResponse, revision int64) registry.TxnResult {
	out := registry.TxnResult{Revision: revision, Succeeded: res.Succeeded}
	for _, r := range res.Responses {
		var item registry.TxnItem
		switch {
		case r.GetResponseRange() != nil:
			item.KVs = convertKVs(r.GetResponseRange().Kvs)
		case r.GetResponseDeleteRange() != nil:
			item.Deleted = r.GetResponseDeleteRange().Deleted
		case r.GetResponseTxn() != nil:
			nested := txnResult(r.GetResponseTxn(), revision)
			item.Txn = &nested
		}
		out.Items = append(out.Items, item)
	}
	return out
}

func convertKVs(kvs []*mvccpb.KeyValue) []registry.KV {
	out := make([]registry.KV, len(kvs))
	for i, kv := range kvs {
		out[i] = convertKV(kv)
	}
	return out
}

func convertKV(kv *mvccpb.KeyValue) registry.KV {
	return registry.KV{Key: string(kv.Key), Value: kv.Value, CreateRevision: kv.CreateRevision,
		ModRevision: kv.ModRevision, Lease: registry.LeaseID(kv.Lease)}
}

// Range implements registry.Store.
func (s *Store) Range(ctx context.Context, r registry.RangeRequest) (registry.RangeResult, error) {
	key := r.Key
	var opts []clientv3.OpOption
	if r.Prefix {
		if r.After != "" {
			key = max(key, r.After+"\x00")
		}
		if key == "" {
			key = "\x00" // the client's word for the first key
		}
		opts = append(opts, clientv3.WithRange(registry.PrefixEnd(r.Key)))
	}
	if r.Revision != 0 {
		opts = append(opts, clientv3.WithRev(r.Revision))
	}
	if r.Limit != 0 {
		opts = append(opts, clientv3.WithLimit(r.Limit))
	}
	if r.ByCreated {
		opts = append(opts, clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortAscend))
	}
	if r.KeysOnly {
		opts = append(opts, clientv3.WithKeysOnly())
	}
	var res *clientv3.GetResponse
	err := s.call(ctx, again, func(ctx context.Context, c *conn) (err error) {
		res, err = c.client.Get(ctx, key, opts...)
		return err
	})
	if err != nil {
		return registry.RangeResult{}, err
	}
	kvs := convertKVs(res.Kvs)
	if r.KeysOnly {
		for i := range kvs {
			kvs[i].Lease = 0 // before 3.7 it is told
		}
	}
	return registry.RangeResult{Revision: res.Header.Revision, KVs: kvs, More: res.More}, nil
}

// Grant implements registry.Store. etcd raises times to live that are shorter
// than its election takes; the answer says to what.
func (s *Store) Grant(ctx context.Context, ttl time.Duration) (registry.Lease, error) {
	seconds := int64((ttl + time.Second - 1) / time.Second)
	var res *clientv3.LeaseGrantResponse
	// A grant whose answer was lost leaves a lease without keys, which runs out.
	err := s.call(ctx, again, func(ctx context.Context, c *conn) (err error) {
		res, err = c.client.Grant(ctx, seconds)
		return err
	})
	if err != nil {
		return registry.Lease{}, err
	}
	return registry.Lease{ID: registry.LeaseID(res.ID), TTL: time.Duration(res.TTL) * time.Second}, nil
}

// Revoke implements registry.Store.
func (s *Store) Revoke(ctx context.Context, id registry.LeaseID) error {
	tries := 0
	err := s.call(ctx, again, func(ctx context.Context, c *conn) error {
		tries++
		_, err := c.client.Revoke(ctx, clientv3.LeaseID(id))
		return err
	})
	if tries > 1 && errors.Is(err, registry.ErrLeaseNotFound) {
		return nil // the answer to an earlier try was lost
	}
	return err
}

// Remaining implements registry.Store.
func (s *Store) Remaining(ctx context.Context, id registry.LeaseID) (time.Duration, error) {
	var res *clientv3.LeaseTimeToLiveResponse
	err := s.call(ctx, again, func(ctx context.Context, c *conn) (err error) {
		res, err = c.client.TimeToLive(ctx, clientv3.LeaseID(id))
		return err
	})
	if err != nil {
		return 0, err
	}
	if res.TTL < 0 {
		return 0, fmt.Errorf("lease %s: %w", registry.LeaseText(id), registry.ErrLeaseNotFound)
	}
	return time.Duration(res.TTL) * time.Second, nil
}

// KeepAlive implements registry.Store, on the stream itself: the client's own
// keep-alive hides when the request behind an answer was sent.
func (s *Store) KeepAlive(ctx context.Context, id registry.LeaseID) (registry.KeepAliver, error) {
	c, _ := s.conns.use(ctx)
	ctx, cancel := bind(ctx, c.ctx)
	context.AfterFunc(ctx, cancel) // ends with the stream's own context, or with the connection
	stream, err := c.leases.LeaseKeepAlive(clientv3.WithRequireLeader(ctx))
	if err != nil {
		cancel()
		return nil, s.explain(err)
	}
	return keepAliver{stream, int64(id)}, nil
}

type keepAliver struct {
	stream pb.Lease_LeaseKeepAliveClient
	id     int64
}

func (k keepAliver) Send() error {
	return convert(k.stream.Send(&pb.LeaseKeepAliveRequest{ID: k.id}))
}

func (k keepAliver) Recv() (time.Duration, error) {
	res, err := k.stream.Recv()
	if err != nil {
		return 0, convert(err)
	}
	return time.Duration(res.TTL) * time.Second, nil
}
