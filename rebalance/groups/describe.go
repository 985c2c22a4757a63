package groups

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/muster-io/muster/registry"
)

// Description is a group in full.
type Description struct {
	Group      string   `json:"group"`
	Revision   int64    `json:"revision"` // of the registry, at which all of it stood
	State      State    `json:"state"`
	Strategy   *string  `json:"strategy"` // that the members agree on; nil without members
	Refusal    *string  `json:"refusal"`  // why it cannot divide the group; nil if it can
	Members    []Member `json:"members"`
	Partitions []Row    `json:"partitions"`
}

// Member is a registered consumer.
type Member struct {
	ID      string `json:"id"`
	Host    string `json:"host"`
	Pattern string `json:"pattern"` // static, white_list or black_list
	// Filter is the regular expression of a pattern that is not static; else nil.
	Filter *string `json:"filter"`
	// Subscription is topic -> streams; that of a filter are the topics it stands for now.
	Subscription map[string]int32 `json:"subscription"`
	Strategy     []string         `json:"strategy"` // as stated; none counts as range-numeric
	Since        *time.Time       `json:"since"`    // it registered, by its own clock
	Lease        string           `json:"lease"`
	Owns         int              `json:"owns"` // partitions
	Due          *int             `json:"due"`  // partitions; nil if the group cannot be divided
}

// Row is a partition that the group subscribes to, owns, or has an offset of.
// Nil stands for none or unknown.
type Row struct {
	Topic     string  `json:"topic"`
	Partition int32   `json:"partition"`
	Broker    int32   `json:"broker"` // home
	NoLog     bool    `json:"no_log"` // there is nothing that could have an offset
	Offset    *int64  `json:"offset"`
	LogEnd    *int64  `json:"log_end"`
	Lag       *int64  `json:"lag"`
	Owner     *string `json:"owner"` // the owner key's value, verbatim
	Host      *string `json:"host"`
	// Stream is the number of the owner's stream; nil if the owner names none.
	Stream *int32 `json:"stream"`
	// OwnerRegistered is false for an owner key that names no registered consumer.
	OwnerRegistered *bool `json:"owner_registered"`
	// Token is the revision at which the owner key was created.
	Token *int64 `json:"token"`
	// Since is when its owner claimed it, or with no owner when the last one released
	// it, as the group's history has it.
	Since *time.Time `json:"since"`
	// Due is the thread that is to own it; nil for nobody, or if the group cannot be divided.
	Due      *string  `json:"due"`
	Standing Standing `json:"standing"`
	Why      *string  `json:"why"` // of a standing that is not right
}

// LogEnds tells where the logs of partitions end; those that it cannot tell are
// left out.
type LogEnds func(ctx context.Context, partitions []registry.Partition) map[registry.Partition]int64

// Describe reads a group at one revision. ends may be nil. Records that cannot be
// parsed are left out and returned.
func Describe(ctx context.Context, st registry.Store, root registry.Root, group string, ends LogEnds) (*Description, []error, error) {
	keys, topics, revision, err := read(ctx, st, root, group)
	if err != nil {
		return nil, nil, fmt.Errorf("describe group %s: %w", group, err)
	}
	p, bad := NewPainter(root, group).Paint(revision, keys, topics)
	d := describer{picture: p, paths: root.Group(group), rows: map[registry.Partition]*Row{}, bad: bad}
	d.readPlaces(keys)
	d.readOffsets(keys)
	d.readTopics(root, topics)
	return d.finish(ctx, ends), d.bad, nil
}

// read lists a group and all topics at one revision.
func read(ctx context.Context, st registry.Store, root registry.Root, group string) (keys, topics []registry.KV, revision int64, err error) {
	if err := registry.ValidateGroupName(group); err != nil {
		return nil, nil, 0, err
	}
	keys, revision, err = registry.List(ctx, st, root.Group(group).Prefix(), 0)
	if err != nil {
		return nil, nil, 0, err
	}
	if len(keys) == 0 {
		return nil, nil, 0, fmt.Errorf("%w: %s", ErrNotFound, group)
	}
	topics, _, err = registry.List(ctx, st, root.Topics(), revision)
	return keys, topics, revision, err
}

type describer struct {
	picture *Picture
	paths   registry.GroupPaths
	state   State
	rows    map[registry.Partition]*Row
	bad     []error
}

func (d *describer) row(p registry.Partition) *Row {
	if d.rows[p] == nil {
		d.rows[p] = &Row{Topic: p.Topic, Partition: p.Number, Broker: p.Home, Standing: StandingRight}
	}
	return d.rows[p]
}

