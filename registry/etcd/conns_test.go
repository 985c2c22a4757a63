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
	least := time.Hour
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
		if err := s.Close(within(t, longEnough)); err != nil {
			t.Error(err)
		}
		began := time.Now()
		st.Close()
		least = min(least, time.Since(began))
	}
	// A question to a silent member takes questionLimit, each time. A Close that waits for
	// the machine does so now and then.
	if least > questionLimit/2 {
		t.Errorf("the fastest Close took %s", least)
	}
	for deadline := time.Now().Add(longEnough); len(left()) > before; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d goroutines of the Stores, %d before:\n%s", len(left()), before, strings.Join(left(), "\n\n"))
		}
	}
}
