package registry_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/muster-io/muster/registry"
)

// A key says what it is about, under any root, and the paths that we write are found
// again by it.
func TestLocate(t *testing.T) {
	for _, root := range []registry.Root{"", "/kc/prod"} {
		g := root.Group("a/b")
		p := registry.Partition{Topic: "orders", Home: 1, Number: 3}
		state := registry.Partition{Topic: "orders", Number: 3}
		for _, c := range []struct {
			key  string
			want registry.Location
		}{
			{root.ClusterID(), registry.Location{Kind: registry.KindClusterID}},
			{root.ProducerIDs(), registry.Location{Kind: registry.KindOpaque}},
			{root.Broker(7), registry.Location{Kind: registry.KindBroker, Broker: 7}},
			{root.Topic("orders"), registry.Location{Kind: registry.KindTopic, Topic: "orders"}},
			{root.TopicBroker("orders", 7), registry.Location{Kind: registry.KindCount, Topic: "orders", Broker: 7}},
			{root.PartitionState("orders", 3), registry.Location{Kind: registry.KindState, Topic: "orders", Partition: state}},
			{root.TopicConfig("orders"), registry.Location{Kind: registry.KindTopicConfig, Topic: "orders"}},
			{root.GroupConfig("a/b"), registry.Location{Kind: registry.KindGroupConfig, Group: "a/b"}},
			{root.DeletedTopic("orders"), registry.Location{Kind: registry.KindDeletion, Topic: "orders"}},
			{g.ID("c:1"), registry.Location{Kind: registry.KindMember, Group: "a/b", Member: "c:1"}},
			{g.Owner(p), registry.Location{Kind: registry.KindOwner, Group: "a/b", Topic: "orders", Partition: p}},
			{g.Offset(p), registry.Location{Kind: registry.KindOffset, Group: "a/b", Topic: "orders", Partition: p}},
			{g.Target(), registry.Location{Kind: registry.KindTarget, Group: "a/b"}},
			{g.HistoryEntry(1796009631365, "c:1/2", 4), registry.Location{Kind: registry.KindHistory, Group: "a/b"}},
			{g.Prefix() + "migration", registry.Location{Kind: registry.KindOpaque, Group: "a/b"}},
			{g.Prefix() + "resets/1/2", registry.Location{Kind: registry.KindOpaque, Group: "a/b"}},
			{g.Prefix() + "other", registry.Location{Kind: registry.KindUnknown, Group: "a/b"}},
			{g.Target() + "/more", registry.Location{Kind: registry.KindUnknown, Group: "a/b"}},
			{g.History() + "1/2", registry.Location{Kind: registry.KindUnknown, Group: "a/b"}},
			{g.ID("c") + "/more", registry.Location{Kind: registry.KindUnknown, Group: "a/b"}},
			{root.Key("/consumers/g"), registry.Location{Kind: registry.KindUnknown}},
			{root.Key("/brokers/topics/t/partitions/3"), registry.Location{Kind: registry.KindUnknown}},
			{root.Key("/config/other/t"), registry.Location{Kind: registry.KindUnknown}},
			{root.Key("/other"), registry.Location{Kind: registry.KindForeign}},
			{root.Restoring(), registry.Location{Kind: registry.KindForeign}},
		} {
			c.want.Path = c.key[len(root):]
			ours := slices.ContainsFunc(root.Parts(), func(part string) bool { return strings.HasPrefix(c.key, part) })
			if ours != (c.want.Kind != registry.KindForeign) {
				t.Errorf("%s is in one of the parts that are ours: %v", c.key, ours)
			}
			if got := root.Locate(c.key); got != c.want {
				t.Errorf("%s is located as %+v, want %+v", c.key, got, c.want)
			}
		}
	}
	if got := registry.Root("/kc/prod").Locate("/kc/production/x"); got.Kind != registry.KindForeign || got.Path != "/kc/production/x" {
		t.Errorf("outside the root: %+v", got)
	}
}

// What no name or number is spelled like is told with the key; the rest can be used.
func TestLocateUnreadable(t *testing.T) {
	for _, c := range []struct {
		key   string
		kind  registry.Kind
		group string
	}{
		{"/brokers/ids/01", registry.KindBroker, ""},
		{"/brokers/ids/-1", registry.KindBroker, ""},
		{"/brokers/topics/a b", registry.KindTopic, ""},
		{"/brokers/topics/t/x", registry.KindCount, ""},
		{"/brokers/topics/t/partitions/2147483648/state", registry.KindState, ""},
		{"/config/topics/%61", registry.KindTopicConfig, ""},
		{"/config/groups/%zz", registry.KindGroupConfig, ""},
		{"/admin/delete_topics/", registry.KindDeletion, ""},
		{"/consumers/a%2fb/ids/c", registry.KindMember, ""},
		{"/consumers/g/ids/a%", registry.KindMember, "g"},
		{"/consumers/g/owners/orders/3", registry.KindOwner, "g"},
		{"/consumers/g/offsets/orders/1-03", registry.KindOffset, "g"},
		{"/consumers/g/offsets/a b/1-3", registry.KindOffset, "g"},
	} {
		got := registry.Root("").Locate(c.key)
		if got.Kind != c.kind || got.Group != c.group || !errors.Is(got.Problem, registry.ErrRecord) {
			t.Errorf("%s is located as %+v", c.key, got)
		}
	}
}
