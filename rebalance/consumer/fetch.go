package consumer

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// fetcher reads from the brokers what the deliveries need. It is one franz-go
// client without a group, made once a broker is known, and one goroutine that
// owns it: what is to be read is said by add and remove, and brought into effect
// between two polls. So whatever was polled for an earlier ownership has been
// dealt with before a later one begins.
type fetcher struct {
	d     *driver
	ready chan struct{} // closed when client is set
	wake  chan struct{} // holds a token when the loop should look at what is wanted

	mu     sync.Mutex
	client *kgo.Client
	seeds  []string
	want   map[topicNumber]source
	adds   uint64
	resume []*delivery

	incarnations map[string]int64
}

// source is what is to be read of a partition, for whom and from where. It is
// made anew by each add, so that two are equal only if they are the same.
type source struct {
	o      *delivery
	offset int64
	number uint64 // of the add
}

func newFetcher(d *driver) *fetcher {
	return &fetcher{d: d, ready: make(chan struct{}), wake: make(chan struct{}, 1), want: map[topicNumber]source{}}
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
	// A broker that says nothing for this long is given up for now. The client asks any
	// broker where partitions are, so that one that hangs is in the way of all, until
	// its registration runs out.
	brokerSilence = 2 * time.Second
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
	client, err := kgo.NewClient(
		kgo.SeedBrokers(addresses...),
		kgo.ClientID(f.d.c.cfg.Group),
		kgo.ConsumeResetOffset(kgo.NoResetOffset()),
		kgo.FetchMaxWait(fetchMaxWait),
		kgo.FetchMaxPartitionBytes(int32(f.d.c.cfg.FetchBytes)),
		kgo.FetchMaxBytes(fetchMaxBytes),
		kgo.MetadataMinAge(metadataMinAge),
		kgo.DialTimeout(brokerSilence),
		kgo.RequestTimeoutOverhead(brokerSilence),
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

// topics says at which revision each topic of the group was created.
func (f *fetcher) topics(incarnations map[string]int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !maps.Equal(incarnations, f.incarnations) {
		f.incarnations = incarnations
		notify(f.wake)
	}
}

// topicNumber is what a broker calls a partition.
type topicNumber struct {
	topic  string
	number int32
}

func (o *delivery) number() topicNumber { return topicNumber{o.Partition.Topic, o.Partition.Number} }

// add begins to read for a delivery, or begins anew at another offset, and returns
// its number, which what is fetched carries. It does nothing and returns 0 for one
// that was lost or given up meanwhile: what was removed from the table must not come
// back, since nobody would end it.
func (f *fetcher) add(o *delivery, offset int64) uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.addNow(o, offset)
}

func (f *fetcher) addNow(o *delivery, offset int64) uint64 {
	if f.d.table.get(o.Partition) != o {
		return 0
	}
	f.adds++
	f.want[o.number()] = source{o: o, offset: offset, number: f.adds}
	notify(f.wake)
	return f.adds
}

// again begins anew after a restart, unless the application has sought another
// place meanwhile.
func (f *fetcher) again(was source, offset int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, sought := f.want[was.o.number()]; sought {
		return
	}
	was.o.queue.push(queued{number: was.number, reset: true, offset: offset}, f.d.c.cfg.MaxBufferedBytes)
	f.addNow(was.o, offset)
}

// remove ends it, unless a later delivery of the partition has been added. The
// delivery must have left the table.
func (f *fetcher) remove(o *delivery) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.want[o.number()].o == o {
		delete(f.want, o.number())
		notify(f.wake)
	}
}

