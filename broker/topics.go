package broker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/muster-io/muster/broker/api"
	"github.com/muster-io/muster/broker/partition"
	"github.com/muster-io/muster/registry"
)

// topics is what the daemon knows of brokers and topics, and the partitions that
// it leads. It follows a View of the registry by its events; what is shown to
// clients is exchanged as a whole once the new partitions are open.
type topics struct {
	d       *Daemon
	dirs    *logDirs
	errands *errands

	queueMu sync.Mutex
	queue   []registry.Event // not taken in yet
	queued  chan struct{}

	catalog  *catalog // of the goroutine that follows, as what comes next
	failing  map[topicNumber]time.Time
	line     []topicNumber        // to be opened, a slice at a time
	waiting  map[topicNumber]bool // those in line
	reported map[string]bool      // bad records that were complained about
	logs     int                  // that are open
	maxLogs  int
	crowded  time.Time // when it was complained that there were too many

	mu       sync.RWMutex
	snapshot api.Snapshot
	open     map[topicNumber]local
	ownLease registry.LeaseID // of this daemon's record as the registry shows it; 0 if it shows none

	pulse pulse // of follow
}

type topicNumber struct {
	topic  string
	number int32
}

// local is a partition of this daemon, or why it cannot be served.
type local struct {
	partition *partition.Local
	err       error
	spec      localSpec
	pause     time.Duration // after err, until it is tried again
}

// localSpec is what a partition was opened with. When something else is wanted it
// is closed and opened again.
type localSpec struct {
	id       uuid.UUID
	epoch    int32
	settings logSettings
}

func newTopics(d *Daemon) *topics {
	t := &topics{d: d, queued: make(chan struct{}, 1), catalog: newCatalog(d.cfg.Root),
		failing: map[topicNumber]time.Time{}, waiting: map[topicNumber]bool{}, reported: map[string]bool{}, open: map[topicNumber]local{},
		snapshot: api.Snapshot{Controller: -1}}
	t.maxLogs, _, _ = shareOpenFiles(openFileLimit())
	t.dirs = newLogDirs(d.cfg.DataDir, d.log, d.trusted)
	t.errands = newErrands(d)
	return t
}

const (
	// silencePause is how often a silent registry is complained of.
	silencePause = time.Minute
	// A log that could not be opened is tried again: its trouble may be over.
	minOpenPause = time.Second
	maxOpenPause = time.Minute
)

// viewPrefixes are what the daemon follows.
func viewPrefixes(root registry.Root) []string {
	return []string{root.Brokers(), root.Topics(), root.TopicConfigs(), root.DeletedTopics()}
}

// enqueue takes events from the View, which it must not hold up.
func (t *topics) enqueue(_ registry.Snapshot, events []registry.Event) {
	t.queueMu.Lock()
	t.queue = append(t.queue, events...)
	t.queueMu.Unlock()
	t.wake()
}

// wake has follow look at the queue, and at what waits to be opened.
func (t *topics) wake() {
	select {
	case t.queued <- struct{}{}:
	default:
	}
}

func (t *topics) dequeue() []registry.Event {
	t.queueMu.Lock()
	defer t.queueMu.Unlock()
	events := t.queue
	t.queue = nil
	return events
}

// load takes in what the View holds when it has been opened. Only the end of ctx cuts
// it off: many logs take their time.
func (t *topics) load(ctx context.Context) error {
	ch := t.catalog.apply(t.dequeue())
	if err := t.dirs.settle(t.catalog); err != nil {
		return err
	}
	t.update(ch)
	for len(t.line) > 0 {
		if ctx.Err() != nil {
			return fmt.Errorf("open logs, %d to come: %w", len(t.line), context.Cause(ctx))
		}
		t.openSome()
	}
	return nil
}

// follow takes in what the registry shows until ctx ends.
func (t *topics) follow(ctx context.Context, trouble <-chan struct{}) {
	var silence time.Time
	beat := time.NewTicker(beatEvery)
	defer beat.Stop()
	for {
		t.pulse.beat()
		retry, stop := t.nextRetry()
		if len(t.line) > 0 {
			t.openSome()
			t.wake()
		}
		select {
		case <-ctx.Done():
			stop()
			return
		case <-beat.C:
		case <-t.queued:
			if events := t.dequeue(); len(events) > 0 {
				t.update(t.catalog.apply(events))
			}
		case <-retry:
			t.retry()
		case <-trouble:
			if time.Since(silence) > silencePause {
				silence = time.Now()
				t.d.log.Warn("registry does not answer; topics and brokers shown may be old")
			}
		}
		stop()
	}
}

