package registry

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/google/uuid"
)

// testdata/kafka-0.8.2.2.json holds nodes that Kafka 0.8.2.2 and its consumers
// wrote to ZooKeeper: paths and values as recorded.
func recorded(t testing.TB) (kvs []KV) {
	data, err := os.ReadFile("testdata/kafka-0.8.2.2.json")
	if err != nil {
		t.Fatal(err)
	}
	var nodes []struct{ Path, Value string }
	if err := json.Unmarshal(data, &nodes); err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes {
		kvs = append(kvs, KV{Key: n.Path, Value: []byte(n.Value)})
	}
	return kvs
}

// errNoRecord is what parse says of a path that is not one of ours.
var errNoRecord = errors.New("no record of ours")

// parse reads a key by what its path says it is.
func parse(root Root, kv KV) (kind string, rec any, err error) {
	switch at := root.Locate(kv.Key); at.Kind {
	case KindClusterID:
		return "cluster id", string(kv.Value), nil
	case KindOpaque:
		n, err := ParseOffset(kv)
		return "producer ids", n, err
	case KindBroker:
		id, rec, err := root.ParseBroker(kv)
		return fmt.Sprint("broker ", id), rec, err
	case KindState:
		topic, p, rec, ok, err := root.ParsePartitionState(kv)
		if !ok && err == nil {
			err = errNoRecord
		}
		return fmt.Sprint("state ", topic, " ", p), rec, err
	case KindCount:
		n, err := ParseOffset(kv)
		return "count", n, err
	case KindTopic:
		name, rec, ok, err := root.ParseTopic(kv)
		if !ok && err == nil {
			err = errNoRecord
		}
		return "topic " + name, rec, err
	case KindTopicConfig:
		rec, err := ParseTopicConfig(kv)
		return "config", rec, err
	case KindDeletion:
		topic, rec, err := root.ParseDeletion(kv)
		return "deletion " + topic, rec, err
	case KindMember:
		rec, err := ParseConsumer(kv)
		return "consumer", rec, err
	case KindOwner: // 0.8.2 spells the partition by its number alone; the value is the same
		if len(kv.Value) == 0 {
			return "owner", nil, fmt.Errorf("owner %s: %w", kv.Key, ErrRecord)
		}
		return "owner", string(kv.Value), nil
	case KindOffset:
		n, err := ParseOffset(kv)
		return "offset", n, err
	case KindTarget: // read by package rebalance
		return "target", string(kv.Value), nil
	case KindHistory:
		rec, err := ParseHistory(kv)
		return "history", rec, err
	}
	return "", nil, errNoRecord
}

// plain tells whether a record is text, not JSON.
func plain(rec any) bool {
	switch rec.(type) {
	case string, int64:
		return true
	}
	return false
}

