package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/muster-io/muster/inspect"
)

func brokersCommand() *cli.Command {
	return &cli.Command{
		Name:  "brokers",
		Usage: "show the registered brokers, and whether they answer",
		Subcommands: []*cli.Command{
			{Name: "list", Usage: "list brokers", Flags: clientFlags(), Action: listBrokers},
			{Name: "describe", Usage: "show a broker with the partitions that it has", ArgsUsage: "ID", Flags: clientFlags(), Action: describeBroker},
		},
	}
}

func listBrokers(c *cli.Context) error {
	if err := noArguments(c); err != nil {
		return err
	}
	return withTool(c, func(ctx context.Context, cl *client) error {
		list, bad, err := inspect.Brokers(ctx, cl.store, cl.root)
		if err != nil {
			return err
		}
		cl.warn(bad)
		return show(c, list, func(w io.Writer) {
			row(w, "BROKER", "HOST", "PORT", "REGISTERED", "LEASE", "LEFT", "LEADS", "REPLICAS", "TOPICS", "ANSWERS")
			for _, b := range list {
				row(w, b.ID, b.Host, b.Port, when(b.Registered), or(b.Lease, "none"), seconds(b.LeaseSeconds), b.Leads, b.Replicas, b.Topics, yesNo(b.Answers))
			}
		})
	})
}

func when(t *time.Time) string {
	if t == nil {
		return "-"
	}
	return t.Format(time.RFC3339)
}

func seconds(s *float64) string {
	if s == nil {
		return "-"
	}
	return strconv.FormatFloat(*s, 'f', 0, 64) + "s"
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// brokerDescription is a broker in full.
type brokerDescription struct {
	inspect.Broker
	Partitions []inspect.BrokerTopic `json:"partitions"`
}

func describeBroker(c *cli.Context) error {
	text, err := oneArgument(c, "the broker's id")
	if err != nil {
		return err
	}
	id, err := strconv.ParseInt(text, 10, 32)
	if err != nil || id < 0 {
		return wrongUse("broker id %q: want 0 to 2147483647", text)
	}
	return withTool(c, func(ctx context.Context, cl *client) error {
		list, bad, err := inspect.Brokers(ctx, cl.store, cl.root)
		if err != nil {
			return err
		}
		cl.warn(bad)
		for _, b := range list {
			if b.ID != int32(id) {
				continue
			}
			topics, err := inspect.BrokerTopics(ctx, cl.store, cl.root, b.ID)
			if err != nil {
				return err
			}
			return show(c, brokerDescription{b, topics}, func(w io.Writer) { printBroker(w, b, topics) })
		}
		return fmt.Errorf("%w: %d; see: muster brokers list", inspect.ErrNoSuchBroker, id)
	})
}

func printBroker(w io.Writer, b inspect.Broker, topics []inspect.BrokerTopic) {
	fmt.Fprintf(w, "broker %d at %s port %d, registered %s at revision %d\n", b.ID, b.Host, b.Port, when(b.Registered), b.Revision)
	fmt.Fprintf(w, "lease %s, %s left\n", or(b.Lease, "none"), seconds(b.LeaseSeconds))
	if b.Answers {
		fmt.Fprintf(w, "answers, and knows %d kinds of requests\n", *b.Requests)
	} else {
		fmt.Fprintf(w, "does not answer: %s\n", *b.Trouble)
	}
	fmt.Fprintf(w, "leads %d partitions, has %d replicas of %d topics\n", b.Leads, b.Replicas, b.Topics)
	row(w, "TOPIC", "LEADS", "REPLICAS")
	for _, t := range topics {
		row(w, t.Topic, ranges(t.Leads), ranges(t.Replicas))
	}
}

// ranges shows sorted numbers shortly: 0-5,7.
func ranges(list []int32) string {
	var parts []string
	for len(list) > 0 {
		n := 1
		for n < len(list) && list[n] == list[0]+int32(n) {
			n++
		}
		text := fmt.Sprint(list[0])
		if n > 1 {
			text += fmt.Sprintf("-%d", list[n-1])
		}
		parts = append(parts, text)
		list = list[n:]
	}
	return strings.Join(parts, ",")
}
