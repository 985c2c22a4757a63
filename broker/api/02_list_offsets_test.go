package api_test

import (
	"testing"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/broker/api"
)

func listRequest(version int16, topic string, number int32, question int64, epoch int32) *kmsg.ListOffsetsRequest {
	req := kmsg.NewPtrListOffsetsRequest()
	req.Version = version
	t := kmsg.NewListOffsetsRequestTopic()
	t.Topic = topic
	p := kmsg.NewListOffsetsRequestTopicPartition()
	p.Partition, p.Timestamp, p.CurrentLeaderEpoch = number, question, epoch
	t.Partitions = append(t.Partitions, p)
	req.Topics = append(req.Topics, t)
	return req
}

func TestListOffsetsEveryVersion(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 1)
	b.fill(t, "orders", 0, testBatch(2, 1000, "v"), testBatch(1, 3000, "v"), testBatch(1, 2000, "v"))
	c := b.dial(t)
	type answer struct {
		offset, timestamp int64
		epoch             int32
		code              int16
	}
	for version := int16(1); version <= 11; version++ {
		for question, test := range map[int64]struct {
			since int16
			want  answer
		}{
			-1:   {1, answer{4, -1, 7, 0}},
			-2:   {1, answer{0, -1, -1, 0}},
			0:    {1, answer{0, 1000, 7, 0}},
			1001: {1, answer{2, 3000, 7, 0}},
			3001: {1, answer{-1, -1, -1, 0}},
			-3:   {7, answer{2, 3000, 7, 0}},
			-4:   {8, answer{0, -1, -1, 0}},
			-5:   {9, answer{-1, -1, -1, 0}},
			-6:   {11, answer{-1, -1, -1, 0}},
			-7:   {12, answer{}},
		} {
			want := test.want
			if version < test.since {
				want = answer{-1, -1, -1, 35}
			}
			if version < 4 {
				want.epoch = -1
			}
			p := ask[*kmsg.ListOffsetsResponse](c, listRequest(version, "orders", 0, question, -1)).Topics[0].Partitions[0]
			if got := (answer{p.Offset, p.Timestamp, p.LeaderEpoch, p.ErrorCode}); got != want {
				t.Errorf("version %d question %d: %+v, want %+v", version, question, got, want)
			}
		}
	}
}

func TestListOffsetsErrors(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 1)
	c := b.dial(t)
	for name, test := range map[string]struct {
		topic  string
		number int32
		epoch  int32
		code   int16
	}{
		"right epoch":  {"orders", 0, 7, 0},
		"old epoch":    {"orders", 0, 6, 74},
		"new epoch":    {"orders", 0, 8, 75},
		"no partition": {"orders", 1, -1, 3},
		"no topic":     {"nope", 0, -1, 3},
	} {
		p := ask[*kmsg.ListOffsetsResponse](c, listRequest(5, test.topic, test.number, -1, test.epoch)).Topics[0].Partitions[0]
		if p.ErrorCode != test.code || test.code != 0 && p.Offset != -1 {
			t.Errorf("%s: %+v", name, p)
		}
	}
}

func TestListOffsetsOfAnEmptyPartition(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 1)
	c := b.dial(t)
	for question, want := range map[int64]int64{-1: 0, -2: 0, -3: -1, 0: -1} {
		p := ask[*kmsg.ListOffsetsResponse](c, listRequest(7, "orders", 0, question, -1)).Topics[0].Partitions[0]
		if p.ErrorCode != 0 || p.Offset != want {
			t.Errorf("question %d: %+v", question, p)
		}
	}
}
