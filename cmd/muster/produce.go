package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/urfave/cli/v2"

	"github.com/muster-io/muster/registry"
)

func produceCommand() *cli.Command {
	flags := []cli.Flag{
		&cli.StringFlag{Name: "topic", Usage: "topic to write to"},
		&cli.StringFlag{Name: "key-separator", Aliases: []string{"K"}, Usage: "what stands between key and value in a line; without it records have no key"},
	}
	return &cli.Command{
		Name:   "produce",
		Usage:  "make a record of each line on stdin",
		Flags:  append(flags, registryFlags(defaultEndpoint)...),
		Action: produce,
	}
}

// maxLine bounds a line on stdin: no record larger than a broker's default
// max.message.bytes would be taken.
const maxLine = 1 << 20

func produce(c *cli.Context) error {
	if err := cmp.Or(noArguments(c), required(c, "topic")); err != nil {
		return err
	}
	if err := registry.ValidateTopicName(c.String("topic")); err != nil {
		return wrongUse("%w", err)
	}
	return withClient(c, func(ctx context.Context, cl *client) error {
		seeds, err := cl.seeds(ctx)
		if err != nil {
			return err
		}
		k, err := kgo.NewClient(kgo.SeedBrokers(seeds...), kgo.DefaultProduceTopic(c.String("topic")),
			kgo.AllowAutoTopicCreation(), kgo.ClientID("muster-produce"), kgo.MetadataMinAge(metadataMinAge))
		if err != nil {
			return err
		}
		defer k.Close()
		return produceLines(ctx, k, c.App.Reader, []byte(c.String("key-separator")))
	})
}

// metadataMinAge: a topic just created is looked for this often. The client's own
// 5 s is how long it would wait where the first answer named no leader yet.
const metadataMinAge = 250 * time.Millisecond

// produceLines returns when every line is acknowledged, or at the first that is not.
func produceLines(ctx context.Context, k *kgo.Client, in io.Reader, separator []byte) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var acknowledged atomic.Int64
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, maxLine)
	for ctx.Err() == nil && lines.Scan() {
		k.Produce(ctx, makeRecord(lines.Bytes(), separator), func(_ *kgo.Record, err error) {
			if err != nil {
				cancel(err)
				return
			}
			acknowledged.Add(1)
		})
	}
	err := k.Flush(ctx)
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	if err := errors.Join(err, lines.Err()); err != nil {
		return fmt.Errorf("produce: %w (%d records were acknowledged before)", err, acknowledged.Load())
	}
	return nil
}

func makeRecord(line, separator []byte) *kgo.Record {
	line = bytes.Clone(line)
	if len(separator) > 0 {
		if key, value, ok := bytes.Cut(line, separator); ok {
			return &kgo.Record{Key: key, Value: value}
		}
	}
	return &kgo.Record{Value: line}
}
