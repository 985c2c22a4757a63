package storetest

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/muster-io/muster/registry"
)

// side is one of two stores that are compared: it puts its own revisions and leases
// in the place of the common numbers, and spells answers in the common numbers.
type side struct {
	name   string
	st     registry.Store
	start  int64 // revision at which the comparison began
	now    int64 // newest revision heard of
	leases []registry.LeaseID
	taps   map[int]*tap
	log    *tap  // everything under the prefix, from the start
	broken error // what no store may do, whatever the other one does
}

// neverGranted is the number of a lease that no store has.
const neverGranted = -1

func newSide(ctx context.Context, name string, st registry.Store, prefix string) (*side, error) {
	res, err := st.Range(ctx, registry.RangeRequest{Key: prefix, Prefix: true})
	if err != nil {
		return nil, err
	}
	if len(res.KVs) != 0 {
		return nil, fmt.Errorf("store %s is not empty under %s", name, prefix)
	}
	s := &side{name: name, st: st, start: res.Revision, now: res.Revision, taps: map[int]*tap{}}
	s.log = s.open(ctx, tapInfo{key: prefix, from: 1})
	return s, nil
}

func (s *side) close() {
	s.log.close()
	for _, t := range s.taps {
		t.close()
	}
}

// ownRevision: 0 has a meaning of its own, and stays.
func (s *side) ownRevision(n int64) int64 {
	if n == 0 {
		return 0
	}
	return s.start + n
}

func (s *side) ownLease(n int) registry.LeaseID {
	switch {
	case n == 0:
		return 0
	case n == neverGranted || n > len(s.leases):
		return 0x7fff_0000_0000
	}
	return s.leases[n-1]
}

func (s *side) ownTxn(t registry.Txn) registry.Txn {
	var own registry.Txn
	for _, c := range t.If {
		switch c.Field {
		case registry.FieldLease:
			c.Number = int64(s.ownLease(int(c.Number)))
		case registry.FieldCreateRevision, registry.FieldModRevision:
			c.Number = s.ownRevision(c.Number)
		}
		own.If = append(own.If, c)
	}
	own.Then, own.Else = s.ownOps(t.Then), s.ownOps(t.Else)
	return own
}

func (s *side) ownOps(ops []registry.Op) (own []registry.Op) {
	for _, op := range ops {
		op.Lease = s.ownLease(int(op.Lease))
		if op.Kind == registry.OpTxn {
			op = registry.Nested(s.ownTxn(*op.Txn))
		}
		own = append(own, op)
	}
	return own
}

// look returns the newest revision.
func (s *side) look(ctx context.Context) int64 {
	res, err := s.st.Range(ctx, registry.RangeRequest{Key: s.log.key})
	if err != nil {
		s.broken = err
	}
	s.now = max(s.now, res.Revision)
	return s.now - s.start
}

func (s *side) scan(ctx context.Context, r registry.RangeRequest) string {
	r.Revision = s.ownRevision(r.Revision)
	res, err := s.st.Range(ctx, r)
	if err != nil {
		return kind(err)
	}
	s.now = max(s.now, res.Revision)
	var kvs []string
	for i, kv := range res.KVs {
		if r.ByCreated && i > 0 && kv.CreateRevision < res.KVs[i-1].CreateRevision {
			s.broken = fmt.Errorf("%s is older than what stands before it", kv.Key)
		}
		kvs = append(kvs, s.spellKV(kv))
	}
	if r.ByCreated {
		// Among those of one revision any may come first, and any be left out.
		slices.Sort(kvs)
		if res.More {
			kvs = nil
			for _, kv := range res.KVs {
				kvs = append(kvs, fmt.Sprint(s.count(kv.CreateRevision)))
			}
		}
	}
	return fmt.Sprintf("%s at %d, more: %t", strings.Join(kvs, " "), s.count(res.Revision), res.More)
}

// count is a revision as the comparison counts it.
func (s *side) count(revision int64) int64 {
	if revision == 0 {
		return 0
	}
	return revision - s.start
}

func (s *side) spellKV(kv registry.KV) string {
	return fmt.Sprintf("%q=%q(%d,%d,%s)", kv.Key, kv.Value, s.count(kv.CreateRevision), s.count(kv.ModRevision), s.spellLease(kv.Lease))
}

func (s *side) spellLease(id registry.LeaseID) string {
	if id == 0 {
		return "-"
	}
	return fmt.Sprintf("lease %d", slices.Index(s.leases, id)+1)
}

func (s *side) spellEvent(e registry.Event) string {
	text := s.spellKV(e.KV)
	if e.Deleted {
		text = "deleted " + text
	}
	if e.Previous != nil {
		text += " was " + s.spellKV(*e.Previous)
	}
	return text
}

func (s *side) spellResult(res registry.TxnResult) string {
	var items []string
	for _, item := range res.Items {
		switch {
		case item.Txn != nil:
			items = append(items, s.spellResult(*item.Txn))
		default:
			var kvs []string
			for _, kv := range item.KVs {
				kvs = append(kvs, s.spellKV(kv))
			}
			items = append(items, fmt.Sprintf("%d[%s]", item.Deleted, strings.Join(kvs, " ")))
		}
	}
	return fmt.Sprintf("{%t at %d: %s}", res.Succeeded, s.count(res.Revision), strings.Join(items, ", "))
}

func spellTxn(t registry.Txn) string {
	var conds []string
	for _, c := range t.If {
		conds = append(conds, fmt.Sprintf("%q%s %s %s %d %q", c.Key, star(c.Prefix),
			[...]string{"create", "mod", "lease", "value"}[c.Field], [...]string{"=", "!=", "<", ">"}[c.Relation], c.Number, c.Value))
	}
	return fmt.Sprintf("if(%s) then(%s) else(%s)", strings.Join(conds, " and "), spellOps(t.Then), spellOps(t.Else))
}

func spellOps(ops []registry.Op) string {
	var out []string
	for _, op := range ops {
		switch op.Kind {
		case registry.OpPut:
			out = append(out, fmt.Sprintf("put %q=%q lease %d", op.Key, op.Value, op.Lease))
		case registry.OpTxn:
			out = append(out, spellTxn(*op.Txn))
		default:
			out = append(out, fmt.Sprintf("%s %q%s", [...]string{registry.OpDelete: "delete", registry.OpGet: "get"}[op.Kind], op.Key, star(op.Prefix)))
		}
	}
	return strings.Join(out, "; ")
}

func star(prefix bool) string {
	if prefix {
		return "*"
	}
	return ""
}
