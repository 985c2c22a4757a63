package api_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"hash/crc32"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/broker/api"
	"github.com/muster-io/muster/broker/partition"
	"github.com/muster-io/muster/broker/storage"
	"github.com/muster-io/muster/broker/wire"
)

// patience is how long a test waits for what should happen at once. It is shorter
// than the minute that fetches are told to wait.
const patience = 30 * time.Second

const self = 1

// fakeCluster is a daemon without a registry: its partitions are real, on a
// temporary directory.
type fakeCluster struct {
	t   *testing.T
	dir string

	mu         sync.Mutex
	snap       api.Snapshot
	partitions map[string][]partition.Partition
	hideNew    bool // created topics do not show in the snapshot
	createErr  error
	idErr      error

	lastID atomic.Int64
}

func newCluster(t *testing.T) *fakeCluster {
	c := &fakeCluster{
		t:          t,
		dir:        t.TempDir(),
		partitions: make(map[string][]partition.Partition),
		snap:       api.Snapshot{ClusterID: "test-cluster", Controller: self},
	}
	t.Cleanup(func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, all := range c.partitions {
			for _, p := range all {
				_ = p.Close()
			}
		}
	})
	return c
}

func (c *fakeCluster) BrokerID() int32 { return self }

func (c *fakeCluster) Snapshot() api.Snapshot {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.snap
}

func (c *fakeCluster) topic(name string) api.Topic {
	topic, _ := c.Snapshot().Topics.Get(name)
	return topic
}

func (c *fakeCluster) Partition(topic string, number int32) (partition.Partition, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	known, _ := c.snap.Topics.Get(topic)
	for _, info := range known.Partitions {
		if info.Number == number && info.Leader != self {
			return nil, kerr.NotLeaderForPartition
		}
	}
	all := c.partitions[topic]
	if number < 0 || int(number) >= len(all) {
		return nil, kerr.UnknownTopicOrPartition
	}
	return all[number], nil
}

func (c *fakeCluster) CreateTopic(_ context.Context, name string) error {
	c.mu.Lock()
	err, hide := c.createErr, c.hideNew
	c.mu.Unlock()
	if err == nil && !hide {
		c.addTopic(name, 1)
	}
	return err
}

func (c *fakeCluster) ProducerID(context.Context) (int64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return 1000 + c.lastID.Add(1), c.idErr
}

// change edits the snapshot the way the daemon does: by making a new one.
func (c *fakeCluster) change(f func(*api.Snapshot)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f(&c.snap)
}

// addTopic makes a topic whose partitions are led here, under epoch 7.
func (c *fakeCluster) addTopic(name string, partitions int) {
	topic := api.Topic{Name: name, ID: uuid.New()}
	var local []partition.Partition
	for i := range partitions {
		p, _, err := partition.OpenLocal(partition.LocalOptions{
			Dir:         filepath.Join(c.dir, name+"-"+strconv.Itoa(i)),
			TopicID:     storage.TopicID(topic.ID),
			LeaderEpoch: 7,
		})
		if err != nil {
			c.t.Errorf("open partition: %v", err)
			return
		}
		local = append(local, p)
		topic.Partitions = append(topic.Partitions, api.PartitionInfo{
			Number: int32(i), Leader: self, LeaderEpoch: 7, Replicas: []int32{self}, ISR: []int32{self}})
	}
	c.change(func(s *api.Snapshot) {
		s.Topics = s.Topics.Change([]api.Topic{topic}, nil)
		c.partitions[name] = local
	})
}

// replace puts another partition in the place of one.
func (c *fakeCluster) replace(topic string, number int, f func(partition.Partition) partition.Partition) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.partitions[topic][number] = f(c.partitions[topic][number])
}

// broker is a server with a fake cluster behind it.
type broker struct {
	*fakeCluster
	srv  *wire.Server
	addr string
	log  *lockedBuffer
	done chan wire.RequestInfo // every request that is done, if it has room
	gone chan error            // every connection that has ended
}

