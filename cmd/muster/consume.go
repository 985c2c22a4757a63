package main

import (
	"cmp"
	"context"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/muster-io/muster/rebalance/consumer"
)

func consumeCommand() *cli.Command {
	flags := []cli.Flag{
		&cli.StringFlag{Name: "group", EnvVars: env("group"), Usage: "consumer group"},
		&cli.StringSliceFlag{Name: "topic", Usage: "topic to read; may be repeated"},
		&cli.IntFlag{Name: "streams", Value: 1, Usage: "how many partitions of a topic are handled at a time"},
		&cli.BoolFlag{Name: "from-beginning", Usage: "where nothing is committed, begin at the smallest offset"},
		&cli.StringFlag{Name: "strategy", Usage: "range or range-numeric (default: range)"},
		&cli.StringFlag{Name: "format", Value: `%s\n`, Usage: `how to print a record: %t topic, %p partition, %o offset, %k key, %s value, %T timestamp, \n, \t`},
		&cli.StringSliceFlag{Name: "set", Usage: "`NAME=VALUE`, one of Kafka's consumer settings; may be repeated"},
	}
	return &cli.Command{
		Name:   "consume",
		Usage:  "join a group and print the records of the partitions owned",
		Flags:  append(flags, registryFlags(defaultEndpoint)...),
		Action: consume,
	}
}

func consume(c *cli.Context) error {
	if err := cmp.Or(noArguments(c), required(c, "group", "topic")); err != nil {
		return err
	}
	f, err := parseFormat(c.String("format"))
	if err != nil {
		return wrongUse("--format: %w", err)
	}
	cfg := consumer.Config{Group: c.String("group"), Topics: map[string]int32{}, Strategy: c.String("strategy")}
	if c.Bool("from-beginning") {
		cfg.Reset = consumer.Smallest
	}
	for _, topic := range c.StringSlice("topic") {
		cfg.Topics[topic] = int32(min(max(c.Int("streams"), -1), 1<<30))
	}
	if err := applySettings(&cfg, c.StringSlice("set")); err != nil {
		return err
	}
	return withClient(c, func(ctx context.Context, cl *client) error {
		cfg.Store, cfg.Root, cfg.Logger = cl.store, cl.root, cl.log
		p := printer{c: c, format: f}
		cons, err := consumer.New(cfg, p.print)
		if err != nil {
			return wrongUse("%w", err)
		}
		return cons.Run(ctx)
	})
}

// printer writes each record with one write. The record counts as consumed when
// the write has returned.
type printer struct {
	c      *cli.Context
	format format
	mu     sync.Mutex
	line   []byte
}

func (p *printer) print(_ context.Context, r *consumer.Record) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.line = p.format.print(p.line[:0], r)
	// Looked at last, after the work: the less lies between the look and the write,
	// the less can happen there.
	if !r.Owned() {
		return consumer.ErrNotOwned
	}
	_, err := p.c.App.Writer.Write(p.line)
	return err
}

// applySettings takes Kafka's consumer settings by name.
func applySettings(cfg *consumer.Config, list []string) error {
	for _, setting := range list {
		name, value, ok := strings.Cut(setting, "=")
		if !ok {
			return wrongUse("--set %q: want NAME=VALUE", setting)
		}
		if err := applySetting(cfg, name, value); err != nil {
			return wrongUse("--set %s: %w", setting, err)
		}
	}
	return nil
}

func applySetting(cfg *consumer.Config, name, value string) error {
	switch name {
	case "consumer.id":
		cfg.ID = value
	case "auto.offset.reset":
		cfg.Reset = consumer.Reset(value)
	case "partition.assignment.strategy":
		cfg.Strategy = value
	case "zookeeper.session.timeout.ms":
		return milliseconds(&cfg.SessionTimeout, value)
	case "auto.commit.interval.ms":
		return milliseconds(&cfg.CommitInterval, value)
	case "offsets.storage":
		if value != "registry" && value != "zookeeper" {
			return wrongUse("only registry (alias zookeeper) is there so far")
		}
	default:
		return wrongUse("unknown setting; known are consumer.id, auto.offset.reset, partition.assignment.strategy, " +
			"zookeeper.session.timeout.ms, auto.commit.interval.ms, offsets.storage")
	}
	return nil
}

func milliseconds(d *time.Duration, value string) error {
	n, err := strconv.ParseInt(value, 10, 32)
	if err != nil || n <= 0 {
		return wrongUse("want a number of milliseconds above 0")
	}
	*d = time.Duration(n) * time.Millisecond
	return nil
}
