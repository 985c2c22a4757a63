package broker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/muster-io/muster/registry"
)

// membership keeps the daemon in the registry: its broker record and the counts
// of its partitions, all on one session. When the session is lost it registers
// again, as long as it takes.
type membership struct {
	d *Daemon

	mu      sync.Mutex
	session *registry.Session // the newest one; it may be dead
	counts  map[string]count  // by topic, as they are to be
	dirty   map[string]bool   // topics whose counts do not stand so under the session
	kick    chan struct{}     // counts have changed

	pulse      pulse     // of run
	complained time.Time // by run, that the record cannot be put back
}

// count is how many partitions of a topic are here, and which topic that is: the
// create-revision of its record.
type count struct {
	partitions int32
	topic      int64
}

func newMembership(d *Daemon) *membership {
	return &membership{d: d, counts: map[string]count{}, dirty: map[string]bool{}, kick: make(chan struct{}, 1)}
}

const (
	registryCallLimit = 5 * time.Second
	minJoinPause      = 100 * time.Millisecond
	maxJoinPause      = 2 * time.Second
)

// alive tells whether the daemon may write to the registry.
func (m *membership) alive() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.session != nil && m.session.Alive()
}

// remaining is how long the session lives unless renewed, and its time to live;
// 0 if there is none.
func (m *membership) remaining() (left, ttl time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.session == nil {
		return 0, 0
	}
	return m.session.Left(), m.session.TTL()
}

// lease is that of the newest session; 0 if there is none.
func (m *membership) lease() registry.LeaseID {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.session == nil {
		return 0
	}
	return m.session.Lease()
}

// join registers the daemon. The record of a former run of this very data
// directory, which nobody else can be using, is taken away first; one that
// anybody else holds is an error that names the holder.
func (m *membership) join(ctx context.Context, former registry.LeaseID) error {
	key := m.d.cfg.Root.Broker(m.d.cfg.ID)
	if former != 0 {
		kv, _, err := registry.GetKey(ctx, m.d.store, key)
		if err != nil {
			return fmt.Errorf("look for the former registration: %w", err)
		}
		if kv != nil && kv.Lease == former {
			if err := m.d.store.Revoke(ctx, former); err != nil && !errors.Is(err, registry.ErrLeaseNotFound) {
				return fmt.Errorf("revoke the former lease: %w", err)
			}
		}
	}
	s, err := registry.OpenSession(ctx, m.d.store, registry.SessionOptions{TTL: m.d.cfg.SessionTimeout,
		Listener: m.d.metrics.sessionEvent, Logger: m.d.log})
	if err != nil {
		return err
	}
	if err := m.register(ctx, s, key); err != nil {
		return errors.Join(err, m.closeSession(s))
	}
	m.d.dir.keep()
	m.mu.Lock()
	m.session = s
	for topic := range m.counts {
		m.dirty[topic] = true
	}
	m.mu.Unlock()
	m.d.metrics.registration(nil)
	m.d.log.Info("registered", "lease", registry.LeaseText(s.Lease()), "host", m.d.advertise.host, "port", m.d.advertise.port)
	return nil
}

func (m *membership) register(ctx context.Context, s *registry.Session, key string) error {
	// Remembered first: a crash in between leaves a lease that is nobody's, not a
	// registration that nobody may take away.
	if err := m.d.dir.setLease(s.Lease()); err != nil {
		return err
	}
	value, err := registry.Encode(registry.BrokerRecord{Version: 1, Host: m.d.advertise.host, Port: m.d.advertise.port,
		JMXPort: -1, Timestamp: strconv.FormatInt(time.Now().UnixMilli(), 10)})
	if err != nil {
		return err
	}
	_, err = registry.Register(ctx, m.d.store, s, key, value)
	if held, ok := errors.AsType[*registry.HeldError](err); ok {
		return m.taken(held)
	}
	return err
}

func (m *membership) taken(held *registry.HeldError) error {
	where := "an unreadable record"
	if _, rec, err := m.d.cfg.Root.ParseBroker(held.KV); err == nil {
		where = JoinAddress(rec.Host, rec.Port)
	}
	return &takenError{fmt.Sprintf("broker id %d is taken by %s, whose lease has %.0f s left: choose another --broker-id, or stop that daemon",
		m.d.cfg.ID, where, held.Left.Seconds())}
}

// takenError: another daemon is registered under this one's id.
type takenError struct{ text string }

func (e *takenError) Error() string { return e.text }

func (m *membership) closeSession(s *registry.Session) error {
	ctx, cancel := context.WithTimeout(context.Background(), registryCallLimit)
	defer cancel()
	return s.Close(ctx)
}

