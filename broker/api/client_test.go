package api_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/broker/api"
)

func client(t *testing.T, b *broker, opts ...kgo.Opt) *kgo.Client {
	t.Helper()
	cl, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(b.addr), kgo.ClientID("kgo"), kgo.MetadataMinAge(10 * time.Millisecond)}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cl.Close)
	return cl
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// An idempotent producer with each codec, into a topic that it makes exist, and a
// consumer that reads it all back.
func TestClientProducesAndConsumes(t *testing.T) {
	b := start(t, api.Options{AutoCreateTopics: true})
	for name, codec := range map[string]kgo.CompressionCodec{
		"none": kgo.NoCompression(), "gzip": kgo.GzipCompression(), "snappy": kgo.SnappyCompression(),
		"lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression(),
	} {
		t.Run(name, func(t *testing.T) {
			ctx := within(t)
			producer := client(t, b, kgo.AllowAutoTopicCreation(), kgo.ProducerBatchCompression(codec), kgo.DefaultProduceTopic(name))
			const n = 1000
			var records []*kgo.Record
			for i := range n {
				records = append(records, kgo.StringRecord(fmt.Sprintf("%d %s", i, strings.Repeat("squeeze me ", 20))))
			}
			if err := producer.ProduceSync(ctx, records...).FirstErr(); err != nil {
				t.Fatal(err)
			}
			consumer := client(t, b, kgo.ConsumeTopics(name), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
				kgo.FetchIsolationLevel(kgo.ReadCommitted()))
			for got := 0; got < n; {
				fetches := consumer.PollFetches(ctx)
				if err := fetches.Err(); err != nil {
					t.Fatal(err)
				}
				fetches.EachRecord(func(r *kgo.Record) {
					if want := fmt.Sprintf("%d ", got); r.Offset != int64(got) || !strings.HasPrefix(string(r.Value), want) || r.LeaderEpoch != 7 {
						t.Errorf("record %d: offset %d epoch %d %.10q", got, r.Offset, r.LeaderEpoch, r.Value)
					}
					got++
				})
			}
		})
	}
	if log := b.log.String(); log != "" {
		t.Errorf("log: %s", log)
	}
}

func TestClientStartsAtATime(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 1)
	b.fill(t, "orders", 0, testBatch(1, 1000, "first"), testBatch(1, 2000, "second"), testBatch(1, 3000, "third"))
	for name, test := range map[string]struct {
		offset kgo.Offset
		want   string
	}{
		"start":       {kgo.NewOffset().AtStart(), "first"},
		"time":        {kgo.NewOffset().AfterMilli(1500), "second"},
		"before end":  {kgo.NewOffset().AtEnd().Relative(-1), "third"},
		"exact":       {kgo.NewOffset().At(1), "second"},
		"past an end": {kgo.NewOffset().At(77).Relative(0), "first"}, // out of range: reset
	} {
		consumer := client(t, b, kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{"orders": {0: test.offset}}),
			kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
		fetches := consumer.PollFetches(within(t))
		if err := fetches.Err(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got := string(fetches.Records()[0].Value); got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}

func TestClientAcksOneAndNone(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 1)
	for i, acks := range []kgo.Acks{kgo.LeaderAck(), kgo.NoAck()} {
		producer := client(t, b, kgo.RequiredAcks(acks), kgo.DisableIdempotentWrite(), kgo.DefaultProduceTopic("orders"))
		if err := producer.ProduceSync(within(t), kgo.StringRecord("v")).FirstErr(); err != nil {
			t.Fatal(err)
		}
		p, _ := b.Partition("orders", 0)
		waitFor(t, "the record", func() bool { return p.End() == int64(i+1) })
	}
}

func TestClientThatWantsTransactionsFailsAtOnce(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 1)
	cl := client(t, b)
	req := kmsg.NewPtrInitProducerIDRequest()
	req.TransactionalID = kmsg.StringPtr("tx")
	resp, err := b.dial(t), error(nil)
	if got := ask[*kmsg.InitProducerIDResponse](resp, req).ErrorCode; kerr.IsRetriable(kerr.ErrorForCode(got)) {
		t.Errorf("code %d is one that clients retry", got)
	}
	began := time.Now()
	producer := client(t, b, kgo.TransactionalID("tx"), kgo.DefaultProduceTopic("orders"))
	if err = producer.BeginTransaction(); err == nil {
		err = producer.ProduceSync(within(t), kgo.StringRecord("v")).FirstErr()
	}
	if err == nil || time.Since(began) > patience/2 {
		t.Errorf("after %s: %v", time.Since(began), err)
	}
	// Groups, too, are refused by the client itself, since they are not advertised.
	if _, err := kmsg.NewPtrJoinGroupRequest().RequestWith(within(t), cl); err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("join group: %v", err)
	}
}

func TestClientApiVersionsIsAsRegistered(t *testing.T) {
	b := start(t, api.Options{})
	resp, err := kmsg.NewPtrApiVersionsRequest().RequestWith(within(t), client(t, b))
	if err != nil || len(resp.ApiKeys) != len(b.srv.Versions()) {
		t.Errorf("%v, %+v", err, resp)
	}
}
