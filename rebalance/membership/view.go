package membership

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// The prefixes of a View, in order.
const (
	ViewIDs     = iota // the group's registrations
	ViewBrokers        // the live brokers
	ViewTopics         // the topics
	ViewTarget         // the group's target record
)

// View follows what the members of a group look at. A Membership opens its own,
// unless its Config has one: many members of one group in a process can share it, so
// that the process neither watches nor parses everything once for each.
type View struct {
	view  *registry.View
	root  registry.Root
	group registry.GroupPaths

	mu     sync.Mutex
	seats  map[*seat]struct{}
	reader *rebalance.Reader
	last   rebalance.Snapshot // what was read last
	bad    []error            // records that could not be

	notices notices
}

// seat is the place of one membership at a view. Its channels hold a token after
// what nobody has taken note of.
type seat struct {
	*View
	id      string
	changed chan struct{}
	trouble chan struct{}
}

// OpenView lists what the members of the group look at, bounded by ctx, and follows
// it until Close. Of the options the listener is not used.
func OpenView(ctx context.Context, st registry.Store, root registry.Root, group string, o registry.ViewOptions) (*View, error) {
	v := &View{root: root, group: root.Group(group), seats: map[*seat]struct{}{}}
	v.reader = rebalance.NewReader(root, v.group, "")
	o.Listener = func(e registry.ViewEvent) {
		if e.Kind == registry.ViewTrouble {
			v.tell(func(s *seat) chan struct{} { return s.trouble })
		}
	}
	prefixes := []string{ViewIDs: v.group.IDs(), ViewBrokers: root.Brokers(), ViewTopics: root.Topics(), ViewTarget: v.group.Target()}
	var err error
	v.view, err = registry.OpenView(ctx, st, prefixes, o, func(registry.Snapshot, []registry.Event) {
		v.tell(func(s *seat) chan struct{} { return s.changed })
	})
	if err != nil {
		return nil, fmt.Errorf("view of group %s: %w", group, err)
	}
	return v, nil
}

// Close ends the view. No membership may use it any more.
func (v *View) Close() {
	v.view.Close()
	v.notices.close()
}

func (v *View) tell(channel func(*seat) chan struct{}) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for s := range v.seats {
		select {
		case channel(s) <- struct{}{}:
		default:
		}
	}
}

func (v *View) sit(id string) *seat {
	s := &seat{View: v, id: id, changed: make(chan struct{}, 1), trouble: make(chan struct{}, 1)}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.seats[s] = struct{}{}
	return s
}

// watchPatience bounds how long a member waits for its view before it registers. etcd
// has brought a new watch up to date by then, though it may not have said so.
const watchPatience = 110 * time.Millisecond

// await returns when what happens from now on is seen at once. The group begins to
// give up partitions for a member as soon as it registers; one that still had to
// wait for its first news would keep them from everybody meanwhile.
func (s *seat) await(ctx context.Context) {
	select {
	case <-s.view.Watching():
		return
	default:
	}
	patience := time.NewTimer(watchPatience)
	defer patience.Stop()
	select {
	case <-s.view.Watching():
	case <-patience.C:
	case <-ctx.Done():
	}
}

func (s *seat) rise() {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.seats, s)
}

// read returns the newest snapshot, as keys and as what they mean to the member.
func (s *seat) read() (registry.Snapshot, rebalance.Snapshot, []error) {
	keys := s.view.Snapshot()
	s.mu.Lock()
	defer s.mu.Unlock()
	if keys.Revision != s.last.Revision {
		s.last, s.bad = read(s.reader, s.group, keys, keys.Under(ViewIDs))
	}
	mine := s.last
	kv, _ := keys.Get(ViewIDs, s.group.ID(s.id))
	mine.Registered = kv.ModRevision
	return keys, mine, s.bad
}

func read(r *rebalance.Reader, group registry.GroupPaths, keys registry.Snapshot, ids []registry.KV) (rebalance.Snapshot, []error) {
	var target *registry.KV
	if kv, ok := keys.Get(ViewTarget, group.Target()); ok {
		target = &kv
	}
	return r.Read(keys.Revision, ids, keys.Under(ViewTopics), target)
}

// with returns the snapshot that there would be if the member were registered.
func (s *seat) with(registration []byte) rebalance.Snapshot {
	keys := s.view.Snapshot()
	mine := registry.KV{Key: s.group.ID(s.id), Value: registration, CreateRevision: keys.Revision, ModRevision: keys.Revision, Lease: -1}
	ids := []registry.KV{mine}
	for kv := range keys.All(ViewIDs) {
		if kv.Key != mine.Key {
			ids = append(ids, kv)
		}
	}
	slices.SortFunc(ids, func(a, b registry.KV) int { return strings.Compare(a.Key, b.Key) })
	snapshot, _ := read(rebalance.NewReader(s.root, s.group, s.id), s.group, keys, ids)
	return snapshot
}
