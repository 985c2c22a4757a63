package inspect

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

// Broker is a registered broker. Nil fields are not known.
type Broker struct {
	ID           int32      `json:"broker"`
	Host         string     `json:"host"`
	Port         int32      `json:"port"`
	Registered   *time.Time `json:"registered"` // by the clock of the broker
	Revision     int64      `json:"create_revision"`
	Lease        *string    `json:"lease"`         // nil if it has none
	LeaseSeconds *float64   `json:"lease_seconds"` // until it runs out if it is not renewed
	Leads        int        `json:"leads"`         // partitions
	Replicas     int        `json:"replicas"`
	Topics       int        `json:"topics"` // with a replica there
	Answers      bool       `json:"answers"`
	Trouble      *string    `json:"trouble"` // why it does not answer
	Requests     *int       `json:"requests"`
}

// BrokerTopic is what a broker has of a topic.
type BrokerTopic struct {
	Topic    string  `json:"topic"`
	Leads    []int32 `json:"leads"`
	Replicas []int32 `json:"replicas"`
}

// Brokers returns the registered brokers by id, and what could not be read. Each is
// asked whether it answers.
func Brokers(ctx context.Context, st registry.Store, root registry.Root) ([]Broker, []error, error) {
	m, err := readBrokers(ctx, st, root)
	if err != nil {
		return nil, nil, err
	}
	list := make([]Broker, 0, len(m.brokers))
	var bad []error
	for _, id := range slices.Sorted(maps.Keys(m.brokers)) {
		if m.brokers[id].rec.Host == "" {
			continue // among bad
		}
		list = append(list, m.broker(id))
	}
	for _, f := range m.found {
		if f.Code == CodeUnreadableRecord || f.Code == CodeUnreadableName {
			bad = append(bad, fmt.Errorf("%s: %s", f.Key, f.What))
		}
	}
	var work sync.WaitGroup
	slots := make(chan struct{}, askedAtOnce)
	for i := range list {
		slots <- struct{}{}
		work.Go(func() {
			defer func() { <-slots }()
			b := &list[i]
			rec := m.brokers[b.ID]
			if left, err := st.Remaining(ctx, rec.kv.Lease); err == nil && rec.kv.Lease != 0 {
				seconds := left.Seconds()
				b.LeaseSeconds = &seconds
			}
			requests, err := ask(ctx, rec.rec)
			if b.Answers = err == nil; b.Answers {
				b.Requests = &requests
			} else {
				text := err.Error()
				b.Trouble = &text
			}
		})
	}
	work.Wait()
	return list, bad, nil
}

// ErrNoSuchBroker says that no broker of that id is registered.
var ErrNoSuchBroker = errors.New("no such broker is registered")

// BrokerTopics returns what a broker has, by topic.
func BrokerTopics(ctx context.Context, st registry.Store, root registry.Root, id int32) ([]BrokerTopic, error) {
	m, err := readBrokers(ctx, st, root)
	if err != nil {
		return nil, err
	}
	list := []BrokerTopic{}
	for _, name := range slices.Sorted(maps.Keys(m.topics)) {
		t := BrokerTopic{Topic: name, Leads: []int32{}, Replicas: []int32{}}
		m.eachPartition(name, func(n, leader int32, replicas []int32) {
			if leader == id {
				t.Leads = append(t.Leads, n)
			}
			if slices.Contains(replicas, id) {
				t.Replicas = append(t.Replicas, n)
			}
		})
		if len(t.Leads)+len(t.Replicas) > 0 {
			list = append(list, t)
		}
	}
	return list, nil
}

// readBrokers reads the keys of brokers and topics at one revision.
func readBrokers(ctx context.Context, st registry.Store, root registry.Root) (*model, error) {
	kvs, revision, err := registry.List(ctx, st, root.Brokers(), 0)
	if err != nil {
		return nil, fmt.Errorf("list brokers: %w", err)
	}
	topics, _, err := registry.List(ctx, st, root.Topics(), revision)
	if err != nil {
		return nil, fmt.Errorf("list topics: %w", err)
	}
	return Tree{Root: root, Revision: revision, Keys: append(kvs, topics...)}.read(), nil
}

// eachPartition goes over the partitions of a topic by number, if they have a log. One without a state
// is led by its first replica.
func (m *model) eachPartition(topic string, f func(number, leader int32, replicas []int32)) {
	t := m.topics[topic]
	if t == nil || t.rec == nil || t.rec.NoLog {
		return
	}
	for _, n := range slices.Sorted(maps.Keys(t.rec.Partitions)) {
		replicas := t.rec.Partitions[n]
		leader := replicas[0]
		if s := t.states[n]; s.rec != nil {
			leader = s.rec.Leader
		}
		f(n, leader, replicas)
	}
}

func (m *model) broker(id int32) Broker {
	b := m.brokers[id]
	out := Broker{ID: id, Host: b.rec.Host, Port: b.rec.Port, Revision: b.kv.CreateRevision}
	if ms, err := strconv.ParseInt(b.rec.Timestamp, 10, 64); err == nil && ms > 0 {
		at := time.UnixMilli(ms)
		out.Registered = &at
	}
	if b.kv.Lease != 0 {
		text := registry.LeaseText(b.kv.Lease)
		out.Lease = &text
	}
	for name := range m.topics {
		there := false
		m.eachPartition(name, func(_, leader int32, replicas []int32) {
			if leader == id {
				out.Leads++
			}
			if slices.Contains(replicas, id) {
				out.Replicas++
				there = true
			}
		})
		if there {
			out.Topics++
		}
	}
	return out
}
