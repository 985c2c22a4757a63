package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/muster-io/muster/rebalance/groups"
	"github.com/muster-io/muster/registry"
)

func groupsCommand() *cli.Command {
	return &cli.Command{
		Name:  "groups",
		Usage: "show consumer groups: who owns what, and why; delete them",
		Subcommands: []*cli.Command{
			{Name: "list", Usage: "list groups", Flags: clientFlags(), Action: listGroups},
			{Name: "describe", Usage: "show a group's members, and its partitions with owner, offset and lag", ArgsUsage: "NAME", Flags: clientFlags(), Action: describeGroup},
			groupsVerifyCommand(),
			groupsPlanCommand(),
			groupsHistoryCommand(),
			groupsWatchCommand(),
			{Name: "delete", Usage: "delete groups that have no members, with their offsets", ArgsUsage: "NAME…", Flags: clientFlags(), Action: deleteGroups},
		},
	}
}

// groupArgument returns the command's only argument, the name of a group.
func groupArgument(c *cli.Context) (string, error) {
	name, err := oneArgument(c, "the group's name")
	if err != nil {
		return "", err
	}
	if err := registry.ValidateGroupName(name); err != nil {
		return "", wrongUse("%w", err)
	}
	return name, nil
}

func listGroups(c *cli.Context) error {
	if err := noArguments(c); err != nil {
		return err
	}
	return withTool(c, func(ctx context.Context, cl *client) error {
		list, bad, err := groups.List(ctx, cl.store, cl.root)
		if err != nil {
			return err
		}
		cl.warn(bad)
		return show(c, list, func(w io.Writer) {
			row(w, "GROUP", "MEMBERS", "OWNED", "OFFSETS")
			for _, g := range list {
				row(w, g.Group, g.Members, g.Owned, g.Offsets)
			}
		})
	})
}

func describeGroup(c *cli.Context) error {
	name, err := groupArgument(c)
	if err != nil {
		return err
	}
	return withTool(c, func(ctx context.Context, cl *client) error {
		d, bad, err := groups.Describe(ctx, cl.store, cl.root, name, groups.AskBrokers(cl.store, cl.root))
		if err != nil {
			return err
		}
		cl.warn(bad)
		return show(c, d, func(w io.Writer) { printGroup(w, d, time.Now()) })
	})
}

func printGroup(w io.Writer, d *groups.Description, now time.Time) {
	fmt.Fprintf(w, "group %s, %d members, strategy %s, %s\n", d.Group, len(d.Members), or(d.Strategy, "none"), d.State)
	if d.Refusal != nil {
		fmt.Fprintf(w, "refused: %s\n", *d.Refusal)
	}
	printTroubles(w, d, now)
	if len(d.Members) > 0 {
		fmt.Fprintln(w)
		row(w, "MEMBER", "SUBSCRIPTION", "STRATEGY", "FOR", "OWNS", "DUE")
		for _, m := range d.Members {
			row(w, m.ID, subscriptionText(m), strings.Join(m.Strategy, ","), age(m.Since, now), m.Owns, or(m.Due, "-"))
		}
	}
	fmt.Fprintln(w)
	row(w, "TOPIC", "PARTITION", "BROKER", "OFFSET", "LOG-END", "LAG", "OWNER", "HOST", "FOR", "DUE")
	for _, r := range d.Partitions {
		due := "-"
		if r.Standing != groups.StandingRight && d.Refusal == nil {
			due = or(r.Due, "none")
		}
		offset := or(r.Offset, "none")
		if r.NoLog {
			offset = or(r.Offset, "-")
		}
		row(w, r.Topic, r.Partition, r.Broker, offset, or(r.LogEnd, "-"), or(r.Lag, "-"), ownerText(r), or(r.Host, "-"),
			age(r.Since, now), due)
	}
}

// printTroubles says why partitions are not as they should be, those of one topic
// and one reason together.
func printTroubles(w io.Writer, d *groups.Description, now time.Time) {
	type trouble struct {
		topic, why, since string
		standing          groups.Standing
	}
	var order []trouble
	numbers := map[trouble][]int32{}
	for _, r := range d.Partitions {
		if r.Standing == groups.StandingRight || r.Standing == groups.StandingKept || r.Why == nil {
			continue
		}
		t := trouble{topic: r.Topic, why: *r.Why, standing: r.Standing}
		if r.Standing == groups.StandingOwnerless && r.Since != nil {
			t.since = " for " + age(r.Since, now)
		}
		if numbers[t] == nil {
			order = append(order, t)
		}
		numbers[t] = append(numbers[t], r.Partition)
	}
	for _, t := range order {
		fmt.Fprintf(w, "%s%s: %s/%s: %s\n", t.standing, t.since, t.topic, ranges(numbers[t]), t.why)
	}
}