// run registers again whenever the session is lost, and writes the counts.
func (m *membership) run(ctx context.Context) {
	retry := time.NewTimer(time.Hour)
	defer retry.Stop()
	beat := time.NewTicker(beatEvery)
	defer beat.Stop()
	for {
		m.pulse.beat()
		m.mu.Lock()
		s := m.session
		m.mu.Unlock()
		select {
		case <-ctx.Done():
			return
		case <-s.Done():
			if !m.rejoin(ctx, s) {
				return
			}
		case <-beat.C:
			m.keepRecord(ctx, s)
			continue
		case <-m.kick:
		case <-retry.C:
		}
		if err := m.writeCounts(ctx); err != nil && ctx.Err() == nil {
			m.d.log.Warn("cannot write the counts of partitions, trying again", "error", err)
			retry.Reset(maxJoinPause)
		}
	}
}

// keepRecord looks whether the registry shows the daemon's record under its session,
// as alive alone would be of no use to anybody. Where it does not, the lease may be
// gone, which the session is made to find out now; or somebody has deleted the
// record alone, and it is put back.
func (m *membership) keepRecord(ctx context.Context, s *registry.Session) {
	if m.d.topics.registered() == s.Lease() || !s.Alive() {
		return
	}
	s.Check()
	limited, cancel := context.WithTimeout(ctx, registryCallLimit)
	defer cancel()
	err := m.register(limited, s, m.d.cfg.Root.Broker(m.d.cfg.ID))
	if err == nil || errors.Is(err, registry.ErrLeaseNotFound) || ctx.Err() != nil {
		return // where the record stands it was left alone
	}
	m.d.metrics.registration(err)
	if time.Since(m.complained) > silencePause {
		m.complained = time.Now()
		m.d.log.Warn("the registry does not show this broker, and its record cannot be put back, trying again", "error", err)
	}
}

// rejoin registers anew after a loss; false when ctx ends before.
func (m *membership) rejoin(ctx context.Context, s *registry.Session) bool {
	for pause := minJoinPause; ; pause = min(2*pause, maxJoinPause) {
		m.pulse.beat()
		limited, cancel := context.WithTimeout(ctx, registryCallLimit)
		err := s.Close(limited)
		if err == nil {
			// Not s.Lease(): an attempt whose reply was lost may have registered.
			err = m.join(limited, m.d.dir.formerLease())
		}
		cancel()
		if err == nil {
			return true
		}
		if ctx.Err() != nil {
			return false
		}
		m.d.metrics.registration(err)
		m.d.log.Warn("not registered, trying again", "error", err)
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return false
		case <-timer.C:
		}
	}
}

// setCount says how many partitions of a topic are here; 0 takes the count away.
func (m *membership) setCount(topic string, partitions int32, record int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := count{partitions, record}
	if partitions == 0 {
		c = count{}
	}
	if m.counts[topic] == c {
		return
	}
	m.counts[topic] = c
	if partitions == 0 {
		delete(m.counts, topic)
	}
	m.dirty[topic] = true
	select {
	case m.kick <- struct{}{}:
	default:
	}
}

// writeCounts brings /brokers/topics/<topic>/<id> up to date. A count is written
// only beside the record that it is about: after a deletion it would be left behind.
func (m *membership) writeCounts(ctx context.Context) error {
	m.mu.Lock()
	s := m.session
	topics := slices.Collect(maps.Keys(m.dirty))
	m.mu.Unlock()
	limited, cancel := context.WithTimeout(ctx, registryCallLimit)
	defer cancel()
	for len(topics) > 0 {
		part := topics[:min(len(topics), registry.MaxNested)]
		topics = topics[len(part):]
		if !s.Alive() {
			return nil // the next session writes them
		}
		if err := m.writeSome(limited, s, part); err != nil {
			return err
		}
	}
	return nil
}

func (m *membership) writeSome(ctx context.Context, s *registry.Session, topics []string) error {
	root, id := m.d.cfg.Root, m.d.cfg.ID
	var t registry.Txn
	wrote := make(map[string]count, len(topics))
	m.mu.Lock()
	for _, topic := range topics {
		c, there := m.counts[topic]
		wrote[topic] = c
		op := registry.Delete(root.TopicBroker(topic, id))
		if there {
			op = registry.Nested(registry.Txn{
				If:   []registry.Cond{registry.CreatedAt(root.Topic(topic), c.topic)},
				Then: []registry.Op{registry.Put(root.TopicBroker(topic, id), strconv.AppendInt(nil, int64(c.partitions), 10), s.Lease())},
			})
		}
		t.Then = append(t.Then, op)
	}
	m.mu.Unlock()
	if _, err := m.d.store.Txn(ctx, t); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for topic, c := range wrote {
		if m.session == s && m.counts[topic] == c {
			delete(m.dirty, topic)
		}
	}
	return nil
}

// leave takes the daemon's keys out of the registry at once, if it answers.
func (m *membership) leave() error {
	m.mu.Lock()
	s := m.session
	m.mu.Unlock()
	if s == nil {
		return nil
	}
	if err := m.closeSession(s); err != nil {
		// Who stops a whole cluster stops the last daemons without a quorum, and that is
		// no failure of theirs: the next start revokes the lease, if it has not run out.
		m.d.log.Warn("registration is left to run out", "lease", registry.LeaseText(s.Lease()), "ttl", s.TTL(), "error", err)
	}
	return nil
}
