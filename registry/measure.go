package registry

import (
	"context"
	"time"
)

// CallKind names a method of Store.
type CallKind int

const (
	CallTxn CallKind = iota
	CallRange
	CallWatch // Watch and WatchKey
	CallProgress
	CallGrant
	CallRevoke
	CallKeepAlive
	CallRemaining

	// CallKinds is how many kinds there are.
	CallKinds
)

func (k CallKind) String() string {
	return [CallKinds]string{"txn", "range", "watch", "progress", "grant", "revoke", "keepalive", "remaining"}[k]
}

// Call describes a call of a Store when it is done. A watch is done when it ends,
// with the error that ended it, or that of its context.
type Call struct {
	Kind     CallKind
	Duration time.Duration // on the store's clock
	Err      error
	Refused  bool // a transaction ran its Else branch: a condition did not hold
}

// Measured is st, with observe called after each call, by the goroutine that made
// it, or in the case of a watch by one of its own. It must be quick and safe for
// concurrent use. Of a keep-alive stream only the opening is a call.
func Measured(st Store, observe func(Call)) Store { return &measured{store: st, observe: observe} }

// measured names the Store, in place of embedding it, so that a method that is new
// to the interface does not slip through unmeasured.
type measured struct {
	store   Store
	observe func(Call)
}

func (m *measured) Now() time.Duration { return m.store.Now() }

// measure runs one call and tells of it.
func measure[T any](m *measured, kind CallKind, call func() (T, error)) (T, error) {
	began := m.Now()
	res, err := call()
	m.observe(Call{Kind: kind, Duration: m.Now() - began, Err: err})
	return res, err
}

// measureError is measure for a call that returns nothing else.
func measureError(m *measured, kind CallKind, call func() error) error {
	_, err := measure(m, kind, func() (struct{}, error) { return struct{}{}, call() })
	return err
}

func (m *measured) Txn(ctx context.Context, t Txn) (TxnResult, error) {
	began := m.Now()
	res, err := m.store.Txn(ctx, t)
	m.observe(Call{Kind: CallTxn, Duration: m.Now() - began, Err: err, Refused: err == nil && !res.Succeeded})
	return res, err
}

func (m *measured) Range(ctx context.Context, r RangeRequest) (RangeResult, error) {
	return measure(m, CallRange, func() (RangeResult, error) { return m.store.Range(ctx, r) })
}

func (m *measured) Watch(ctx context.Context, prefix string, from int64) <-chan WatchResponse {
	return m.watch(ctx, m.store.Watch(ctx, prefix, from))
}

func (m *measured) WatchKey(ctx context.Context, key string, from int64) <-chan WatchResponse {
	return m.watch(ctx, m.store.WatchKey(ctx, key, from))
}

// watch hands on what a watch brings, to see how it ends.
func (m *measured) watch(ctx context.Context, in <-chan WatchResponse) <-chan WatchResponse {
	out := make(chan WatchResponse)
	go func() {
		defer close(out)
		began := m.Now()
		var err error
		for r := range in {
			if r.Err != nil {
				err = r.Err
			}
			select {
			case out <- r:
			case <-ctx.Done(): // its reader may be gone; the Store closes in soon
			}
		}
		if err == nil {
			err = ctx.Err()
		}
		m.observe(Call{Kind: CallWatch, Duration: m.Now() - began, Err: err})
	}()
	return out
}

func (m *measured) RequestProgress(ctx context.Context) error {
	return measureError(m, CallProgress, func() error { return m.store.RequestProgress(ctx) })
}

func (m *measured) Grant(ctx context.Context, ttl time.Duration) (Lease, error) {
	return measure(m, CallGrant, func() (Lease, error) { return m.store.Grant(ctx, ttl) })
}

func (m *measured) Revoke(ctx context.Context, id LeaseID) error {
	return measureError(m, CallRevoke, func() error { return m.store.Revoke(ctx, id) })
}

func (m *measured) KeepAlive(ctx context.Context, id LeaseID) (KeepAliver, error) {
	return measure(m, CallKeepAlive, func() (KeepAliver, error) { return m.store.KeepAlive(ctx, id) })
}

func (m *measured) Remaining(ctx context.Context, id LeaseID) (time.Duration, error) {
	return measure(m, CallRemaining, func() (time.Duration, error) { return m.store.Remaining(ctx, id) })
}
