// Package consumer is the high-level consumer: a member of a group that reads
// the partitions it owns, hands their records to a Handler, and commits what the
// handler has finished.
//
// How it is made: package membership owns the partitions; driver.go is the work
// that it is given; start.go finds where to begin; fetch.go reads from the brokers;
// delivery.go hands over, to a handler or by stream.go; progress.go knows what is
// finished; commit.go commits. filter.go makes one expression of what to include and
// what not; control.go is what an application may ask for meanwhile.
package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/rebalance/membership"
	"github.com/muster-io/muster/registry"
)

// Reset says where to begin in a partition for which nothing is committed.
type Reset string

const (
	Largest  Reset = "largest"  // what comes from now on
	Smallest Reset = "smallest" // all that is there
)

// Config describes a consumer. Store, Group and Topics are required.
type Config struct {
	// Store holds the registry; the consumer does not close it.
	Store registry.Store
	Root  registry.Root
	Group string
	// Topics maps each topic to a number of streams: how many of its partitions are
	// handled at a time. A topic need not exist yet.
	Topics map[string]int32
	// Include and Exclude, in place of Topics, choose topics by regular expressions in
	// the syntax of Java that match the whole name, a comma meaning "or": those that
	// match Include, or all if it is empty, but for those that match Exclude. The choice
	// is made anew whenever topics come or go. Groups of parentheses are counted over
	// both, so that \1 means the first of Exclude if there is one.
	Include, Exclude string
	// IncludeInternal has them choose internal topics too (exclude.internal.topics).
	IncludeInternal bool
	// Streams is how many partitions are handled at a time, of all topics that they
	// choose together. Zero means 1.
	Streams int32

	// ID names this consumer in the group; it must be unique. Empty means
	// <hostname>:<uuid>.
	ID string
	// Strategies in order of preference: the group takes the first in the list of its
	// lowest member that all members state. Empty means range.
	Strategies []string
	// SessionTimeout is zookeeper.session.timeout.ms: after it, a consumer that went
	// silent loses its partitions. Zero means 6 s.
	SessionTimeout time.Duration
	// CommitInterval is auto.commit.interval.ms. Zero means 1 s.
	CommitInterval time.Duration
	// ManualCommit (auto.commit.enable=false) leaves all commits to Consumer.Commit:
	// nothing is committed on its own, neither at the interval, nor when a partition is
	// given up, nor where it begins.
	ManualCommit bool
	// Reset is auto.offset.reset. Empty means largest. A partition first seen after
	// the group existed begins at the smallest offset whatever this says.
	Reset Reset
	// LeaveTimeout bounds how long a stop waits for handlers to finish the records
	// in hand; past it they lose their partitions. Zero means 30 s.
	LeaveTimeout time.Duration
	// MaxBufferedBytes bounds the records that wait for a handler, by partition.
	// Zero means 1 MiB. Records that a broker sent together come together, so that
	// one fetch more may be there.
	MaxBufferedBytes int
	// MaxTotalBytes bounds them for all partitions together: past it only partitions of
	// which nothing waits are fetched. Zero means 64 MiB.
	MaxTotalBytes int
	// FetchBytes is fetch.message.max.bytes: how much of a partition a broker sends at
	// once; a record that is larger comes alone. Zero means 1 MiB.
	FetchBytes int
	// ComplaintPause is how often a wait that goes on is complained of. Zero means
	// one minute.
	ComplaintPause time.Duration
	// View, which may be nil, is shared with other consumers of the group.
	View *membership.View

	Logger *slog.Logger // nil discards
	// Listener hears of events; its functions must not block.
	Listener Listener
	// Metrics, which may be nil, counts; all members of a process share it.
	Metrics *membership.Metrics
}

// Listener is told what happens to a consumer. Nil functions are left out. They
// are called from several goroutines, also at the same time.
type Listener struct {
	Registered func(id string, lease registry.LeaseID)
	Rebalanced func(r rebalance.Rebalanced)
	// Assigned: records follow, from a.Offset on. ctx ends when ownership ends: after
	// Revoked, or before Lost.
	Assigned func(ctx context.Context, a Assignment)
	// Revoked: given up in order; next is committed. It is -1, as it may be without an
	// Assigned before, where it was not yet known where to begin.
	Revoked func(p registry.Partition, next int64)
	// Lost: ownership has ended already. It may come without an Assigned before, too.
	Lost      func(p registry.Partition, reason string)
	Committed func(p registry.Partition, next int64)
	Waiting   func(p registry.Partition, holder string)
	// Refused: the group cannot be divided, and why; empty when that is over.
	Refused func(reason string)
}

// Assignment is a partition that begins to be handed over.
type Assignment struct {
	Partition registry.Partition
	Stream    int32
	Offset    int64
	Token     int64 // the fencing token, as Record.Token
}

// Record is a record that was handed over.
type Record struct {
	Partition registry.Partition
	Offset    int64
	Timestamp time.Time
	Key       []byte
	Value     []byte
	Headers   []Header

	owner  *delivery
	ticket *ticket
	finish func(error) bool
	held   bool
}

// Header is a header of a record.
type Header struct {
	Key   string
	Value []byte
}

// Owned tells whether the consumer still owns the record's partition at this
// moment. It was true just before the hand-over; a handler that did slow work
// looks again just before an effect that must not happen twice.
func (r *Record) Owned() bool { return r.owner.Alive() }

// Token is the fencing token of the ownership: it is larger for each later owner
// of the partition, in whatever process.
func (r *Record) Token() int64 { return r.owner.Token }

