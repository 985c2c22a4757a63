package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/muster-io/muster/rebalance/membership"
	runner "github.com/muster-io/muster/rebalance/run"
	"github.com/muster-io/muster/registry"
)

// watchdogCommandName is the hidden command by which muster run starts its second process.
const watchdogCommandName = "run-watchdog"

// defaultGrace is --grace.
const defaultGrace = 10 * time.Second

func runCommand() *cli.Command {
	flags := []cli.Flag{
		&cli.StringFlag{Name: "group", EnvVars: env("group"), Usage: "consumer group"},
		&cli.StringSliceFlag{Name: "topic", Usage: "topic whose partitions are to be owned; may be repeated"},
		&cli.IntFlag{Name: "streams", Value: 1, Usage: "how many members this one counts as when partitions are divided"},
		&cli.StringFlag{Name: "strategy", Usage: "how the group divides partitions, as for muster consume (default: range)"},
		&cli.DurationFlag{Name: "grace", Value: defaultGrace, Usage: "how long a child has to stop after SIGTERM, before it is killed"},
		&cli.StringFlag{Name: "on-exit", Value: string(runner.Restart), Usage: "when a child ends by itself: restart, restart-on-failure or stop"},
		&cli.BoolFlag{Name: "prefix", Usage: "begin each line that a child prints with its topic and partition"},
		&cli.DurationFlag{Name: "session-timeout", DefaultText: "6s", Usage: "after which a member that went silent loses its partitions, 2s to 60s"},
		memberHTTPFlag(),
		&cli.StringFlag{Name: "id", Usage: "name of this member in the group (default: <hostname>:<uuid>)"},
	}
	return &cli.Command{
		Name:      "run",
		Usage:     "join a group and run a command for each partition owned",
		ArgsUsage: "-- COMMAND [ARGUMENT...]; {partition}, {topic}, {group} and {fence} are replaced",
		Flags:     append(flags, registryFlags(defaultEndpoint)...),
		Action:    untilStopped(runChildren),
	}
}

func watchdogCommand() *cli.Command {
	return &cli.Command{
		Name:   watchdogCommandName,
		Hidden: true,
		Usage:  "the second process of muster run, which starts it",
		Flags:  registryFlags(defaultEndpoint),
		Action: func(c *cli.Context) error {
			return runner.Watchdog(func(lease registry.LeaseID) error { return revoke(c, lease) })
		},
	}
}

// revoke revokes the lease of a muster run that was killed.
func revoke(c *cli.Context, lease registry.LeaseID) error {
	// The signal that ended the one may have ended this context.
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	c.Context = ctx
	return withClient(c, func(ctx context.Context, cl *client) error {
		if err := cl.store.Revoke(ctx, lease); err != nil && !errors.Is(err, registry.ErrLeaseNotFound) {
			return fmt.Errorf("revoke the lease %s of a muster run that was killed: %w", registry.LeaseText(lease), err)
		}
		return nil
	})
}

// watchdogArguments has the watchdog find the registry as c does.
func watchdogArguments(c *cli.Context) []string {
	args := []string{"/proc/self/exe", watchdogCommandName}
	for _, f := range registryFlags(defaultEndpoint) {
		if name := f.Names()[0]; c.IsSet(name) {
			args = append(args, "--"+name, c.String(name))
		}
	}
	return args
}

func runChildren(c *cli.Context) error {
	if err := required(c, "group", "topic"); err != nil {
		return err
	}
	command := c.Args().Slice()
	if len(command) == 0 {
		return wrongUse("want a command after --; see: %s --help", c.Command.HelpName)
	}
	cfg := runner.Config{Command: command, Grace: c.Duration("grace"), OnExit: runner.Policy(c.String("on-exit")), Prefix: c.Bool("prefix"),
		Watchdog: watchdogArguments(c), Stdout: c.App.Writer, Stderr: c.App.ErrWriter}
	topics := map[string]int32{}
	for _, topic := range c.StringSlice("topic") {
		topics[topic] = int32(min(max(c.Int("streams"), -1), 1<<30))
	}
	cfg.Membership = membership.Config{Group: c.String("group"), ID: c.String("id"), SessionTimeout: c.Duration("session-timeout"),
		Subscription: membership.Subscription{Topics: topics}, Strategies: list(c.String("strategy"))}
	if err := cfg.Validate(); err != nil {
		return wrongUse("%w", err)
	}
	return withClient(c, func(ctx context.Context, cl *client) error {
		cfg.Membership.Store, cfg.Membership.Root, cfg.Membership.Logger = cl.store, cl.root, cl.log
		cfg.Membership.Metrics = membership.NewMetrics()
		r, err := runner.New(cfg)
		if err != nil {
			return err
		}
		stop, err := serveMember(c, cl.log, r, cfg.Membership.Metrics)
		if err != nil {
			return err
		}
		defer stop()
		running, release := hurryAtSecondSignal(ctx, r)
		defer release()
		return r.Run(running)
	})
}

// hurryAtSecondSignal ends the grace of the children when a signal comes after the
// one that ended ctx. A third one ends the process. The context that it returns ends with
// ctx, when the second signal is waited for and not before: whoever sees the children
// stop may send it.
func hurryAtSecondSignal(ctx context.Context, r *runner.Runner) (running context.Context, release func()) {
	again := make(chan os.Signal, 1)
	running, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	ended := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		signal.Notify(again, syscall.SIGINT, syscall.SIGTERM)
		cancel()
	})
	go func() {
		defer close(ended)
		select {
		case <-again:
			signal.Stop(again)
			r.Hurry()
		case <-done:
		}
	}()
	return running, func() {
		stop()
		cancel()
		signal.Stop(again)
		close(done)
		<-ended
	}
}
