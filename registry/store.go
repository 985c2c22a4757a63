package registry

import (
	"context"
	"errors"
	"strings"
	"time"
)

// LeaseID names a lease of the store; 0 is no lease.
type LeaseID int64

// MaxTxnOps is how many operations one transaction may hold: etcd's default
// limit, which counts each level of nesting on top of the one around it.
const MaxTxnOps = 128

// MaxNested is how many nested transactions of one operation each fit into one
// transaction, with room for its guard.
const MaxNested = MaxTxnOps - 8

// Store is what the registry needs of the key-value store that holds it: etcd,
// or the twin in memory that tests and simulations use. It is safe for
// concurrent use. An error of a call whose reply was lost does not tell whether
// the call took effect.
type Store interface {
	// Txn runs t as one atomic step. Conditions, those of nested transactions too,
	// are decided on the state before it. No key may be put twice, or put and deleted.
	Txn(ctx context.Context, t Txn) (TxnResult, error)

	// Range reads keys in byte order.
	Range(ctx context.Context, r RangeRequest) (RangeResult, error)

	// Watch sends what changes under prefix from revision from (at least 1) on, whole
	// revisions at a time and in order. All watches of a Store share one stream. The channel
	// is closed when ctx ends, or after a response with Err set, of which
	// ErrCompacted says that history before CompactRevision is gone. The reader
	// must not stop reading before ctx ends.
	Watch(ctx context.Context, prefix string, from int64) <-chan WatchResponse

	// WatchKey is Watch for one key, from the present on. Where the store has come to
	// from already, it begins with how the key stands: as it is, if it was written
	// since, or deleted if it is not there. What lies between is left out, and may
	// have been compacted. It is on a stream of its own and takes no part in progress:
	// a member follows many keys, and each new watch would hold up the progress of all.
	WatchKey(ctx context.Context, key string, from int64) <-chan WatchResponse

	// RequestProgress asks every Watch of the Store to say how far it has come,
	// with a response that has Progress set. It may be ignored while a watch lags.
	RequestProgress(ctx context.Context) error

	// Grant makes a lease. The store may give more time than was asked for.
	Grant(ctx context.Context, ttl time.Duration) (Lease, error)

	// Revoke ends a lease and deletes its keys. A lease that is gone already is
	// ErrLeaseNotFound.
	Revoke(ctx context.Context, id LeaseID) error

	// KeepAlive opens a stream on which a lease is renewed. It ends with ctx.
	KeepAlive(ctx context.Context, id LeaseID) (KeepAliver, error)

	// Remaining tells how long a lease lives on if nobody renews it.
	Remaining(ctx context.Context, id LeaseID) (time.Duration, error)

	// Now is a clock for lease deadlines: it runs on while the machine is
	// suspended and never steps.
	Now() time.Duration
}

// KeepAliver renews one lease. Recv answers the calls of Send in order; Send and
// Recv may be called from two goroutines.
type KeepAliver interface {
	Send() error
	// Recv returns the time to live that the oldest unanswered Send was granted;
	// 0 or less means that the lease is gone.
	Recv() (time.Duration, error)
}

// Lease is a lease as granted.
type Lease struct {
	ID  LeaseID
	TTL time.Duration
}

// KV is a key at one revision.
type KV struct {
	Key            string
	Value          []byte
	CreateRevision int64
	ModRevision    int64
	Lease          LeaseID
}

// RangeRequest reads Key, or all keys that begin with Key if Prefix is set.
type RangeRequest struct {
	Key       string
	Prefix    bool
	After     string // with Prefix: only keys after this one
	Revision  int64  // 0 is now
	Limit     int64  // 0 is all
	ByCreated bool   // oldest key first, in place of byte order; of one revision in any order
	KeysOnly  bool   // without values and leases: some versions of etcd do not tell those
}

// RangeResult holds the keys found and the revision of the store that was read
// (the newest one, even if an older one was asked for).
type RangeResult struct {
	Revision int64
	KVs      []KV
	More     bool
}

// Event is one change of a key.
type Event struct {
	KV            // for a deletion: the key and the revision of the deletion
	Deleted  bool //
	Previous *KV  // before the change, where the store still knew it
}

// WatchResponse is a step of a watch: all its events up to Revision have been
// sent once it arrives.
type WatchResponse struct {
	Revision        int64
	Events          []Event
	Progress        bool
	Err             error
	CompactRevision int64
}

// Errors of a Store that callers branch on.
var (
	// ErrCompacted ends a watch, or refuses a range, whose revision was compacted.
	ErrCompacted = errors.New("revision is compacted")
	// ErrLeaseNotFound refuses a write or a revocation under a lease that is gone.
	ErrLeaseNotFound = errors.New("lease not found")
	// ErrPermission refuses what the user of the store may not do. Trying again is in
	// vain until somebody grants it.
	ErrPermission = errors.New("the store's user lacks a permission")
)

// Field is the property of a key that a condition compares. For a key that does
// not exist revisions and lease are 0.
type Field int

const (
	FieldCreateRevision Field = iota
	FieldModRevision
	FieldLease
	FieldValue
)

// Relation is how a condition compares.
type Relation int

const (
	Equal Relation = iota
	NotEqual
	Less
	Greater
)

