package groups

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// Picture is a group as it stood at one revision: who is in it, who owns what, and
// who is to own it. It is a pure function of the keys.
type Picture struct {
	Group    string
	Revision int64
	Snapshot rebalance.Snapshot
	Members  map[string]Registration // by consumer id
	Owners   map[registry.Partition]Owner
	// Due is what the strategy says; nil without members, or if Refusal is set.
	Due     *rebalance.Assignment
	Refusal error // why the group cannot be divided
}

// Registration is a member's key.
type Registration struct {
	registry.ConsumerRecord
	Lease registry.LeaseID
}

// Owner is an owner key.
type Owner struct {
	Value  string // verbatim
	Token  int64  // create-revision
	Lease  registry.LeaseID
	Member string // the registered consumer that Value names; empty if it names none
	Stream int32  // of Member; -1 if Value names none
}

// Painter makes the Pictures of one group. It remembers what it has parsed. It must
// not be used concurrently.
type Painter struct {
	group  string
	root   registry.Root
	paths  registry.GroupPaths
	reader *rebalance.Reader
}

// NewPainter returns the Painter of a group.
func NewPainter(root registry.Root, group string) *Painter {
	paths := root.Group(group)
	return &Painter{group: group, root: root, paths: paths, reader: rebalance.NewReader(root, paths, "")}
}

// Paint makes the Picture at a revision from the group's keys, of which it looks at
// registrations, owners and the target, and from those of topics. Errors name keys
// that cannot be read, which are left out.
func (pr *Painter) Paint(revision int64, keys, topics []registry.KV) (*Picture, []error) {
	p := &Picture{Group: pr.group, Revision: revision, Members: map[string]Registration{}, Owners: map[registry.Partition]Owner{}}
	var target *registry.KV
	for i := range keys {
		if keys[i].Key == pr.paths.Target() {
			target = &keys[i]
		}
	}
	ids := under(keys, pr.paths.IDs())
	s, bad := pr.reader.Read(revision, ids, topics, target)
	p.Snapshot = s
	for _, kv := range ids {
		id, err := pr.paths.ParseID(kv.Key)
		if err != nil || kv.Lease == 0 {
			continue // the reader has said so
		}
		if rec, err := registry.ParseConsumer(kv); err == nil {
			p.Members[id] = Registration{rec, kv.Lease}
		}
	}
	for _, kv := range under(keys, pr.paths.Owners()) {
		partition, err := pr.paths.ParsePartition(kv.Key)
		if err != nil {
			bad = append(bad, err)
			continue
		}
		o := Owner{Value: string(kv.Value), Token: kv.CreateRevision, Lease: kv.Lease, Stream: -1}
		if id, stream, ok := rebalance.ParseThread(o.Value, p.registered); ok {
			o.Member, o.Stream = id, stream
		}
		p.Owners[partition] = o
	}
	if len(s.Members) > 0 {
		if p.Due, p.Refusal = rebalance.Assign(s); p.Refusal != nil {
			p.Due = nil
		}
	}
	return p, bad
}

func (p *Picture) registered(id string) bool { _, ok := p.Members[id]; return ok }

// Strategy is what the members agree on; empty without members.
func (p *Picture) Strategy() string {
	if len(p.Snapshot.Members) == 0 {
		return ""
	}
	return rebalance.Agree(p.Snapshot.Members)
}

// State is how a group stands as a whole.
type State string

// States of a group, the graver first where several are true.
const (
	StateEmpty     State = "empty"     // nobody is registered
	StateRefused   State = "refused"   // the strategy cannot divide it: its members keep what they hold
	StateOwnerless State = "ownerless" // a partition that a member is due has no owner key
	StateMoving    State = "moving"    // a partition is owned by another than the strategy says
	StateStable    State = "stable"    // every partition has the owner that the strategy says
)

// Standing is how one partition stands.
type Standing string

// Standings of a partition.
const (
	StandingRight     Standing = "right"     // owned by the thread that the strategy says, or by nobody as it says
	StandingMoving    Standing = "moving"    // owned by another
	StandingOwnerless Standing = "ownerless" // owned by nobody, though the group subscribes to it
	StandingKept      Standing = "kept"      // owned, in a group that cannot be divided
)

// Place is a partition that the group subscribes to or owns.
type Place struct {
	registry.Partition
	Due      string // the thread that is to own it; empty for nobody
	Owner    *Owner // nil for none
	Standing Standing
	Why      string // of a standing that is not right
}

// undivided is why, while the group's Refusal is set.
const undivided = "the group cannot be divided"

