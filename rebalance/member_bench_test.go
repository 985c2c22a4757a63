package rebalance_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// BenchmarkColdStart is what the machines of all members compute, and nothing else,
// from the first registration until all is claimed: each sees each registration as a
// snapshot of its own, a millisecond apart.
func BenchmarkColdStart(b *testing.B) {
	const members, partitions = 500, 5_000
	for _, strategy := range []string{"range", "sticky"} {
		b.Run(strategy, func(b *testing.B) {
			for b.Loop() {
				proposals, claims, divided := coldStart(b, members, partitions, strategy)
				b.ReportMetric(float64(proposals), "proposals")
				b.ReportMetric(float64(claims)/members, "claims/member")
				b.ReportMetric(float64(divided)/members, "divided/member")
			}
		})
	}
}

func coldStart(b *testing.B, members, partitions int, strategy string) (proposals, claims, divided int) {
	var list []registry.Partition
	for i := range partitions {
		list = append(list, registry.Partition{Topic: "t", Home: int32(i % 3), Number: int32(i)})
	}
	topology, incarnations := rebalance.Topology{"t": list}, map[string]int64{"t": 1}
	var machines []*rebalance.Member
	var registered []int64
	var infos []rebalance.MemberInfo
	revision := int64(1)
	var target *rebalance.Target
	now := time.Second
	owners := map[registry.Partition]int{}
	var act func(i int, actions []rebalance.Action)
	snapshot := func(i int) {
		s := rebalance.Snapshot{Revision: revision, Topology: topology, Incarnations: incarnations, Members: infos,
			Registered: registered[i], Target: target}
		if target != nil {
			s.TargetRecord = target.Record
		}
		act(i, machines[i].Step(now, s))
	}
	var later []func()
	act = func(i int, actions []rebalance.Action) {
		for _, a := range actions {
			switch a := a.(type) {
			case rebalance.Rebalanced:
				divided++
			case rebalance.Propose:
				proposals++
				later = append(later, func() {
					answer := rebalance.ProposeAnswered{Number: a.Number, Stale: a.Snapshot < registered[len(registered)-1] || target != nil && a.Replace != target.Record}
					if !answer.Stale {
						revision++
						answer.Revision = revision
						written := *a.Target
						written.Record = revision
						target = &written
					}
					act(i, machines[i].Step(now, answer))
					for j := range machines {
						snapshot(j)
					}
				})
			case rebalance.Claim:
				claims++
				later = append(later, func() {
					answer := rebalance.ClaimAnswered{Number: a.Number, Revision: revision, Stale: a.Snapshot < registered[len(registered)-1]}
					for _, w := range a.Wants {
						if _, held := owners[w.Partition]; !held && !answer.Stale {
							owners[w.Partition] = i
						}
						if !answer.Stale {
							answer.Outcomes = append(answer.Outcomes, rebalance.ClaimOutcome{Mine: owners[w.Partition] == i, Token: 1 << 40, Stream: w.Stream})
						}
					}
					act(i, machines[i].Step(now, answer))
				})
			case rebalance.Revoke:
				later = append(later, func() { act(i, machines[i].Step(now, rebalance.Drained(a))) })
			case rebalance.Release:
				later = append(later, func() {
					for _, h := range a.Held {
						delete(owners, h.Partition)
						for j := range machines {
							act(j, machines[j].Step(now, rebalance.OwnerSeen{Partition: h.Partition, Revision: revision + 1<<41}))
						}
					}
					act(i, machines[i].Step(now, rebalance.ReleaseAnswered{Number: a.Number}))
				})
			}
		}
	}
	pass := func() {
		now += time.Millisecond
		due := later
		later = nil
		for _, f := range due {
			f()
		}
		for i, m := range machines {
			if at, ok := m.Wake(); ok && at <= now {
				act(i, m.Step(now, rebalance.Tick{}))
			}
		}
	}
	for i := range members {
		revision++
		m := rebalance.NewMember(fmt.Sprintf("host-%03d:1", i))
		machines, registered = append(machines, m), append(registered, revision)
		infos = append(infos[:i:i], rebalance.MemberInfo{ID: fmt.Sprintf("host-%03d:1", i), Subscription: map[string]int32{"t": 1}, Strategies: []string{strategy}})
		act(i, m.Step(now, rebalance.Registered{Registration: registry.Registration{Key: "k", Revision: revision}}))
		for j := range machines {
			snapshot(j)
		}
		pass()
	}
	for range 2000 {
		if len(owners) == partitions && len(later) == 0 {
			return proposals, claims, divided
		}
		pass()
	}
	b.Fatalf("%d partitions are owned", len(owners))
	return proposals, claims, divided
}
