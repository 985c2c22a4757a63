package consumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/offsets"
	"github.com/muster-io/muster/rebalance/membership"
	"github.com/muster-io/muster/registry"
)

// start finds where partitions begin that have just been claimed: at the
// committed offset, which is read only now, when no former owner can commit any
// more; or where the reset policy says, which is then committed at once. Errors
// are tried again, never taken for "nothing committed".
func (d *driver) start(list []*delivery) {
	for pause := minRetryPause; len(list) > 0; pause = min(2*pause, maxRetryPause) {
		list = d.startOnce(list)
		if len(list) > 0 && !sleep(d.ctx, pause) {
			return
		}
	}
}

// startOnce returns those that have to be tried again.
func (d *driver) startOnce(list []*delivery) (again []*delivery) {
	var partitions []registry.Partition
	var waiting []*delivery
	for _, o := range list {
		if o.waiting() {
			waiting = append(waiting, o)
			partitions = append(partitions, o.Partition)
		}
	}
	ctx, cancel := context.WithTimeout(d.ctx, callLimit)
	found, err := d.offsets.Fetch(ctx, partitions)
	cancel()
	if err != nil {
		if d.ctx.Err() == nil {
			d.log.Warn("cannot fetch offsets, trying again", "error", err)
		}
		return waiting
	}
	var fresh, old []*delivery
	var positions []offsets.Position
	for i, o := range waiting {
		switch f := found[i]; {
		case f.Err != nil:
			d.log.Warn("partition cannot start until its offset is mended", "error", f.Err)
			again = append(again, o)
		case f.Offset == offsets.None:
			fresh = append(fresh, o)
		default:
			old, positions = append(old, o), append(positions, f.Position)
		}
	}
	again = append(again, d.startOld(old, positions)...)
	return append(again, d.startFresh(fresh)...)
}

// startAt is where a delivery begins, and what is committed for it.
type startAt struct {
	from      int64
	committed offsets.Position
}

// startOld begins partitions at their committed offsets. Those are compared with
// the log first: the client would quietly begin at the end of a log that is
// shorter, or at the start of one that begins later.
func (d *driver) startOld(list []*delivery, positions []offsets.Position) (again []*delivery) {
	if len(list) == 0 {
		return nil
	}
	d.askBounds(list)
	for i, o := range list {
		first, last := o.bounds[timestampEarliest], o.bounds[timestampLatest]
		if err := cmp.Or(first.err, last.err); err != nil {
			if d.ctx.Err() == nil {
				d.log.Warn("cannot compare the offset with the log, trying again", "topic", o.Partition.Topic, "partition", o.Partition.Name(), "error", err)
			}
			again = append(again, o)
			continue
		}
		at := startAt{committed: positions[i]}
		var kept bool
		if at.from, kept = startOffset(positions[i].Offset, first.offset, last.offset, d.c.cfg.Reset); !kept {
			d.log.Warn("offset out of range, starting anew", "topic", o.Partition.Topic, "partition", o.Partition.Name(),
				"was", at.committed.Offset, "log_start", first.offset, "log_end", last.offset, "reset", d.c.cfg.Reset, "offset", at.from)
		}
		o.starts <- at
	}
	return again
}

// startOffset is the committed offset if the log, from first to last, has it or
// ends with it, and else where the reset policy says.
func startOffset(committed, first, last int64, r Reset) (from int64, kept bool) {
	switch {
	case committed >= first && committed <= last:
		return committed, true
	case r == Smallest:
		return first, false
	}
	return last, false
}

// askBounds asks where the logs begin and end, both at once, since a broker that
// does not answer takes the whole time of a call. What was answered in an earlier
// try is not asked again: the client may come upon such a broker at each call, so
// that two might never succeed together. An old answer will do: what was within
// the log then is not beyond its end now.
func (d *driver) askBounds(list []*delivery) {
	var calls sync.WaitGroup
	answers := map[int64]map[*delivery]logOffset{timestampEarliest: {}, timestampLatest: {}}
	for timestamp, found := range answers {
		calls.Go(func() {
			var missing []*delivery
			for _, o := range list {
				if r, asked := o.bounds[timestamp]; !asked || r.err != nil {
					missing = append(missing, o)
				}
			}
			for i, r := range d.listOffsets(d.ctx, missing, slices.Repeat([]int64{timestamp}, len(missing))) {
				found[missing[i]] = r
			}
		})
	}
	calls.Wait()
	for timestamp, found := range answers {
		for o, r := range found {
			o.bounds[timestamp] = r
		}
	}
}

// waiting tells whether the delivery still waits for its start.
func (o *delivery) waiting() bool {
	select {
	case <-o.Revoked():
		return false
	case <-o.done:
		return false
	default:
		return o.Alive()
	}
}

