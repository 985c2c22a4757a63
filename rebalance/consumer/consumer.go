// Package consumer is the high-level consumer: a member of a group that reads
// the partitions it owns, hands their records to a Handler, and commits what the
// handler has finished.
//
// How it is made: package membership owns the partitions; driver.go is the work
// that it is given; start.go finds where to begin; fetch.go reads from the brokers;
// delivery.go hands over; commit.go commits.
package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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

	// ID names this consumer in the group; it must be unique. Empty means
	// <hostname>:<uuid>.
	ID string
	// Strategy is the one preferred; the group takes it if all members state it.
	// Empty means range.
	Strategy string
	// SessionTimeout is zookeeper.session.timeout.ms: after it, a consumer that went
	// silent loses its partitions. Zero means 6 s.
	SessionTimeout time.Duration
	// CommitInterval is auto.commit.interval.ms. Zero means 1 s.
	CommitInterval time.Duration
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

	Logger *slog.Logger // nil discards
	// Listener hears of events; its functions must not block.
	Listener Listener
}

// Listener is told what happens to a consumer. Nil functions are left out. They
// are called from several goroutines, also at the same time.
type Listener struct {
	Registered func(id string, lease registry.LeaseID)
	Rebalanced func(r rebalance.Rebalanced)
	Assigned   func(p registry.Partition, stream int32, offset int64)
	Revoked    func(p registry.Partition, next int64) // given up in order; next is committed
	Lost       func(p registry.Partition, reason string)
	Committed  func(p registry.Partition, next int64)
	Waiting    func(p registry.Partition, holder string)
}

// Record is a record that was handed over.
type Record struct {
	Partition registry.Partition
	Offset    int64
	Timestamp time.Time
	Key       []byte
	Value     []byte
	Headers   []Header

	owner *delivery
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

// ErrNotOwned is what a Handler returns for a record that it left alone because
// Owned had become false. Any other error will do: once the partition is lost, the
// answer to its records does not count.
var ErrNotOwned = errors.New("partition is not owned any more")

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
)

// Consumer is a member of a group. Use New, then Run once.
type Consumer struct {
	cfg     Config
	group   registry.GroupPaths
	handler Handler
	member  *membership.Membership
}

// New checks the configuration.
func New(cfg Config, h Handler) (*Consumer, error) {
	if h == nil {
		return nil, errors.New("consumer needs a handler")
	}
	if cfg.Reset == "" {
		cfg.Reset = Largest
	}
	if cfg.Reset != Largest && cfg.Reset != Smallest {
		return nil, fmt.Errorf("auto.offset.reset %q: want largest or smallest", cfg.Reset)
	}
	if cfg.CommitInterval < 0 || cfg.MaxBufferedBytes < 0 {
		return nil, fmt.Errorf("commit interval %s, %d buffered bytes: want none below 0", cfg.CommitInterval, cfg.MaxBufferedBytes)
	}
	setDefault(&cfg.CommitInterval, DefaultCommitInterval)
	setDefault(&cfg.MaxBufferedBytes, DefaultBufferedBytes)
	m := membership.Config{Store: cfg.Store, Root: cfg.Root, Group: cfg.Group, ID: cfg.ID,
		Subscription: membership.Subscription{Topics: cfg.Topics}, SessionTimeout: cfg.SessionTimeout, LeaveTimeout: cfg.LeaveTimeout,
		Logger: cfg.Logger, Listener: membership.Listener{Registered: cfg.Listener.Registered, Rebalanced: cfg.Listener.Rebalanced,
			Waiting: cfg.Listener.Waiting}}
	if cfg.Strategy != "" {
		m.Strategies = []string{cfg.Strategy}
	}
	member, err := membership.New(m)
	if err != nil {
		return nil, err
	}
	return &Consumer{cfg: cfg, group: cfg.Root.Group(cfg.Group), handler: h, member: member}, nil
}

func setDefault[T time.Duration | int](v *T, to T) {
	if *v == 0 {
		*v = to
	}
}

// ID is the consumer id in the registry.
func (c *Consumer) ID() string { return c.member.ID() }

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
	d.work.Go(d.fetch.run)
	d.work.Go(d.commits.run)
	err := c.member.Run(ctx, d)
	d.close()
	switch {
	case d.failure != nil:
		return d.failure
	case errors.Is(err, membership.ErrLeftBehind):
		return fmt.Errorf("handlers did not finish the record in hand in time, which is not committed: %w", err)
	}
	return err
}