func start(t *testing.T, o api.Options) *broker {
	t.Helper()
	b := &broker{
		fakeCluster: newCluster(t),
		log:         &lockedBuffer{},
		done:        make(chan wire.RequestInfo, 10_000),
		gone:        make(chan error, 100),
	}
	o.Logger = slog.New(slog.NewTextHandler(b.log, nil))
	b.srv = wire.New(wire.Options{Logger: o.Logger, Hooks: wire.Hooks{
		OnRequest:    func(i wire.RequestInfo) { b.done <- i },
		OnDisconnect: func(_ string, err error) { b.gone <- err },
	}})
	api.Register(b.srv, b, o)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b.addr = ln.Addr().String()
	at := ln.Addr().(*net.TCPAddr)
	b.change(func(s *api.Snapshot) {
		s.Brokers = []api.Broker{{ID: self, Host: at.IP.String(), Port: int32(at.Port)}}
	})
	served := make(chan error, 1)
	go func() { served <- b.srv.Serve(context.Background(), ln) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := b.srv.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return b
}

// rawClient speaks the protocol without a client's opinions.
type rawClient struct {
	t    *testing.T
	nc   net.Conn
	next int32
}

func (b *broker) dial(t *testing.T) *rawClient {
	t.Helper()
	nc, err := net.Dial("tcp", b.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = nc.Close() })
	return &rawClient{t: t, nc: nc}
}

func (r *rawClient) send(req kmsg.Request) int32 {
	r.t.Helper()
	r.next++
	f := kmsg.NewRequestFormatter(kmsg.FormatterClientID("raw"))
	if _, err := r.nc.Write(f.AppendRequest(nil, req, r.next)); err != nil {
		r.t.Fatal(err)
	}
	return r.next
}

// receive reads the response to req and checks that it is the one expected, and
// that its bytes are those that kmsg makes of it: nothing missing, nothing more.
func (r *rawClient) receive(req kmsg.Request, correlationID int32) kmsg.Response {
	r.t.Helper()
	_ = r.nc.SetReadDeadline(time.Now().Add(patience))
	var size [4]byte
	if _, err := io.ReadFull(r.nc, size[:]); err != nil {
		r.t.Fatalf("key %d version %d: %v", req.Key(), req.GetVersion(), err)
	}
	frame := make([]byte, binary.BigEndian.Uint32(size[:]))
	if _, err := io.ReadFull(r.nc, frame); err != nil {
		r.t.Fatal(err)
	}
	if got := int32(binary.BigEndian.Uint32(frame)); got != correlationID {
		r.t.Fatalf("correlation id %d, want %d", got, correlationID)
	}
	frame = frame[4:]
	resp := req.ResponseKind()
	resp.SetVersion(req.GetVersion())
	if resp.IsFlexible() && resp.Key() != int16(kmsg.ApiVersions) {
		if frame[0] != 0 {
			r.t.Fatalf("key %d version %d: header has tags %d", req.Key(), req.GetVersion(), frame[0])
		}
		frame = frame[1:]
	}
	if err := resp.ReadFrom(frame); err != nil {
		r.t.Fatalf("key %d version %d: %v", req.Key(), req.GetVersion(), err)
	}
	if again := resp.AppendTo(nil); !bytes.Equal(again, frame) {
		r.t.Fatalf("key %d version %d: response does not round-trip:\n%x\n%x", req.Key(), req.GetVersion(), frame, again)
	}
	return resp
}

// ask sends a request and returns its response.
func ask[R kmsg.Response](r *rawClient, req kmsg.Request) R {
	r.t.Helper()
	return r.receive(req, r.send(req)).(R)
}

// closed waits until the server has closed the connection, and fails if it answers.
func (r *rawClient) closed() {
	r.t.Helper()
	_ = r.nc.SetReadDeadline(time.Now().Add(patience))
	if n, err := r.nc.Read(make([]byte, 1)); err != io.EOF {
		r.t.Fatalf("read %d bytes, error %v, want the end", n, err)
	}
}

// lockedBuffer collects log lines.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// testBatch is a record batch of n records, uncompressed, as a producer sends it.
func testBatch(n int, timestamp int64, value string) []byte {
	var records []byte
	for i := range n {
		r := kmsg.Record{OffsetDelta: int32(i), Value: []byte(value)}
		// AppendTo writes Length as given: one byte for the zero that stands there.
		r.Length = int32(len(r.AppendTo(nil)) - 1)
		records = r.AppendTo(records)
	}
	b := kmsg.RecordBatch{
		Length: int32(49 + len(records)), Magic: 2, PartitionLeaderEpoch: -1,
		LastOffsetDelta: int32(n - 1), FirstTimestamp: timestamp, MaxTimestamp: timestamp,
		ProducerID: -1, ProducerEpoch: -1, FirstSequence: -1, NumRecords: int32(n), Records: records,
	}
	out := b.AppendTo(nil)
	binary.BigEndian.PutUint32(out[17:], crc32.Checksum(out[21:], crc32.MakeTable(crc32.Castagnoli)))
	return out
}
