package broker

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/muster-io/muster/registry"
)

// groupScene feeds the metrics of groups with events.
type groupScene struct {
	t        *testing.T
	registry *prometheus.Registry
	g        *groupMetrics
	now      time.Time
	revision int64
	keys     map[string]registry.KV
}

func newGroupScene(t *testing.T) *groupScene {
	r := prometheus.NewRegistry()
	// Trackers are asked at the time of the scrape.
	return &groupScene{t: t, registry: r, g: newGroupMetrics("", r), now: time.Now().Add(-time.Hour / 2), keys: map[string]registry.KV{}}
}

func (s *groupScene) put(key, value string) {
	s.revision++
	kv := registry.KV{Key: key, Value: []byte(value), CreateRevision: s.revision, ModRevision: s.revision, Lease: 7}
	s.keys[key] = kv
	s.take(registry.Event{KV: kv})
}

// take gives the event as the View does.
func (s *groupScene) take(e registry.Event) {
	if s.g.concerns(e.Key) {
		s.g.take(s.now, s.revision, []registry.Event{e})
	}
}

func (s *groupScene) delete(key string) {
	s.revision++
	was := s.keys[key]
	s.take(registry.Event{KV: registry.KV{Key: key, ModRevision: s.revision}, Deleted: true, Previous: &was})
}

func (s *groupScene) join(group, member string) {
	s.put("/consumers/"+group+"/ids/"+member, `{"version":1,"subscription":{"t":1},"pattern":"static","timestamp":"1","strategy":["range"]}`)
}

// shown reads all samples of the metrics of groups.
func (s *groupScene) shown() map[string]float64 {
	s.t.Helper()
	families, err := s.registry.Gather()
	if err != nil {
		s.t.Fatal(err)
	}
	all := map[string]float64{}
	for _, f := range families {
		name := strings.TrimPrefix(f.GetName(), "muster_group_")
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			switch {
			case m.Gauge != nil:
				all[name] = m.GetGauge().GetValue()
			case m.Counter != nil:
				all[name] = m.GetCounter().GetValue()
			default:
				all[name] = m.GetHistogram().GetSampleSum()
			}
			name = strings.TrimPrefix(f.GetName(), "muster_group_")
		}
	}
	return all
}

func (s *groupScene) want(want map[string]float64) {
	s.t.Helper()
	shown := s.shown()
	for name, v := range want {
		if got, ok := shown[name]; got != v || !ok {
			s.t.Errorf("%s is %v (%v), want %v", name, got, ok, v)
		}
	}
}

func TestGroupMetrics(t *testing.T) {
	s := newGroupScene(t)
	s.g.live = true
	s.put("/brokers/topics/t", `{"version":1,"partitions":{"0":[1],"1":[1]}}`)
	s.put("/consumers/g/offsets/t/1-0", "5")
	s.g.look()
	if _, there := s.shown()["members g"]; there {
		t.Error("a group without members is shown")
	}
	s.join("g", "a")
	s.g.look()
	s.want(map[string]float64{"members g": 1, "partitions_owned g": 0, "partitions_ownerless g": 2, "rebalancing g": 1, "rebalances_total g member_joined": 0})
	s.now = s.now.Add(2 * time.Second)
	s.put("/consumers/g/owners/t/1-0", "a-0")
	s.put("/consumers/g/owners/t/1-1", "a-0")
	s.g.look()
	s.want(map[string]float64{"members g": 1, "partitions_owned g": 2, "partitions_ownerless g": 0, "rebalancing g": 0, "claims_total g": 2,
		"rebalances_total g member_joined": 1, "ownerless_partition_seconds_total g": 4, "rebalance_duration_seconds member_joined": 2})

	// A rebalance that begins and ends between two looks.
	s.join("g", "b")
	s.now = s.now.Add(time.Second)
	s.delete("/consumers/g/owners/t/1-1")
	s.now = s.now.Add(time.Second)
	s.put("/consumers/g/owners/t/1-1", "b-0")
	s.g.look()
	s.want(map[string]float64{"members g": 2, "claims_total g": 3, "rebalances_total g member_joined": 2,
		"ownerless_partition_seconds_total g": 5, "rebalance_duration_seconds member_joined": 4})

	s.now = s.now.Add(time.Second)
	s.put("/brokers/topics/t", `{"version":1,"partitions":{"0":[1],"1":[1],"2":[1]}}`)
	s.g.look()
	s.want(map[string]float64{"partitions_ownerless g": 1, "rebalancing g": 1})
}

// What is under way when the daemon begins to look has no known beginning.
func TestGroupFound(t *testing.T) {
	s := newGroupScene(t)
	s.put("/brokers/topics/t", `{"version":1,"partitions":{"0":[1]}}`)
	s.join("g", "a")
	s.put("/consumers/g/owners/t/1-0", "a-0")
	s.join("h", "a")
	s.g.look()
	s.put("/consumers/h/owners/t/1-0", "a-0")
	s.g.look()
	s.want(map[string]float64{"claims_total g": 0, "rebalances_total g found": 0, "claims_total h": 1, "rebalances_total h found": 1})
}

// However many groups there are, so many are shown by name, and no sum goes back.
func TestManyGroups(t *testing.T) {
	s := newGroupScene(t)
	s.g.live = true
	s.put("/brokers/topics/t", `{"version":1,"partitions":{"0":[1]}}`)
	const more = 5
	for i := range maxShownGroups + more {
		s.join(fmt.Sprintf("g%03d", i), "a")
		s.g.look()
		s.put(fmt.Sprintf("/consumers/g%03d/owners/t/1-0", i), "a-0")
		s.g.look()
	}
	s.join("%FF", "a") // a name that no label can have
	s.g.look()
	names := 0
	for name := range s.shown() {
		if strings.HasPrefix(name, "members ") {
			names++
		}
	}
	if names != maxShownGroups+1 {
		t.Errorf("%d names", names)
	}
	s.want(map[string]float64{"members ": more + 1, "partitions_owned ": more, "claims_total ": more, "rebalances_total  member_joined": more})
	for i := range maxShownGroups + more {
		s.delete(fmt.Sprintf("/consumers/g%03d/owners/t/1-0", i))
		s.delete(fmt.Sprintf("/consumers/g%03d/ids/a", i))
	}
	s.g.look()
	s.g.forget(s.now.Add(forgetAfter + time.Second))
	if n := len(s.g.tracked); n != 1 {
		t.Errorf("%d groups are remembered", n)
	}
	s.want(map[string]float64{"members ": 1, "partitions_owned ": 0, "claims_total ": more, "rebalances_total  member_joined": more})
}
