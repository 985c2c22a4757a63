// Package groups looks at consumer groups from outside: who is in them, who owns
// what, how far they are; and deletes those that nobody is in.
package groups

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// Summary is one group in a list.
type Summary struct {
	Group   string `json:"group"`
	Members int    `json:"members"`
	Owned   int    `json:"owned"`   // partitions with an owner key
	Offsets int    `json:"offsets"` // partitions with a committed offset
}

// List returns all groups that have any key, by name, and what could not be read.
func List(ctx context.Context, st registry.Store, root registry.Root) ([]Summary, []error, error) {
	kvs, _, err := registry.List(ctx, st, root.Groups(), 0)
	if err != nil {
		return nil, nil, fmt.Errorf("list groups: %w", err)
	}
	found := map[string]*Summary{}
	var bad []error
	for _, kv := range kvs {
		element, rest, ok := strings.Cut(strings.TrimPrefix(kv.Key, root.Groups()), "/")
		if !ok {
			continue
		}
		name, err := registry.UnescapeName(element)
		if err != nil {
			bad = append(bad, fmt.Errorf("key %s: %w", kv.Key, err))
			continue
		}
		s := found[name]
		if s == nil {
			s = &Summary{Group: name}
			found[name] = s
		}
		switch kind, _, _ := strings.Cut(rest, "/"); kind {
		case "ids":
			s.Members++
		case "owners":
			s.Owned++
		case "offsets":
			s.Offsets++
		}
	}
	list := make([]Summary, 0, len(found))
	for _, name := range slices.Sorted(maps.Keys(found)) {
		list = append(list, *found[name])
	}
	return list, bad, nil
}

// Description is a group in full.
type Description struct {
	Group      string   `json:"group"`
	Strategy   *string  `json:"strategy"` // that the members agree on; nil without members
	Members    []Member `json:"members"`
	Partitions []Row    `json:"partitions"`
}

// Member is a registered consumer.
type Member struct {
	ID           string           `json:"id"`
	Host         string           `json:"host"`
	Subscription map[string]int32 `json:"subscription"`
	Strategy     []string         `json:"strategy"`
	Lease        string           `json:"lease"`
}

// Row is a partition that the group subscribes to, owns, or has an offset of.
// Nil stands for none or unknown.
type Row struct {
	Topic     string  `json:"topic"`
	Partition int32   `json:"partition"`
	Broker    int32   `json:"broker"` // home
	Offset    *int64  `json:"offset"`
	LogEnd    *int64  `json:"log_end"`
	Lag       *int64  `json:"lag"`
	Owner     *string `json:"owner"` // the owner key's value, verbatim
	Host      *string `json:"host"`
	// Stream is the number of the owner's stream; nil if the owner names none.
	Stream *int32 `json:"stream"`
	// OwnerRegistered is false for an owner key that names no registered consumer.
	OwnerRegistered *bool `json:"owner_registered"`
}

// ErrNotFound says that no key of the group exists.
var ErrNotFound = fmt.Errorf("group not found")

// LogEnds tells where the logs of partitions end; those that it cannot tell are
// left out.
type LogEnds func(ctx context.Context, partitions []registry.Partition) map[registry.Partition]int64

// Describe reads a group at one revision. ends may be nil. Records that cannot be
// parsed are left out and returned.
func Describe(ctx context.Context, st registry.Store, root registry.Root, group string, ends LogEnds) (*Description, []error, error) {
	paths := root.Group(group)
	keys, revision, err := registry.List(ctx, st, paths.Prefix(), 0)
	if err != nil {
		return nil, nil, fmt.Errorf("describe group %s: %w", group, err)
	}
	if len(keys) == 0 {
		return nil, nil, fmt.Errorf("%w: %s", ErrNotFound, group)
	}
	topics, _, err := registry.List(ctx, st, root.Topics(), revision)
	if err != nil {
		return nil, nil, fmt.Errorf("describe group %s: %w", group, err)
	}
	d := describer{paths: paths, rows: map[registry.Partition]*Row{}, members: map[string]Member{},
		out: &Description{Group: group, Members: []Member{}, Partitions: []Row{}}}
	d.readMembers(root, revision, keys, topics)
	d.readKeys(keys)
	d.finish(ctx, ends)
	return d.out, d.bad, nil
}

type describer struct {
	paths   registry.GroupPaths
	out     *Description
	rows    map[registry.Partition]*Row
	members map[string]Member
	bad     []error
}

func (d *describer) row(p registry.Partition) *Row {
	if d.rows[p] == nil {
		d.rows[p] = &Row{Topic: p.Topic, Partition: p.Number, Broker: p.Home}
	}
	return d.rows[p]
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

func (d *describer) readMembers(root registry.Root, revision int64, keys, topics []registry.KV) {
	ids := under(keys, d.paths.IDs())
	leases := map[string]registry.LeaseID{}
	for _, kv := range ids {
		if id, err := d.paths.ParseID(kv.Key); err == nil {
			leases[id] = kv.Lease
		}
	}
	s, bad := rebalance.ReadSnapshot(root, d.paths, "", revision, ids, topics)
	d.bad = append(d.bad, bad...)
	if len(s.Members) > 0 {
		strategy := rebalance.Agree(s.Members)
		d.out.Strategy = &strategy
	}
	for _, m := range s.Members {
		info := Member{ID: m.ID, Host: hostOf(m.ID), Subscription: m.Subscription, Strategy: m.Strategies,
			Lease: registry.LeaseText(leases[m.ID])}
		d.members[m.ID] = info
		d.out.Members = append(d.out.Members, info)
	}
	for _, partitions := range s.Topology {
		for _, p := range partitions {
			d.row(p)
		}
	}
}

// hostOf reads the host off a consumer id of the form <host>:<uuid>; ids of other
// forms have none that could be told for sure.
func hostOf(id string) string {
	if i := strings.LastIndexByte(id, ':'); i > 0 {
		return id[:i]
	}
	return ""
}

func (d *describer) readKeys(keys []registry.KV) {
	for _, kv := range under(keys, d.paths.Offsets()) {
		p, err := d.paths.ParsePartition(kv.Key)
		if err != nil {
			d.bad = append(d.bad, err)
			continue
		}
		offset, err := registry.ParseOffset(kv)
		if err != nil {
			d.bad = append(d.bad, err)
			continue
		}
		d.row(p).Offset = &offset
	}
	for _, kv := range under(keys, d.paths.Owners()) {
		p, err := d.paths.ParsePartition(kv.Key)
		if err != nil {
			d.bad = append(d.bad, err)
			continue
		}
		d.own(d.row(p), string(kv.Value))
	}
}

func (d *describer) own(r *Row, owner string) {
	id, stream, ok := rebalance.ParseThread(owner, func(id string) bool { _, ok := d.members[id]; return ok })
	r.Owner, r.OwnerRegistered = &owner, &ok
	if !ok {
		return
	}
	if host := d.members[id].Host; host != "" {
		r.Host = &host
	}
	if stream >= 0 {
		r.Stream = &stream
	}
}

func (d *describer) finish(ctx context.Context, ends LogEnds) {
	partitions := slices.SortedFunc(maps.Keys(d.rows), registry.ComparePartitions)
	var logEnds map[registry.Partition]int64
	if ends != nil {
		logEnds = ends(ctx, partitions)
	}
	for _, p := range partitions {
		r := d.rows[p]
		if end, ok := logEnds[p]; ok {
			r.LogEnd = &end
			if r.Offset != nil {
				lag := end - *r.Offset
				r.Lag = &lag
			}
		}
		d.out.Partitions = append(d.out.Partitions, *r)
	}
}
