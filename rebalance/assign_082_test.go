package rebalance_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// scenario082 is a group of Kafka 0.8.2.2 consumers and what its own assignors
// answered, for each member: thread -> topic -> numbers; or the exception that ended
// the attempt.
type scenario082 struct {
	Name                  string
	Strategy              any  // of all, or member -> its own
	ExcludeInternalTopics bool `json:"exclude_internal_topics"`
	Topics                map[string][]int32
	Registrations         map[string]string
	Assignment            map[string]map[string]any
}

func scenarios082(t *testing.T) (list []scenario082) {
	data, err := os.ReadFile("testdata/assignment/kafka-0.8.2.2.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &list); err != nil || len(list) != 39 {
		t.Fatalf("%d scenarios: %v", len(list), err)
	}
	return list
}

// snapshot reads the scenario from a registry. A registration of 0.8.2 states no strategy,
// and nothing of internal topics: what its consumer's own settings said is added.
func (c scenario082) snapshot(t *testing.T) (rebalance.Snapshot, []error) {
	root := registry.Root("")
	group := root.Group("g")
	var ids, topics []registry.KV
	for id, text := range c.Registrations {
		strategy, own := c.Strategy.(string)
		if !own {
			strategy = c.Strategy.(map[string]any)[id].(string)
		}
		if strategy == rebalance.StrategyRoundRobin || !own {
			text = strings.Replace(text, `{`, `{"strategy":["`+strategy+`"],`, 1)
		}
		if !c.ExcludeInternalTopics {
			text = strings.Replace(text, `{`, `{"exclude_internal_topics":false,`, 1)
		}
		ids = append(ids, registry.KV{Key: group.ID(id), Value: []byte(text), Lease: 1, ModRevision: 1})
	}
	for name, numbers := range c.Topics {
		rec := registry.TopicRecord{Version: 1, Partitions: map[int32][]int32{}}
		for _, n := range numbers {
			rec.Partitions[n] = []int32{1}
		}
		value, err := registry.Encode(rec)
		if err != nil {
			t.Fatal(err)
		}
		topics = append(topics, registry.KV{Key: root.Topic(name), Value: value, CreateRevision: 1, ModRevision: 1})
	}
	return rebalance.ReadSnapshot(root, group, "", 2, ids, topics)
}

// ours prints a member's part as the scenarios have it.
func ours(a *rebalance.Assignment, id string) string {
	part := map[string]map[string][]int32{}
	for p, stream := range a.Of(id) {
		thread := rebalance.ThreadID(id, stream)
		if part[thread] == nil {
			part[thread] = map[string][]int32{}
		}
		part[thread][p.Topic] = append(part[thread][p.Topic], p.Number)
	}
	for _, topics := range part {
		for _, list := range topics {
			slices.Sort(list)
		}
	}
	return asJSON(part)
}

func asJSON(v any) string {
	b, err := json.Marshal(v) // maps by key
	if err != nil {
		panic(err)
	}
	return string(b)
}

// What Kafka 0.8.2.2's own assignors answered, range-numeric and roundrobin answer
// too. Where these ended with an exception: ours refuses roundrobin where members differ, and
// otherwise goes on without what cannot be read, and with nothing where there is nothing.
func TestAssignmentsOfKafka082(t *testing.T) {
	for _, c := range scenarios082(t) {
		t.Run(c.Name, func(t *testing.T) {
			s, unread := c.snapshot(t)
			a, err := rebalance.Assign(s)
			var exceptions []string
			for _, id := range slices.Sorted(maps.Keys(c.Assignment)) {
				if text, failed := c.Assignment[id]["error"].(string); failed {
					exceptions = append(exceptions, text)
				}
			}
			text := strings.Join(exceptions, "\n")
			switch {
			case strings.Contains(text, "Round-robin assignment is allowed only if"):
				if !errors.Is(err, rebalance.ErrNotUniform) || !strings.Contains(err.Error(), "g_c") {
					t.Errorf("error %v", err)
				}
				return
			case strings.Contains(text, "error constructing TopicCount"), strings.Contains(text, "Can't parse json string"):
				// The one bad registration failed every member.
				equal(t, fmt.Sprint(len(unread), " ", err, " ", ours(a, "g_c1")), `1 <nil> {"g_c1-0":`+asJSON(c.Topics)+`}`)
				return
			case strings.Contains(text, "NullPointerException"):
				equal(t, fmt.Sprint(err, " ", len(maps.Collect(a.All()))), "<nil> 0")
				return
			case c.Name == "mixed: mixed strategies":
				// Some partitions were claimed twice, others by nobody.
				equal(t, fmt.Sprint(a.Strategy, " ", len(maps.Collect(a.All()))), "range-numeric 8")
				return
			}
			if err != nil || len(unread) > 0 {
				t.Fatal(err, unread)
			}
			for id, want := range c.Assignment {
				if want["error"] != nil {
					want = map[string]any{} // the member's registration is missing: it gets nothing
				}
				equal(t, ours(a, id), asJSON(want))
			}
		})
	}
}
