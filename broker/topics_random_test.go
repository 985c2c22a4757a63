package broker_test

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/muster-io/muster/broker"
	"github.com/muster-io/muster/registry"
)

// topicModel is what the logs of a topic must hold.
type topicModel struct {
	id     uuid.UUID
	leader map[int32]int32
	end    map[int32]int64 // by partition
}

// world is two daemons, and what is done to them and to topics.
type world struct {
	t      *testing.T
	r      *rand.Rand
	st     registry.Store
	cfg    map[int32]broker.Config
	live   map[int32]*broker.Daemon
	topics map[string]*topicModel
}

// Topics are created, grown, altered, written to and deleted, and daemons stopped and
// started, in random order. A record always gets the offset that its own topic, and
// no earlier one of the name, has come to; and in the end nothing is left on the disk,
// or among the counts, but what belongs to topics that are there.
func TestTopicsAtRandom(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	o := start(t, elsewhere(t))
	w := &world{t: t, r: rand.New(rand.NewPCG(seed, 5)), st: openStore(t, o), cfg: map[int32]broker.Config{},
		live: map[int32]*broker.Daemon{}, topics: map[string]*topicModel{}}
	for id := range int32(2) {
		cfg := config(t, t.TempDir())
		cfg.ID, cfg.Etcd.Endpoints, cfg.AutoCreateTopics = id+1, o.EtcdEndpoints(), false
		w.cfg[id+1] = cfg
		w.live[id+1] = start(t, cfg)
	}
	for range 120 {
		w.step()
	}
	for id := range w.cfg {
		w.toggle(id, true)
	}
	w.settled()
}

func (w *world) step() {
	name := []string{"a", "b-1", "c.d"}[w.r.IntN(3)]
	m := w.topics[name]
	switch n := w.r.IntN(12); {
	case n == 0:
		id := int32(1 + w.r.IntN(2))
		w.toggle(id, w.live[id] == nil)
	case m == nil:
		m = &topicModel{leader: map[int32]int32{}, end: map[int32]int64{}}
		w.learn(m, create(w.t, w.st, name, int32(1+w.r.IntN(4)), 1, 2))
		w.topics[name] = m
	case n == 1:
		w.remove(name)
	case n == 2: // within one step of the daemons, most of the time
		w.remove(name)
		m = &topicModel{leader: map[int32]int32{}, end: map[int32]int64{}}
		w.learn(m, create(w.t, w.st, name, 2, 1, 2))
		w.topics[name] = m
	case n == 3 && len(m.leader) < 12:
		rec, err := registry.AddPartitions(w.t.Context(), w.st, "", name, int32(len(m.leader)+1+w.r.IntN(3)), []int32{1, 2})
		must(w.t, err)
		w.learn(m, rec)
	case n == 4:
		_, err := registry.AlterTopicConfig(w.t.Context(), w.st, "", name, map[string]string{"segment.bytes": fmt.Sprint(1<<20 + w.r.IntN(1<<20))}, nil)
		must(w.t, err)
	default:
		w.write(name)
	}
}

func (w *world) learn(m *topicModel, rec registry.TopicRecord) {
	m.id = rec.ID()
	for p, replicas := range rec.Partitions {
		m.leader[p] = replicas[0]
	}
}

func (w *world) remove(name string) {
	deleteTopic(w.t, w.st, name)
	delete(w.topics, name)
}

func (w *world) toggle(id int32, up bool) {
	d := w.live[id]
	switch {
	case up && d == nil:
		w.live[id] = start(w.t, w.cfg[id])
	case !up && d != nil:
		must(w.t, d.Close())
		delete(w.live, id)
	}
}

// write produces to a partition whose leader is up.
func (w *world) write(name string) {
	m := w.topics[name]
	p := int32(w.r.IntN(len(m.leader)))
	d := w.live[m.leader[p]]
	if d == nil {
		return
	}
	for _, any := range w.live { // a client may ask either, and takes older news for newer
		shows(w.t, any, name, m.id, len(m.leader))
	}
	if at := produce(w.t, producer(w.t, d), name, p, "v"); at != m.end[p] {
		w.t.Fatalf("%s-%d: a record got offset %d, want %d", name, p, at, m.end[p])
	}
	m.end[p]++
}

// settled waits until disks and counts show what is there and nothing else.
func (w *world) settled() {
	w.t.Helper()
	for id, cfg := range w.cfg {
		var want []string
		counts := map[string]string{}
		for name, m := range w.topics {
			n := 0
			for p, leader := range m.leader {
				if leader == id {
					want = append(want, fmt.Sprintf("%s-%d", name, p))
					n++
				}
			}
			if n > 0 {
				counts[registry.Root("").TopicBroker(name, id)] = fmt.Sprint(n)
			}
		}
		slices.Sort(want)
		eventually(w.t, func() string {
			got := logDirs(w.t, cfg.DataDir, "logs")
			if !slices.Equal(got, want) {
				return fmt.Sprintf("daemon %d has %v, want %v", id, got, want)
			}
			if left := logDirs(w.t, cfg.DataDir, "deleting"); len(left) > 0 {
				return fmt.Sprintf("daemon %d has not removed %v", id, left)
			}
			found := 0
			for key, kv := range keys(w.t, w.st, "/brokers/topics/") {
				if filepath.Base(key) == fmt.Sprint(id) && strings.Count(key, "/") == 4 {
					if found++; counts[key] != string(kv.Value) {
						return fmt.Sprintf("count %s is %s, want %q", key, kv.Value, counts[key])
					}
				}
			}
			if found != len(counts) {
				return fmt.Sprintf("daemon %d has %d counts, want %v", id, found, counts)
			}
			return ""
		})
	}
}
