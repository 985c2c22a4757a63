package groups

import (
	"context"
	"net"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/registry"
)

// endsLimit bounds the question to the brokers: a description without log ends is
// better than none.
const endsLimit = 3 * time.Second

// What ListOffsets is asked for.
const (
	timestampLatest   = -1
	timestampEarliest = -2
)

// AskBrokers returns a LogEnds that asks the live brokers.
func AskBrokers(st registry.Store, root registry.Root) LogEnds {
	return func(ctx context.Context, partitions []registry.Partition) map[registry.Partition]int64 {
		ctx, cancel := context.WithTimeout(ctx, endsLimit)
		defer cancel()
		brokers, _, err := registry.LiveBrokers(ctx, st, root)
		if err != nil {
			return nil
		}
		return askLogs(ctx, brokers, partitions, timestampLatest)[timestampLatest]
	}
}

// AskLogs asks the given brokers where the logs of partitions start and end; those
// that no broker tells in 3 s are left out.
func AskLogs(ctx context.Context, brokers map[int32]registry.BrokerRecord, partitions []registry.Partition) (starts, ends map[registry.Partition]int64) {
	ctx, cancel := context.WithTimeout(ctx, endsLimit)
	defer cancel()
	found := askLogs(ctx, brokers, partitions, timestampEarliest, timestampLatest)
	return found[timestampEarliest], found[timestampLatest]
}

func askLogs(ctx context.Context, brokers map[int32]registry.BrokerRecord, partitions []registry.Partition, timestamps ...int64) map[int64]map[registry.Partition]int64 {
	if len(brokers) == 0 || len(partitions) == 0 {
		return nil
	}
	var seeds []string
	for _, b := range brokers {
		seeds = append(seeds, net.JoinHostPort(b.Host, strconv.Itoa(int(b.Port))))
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(seeds...), kgo.RequestRetries(1))
	if err != nil {
		return nil
	}
	defer client.Close()
	found := map[int64]map[registry.Partition]int64{}
	for _, timestamp := range timestamps {
		found[timestamp] = listOffsets(ctx, client, partitions, timestamp)
	}
	return found
}

func listOffsets(ctx context.Context, client *kgo.Client, partitions []registry.Partition, timestamp int64) map[registry.Partition]int64 {
	type key struct {
		topic  string
		number int32
	}
	byKey := map[key][]registry.Partition{} // more than one if offsets are kept under several homes
	topics := map[string]*kmsg.ListOffsetsRequestTopic{}
	for _, p := range partitions {
		k := key{p.Topic, p.Number}
		if byKey[k] = append(byKey[k], p); len(byKey[k]) > 1 {
			continue
		}
		if topics[p.Topic] == nil {
			topics[p.Topic] = &kmsg.ListOffsetsRequestTopic{Topic: p.Topic}
		}
		q := kmsg.NewListOffsetsRequestTopicPartition()
		q.Partition, q.Timestamp = p.Number, timestamp
		topics[p.Topic].Partitions = append(topics[p.Topic].Partitions, q)
	}
	req := kmsg.NewPtrListOffsetsRequest()
	for _, t := range topics {
		req.Topics = append(req.Topics, *t)
	}
	found := map[registry.Partition]int64{}
	// Brokers answer apart; one that does not must not hide the others.
	for _, shard := range client.RequestSharded(ctx, req) {
		res, ok := shard.Resp.(*kmsg.ListOffsetsResponse)
		if shard.Err != nil || !ok {
			continue
		}
		for _, t := range res.Topics {
			for _, p := range t.Partitions {
				if p.ErrorCode != 0 {
					continue
				}
				for _, of := range byKey[key{t.Topic, p.Partition}] {
					found[of] = p.Offset
				}
			}
		}
	}
	return found
}
