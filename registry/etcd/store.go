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
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"

	"github.com/muster-io/muster/registry"
)

// Store is a registry.Store. Use Open, and Close it.
type Store struct {
	client *clientv3.Client
	leases pb.LeaseClient
	clock  bootClock
}

// Client is the connection under the Store, for what the Store has no word for.
func (s *Store) Client() *clientv3.Client { return s.client }

// Close closes the connection.
func (s *Store) Close() error { return s.client.Close() }

// Now implements registry.Store.
func (s *Store) Now() time.Duration { return s.clock.now() }

// Txn implements registry.Store.
func (s *Store) Txn(ctx context.Context, t registry.Txn) (registry.TxnResult, error) {
	cmps, then, els := translate(t)
	res, err := s.client.Txn(ctx).If(cmps...).Then(then...).Else(els...).Commit()
	if err != nil {
		return registry.TxnResult{}, convert(err)
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
	res, err := s.client.Get(ctx, key, opts...)
	if err != nil {
		return registry.RangeResult{}, convert(err)
	}
	kvs := convertKVs(res.Kvs)
	if r.KeysOnly {
		for i := range kvs {
			kvs[i].Lease = 0 // before 3.7 it is told
		}
	}
	return registry.RangeResult{Revision: res.Header.Revision, KVs: kvs, More: res.More}, nil
}

// watchContext is the same for all of Watch and RequestProgress, since the
// client shares a stream among those whose metadata are equal. A watch on a
// member that lost its leader ends, in place of hanging in the past.
func watchContext(ctx context.Context) context.Context { return clientv3.WithRequireLeader(ctx) }

// Watch implements registry.Store.
//
// It begins one revision early and leaves that out: etcd answers no progress
// request of a stream as long as one of its watches begins in the future, and
// "after what I have read" is the future until somebody writes.
func (s *Store) Watch(ctx context.Context, prefix string, from int64) <-chan registry.WatchResponse {
	out := make(chan registry.WatchResponse)
	go func() {
		defer close(out)
		// Without a connection this blocks until there is one.
		in := s.client.Watch(watchContext(ctx), prefix, clientv3.WithPrefix(), clientv3.WithRev(max(from-1, 1)),
			clientv3.WithPrevKV(), clientv3.WithProgressNotify())
		for res := range in {
			if !pass(ctx, out, watchResponse(res, from)) {
				return
			}
		}
	}()
	return out
}

// WatchKey implements registry.Store. Other metadata mean another stream: see
// Watch. It begins with the present and asks for the past: etcd brings a watch that
// begins in the past up to date only every 100 ms, and the holder of a partition
// that is waited for gives it up sooner than that.
func (s *Store) WatchKey(ctx context.Context, key string, from int64) <-chan registry.WatchResponse {
	out := make(chan registry.WatchResponse)
	go func() {
		defer close(out)
		stream := metadata.AppendToOutgoingContext(watchContext(ctx), "muster-watch", "keys")
		for res := range s.client.Watch(stream, key, clientv3.WithCreatedNotify(), clientv3.WithPrevKV()) {
			r := watchResponse(res, from)
			if res.Created && r.Err == nil && r.Revision >= from {
				r = s.present(ctx, key, from)
				from = r.Revision + 1 // what the read has seen comes once more
			}
			if !pass(ctx, out, r) {
				return
			}
		}
	}()
	return out
}

// presentLimit bounds the read that begins a WatchKey; past it the watch ends, and
// whoever holds it begins another.
const presentLimit = 5 * time.Second

// present is what happened to a key since a revision, as far as the key shows it.
func (s *Store) present(ctx context.Context, key string, from int64) registry.WatchResponse {
	ctx, cancel := context.WithTimeout(ctx, presentLimit)
	defer cancel()
	kv, revision, err := registry.GetKey(ctx, s, key)
	r := registry.WatchResponse{Revision: revision, Err: err}
	switch {
	case err != nil:
	case kv == nil:
		r.Events = []registry.Event{{KV: registry.KV{Key: key, ModRevision: revision}, Deleted: true}}
	case kv.ModRevision >= from:
		r.Events = []registry.Event{{KV: *kv}}
	}
	return r
}

// pass hands on a response that says anything; false if it was the last.
func pass(ctx context.Context, out chan<- registry.WatchResponse, r registry.WatchResponse) bool {
	if r.Err == nil && !r.Progress && len(r.Events) == 0 {
		return true
	}
	select {
	case out <- r:
		return r.Err == nil
	case <-ctx.Done():
		return false
	}
}

func watchResponse(res clientv3.WatchResponse, from int64) registry.WatchResponse {
	r := registry.WatchResponse{Revision: res.Header.Revision, Progress: res.IsProgressNotify(), CompactRevision: res.CompactRevision}
	switch {
	case res.CompactRevision != 0:
		r.Err = registry.ErrCompacted
	case res.Err() != nil:
		r.Err = convert(res.Err())
	}
	for _, e := range res.Events {
		if e.Kv.ModRevision < from {
			continue
		}
		ev := registry.Event{KV: convertKV(e.Kv), Deleted: e.Type == clientv3.EventTypeDelete}
		if e.PrevKv != nil {
			was := convertKV(e.PrevKv)
			ev.Previous = &was
		}
		r.Events = append(r.Events, ev)
	}
	// A watch that catches up is sent in batches of whole revisions, each under the
	// header of the store's newest one: only what the events say has been reached.
	if n := len(r.Events); n > 0 {
		r.Revision = r.Events[n-1].ModRevision
	}
	return r
}

// RequestProgress implements registry.Store.
func (s *Store) RequestProgress(ctx context.Context) error {
	return convert(s.client.RequestProgress(watchContext(ctx)))
}

// Grant implements registry.Store. etcd raises times to live that are shorter
// than its election takes; the answer says to what.
func (s *Store) Grant(ctx context.Context, ttl time.Duration) (registry.Lease, error) {
	seconds := int64((ttl + time.Second - 1) / time.Second)
	res, err := s.client.Grant(ctx, seconds)
	if err != nil {
		return registry.Lease{}, convert(err)
	}
	return registry.Lease{ID: registry.LeaseID(res.ID), TTL: time.Duration(res.TTL) * time.Second}, nil
}

// Revoke implements registry.Store.
func (s *Store) Revoke(ctx context.Context, id registry.LeaseID) error {
	_, err := s.client.Revoke(ctx, clientv3.LeaseID(id))
	return convert(err)
}

// Remaining implements registry.Store.
func (s *Store) Remaining(ctx context.Context, id registry.LeaseID) (time.Duration, error) {
	res, err := s.client.TimeToLive(ctx, clientv3.LeaseID(id))
	if err != nil {
		return 0, convert(err)
	}
	if res.TTL < 0 {
		return 0, fmt.Errorf("lease %s: %w", registry.LeaseText(id), registry.ErrLeaseNotFound)
	}
	return time.Duration(res.TTL) * time.Second, nil
}

// KeepAlive implements registry.Store, on the stream itself: the client's own
// keep-alive hides when the request behind an answer was sent.
func (s *Store) KeepAlive(ctx context.Context, id registry.LeaseID) (registry.KeepAliver, error) {
	stream, err := s.leases.LeaseKeepAlive(clientv3.WithRequireLeader(ctx))
	if err != nil {
		return nil, convert(err)
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

// convert maps etcd's errors to the registry's.
func convert(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(rpctypes.Error(err), rpctypes.ErrCompacted):
		return fmt.Errorf("%w: %w", registry.ErrCompacted, err)
	case errors.Is(rpctypes.Error(err), rpctypes.ErrLeaseNotFound):
		return fmt.Errorf("%w: %w", registry.ErrLeaseNotFound, err)
	}
	return err
}
