package storetest

import (
	"context"
	"testing"
	"time"

	"github.com/muster-io/muster/registry"
)

func leaseCases() []Case {
	return []Case{
		{"lease/runs out", leaseRunsOut},
		{"lease/renewed", leaseRenewed},
		{"lease/revoked", leaseRevoked},
		{"lease/dropped by a put", leaseDropped},
	}
}

// short is a time to live that is waited for, and long enough for what comes before its
// end on a machine that stands still for seconds.
const short = 5 * time.Second

func leaseRunsOut(t *testing.T, st registry.Store, prefix string) {
	began := st.Now()
	l, err := st.Grant(within(t), short)
	if err != nil || l.TTL < short || l.ID == 0 {
		t.Fatalf("granted %+v, error %v", l, err)
	}
	rev := do(t, st, registry.Put(prefix+"a", []byte("1"), l.ID), registry.Put(prefix+"b", []byte("2"), l.ID), registry.Put(prefix+"c", nil, 0)).Revision
	if kv := get(t, st, prefix+"a"); kv.Lease != l.ID {
		t.Fatalf("key is bound to %d, want %d", kv.Lease, l.ID)
	}
	if left, err := st.Remaining(within(t), l.ID); err != nil || left <= 0 || left > l.TTL {
		t.Fatalf("%s left of %s, error %v", left, l.TTL, err)
	}
	events := watch(t, st, prefix, rev+1).events(2) // events has them together: one revision
	for i, e := range events {
		if !e.Deleted || e.ModRevision != events[0].ModRevision || e.Key != prefix+string(rune('a'+i)) || e.Previous == nil || e.Previous.Lease != l.ID {
			t.Fatalf("event %+v", e)
		}
	}
	if lived := st.Now() - began; lived < l.TTL {
		t.Fatalf("the lease lived %s, less than its %s", lived, l.TTL)
	}
	if get(t, st, prefix+"c") == nil {
		t.Fatal("a key without lease is gone")
	}
	_, err = st.Remaining(within(t), l.ID)
	wantErr(t, err, registry.ErrLeaseNotFound)
}

func leaseRenewed(t *testing.T, st registry.Store, _ string) {
	l, err := st.Grant(within(t), short)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ka, err := st.KeepAlive(ctx, l.ID)
	if err != nil {
		t.Fatal(err)
	}
	renew := func() time.Duration {
		t.Helper()
		if err := ka.Send(); err != nil {
			t.Fatal(err)
		}
		ttl, err := ka.Recv()
		if err != nil {
			t.Fatal(err)
		}
		return ttl
	}
	tick := time.NewTicker(l.TTL / 4)
	defer tick.Stop()
	for range 6 { // half a time to live longer than it would have lived
		<-tick.C
		if ttl := renew(); ttl != l.TTL {
			t.Fatalf("renewed for %s, want %s", ttl, l.TTL)
		}
	}
	if err := st.Revoke(within(t), l.ID); err != nil {
		t.Fatal(err)
	}
	if ttl := renew(); ttl > 0 {
		t.Fatalf("a lease that is gone was renewed for %s", ttl)
	}
	cancel()
	if _, err := ka.Recv(); err == nil {
		t.Fatal("the stream did not end with its context")
	}
}

func leaseRevoked(t *testing.T, st registry.Store, prefix string) {
	lease := grant(t, st, patience)
	rev := do(t, st, registry.Put(prefix+"a", nil, lease), registry.Put(prefix+"b", nil, lease)).Revision
	w := watch(t, st, prefix, rev+1)
	if err := st.Revoke(within(t), lease); err != nil {
		t.Fatal(err)
	}
	if events := w.events(2); !events[0].Deleted || events[0].ModRevision != events[1].ModRevision {
		t.Fatalf("got %v", spell(events))
	}
	wantErr(t, st.Revoke(within(t), lease), registry.ErrLeaseNotFound)
	// A deletion of one's own key does not disturb the lease.
	lease = grant(t, st, patience)
	do(t, st, registry.Put(prefix+"a", nil, lease))
	do(t, st, registry.Delete(prefix+"a"))
	put(t, st, prefix+"a", "another's")
	if err := st.Revoke(within(t), lease); err != nil {
		t.Fatal(err)
	}
	if get(t, st, prefix+"a") == nil {
		t.Fatal("a revocation took a key that was no longer bound to the lease")
	}
}

// case 61: what would happen if some code of ours put an ephemeral key again. None
// does: Register, Claim and Release (claim cases) only create and delete.
func leaseDropped(t *testing.T, st registry.Store, prefix string) {
	one, two := grant(t, st, patience), grant(t, st, patience)
	do(t, st, registry.Put(prefix+"dropped", nil, one), registry.Put(prefix+"moved", nil, one), registry.Put(prefix+"kept", nil, one))
	do(t, st, registry.Put(prefix+"dropped", nil, 0), registry.Put(prefix+"moved", nil, two), registry.Put(prefix+"kept", nil, one))
	for name, want := range map[string]registry.LeaseID{"dropped": 0, "moved": two, "kept": one} {
		if kv := get(t, st, prefix+name); kv.Lease != want {
			t.Errorf("%s is bound to %d, want %d", name, kv.Lease, want)
		}
	}
	if err := st.Revoke(within(t), one); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{"dropped": true, "moved": true, "kept": false} {
		if there := get(t, st, prefix+name) != nil; there != want {
			t.Errorf("after the lease %s is there: %t, want %t", name, there, want)
		}
	}
}
