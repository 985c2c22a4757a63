package etcd

import (
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"

	"github.com/muster-io/muster/registry"
)

// The database is full: what is written is refused with words that say what to do,
// sessions live on, and after it was cleaned up all goes on.
func TestNoSpace(t *testing.T) {
	t.Parallel()
	endpoint := plainServer(t, func(c *embed.Config) { c.QuotaBackendBytes = 4 << 20 })
	st, err := Open(t.Context(), Options{Endpoints: []string{endpoint}})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	s, err := registry.OpenSession(t.Context(), st, registry.SessionOptions{TTL: 10 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer endSession(t, s)
	reg, err := registry.Register(t.Context(), st, s, "/full/ids/a", nil)
	if err != nil {
		t.Fatal(err)
	}
	m := newMirror(t, st, registry.ViewOptions{}, "/full/")
	filler := registry.Put("/filler", make([]byte, 256<<10), 0)
	writes := 0
	for err == nil && writes < 200 {
		_, err = st.Txn(within(t, longEnough), registry.Txn{Then: []registry.Op{filler}})
		writes++
	}
	t.Logf("after %d writes of 256 KiB: %v", writes, err)
	saysWhatToDo(t, err)
	began := time.Now()
	_, err = st.Grant(within(t, longEnough), time.Minute)
	saysWhatToDo(t, err)
	if took := time.Since(began); took > longEnough/2 {
		t.Errorf("a lease was refused after %s", took)
	}
	select {
	case <-s.Done():
		t.Fatalf("the session is lost: %v", s.Err())
	case <-time.After(s.TTL() * 3 / 2):
	}
	rev := txn(t, st, registry.Delete("/filler")) // to delete is still possible
	c := st.Client()
	if _, err := c.Compact(within(t, longEnough), rev, clientv3.WithCompactPhysical()); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Defragment(within(t, longEnough), endpoint); err != nil {
		t.Fatal(err)
	}
	if _, err := c.AlarmDisarm(within(t, longEnough), &clientv3.AlarmMember{}); err != nil {
		t.Fatal(err)
	}
	rev = put(t, st, "/full/b", "")
	m.reaches(longEnough, rev)
	m.equalsList()
	if kv := m.keys()[reg.Key]; !s.Alive() || kv.CreateRevision != reg.Revision {
		t.Errorf("the session is alive: %t; its key is %+v", s.Alive(), kv)
	}
	if l, err := st.Grant(within(t, longEnough), time.Minute); err != nil {
		t.Errorf("a lease after the alarm: %+v, %v", l, err)
	}
}

func saysWhatToDo(t *testing.T, err error) {
	t.Helper()
	for _, word := range []string{"NOSPACE", "compact", "defrag", "disarm"} {
		if err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("error %v; want one that says %s", err, word)
		}
	}
}