// Places returns all of them by topic and number.
func (p *Picture) Places() []Place {
	all := maps.Clone(p.Owners)
	for _, partitions := range p.Snapshot.Topology {
		for _, partition := range partitions {
			if _, owned := all[partition]; !owned {
				all[partition] = Owner{}
			}
		}
	}
	list := make([]Place, 0, len(all))
	for _, partition := range slices.SortedFunc(maps.Keys(all), registry.ComparePartitions) {
		list = append(list, p.Place(partition))
	}
	return list
}

// Place tells how one partition stands.
func (p *Picture) Place(partition registry.Partition) Place {
	pl := Place{Partition: partition, Standing: StandingRight}
	if p.Due != nil {
		pl.Due, _ = p.Due.Owner(partition)
	}
	if o, owned := p.Owners[partition]; owned {
		pl.Owner = &o
	}
	switch {
	case pl.Owner == nil && p.Refusal != nil && p.subscribed(partition):
		pl.Standing, pl.Why = StandingOwnerless, undivided
	case pl.Owner == nil && pl.Due != "":
		pl.Standing, pl.Why = StandingOwnerless, pl.Due+" is due it and has not claimed it"
	case pl.Owner == nil:
	case p.Refusal != nil && pl.Owner.Member != "":
		pl.Standing, pl.Why = StandingKept, undivided
	default:
		if why := p.wrong(pl); why != "" {
			pl.Standing, pl.Why = StandingMoving, why
		}
	}
	return pl
}

func (p *Picture) subscribed(partition registry.Partition) bool {
	return slices.Contains(p.Snapshot.Topology[partition.Topic], partition)
}

// wrong tells what is wrong with the owner of a partition.
func (p *Picture) wrong(pl Place) string {
	o := pl.Owner
	waits := "nobody is due it; "
	if pl.Due != "" {
		waits = pl.Due + " waits for it; "
	}
	switch {
	case o.Member == "":
		return waits + "its owner " + o.Value + " is not registered"
	case o.Lease != p.Members[o.Member].Lease:
		return waits + "its owner key stands under another lease than the registration of " + o.Member
	case o.Token < p.Snapshot.Incarnations[pl.Topic]:
		return waits + "its owner key is older than the topic, and so worth nothing"
	case pl.Due == "":
		return waits + o.Value + " has not released it"
	// A client without streams writes its id alone.
	case o.Value != pl.Due && !(o.Stream < 0 && pl.Due == rebalance.ThreadID(o.Member, 0)):
		return pl.Due + " waits for " + o.Value
	}
	return ""
}

// State of the group, given its Places.
func (p *Picture) State(places []Place) State {
	has := func(s Standing) bool {
		return slices.ContainsFunc(places, func(pl Place) bool { return pl.Standing == s })
	}
	switch {
	case len(p.Snapshot.Members) == 0:
		return StateEmpty
	case p.Refusal != nil:
		return StateRefused
	case has(StandingOwnerless):
		return StateOwnerless
	case has(StandingMoving):
		return StateMoving
	}
	return StateStable
}

// Unfit is what keeps a group from being in order, in the words of 0.8.2's tool
// where it has words for it.
func (p *Picture) Unfit() []string {
	var reasons []string
	say := func(format string, args ...any) { reasons = append(reasons, fmt.Sprintf(format, args...)) }
	if p.Refusal != nil {
		say("Consumer group %s cannot be divided: %v", p.Group, p.Refusal)
	}
	owned := map[string]bool{}
	for partition := range p.Owners {
		owned[partition.Topic] = true
	}
	told := map[string]bool{}
	for _, pl := range p.Places() {
		name := fmt.Sprintf("[%s,%d]", pl.Topic, pl.Number)
		switch {
		case pl.Standing == StandingRight || pl.Standing == StandingKept:
		case pl.Owner == nil && !owned[pl.Topic]:
			if !told[pl.Topic] {
				told[pl.Topic] = true
				say("No owners for any partitions for topic %s", pl.Topic)
			}
		case pl.Owner == nil:
			say("No owner for partition %s", name)
		case len(p.Members) == 0: // keys on their way out
		case pl.Owner.Member == "":
			say("Owner %s for partition %s is not a valid member of consumer group %s", pl.Owner.Value, name, p.Group)
		default:
			say("Owner %s for partition %s is not right: %s", pl.Owner.Value, name, pl.Why)
		}
	}
	return reasons
}

// under returns the keys below a prefix of the group.
func under(keys []registry.KV, prefix string) []registry.KV {
	var list []registry.KV
	for _, kv := range keys {
		if strings.HasPrefix(kv.Key, prefix) {
			list = append(list, kv)
		}
	}
	return list
}