// nextRetry fires when the next log is to be tried again.
func (t *topics) nextRetry() (c <-chan time.Time, stop func() bool) {
	if len(t.failing) == 0 {
		return nil, func() bool { return true }
	}
	due := slices.MinFunc(slices.Collect(maps.Values(t.failing)), time.Time.Compare)
	timer := time.NewTimer(time.Until(due))
	return timer.C, timer.Stop
}

// retry looks again at the topics with logs that could not be opened.
func (t *topics) retry() {
	ch := catalogChange{topics: map[string]bool{}}
	for tn, due := range t.failing {
		if !time.Now().Before(due) {
			ch.topics[tn.topic] = true
		}
	}
	t.update(ch)
}

// update brings the partitions of this daemon, and what clients are shown, in line
// with the catalog, as far as it has changed.
func (t *topics) update(ch catalogChange) {
	for _, err := range ch.bad {
		t.complain(err)
	}
	next := t.Snapshot()
	next.ClusterID = t.d.clusterID
	if ch.brokers {
		next.Brokers, next.Controller = t.catalog.list(), -1
		if len(next.Brokers) > 0 {
			// Clients send what is for a controller to one; here any daemon will do.
			next.Controller = next.Brokers[0].ID
		}
	}
	var todo localChanges
	if len(ch.topics) > 0 {
		var put []api.Topic
		var gone []string
		for _, name := range slices.Sorted(maps.Keys(ch.topics)) {
			before, _ := next.Topics.Get(name)
			topic, there := t.catalog.topic(name)
			if there {
				put = append(put, topic)
			} else {
				gone = append(gone, name)
			}
			t.plan(before, topic, t.condemned(name, before.ID, ch), &todo, name)
		}
		next.Topics = next.Topics.Change(put, gone)
	}
	if len(todo.close) > 0 || len(todo.aside) > 0 {
		t.publish(next, todo.close) // nobody is to find what is about to be closed
		t.closeAll(todo)
	}
	// Clients are shown a partition when it can be used; but not where that would
	// hold up everything else.
	if len(todo.open)+len(t.line) <= openSlice {
		t.openAll(todo.open)
	} else {
		t.wait(todo.open)
	}
	t.publish(next, nil)
	for name := range ch.topics {
		n, created := t.catalog.count(name, t.d.cfg.ID)
		t.d.members.setCount(name, n, created)
		id, adopt, first := t.toAdopt(name)
		t.errands.adoptIf(name, id, adopt, first)
	}
	t.errands.follow(ch.deletions, t.catalog, t.d.cfg.ID)
}

// toAdopt tells whether this daemon is to give the topic an id: the one that it had,
// which is the one of its logs if the daemon has not seen it. first tells whether it
// leads the first partition.
func (t *topics) toAdopt(name string) (id string, adopt, first bool) {
	e := t.catalog.topics[name]
	if e == nil || e.record == nil || e.unreadable || !e.unnamed {
		return "", false, false
	}
	topic, _ := t.catalog.topic(name)
	id = e.record.TopicID
	for i, p := range topic.Partitions {
		if p.Leader != t.d.cfg.ID {
			continue
		}
		adopt, first = true, first || i == 0
		if id == "" {
			id = t.dirs.topicID(name, p.Number)
		}
	}
	return id, adopt, first
}

// condemned tells whether the deletion of the topic was asked for: a record that is
// gone or has another id without that may come back.
func (t *topics) condemned(name string, id uuid.UUID, ch catalogChange) bool {
	if ch.condemned[id] {
		return true
	}
	marker, there := t.catalog.deletions[name]
	if !there {
		return false
	}
	_, rec, err := t.d.cfg.Root.ParseDeletion(marker)
	asked, errID := uuid.Parse(rec.TopicID)
	return err == nil && errID == nil && asked == id
}

