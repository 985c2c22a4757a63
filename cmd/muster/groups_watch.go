package main

import (
	"context"
	"fmt"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/muster-io/muster/inspect"
)

func groupsWatchCommand() *cli.Command {
	return &cli.Command{
		Name: "watch", Usage: "print what happens in a group as it happens, and how it fares, until a signal", ArgsUsage: "NAME",
		Flags: clientFlags(
			&cli.BoolFlag{Name: "offsets", Usage: "also committed offsets"},
			&cli.IntFlag{Name: "count", Usage: "end after that many lines"},
		),
		Action: untilStopped(watchGroup),
	}
}

func watchGroup(c *cli.Context) error {
	name, err := groupArgument(c)
	if err != nil {
		return err
	}
	if err := checkOutput(c); err != nil {
		return err
	}
	if c.Int("count") < 0 {
		return wrongUse("--count %d: want 1 or more", c.Int("count"))
	}
	return withClient(c, func(ctx context.Context, cl *client) error {
		f := inspect.GroupFollower{Store: cl.store, Root: cl.root, Group: name, Offsets: c.Bool("offsets"), Started: func(revision int64) {
			fmt.Fprintf(c.App.ErrWriter, "watching from revision %d on\n", revision)
		}}
		left := c.Int("count")
		var failed error
		err := f.Follow(ctx, func(when time.Time, l inspect.Line) bool {
			if failed = printLine(c, when, l); failed != nil {
				return false
			}
			left--
			return left != 0
		})
		if failed != nil {
			return failed
		}
		return err
	})
}
