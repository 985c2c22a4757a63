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
	lines := readLines(ctx, in)
	for more := true; more; {
		var line []byte
		select {
		case line, more = <-lines.all:
		case <-ctx.Done():
			more = false
		}
		if !more {
			break
		}
		k.Produce(ctx, makeRecord(line, separator), func(_ *kgo.Record, err error) {
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
	if err := errors.Join(err, lines.failed()); err != nil {
		return fmt.Errorf("produce: %w (%d records were acknowledged before)", err, acknowledged.Load())
	}
	return nil
}

// lineReader is stdin, line by line.
type lineReader struct {
	all  chan []byte
	errs chan error
}

// linesAhead are read before they are asked for.
const linesAhead = 1024

// readLines reads in a goroutine, since a read from a terminal or a pipe cannot be
// interrupted: it ends with its input, or with the next line after ctx, or with
// the process.
func readLines(ctx context.Context, in io.Reader) *lineReader {
	r := &lineReader{all: make(chan []byte, linesAhead), errs: make(chan error, 1)}
	scanner := bufio.NewScanner(in)
	scanner.Buffer(nil, maxLine)
	go func() {
		defer close(r.all)
		for scanner.Scan() {
			select {
			case r.all <- bytes.Clone(scanner.Bytes()):
			case <-ctx.Done():
				return
			}
		}
		r.errs <- scanner.Err()
	}()
	return r
}

// failed is why the input ended too early, if it did.
func (r *lineReader) failed() error {
	select {
	case err := <-r.errs:
		return err
	default:
		return nil
	}
}

func makeRecord(line, separator []byte) *kgo.Record {
	if len(separator) > 0 {
		if key, value, ok := bytes.Cut(line, separator); ok {
			return &kgo.Record{Key: key, Value: value}
		}
	}
	return &kgo.Record{Value: line}
}