func (t *topics) publish(next api.Snapshot, gone []closing) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.snapshot, t.ownLease = next, t.catalog.brokers[t.d.cfg.ID].lease
	for _, c := range gone {
		delete(t.open, c.tn)
	}
}

func (t *topics) complain(err error) {
	if text := err.Error(); !t.reported[text] {
		t.reported[text] = true
		t.d.log.Warn("record skipped", "error", err)
	}
}

// BrokerID implements api.Cluster.
func (t *topics) BrokerID() int32 { return t.d.cfg.ID }

// Snapshot implements api.Cluster.
func (t *topics) Snapshot() api.Snapshot {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.snapshot
}

// registered is the lease of this daemon's record as the registry shows it; 0 if
// it shows none.
func (t *topics) registered() registry.LeaseID {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.ownLease
}

// locals are the partitions of this daemon at this moment.
func (t *topics) locals() map[topicNumber]local {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return maps.Clone(t.open)
}

// Partition implements api.Cluster.
func (t *topics) Partition(topic string, number int32) (partition.Partition, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if l, ok := t.open[topicNumber{topic, number}]; ok {
		if l.err != nil {
			return nil, l.err
		}
		return l.partition, nil
	}
	known, _ := t.snapshot.Topics.Get(topic)
	if _, there := known.Partition(number); !there {
		return nil, kerr.UnknownTopicOrPartition
	}
	return nil, kerr.NotLeaderForPartition // or not yet: it is being opened
}

// CreateTopic implements api.Cluster.
func (t *topics) CreateTopic(ctx context.Context, name string) error {
	if !t.d.members.alive() {
		return fmt.Errorf("%w: %w", kerr.RequestTimedOut, errNoSession)
	}
	var brokers []int32
	for _, b := range t.Snapshot().Brokers {
		brokers = append(brokers, b.ID)
	}
	_, err := registry.CreateTopic(ctx, t.d.store, t.d.cfg.Root,
		registry.TopicSpec{Name: name, Partitions: t.d.cfg.NumPartitions, ReplicationFactor: 1}, brokers)
	if errors.Is(err, registry.ErrTopicExists) && t.withoutLog(ctx, name) {
		return fmt.Errorf("%w: the topic has no log", kerr.UnknownTopicOrPartition)
	}
	for sentinel, code := range map[error]error{
		registry.ErrTopicExists: kerr.TopicAlreadyExists,
		registry.ErrTopicName:   kerr.InvalidTopicException,
		registry.ErrNoBroker:    kerr.BrokerNotAvailable,
	} {
		if errors.Is(err, sentinel) {
			return fmt.Errorf("%w: %w", code, err)
		}
	}
	if err != nil {
		// The registry is in trouble, or the topic is being deleted: the client is to
		// ask again.
		return fmt.Errorf("%w: %w", kerr.LeaderNotAvailable, err)
	}
	return nil
}

// withoutLog tells whether a topic that clients are not told of is there for owners.
func (t *topics) withoutLog(ctx context.Context, name string) bool {
	kv, _, err := registry.GetKey(ctx, t.d.store, t.d.cfg.Root.Topic(name))
	if err != nil || kv == nil {
		return false
	}
	_, rec, ok, err := t.d.cfg.Root.ParseTopic(*kv)
	return ok && err == nil && rec.NoLog
}

// ProducerID implements api.Cluster.
func (t *topics) ProducerID(ctx context.Context) (int64, error) {
	id, err := t.d.producers.next(ctx)
	if err != nil {
		// What Kafka says while it waits for a block of ids; clients ask again.
		return 0, fmt.Errorf("%w: %w", kerr.CoordinatorLoadInProgress, err)
	}
	return id, nil
}

// close closes all logs.
func (t *topics) close() error {
	t.mu.Lock()
	all := t.open
	t.open = map[topicNumber]local{}
	t.mu.Unlock() // each takes a few syncs, and /metrics is still served
	names := slices.Collect(maps.Keys(all))
	errs := make([]error, len(names))
	parallel(len(names), func(i int) {
		tn := names[i]
		if p := all[tn].partition; p != nil {
			if err := p.Close(); err != nil {
				errs[i] = fmt.Errorf("close %s-%d: %w", tn.topic, tn.number, err)
			}
		}
	})
	return errors.Join(errs...)
}
