package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/muster-io/muster/registry"
)

func topicsCommand() *cli.Command {
	return &cli.Command{
		Name:  "topics",
		Usage: "create, show, change and delete topics",
		Subcommands: []*cli.Command{
			{
				Name: "create", Usage: "create a topic on the live brokers", ArgsUsage: "NAME",
				Flags: clientFlags(
					&cli.IntFlag{Name: "partitions", Value: 1, Usage: "number of partitions"},
					&cli.IntFlag{Name: "replication-factor", Value: 1, Usage: "replicas of each partition; more than 1 is refused so far"},
					&cli.StringSliceFlag{Name: "config", Usage: "`NAME=VALUE`, a setting of the topic; may be repeated"},
					&cli.BoolFlag{Name: "no-log", Usage: "partitions that are only owned: no records, no daemon needed"},
				),
				Action: createTopic,
			},
			{Name: "list", Usage: "list topics", Flags: clientFlags(), Action: listTopics},
			{Name: "describe", Usage: "show a topic's partitions and settings", ArgsUsage: "NAME", Flags: clientFlags(), Action: describeTopic},
			{
				Name: "alter", Usage: "add partitions to a topic, change its settings", ArgsUsage: "NAME",
				Flags: clientFlags(
					&cli.IntFlag{Name: "partitions", Usage: "number of partitions that the topic is to have; it can only grow"},
					&cli.StringSliceFlag{Name: "config", Usage: "`NAME=VALUE`, a setting of the topic; may be repeated"},
					&cli.StringSliceFlag{Name: "delete-config", Usage: "`NAME` of a setting to remove; may be repeated"},
				),
				Action: alterTopic,
			},
			{
				Name: "delete", Usage: "delete topics with their records, owners and offsets", ArgsUsage: "NAME...",
				Flags:  clientFlags(&cli.BoolFlag{Name: "keep-offsets", Usage: "leave the offsets that groups have committed"}),
				Action: deleteTopics,
			},
		},
	}
}

func createTopic(c *cli.Context) error {
	name, err := oneArgument(c, "the topic's name")
	if err != nil {
		return err
	}
	config, err := topicConfig(c)
	if err != nil {
		return err
	}
	if n := c.Int("partitions"); n < 1 || n > registry.MaxPartitions {
		return wrongUse("--partitions %d: want 1 to %d", n, registry.MaxPartitions)
	}
	if c.Int("replication-factor") != 1 {
		return wrongUse("--replication-factor %d: %w", c.Int("replication-factor"), registry.ErrReplicationFactor)
	}
	noLog := c.Bool("no-log")
	if noLog && len(config) > 0 {
		return wrongUse("--no-log and --config: settings are about logs")
	}
	return withTool(c, func(ctx context.Context, cl *client) error {
		brokers, bad, err := registry.LiveBrokers(ctx, cl.store, cl.root)
		if err != nil {
			return err
		}
		cl.warn(bad)
		spec := registry.TopicSpec{Name: name, Partitions: int32(c.Int("partitions")), ReplicationFactor: 1, Config: config, NoLog: noLog}
		rec, err := registry.CreateTopic(ctx, cl.store, cl.root, spec, slices.Collect(maps.Keys(brokers)))
		if errors.Is(err, registry.ErrNoBroker) {
			return fmt.Errorf("%w: start one with: muster server; or make a topic whose partitions are only owned: --no-log", err)
		}
		if err != nil {
			return err
		}
		cl.unhonoured(config)
		facts := map[string]any{"topic": name, "topic_id": rec.TopicID, "partitions": len(rec.Partitions), "no_log": noLog}
		return show(c, facts, func(w io.Writer) {
			fmt.Fprintf(w, "created topic %s with %d partitions%s\n", name, len(rec.Partitions), without(noLog))
		})
	})
}

// without says what a topic lacks.
func without(noLog bool) string {
	if noLog {
		return ", no log"
	}
	return ""
}

type topicSummary struct {
	Topic      string `json:"topic"`
	Partitions int    `json:"partitions"`
	TopicID    string `json:"topic_id"`
	NoLog      bool   `json:"no_log"`
}

func listTopics(c *cli.Context) error {
	if err := noArguments(c); err != nil {
		return err
	}
	return withTool(c, func(ctx context.Context, cl *client) error {
		kvs, _, err := registry.List(ctx, cl.store, cl.root.Topics(), 0)
		if err != nil {
			return fmt.Errorf("list topics: %w", err)
		}
		list := []topicSummary{}
		for _, kv := range kvs {
			name, rec, ok, err := cl.root.ParseTopic(kv)
			if err != nil {
				cl.warn([]error{err})
			} else if ok {
				list = append(list, topicSummary{name, len(rec.Partitions), rec.TopicID, rec.NoLog})
			}
		}
		return show(c, list, func(w io.Writer) {
			row(w, "TOPIC", "PARTITIONS", "ID", "LOG")
			for _, t := range list {
				log := "yes"
				if t.NoLog {
					log = "no"
				}
				row(w, t.Topic, t.Partitions, t.TopicID, log)
			}
		})
	})
}