// drained lets a paused partition go on once enough was handed over.
func (f *fetcher) drained(o *delivery) {
	if !o.queue.low(f.d.c.cfg.MaxBufferedBytes) {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.resume = append(f.resume, o)
	notify(f.wake)
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
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

// reading is the state of the loop: what the client is reading now.
type reading struct {
	f      *fetcher
	client *kgo.Client
	active map[topicNumber]source
	topics map[string]int64          // the incarnation under which the client knows each topic
	failed map[topicNumber]time.Time // when a failure was last logged
}

func newReading(f *fetcher, client *kgo.Client) *reading {
	return &reading{f: f, client: client, active: map[topicNumber]source{},
		topics: map[string]int64{}, failed: map[topicNumber]time.Time{}}
}

// run carries what is fetched to the queues of the deliveries.
func (f *fetcher) run() {
	ctx := f.d.ctx
	client, err := f.brokers(ctx)
	if err != nil {
		return
	}
	r := newReading(f, client)
	for ctx.Err() == nil {
		r.reconcile()
		// A poll that is cancelled leaves what it found for the next one.
		poll, cancel := context.WithCancel(ctx)
		var watcher sync.WaitGroup
		watcher.Go(func() {
			select {
			case <-f.wake:
				cancel()
			case <-poll.Done():
			}
		})
		fetches := client.PollRecords(poll, pollMost)
		cancel()
		watcher.Wait()
		fetches.EachPartition(func(p kgo.FetchTopicPartition) { r.dispatch(ctx, p) })
	}
}

// reconcile brings what the client reads to what is wanted: all that ended first,
// then all that begins, each in one call, for every call interrupts the fetches of
// all partitions.
func (r *reading) reconcile() {
	r.f.mu.Lock()
	want := maps.Clone(r.f.want)
	resume := r.f.resume
	r.f.resume = nil
	incarnations := r.f.incarnations
	r.f.mu.Unlock()
	ended := map[string][]int32{}
	for tn, s := range r.active {
		if want[tn] != s {
			ended[tn.topic] = append(ended[tn.topic], tn.number)
			delete(r.active, tn)
			delete(r.failed, tn)
		}
	}
	if len(ended) > 0 {
		r.client.RemoveConsumePartitions(ended)
		r.client.ResumeFetchPartitions(ended)
	}
	r.forget(incarnations)
	begin := map[string]map[int32]kgo.Offset{}
	for tn, s := range want {
		if _, there := r.active[tn]; there {
			continue
		}
		if begin[tn.topic] == nil {
			begin[tn.topic] = map[int32]kgo.Offset{}
		}
		begin[tn.topic][tn.number] = kgo.NewOffset().At(s.offset)
		s.o.queue.fetchBegins()
		r.active[tn] = s
		if r.topics[tn.topic] == 0 {
			r.topics[tn.topic] = incarnations[tn.topic]
		}
	}
	if len(begin) > 0 {
		r.client.AddConsumePartitions(begin)
	}
	goOn := map[string][]int32{}
	for _, o := range resume {
		if r.active[o.number()].o == o && o.queue.resume(r.f.d.c.cfg.MaxBufferedBytes) {
			goOn[o.Partition.Topic] = append(goOn[o.Partition.Topic], o.Partition.Number)
		}
	}
	if len(goOn) > 0 {
		r.client.ResumeFetchPartitions(goOn)
	}
}

// forget makes the client forget topics that were deleted: it would ask for them
// without end, and would not read a new topic of the same name, whose id is another.
func (r *reading) forget(incarnations map[string]int64) {
	reads := map[string]bool{}
	for tn := range r.active {
		reads[tn.topic] = true
	}
	var gone []string
	for topic, incarnation := range r.topics {
		if incarnations[topic] != incarnation && !reads[topic] {
			gone = append(gone, topic)
			delete(r.topics, topic)
		}
	}
	r.client.PurgeTopicsFromConsuming(gone...)
}

// dispatch takes what one poll brought of one partition.
func (r *reading) dispatch(ctx context.Context, p kgo.FetchTopicPartition) {
	tn := topicNumber{p.Topic, p.Partition}
	s, ok := r.active[tn]
	if !ok {
		return
	}
	if len(p.Records) > 0 && p.Records[0].Offset < s.offset {
		// The client begins at the end of a log that is shorter than the offset, and
		// says nothing. To skip up to the offset would lose what is written next.
		r.restart(tn, s)
		return
	}
	if len(p.Records) > 0 {
		r.push(s, p.Records)
	}
	switch {
	case p.Err == nil || ctx.Err() != nil:
	case errors.Is(p.Err, kerr.OffsetOutOfRange):
		r.restart(tn, s)
	case time.Since(r.failed[tn]) > failureLogPause:
		r.failed[tn] = time.Now()
		r.f.d.log.Warn("fetch failed", "topic", p.Topic, "partition", s.o.Partition.Name(), "error", p.Err)
	}
}

func (r *reading) push(s source, records []*kgo.Record) {
	b := queued{records: records, number: s.number}
	for _, rec := range records {
		b.bytes += recordBytes(rec)
	}
	// The worker's word to go on is heeded by this goroutine too, between two polls,
	// and so never before the pause that it ends.
	if p := s.o.Partition; s.o.queue.push(b, r.f.d.c.cfg.MaxBufferedBytes) {
		r.client.PauseFetchPartitions(map[string][]int32{p.Topic: {p.Number}})
	}
}

func recordBytes(r *kgo.Record) int { return len(r.Key) + len(r.Value) + recordOverhead }

// restart stops reading and lets the driver find where to go on.
func (r *reading) restart(tn topicNumber, s source) {
	r.f.mu.Lock()
	current := r.f.want[tn] == s
	if current {
		delete(r.f.want, tn)
	}
	r.f.mu.Unlock()
	if !current {
		return
	}
	notify(r.f.wake)
	r.f.d.work.Go(func() { r.f.d.restart(s) })
}

// failureLogPause keeps an error that comes back at the pace of the network from
// flooding the log.
const failureLogPause = 10 * time.Second

// close ends the client; nothing may use the fetcher any more.
func (f *fetcher) close() {
	f.mu.Lock()
	client := f.client
	f.mu.Unlock()
	if client != nil {
		client.Close()
	}
}

// clientLog passes on the client's warnings.
type clientLog struct{ log *slog.Logger }

func (l clientLog) Level() kgo.LogLevel { return kgo.LogLevelWarn }

func (l clientLog) Log(level kgo.LogLevel, msg string, keyvals ...any) {
	// To franz-go a broker that is away for a moment is worth a warning each time.
	l.log.Debug(msg, append(keyvals, "part", "franz-go")...)
}