// Cond is a condition of a transaction: on one key, or on every key that begins
// with Key if Prefix is set.
type Cond struct {
	Key      string
	Prefix   bool
	Field    Field
	Relation Relation
	Number   int64  // for revisions and leases
	Value    []byte // for values
}

// Absent holds if there is no such key.
func Absent(key string) Cond { return CreatedAt(key, 0) }

// CreatedAt holds if the key was created at exactly that revision and has
// existed since: its fencing token.
func CreatedAt(key string, revision int64) Cond {
	return Cond{Key: key, Field: FieldCreateRevision, Number: revision}
}

// ModifiedAt holds if the key was last written at exactly that revision.
func ModifiedAt(key string, revision int64) Cond {
	return Cond{Key: key, Field: FieldModRevision, Number: revision}
}

// HeldBy holds if the key is bound to that lease.
func HeldBy(key string, lease LeaseID) Cond {
	return Cond{Key: key, Field: FieldLease, Number: int64(lease)}
}

// UnmodifiedSince holds if no key that begins with prefix was written after that
// revision. Deleted keys are not seen.
func UnmodifiedSince(prefix string, revision int64) Cond {
	return Cond{Key: prefix, Prefix: true, Field: FieldModRevision, Relation: Less, Number: revision + 1}
}

// OpKind tells what an operation does.
type OpKind int

const (
	OpPut OpKind = iota
	OpDelete
	OpGet
	OpTxn
)

// Op is one operation of a transaction.
type Op struct {
	Kind   OpKind
	Key    string
	Prefix bool // delete, get: all keys that begin with Key
	Value  []byte
	Lease  LeaseID
	Txn    *Txn
}

// Put writes a key. A key that had a lease keeps it only if the lease is given again.
func Put(key string, value []byte, lease LeaseID) Op {
	return Op{Kind: OpPut, Key: key, Value: value, Lease: lease}
}

// Delete removes a key if it is there.
func Delete(key string) Op { return Op{Kind: OpDelete, Key: key} }

// Get reads a key.
func Get(key string) Op { return Op{Kind: OpGet, Key: key} }

// Nested runs a transaction inside another one.
func Nested(t Txn) Op { return Op{Kind: OpTxn, Txn: &t} }

// Txn runs Then if all conditions hold, else Else.
type Txn struct {
	If   []Cond
	Then []Op
	Else []Op
}

// TxnResult tells which branch ran and what its operations gave, in order.
type TxnResult struct {
	Revision  int64
	Succeeded bool
	Items     []TxnItem
}

// TxnItem is the result of one operation.
type TxnItem struct {
	KVs     []KV
	Deleted int64
	Txn     *TxnResult
}

// PrefixEnd returns the first key after all keys that begin with prefix.
func PrefixEnd(prefix string) string {
	end := []byte(prefix)
	for i := len(end) - 1; i >= 0; i-- {
		if end[i] < 0xff {
			end[i]++
			return string(end[:i+1])
		}
	}
	return "\x00" // no such key: to the end of the key space
}

// listPage is how many keys List reads at a time, so that no answer grows
// without bound.
const listPage = 5000

// List reads all keys under prefix at one revision: the given one, or if that
// is 0 the present one. It returns the revision it read at.
func List(ctx context.Context, st Store, prefix string, revision int64) ([]KV, int64, error) {
	return listPages(ctx, st, prefix, revision, 0, nil)
}

// listPages is List with a limit for each call of the store, if that is not 0.
func listPages(ctx context.Context, st Store, prefix string, revision int64, limit time.Duration, keep func(key string) bool) ([]KV, int64, error) {
	var kvs []KV
	req := RangeRequest{Key: prefix, Prefix: true, Revision: revision, Limit: listPage}
	for {
		res, err := rangeWithin(ctx, st, req, limit)
		if err != nil {
			return nil, 0, err
		}
		if req.Revision == 0 {
			req.Revision = res.Revision
		}
		for _, kv := range res.KVs {
			if keep == nil || keep(kv.Key) {
				kvs = append(kvs, kv)
			}
		}
		if !res.More || len(res.KVs) == 0 {
			return kvs, req.Revision, nil
		}
		req.After = res.KVs[len(res.KVs)-1].Key
	}
}

func rangeWithin(ctx context.Context, st Store, req RangeRequest, limit time.Duration) (RangeResult, error) {
	if limit == 0 {
		return st.Range(ctx, req)
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return st.Range(ctx, req)
}

// GetKey reads one key; nil if it is not there.
func GetKey(ctx context.Context, st Store, key string) (*KV, int64, error) {
	res, err := st.Range(ctx, RangeRequest{Key: key})
	if err != nil {
		return nil, 0, err
	}
	for _, kv := range res.KVs {
		if kv.Key == key {
			return &kv, res.Revision, nil
		}
	}
	return nil, res.Revision, nil
}

// under tells whether key is matched by a key or prefix of a request.
func under(key, pattern string, prefix bool) bool {
	if prefix {
		return strings.HasPrefix(key, pattern)
	}
	return key == pattern
}

// Matches tells whether the condition is about that key.
func (c Cond) Matches(key string) bool { return under(key, c.Key, c.Prefix) }

// Matches tells whether the operation is about that key.
func (o Op) Matches(key string) bool { return under(key, o.Key, o.Prefix) }