func (d *describer) readPlaces(keys []registry.KV) {
	history, bad := readPast(d.paths, keys)
	d.bad = append(d.bad, bad...)
	tokens := map[registry.Partition]int64{}
	for p, o := range d.picture.Owners {
		tokens[p] = o.Token
	}
	claims := history.claims()
	last := past(history.told(d.picture.Revision, tokens)).last()
	places := d.picture.Places()
	d.state = d.picture.State(places)
	for _, pl := range places {
		r := d.row(pl.Partition)
		r.Standing = pl.Standing
		if pl.Due != "" {
			r.Due = &pl.Due
		}
		why := pl.Why
		if pl.Owner == nil {
			e, known := last[pl.Partition]
			if known && e.Action == registry.ActionReleased {
				r.Since = e.Time
			}
			if pl.Standing == StandingOwnerless {
				why += "; " + before(e, known)
			}
		} else {
			d.own(r, *pl.Owner)
			if at, ok := claims[pl.Partition][pl.Owner.Token]; ok {
				r.Since = &at
			}
		}
		if why != "" {
			r.Why = &why
		}
	}
}

// before tells of the owner before, from the newest entry about the partition.
func before(e Entry, known bool) string {
	switch {
	case !known:
		return "no owner before is known"
	case e.Reason == nil:
		return e.Action + " by " + e.Member
	case e.Action == ActionEnded:
		return e.Member + " had it: " + *e.Reason
	}
	return fmt.Sprintf("%s by %s (%s)", e.Action, e.Member, *e.Reason)
}

func (d *describer) own(r *Row, o Owner) {
	registered := o.Member != ""
	r.Owner, r.OwnerRegistered, r.Token = &o.Value, &registered, &o.Token
	if host := hostOf(o.Member); host != "" {
		r.Host = &host
	}
	if o.Stream >= 0 {
		r.Stream = &o.Stream
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

func (d *describer) readOffsets(keys []registry.KV) {
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
}

// readTopics marks the partitions that are only owned. Records that cannot be read
// have been told of.
func (d *describer) readTopics(root registry.Root, topics []registry.KV) {
	without := map[string]bool{}
	for _, kv := range topics {
		if name, rec, ok, err := root.ParseTopic(kv); ok && err == nil {
			without[name] = rec.NoLog
		}
	}
	for p, r := range d.rows {
		r.NoLog = without[p.Topic]
	}
}

func (d *describer) finish(ctx context.Context, ends LogEnds) *Description {
	p := d.picture
	out := &Description{Group: p.Group, Revision: p.Revision, State: d.state, Members: d.members(), Partitions: []Row{}}
	if strategy := p.Strategy(); strategy != "" {
		out.Strategy = &strategy
	}
	if p.Refusal != nil {
		text := p.Refusal.Error()
		out.Refusal = &text
	}
	partitions := slices.SortedFunc(maps.Keys(d.rows), registry.ComparePartitions)
	var logEnds map[registry.Partition]int64
	if ends != nil {
		logEnds = ends(ctx, slices.DeleteFunc(slices.Clone(partitions), func(p registry.Partition) bool { return d.rows[p].NoLog }))
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
		out.Partitions = append(out.Partitions, *r)
	}
	return out
}

func (d *describer) members() []Member {
	owns := map[string]int{}
	for _, o := range d.picture.Owners {
		owns[o.Member]++
	}
	due := counts(d.picture.Due)
	list := []Member{}
	for _, info := range d.picture.Snapshot.Members {
		rec := d.picture.Members[info.ID]
		m := Member{ID: info.ID, Host: hostOf(info.ID), Pattern: rec.Pattern, Subscription: info.Subscription,
			Strategy: info.Strategies, Lease: registry.LeaseText(rec.Lease), Owns: owns[info.ID]}
		if m.Subscription == nil {
			m.Subscription = map[string]int32{}
		}
		if m.Strategy == nil {
			m.Strategy = []string{}
		}
		if rec.Pattern != registry.PatternStatic {
			for text := range rec.Subscription {
				m.Filter = &text
			}
		}
		if ms, err := strconv.ParseInt(rec.Timestamp, 10, 64); err == nil {
			at := time.UnixMilli(ms)
			m.Since = &at
		}
		if d.picture.Due != nil {
			n := due[info.ID]
			m.Due = &n
		}
		list = append(list, m)
	}
	return list
}