// Every value that Kafka 0.8.2.2 was seen to write under a path that we know is read.
func TestRecordsOfRealKafkaAreRead(t *testing.T) {
	got := map[string]any{} // by path and value
	kinds := map[string]int{}
	for _, kv := range recorded(t) {
		kind, rec, err := parse("", kv)
		if errors.Is(err, errNoRecord) {
			switch first := strings.Split(kv.Key, "/")[1]; {
			case first == "", strings.HasPrefix(first, "controller"), strings.HasPrefix(kv.Key, "/config/changes/"):
				continue // Muster has no such keys
			}
		}
		if err != nil {
			t.Errorf("%s %s: %v", kind, kv.Key, err)
			continue
		}
		kinds[strings.Split(kind, " ")[0]]++
		got[kv.Key+" "+string(kv.Value)] = rec
		if _, marker := rec.(TopicDeletion); marker || plain(rec) {
			continue
		}
		// What we write back says the same to the same reader.
		value, err := Encode(rec)
		if err != nil {
			t.Fatal(err)
		}
		if _, again, err := parse("", KV{Key: kv.Key, Value: value}); err != nil || !reflect.DeepEqual(again, rec) {
			t.Errorf("%s: %s came back as %+v, %v; was %+v", kv.Key, value, again, err, rec)
		}
	}
	for kind, least := range map[string]int{"broker": 6, "topic": 7, "state": 19, "config": 7, "deletion": 1, "consumer": 15, "owner": 50, "offset": 50} {
		if kinds[kind] < least {
			t.Errorf("%d records of kind %s, want %d", kinds[kind], kind, least)
		}
	}
	for _, c := range []struct {
		key, value string
		want       any
	}{
		{"/brokers/ids/1", `{"jmx_port":-1,"timestamp":"1796009568591","host":"127.0.0.1","version":1,"port":19091}`,
			BrokerRecord{Version: 1, Host: "127.0.0.1", Port: 19091, JMXPort: -1, Timestamp: "1796009568591"}},
		{"/brokers/topics/pay.ments_x/partitions/0/state", `{"controller_epoch":1,"leader":2,"version":1,"leader_epoch":0,"isr":[2,1]}`,
			PartitionState{ControllerEpoch: 1, Leader: 2, Version: 1, ISR: []int32{2, 1}}},
		{"/consumers/g2/ids/g2_c1", `{"version":1,"subscription":{"orders":2,"pay.ments_x":2},"pattern":"static","timestamp":"1796009659848"}`,
			ConsumerRecord{Version: 1, Subscription: map[string]int32{"orders": 2, "pay.ments_x": 2}, Pattern: PatternStatic, Timestamp: "1796009659848"}},
		{"/consumers/gw/ids/gw_b1", `{"version":1,"subscription":{"debug_.*|\"x\/y":1},"pattern":"black_list","timestamp":"1796009687736"}`,
			ConsumerRecord{Version: 1, Subscription: map[string]int32{`debug_.*|"x/y`: 1}, Pattern: PatternBlackList, Timestamp: "1796009687736"}},
		{"/admin/delete_topics/gone", "", TopicDeletion{}},
		{"/consumers/gdel/offsets/orders/4", "70", int64(70)},
	} {
		if rec := got[c.key+" "+c.value]; !reflect.DeepEqual(rec, c.want) {
			t.Errorf("%s: %+v, want %+v", c.key, rec, c.want)
		}
	}
}

// 0.8.2 wrote neither homes nor topic ids: the homes are the first replicas.
func TestTopicsOf082(t *testing.T) {
	value := `{"version":1,"partitions":{"2":[2,1],"1":[1,2],"3":[1,2],"0":[2,1]}}`
	name, rec, ok, err := Root("").ParseTopic(KV{Key: "/brokers/topics/pay.ments_x", Value: []byte(value)})
	if err != nil || !ok {
		t.Fatal(err)
	}
	if list, want := fmt.Sprint(rec.List(name)), "[pay.ments_x/2-0 pay.ments_x/1-1 pay.ments_x/2-2 pay.ments_x/1-3]"; list != want {
		t.Errorf("partitions %s, want %s", list, want)
	}
	if rec.ID() != uuid.Nil {
		t.Errorf("topic id %s out of nothing", rec.ID())
	}
}

// A consumer may register without any topic: it then owns nothing, and disturbs nobody.
func TestConsumerWithoutTopics(t *testing.T) {
	for _, pattern := range []string{PatternStatic, PatternWhiteList, PatternBlackList} {
		value := `{"version":1,"subscription":{},"pattern":"` + pattern + `","timestamp":"1"}`
		rec, err := ParseConsumer(KV{Key: "/consumers/g/ids/c", Value: []byte(value)})
		if err != nil || rec.Subscription == nil || len(rec.Subscription) != 0 {
			t.Errorf("%s: %+v, %v", value, rec, err)
		}
	}
}

// case 05, the part of the registry: brackets belong to the joined form only.
func TestBrokerHostsRoundTrip(t *testing.T) {
	root := Root("/kc")
	for _, host := range []string{"fd00:10::2", "fe80::1%eth0", "::1", "2001:db8::9093", "node-a", "10.0.0.1"} {
		rec := BrokerRecord{Version: 1, Host: host, Port: 9093, JMXPort: -1, Timestamp: "1796009568591"}
		value, err := Encode(rec)
		if err != nil || !strings.Contains(string(value), `"host":"`+host+`"`) {
			t.Fatalf("%s, %v", value, err)
		}
		id, got, err := root.ParseBroker(KV{Key: root.Broker(3), Value: value})
		if err != nil || id != 3 || got != rec {
			t.Errorf("%s came back as %d %+v, %v", host, id, got, err)
		}
	}
}

