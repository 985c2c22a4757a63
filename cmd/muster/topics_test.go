package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/muster-io/muster/broker"
	"github.com/muster-io/muster/internal/freeport"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/etcd"
)

// daemon runs a broker and returns how a tool finds its registry.
func daemon(t *testing.T) (endpoint string) {
	t.Helper()
	d, err := broker.Start(t.Context(), broker.Config{ID: 1, DataDir: t.TempDir(), Listen: "127.0.0.1:0",
		EtcdListenClient: "http://" + freeport.Must(), EtcdListenPeer: "http://" + freeport.Must()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d.EtcdEndpoints()[0]
}

// The life of a topic by commands: what each prints, says beside and returns.
func TestTopicCommands(t *testing.T) {
	endpoint := daemon(t)
	for _, c := range []struct {
		args           string
		status         int
		stdout, stderr string // substrings
	}{
		{"create orders --partitions 2 --config retention.ms=1000 --config segment.bytes=1048576", 0, "created topic orders with 2 partitions", "setting=retention.ms"},
		{"create pay.ments", 0, "", ""},
		{"create pay_ments", 1, "", "differs only by . and _ from another topic's, pay.ments"},
		{"create x --config retention.hours=1", 2, "", `"retention.hours": no such setting`},
		{"create x --config retention.ms=soon", 2, "", `retention.ms="soon": want a number`},
		{"describe orders", 0, "retention.ms=1000 (stored, not honoured yet)\nsegment.bytes=1048576\n", ""},
		{"alter orders", 2, "", "nothing to alter"},
		{"alter orders --partitions 0", 2, "", "want 1 to 20000"},
		{"alter orders --partitions 20001", 2, "", "want 1 to 20000"},
		{"alter orders --partitions 2", 1, "", "can only grow: it has 2, and 2 were asked for"},
		{"alter nosuch --partitions 2", 1, "", "no topic nosuch"},
		{"alter orders --config a=b", 2, "", `"a": no such setting`},
		{"alter orders --config flush.ms=1 --delete-config flush.ms", 2, "", "both name flush.ms"},
		{"alter orders --delete-config flush.ms", 1, "", `"flush.ms": it is not set`},
		{"alter orders --partitions 5 --config flush.ms=1 --delete-config retention.ms", 0,
			"topic orders now has 5 partitions, 3 more than before\nset flush.ms=1\nremoved retention.ms\n", "setting=flush.ms"},
		{"delete", 2, "", "want the names of topics"},
		{"delete nosuch", 1, "", "no topic nosuch"},
		{"delete __consumer_offsets", 1, "", "internal topic cannot be deleted"},
	} {
		status, stdout, stderr := call(t, append([]string{"topics"}, append(strings.Fields(c.args), "--etcd-endpoints", endpoint)...)...)
		if status != c.status || !strings.Contains(stdout, c.stdout) || !strings.Contains(stderr, c.stderr) {
			t.Errorf("%s: status %d, stdout %q, stderr %q", c.args, status, stdout, stderr)
		}
	}
	st, err := etcd.Open(t.Context(), etcd.Options{Endpoints: []string{endpoint}})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	group := registry.Root("").Group("g")
	p := registry.Partition{Topic: "orders", Home: 1}
	if _, err := st.Txn(t.Context(), registry.Txn{Then: []registry.Op{
		registry.Put(group.Owner(p), []byte("c-0"), 0), registry.Put(group.Offset(p), []byte("1"), 0),
		registry.Put("/brokers/topics/half", []byte(`{"version":1,"partitions":{"0":[1],"1":[8]}}`), 0),
	}}); err != nil {
		t.Fatal(err)
	}
	_, stdout, _ := call(t, "topics", "describe", "half", "--etcd-endpoints", endpoint)
	if !strings.Contains(stdout, "broker 8 is down\n") {
		t.Error(stdout)
	}
	var d topicDescription
	fromJSON(t, &d, "topics", "describe", "half", "-o", "json", "--etcd-endpoints", endpoint)
	if len(d.BrokersDown) != 1 || len(d.Partitions) != 2 || len(d.Partitions[0].Offline) != 0 || d.Partitions[1].Offline[0] != 8 {
		t.Errorf("%+v", d)
	}
	var deleted []deletedTopic
	fromJSON(t, &deleted, "topics", "delete", "orders", "half", "--keep-offsets", "-o", "json", "--etcd-endpoints", endpoint)
	if len(deleted) != 2 || deleted[0].Topic != "orders" || deleted[0].Partitions != 5 || deleted[0].Groups != 1 || deleted[0].Owners != 1 ||
		deleted[0].Offsets != 0 || !deleted[0].OffsetsKept || deleted[1].Partitions != 2 {
		t.Errorf("%+v", deleted)
	}
	if kv, _, err := registry.GetKey(t.Context(), st, group.Offset(p)); err != nil || kv == nil {
		t.Errorf("the offset was not kept: %v", err)
	}
	status, stdout, stderr := call(t, "topics", "delete", "pay.ments", "orders", "--etcd-endpoints", endpoint)
	if status != 1 || stdout != "deleted topic pay.ments: 1 partitions, and in 0 groups 0 owners and 0 offsets\n" || !strings.Contains(stderr, "no topic orders") {
		t.Errorf("status %d, %q, %q", status, stdout, stderr)
	}
}

func fromJSON(t *testing.T, into any, args ...string) {
	t.Helper()
	status, stdout, stderr := call(t, args...)
	if status != 0 {
		t.Fatalf("%v: status %d, %s", args, status, stderr)
	}
	if err := json.Unmarshal([]byte(stdout), into); err != nil {
		t.Fatalf("%v: %v", args, err)
	}
}
