package api_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/broker/api"
)

// metadataRequest asks for the named topics; all of them without a name.
func metadataRequest(version int16, create bool, names ...string) *kmsg.MetadataRequest {
	req := kmsg.NewPtrMetadataRequest()
	req.Version, req.AllowAutoTopicCreation = version, create
	for _, name := range names {
		t := kmsg.NewMetadataRequestTopic()
		t.Topic = &name
		req.Topics = append(req.Topics, t)
	}
	if version == 0 && req.Topics == nil {
		req.Topics = []kmsg.MetadataRequestTopic{}
	}
	return req
}

func TestMetadataEveryVersion(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 2)
	b.addTopic("events", 1)
	b.change(func(s *api.Snapshot) {
		// A host is told as it is registered: IPv6 without brackets, the port apart.
		s.Brokers = append(s.Brokers, api.Broker{ID: 2, Host: "fd00:10::2", Port: 9093, Rack: "r2"})
		topic, _ := s.Topics.Get("orders")
		topic.Partitions = slices.Clone(topic.Partitions)
		topic.Partitions[1] = api.PartitionInfo{Number: 1, Leader: 3, LeaderEpoch: 4, Replicas: []int32{3, 2}, ISR: []int32{3}}
		s.Topics = s.Topics.Change([]api.Topic{topic}, nil)
	})
	orders := b.topic("orders")
	c := b.dial(t)
	for version := range int16(14) {
		resp := ask[*kmsg.MetadataResponse](c, metadataRequest(version, false))
		if len(resp.Topics) != 2 || *resp.Topics[0].Topic != "events" || *resp.Topics[1].Topic != "orders" {
			t.Fatalf("version %d: topics %+v", version, resp.Topics)
		}
		if got := resp.Brokers[1]; got.NodeID != 2 || got.Host != "fd00:10::2" || got.Port != 9093 ||
			version >= 1 && (got.Rack == nil || *got.Rack != "r2" || resp.Brokers[0].Rack != nil) {
			t.Fatalf("version %d: broker %+v", version, got)
		}
		if version >= 1 && resp.ControllerID != 1 || version >= 2 && *resp.ClusterID != "test-cluster" {
			t.Fatalf("version %d: controller %d, cluster %v", version, resp.ControllerID, resp.ClusterID)
		}
		got := resp.Topics[1]
		if got.ErrorCode != 0 || version >= 10 && got.TopicID != orders.ID || version >= 8 && got.AuthorizedOperations != -2147483648 {
			t.Fatalf("version %d: topic %+v", version, got)
		}
		if p := got.Partitions[0]; p.ErrorCode != 0 || p.Leader != 1 || version >= 7 && p.LeaderEpoch != 7 || len(p.OfflineReplicas) != 0 {
			t.Fatalf("version %d: %+v", version, p)
		}
		p := got.Partitions[1] // led by a broker that is not alive
		if p.ErrorCode != 5 || p.Leader != -1 || !slices.Equal(p.Replicas, []int32{3, 2}) || !slices.Equal(p.ISR, []int32{3}) ||
			version >= 5 && !slices.Equal(p.OfflineReplicas, []int32{3}) {
			t.Fatalf("version %d: %+v", version, p)
		}
	}
}

func TestMetadataEmptyListAsksForNothing(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 1)
	c := b.dial(t)
	for _, version := range []int16{1, 8, 9, 13} {
		req := metadataRequest(version, true)
		req.Topics = []kmsg.MetadataRequestTopic{}
		if resp := ask[*kmsg.MetadataResponse](c, req); len(resp.Topics) != 0 || len(resp.Brokers) != 1 {
			t.Errorf("version %d: %d topics, %d brokers", version, len(resp.Topics), len(resp.Brokers))
		}
	}
}

func TestMetadataErrorsAreForEachTopic(t *testing.T) {
	b := start(t, api.Options{AutoCreateTopics: true})
	b.addTopic("orders", 1)
	c := b.dial(t)
	long := strings.Repeat("x", 250)
	for _, version := range []int16{0, 4, 9, 12, 13} {
		resp := ask[*kmsg.MetadataResponse](c, metadataRequest(version, false, "orders", "a b", "", ".", "..", "ä", long, "x/y"))
		for i, topic := range resp.Topics {
			want := int16(17)
			if i == 0 {
				want = 0
			}
			if topic.ErrorCode != want {
				t.Errorf("version %d: topic %q: error %d, want %d", version, *topic.Topic, topic.ErrorCode, want)
			}
		}
	}
	resp := ask[*kmsg.MetadataResponse](c, metadataRequest(4, false, "nope", "orders"))
	if resp.Topics[0].ErrorCode != 3 || resp.Topics[1].ErrorCode != 0 {
		t.Errorf("a topic that is not there: %+v", resp.Topics)
	}
}

