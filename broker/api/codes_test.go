package api_test

import (
	"slices"
	"testing"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/broker/api"
)

func TestErrorCodesAreFoundAtEveryDepth(t *testing.T) {
	produce := kmsg.NewPtrProduceResponse()
	produce.Topics = []kmsg.ProduceResponseTopic{{Partitions: []kmsg.ProduceResponseTopicPartition{{ErrorCode: 1}, {}, {ErrorCode: 2}}}}
	fetch := kmsg.NewPtrFetchResponse()
	fetch.ErrorCode = 3
	fetch.Topics = []kmsg.FetchResponseTopic{{}, {Partitions: []kmsg.FetchResponseTopicPartition{{}, {ErrorCode: 4}}}}
	metadata := kmsg.NewPtrMetadataResponse()
	metadata.Brokers = []kmsg.MetadataResponseBroker{{NodeID: 5}}
	metadata.Topics = []kmsg.MetadataResponseTopic{{ErrorCode: 6, Partitions: []kmsg.MetadataResponseTopicPartition{{ErrorCode: 7}}}}
	metadata.ErrorCode = 8
	versions := kmsg.NewPtrApiVersionsResponse()
	versions.ErrorCode = 35
	for _, c := range []struct {
		resp kmsg.Response
		want []int16
	}{
		{produce, []int16{1, 2}},
		{fetch, []int16{3, 4}},
		{metadata, []int16{6, 7, 8}},
		{versions, []int16{35}},
		{kmsg.NewPtrListOffsetsResponse(), nil},
		{nil, nil},
	} {
		var got []int16
		api.ErrorCodes(c.resp, func(code int16) { got = append(got, code) })
		slices.Sort(got)
		if !slices.Equal(got, c.want) {
			t.Errorf("%T: got %v, want %v", c.resp, got, c.want)
		}
	}
}
