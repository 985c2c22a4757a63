// Command muster is Kafka's consumer coordination on etcd: the daemon and all
// tools. This package holds flags and printing, nothing else.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/urfave/cli/v2"
)

// Exit statuses.
const (
	exitFailed   = 1
	exitWrongUse = 2
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	// After the first signal the default is back: a second one ends the process.
	context.AfterFunc(ctx, stop)
	// A reader that has gone away is an error of the write, not the end of a
	// process that still has partitions to give up.
	signal.Ignore(syscall.SIGPIPE)
	os.Exit(run(ctx, os.Args, os.Stdin, os.Stdout, os.Stderr))
}

// run is main without the process around it.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	app := newApp(stdin, stdout, stderr)
	err := app.RunContext(ctx, flagsFirst(app.Commands, args))
	if err == nil {
		return 0
	}
	fmt.Fprintln(stderr, "muster:", err)
	if usage, ok := errors.AsType[*usageError](err); ok {
		return usage.status
	}
	return exitFailed
}

// untilStopped is for a command that goes on until a signal: to be told to stop before
// it has begun is no failure either.
func untilStopped(action cli.ActionFunc) cli.ActionFunc {
	return func(c *cli.Context) error {
		err := action(c)
		if c.Context.Err() != nil && errors.Is(err, context.Canceled) {
			return nil
		}
		return err
	}
}

// usageError is a call that cannot be meant as it stands.
type usageError struct {
	err    error
	status int
}

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func wrongUse(format string, args ...any) error {
	return &usageError{fmt.Errorf(format, args...), exitWrongUse}
}

func newApp(stdin io.Reader, stdout, stderr io.Writer) *cli.App {
	app := &cli.App{
		Name:                 "muster",
		Usage:                "Kafka's consumer coordination on etcd",
		Reader:               stdin,
		Writer:               stdout,
		ErrWriter:            stderr,
		HideVersion:          true,
		EnableBashCompletion: true,
		ExitErrHandler:       func(*cli.Context, error) {}, // run prints and chooses the status
		// A comma is part of a value: cleanup.policy=compact,delete.
		DisableSliceFlagSeparator: true,
		Commands: []*cli.Command{
			serverCommand(),
			topicsCommand(),
			produceCommand(),
			consumeCommand(),
			runCommand(),
			watchdogCommand(),
			groupsCommand(),
			brokersCommand(),
			registryCommand(),
		},
		Action: noCommand,
	}
	app.OnUsageError = onUsageError
	prepare(app.Commands)
	return app
}

// prepare gives every command the same way to fail.
func prepare(commands []*cli.Command) {
	for _, c := range commands {
		if c.OnUsageError == nil {
			c.OnUsageError = onUsageError
		}
		if len(c.Subcommands) > 0 && c.Action == nil {
			c.Action = noCommand
		}
		prepare(c.Subcommands)
	}
}

func onUsageError(c *cli.Context, err error, _ bool) error {
	return wrongUse("%w; see: %s --help", err, c.Command.HelpName)
}

// noCommand is what remains when no command was named, or an unknown one.
func noCommand(c *cli.Context) error {
	if c.Args().Present() {
		return wrongUse("no command %q; see: %s --help", c.Args().First(), c.Command.HelpName)
	}
	return cli.ShowSubcommandHelp(c)
}

// oneArgument returns the command's only argument.
func oneArgument(c *cli.Context, what string) (string, error) {
	if c.Args().Len() != 1 {
		return "", wrongUse("want one argument, %s", what)
	}
	return c.Args().First(), nil
}

func noArguments(c *cli.Context) error {
	if c.Args().Present() {
		return wrongUse("unexpected argument %q; see: %s --help", c.Args().First(), c.Command.HelpName)
	}
	return nil
}

// required refuses a call without a flag that has no default.
func required(c *cli.Context, flags ...string) error {
	for _, f := range flags {
		if !c.IsSet(f) {
			return wrongUse("--%s is required; see: %s --help", f, c.Command.HelpName)
		}
	}
	return nil
}