// Hold, called by a handler before it returns, keeps the record open after that: it
// counts as consumed when done(nil) is called, by any goroutine. So a handler can have
// several records of a partition in work, in whose order they are handed over but
// need not be finished: offsets advance only up to the first that is not. An error
// given to done is as one returned by the handler.
//
// done must be called once for each record, also when ownership is lost: the consumer
// waits for it, as for a handler, before it gives the partition up or hands it over
// anew. The records held of a partition are bounded by MaxBufferedBytes.
func (r *Record) Hold() (done func(error)) {
	r.held = true
	var once sync.Once
	return func(err error) { once.Do(func() { r.finish(err) }) }
}

// ErrNotOwned: the partition is not, or not any more, owned by this consumer. It is
// also what a Handler returns for a record that it left alone because Owned had
// become false. Any other error will do: once the partition is lost, the answer to
// its records does not count.
var ErrNotOwned = errors.New("partition is not owned")

// ErrNoLog ends a consumer of a topic that has no log: its partitions can be owned,
// and there is nothing to read.
var ErrNoLog = errors.New("the topic has no log, so that nothing can be read of it")

// Handler is given one record at a time of each stream. The record counts as
// consumed when it returns nil: its offset is committed only then. ctx ends when
// ownership is lost, not when it is given up in order: then the consumer waits for
// the handler to finish. An error for a record that is still owned stops the consumer.
type Handler func(ctx context.Context, r *Record) error

// Defaults of Config.
const (
	DefaultCommitInterval = time.Second
	DefaultLeaveTimeout   = membership.DefaultLeaveTimeout
	DefaultBufferedBytes  = 1 << 20
	DefaultTotalBytes     = 64 << 20
	DefaultFetchBytes     = 1 << 20
)

// Consumer is a member of a group. Use New, then Run once. The other methods may be
// called at any time, by any goroutine.
type Consumer struct {
	cfg      Config
	group    registry.GroupPaths
	handler  Handler // nil: streams
	streams  map[lane]*Stream
	filtered bool
	member   *membership.Membership
	driver   atomic.Pointer[driver] // nil before Run
}

// New checks the configuration. Without a handler the records are read from Streams.
func New(cfg Config, h Handler) (*Consumer, error) {
	group, err := cfg.complete()
	if err != nil {
		return nil, err
	}
	member, err := membership.New(group)
	if err != nil {
		return nil, err
	}
	c := &Consumer{cfg: cfg, group: cfg.Root.Group(cfg.Group), handler: h, member: member, filtered: group.Subscription.Pattern != ""}
	if h == nil {
		c.streams = newStreams(group.Subscription)
	}
	return c, nil
}

// Validate tells what New would refuse, before there is a store.
func (c Config) Validate() error {
	group, err := c.complete()
	if err != nil {
		return err
	}
	return group.Validate()
}

// complete checks what is not the membership's to check, fills in the defaults, and
// returns the configuration of the membership.
func (c *Config) complete() (group membership.Config, err error) {
	if c.Reset == "" {
		c.Reset = Largest
	}
	if c.Reset != Largest && c.Reset != Smallest {
		return group, fmt.Errorf("auto.offset.reset %q: want largest or smallest", c.Reset)
	}
	if c.CommitInterval < 0 || min(c.MaxBufferedBytes, c.MaxTotalBytes, c.FetchBytes) < 0 || c.FetchBytes > math.MaxInt32 {
		return group, fmt.Errorf("commit interval %s, %d buffered bytes, %d in total, fetch of %d: want none below 0, the last at most %d",
			c.CommitInterval, c.MaxBufferedBytes, c.MaxTotalBytes, c.FetchBytes, math.MaxInt32)
	}
	setDefault(&c.CommitInterval, DefaultCommitInterval)
	setDefault(&c.MaxBufferedBytes, DefaultBufferedBytes)
	setDefault(&c.MaxTotalBytes, DefaultTotalBytes)
	setDefault(&c.FetchBytes, DefaultFetchBytes)
	subscription, err := c.subscription()
	if err != nil {
		return group, err
	}
	return membership.Config{Store: c.Store, Root: c.Root, Group: c.Group, ID: c.ID,
		Subscription: subscription, Strategies: c.Strategies, SessionTimeout: c.SessionTimeout, LeaveTimeout: c.LeaveTimeout,
		ComplaintPause: c.ComplaintPause, View: c.View, Watched: true, Logger: c.Logger, Metrics: c.Metrics,
		Listener: membership.Listener{Registered: c.Listener.Registered, Rebalanced: c.Listener.Rebalanced,
			Waiting: c.Listener.Waiting, Refused: c.Listener.Refused}}, nil
}

func setDefault[T time.Duration | int](v *T, to T) {
	if *v == 0 {
		*v = to
	}
}

// ID is the consumer id in the registry.
func (c *Consumer) ID() string { return c.member.ID() }

// Standing is how its membership stands; see membership.Membership.
func (c *Consumer) Standing(ctx context.Context) (membership.Standing, error) {
	return c.member.Standing(ctx)
}

// Run joins the group and hands over records until ctx ends; then it finishes
// the records in hand, commits, gives up its partitions, leaves, and returns nil.
// It returns an error if the handler did, after leaving in the same order, or if
// the leave could not be carried out, in which case the lease ends it.
//
// A handler that does not return holds up Run, though not the group: after
// LeaveTimeout its partitions are free for others.
func (c *Consumer) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	d := newDriver(c, stop)
	c.driver.Store(d)
	d.work.Go(d.fetch.run)
	d.work.Go(d.commits.run)
	err := c.member.Run(ctx, d)
	d.close()
	for _, s := range c.streams {
		close(s.ended)
	}
	switch {
	case d.failure != nil:
		return d.failure
	case errors.Is(err, membership.ErrLeftBehind):
		return fmt.Errorf("handlers did not finish the record in hand in time, which is not committed: %w", err)
	}
	return err
}
