package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/muster-io/muster/rebalance/groups"
	"github.com/muster-io/muster/registry"
)

func groupsCommand() *cli.Command {
	return &cli.Command{
		Name:  "groups",
		Usage: "show consumer groups: who owns what, and how far it is; delete them",
		Subcommands: []*cli.Command{
			{Name: "list", Usage: "list groups", Flags: clientFlags(), Action: listGroups},
			{Name: "describe", Usage: "show a group's partitions with owner, offset and lag", ArgsUsage: "NAME", Flags: clientFlags(), Action: describeGroup},
			{Name: "delete", Usage: "delete groups that have no members, with their offsets", ArgsUsage: "NAME…", Flags: clientFlags(), Action: deleteGroups},
		},
	}
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
	name, err := oneArgument(c, "the group's name")
	if err != nil {
		return err
	}
	if err := registry.ValidateGroupName(name); err != nil {
		return wrongUse("%w", err)
	}
	return withTool(c, func(ctx context.Context, cl *client) error {
		d, bad, err := groups.Describe(ctx, cl.store, cl.root, name, groups.AskBrokers(cl.store, cl.root))
		if err != nil {
			return err
		}
		cl.warn(bad)
		return show(c, d, func(w io.Writer) { printGroup(w, d) })
	})
}

func printGroup(w io.Writer, d *groups.Description) {
	fmt.Fprintf(w, "group %s, %d members, strategy %s\n", d.Group, len(d.Members), or(d.Strategy, "none"))
	row(w, "TOPIC", "PARTITION", "BROKER", "OFFSET", "LOG-END", "LAG", "OWNER", "HOST")
	for _, r := range d.Partitions {
		row(w, r.Topic, r.Partition, r.Broker, or(r.Offset, "none"), or(r.LogEnd, "-"), or(r.Lag, "-"), ownerText(r), or(r.Host, "-"))
	}
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
