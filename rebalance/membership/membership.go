// Package membership keeps a process in a group: it registers, follows the group,
// claims the partitions that are due and gives up those that are not, and tells a
// Work when to begin with a partition and when to stop. It knows nothing of what
// the work is.
//
// How it is made: rebalance.Member decides; loop.go feeds it and carries its
// actions out; session.go keeps the member registered; claim.go writes and deletes
// owner keys, history.go what is told of them; watch.go follows those of others;
// view.go is what is seen of the group; notice.go has the end of the process noticed;
// metrics.go counts; ownership.go is what the Work holds.
package membership

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/vigil"
)

// Config describes a membership. Store, Group and Subscription are required.
type Config struct {
	// Store holds the registry; the membership does not close it.
	Store registry.Store
	Root  registry.Root
	Group string
	// ID names this member in the group; it must be unique. Empty means
	// <hostname>:<uuid>.
	ID           string
	Subscription Subscription
	// Strategies in order of preference: the group takes the first in the list of its
	// lowest member that all members state. Empty means range.
	Strategies []string
	// SessionTimeout is zookeeper.session.timeout.ms: after it, a member that went
	// silent loses its partitions. Zero means 6 s.
	SessionTimeout time.Duration
	// LeaveTimeout bounds how long a stop waits for Work.Drain; past it the partitions
	// are lost to it. Zero means 30 s.
	LeaveTimeout time.Duration
	// ComplaintPause is how often a wait that goes on is complained of. Zero means
	// one minute.
	ComplaintPause time.Duration
	// View, which may be nil, is shared with other members of the group. It must stay
	// open until Run has returned.
	View *View
	// Watched has a daemon on this host, if there is one, end the session at once when
	// this process has ended without a word: see package vigil. Not for a member
	// whose work may go on when this process has ended.
	Watched bool

	Logger *slog.Logger // nil discards
	// Listener hears of events; its functions must not block.
	Listener Listener
	// Metrics, which may be nil, counts; all memberships of a process share it.
	Metrics *Metrics
}

// Subscription says which topics a member reads, and with how many streams: how
// many owners of a topic's partitions it counts as.
type Subscription struct {
	// Topics maps each topic to a number of streams. A topic need not exist yet.
	Topics map[string]int32
	// Pattern, if not empty, says that not Topics but a filter chooses them, anew
	// whenever topics come or go: registry.PatternWhiteList or PatternBlackList.
	Pattern string
	Filter  string // the regular expression, as ParseFilter takes it
	Streams int32  // of each topic that the filter allows
	// IncludeInternal has the filter see internal topics too.
	IncludeInternal bool
}

// Listener is told what happens to a membership. Nil functions are left out. They
// are called from several goroutines, also at the same time.
type Listener struct {
	Registered func(id string, lease registry.LeaseID)
	Rebalanced func(r rebalance.Rebalanced)
	Waiting    func(p registry.Partition, holder string)
	// Refused: the group cannot be divided, and why; empty when that is over.
	Refused func(reason string)
}

// Work is what a member does with its partitions. All functions but Drain are
// called by one goroutine, one after the other, and must not block.
type Work interface {
	// Snapshot tells how group and topics look now, before what follows from it. keys
	// are those of a View.
	Snapshot(s rebalance.Snapshot, keys registry.Snapshot)
	// Begin: the partitions are owned from now on; those that were claimed together
	// come together.
	Begin(list []*Ownership)
	// Drain is called, in a goroutine of its own, when a partition is to be given up:
	// finish what is in hand and stop. Ownership lasts until it returns, unless it is
	// lost before, which the ownership's context tells: then it returns false.
	Drain(o *Ownership) bool
	// Revoked: Drain has returned true, and the partition is given up now.
	Revoked(o *Ownership)
	// Lost: ownership has ended already, whether or not a Drain is under way.
	Lost(o *Ownership, reason string)
}

// Defaults of Config.
const (
	DefaultLeaveTimeout   = 30 * time.Second
	DefaultComplaintPause = time.Minute
)

// Membership is a member of a group. Use New, then Run once.
//
// Its loop owns all fields but those that say otherwise; whatever blocks runs in a
// goroutine of its own, which comes back to the loop through post.
type Membership struct {
	cfg    Config
	group  registry.GroupPaths
	log    *slog.Logger
	store  registry.Store
	work   Work
	member *rebalance.Member

	ctx    context.Context // ends when the membership closes; everything hangs on it
	cancel context.CancelFunc
	tasks  sync.WaitGroup
	posts  chan func()

	seat     *seat
	vigil    *vigil.Client     // nil where nobody is asked to watch; safe for concurrent use
	session  *registry.Session // nil while there is none
	owned    map[registry.Partition]*Ownership
	watches  map[registry.Partition]context.CancelFunc
	reported map[string]bool // bad records that were complained about
	timer    *time.Timer

	// strategy and snapshot of the newest division, for history
	strategy string
	revision int64
	// history; safe for concurrent use
	entries   atomic.Uint64 // written
	pruneFrom uint64
	pruneDue  atomic.Bool

	waits   map[registry.Partition]*wait
	silence time.Duration // when it was last complained of

	looping    atomic.Bool // Run has begun to serve posts, and goes on to
	registered bool        // under the present session
	// wasRegistered: under any session, unless another process took the id; also read by
	// those that register.
	wasRegistered atomic.Bool

	meter meter

	leaving  bool
	finished bool
	err      error
}

