package broker

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

// A count is written beside the topic that it is about, and nowhere else: one that
// comes late must not stand for a topic that is gone, or another of its name.
func TestCountStandsBesideItsTopic(t *testing.T) {
	st := memory.New()
	d := &Daemon{cfg: Config{ID: 1}, log: slog.New(slog.DiscardHandler), store: st}
	d.members = newMembership(d)
	s, err := registry.OpenSession(t.Context(), st, registry.SessionOptions{TTL: registry.MaxTTL})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close(t.Context())
	create := func() int64 {
		_, err := registry.CreateTopic(t.Context(), st, "", registry.TopicSpec{Name: "t", Partitions: 2, ReplicationFactor: 1}, []int32{1})
		if err != nil {
			t.Fatal(err)
		}
		return st.Revision()
	}
	count := func(want string) {
		t.Helper()
		if err := d.members.writeCounts(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		kv, _, err := registry.GetKey(t.Context(), st, "/brokers/topics/t/1")
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		if kv != nil {
			got = string(kv.Value)
		}
		if got != want {
			t.Fatalf("count is %q, want %q", got, want)
		}
	}
	first := create()
	d.members.setCount("t", 2, first)
	count("2")
	if _, err := registry.DeleteTopic(t.Context(), st, "", "t", registry.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	d.members.setCount("t", 3, first)
	count("")
	second := create()
	d.members.setCount("t", 4, first)
	count("")
	d.members.setCount("t", 2, second)
	count("2")
	d.members.setCount("t", 0, 0)
	count("")
}

// What a daemon that was killed has left in the registry does not hold up its next run,
// which goes on at once under a lease of its own, and remembers that.
func TestNextRunAfterACrash(t *testing.T) {
	st := memory.New()
	lease, err := st.Grant(t.Context(), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	left := registry.Put("/brokers/ids/1", []byte(`{"version":1,"host":"localhost","port":9092}`), lease.ID)
	if _, err := st.Txn(t.Context(), registry.Txn{Then: []registry.Op{left}}); err != nil {
		t.Fatal(err)
	}
	d := &Daemon{cfg: Config{ID: 1, SessionTimeout: registry.MaxTTL}, log: slog.New(slog.DiscardHandler), store: st, advertise: address{"localhost", 9092}}
	d.members, d.topics = newMembership(d), newTopics(d)
	d.metrics = newMetrics(d)
	if d.dir, err = openDataDir(t.TempDir(), 1); err != nil {
		t.Fatal(err)
	}
	if err := d.members.join(t.Context(), lease.ID+1); err == nil {
		t.Error("took the place of another's lease")
	}
	if err := d.members.join(t.Context(), lease.ID); err != nil {
		t.Fatal(err)
	}
	kv, _, err := registry.GetKey(t.Context(), st, "/brokers/ids/1")
	if err != nil || kv == nil || kv.Lease == lease.ID || kv.Lease != d.members.lease() || kv.Lease != d.dir.formerLease() {
		t.Errorf("the record is %+v, %v; the lease that is remembered is %x", kv, err, d.dir.formerLease())
	}
	if err := errors.Join(d.members.leave(), d.dir.close()); err != nil {
		t.Error(err)
	}
}

// during is a store in which something else happens while a transaction is under way.
type during struct {
	registry.Store
	do func()
}

func (s *during) Txn(ctx context.Context, t registry.Txn) (registry.TxnResult, error) {
	res, err := s.Store.Txn(ctx, t)
	if s.do != nil {
		s.do()
	}
	return res, err
}

// A count that changes while the one before is being written is written, too.
func TestCountThatChangesMeanwhile(t *testing.T) {
	st := memory.New()
	d := &Daemon{cfg: Config{ID: 1}, log: slog.New(slog.DiscardHandler)}
	m := newMembership(d)
	s, err := registry.OpenSession(t.Context(), st, registry.SessionOptions{TTL: registry.MaxTTL})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close(t.Context())
	res, err := st.Txn(t.Context(), registry.Txn{Then: []registry.Op{registry.Put("/brokers/topics/t", []byte("{}"), 0)}})
	if err != nil {
		t.Fatal(err)
	}
	d.store = &during{st, func() { m.setCount("t", 3, res.Revision) }}
	m.setCount("t", 2, res.Revision)
	for range 2 {
		if err := m.writeCounts(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	kv, _, err := registry.GetKey(t.Context(), st, "/brokers/topics/t/1")
	if err != nil || kv == nil || string(kv.Value) != "3" || len(m.dirty) != 0 {
		t.Errorf("%+v, %v, dirty %v", kv, err, m.dirty)
	}
}
