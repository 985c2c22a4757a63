package main

import (
	"cmp"
	"context"
	"sync"

	"github.com/urfave/cli/v2"

	"github.com/muster-io/muster/rebalance/consumer"
	"github.com/muster-io/muster/rebalance/membership"
)

func consumeCommand() *cli.Command {
	flags := []cli.Flag{
		&cli.StringFlag{Name: "group", EnvVars: env("group"), Usage: "consumer group"},
		&cli.StringSliceFlag{Name: "topic", Usage: "topic to read; may be repeated"},
		&cli.StringFlag{Name: "include", Usage: "read the topics whose whole names match this `REGEX` (of Java; a comma means or), as they come and go"},
		&cli.StringFlag{Name: "exclude", Usage: "leave out the topics that match this `REGEX`; without --include, read all others"},
		&cli.IntFlag{Name: "streams", Value: 1, Usage: "how many partitions of a topic, or of all that --include and --exclude choose, are handled at a time"},
		&cli.BoolFlag{Name: "from-beginning", Usage: "where nothing is committed, begin at the smallest offset"},
		&cli.StringFlag{Name: "strategy", Usage: "how the group divides partitions: range, range-numeric, roundrobin, sticky; or a list with commas, the one preferred first (default: range)"},
		&cli.StringFlag{Name: "format", Value: `%s\n`, Usage: `how to print a record: %t topic, %p partition, %o offset, %k key, %s value, %T timestamp, %f fencing token, %N time now in ns, \n, \t`},
		memberHTTPFlag(),
		&cli.StringSliceFlag{Name: "set", Usage: "`NAME=VALUE`, one of Kafka's consumer settings; may be repeated"},
	}
	return &cli.Command{
		Name:   "consume",
		Usage:  "join a group and print the records of the partitions owned",
		Flags:  append(flags, registryFlags(defaultEndpoint)...),
		Action: untilStopped(consume),
	}
}

func consume(c *cli.Context) error {
	if err := cmp.Or(noArguments(c), required(c, "group")); err != nil {
		return err
	}
	filtered := c.String("include") != "" || c.String("exclude") != ""
	if filtered == (len(c.StringSlice("topic")) > 0) {
		return wrongUse("want either --topic, or --include or --exclude")
	}
	f, err := parseFormat(c.String("format"))
	if err != nil {
		return wrongUse("--format: %w", err)
	}
	cfg := consumer.Config{Group: c.String("group"), Include: c.String("include"), Exclude: c.String("exclude"), Strategies: list(c.String("strategy"))}
	if c.Bool("from-beginning") {
		cfg.Reset = consumer.Smallest
	}
	settings := consumerSettings{cfg: &cfg, streams: int32(min(max(c.Int("streams"), -1), 1<<30))}
	if err := settings.apply(c.StringSlice("set")); err != nil {
		return err
	}
	cfg.Streams = settings.streams
	if !filtered {
		cfg.Streams, cfg.Topics = 0, map[string]int32{}
		for _, topic := range c.StringSlice("topic") {
			cfg.Topics[topic] = settings.streams
		}
	} else if cfg.Streams < 1 {
		return wrongUse("--streams: want at least 1")
	}
	if err := cfg.Validate(); err != nil {
		return wrongUse("%w", err)
	}
	return withClient(c, func(ctx context.Context, cl *client) error {
		cfg.Store, cfg.Root, cfg.Logger, cfg.Metrics = cl.store, cl.root, cl.log, membership.NewMetrics()
		p := printer{c: c, format: f}
		cons, err := consumer.New(cfg, p.print)
		if err != nil {
			return err
		}
		stop, err := serveMember(c, cl.log, cons, cfg.Metrics)
		if err != nil {
			return err
		}
		defer stop()
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
