package broker

import (
	"log/slog"
	"testing"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

// A count is written beside the topic that it is about, and nowhere else: one that
// comes late must not stand for a topic that is gone, or another of its name.
func TestCountStandsBesideItsTopic(t *testing.T) {
	st := memory.New()
	d := &Daemon{cfg: Config{ID: 1}, log: slog.New(slog.DiscardHandler), store: st}
	d.members = newMembership(d)
	s, err := registry.OpenSession(t.Context(), st, registry.SessionOptions{})
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
