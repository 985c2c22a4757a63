package groups

import (
	"context"
	"errors"
	"fmt"

	"github.com/muster-io/muster/registry"
)

// Verdict tells whether a group is in order: every partition of every topic that it
// subscribes to is owned by the registered thread that the strategy says.
type Verdict struct {
	Group    string   `json:"group"`
	Revision int64    `json:"revision"`
	Right    bool     `json:"right"`
	Members  int      `json:"members"`
	Strategy *string  `json:"strategy"` // nil without members
	Reasons  []string `json:"reasons"`  // why it is not right
}

// Verify looks at a group once. One without members is right, as it was for 0.8.2's tool.
func Verify(ctx context.Context, st registry.Store, root registry.Root, group string) (*Verdict, []error, error) {
	keys, topics, revision, err := read(ctx, st, root, group)
	if err != nil {
		return nil, nil, fmt.Errorf("verify group %s: %w", group, err)
	}
	p, bad := NewPainter(root, group).Paint(revision, keys, topics)
	return p.verdict(), bad, nil
}

func (p *Picture) verdict() *Verdict {
	v := &Verdict{Group: p.Group, Revision: p.Revision, Members: len(p.Snapshot.Members), Reasons: []string{}}
	if strategy := p.Strategy(); strategy != "" {
		v.Strategy = &strategy
		v.Reasons = append(v.Reasons, p.Unfit()...)
	}
	v.Right = len(v.Reasons) == 0
	return v
}

// VerifyUntil looks whenever the group changes, until it has members and is right,
// or ctx ends, which is no error: the verdict is then that of the last look. It
// waits for members too, and for a group of which there is no key yet.
func VerifyUntil(ctx context.Context, st registry.Store, root registry.Root, group string) (*Verdict, []error, error) {
	if err := registry.ValidateGroupName(group); err != nil {
		return nil, nil, fmt.Errorf("verify group %s: %w", group, err)
	}
	painter := NewPainter(root, group)
	view, err := registry.OpenView(ctx, st, viewOf(root, group), registry.ViewOptions{}, nil)
	if err != nil {
		return nil, nil, fmt.Errorf("verify group %s: %w", group, err)
	}
	defer view.Close()
	for {
		p, bad := painter.Paint(look(view.Snapshot()))
		v := p.verdict()
		if v.Members == 0 {
			v.Right, v.Reasons = false, append(v.Reasons, "Consumer group "+group+" has no members")
		}
		if v.Right {
			return v, bad, nil
		}
		select {
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.Canceled) {
				return nil, nil, fmt.Errorf("verify group %s: %w", group, ctx.Err())
			}
			return v, bad, nil
		case <-view.Changed():
		}
	}
}

// viewOf are the prefixes that a Painter needs, without offsets and history.
func viewOf(root registry.Root, group string) []string {
	paths := root.Group(group)
	return []string{root.Topics(), paths.IDs(), paths.Owners(), paths.Target()}
}

// look gives a Painter what a View of viewOf shows.
func look(s registry.Snapshot) (revision int64, keys, topics []registry.KV) {
	for i := 1; i <= 3; i++ {
		keys = append(keys, s.Under(i)...)
	}
	return s.Revision, keys, s.Under(0)
}