// New checks the configuration.
func New(cfg Config) (*Membership, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	if cfg.Store == nil {
		return nil, errors.New("a member needs a store")
	}
	if cfg.ID == "" {
		id, err := newID()
		if err != nil {
			return nil, err
		}
		cfg.ID = id
	}
	m := &Membership{cfg: cfg, group: cfg.Root.Group(cfg.Group), log: cfg.Logger.With("group", cfg.Group, "member", cfg.ID),
		store: cfg.Store, member: rebalance.NewMember(cfg.ID), posts: make(chan func()),
		owned: map[registry.Partition]*Ownership{}, watches: map[registry.Partition]context.CancelFunc{},
		reported: map[string]bool{}, waits: map[registry.Partition]*wait{}, pruneFrom: pruneStart(cfg.ID),
		meter: meter{metrics: cfg.Metrics, group: cfg.Group}}
	return m, nil
}

// Validate tells what New would refuse, before there is a store.
func (c Config) Validate() error { return c.complete() }

// complete checks all but the store, and fills in what is left to it.
func (c *Config) complete() error {
	if err := registry.ValidateGroupName(c.Group); err != nil {
		return fmt.Errorf("group.id: %w", err)
	}
	if err := c.Subscription.check(); err != nil {
		return err
	}
	if len(c.Strategies) == 0 {
		c.Strategies = []string{rebalance.StrategyRange}
	}
	for _, s := range c.Strategies {
		if !rebalance.Known(s) {
			return fmt.Errorf("partition.assignment.strategy %q: want range, range-numeric, roundrobin or sticky", s)
		}
	}
	if _, err := registry.EscapeName(c.ID); err != nil {
		return fmt.Errorf("consumer.id: %w", err)
	}
	if c.LeaveTimeout < 0 || c.ComplaintPause < 0 {
		return fmt.Errorf("leave timeout %s, complaint pause %s: want none below 0", c.LeaveTimeout, c.ComplaintPause)
	}
	setDefault(&c.SessionTimeout, registry.DefaultTTL)
	setDefault(&c.LeaveTimeout, DefaultLeaveTimeout)
	setDefault(&c.ComplaintPause, DefaultComplaintPause)
	if c.SessionTimeout < registry.MinTTL || c.SessionTimeout > registry.MaxTTL {
		return fmt.Errorf("zookeeper.session.timeout.ms %d: want %d to %d", c.SessionTimeout.Milliseconds(),
			registry.MinTTL.Milliseconds(), registry.MaxTTL.Milliseconds())
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return nil
}

func (s *Subscription) check() error {
	if s.Pattern != "" {
		if len(s.Topics) > 0 {
			return errors.New("a member has either topics or a filter")
		}
		if s.Streams < 1 || s.Streams > registry.MaxStreams {
			return fmt.Errorf("%d streams for filter %s: want 1 to %d", s.Streams, s.Filter, registry.MaxStreams)
		}
		_, err := rebalance.ParseFilter(s.Pattern, s.Filter, !s.IncludeInternal)
		return err
	}
	if len(s.Topics) == 0 {
		return errors.New("a member needs a topic")
	}
	for topic, streams := range s.Topics {
		if err := registry.ValidateTopicName(topic); err != nil {
			return err
		}
		if streams < 1 || streams > registry.MaxStreams {
			return fmt.Errorf("%d streams for topic %s: want 1 to %d", streams, topic, registry.MaxStreams)
		}
	}
	s.Topics = maps.Clone(s.Topics) // it is read by goroutines of ours
	return nil
}

func setDefault(v *time.Duration, to time.Duration) {
	if *v == 0 {
		*v = to
	}
}

func newID() (string, error) {
	host, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("make a consumer id: %w", err)
	}
	return host + ":" + uuid.NewString(), nil
}

// ID is the member's id in the registry.
func (m *Membership) ID() string { return m.cfg.ID }

// Logger logs with the group and the member.
func (m *Membership) Logger() *slog.Logger { return m.log }

// Standing is how a membership stands.
type Standing struct {
	Registered bool          // under a session that lives
	Left       time.Duration // until that is dead, unless it is renewed
	Owned      int           // partitions
}

// Standing asks Run; by any goroutine, at any time. Before Run has begun and after it
// has ended nothing stands. An error is ctx's: Run has not come round before that ended.
func (m *Membership) Standing(ctx context.Context) (Standing, error) {
	answer := make(chan Standing, 1)
	ask := func() {
		s := Standing{Owned: len(m.owned)}
		if m.session != nil && m.session.Alive() {
			s.Registered, s.Left = m.registered, m.session.Left()
		}
		answer <- s
	}
	for m.looping.Load() {
		select {
		case m.posts <- ask:
			return <-answer, nil
		case <-time.After(standingRetry): // it may have ended
		case <-ctx.Done():
			return Standing{}, fmt.Errorf("ask how the member stands: %w", ctx.Err())
		}
	}
	return Standing{}, nil
}

// standingRetry is how often it is looked whether Run has ended.
const standingRetry = 100 * time.Millisecond

// ErrLeftBehind: a stop has taken longer than LeaveTimeout. What was still at work
// lost its partitions.
var ErrLeftBehind = errors.New("stopped before all work had come to its end; its partitions were lost")

// Run joins the group and does the work until ctx ends; then it has all partitions
// drained, gives them up, leaves, and returns nil. It returns an error if it cannot
// join, or if the leave could not be carried out, in which case the lease ends it:
// ErrLeftBehind if Drain did not return in time.
//
// All ownerships have ended when it returns, each by one of Work's Revoked and Lost,
// and nothing of the work is called any more.
func (m *Membership) Run(ctx context.Context, w Work) error {
	m.work = w
	m.ctx, m.cancel = context.WithCancel(context.Background())
	m.timer = time.NewTimer(time.Hour)
	defer m.close()
	return m.run(ctx)
}