func TestHomeNeverChanges(t *testing.T) {
	id := uuid.MustParse("5f8a0c86-7a6e-4a3b-9a57-0d3a4f6c1b11")
	kv := KV{Key: "/brokers/topics/orders", Value: []byte(`{"version":1,"partitions":{"10":[3,1],"2":[1]},"home":{"10":1,"2":1},"topic_id":"` + id.String() + `"}`)}
	name, rec, ok, err := Root("").ParseTopic(kv)
	if err != nil || !ok || name != "orders" || rec.ID() != id {
		t.Fatalf("%q %+v %t %v", name, rec, ok, err)
	}
	if list := fmt.Sprint(rec.List(name)); list != "[orders/1-2 orders/1-10]" {
		t.Errorf("partitions %s", list)
	}
}

func TestKeysBesideRecordsAreLeftAlone(t *testing.T) {
	root := Root("/kc")
	for _, key := range []string{root.TopicBroker("orders", 1), root.PartitionState("orders", 0), "/kc/brokers/ids/1", "/brokers/topics/orders"} {
		if name, _, ok, err := root.ParseTopic(KV{Key: key, Value: []byte("2")}); ok || err != nil {
			t.Errorf("%s was taken for topic %q (error %v)", key, name, err)
		}
	}
	for _, key := range []string{root.Topic("orders"), root.TopicBroker("orders", 1)} {
		if topic, _, _, ok, err := root.ParsePartitionState(KV{Key: key}); ok || err != nil {
			t.Errorf("%s was taken for a state of %q (error %v)", key, topic, err)
		}
	}
}

func TestBadRecordsAreErrRecord(t *testing.T) {
	broker, topic, state := "/brokers/ids/1", "/brokers/topics/t", "/brokers/topics/t/partitions/0/state"
	id, offset := "/consumers/g/ids/c", "/consumers/g/offsets/t/1-0"
	big := "9223372036854775807"
	for _, c := range []struct{ key, value string }{
		{broker, ""}, {broker, "null"}, {broker, "{}"}, {broker, "not JSON"}, {broker, `{"host":"a","port":9092} x`},
		{broker, `{"host":"","port":9092}`}, {broker, `{"host":"a","port":0}`}, {broker, `{"host":"a","port":65536}`},
		{broker, `{"host":"a","port":9092,"jmx_port":` + big + `}`}, {broker, `{"host":"a","port":"9092"}`},
		{"/brokers/ids/x", `{"host":"a","port":9092}`}, {"/brokers/ids/-1", `{"host":"a","port":9092}`}, {"/brokers/ids/01", `{"host":"a","port":9092}`},
		{topic, ""}, {topic, "null"}, {topic, "{}"}, {topic, `{"partitions":{"0":[]}}`}, {topic, `{"partitions":{"-1":[1]}}`},
		{topic, `{"partitions":{"a":[1]}}`}, {topic, `{"partitions":{"2147483648":[1]}}`}, {topic, `{"partitions":{"0":[-1]}}`},
		{topic, `{"partitions":{"0":[1]},"home":{"0":-1}}`}, {topic, `{"partitions":[[1]]}`}, {"/brokers/topics/%zz", `{"partitions":{"0":[1]}}`},
		{state, ""}, {state, "null"}, {state, "{}"}, {state, `{"leader":1}`}, {state, `{"isr":[1]}`}, {state, `{"leader":null,"isr":[1]}`}, {state, `{"leader":` + big + `,"isr":[1]}`},
		{"/brokers/topics/t/partitions/x/state", `{"leader":1,"isr":[1]}`}, {"/brokers/topics/%/partitions/-1/state", `{"leader":1,"isr":[1]}`},
		{id, ""}, {id, "null"}, {id, "{}"}, {id, `{"version":1,"subscription":{"t":1},"timestamp":"1"}`}, {id, `{"pattern":"static"}`},
		{id, `{"subscription":{"t":0},"pattern":"static"}`}, {id, `{"subscription":{"t":-1},"pattern":"static"}`},
		{id, `{"subscription":{"t":10001},"pattern":"static"}`}, {id, `{"subscription":{"t":1},"pattern":"static","version":` + big + `}`},
		{id, `{"subscription":["t"],"pattern":"static"}`},
		{"/config/topics/t", ""}, {"/config/topics/t", `{"config":{"a":1}}`}, {"/config/topics/t", `[]`},
		{"/admin/delete_topics/t", "yes"}, {"/admin/delete_topics/%zz", ""}, {"/admin/delete_topics/t", `{"keep_offsets":1}`},
		{"/consumers/g/owners/t/1-0", ""}, {"/brokers/topics/t/1", "x"}, {"/producer_ids/next", "-5"},
		{offset, ""}, {offset, "abc"}, {offset, "-1"}, {offset, "1.5"}, {offset, big + "0"}, {offset, "1 2"},
	} {
		kind, rec, err := parse("", KV{Key: c.key, Value: []byte(c.value)})
		if !errors.Is(err, ErrRecord) {
			t.Errorf("%s %q: %+v, error %v; want ErrRecord", kind, c.value, rec, err)
		} else if !strings.Contains(err.Error(), c.key) {
			t.Errorf("error does not name the key: %v", err)
		}
	}
}

