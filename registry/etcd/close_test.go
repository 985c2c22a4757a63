package etcd

import (
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/connectivity"
)

// stuckWatcher does not close until it is let go.
type stuckWatcher struct {
	clientv3.Watcher
	letGo chan struct{}
}

func (w *stuckWatcher) Close() error {
	<-w.letGo
	return w.Watcher.Close()
}

// A client that does not come to its end does not keep the Store from closing, nor the
// connection open.
func TestCloseOfAClientThatIsStuck(t *testing.T) {
	t.Parallel()
	st, err := Open(t.Context(), Options{Endpoints: open(t).Client().Endpoints()})
	if err != nil {
		t.Fatal(err)
	}
	client := st.Client()
	w := &stuckWatcher{Watcher: client.Watcher, letGo: make(chan struct{})}
	client.Watcher = w
	defer close(w.letGo)
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		st.Close()
	}()
	select {
	case <-closed:
	case <-time.After(longEnough):
		t.Fatal("Close hangs")
	}
	if s := client.ActiveConnection().GetState(); s != connectivity.Shutdown {
		t.Errorf("the connection is %s", s)
	}
}
