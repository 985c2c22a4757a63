// Package api is what Kafka's requests mean here: one file for each request that is
// served, named by its key, each opening with its behaviour and its notes per
// version, each registering its own version range. not_served.go lists the rest.
package api

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/muster-io/muster/broker/partition"
	"github.com/muster-io/muster/broker/wire"
)

// Defaults of Options, and limits that are no option.
const (
	// DefaultFetchMaxBytes is Kafka's fetch.max.bytes of a broker.
	DefaultFetchMaxBytes = 55 << 20

	// DefaultFetchMaxWait and DefaultProduceMaxWait are far above what clients ask
	// for (500 ms and 30 s), and bound what a broken one can.
	DefaultFetchMaxWait   = 5 * time.Minute
	DefaultProduceMaxWait = 5 * time.Minute

	// maxAutoCreate bounds the topics that one Metadata request creates, because each
	// is a transaction in etcd and the connection waits for them. The rest is answered
	// LEADER_NOT_AVAILABLE, and created when the client asks again.
	maxAutoCreate = 50

	// registryWait bounds what a request waits for the registry. It is below the 30 s
	// after which clients give a request up, so that they get an answer.
	registryWait = 20 * time.Second
)

// handlers is what the requests share.
type handlers struct {
	cluster  Cluster
	opts     Options
	versions func() []wire.VersionRange
	ids      topicIDs
}

// Register makes srv serve every request of this package.
func Register(srv *wire.Server, c Cluster, o Options) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.FetchMaxBytes <= 0 {
		o.FetchMaxBytes = DefaultFetchMaxBytes
	}
	if o.FetchMaxWait <= 0 {
		o.FetchMaxWait = DefaultFetchMaxWait
	}
	if o.ProduceMaxWait <= 0 {
		o.ProduceMaxWait = DefaultProduceMaxWait
	}
	h := &handlers{cluster: c, opts: o, versions: srv.Versions}
	h.registerProduce(srv)
	h.registerFetch(srv)
	h.registerListOffsets(srv)
	h.registerMetadata(srv)
	h.registerAPIVersions(srv)
	h.registerInitProducerID(srv)
}

// code is the error code of err on the wire; 0 for none. Errors without a code of
// their own are logged, since the client learns nothing from them.
func (h *handlers) code(err error, what ...any) int16 {
	if err == nil {
		return 0
	}
	if known, ok := errors.AsType[*kerr.Error](err); ok {
		return known.Code
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return kerr.RequestTimedOut.Code
	}
	h.opts.Logger.Error("request failed", append(what, "error", err)...)
	return kerr.UnknownServerError.Code
}

// detail is the message to go with an error code: that of the error right around
// the code, which is about what the client sent. What is wrapped around that is
// about this machine (directories, for one) and not for clients.
func detail(err error) *string {
	for err != nil {
		inner := errors.Unwrap(err)
		if _, ok := inner.(*kerr.Error); ok {
			s := err.Error()
			return &s
		}
		err = inner
	}
	return nil // the code says it all
}

// topicRef names a topic the way a request did: by name, or by id.
type topicRef struct {
	name string
	err  error // the id is not known
}

// resolver turns topic ids into names, within one request.
type resolver struct {
	h       *handlers
	snap    Snapshot
	rebuilt bool
}

func (h *handlers) resolver() *resolver { return &resolver{h: h, snap: h.cluster.Snapshot()} }

func (r *resolver) byName(name string) topicRef { return topicRef{name: name} }

func (r *resolver) byID(id uuid.UUID) topicRef {
	if id == uuid.Nil {
		return topicRef{err: kerr.UnknownTopicID}
	}
	name, ok := r.h.ids.lookup(r.snap, id)
	if !ok && !r.rebuilt {
		r.h.ids.rebuild(r.snap)
		r.rebuilt = true
		name, ok = r.h.ids.lookup(r.snap, id)
	}
	if !ok {
		return topicRef{err: kerr.UnknownTopicID}
	}
	return topicRef{name: name}
}

// partition is the partition to serve, if epoch, which is -1 for any, is the one
// that it is led under.
func (h *handlers) partition(ref topicRef, number, epoch int32) (partition.Partition, error) {
	if ref.err != nil {
		return nil, ref.err
	}
	p, err := h.cluster.Partition(ref.name, number)
	if err != nil || epoch < 0 {
		return p, err
	}
	switch led := p.LeaderEpoch(); {
	case epoch < led:
		return nil, kerr.FencedLeaderEpoch
	case epoch > led:
		return nil, kerr.UnknownLeaderEpoch
	}
	return p, nil
}

// leader tells a client that came to the wrong broker, or with an old epoch, where
// to go. ok is false where that is not known.
func (s *Snapshot) leader(topic string, number int32) (info PartitionInfo, b Broker, ok bool) {
	t, _ := s.Topics.Get(topic)
	info, ok = t.Partition(number)
	if !ok {
		return PartitionInfo{}, Broker{}, false
	}
	b, ok = s.broker(info.Leader)
	return info, b, ok
}

func (s *Snapshot) broker(id int32) (Broker, bool) {
	for _, b := range s.Brokers {
		if b.ID == id {
			return b, true
		}
	}
	return Broker{}, false
}

// topicIDs remembers the names behind topic ids over snapshots, so that a request
// need not search all topics. An entry counts only if the snapshot at hand confirms
// it: a topic that was deleted and made anew has another id.
type topicIDs struct {
	mu    sync.RWMutex
	names map[uuid.UUID]string
}

func (t *topicIDs) lookup(s Snapshot, id uuid.UUID) (string, bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	name, ok := t.names[id]
	topic, there := s.Topics.Get(name)
	return name, ok && there && topic.ID == id
}

func (t *topicIDs) rebuild(s Snapshot) {
	names := make(map[uuid.UUID]string, s.Topics.Len())
	for topic := range s.Topics.All() {
		names[topic.ID] = topic.Name
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.names = names
}
