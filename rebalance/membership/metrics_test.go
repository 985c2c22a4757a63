package membership_test

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/muster-io/muster/rebalance/membership"
	"github.com/muster-io/muster/registry"
)

// counted shows the metrics, but for those that are 0.
func counted(t *testing.T, m *membership.Metrics) string {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(m)
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for _, f := range families {
		for _, s := range f.GetMetric() {
			name := strings.TrimPrefix(f.GetName(), "muster_member_")
			for _, l := range s.GetLabel() {
				name += " " + l.GetValue()
			}
			v := s.GetGauge().GetValue() + s.GetCounter().GetValue() + s.GetHistogram().GetSampleSum()
			if v != 0 {
				list = append(list, fmt.Sprintf("%s %.3g", name, v))
			}
		}
	}
	slices.Sort(list)
	return strings.Join(list, "\n")
}

// What a member does is counted, and how long it took until its share was its own.
func TestMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newArena(t)
		a.topic("t", 4)
		m := membership.NewMetrics()
		finish := make(chan struct{})
		first := a.join(membership.Config{ID: "c1", Metrics: m}, func(o *membership.Ownership) bool {
			<-finish
			return o.Alive()
		})
		a.ownedAs(time.Second, "t/0:c1-0 t/1:c1-0 t/2:c1-0 t/3:c1-0")
		others := membership.NewMetrics()
		second := a.join(membership.Config{ID: "c2", Metrics: others}, nil)
		time.Sleep(2 * time.Second)
		if got := counted(t, others); !strings.Contains(got, "claims_total g held 2") || strings.Contains(got, "owned") {
			t.Errorf("while it waits:\n%s", got)
		}
		close(finish)
		a.ownedAs(time.Millisecond, "t/0:c1-0 t/1:c1-0 t/2:c2-0 t/3:c2-0")
		if got, want := counted(t, m), `claims_total g claimed 4
partitions_owned g 2
rebalance_duration_seconds member_joined 2
rebalances_total g member_joined 2`; got != want {
			t.Errorf("the first:\n%s\nwant\n%s", got, want)
		}
		second.leave()
		a.ownedAs(time.Millisecond, "t/0:c1-0 t/1:c1-0 t/2:c1-0 t/3:c1-0")
		if got := counted(t, m); !strings.Contains(got, "rebalances_total g member_left 1") || !strings.Contains(got, "partitions_owned g 4") {
			t.Error(got)
		}
		a.damaged = true
		a.write(registry.Delete(a.group.Owner(registry.Partition{Topic: "t", Home: 1, Number: 2})))
		a.ownedAs(time.Second, "t/0:c1-0 t/1:c1-0 t/2:c1-0 t/3:c1-0")
		first.leave()
		if got, want := counted(t, m), "partitions_lost_total g 1"; !strings.Contains(got, want) || strings.Contains(got, "owned") {
			t.Error(got)
		}
		if got := counted(t, others); strings.Contains(got, "owned") {
			t.Error(got)
		}
		a.nothingLeft()
	})
}

// The page for users has a row for each.
func TestMetricsAreDocumented(t *testing.T) {
	page, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	descs := make(chan *prometheus.Desc, 100)
	membership.NewMetrics().Describe(descs)
	close(descs)
	shown := 0
	for d := range descs {
		m := regexp.MustCompile(`fqName: "([^"]*)".*variableLabels: \{([^}]*)\}`).FindStringSubmatch(d.String())
		labels := "`" + strings.ReplaceAll(m[2], ",", "`, `") + "`"
		if !regexp.MustCompile("(?m)^\\| `" + m[1] + "` \\| [a-z]+ \\| " + labels + " \\|").Match(page) {
			t.Errorf("%s with %s is not documented", m[1], labels)
		}
		shown++
	}
	if n := strings.Count(string(page), "\n| `muster_member_"); n != shown {
		t.Errorf("the page has %d, of %d", n, shown)
	}
}
