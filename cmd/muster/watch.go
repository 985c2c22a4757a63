package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/muster-io/muster/inspect"
)

func watchCommand() *cli.Command {
	return &cli.Command{
		Name: "watch", Usage: "print who does what as it happens, a line an event, until a signal", ArgsUsage: "[PATH]",
		Flags: clientFlags(
			&cli.StringFlag{Name: "group", Usage: "only what is about this group"},
			&cli.StringFlag{Name: "topic", Usage: "only what is about this topic"},
			&cli.BoolFlag{Name: "offsets", Usage: "also committed offsets; they are shown too if PATH is about them"},
			&cli.BoolFlag{Name: "all", Usage: "also committed offsets, counts, and states that come and go with their topic"},
			&cli.IntFlag{Name: "count", Usage: "end after that many lines"},
		),
		Action: untilStopped(watch),
	}
}

// told is a line of registry watch in JSON.
type told struct {
	Time string `json:"time"`
	inspect.Line
}

func watch(c *cli.Context) error {
	at, err := path(c)
	if err != nil {
		return err
	}
	if err := checkOutput(c); err != nil {
		return err
	}
	if c.Int("count") < 0 {
		return wrongUse("--count %d: want 1 or more", c.Int("count"))
	}
	if at == "/" {
		at = ""
	}
	return withClient(c, func(ctx context.Context, cl *client) error {
		f := inspect.Follower{Store: cl.store, Root: cl.root, Path: at, Started: func(revision int64) {
			fmt.Fprintf(c.App.ErrWriter, "watching from revision %d on\n", revision)
		}}
		offsets := c.Bool("offsets") || strings.Contains(at+"/", "/offsets/")
		left := c.Int("count")
		var failed error
		err := f.Follow(ctx, func(when time.Time, l inspect.Line) bool {
			if !wanted(c, offsets, l) {
				return true
			}
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

// wanted applies the filters. What is about the watch itself passes them all.
func wanted(c *cli.Context, offsets bool, l inspect.Line) bool {
	is := func(flag string, v *string) bool { return !c.IsSet(flag) || v != nil && *v == c.String(flag) }
	switch {
	case l.Path == "":
		return true
	case l.Detail && !c.Bool("all") && !(l.Kind == inspect.KindCommitted && offsets):
		return false
	}
	return is("group", l.Group) && is("topic", l.Topic)
}

func printLine(c *cli.Context, when time.Time, l inspect.Line) error {
	if c.String("output") == outputJSON {
		enc := json.NewEncoder(c.App.Writer)
		enc.SetEscapeHTML(false)
		return enc.Encode(told{when.Format("2006-01-02T15:04:05.000Z07:00"), l})
	}
	_, err := fmt.Fprintf(c.App.Writer, "%s rev=%d %s\n", when.Format("15:04:05.000"), l.Revision, l.Text)
	return err
}
