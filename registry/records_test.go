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

// parse reads a key by what its path says it is.
func parse(root Root, kv KV) (kind string, rec any, err error) {
	switch {
	case strings.HasPrefix(kv.Key, root.Brokers()):
		id, rec, err := root.ParseBroker(kv)
		return fmt.Sprint("broker ", id), rec, err
	case strings.HasSuffix(kv.Key, "/state"):
		topic, p, rec, ok, err := root.ParsePartitionState(kv)
		if !ok && err == nil {
			err = errors.New("not recognized")
		}
		return fmt.Sprint("state ", topic, " ", p), rec, err
	case strings.HasPrefix(kv.Key, root.Topics()):
		name, rec, ok, err := root.ParseTopic(kv)
		if !ok && err == nil {
			err = errors.New("not recognized")
		}
		return "topic " + name, rec, err
	case strings.Contains(kv.Key, "/ids/"):
		rec, err := ParseConsumer(kv)
		return "consumer", rec, err
	case strings.Contains(kv.Key, "/offsets/"):
		n, err := ParseOffset(kv)
		return "offset", n, err
	}
	var config TopicConfig
	err = decode(kv, &config)
	return "config", config, err
}

func TestRecordsOfRealKafkaAreRead(t *testing.T) {
	kvs := recorded(t)
	if len(kvs) < 15 {
		t.Fatalf("only %d records", len(kvs))
	}
	got := map[string]any{}
	for _, kv := range kvs {
		kind, rec, err := parse("", kv)
		if err != nil {
			t.Errorf("%s %s: %v", kind, kv.Key, err)
		}
		got[kv.Key] = rec
		// What we write back says the same to the same reader.
		if _, number := rec.(int64); number {
			continue
		}
		value, err := Encode(rec)
		if err != nil {
			t.Fatal(err)
		}
		if _, again, err := parse("", KV{Key: kv.Key, Value: value}); err != nil || !reflect.DeepEqual(again, rec) {
			t.Errorf("%s: %s came back as %+v, %v; was %+v", kv.Key, value, again, err, rec)
		}
	}
	for key, want := range map[string]any{
		"/brokers/ids/1": BrokerRecord{Version: 1, Host: "127.0.0.1", Port: 19091, JMXPort: -1, Timestamp: "1796009568591"},
		"/brokers/topics/pay.ments_x/partitions/0/state": PartitionState{ControllerEpoch: 1, Leader: 2, Version: 1, ISR: []int32{2, 1}},
		"/consumers/g2/ids/g2_c1": ConsumerRecord{Version: 1, Subscription: map[string]int32{"orders": 2, "pay.ments_x": 2},
			Pattern: PatternStatic, Timestamp: "1796009659848"},
	} {
		if !reflect.DeepEqual(got[key], want) {
			t.Errorf("%s: %+v, want %+v", key, got[key], want)
		}
	}
	topic := got["/brokers/topics/pay.ments_x"].(TopicRecord)
	want := "[pay.ments_x/2-0 pay.ments_x/1-1 pay.ments_x/2-2 pay.ments_x/1-3]" // 0.8.2 wrote no home: the first replica
	if list := fmt.Sprint(topic.List("pay.ments_x")); list != want {
		t.Errorf("partitions %s, want %s", list, want)
	}
	if topic.ID() != uuid.Nil {
		t.Errorf("topic id %s out of nothing", topic.ID())
	}
}

// case 05, the part of the registry: brackets belong to the joined form only.
func TestBrokerHostsRoundTrip(t *testing.T) {
	root := Root("/kc")
	for _, host := range []string{"fd00:10::2", "fe80::1%eth0", "::1", "node-a", "10.0.0.1"} {
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
		{state, ""}, {state, "null"}, {state, "{}"}, {state, `{"leader":1}`}, {state, `{"leader":` + big + `,"isr":[1]}`},
		{"/brokers/topics/t/partitions/x/state", `{"leader":1,"isr":[1]}`}, {"/brokers/topics/%/partitions/-1/state", `{"leader":1,"isr":[1]}`},
		{id, ""}, {id, "null"}, {id, "{}"}, {id, `{"version":1,"subscription":{"t":1},"timestamp":"1"}`}, {id, `{"pattern":"static"}`},
		{id, `{"subscription":{"t":0},"pattern":"static"}`}, {id, `{"subscription":{"t":-1},"pattern":"static"}`},
		{id, `{"subscription":{"t":10001},"pattern":"static"}`}, {id, `{"subscription":{"t":1},"pattern":"static","version":` + big + `}`},
		{id, `{"subscription":["t"],"pattern":"static"}`},
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
	f.Fuzz(func(t *testing.T, key string, value []byte) {
		kv := KV{Key: key, Value: value}
		id, broker, errB := Root("").ParseBroker(kv)
		name, topic, _, errT := Root("").ParseTopic(kv)
		_, _, _, _, errS := Root("").ParsePartitionState(kv)
		_, errC := ParseConsumer(kv)
		_, errO := ParseOffset(kv)
		for _, err := range []error{errB, errT, errS, errC, errO} {
			if err != nil && !errors.Is(err, ErrRecord) {
				t.Fatalf("%q %q: %v", key, value, err)
			}
		}
		if errB == nil && Root("").Broker(id) != key {
			t.Fatalf("broker %d %+v was read off %q", id, broker, key)
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