type partitionRow struct {
	Partition   int32   `json:"partition"`
	Broker      int32   `json:"broker"` // home
	Leader      *int32  `json:"leader"` // null without a log
	LeaderEpoch *int32  `json:"leader_epoch"`
	Replicas    []int32 `json:"replicas"`
	ISR         []int32 `json:"isr"`
	Offline     []int32 `json:"offline"` // replicas on brokers that are not registered
}

type topicDescription struct {
	Topic       string            `json:"topic"`
	TopicID     string            `json:"topic_id"`
	NoLog       bool              `json:"no_log"`
	Config      map[string]string `json:"config"`
	NotHonoured []string          `json:"not_honoured"` // names in config on which no daemon acts yet
	Partitions  []partitionRow    `json:"partitions"`
	BrokersDown []int32           `json:"brokers_down"`
}

func describeTopic(c *cli.Context) error {
	name, err := oneArgument(c, "the topic's name")
	if err != nil {
		return err
	}
	return withTool(c, func(ctx context.Context, cl *client) error {
		d, err := readTopic(ctx, cl, name)
		if err != nil {
			return err
		}
		return show(c, d, func(w io.Writer) {
			fmt.Fprintf(w, "topic %s, id %s, %d partitions%s\n", d.Topic, d.TopicID, len(d.Partitions), without(d.NoLog))
			for _, k := range slices.Sorted(maps.Keys(d.Config)) {
				note := ""
				if slices.Contains(d.NotHonoured, k) {
					note = " (stored, not honoured yet)"
				}
				fmt.Fprintf(w, "%s=%s%s\n", k, d.Config[k], note)
			}
			for _, id := range d.BrokersDown {
				fmt.Fprintf(w, "broker %d is down\n", id)
			}
			row(w, "PARTITION", "BROKER", "LEADER", "EPOCH", "REPLICAS", "ISR", "OFFLINE")
			for _, p := range d.Partitions {
				row(w, p.Partition, p.Broker, or(p.Leader, "-"), or(p.LeaderEpoch, "-"), ints(p.Replicas), ints(p.ISR), ints(p.Offline))
			}
		})
	})
}

func readTopic(ctx context.Context, cl *client, name string) (*topicDescription, error) {
	if err := registry.ValidateTopicName(name); err != nil {
		return nil, err
	}
	kvs, revision, err := registry.List(ctx, cl.store, cl.root.Topic(name), 0)
	if err != nil {
		return nil, fmt.Errorf("describe topic %s: %w", name, err)
	}
	states := map[int32]registry.PartitionState{}
	var d *topicDescription
	var record registry.TopicRecord
	for _, kv := range kvs {
		topic, rec, ok, err := cl.root.ParseTopic(kv)
		if ok && topic == name {
			record = rec
			d = &topicDescription{Topic: name, TopicID: rec.TopicID, NoLog: rec.NoLog, Config: map[string]string{}, NotHonoured: []string{},
				Partitions: []partitionRow{}, BrokersDown: []int32{}}
		}
		owner, number, state, isState, errState := cl.root.ParsePartitionState(kv)
		if isState && owner == name {
			states[number] = state
		}
		if err := errors.Join(err, errState); err != nil {
			cl.warn([]error{err})
		}
	}
	if d == nil {
		return nil, fmt.Errorf("no topic %s: create it with: muster topics create %s", name, name)
	}
	brokers, bad, err := registry.LiveBrokers(ctx, cl.store, cl.root)
	if err != nil {
		return nil, err
	}
	cl.warn(bad)
	for _, p := range record.List(name) {
		if record.NoLog {
			d.Partitions = append(d.Partitions, partitionRow{Partition: p.Number, Broker: p.Home, Replicas: []int32{}, ISR: []int32{}, Offline: []int32{}})
			continue
		}
		state, ok := states[p.Number]
		if !ok {
			state = registry.InitialState(record.Partitions[p.Number])
		}
		offline := []int32{}
		for _, id := range record.Partitions[p.Number] {
			if _, live := brokers[id]; !live {
				offline = append(offline, id)
			}
		}
		d.BrokersDown = append(d.BrokersDown, offline...)
		d.Partitions = append(d.Partitions, partitionRow{p.Number, p.Home, &state.Leader, &state.LeaderEpoch, record.Partitions[p.Number], state.ISR, offline})
	}
	slices.Sort(d.BrokersDown)
	d.BrokersDown = slices.Compact(d.BrokersDown)
	d.Config, err = readTopicConfig(ctx, cl, name, revision)
	d.NotHonoured = append(d.NotHonoured, registry.UnhonouredConfig(d.Config)...)
	return d, err
}

func readTopicConfig(ctx context.Context, cl *client, name string, revision int64) (map[string]string, error) {
	res, err := cl.store.Range(ctx, registry.RangeRequest{Key: cl.root.TopicConfig(name), Revision: revision})
	if err != nil {
		return nil, fmt.Errorf("read settings of topic %s: %w", name, err)
	}
	config := map[string]string{}
	for _, kv := range res.KVs {
		rec, err := registry.ParseTopicConfig(kv)
		if err != nil {
			cl.warn([]error{err})
			continue
		}
		maps.Copy(config, rec.Config)
	}
	return config, nil
}

func ints(list []int32) string {
	text := make([]string, len(list))
	for i, n := range list {
		text[i] = fmt.Sprint(n)
	}
	return strings.Join(text, ",")
}
