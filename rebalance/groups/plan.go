package groups

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// Change is what a Plan supposes.
type Change struct {
	Without  []string // members by id, or by the beginning of one that no other has
	Add      int      // members more, named new-1 and so on as far as nobody is, that subscribe as the lowest one does
	Strategy string   // that every member states; empty leaves the strategies as they are
}

// Errors of a Change that the group does not allow.
var (
	ErrNoSuchMember = errors.New("no such member")
	ErrManyMembers  = errors.New("more than one member")
	ErrNoMembers    = errors.New("group has no members")
)

// Plan is what a Change would move.
type Plan struct {
	Group    string       `json:"group"`
	Revision int64        `json:"revision"` // of the registry that it was computed from
	Strategy *string      `json:"strategy"` // after the change; nil if nobody would be left
	Refusal  *string      `json:"refusal"`  // why the group could not be divided; nothing would move
	Total    int          `json:"total"`    // partitions that the group subscribes to after the change
	Moves    []Move       `json:"moves"`
	Members  []PlanMember `json:"members"`
}

// Move is a partition that would change hands, or streams.
type Move struct {
	Topic     string  `json:"topic"`
	Partition int32   `json:"partition"`
	Broker    int32   `json:"broker"` // home
	From      *string `json:"from"`   // owner key's value now; nil for none
	To        *string `json:"to"`     // thread; nil if nobody would be due it
}

// PlanMember is a member before and after.
type PlanMember struct {
	ID     string `json:"id"`
	Before *int   `json:"before"` // partitions owned; nil for a member that is added
	After  *int   `json:"after"`  // partitions due; nil for a member that is gone, or if refused
}

// MakePlan computes what a change would move, from what is registered and owned now.
// Nothing is written.
func MakePlan(ctx context.Context, st registry.Store, root registry.Root, group string, c Change) (*Plan, []error, error) {
	keys, topics, revision, err := read(ctx, st, root, group)
	if err != nil {
		return nil, nil, fmt.Errorf("plan for group %s: %w", group, err)
	}
	p, bad := NewPainter(root, group).Paint(revision, keys, topics)
	plan, err := p.Plan(c)
	if err != nil {
		return nil, bad, fmt.Errorf("plan for group %s: %w", group, err)
	}
	return plan, bad, nil
}

// Plan is what a change would move.
func (p *Picture) Plan(c Change) (*Plan, error) {
	s, gone, err := p.supposed(c)
	if err != nil {
		return nil, err
	}
	plan := &Plan{Group: p.Group, Revision: p.Revision, Moves: []Move{}, Members: []PlanMember{}}
	var after *rebalance.Assignment
	if len(s.Members) > 0 {
		strategy := rebalance.Agree(s.Members)
		plan.Strategy = &strategy
		if after, err = rebalance.Assign(s); err != nil {
			text := err.Error()
			plan.Refusal, after = &text, nil
		}
	}
	if plan.Refusal == nil {
		plan.move(p, s, after)
	}
	owns := map[string]int{}
	for _, o := range p.Owners {
		owns[o.Member]++
	}
	due := counts(after)
	for _, m := range append(slices.Clone(s.Members), gone...) {
		pm := PlanMember{ID: m.ID}
		if _, there := p.Members[m.ID]; there {
			n := owns[m.ID]
			pm.Before = &n
		}
		if plan.Refusal == nil && !slices.ContainsFunc(gone, func(g rebalance.MemberInfo) bool { return g.ID == m.ID }) {
			n := due[m.ID]
			pm.After = &n
		}
		plan.Members = append(plan.Members, pm)
	}
	slices.SortFunc(plan.Members, func(a, b PlanMember) int { return strings.Compare(a.ID, b.ID) })
	return plan, nil
}

// supposed is the snapshot after the change, and who is not in it any more.
func (p *Picture) supposed(c Change) (s rebalance.Snapshot, gone []rebalance.MemberInfo, err error) {
	s = p.Snapshot
	s.Members = slices.SortedFunc(slices.Values(s.Members), func(a, b rebalance.MemberInfo) int { return strings.Compare(a.ID, b.ID) })
	if len(s.Members) == 0 {
		return s, nil, ErrNoMembers
	}
	lowest := s.Members[0]
	for _, name := range c.Without {
		i, err := find(s.Members, name)
		if err != nil {
			return s, nil, err
		}
		gone = append(gone, s.Members[i])
		s.Members = slices.Delete(s.Members, i, i+1)
	}
	for n, added := 1, 0; added < c.Add; n++ {
		m := lowest
		m.ID = fmt.Sprintf("new-%d", n)
		if _, taken := p.Members[m.ID]; !taken {
			s.Members = append(s.Members, m)
			added++
		}
	}
	if c.Strategy != "" {
		for i := range s.Members {
			s.Members[i].Strategies = []string{c.Strategy}
		}
	}
	// What only those subscribed to who are gone is nobody's any more.
	s.Topology = maps.Clone(s.Topology)
	maps.DeleteFunc(s.Topology, func(topic string, _ []registry.Partition) bool {
		return !slices.ContainsFunc(s.Members, func(m rebalance.MemberInfo) bool { return m.Subscription[topic] > 0 })
	})
	return s, gone, nil
}

func find(members []rebalance.MemberInfo, name string) (int, error) {
	if i := slices.IndexFunc(members, func(m rebalance.MemberInfo) bool { return m.ID == name }); i >= 0 {
		return i, nil
	}
	found := -1
	for i, m := range members {
		if !strings.HasPrefix(m.ID, name) {
			continue
		}
		if found >= 0 {
			return 0, fmt.Errorf("%w begins with %q: %s, %s", ErrManyMembers, name, members[found].ID, m.ID)
		}
		found = i
	}
	if found < 0 || name == "" {
		return 0, fmt.Errorf("%w: %q", ErrNoSuchMember, name)
	}
	return found, nil
}

// move lists what is not where it would be.
func (plan *Plan) move(p *Picture, s rebalance.Snapshot, after *rebalance.Assignment) {
	all := map[registry.Partition]bool{}
	for _, list := range s.Topology {
		plan.Total += len(list)
		for _, partition := range list {
			all[partition] = true
		}
	}
	for partition := range p.Owners {
		all[partition] = true
	}
	for _, partition := range slices.SortedFunc(maps.Keys(all), registry.ComparePartitions) {
		m := Move{Topic: partition.Topic, Partition: partition.Number, Broker: partition.Home}
		if o, owned := p.Owners[partition]; owned {
			m.From = &o.Value
		}
		if after != nil {
			if to, due := after.Owner(partition); due {
				m.To = &to
			}
		}
		if m.From == nil && m.To == nil || m.From != nil && m.To != nil && *m.From == *m.To {
			continue
		}
		plan.Moves = append(plan.Moves, m)
	}
}

// counts is how many partitions each member is due.
func counts(a *rebalance.Assignment) map[string]int {
	n := map[string]int{}
	if a == nil {
		return n
	}
	for _, t := range a.Topics {
		for _, thread := range t.Owners {
			if thread != rebalance.Nobody {
				n[a.Members[thread.Member]]++
			}
		}
	}
	return n
}
