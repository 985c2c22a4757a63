package etcd

import (
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/muster-io/muster/registry"
)

// Close waits for what the Store has begun, the questions to members that keep silent
// included, and nothing is left.
func TestCloseLeavesNothing(t *testing.T) {
	good := open(t).Client().Endpoints()[0]
	left := func() (list []string) {
		buf := make([]byte, 1<<22)
		for g := range strings.SplitSeq(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
			if strings.Contains(g, "etcd.(*conns)") || strings.Contains(g, "clientv3.(*watch") {
				list = append(list, g)
			}
		}
		return list
	}
	before := len(left())
	for range 5 {
		st, err := Open(t.Context(), Options{Endpoints: []string{good, silentEndpoint(t), deadEndpoint()}})
		if err != nil {
			t.Fatal(err)
		}
		s, err := registry.OpenSession(t.Context(), st, registry.SessionOptions{})
		if err != nil {
			t.Fatal(err)
		}
		v := openView(t, st, registry.ViewOptions{}, "/x/")
		c, _ := st.conns.use(t.Context())
		st.conns.tell(connEvent{conn: c, lost: true}) // all are asked now
		v.Close()
		if err := s.Close(within(t, 5*time.Second)); err != nil {
			t.Error(err)
		}
		began := time.Now()
		st.Close()
		if took := time.Since(began); took > 3*time.Second {
			t.Errorf("Close took %s", took)
		}
	}
	for deadline := time.Now().Add(10 * time.Second); len(left()) > before; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d goroutines of the Stores, %d before:\n%s", len(left()), before, strings.Join(left(), "\n\n"))
		}
	}
}
