package broker_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/registry"
)

// Clients are told nothing of a topic without a log, nor is one made for them under
// its name; daemons keep and state nothing of it.
func TestTopicWithoutLogIsNoTopicToClients(t *testing.T) {
	dir := t.TempDir()
	cfg := config(t, dir)
	cfg.AutoCreateTopics = true
	d := start(t, cfg)
	st := openStore(t, d)
	_, err := registry.CreateTopic(t.Context(), st, "", registry.TopicSpec{Name: "shards", Partitions: 3, NoLog: true}, []int32{1})
	must(t, err)
	create(t, st, "orders", 1, 1)
	k := producer(t, d)
	produce(t, k, "orders", 0, "v") // the daemon has taken in what came before
	req := kmsg.NewPtrMetadataRequest()
	for _, name := range []string{"shards", "orders"} {
		asked := kmsg.NewMetadataRequestTopic()
		asked.Topic = &name
		req.Topics = append(req.Topics, asked)
	}
	req.AllowAutoTopicCreation = true
	res, err := k.SeedBrokers()[0].Request(t.Context(), req)
	must(t, err)
	for _, topic := range res.(*kmsg.MetadataResponse).Topics {
		if want := map[string]error{"shards": kerr.UnknownTopicOrPartition}[*topic.Topic]; !errors.Is(kerr.ErrorForCode(topic.ErrorCode), want) {
			t.Errorf("%s: error %v, want %v", *topic.Topic, kerr.ErrorForCode(topic.ErrorCode), want)
		}
	}
	req.Topics = nil
	res, err = k.SeedBrokers()[0].Request(t.Context(), req)
	must(t, err)
	if all := res.(*kmsg.MetadataResponse).Topics; len(all) != 1 || *all[0].Topic != "orders" {
		t.Errorf("all topics: %+v", all)
	}
	reader := newClient(t, d, kgo.MaxVersions(fetch11()))
	if err := fetchCode(t, reader, "shards", 0, time.Second); !errors.Is(err, kerr.UnknownTopicOrPartition) {
		t.Errorf("fetch: %v", err)
	}
	for _, name := range logDirs(t, dir, "logs") {
		if strings.HasPrefix(name, "shards") {
			t.Errorf("logs/%s is there", name)
		}
	}
	for key := range keys(t, st, "/brokers/topics/shards/") {
		t.Errorf("%s is there", key)
	}
}
