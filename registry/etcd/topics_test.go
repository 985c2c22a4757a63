package etcd

import (
	"fmt"
	"testing"
	"time"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/storetest"
)

// requestLimit is what etcd takes in one request unless told otherwise.
const requestLimit = 1.5 * (1 << 20)

// The largest topic fits etcd's limits, made at once or grown, on brokers whose
// ids are as long as they can be; and it can be deleted with all of its owners.
func TestLargestTopic(t *testing.T) {
	st := open(t)
	root := registry.Root(storetest.Prefix(t)[:len(storetest.Prefix(t))-1])
	ctx := within(t, 8*time.Minute)
	brokers := []int32{2147483645, 2147483646, 2147483647}
	took := func(what string, began time.Time) { t.Logf("%s: %.2f s", what, time.Since(began).Seconds()) }
	began := time.Now()
	_, err := registry.CreateTopic(ctx, st, root, registry.TopicSpec{Name: "large", Partitions: registry.MaxPartitions, ReplicationFactor: 1}, brokers)
	if err != nil {
		t.Fatal(err)
	}
	took("create 20,000 partitions", began)
	if _, err := registry.CreateTopic(ctx, st, root, registry.TopicSpec{Name: "grown", Partitions: 1, ReplicationFactor: 1}, brokers); err != nil {
		t.Fatal(err)
	}
	began = time.Now()
	rec, err := registry.AddPartitions(ctx, st, root, "grown", registry.MaxPartitions, brokers)
	if err != nil {
		t.Fatal(err)
	}
	took("add 19,999 partitions", began)
	for _, topic := range []string{"large", "grown"} {
		kv, _, err := registry.GetKey(ctx, st, root.Topic(topic))
		if err != nil || kv == nil {
			t.Fatal(err)
		}
		t.Logf("the record of %s has %d bytes, %.0f %% of what a request may have", topic, len(kv.Value), 100*float64(len(kv.Value))/requestLimit)
		if float64(len(kv.Value)) > 0.8*requestLimit {
			t.Errorf("that leaves no room")
		}
		kvs, _, err := registry.List(ctx, st, root.Topic(topic)+"/", 0)
		if err != nil || len(kvs) != registry.MaxPartitions {
			t.Errorf("%d states, %v", len(kvs), err)
		}
	}
	l, err := st.Grant(ctx, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	group := root.Group("g")
	for list := rec.List("grown"); len(list) > 0; {
		n := min(len(list), registry.MaxNested/2)
		var txn registry.Txn
		for _, p := range list[:n] {
			txn.Then = append(txn.Then, registry.Put(group.Owner(p), []byte("c-0"), l.ID), registry.Put(group.Offset(p), []byte("1"), 0))
		}
		list = list[n:]
		if _, err := st.Txn(ctx, txn); err != nil {
			t.Fatal(err)
		}
	}
	began = time.Now()
	d, err := registry.DeleteTopic(ctx, st, root, "grown", registry.DeleteOptions{})
	if err != nil || d.Owners != registry.MaxPartitions || d.Offsets != registry.MaxPartitions || d.Partitions != registry.MaxPartitions {
		t.Fatalf("%+v, %v", d, err)
	}
	took(fmt.Sprintf("delete it with %d owners and offsets", d.Owners), began)
	if _, err := registry.DeleteTopic(ctx, st, root, "large", registry.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	kvs, _, err := registry.List(ctx, st, root.Prefix(), 0)
	if err != nil || len(kvs) > 0 {
		t.Errorf("%d keys are left, %v", len(kvs), err)
	}
	if err := st.Revoke(ctx, l.ID); err != nil {
		t.Error(err)
	}
}
