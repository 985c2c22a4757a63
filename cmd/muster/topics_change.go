package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/muster-io/muster/registry"
)

// topicConfig reads --config.
func topicConfig(c *cli.Context) (map[string]string, error) {
	config := map[string]string{}
	for _, setting := range c.StringSlice("config") {
		k, v, ok := strings.Cut(setting, "=")
		if !ok || k == "" {
			return nil, wrongUse("--config %q: want NAME=VALUE", setting)
		}
		config[k] = v
	}
	if err := registry.ValidateTopicConfig(config); err != nil {
		return nil, wrongUse("--config: %w", err)
	}
	return config, nil
}

// unhonoured says which settings are only stored.
func (cl *client) unhonoured(config map[string]string) {
	for _, name := range registry.UnhonouredConfig(config) {
		cl.log.Warn("setting is stored, but no daemon honours it yet", "setting", name)
	}
}

type alteredTopic struct {
	Topic      string            `json:"topic"`
	Partitions int               `json:"partitions"`
	Added      int               `json:"added"`
	Config     map[string]string `json:"config"`
}

func alterTopic(c *cli.Context) error {
	name, err := oneArgument(c, "the topic's name")
	if err != nil {
		return err
	}
	set, err := topicConfig(c)
	if err != nil {
		return err
	}
	remove := c.StringSlice("delete-config")
	for _, k := range remove {
		if _, both := set[k]; both {
			return wrongUse("--config and --delete-config both name %s", k)
		}
	}
	total := c.Int("partitions")
	switch {
	case c.IsSet("partitions") && (total < 1 || total > registry.MaxPartitions):
		return wrongUse("--partitions %d: want 1 to %d", total, registry.MaxPartitions)
	case !c.IsSet("partitions") && len(set)+len(remove) == 0:
		return wrongUse("nothing to alter: give --partitions, --config or --delete-config")
	}
	return withTool(c, func(ctx context.Context, cl *client) error {
		before, err := readTopic(ctx, cl, name)
		if err != nil {
			return err
		}
		out := alteredTopic{Topic: name, Partitions: len(before.Partitions), Config: before.Config}
		if total > 0 {
			if err := cl.addPartitions(ctx, &out, int32(total)); err != nil {
				return err
			}
		}
		if len(set)+len(remove) > 0 {
			if out.Config, err = registry.AlterTopicConfig(ctx, cl.store, cl.root, name, set, remove); err != nil {
				if out.Added > 0 {
					return fmt.Errorf("%d partitions were added; %w", out.Added, err)
				}
				return err
			}
			cl.unhonoured(set)
		}
		return show(c, out, func(w io.Writer) { printAltered(w, out, set, remove) })
	})
}

func (cl *client) addPartitions(ctx context.Context, out *alteredTopic, total int32) error {
	brokers, bad, err := registry.LiveBrokers(ctx, cl.store, cl.root)
	if err != nil {
		return err
	}
	cl.warn(bad)
	rec, err := registry.AddPartitions(ctx, cl.store, cl.root, out.Topic, total, slices.Collect(maps.Keys(brokers)))
	if errors.Is(err, registry.ErrNoBroker) {
		return fmt.Errorf("%w: start one with: muster server", err)
	}
	if err != nil {
		return err
	}
	out.Added = len(rec.Partitions) - out.Partitions
	out.Partitions = len(rec.Partitions)
	return nil
}

func printAltered(w io.Writer, out alteredTopic, set map[string]string, remove []string) {
	if out.Added > 0 {
		fmt.Fprintf(w, "topic %s now has %d partitions, %d more than before\n", out.Topic, out.Partitions, out.Added)
	}
	for _, k := range slices.Sorted(maps.Keys(set)) {
		fmt.Fprintf(w, "set %s=%s\n", k, set[k])
	}
	for _, k := range remove {
		fmt.Fprintf(w, "removed %s\n", k)
	}
}

type deletedTopic struct {
	Topic       string `json:"topic"`
	TopicID     string `json:"topic_id"`
	Partitions  int    `json:"partitions"`
	Groups      int    `json:"groups"`
	Owners      int64  `json:"owners"`
	Offsets     int64  `json:"offsets"`
	OffsetsKept bool   `json:"offsets_kept"`
	Resumed     bool   `json:"resumed"` // the deletion had been begun before
}

// deletionLimit bounds the deletion of one topic: it visits every group.
const deletionLimit = 2 * time.Minute

func deleteTopics(c *cli.Context) error {
	names := c.Args().Slice()
	if len(names) == 0 {
		return wrongUse("want the names of topics; see: %s --help", c.Command.HelpName)
	}
	if err := checkOutput(c); err != nil {
		return err
	}
	return withClient(c, func(ctx context.Context, cl *client) error {
		list := []deletedTopic{}
		var failed error
		for _, name := range names {
			d, err := cl.deleteTopic(ctx, name, registry.DeleteOptions{KeepOffsets: c.Bool("keep-offsets")})
			if err != nil {
				// What was deleted before is told all the same.
				failed = err
				break
			}
			list = append(list, d)
		}
		err := show(c, list, func(w io.Writer) {
			for _, d := range list {
				printDeleted(w, d)
			}
		})
		return errors.Join(failed, err)
	})
}

func (cl *client) deleteTopic(ctx context.Context, name string, o registry.DeleteOptions) (deletedTopic, error) {
	ctx, cancel := context.WithTimeout(ctx, deletionLimit)
	defer cancel()
	d, err := registry.DeleteTopic(ctx, cl.store, cl.root, name, o)
	if errors.Is(err, registry.ErrNoTopic) {
		return deletedTopic{}, fmt.Errorf("no topic %s: see what is there with: muster topics list", name)
	}
	return deletedTopic{Topic: d.Topic, TopicID: d.TopicID, Partitions: d.Partitions, Groups: d.Groups, Owners: d.Owners,
		Offsets: d.Offsets, OffsetsKept: d.OffsetsKept, Resumed: d.Resumed}, err
}

func printDeleted(w io.Writer, d deletedTopic) {
	what := "deleted topic"
	if d.Resumed {
		what = "finished the deletion of topic"
	}
	offsets := fmt.Sprintf("%d offsets", d.Offsets)
	if d.OffsetsKept {
		offsets = "no offsets (they are kept)"
	}
	fmt.Fprintf(w, "%s %s: %d partitions, and in %d groups %d owners and %s\n", what, d.Topic, d.Partitions, d.Groups, d.Owners, offsets)
}