func TestMetadataByTopicID(t *testing.T) {
	b := start(t, api.Options{})
	b.addTopic("orders", 1)
	id := b.topic("orders").ID
	c := b.dial(t)
	request := func(version int16, ids ...uuid.UUID) *kmsg.MetadataRequest {
		req := metadataRequest(version, true)
		for _, id := range ids {
			req.Topics = append(req.Topics, kmsg.MetadataRequestTopic{TopicID: id})
		}
		return req
	}
	other := uuid.New()
	for _, version := range []int16{12, 13} {
		resp := ask[*kmsg.MetadataResponse](c, request(version, id, other, uuid.Nil))
		if got := resp.Topics[0]; got.ErrorCode != 0 || *got.Topic != "orders" || len(got.Partitions) != 1 {
			t.Errorf("version %d: %+v", version, got)
		}
		if got := resp.Topics[1]; got.ErrorCode != 100 || got.Topic != nil || got.TopicID != other {
			t.Errorf("version %d: unknown id: %+v", version, got)
		}
		if got := resp.Topics[2]; got.ErrorCode != 100 {
			t.Errorf("version %d: neither name nor id: %+v", version, got)
		}
	}
	if got := ask[*kmsg.MetadataResponse](c, request(10, id)).Topics[0]; got.ErrorCode != 42 {
		t.Errorf("version 10: %+v", got)
	}
	// The topic is deleted and made anew: its old id is nobody's.
	b.change(func(s *api.Snapshot) {
		topic, _ := s.Topics.Get("orders")
		topic.ID = other
		s.Topics = s.Topics.Change([]api.Topic{topic}, nil)
	})
	resp := ask[*kmsg.MetadataResponse](c, request(12, id, other))
	if resp.Topics[0].ErrorCode != 100 || resp.Topics[1].ErrorCode != 0 {
		t.Errorf("after it was made anew: %+v", resp.Topics)
	}
}

func TestMetadataCreatesTopics(t *testing.T) {
	b := start(t, api.Options{AutoCreateTopics: true})
	c := b.dial(t)
	for _, test := range []struct {
		version int16
		allow   bool
		code    int16
	}{{4, false, 3}, {4, true, 0}, {3, false, 0}, {0, false, 0}, {13, true, 0}} {
		name := "new" + string(rune('a'+test.version))
		got := ask[*kmsg.MetadataResponse](c, metadataRequest(test.version, test.allow, name)).Topics[0]
		if got.ErrorCode != test.code || test.code == 0 && len(got.Partitions) != 1 {
			t.Errorf("version %d, allowed %v: %+v", test.version, test.allow, got)
		}
	}
}

func TestMetadataDoesNotCreateTopicsUnlessSet(t *testing.T) {
	b := start(t, api.Options{})
	if got := ask[*kmsg.MetadataResponse](b.dial(t), metadataRequest(4, true, "new")).Topics[0]; got.ErrorCode != 3 {
		t.Errorf("%+v", got)
	}
}

func TestMetadataTellsWhyATopicWasNotCreated(t *testing.T) {
	for name, test := range map[string]struct {
		hide bool
		err  error
		code int16
	}{
		"not visible yet":      {hide: true, code: 5},
		"somebody was faster":  {err: kerr.TopicAlreadyExists, code: 5},
		"refused":              {err: kerr.PolicyViolation, code: 44},
		"error without a code": {err: errors.New("etcd is away"), code: -1},
	} {
		b := start(t, api.Options{AutoCreateTopics: true})
		b.hideNew, b.createErr = test.hide, test.err
		if got := ask[*kmsg.MetadataResponse](b.dial(t), metadataRequest(9, true, "new", "new")).Topics; got[0].ErrorCode != test.code {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func TestMetadataBoundsWhatItCreates(t *testing.T) {
	b := start(t, api.Options{AutoCreateTopics: true})
	var names []string
	for i := range 60 {
		names = append(names, "t"+strings.Repeat("x", i))
	}
	resp := ask[*kmsg.MetadataResponse](b.dial(t), metadataRequest(9, true, names...))
	if resp.Topics[49].ErrorCode != 0 || resp.Topics[50].ErrorCode != 5 {
		t.Errorf("topic 49: %d, topic 50: %d", resp.Topics[49].ErrorCode, resp.Topics[50].ErrorCode)
	}
}
