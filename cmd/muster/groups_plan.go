package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/rebalance/groups"
)

func groupsVerifyCommand() *cli.Command {
	return &cli.Command{
		Name: "verify", Usage: "tell whether every partition is owned by whom the strategy says; the exit status is 1 if not", ArgsUsage: "NAME",
		Flags:  clientFlags(&cli.DurationFlag{Name: "wait", Usage: "wait so long until the group has members and is right"}),
		Action: verifyGroup,
	}
}

func verifyGroup(c *cli.Context) error {
	name, err := groupArgument(c)
	if err != nil {
		return err
	}
	wait := c.Duration("wait")
	if wait < 0 || c.IsSet("wait") && wait == 0 {
		return wrongUse("--wait %s: want more than 0", wait)
	}
	if err := checkOutput(c); err != nil {
		return err
	}
	return withClient(c, func(ctx context.Context, cl *client) error {
		var v *groups.Verdict
		var bad []error
		if wait > 0 {
			limited, cancel := context.WithTimeout(ctx, wait)
			defer cancel()
			v, bad, err = groups.VerifyUntil(limited, cl.store, cl.root, name)
		} else {
			limited, cancel := context.WithTimeout(ctx, callLimit)
			defer cancel()
			v, bad, err = groups.Verify(limited, cl.store, cl.root, name)
		}
		if err != nil {
			return err
		}
		cl.warn(bad)
		err := show(c, v, func(w io.Writer) { printVerdict(w, c.App.ErrWriter, v) })
		if !v.Right {
			err = errors.Join(err, fmt.Errorf("group %s is not in order, for %d reasons", name, len(v.Reasons)))
		}
		return err
	})
}

// printVerdict writes the line of 0.8.2's tool, and the reasons where that wrote them.
func printVerdict(w, notices io.Writer, v *groups.Verdict) {
	for _, r := range v.Reasons {
		fmt.Fprintln(notices, r)
	}
	if v.Members == 0 && v.Right {
		fmt.Fprintf(notices, "group %s has no members\n", v.Group)
	}
	if v.Right {
		fmt.Fprintln(w, "Rebalance operation successful !")
	} else {
		fmt.Fprintln(w, "Rebalance operation failed !")
	}
}

func groupsPlanCommand() *cli.Command {
	return &cli.Command{
		Name: "plan", Usage: "print what would move if members came, left, or stated another strategy; nothing is changed", ArgsUsage: "NAME",
		Flags: clientFlags(
			&cli.StringSliceFlag{Name: "without", Usage: "a `MEMBER` that leaves: its id, or a beginning that no other has; may be repeated"},
			&cli.IntFlag{Name: "add", Usage: "so many members join, that subscribe as the lowest one does"},
			&cli.StringFlag{Name: "strategy", Usage: "every member states this one"},
		),
		Action: planGroup,
	}
}

// maxAdded bounds what a plan supposes.
const maxAdded = 10_000

func planGroup(c *cli.Context) error {
	name, err := groupArgument(c)
	if err != nil {
		return err
	}
	change := groups.Change{Without: c.StringSlice("without"), Add: c.Int("add"), Strategy: c.String("strategy")}
	if change.Add < 0 || change.Add > maxAdded {
		return wrongUse("--add %d: want 0 to %d", change.Add, maxAdded)
	}
	if change.Strategy != "" && !rebalance.Known(change.Strategy) {
		return wrongUse("--strategy %q is not known", change.Strategy)
	}
	return withTool(c, func(ctx context.Context, cl *client) error {
		p, bad, err := groups.MakePlan(ctx, cl.store, cl.root, name, change)
		cl.warn(bad)
		if errors.Is(err, groups.ErrNoSuchMember) || errors.Is(err, groups.ErrManyMembers) {
			return wrongUse("--without: %w", err)
		}
		if err != nil {
			return err
		}
		if change.Add > 0 {
			fmt.Fprintln(c.App.ErrWriter, "the order of ids decides who gets what: members with other ids than new-1 … may get other partitions")
		}
		return show(c, p, func(w io.Writer) { printPlan(w, p) })
	})
}

func printPlan(w io.Writer, p *groups.Plan) {
	if p.Refusal != nil {
		fmt.Fprintf(w, "group %s, strategy %s: refused, nothing would move: %s\n", p.Group, or(p.Strategy, "none"), *p.Refusal)
	} else {
		fmt.Fprintf(w, "group %s, strategy %s: %d of %d partitions would move\n", p.Group, or(p.Strategy, "none"), len(p.Moves), p.Total)
	}
	if len(p.Moves) > 0 {
		row(w, "TOPIC", "PARTITION", "BROKER", "FROM", "TO")
		for _, m := range p.Moves {
			row(w, m.Topic, m.Partition, m.Broker, or(m.From, "none"), or(m.To, "none"))
		}
		fmt.Fprintln(w)
	}
	row(w, "MEMBER", "BEFORE", "AFTER")
	for _, m := range p.Members {
		row(w, m.ID, or(m.Before, "-"), or(m.After, "-"))
	}
}

func groupsHistoryCommand() *cli.Command {
	return &cli.Command{
		Name: "history", Usage: "print who owned what when, and why it moved, a line a transaction, oldest first", ArgsUsage: "NAME",
		Flags: clientFlags(
			&cli.StringFlag{Name: "partition", Usage: "only what is about this `TOPIC[/NUMBER]`"},
			&cli.IntFlag{Name: "limit", Usage: "only the newest so many"},
			&cli.StringFlag{Name: "since", Usage: "only from then on: a duration before now such as 10m, or a time such as 2026-11-30T15:04:05Z"},
		),
		Action: groupHistory,
	}
}

func groupHistory(c *cli.Context) error {
	name, err := groupArgument(c)
	if err != nil {
		return err
	}
	f, err := historyFilter(c)
	if err != nil {
		return err
	}
	return withTool(c, func(ctx context.Context, cl *client) error {
		list, bad, err := groups.History(ctx, cl.store, cl.root, name, f)
		if err != nil {
			return err
		}
		cl.warn(bad)
		return show(c, list, func(w io.Writer) {
			row(w, "TIME", "REVISION", "MEMBER", "ACTION", "PARTITIONS", "REASON")
			for _, e := range list {
				at := "-"
				if e.Time != nil {
					at = e.Time.Format(shortTime)
				}
				row(w, at, e.Revision, e.Member, e.Action, partitionsText(e.Partitions), or(e.Reason, "-"))
			}
		})
	})
}

// shortTime is how tables show a time of any day.
const shortTime = "2006-01-02T15:04:05.000Z07:00"

func historyFilter(c *cli.Context) (f groups.HistoryFilter, err error) {
	if f.Limit = c.Int("limit"); f.Limit < 0 || c.IsSet("limit") && f.Limit == 0 {
		return f, wrongUse("--limit %d: want 1 or more", f.Limit)
	}
	if c.IsSet("partition") {
		if f.Topic, f.Partition, err = parsePartition(c.String("partition")); err != nil {
			return f, wrongUse("--partition: %w", err)
		}
	}
	if text := c.String("since"); text != "" {
		ago, errAgo := time.ParseDuration(text)
		at, errAt := time.Parse(time.RFC3339, text)
		switch {
		case errAgo == nil && ago > 0:
			f.Since = time.Now().Add(-ago)
		case errAt == nil:
			f.Since = at
		default:
			return f, wrongUse("--since %q: want a duration such as 10m, or a time such as 2026-11-30T15:04:05Z", text)
		}
	}
	return f, nil
}
