package main

import (
	"slices"
	"strings"

	"github.com/urfave/cli/v2"
)

// flagsFirst moves the flags of a command before its arguments, since the
// library reads none after the first argument, and people write both ways:
// topics create orders --partitions 6. What follows "--" is left alone.
func flagsFirst(commands []*cli.Command, args []string) []string {
	if len(args) < 2 {
		return args
	}
	// The path of commands comes first; no flag stands before the last of them.
	at := 1
	var flags []cli.Flag
	for at < len(args) {
		i := slices.IndexFunc(commands, func(c *cli.Command) bool { return c.HasName(args[at]) })
		if i < 0 {
			break
		}
		flags, commands = commands[i].Flags, commands[i].Subcommands
		at++
	}
	moved := slices.Clone(args[:at])
	var rest []string
	for ; at < len(args); at++ {
		switch arg := args[at]; {
		case arg == "--":
			return append(append(moved, rest...), args[at:]...)
		case len(arg) < 2 || arg[0] != '-':
			rest = append(rest, arg)
		default:
			moved = append(moved, arg)
			if takesValue(flags, arg) && at+1 < len(args) {
				at++
				moved = append(moved, args[at])
			}
		}
	}
	return append(moved, rest...)
}

func takesValue(flags []cli.Flag, arg string) bool {
	name := strings.TrimLeft(arg, "-")
	if strings.Contains(name, "=") {
		return false
	}
	for _, f := range flags {
		if slices.Contains(f.Names(), name) {
			_, isBool := f.(*cli.BoolFlag)
			return !isBool
		}
	}
	return false // unknown, or --help
}