func subscriptionText(m groups.Member) string {
	var parts []string
	for _, topic := range slices.Sorted(maps.Keys(m.Subscription)) {
		parts = append(parts, fmt.Sprintf("%s:%d", topic, m.Subscription[topic]))
	}
	text := strings.Join(parts, ",")
	if m.Filter != nil {
		text = fmt.Sprintf("%s(%s)=%s", m.Pattern, *m.Filter, text)
	}
	return strings.ReplaceAll(text, " ", "_")
}

// age is how long ago something was, shortly.
func age(at *time.Time, now time.Time) string {
	if at == nil {
		return "-"
	}
	d := max(now.Sub(*at), 0)
	switch {
	case d < time.Minute:
		return d.Truncate(100 * time.Millisecond).String()
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 100*time.Hour:
		return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd", int(d.Hours())/24)
}

// partitionsText shows partitions shortly: orders/0-3,7 audit/0.
func partitionsText(list []groups.PartitionName) string {
	var parts []string
	for len(list) > 0 {
		topic := list[0].Topic
		var numbers []int32
		for len(list) > 0 && list[0].Topic == topic {
			numbers = append(numbers, list[0].Partition)
			list = list[1:]
		}
		parts = append(parts, topic+"/"+ranges(numbers))
	}
	return strings.Join(parts, " ")
}

// parsePartition reads TOPIC, TOPIC/NUMBER or TOPIC/HOME-NUMBER.
func parsePartition(text string) (topic string, number *int32, err error) {
	topic, rest, given := strings.Cut(text, "/")
	if err := registry.ValidateTopicName(topic); err != nil {
		return "", nil, err
	}
	if !given {
		return topic, nil, nil
	}
	if i := strings.IndexByte(rest, '-'); i > 0 {
		rest = rest[i+1:]
	}
	n, err := strconv.ParseInt(rest, 10, 32)
	if err != nil || n < 0 {
		return "", nil, fmt.Errorf("%q: want TOPIC or TOPIC/NUMBER", text)
	}
	p := int32(n)
	return topic, &p, nil
}

// ownerText shows the owner key as it stands, and says if it names nobody.
func ownerText(r groups.Row) string {
	if r.Owner == nil {
		return "none"
	}
	text := *r.Owner
	if !*r.OwnerRegistered {
		text += "(unregistered)"
	}
	return strings.ReplaceAll(text, " ", "_")
}

// deletedGroup is what became of one group.
type deletedGroup struct {
	Group string  `json:"group"`
	Keys  *int64  `json:"keys"`  // deleted; nil if the group was left as it is
	Error *string `json:"error"` // why it was
}

func deleteGroups(c *cli.Context) error {
	if !c.Args().Present() {
		return wrongUse("want the groups' names; see: %s --help", c.Command.HelpName)
	}
	for _, name := range c.Args().Slice() {
		if err := registry.ValidateGroupName(name); err != nil {
			return wrongUse("%w", err)
		}
	}
	return withTool(c, func(ctx context.Context, cl *client) error {
		var list []deletedGroup
		var failed []error
		for _, name := range c.Args().Slice() {
			d := deletedGroup{Group: name}
			if n, err := groups.Delete(ctx, cl.store, cl.root, name); err != nil {
				text := err.Error()
				d.Error = &text
				failed = append(failed, err)
			} else {
				d.Keys = &n
			}
			list = append(list, d)
		}
		err := show(c, list, func(w io.Writer) {
			for _, d := range list {
				if d.Keys != nil {
					fmt.Fprintf(w, "deleted group %s, %d keys\n", d.Group, *d.Keys)
				}
			}
		})
		return errors.Join(err, oneLine(failed))
	})
}

// oneLine joins errors in a line.
func oneLine(errs []error) error {
	if len(errs) < 2 {
		return errors.Join(errs...)
	}
	text := make([]string, len(errs))
	for i, err := range errs {
		text[i] = err.Error()
	}
	return errors.New(strings.Join(text, "; "))
}
