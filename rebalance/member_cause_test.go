package rebalance_test

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// group makes a snapshot of words: topics t=4 (with so many partitions), t=4@9
// (created at that revision), members m:t1,t2, filters m~regex:t1,t2 and strategies
// m:t1/sticky.
func group(revision int64, words string) rebalance.Snapshot {
	s := rebalance.Snapshot{Revision: revision, Topology: rebalance.Topology{}, Incarnations: map[string]int64{}}
	for word := range strings.FieldsSeq(words) {
		if topic, n, found := strings.Cut(word, "="); found {
			var partitions int32
			created := int64(1)
			if _, err := fmt.Sscanf(n, "%d@%d", &partitions, &created); err != nil {
				_, _ = fmt.Sscanf(n, "%d", &partitions)
			}
			for i := range partitions {
				s.Topology[topic] = append(s.Topology[topic], registry.Partition{Topic: topic, Home: 1, Number: i})
			}
			s.Incarnations[topic] = created
			continue
		}
		word, strategy, _ := strings.Cut(word, "/")
		id, topics, _ := strings.Cut(word, ":")
		id, filter, _ := strings.Cut(id, "~")
		m := rebalance.MemberInfo{ID: id, Filter: filter, Subscription: map[string]int32{}, Strategies: []string{strategy}}
		for topic := range strings.SplitSeq(topics, ",") {
			m.Subscription[topic] = 1
		}
		s.Members = append(s.Members, m)
	}
	return s
}

// The reason names what changed between two snapshots, what matters most first.
func TestCause(t *testing.T) {
	for _, c := range []struct{ before, after, want string }{
		{"a:t t=4", "a:t t=4", ""},
		{"a:t t=4", "a:t b:t t=4", "member b joined"},
		{"a:t b:t t=4", "a:t t=4", "member b left"},
		{"b:t a:t t=4", "c:t a:t d:t t=4", "member b left; members c and d joined"},
		{"a:t t=4", "a:t b:t c:t d:t t=4", "members b, c and 1 more joined"},
		{"a:t t=4", "a:t t=8", "topic t has 8 partitions, had 4"},
		{"a:t,u t=4", "a:t,u t=4 u=1", "topic u was created"},
		{"a:t,u t=4", "a:t,u t=4 u=1@20", "topic u was created"},
		{"a:t,u t=4 u=1", "a:t,u t=4", "topic u was deleted"},
		{"a:t t=4", "a:t t=4@20", "topic t was deleted and created again"},
		{"a:t t=4", "a:t,u t=4 u=2", "member a changed its subscription"},
		{"a:t,u t=4 u=2", "a:t t=4", "member a changed its subscription"},
		{"a:t t=4", "a:t,u t=4 u=2@20", "member a changed its subscription; topic u was created"},
		{"a~.*:t t=4", "a~.*:t,u t=4 u=2@20", "topic u was created"},
		{"a~.*:t,u t=4 u=2", "a~.*:t t=4", "topic u was deleted"},
		{"a~.*:t t=4", "a~t|u:t,u t=4 u=2", "member a changed its subscription"},
		{"a~.*:t,u t=4 u=2", "b~.*:t t=4", "member a left; member b joined"},
		{"a:t/sticky t=4", "a:t/sticky b:t/range t=4", "strategy changed to range-numeric; member b joined"},
		{"a:t/range t=4", "a:t/sticky t=4", "strategy changed to sticky; member a changed its subscription"},
		{"", "a:t/sticky t=4", "member a joined"},
		{"a:t,u,v,w", "a:t,u,v,w t=1 u=1 v=1 w=1", "topics t, u and 2 more were created"},
		{"a:t,u,v,w t=1 u=1 v=1 w=1", "a:t,u,v,w t=2 u=2 v=2 w=2",
			"topic t has 2 partitions, had 1; topic u has 2 partitions, had 1; 2 more topics have other partitions"},
	} {
		if got := rebalance.Cause(group(10, c.before), group(30, c.after)); got != c.want {
			t.Errorf("from %q to %q: %q, want %q", c.before, c.after, got, c.want)
		}
	}
}

// The home of a partition, and the target alone, are reasons too.
func TestCauseOfOtherChanges(t *testing.T) {
	before, after := group(10, "a:t t=1"), group(30, "a:t t=1")
	after.Topology = maps.Clone(after.Topology)
	after.Topology["t"] = []registry.Partition{{Topic: "t", Home: 2}}
	if got := rebalance.Cause(before, after); got != "topic t has other partitions" {
		t.Errorf("%q", got)
	}
	before, after = group(10, "a:t/sticky t=1"), group(30, "a:t/sticky t=1")
	after.TargetRecord = 20
	if got := rebalance.Cause(before, after); got != "target was written anew" {
		t.Errorf("%q", got)
	}
	before, after = group(10, "a:t/range t=1"), group(30, "a:t/range t=1")
	after.TargetRecord = 20
	if got := rebalance.Cause(before, after); got != "" {
		t.Errorf("%q", got)
	}
}

// A reason stays short and readable whatever the names are, and says that there is more.
func TestCauseIsBounded(t *testing.T) {
	before, after := group(10, ""), group(30, "")
	for i := range 500 {
		long := fmt.Sprintf("%03d", i) + strings.Repeat("ü", 100)
		before.Members = append(before.Members, rebalance.MemberInfo{ID: "x" + long})
		after.Members = append(after.Members, rebalance.MemberInfo{ID: "y" + long})
	}
	got := rebalance.Cause(before, after)
	if len(got) > 300 || !utf8.ValidString(got) || !strings.HasPrefix(got, "members x000") || !strings.Contains(got, "and 498 more left; and 1 more") {
		t.Errorf("%d bytes: %s", len(got), got)
	}
	after.Members = append(before.Members[:0:0], rebalance.MemberInfo{ID: "a\nb\xff"})
	if got := rebalance.Cause(rebalance.Snapshot{}, after); got != `member "a\nb\xff" joined` {
		t.Errorf("%s", got)
	}
}
