package consumer

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// fetcher reads from the brokers what the deliveries of the table need. It is
// one franz-go client without a group, which is made once a broker is known. It
// is safe for concurrent use.
type fetcher struct {
	d     *driver
	ready chan struct{} // closed when client is set

	mu     sync.Mutex
	client *kgo.Client
	seeds  []string
	added  map[topicNumber]*delivery
	from   map[topicNumber]int64 // what to begin with once there is a client
}

func newFetcher(d *driver) *fetcher {
	return &fetcher{d: d, ready: make(chan struct{}), added: map[topicNumber]*delivery{}, from: map[topicNumber]int64{}}
}

const (
	// Brokers that come back are found again within this time.
	maxRetryBackoff = 500 * time.Millisecond
	minRetryBackoff = 50 * time.Millisecond
	// A topic just created is looked for this often.
	metadataMinAge = 250 * time.Millisecond
	// One answer of a broker is at most this large, so that a few small buffers
	// are not followed by a fetch of 50 MiB.
	fetchMaxBytes = 8 << 20
	// A broker without new records answers after this time. A partition that is
	// resumed waits for the fetch under way, so this cannot be long.
	fetchMaxWait = 100 * time.Millisecond
	// pollMost bounds one poll, so that one busy partition cannot hold up the rest.
	pollMost = 10_000
	// recordOverhead is what a record costs in memory besides its key and value.
	recordOverhead = 128
)

// seed says where the live brokers are.
func (f *fetcher) seed(addresses []string) {
	slices.Sort(addresses)
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(addresses) == 0 || slices.Equal(addresses, f.seeds) {
		return // a client keeps trying the brokers that it knows
	}
	f.seeds = addresses
	if f.client != nil {
		if err := f.client.UpdateSeedBrokers(addresses...); err != nil {
			f.d.log.Warn("broker addresses are not usable", "addresses", addresses, "error", err)
		}
		return
	}
	partitions := map[string]map[int32]kgo.Offset{}
	for tn, offset := range f.from {
		partitions = with(partitions, tn, offset)
	}
	client, err := kgo.NewClient(
		kgo.SeedBrokers(addresses...),
		kgo.ClientID(f.d.c.cfg.Group),
		kgo.ConsumePartitions(partitions),
		kgo.ConsumeResetOffset(kgo.NoResetOffset()),
		kgo.FetchMaxWait(fetchMaxWait),
		kgo.FetchMaxBytes(fetchMaxBytes),
		kgo.MetadataMinAge(metadataMinAge),
		kgo.RetryBackoffFn(func(tries int) time.Duration {
			return min(minRetryBackoff<<min(tries, 10), maxRetryBackoff)
		}),
		kgo.WithLogger(clientLog{f.d.log}),
	)
	if err != nil {
		f.d.log.Warn("broker addresses are not usable", "addresses", addresses, "error", err)
		f.seeds = nil
		return
	}
	f.client = client
	close(f.ready)
}

func with(m map[string]map[int32]kgo.Offset, tn topicNumber, offset int64) map[string]map[int32]kgo.Offset {
	if m[tn.topic] == nil {
		m[tn.topic] = map[int32]kgo.Offset{}
	}
	m[tn.topic][tn.number] = kgo.NewOffset().At(offset)
	return m
}

// add begins to fetch for a delivery.
func (f *fetcher) add(o *delivery, offset int64) {
	tn := topicNumber{o.partition.Topic, o.partition.Number}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.added[tn], f.from[tn] = o, offset
	if f.client != nil {
		f.client.AddConsumePartitions(with(map[string]map[int32]kgo.Offset{}, tn, offset))
	}
}

// remove ends it, unless a later delivery of the partition has been added.
func (f *fetcher) remove(o *delivery) {
	tn := topicNumber{o.partition.Topic, o.partition.Number}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.added[tn] != o {
		return
	}
	delete(f.added, tn)
	delete(f.from, tn)
	if f.client != nil {
		partitions := map[string][]int32{tn.topic: {tn.number}}
		f.client.RemoveConsumePartitions(partitions)
		f.client.ResumeFetchPartitions(partitions)
	}
}

// drained lets a paused partition go on once enough was handed over.
func (f *fetcher) drained(o *delivery) {
	if !o.queue.resume(f.d.c.cfg.MaxBufferedBytes) {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.added[topicNumber{o.partition.Topic, o.partition.Number}] == o && f.client != nil {
		f.client.ResumeFetchPartitions(map[string][]int32{o.partition.Topic: {o.partition.Number}})
	}
}

func (f *fetcher) pause(o *delivery) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.added[topicNumber{o.partition.Topic, o.partition.Number}] == o {
		f.client.PauseFetchPartitions(map[string][]int32{o.partition.Topic: {o.partition.Number}})
	}
}

// brokers waits for the client.
func (f *fetcher) brokers(ctx context.Context) (*kgo.Client, error) {
	select {
	case <-f.ready:
		return f.client, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// run carries what is fetched to the queues of the deliveries.
func (f *fetcher) run() {
	ctx := f.d.ctx
	client, err := f.brokers(ctx)
	if err != nil {
		return
	}
	for ctx.Err() == nil {
		fetches := client.PollRecords(ctx, pollMost)
		fetches.EachPartition(func(p kgo.FetchTopicPartition) {
			o := f.d.table.find(p.Topic, p.Partition)
			if o == nil {
				return
			}
			if len(p.Records) > 0 {
				f.push(o, p.Records)
			}
			if p.Err != nil && ctx.Err() == nil {
				f.failed(o, p.Err)
			}
		})
	}
}

func (f *fetcher) push(o *delivery, records []*kgo.Record) {
	b := queued{records: records}
	for _, r := range records {
		b.bytes += len(r.Key) + len(r.Value) + recordOverhead
	}
	limit := f.d.c.cfg.MaxBufferedBytes
	if o.queue.push(b, limit) {
		f.pause(o)
		f.drained(o) // the worker may have emptied the queue in between
	}
}

// failed handles what the client does not try again by itself.
func (f *fetcher) failed(o *delivery, err error) {
	log := f.d.log.With("topic", o.partition.Topic, "partition", o.partition.Name())
	if !errors.Is(err, kerr.OffsetOutOfRange) {
		log.Warn("fetch failed", "error", err)
		return
	}
	f.remove(o)
	f.d.work.Go(func() { f.d.restart(o) })
}

func (f *fetcher) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.client != nil {
		f.client.Close()
	}
}

// clientLog passes on the client's warnings.
type clientLog struct{ log *slog.Logger }

func (l clientLog) Level() kgo.LogLevel { return kgo.LogLevelWarn }

func (l clientLog) Log(level kgo.LogLevel, msg string, keyvals ...any) {
	// To franz-go a broker that is away for a moment is worth a warning each time.
	l.log.Debug(msg, append(keyvals, "part", "franz-go")...)
}
