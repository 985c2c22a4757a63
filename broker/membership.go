package broker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/muster-io/muster/registry"
)

// membership keeps the daemon in the registry: its broker record, announced anew
// whenever it is lost, and the counts of its partitions under the same session.
type membership struct {
	d *Daemon

	mu           sync.Mutex
	announcement *registry.Announcement // nil before join
	counts       map[string]count       // by topic, as they are to be
	dirty        map[string]bool        // topics whose counts do not stand so under the session
	kick         chan struct{}          // there is something to write

	pulse pulse // of run
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
	// countsPause is the pause before counts are written again that could not be.
	countsPause = 2 * time.Second
	// answerLimit is how long another daemon may take to accept a connection. What is
	// there answers at once, or its machine is so busy that it must not be robbed.
	answerLimit = 5 * time.Second
)

// announced is the present announcement; nil before join.
func (m *membership) announced() *registry.Announcement {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.announcement
}

// alive tells whether the daemon is registered and may write to the registry.
func (m *membership) alive() bool {
	a := m.announced()
	return a != nil && a.Alive()
}

// remaining is how long the session lives unless renewed, and its time to live;
// 0 if there is none.
func (m *membership) remaining() (left, ttl time.Duration) {
	a := m.announced()
	if a == nil {
		return 0, 0
	}
	return a.Session().Left(), a.Session().TTL()
}

// lease is that of the newest session; 0 if there is none.
func (m *membership) lease() registry.LeaseID {
	a := m.announced()
	if a == nil {
		return 0
	}
	return a.Session().Lease()
}

// join registers the daemon, for as long as it runs. The record of a former run of
// this very data directory, which nobody else can be using, is taken away first,
// unless its address answers: the directory is then a copy. A record that anybody
// else holds is an error that names the holder.
func (m *membership) join(ctx context.Context, former registry.LeaseID) error {
	if former != 0 {
		kv, _, err := registry.GetKey(ctx, m.d.store, m.d.cfg.Root.Broker(m.d.cfg.ID))
		if err != nil {
			return fmt.Errorf("look for the former registration: %w", err)
		}
		if kv != nil && kv.Lease == former && m.answersElsewhere(ctx, *kv) {
			former = 0
		}
	}
	a, err := registry.Announce(ctx, m.d.store, registry.AnnounceOptions{
		Key:             m.d.cfg.Root.Broker(m.d.cfg.ID),
		ValueFunc:       m.record,
		TTL:             m.d.cfg.SessionTimeout,
		Former:          former,
		Listener:        m.happened,
		SessionListener: m.d.metrics.sessionEvent,
		Logger:          m.d.log.With("host", m.d.advertise.host, "port", m.d.advertise.port),
	})
	if held, ok := errors.AsType[*registry.HeldError](err); ok {
		return m.taken(held)
	}
	if err != nil {
		return err
	}
	m.d.dir.keep()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.announcement = a
	return nil
}

// answersElsewhere tells whether somebody serves at the address in a broker record,
// which is not ours.
func (m *membership) answersElsewhere(ctx context.Context, kv registry.KV) bool {
	_, rec, err := m.d.cfg.Root.ParseBroker(kv)
	if err != nil || (address{rec.Host, rec.Port}) == m.d.advertise {
		return false
	}
	dialer := net.Dialer{Timeout: answerLimit}
	conn, err := dialer.DialContext(ctx, "tcp", JoinAddress(rec.Host, rec.Port))
	if err != nil {
		return false
	}
	_ = conn.Close() // nothing was sent
	m.d.log.Warn("data directory may be a copy of one in use: somebody serves at the address that it last registered", "address", JoinAddress(rec.Host, rec.Port))
	return true
}

// record makes the broker record for a registration under a lease.
func (m *membership) record(lease registry.LeaseID) ([]byte, error) {
	// Remembered first: a crash in between leaves a lease that is nobody's, not a
	// registration that nobody may take away.
	if err := m.d.dir.setLease(lease); err != nil {
		return nil, err
	}
	return registry.Encode(registry.BrokerRecord{Version: 1, Host: m.d.advertise.host, Port: m.d.advertise.port,
		JMXPort: -1, Timestamp: strconv.FormatInt(time.Now().UnixMilli(), 10)})
}

// happened is told of each registration, and why there is none.
func (m *membership) happened(e registry.AnnounceEvent) {
	switch e.Kind {
	case registry.AnnounceRegistered:
		m.d.metrics.registration(nil)
		m.mu.Lock()
		defer m.mu.Unlock()
		for topic := range m.counts {
			m.dirty[topic] = true
		}
		m.wake()
	case registry.AnnounceHeld:
		m.d.metrics.registration(e.Held)
	case registry.AnnounceFailed:
		m.d.metrics.registration(e.Err)
	}
}

func (m *membership) wake() {
	select {
	case m.kick <- struct{}{}:
	default:
	}
}

func (m *membership) taken(held *registry.HeldError) error {
	where := "an unreadable record"
	if _, rec, err := m.d.cfg.Root.ParseBroker(held.KV); err == nil {
		where = JoinAddress(rec.Host, rec.Port)
	}
	return fmt.Errorf("broker id %d is taken by %s, whose lease has %.0f s left: choose another --broker-id, or stop that daemon",
		m.d.cfg.ID, where, held.Left.Seconds())
}

// run writes the counts.
func (m *membership) run(ctx context.Context) {
	retry := time.NewTimer(time.Hour)
	defer retry.Stop()
	beat := time.NewTicker(beatEvery)
	defer beat.Stop()
	for {
		m.pulse.beat()
		select {
		case <-ctx.Done():
			return
		case <-beat.C:
			continue
		case <-m.kick:
		case <-retry.C:
		}
		if err := m.writeCounts(ctx, m.announced().Session()); err != nil && ctx.Err() == nil {
			m.d.log.Warn("cannot write the counts of partitions, trying again", "error", err)
			retry.Reset(countsPause)
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
	m.wake()
}

// writeCounts brings /brokers/topics/<topic>/<id> up to date. A count is written
// only beside the record that it is about: after a deletion it would be left behind.
func (m *membership) writeCounts(ctx context.Context, s *registry.Session) error {
	m.mu.Lock()
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
		if s.Alive() && m.counts[topic] == c {
			delete(m.dirty, topic)
		}
	}
	return nil
}

// leave takes the daemon's keys out of the registry at once, if it answers.
func (m *membership) leave() error {
	a := m.announced()
	if a == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), registryCallLimit)
	defer cancel()
	if err := a.Close(ctx); err != nil {
		// Who stops a whole cluster stops the last daemons without a quorum, and that is
		// no failure of theirs: the next start revokes the lease, if it has not run out.
		m.d.log.Warn("registration is left to run out", "lease", registry.LeaseText(m.lease()), "error", err)
	}
	return nil
}
