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

// timestampLatest asks ListOffsets for the end of the log.
const timestampLatest = -1

// AskBrokers returns a LogEnds that asks the live brokers.
func AskBrokers(st registry.Store, root registry.Root) LogEnds {
	return func(ctx context.Context, partitions []registry.Partition) map[registry.Partition]int64 {
		ctx, cancel := context.WithTimeout(ctx, endsLimit)
		defer cancel()
		brokers, _, err := registry.LiveBrokers(ctx, st, root)
		if err != nil || len(brokers) == 0 || len(partitions) == 0 {
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
		return listEnds(ctx, client, partitions)
	}
}

func listEnds(ctx context.Context, client *kgo.Client, partitions []registry.Partition) map[registry.Partition]int64 {
	type key struct {
		topic  string
		number int32
	}
	byKey := map[key]registry.Partition{}
	topics := map[string]*kmsg.ListOffsetsRequestTopic{}
	for _, p := range partitions {
		byKey[key{p.Topic, p.Number}] = p
		if topics[p.Topic] == nil {
			topics[p.Topic] = &kmsg.ListOffsetsRequestTopic{Topic: p.Topic}
		}
		q := kmsg.NewListOffsetsRequestTopicPartition()
		q.Partition, q.Timestamp = p.Number, timestampLatest
		topics[p.Topic].Partitions = append(topics[p.Topic].Partitions, q)
	}
	req := kmsg.NewPtrListOffsetsRequest()
	for _, t := range topics {
		req.Topics = append(req.Topics, *t)
	}
	ends := map[registry.Partition]int64{}
	// Brokers answer apart; one that does not must not hide the others.
	for _, shard := range client.RequestSharded(ctx, req) {
		res, ok := shard.Resp.(*kmsg.ListOffsetsResponse)
		if shard.Err != nil || !ok {
			continue
		}
		for _, t := range res.Topics {
			for _, p := range t.Partitions {
				if p.ErrorCode == 0 {
					ends[byKey[key{t.Topic, p.Partition}]] = p.Offset
				}
			}
		}
	}
	return ends
}