func TestOffsets(t *testing.T) {
	for text, want := range map[string]int64{"0": 0, "10": 10, "9223372036854775807": 9223372036854775807, " 7\n": 7} {
		if n, err := ParseOffset(KV{Key: "k", Value: []byte(text)}); err != nil || n != want {
			t.Errorf("%q: %d, %v", text, n, err)
		}
	}
	if got := string(FormatOffset(9223372036854775807)); got != "9223372036854775807" {
		t.Error(got)
	}
}

func TestTopicNames(t *testing.T) {
	for _, name := range []string{"orders", "a", "...", "pay.ments_x", "__consumer_offsets", strings.Repeat("x", MaxTopicName)} {
		if err := ValidateTopicName(name); err != nil {
			t.Errorf("%q: %v", name, err)
		}
		if element, err := EscapeName(name); err != nil || element != name {
			t.Errorf("topic %q is spelled %q in keys", name, element)
		}
	}
	for _, name := range []string{"", ".", "..", "a:b", "a/b", "a b", "ü", "a\x00", strings.Repeat("x", MaxTopicName+1)} {
		if err := ValidateTopicName(name); !errors.Is(err, ErrTopicName) {
			t.Errorf("%q: %v", name, err)
		}
	}
	if ValidateGroupName("any thing/ü") != nil || ValidateGroupName("") == nil || ValidateGroupName("a\x00") == nil {
		t.Error("group names: everything but the empty name and NUL")
	}
}

// No value of any key makes a parser panic, or fail in another way than ErrRecord.
func FuzzRecords(f *testing.F) {
	for _, kv := range recorded(f) {
		f.Add(kv.Key, kv.Value)
	}
	f.Add("/brokers/topics/t/partitions/0/state", []byte(`{"isr":null}`))
	f.Add("/consumers/g/owners/t/1-0", []byte("c-0"))
	f.Add("/consumers/g/ids/a%2Fb", []byte(`{"subscription":{},"pattern":"static"}`))
	f.Add("/admin/delete_topics/t", []byte(`{"version":1,"topic_id":"","keep_offsets":true}`))
	f.Fuzz(func(t *testing.T, key string, value []byte) {
		kv := KV{Key: key, Value: value}
		id, broker, errB := Root("").ParseBroker(kv)
		name, topic, _, errT := Root("").ParseTopic(kv)
		_, _, _, _, errS := Root("").ParsePartitionState(kv)
		_, errC := ParseConsumer(kv)
		_, errO := ParseOffset(kv)
		_, errF := ParseTopicConfig(kv)
		deleted, _, errD := Root("").ParseDeletion(kv)
		for _, err := range []error{errB, errT, errS, errC, errO, errF, errD} {
			if err != nil && !errors.Is(err, ErrRecord) {
				t.Fatalf("%q %q: %v", key, value, err)
			}
		}
		if errB == nil && Root("").Broker(id) != key {
			t.Fatalf("broker %d %+v was read off %q", id, broker, key)
		}
		if errD == nil && Root("").DeletedTopic(deleted) != key {
			t.Fatalf("the deletion of %q was read off %q", deleted, key)
		}
		for _, g := range []GroupPaths{Root("").Group("g"), Root("").Group("g1")} {
			if p, err := g.ParsePartition(key); err == nil && g.Owner(p) != key && g.Offset(p) != key {
				t.Fatalf("%v was read off %q", p, key)
			}
			if id, err := g.ParseID(key); err == nil && g.ID(id) != key {
				t.Fatalf("%q was read off %q", id, key)
			}
		}
		if errT == nil {
			g := Root("").Group("g")
			for _, p := range topic.List(name) { // every partition has keys that can be read back
				if got, err := g.ParsePartition(g.Owner(p)); err != nil || got != p {
					t.Fatalf("partition %v became %s and then %v, %v", p, g.Owner(p), got, err)
				}
			}
		}
	})
}