// startFresh begins partitions for which nothing is committed.
func (d *driver) startFresh(list []*delivery) (again []*delivery) {
	if len(list) == 0 {
		return nil
	}
	ctx, cancelSince := context.WithTimeout(d.ctx, callLimit)
	since, err := d.groupSince(ctx)
	cancelSince()
	if err != nil {
		d.log.Warn("cannot fetch offsets, trying again", "error", err)
		return list
	}
	policies := make([]Reset, len(list))
	timestamps := make([]int64, len(list))
	for i, o := range list {
		policies[i] = startPolicy(d.c.cfg.Reset, since, d.topicChanged(o.Partition.Topic))
		timestamps[i] = timestampOf(policies[i])
	}
	resolved := d.listOffsets(d.ctx, list, timestamps)
	var commits []offsets.Commit
	var ready []*delivery
	for i, o := range list {
		if resolved[i].err != nil {
			if d.ctx.Err() == nil {
				d.log.Warn("cannot find where to start, trying again", "topic", o.Partition.Topic, "partition", o.Partition.Name(), "error", resolved[i].err)
			}
			again = append(again, o)
			continue
		}
		ready = append(ready, o)
		commits = append(commits, offsets.Commit{Partition: o.Partition, Offset: resolved[i].offset, Token: o.Token})
	}
	if d.c.cfg.ManualCommit {
		for i, o := range ready {
			o.starts <- startAt{from: commits[i].Offset, committed: offsets.Position{Offset: offsets.None}}
		}
		return again
	}
	limited, cancel := context.WithTimeout(d.ctx, callLimit)
	defer cancel()
	outcomes, err := d.offsets.Commit(limited, commits)
	if err != nil && d.ctx.Err() == nil {
		d.log.Warn("cannot commit the start, trying again", "error", err)
	}
	for i, o := range ready {
		switch {
		case i >= len(outcomes), !outcomes[i].Stored && !outcomes[i].Fenced:
			again = append(again, o) // somebody wrote an offset meanwhile: read it
		case outcomes[i].Fenced:
			o.Fenced()
		default:
			d.log.Info("no offset was committed", "topic", o.Partition.Topic, "partition", o.Partition.Name(), "offset", outcomes[i].Now.Offset)
			o.starts <- startAt{from: outcomes[i].Now.Offset, committed: outcomes[i].Now}
		}
	}
	return again
}

// groupSince is the revision since which the group has existed, as far as the
// registry remembers: its oldest offset or its oldest registration.
func (d *driver) groupSince(ctx context.Context) (int64, error) {
	since, err := d.offsets.Since(ctx)
	if err != nil {
		return 0, err
	}
	for kv := range d.view.Load().All(membership.ViewIDs) {
		if since == 0 || kv.CreateRevision < since {
			since = kv.CreateRevision
		}
	}
	return since, nil
}

// topicChanged is the revision at which the topic got its present partitions.
func (d *driver) topicChanged(topic string) int64 {
	kv, _ := d.view.Load().Get(membership.ViewTopics, d.c.cfg.Root.Topic(topic))
	return kv.ModRevision
}

// startPolicy: what came into a partition that is younger than the group was
// meant for the group, so that none of it may be skipped.
func startPolicy(configured Reset, groupSince, topicChanged int64) Reset {
	if groupSince != 0 && topicChanged > groupSince {
		return Smallest
	}
	return configured
}

type logOffset struct {
	offset int64
	err    error
}

// listLimit bounds one question to all brokers, since the answers of those that
// are well wait for it. Who was too slow is asked again.
const listLimit = 3 * time.Second

// listOffsets asks the brokers for an offset of each partition. Brokers answer
// apart: one that does not must not keep the partitions of the others waiting.
func (d *driver) listOffsets(ctx context.Context, list []*delivery, timestamps []int64) []logOffset {
	out := make([]logOffset, len(list))
	if len(list) == 0 {
		return out
	}
	fail := func(err error) []logOffset {
		for i := range out {
			out[i].err = err
		}
		return out
	}
	client, err := d.fetch.brokers(ctx)
	if err != nil {
		return fail(fmt.Errorf("no broker is registered: %w", err))
	}
	ctx, cancel := context.WithTimeout(ctx, listLimit)
	defer cancel()
	index := map[topicNumber]int{}
	byTopic := map[string]*kmsg.ListOffsetsRequestTopic{}
	for i, o := range list {
		index[o.number()] = i
		t := byTopic[o.Partition.Topic]
		if t == nil {
			t = &kmsg.ListOffsetsRequestTopic{Topic: o.Partition.Topic}
			byTopic[o.Partition.Topic] = t
		}
		p := kmsg.NewListOffsetsRequestTopicPartition()
		p.Partition, p.Timestamp = o.Partition.Number, timestamps[i]
		t.Partitions = append(t.Partitions, p)
	}
	req := kmsg.NewPtrListOffsetsRequest()
	for _, t := range byTopic {
		req.Topics = append(req.Topics, *t)
	}
	fail(errNoAnswer)
	for _, shard := range client.RequestSharded(ctx, req) {
		res, ok := shard.Resp.(*kmsg.ListOffsetsResponse)
		if shard.Err != nil || !ok {
			continue
		}
		for _, t := range res.Topics {
			for _, p := range t.Partitions {
				if i, ok := index[topicNumber{t.Topic, p.Partition}]; ok {
					out[i] = logOffset{p.Offset, kerr.ErrorForCode(p.ErrorCode)}
				}
			}
		}
	}
	return out
}

var errNoAnswer = errors.New("no answer from the partition's broker")

// Timestamps of ListOffsets that stand for an end of the log.
const (
	timestampLatest   = -1
	timestampEarliest = -2
)

func timestampOf(r Reset) int64 {
	if r == Smallest {
		return timestampEarliest
	}
	return timestampLatest
}

// restart begins again where the reset policy says, after the broker said that
// the offset is not in its log.
func (d *driver) restart(was source) {
	o := was.o
	for pause := minRetryPause; o.waiting(); pause = min(2*pause, maxRetryPause) {
		r := d.listOffsets(o.Context(), []*delivery{o}, []int64{timestampOf(d.c.cfg.Reset)})[0]
		if r.err == nil {
			d.log.Warn("offset out of range, starting anew", "topic", o.Partition.Topic, "partition", o.Partition.Name(),
				"was", o.next.Load(), "reset", d.c.cfg.Reset, "offset", r.offset)
			d.fetch.again(was, r.offset)
			return
		}
		d.log.Warn("offset out of range, and no answer where to start; trying again", "error", r.err)
		if !sleep(d.ctx, pause) {
			return
		}
	}
}
