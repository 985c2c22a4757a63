package consumer

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/muster-io/muster/offsets"
	"github.com/muster-io/muster/registry"
)

// Assigned lists the partitions that are handed over at present.
func (c *Consumer) Assigned() []registry.Partition {
	var list []registry.Partition
	if d := c.driver.Load(); d != nil {
		for _, o := range d.table.all() {
			if o.begun() {
				list = append(list, o.Partition)
			}
		}
	}
	slices.SortFunc(list, registry.ComparePartitions)
	return list
}

// begun tells whether the delivery is between Assigned and Revoked or Lost.
func (o *delivery) begun() bool { return o.next.Load() != offsets.None && o.Alive() }

func (c *Consumer) begun(p registry.Partition) (*delivery, error) {
	if d := c.driver.Load(); d != nil {
		if o := d.table.get(p); o != nil && o.begun() {
			return o, nil
		}
	}
	return nil, fmt.Errorf("partition %s: %w", p, ErrNotOwned)
}

// Pause stops the hand-over of partitions, after the record in hand, until Resume;
// it ends with the ownership. What has been fetched is kept. A partition that is not
// assigned is ErrNotOwned; the others are paused all the same.
func (c *Consumer) Pause(partitions ...registry.Partition) error { return c.pause(partitions, true) }

// Resume ends a Pause.
func (c *Consumer) Resume(partitions ...registry.Partition) error { return c.pause(partitions, false) }

func (c *Consumer) pause(partitions []registry.Partition, on bool) (err error) {
	for _, p := range partitions {
		o, errOwned := c.begun(p)
		if errOwned != nil {
			err = errOwned
			continue
		}
		o.progress.pause(on)
	}
	return err
}

// Seek goes on at another offset of a partition that is assigned, else it is
// ErrNotOwned. It takes effect before the next record is handed over, and what is
// committed follows it, also backwards; records in hand from before do not count any
// more. An offset that is not in the log is answered as the reset policy says.
func (c *Consumer) Seek(p registry.Partition, offset int64) error {
	if offset < 0 {
		return fmt.Errorf("seek %s to %d: offsets begin at 0", p, offset)
	}
	o, err := c.begun(p)
	if err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	select {
	case <-o.Revoked():
		return fmt.Errorf("partition %s is being given up: %w", p, ErrNotOwned)
	default:
	}
	number := c.driver.Load().fetch.add(o, offset)
	if number == 0 {
		return fmt.Errorf("partition %s: %w", p, ErrNotOwned)
	}
	o.floor = number
	o.moveTo(offset)
	return nil
}

// Commit stores offsets, of the next record to read, of partitions that are assigned;
// it has one answer for each, nil if it is stored, ErrNotOwned if the partition is
// another's by now. One attempt is made; ctx bounds the waiting for it. It is not
// asked what the application has finished. Unless Config.ManualCommit is set, it also
// finishes the records in hand before the offset, and what is committed on its own
// goes on from what is finished later.
func (c *Consumer) Commit(ctx context.Context, list map[registry.Partition]int64) map[registry.Partition]error {
	answers := make(map[registry.Partition]error, len(list))
	ord := &order{done: make(chan struct{})}
	for _, p := range slices.SortedFunc(maps.Keys(list), registry.ComparePartitions) {
		o, err := c.begun(p)
		switch {
		case err != nil:
			answers[p] = err
		case list[p] < 0:
			answers[p] = fmt.Errorf("commit %s at %d: offsets begin at 0", p, list[p])
		default:
			ord.list = append(ord.list, orderedOffset{o: o, offset: list[p]})
		}
	}
	if len(ord.list) == 0 {
		return answers
	}
	fail := func(err error) map[registry.Partition]error {
		for i := range ord.list { // whose errors may be written at this moment
			answers[ord.list[i].o.Partition] = err
		}
		return answers
	}
	d := c.driver.Load()
	select {
	case d.commits.orders <- ord:
	case <-ctx.Done():
		return fail(fmt.Errorf("commit: %w", ctx.Err()))
	case <-d.ctx.Done():
		return fail(ErrNotOwned)
	}
	select {
	case <-ord.done:
	case <-ctx.Done():
		return fail(fmt.Errorf("commit, outcome unknown: %w", ctx.Err()))
	}
	for _, l := range ord.list {
		answers[l.o.Partition] = l.err
	}
	return answers
}
