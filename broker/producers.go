package broker

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"

	"github.com/muster-io/muster/registry"
)

// producers hands out producer ids. The registry holds the first id that no
// daemon has taken; each daemon takes a block at a time by compare-and-swap.
type producers struct {
	d *Daemon

	mu        sync.Mutex
	from, end int64 // what is left of the block
}

// producerBlock ids are taken at a time, as many as a Kafka controller hands out.
const producerBlock = 1000

func (p *producers) next(ctx context.Context) (int64, error) {
	// The lock is held over the call to the registry on purpose: whoever comes
	// meanwhile needs the same block.
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.from == p.end {
		if err := p.take(ctx); err != nil {
			return 0, fmt.Errorf("take a block of producer ids: %w", err)
		}
	}
	p.from++
	return p.from - 1, nil
}

func (p *producers) take(ctx context.Context) error {
	if !p.d.members.alive() {
		return errNoSession
	}
	key := p.d.cfg.Root.ProducerIDs()
	kv, _, err := registry.GetKey(ctx, p.d.store, key)
	for err == nil {
		first, revision := int64(0), int64(0)
		if kv != nil {
			if first, err = registry.ParseOffset(*kv); err != nil {
				return err
			}
			revision = kv.ModRevision
		}
		var res registry.TxnResult
		res, err = p.d.store.Txn(ctx, registry.Txn{
			If:   []registry.Cond{registry.ModifiedAt(key, revision)},
			Then: []registry.Op{registry.Put(key, strconv.AppendInt(nil, first+producerBlock, 10), 0)},
			Else: []registry.Op{registry.Get(key)},
		})
		switch {
		case err != nil:
		case res.Succeeded:
			p.from, p.end = first, first+producerBlock
			p.d.metrics.producerIDs.Inc()
			return nil
		case len(res.Items[0].KVs) > 0:
			kv = &res.Items[0].KVs[0]
		default:
			kv = nil
		}
	}
	return err
}

// errNoSession refuses a write to the registry by a daemon that may be dead to it.
var errNoSession = errors.New("the daemon has lost its session with the registry")
