package consumer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/offsets"
	"github.com/muster-io/muster/registry"
)

// start finds where partitions begin that have just been claimed: at the
// committed offset, which is read only now, when no former owner can commit any
// more; or where the reset policy says, which is then committed at once. Errors
// are tried again, never taken for "nothing committed".
func (d *driver) start(list []*delivery) {
	for pause := minJoinPause; len(list) > 0; pause = min(2*pause, maxJoinPause) {
		list = d.startOnce(list)
		if len(list) > 0 && !sleep(d.ctx, pause) {
			return
		}
	}
}

// startOnce returns those that have to be tried again.
func (d *driver) startOnce(list []*delivery) (again []*delivery) {
	ctx, cancel := context.WithTimeout(d.ctx, callLimit)
	defer cancel()
	var partitions []registry.Partition
	var waiting []*delivery
	for _, o := range list {
		if o.waiting() {
			waiting = append(waiting, o)
			partitions = append(partitions, o.partition)
		}
	}
	found, err := d.offsets.Fetch(ctx, partitions)
	if err != nil {
		if d.ctx.Err() == nil {
			d.log.Warn("cannot fetch offsets, trying again", "error", err)
		}
		return waiting
	}
	var fresh []*delivery
	for i, o := range waiting {
		switch f := found[i]; {
		case f.Err != nil:
			d.log.Warn("partition cannot start until its offset is mended", "error", f.Err)
			again = append(again, o)
		case f.Offset == offsets.None:
			fresh = append(fresh, o)
		default:
			o.begin <- f.Position
		}
	}
	return append(again, d.startFresh(ctx, fresh)...)
}

// waiting tells whether the delivery still waits for its start.
func (o *delivery) waiting() bool {
	select {
	case <-o.revoked:
		return false
	case <-o.done:
		return false
	default:
		return o.alive()
	}
}

// startFresh begins partitions for which nothing is committed.
func (d *driver) startFresh(ctx context.Context, list []*delivery) (again []*delivery) {
	if len(list) == 0 {
		return nil
	}
	since, err := d.groupSince(ctx)
	if err != nil {
		d.log.Warn("cannot fetch offsets, trying again", "error", err)
		return list
	}
	policies := make([]Reset, len(list))
	for i, o := range list {
		policies[i] = startPolicy(d.c.cfg.Reset, since, d.topicChanged(o.partition.Topic))
	}
	resolved := d.resolve(ctx, list, policies)
	var commits []offsets.Commit
	var ready []*delivery
	for i, o := range list {
		if resolved[i].err != nil {
			if d.ctx.Err() == nil {
				d.log.Warn("cannot find where to start, trying again", "topic", o.partition.Topic, "partition", o.partition.Name(), "error", resolved[i].err)
			}
			again = append(again, o)
			continue
		}
		ready = append(ready, o)
		commits = append(commits, offsets.Commit{Partition: o.partition, Offset: resolved[i].offset, Token: o.token})
	}
	outcomes, err := d.offsets.Commit(ctx, commits)
	if err != nil && d.ctx.Err() == nil {
		d.log.Warn("cannot commit the start, trying again", "error", err)
	}
	for i, o := range ready {
		switch {
		case i >= len(outcomes), !outcomes[i].Stored && !outcomes[i].Fenced:
			again = append(again, o) // somebody wrote an offset meanwhile: read it
		case outcomes[i].Fenced:
			d.fenced(o)
		default:
			d.log.Info("no offset was committed", "topic", o.partition.Topic, "partition", o.partition.Name(), "reset", resolved[i].policy, "offset", outcomes[i].Now.Offset)
			o.begin <- outcomes[i].Now
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
	for _, kv := range d.view.Snapshot().Under(viewIDs) {
		if since == 0 || kv.CreateRevision < since {
			since = kv.CreateRevision
		}
	}
	return since, nil
}

// topicChanged is the revision at which the topic got its present partitions.
func (d *driver) topicChanged(topic string) int64 {
	key := d.c.cfg.Root.Topic(topic)
	for _, kv := range d.view.Snapshot().Under(viewTopics) {
		if kv.Key == key {
			return kv.ModRevision
		}
	}
	return 0
}

// startPolicy: what came into a partition that is younger than the group was
// meant for the group, so that none of it may be skipped.
func startPolicy(configured Reset, groupSince, topicChanged int64) Reset {
	if groupSince != 0 && topicChanged > groupSince {
		return Smallest
	}
	return configured
}

type resolution struct {
	offset int64
	policy Reset
	err    error
}

// resolve asks the brokers where partitions begin or end.
func (d *driver) resolve(ctx context.Context, list []*delivery, policies []Reset) []resolution {
	out := make([]resolution, len(list))
	fail := func(err error) []resolution {
		for i := range out {
			out[i].err = err
		}
		return out
	}
	client, err := d.fetch.brokers(ctx)
	if err != nil {
		return fail(fmt.Errorf("no broker is registered: %w", err))
	}
	index := map[topicNumber]int{}
	byTopic := map[string]*kmsg.ListOffsetsRequestTopic{}
	for i, o := range list {
		out[i].policy = policies[i]
		out[i].err = errors.New("no answer")
		index[topicNumber{o.partition.Topic, o.partition.Number}] = i
		t := byTopic[o.partition.Topic]
		if t == nil {
			t = &kmsg.ListOffsetsRequestTopic{Topic: o.partition.Topic}
			byTopic[o.partition.Topic] = t
		}
		p := kmsg.NewListOffsetsRequestTopicPartition()
		p.Partition, p.Timestamp = o.partition.Number, timestampOf(policies[i])
		t.Partitions = append(t.Partitions, p)
	}
	req := kmsg.NewPtrListOffsetsRequest()
	for _, t := range byTopic {
		req.Topics = append(req.Topics, *t)
	}
	res, err := req.RequestWith(ctx, client)
	if err != nil {
		return fail(fmt.Errorf("list offsets: %w", err))
	}
	for _, t := range res.Topics {
		for _, p := range t.Partitions {
			if i, ok := index[topicNumber{t.Topic, p.Partition}]; ok {
				out[i].offset, out[i].err = p.Offset, kerr.ErrorForCode(p.ErrorCode)
			}
		}
	}
	return out
}

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
func (d *driver) restart(o *delivery) {
	for pause := minJoinPause; o.waiting(); pause = min(2*pause, maxJoinPause) {
		ctx, cancel := context.WithTimeout(o.ctx, callLimit)
		r := d.resolve(ctx, []*delivery{o}, []Reset{d.c.cfg.Reset})[0]
		cancel()
		if r.err == nil {
			d.log.Warn("offset out of range, starting anew", "topic", o.partition.Topic, "partition", o.partition.Name(),
				"was", o.next.Load(), "reset", r.policy, "offset", r.offset)
			o.queue.push(queued{reset: true, offset: r.offset}, d.c.cfg.MaxBufferedBytes)
			d.fetch.add(o, r.offset)
			return
		}
		d.log.Warn("offset out of range, and no answer where to start; trying again", "error", r.err)
		if !sleep(d.ctx, pause) {
			return
		}
	}
}

// commitPause is how long a commit waits before it is tried again.
const commitPause = 100 * time.Millisecond
