package broker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/muster-io/muster/broker/api"
	"github.com/muster-io/muster/broker/partition"
	"github.com/muster-io/muster/broker/storage"
	"github.com/muster-io/muster/registry"
)

// topics is what the daemon knows of brokers and topics, and the partitions that
// it leads. It follows a View of the registry; what is shown to clients is
// exchanged as a whole once the new partitions are open.
type topics struct {
	d *Daemon

	mu       sync.RWMutex
	snapshot api.Snapshot
	open     map[topicNumber]local
	reported map[string]bool  // bad records that were complained about
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
}

func newTopics(d *Daemon) *topics {
	return &topics{d: d, open: map[topicNumber]local{}, reported: map[string]bool{}}
}

// silencePause is how often a silent registry is complained of.
const silencePause = time.Minute

// openAtOnce is how many logs are opened in parallel: recovery reads the disk,
// and more readers only make it seek.
const openAtOnce = 4

// The prefixes of the daemon's view, in order.
const (
	viewBrokers = iota
	viewTopics
)

// follow takes in what the registry shows until ctx ends.
func (t *topics) follow(ctx context.Context, v *registry.View) {
	var silence time.Time
	beat := time.NewTicker(beatEvery)
	defer beat.Stop()
	for {
		t.pulse.beat()
		select {
		case <-ctx.Done():
			return
		case <-beat.C:
		case <-v.Changed():
			t.update(v.Snapshot())
		case <-v.Trouble():
			if time.Since(silence) > silencePause {
				silence = time.Now()
				t.d.log.Warn("registry does not answer; topics and brokers shown may be old")
			}
		}
	}
}

// update makes a snapshot for clients of one for the registry.
func (t *topics) update(s registry.Snapshot) {
	next := api.Snapshot{ClusterID: t.d.clusterID, Controller: -1, Topics: map[string]api.Topic{}}
	var own registry.LeaseID
	for _, kv := range s.Under(viewBrokers) {
		id, rec, err := t.d.cfg.Root.ParseBroker(kv)
		if err != nil {
			t.complain(err)
			continue
		}
		next.Brokers = append(next.Brokers, api.Broker{ID: id, Host: rec.Host, Port: rec.Port})
		if id == t.d.cfg.ID {
			own = kv.Lease
		}
	}
	slices.SortFunc(next.Brokers, func(a, b api.Broker) int { return int(a.ID) - int(b.ID) })
	if len(next.Brokers) > 0 {
		// Clients send what is for a controller to one; here any daemon will do.
		next.Controller = next.Brokers[0].ID
	}
	t.readTopics(s.Under(viewTopics), &next)
	counts := t.openMissing(&next)
	t.mu.Lock()
	t.snapshot, t.ownLease = next, own
	t.mu.Unlock()
	t.d.members.setCounts(counts)
}

func (t *topics) complain(err error) {
	if text := err.Error(); !t.reported[text] {
		t.reported[text] = true
		t.d.log.Warn("record skipped", "error", err)
	}
}

// readTopics joins the records of topics with the states of their partitions. A
// partition without a state has the one it was created with.
func (t *topics) readTopics(kvs []registry.KV, next *api.Snapshot) {
	states := map[topicNumber]registry.PartitionState{}
	for _, kv := range kvs {
		topic, number, state, ok, err := t.d.cfg.Root.ParsePartitionState(kv)
		if err != nil {
			t.complain(err)
		} else if ok {
			states[topicNumber{topic, number}] = state
		}
	}
	for _, kv := range kvs {
		name, rec, ok, err := t.d.cfg.Root.ParseTopic(kv)
		if err != nil {
			t.complain(err)
			continue
		}
		if !ok {
			continue
		}
		topic := api.Topic{Name: name, ID: rec.ID()}
		for _, p := range rec.List(name) {
			replicas := rec.Partitions[p.Number]
			state, ok := states[topicNumber{name, p.Number}]
			if !ok {
				state = registry.InitialState(replicas)
			}
			topic.Partitions = append(topic.Partitions, api.PartitionInfo{Number: p.Number, Leader: state.Leader,
				LeaderEpoch: state.LeaderEpoch, Replicas: replicas, ISR: state.ISR})
		}
		next.Topics[name] = topic
	}
}

// openMissing opens the logs of partitions that this daemon leads and has not
// opened yet, and returns how many partitions of each topic have a replica here.
func (t *topics) openMissing(next *api.Snapshot) map[string]int32 {
	counts := map[string]int32{}
	type job struct {
		topic api.Topic
		info  api.PartitionInfo
	}
	var jobs []job
	for _, name := range slices.Sorted(maps.Keys(next.Topics)) {
		topic := next.Topics[name]
		for _, info := range topic.Partitions {
			if slices.Contains(info.Replicas, t.d.cfg.ID) {
				counts[name]++
			}
			t.mu.RLock()
			l, there := t.open[topicNumber{name, info.Number}]
			t.mu.RUnlock()
			// One that could not be opened is tried again: its trouble may be over.
			if info.Leader == t.d.cfg.ID && (!there || l.err != nil) {
				jobs = append(jobs, job{topic, info})
			}
		}
	}
	var wg sync.WaitGroup
	slots := make(chan struct{}, openAtOnce)
	for _, j := range jobs {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			t.pulse.beat()
			l := t.openOne(j.topic, j.info)
			t.mu.Lock()
			t.open[topicNumber{j.topic.Name, j.info.Number}] = l
			t.mu.Unlock()
		})
	}
	wg.Wait()
	return counts
}

func (t *topics) openOne(topic api.Topic, info api.PartitionInfo) local {
	log := t.d.log.With("topic", topic.Name, "partition", info.Number)
	if err := registry.ValidateTopicName(topic.Name); err != nil {
		log.Error("partition cannot be opened", "error", err)
		return local{err: fmt.Errorf("%w: %w", kerr.InvalidTopicException, err)}
	}
	p, recovery, err := partition.OpenLocal(partition.LocalOptions{
		Dir:          t.d.dir.partition(topic.Name, info.Number),
		TopicID:      storage.TopicID(topic.ID),
		LeaderEpoch:  info.LeaderEpoch,
		SegmentBytes: t.d.cfg.SegmentBytes,
		Listener: t.d.metrics.listen(storage.Listener{
			Failed: func(e *storage.FailedError) { log.Error("partition failed and is read-only", "error", e) },
		}),
	})
	if err != nil {
		log.Error("partition cannot be opened", "error", err)
		return local{err: fmt.Errorf("%w: %w", kerr.KafkaStorageError, err)}
	}
	if recovery.BytesCut > 0 {
		log.Warn("log was cut to its last whole batch", "bytes_cut", recovery.BytesCut, "end_offset", recovery.ValidOffset, "reason", recovery.Reason)
	} else if !recovery.Clean {
		log.Info("log recovered", "end_offset", recovery.ValidOffset)
	}
	return local{partition: p}
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
	for _, info := range t.snapshot.Topics[topic].Partitions {
		if info.Number == number {
			return nil, kerr.NotLeaderForPartition
		}
	}
	return nil, kerr.UnknownTopicOrPartition
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
		// The registry is in trouble: the client is to ask again.
		return fmt.Errorf("%w: %w", kerr.LeaderNotAvailable, err)
	}
	return nil
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
	defer t.mu.Unlock()
	var errs []error
	for tn, l := range t.open {
		if l.partition == nil {
			continue
		}
		if err := l.partition.Close(); err != nil {
			errs = append(errs, fmt.Errorf("close %s-%d: %w", tn.topic, tn.number, err))
		}
	}
	clear(t.open)
	return errors.Join(errs...)
}
