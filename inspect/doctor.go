package inspect

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/muster-io/muster/registry"
)

// DefaultSettle is how long a suspicion must stand unchanged to count.
const DefaultSettle = 10 * time.Second

const (
	// maxLeaseWait bounds the wait for leases to run out: sessions last a minute at most.
	maxLeaseWait = registry.MaxTTL + 5*time.Second
	leaseSlack   = 2 * time.Second // the store tells whole seconds, and looks for expired leases now and then
	// silenceLimit is how long the store may say nothing during an examination.
	silenceLimit = 10 * time.Second
)

// Doctor examines a registry. Store and Ask are required.
type Doctor struct {
	Store registry.Store
	Root  registry.Root
	// Ask puts questions to the brokers; Network does.
	Ask func(ctx context.Context, q Questions) Probes
	// Settle is how far apart the two looks are at least. Zero means DefaultSettle.
	// They are farther apart where a lease that keeps a suspicious key must be given
	// the time to run out.
	Settle time.Duration
	// Waiting, if not nil, is called when there are suspicions and a second look is due.
	Waiting func(suspicions int, wait time.Duration)
}

// Report is the result of an examination.
type Report struct {
	Revision int64     `json:"revision"` // that was read
	Keys     int       `json:"keys"`
	Healthy  bool      `json:"healthy"` // no errors and no warnings
	Findings []Finding `json:"findings"`
	// Unsettled counts what looked wrong while things around it were changing.
	Unsettled int `json:"unsettled"`
}

// settle sets Healthy.
func (r *Report) settle() {
	r.Healthy = true
	for _, f := range r.Findings {
		r.Healthy = r.Healthy && (f.Severity == Notice || f.Repaired)
	}
}

// Examine looks at the registry: once if nothing is suspicious, else twice.
func (d *Doctor) Examine(ctx context.Context) (*Report, error) {
	changes := &recorder{changes: Changes{}}
	settle := d.Settle
	if settle == 0 {
		settle = DefaultSettle
	}
	view, err := registry.OpenView(ctx, d.Store, d.Root.Parts(), registry.ViewOptions{Stall: silenceLimit}, changes.note)
	if err != nil {
		return nil, fmt.Errorf("read the registry: %w", err)
	}
	defer view.Close()
	tree, first := d.look(ctx, view)
	report := &Report{Revision: first.Revision, Keys: len(tree.Keys), Findings: first.Findings}
	if n := suspicions(first.Findings); n > 0 {
		wait, err := d.wait(ctx, settle, first.Findings)
		if err != nil {
			return nil, err
		}
		if d.Waiting != nil {
			d.Waiting(n, wait)
		}
		if err := quietFor(ctx, view, wait); err != nil {
			return nil, err
		}
		if err := d.catchUp(ctx, view); err != nil {
			return nil, err
		}
		tree, second := d.look(ctx, view)
		report.Revision, report.Keys = second.Revision, len(tree.Keys)
		report.Findings, report.Unsettled = Confirm(first, second, changes.taken())
	}
	if report.Findings == nil {
		report.Findings = []Finding{}
	}
	report.settle()
	return report, nil
}

func (d *Doctor) look(ctx context.Context, view *registry.View) (Tree, Look) {
	tree := treeOf(d.Root, view.Snapshot())
	m := tree.read()
	return tree, Look{tree.Revision, m.check(d.Ask(ctx, m.questions()))}
}

func suspicions(list []Finding) (n int) {
	for _, f := range list {
		if f.suspicion {
			n++
		}
	}
	return n
}

// wait is the time until a second look: after it, every key that only a dead
// process's lease keeps alive is gone.
func (d *Doctor) wait(ctx context.Context, settle time.Duration, list []Finding) (time.Duration, error) {
	wait := settle
	asked := map[registry.LeaseID]bool{0: true}
	for _, f := range list {
		if !f.suspicion || asked[f.lease] {
			continue
		}
		asked[f.lease] = true
		left, err := d.Store.Remaining(ctx, f.lease)
		if err != nil && !errors.Is(err, registry.ErrLeaseNotFound) {
			return 0, fmt.Errorf("ask how long lease %s lives: %w", registry.LeaseText(f.lease), err)
		}
		wait = max(wait, min(left+leaseSlack, maxLeaseWait))
	}
	return wait, nil
}

// ErrSilent ends an examination during which the store said nothing.
var ErrSilent = errors.New("the registry does not answer")

func quietFor(ctx context.Context, view *registry.View, wait time.Duration) error {
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-view.Trouble():
		return ErrSilent
	case <-ctx.Done():
		return fmt.Errorf("wait for a second look: %w", ctx.Err())
	}
}

const (
	catchUpPoll  = 20 * time.Millisecond
	catchUpRetry = 10 // polls between two requests for progress
)

// catchUp waits until the View shows what the store holds now. It lags a little, and
// what it does not show yet may be the very end of what is suspected.
func (d *Doctor) catchUp(ctx context.Context, view *registry.View) error {
	limited, cancel := context.WithTimeout(ctx, silenceLimit)
	defer cancel()
	_, now, err := registry.GetKey(limited, d.Store, d.Root.ClusterID()) // for the revision
	if err != nil {
		return fmt.Errorf("read the registry: %w", err)
	}
	tick := time.NewTicker(catchUpPoll)
	defer tick.Stop()
	for n := 0; view.Revision() < now; n++ {
		if n%catchUpRetry == 0 {
			// If it fails, the next may not; the view asks now and then, too.
			_ = d.Store.RequestProgress(limited)
		}
		select {
		case <-tick.C:
		case <-limited.Done():
			return ErrSilent
		}
	}
	return nil
}

// recorder collects Changes from a View.
type recorder struct {
	mu      sync.Mutex
	changes Changes
}

func (r *recorder) note(_ registry.Snapshot, events []registry.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range events {
		r.changes[e.Key] = e.ModRevision
	}
}

func (r *recorder) taken() Changes {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.changes)
}

// Repair applies the repairs of the findings with those indexes, notes them in
// the report, and returns what went wrong.
func (d *Doctor) Repair(ctx context.Context, r *Report, indexes []int) []error {
	var failed []error
	for _, i := range indexes {
		if err := Apply(ctx, d.Store, r.Findings[i]); err != nil {
			failed = append(failed, err)
			continue
		}
		r.Findings[i].Repaired = true
	}
	r.settle()
	return failed
}
