package registry

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

// reader082 is a small model of how Kafka 0.8.2 reads JSON: every number must be whole
// and fit int32, or the document as a whole is refused; strings have the usual escapes
// and no line break; what a record must have is looked up by name, and the rest ignored.
type reader082 struct {
	text string
	err  error
}

func read082(text []byte) (map[string]any, error) {
	r := &reader082{text: string(text)}
	v := r.value()
	if r.blank(); r.err == nil && r.text != "" {
		r.fail("more after the end: %.20q", r.text)
	}
	m, ok := v.(map[string]any)
	if r.err == nil && !ok {
		r.fail("no object")
	}
	return m, r.err
}

func (r *reader082) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf(format, args...)
	}
	r.text = ""
}

func (r *reader082) blank() { r.text = strings.TrimLeft(r.text, " \t\r\n") }

func (r *reader082) next(token string) bool {
	r.blank()
	rest, ok := strings.CutPrefix(r.text, token)
	r.text = rest
	return ok
}

func (r *reader082) want(token string) {
	if !r.next(token) {
		r.fail("want %q before %.20q", token, r.text)
	}
}

func (r *reader082) value() any {
	switch {
	case r.err != nil:
		return nil
	case r.next("{"):
		m := map[string]any{}
		r.list("}", func() {
			r.want(`"`)
			name := r.str()
			r.want(":")
			m[name] = r.value()
		})
		return m
	case r.next("["):
		list := []any{}
		r.list("]", func() { list = append(list, r.value()) })
		return list
	case r.next(`"`):
		return r.str()
	case r.next("true"):
		return true
	case r.next("false"):
		return false
	case r.next("null"):
		return nil
	}
	return r.number()
}

func (r *reader082) list(end string, element func()) {
	if r.next(end) {
		return
	}
	for r.err == nil {
		element()
		if r.next(end) {
			return
		}
		r.want(",")
	}
}

func (r *reader082) number() any {
	n := 0
	for n < len(r.text) && strings.IndexByte("+-0123456789.eE", r.text[n]) >= 0 {
		n++
	}
	i, err := strconv.ParseInt(r.text[:n], 10, 32)
	if err != nil {
		r.fail("number: %w", err)
		return nil
	}
	r.text = r.text[n:]
	return int(i)
}

func (r *reader082) str() string {
	var b strings.Builder
	for r.err == nil {
		c, size := utf8.DecodeRuneInString(r.text)
		switch {
		case size == 0 || c == '\n':
			r.fail("a string does not end")
		case c == utf8.RuneError && size == 1:
			r.fail("not UTF-8")
		case c == '"':
			r.text = r.text[1:]
			return b.String()
		case c == '\\':
			r.escape(&b)
		default:
			b.WriteString(r.text[:size])
			r.text = r.text[size:]
		}
	}
	return ""
}

func (r *reader082) escape(b *strings.Builder) {
	short := map[byte]string{'"': `"`, '\\': `\`, '/': "/", 'b': "\b", 'f': "\f", 'n': "\n", 'r': "\r", 't': "\t"}
	switch {
	case len(r.text) >= 2 && short[r.text[1]] != "":
		b.WriteString(short[r.text[1]])
		r.text = r.text[2:]
	case len(r.text) >= 6 && r.text[1] == 'u':
		n, err := strconv.ParseUint(r.text[2:6], 16, 16)
		if err != nil {
			r.fail("escape: %w", err)
			return
		}
		b.WriteRune(rune(n))
		r.text = r.text[6:]
	default:
		r.fail("bad escape %.6q", r.text)
	}
}

// A record that lacks what 0.8.2 needs makes it fail, for a consumer's record in the
// rebalance of the whole group.
func (r *reader082) field(m map[string]any, name string) any {
	v, ok := m[name]
	if !ok {
		r.fail("%s is missing", name)
	}
	return v
}

func (r *reader082) integer(v any) int {
	n, ok := v.(int)
	if !ok {
		r.fail("%v is no number", v)
	}
	return n
}

func (r *reader082) string(v any) string {
	s, ok := v.(string)
	if !ok {
		r.fail("%v is no string", v)
	}
	return s
}

func (r *reader082) integers(v any) (out []int32) {
	list, ok := v.([]any)
	if !ok {
		r.fail("%v is no list", v)
	}
	for _, e := range list {
		out = append(out, int32(r.integer(e)))
	}
	return out
}

func (r *reader082) object(v any) map[string]any {
	m, ok := v.(map[string]any)
	if !ok {
		r.fail("%v is no object", v)
	}
	return m
}

// as082 reads a record as 0.8.2 does, into ours; what it does not look at stays out.
func as082(kind string, value []byte) (any, error) {
	m, err := read082(value)
	if err != nil {
		return nil, err
	}
	r := &reader082{}
	var rec any
	switch kind {
	case "broker":
		rec = BrokerRecord{Host: r.string(r.field(m, "host")), Port: int32(r.integer(r.field(m, "port")))}
	case "topic":
		partitions := map[int32][]int32{}
		for p, replicas := range r.object(r.field(m, "partitions")) {
			n, err := strconv.ParseInt(p, 10, 32)
			if err != nil {
				return nil, err
			}
			partitions[int32(n)] = r.integers(replicas)
		}
		rec = TopicRecord{Partitions: partitions}
	case "state":
		rec = PartitionState{Leader: int32(r.integer(r.field(m, "leader"))), LeaderEpoch: int32(r.integer(r.field(m, "leader_epoch"))),
			ISR: r.integers(r.field(m, "isr")), ControllerEpoch: int32(r.integer(r.field(m, "controller_epoch")))}
	case "config":
		if v := r.integer(r.field(m, "version")); v != 1 {
			r.fail("version %d", v)
		}
		config := map[string]string{}
		for name, v := range r.object(r.field(m, "config")) {
			config[name] = r.string(v)
		}
		rec = TopicConfig{Version: 1, Config: config}
	case "consumer":
		subscription := map[string]int32{}
		for topic, streams := range r.object(r.field(m, "subscription")) {
			subscription[topic] = int32(r.integer(streams))
		}
		rec = ConsumerRecord{Subscription: subscription, Pattern: r.string(r.field(m, "pattern"))}
	}
	return rec, r.err
}

// The model itself: it reads what the real one wrote, and refuses what the real one was
// seen to refuse.
func TestModelOf082(t *testing.T) {
	n := 0
	for _, kv := range recorded(t) {
		kind, rec, err := parse("", kv)
		kind, _, _ = strings.Cut(kind, " ")
		if err != nil || plain(rec) || kind == "deletion" {
			continue
		}
		n++
		if _, err := as082(kind, kv.Value); err != nil {
			t.Errorf("%s: %v", kv.Value, err)
		}
	}
	if n < 50 {
		t.Errorf("only %d records", n)
	}
	for _, c := range []struct{ kind, value string }{
		{"consumer", `{"version":1,"subscription":{"t":1},"timestamp":"1"}`},
		{"consumer", `{"version":1,"subscription":{"t":1},"pattern":"static","timestamp":1796009634961}`},
		{"consumer", `{"version":1,"subscription":{"t":1.0},"pattern":"static"}`},
		{"consumer", `{"version":1,"subscription":{"t":1e1},"pattern":"static"}`},
		{"consumer", `*4*orders`},
		{"consumer", ``},
		{"consumer", "{\"version\":1,\"subscription\":{\"a\nb\":1},\"pattern\":\"static\"}"},
		{"consumer", `{"version":1,"subscription":{"\a":1},"pattern":"static"}`},
		{"broker", `{"host":"a","port":"9092"}`},
		{"config", `{"version":2,"config":{}}`},
		{"state", `{"leader":1,"isr":[1]}`},
		{"topic", `{"version":1,"partitions":{"0":[2147483648]}}`},
	} {
		if rec, err := as082(c.kind, []byte(c.value)); err == nil {
			t.Errorf("%s %s was read as %+v", c.kind, c.value, rec)
		}
	}
}

// What a person can put into a record: names, patterns, hosts, values of settings.
var hostile = []string{
	"", "orders", `a"b`, `a\b`, `\`, `"`, `\"`, "a\nb", "a\r\tb", "\b\f\v", "\x01\x1f\x7f", "<a>&'", "ü", "日本語", "😀", "\u2028\u2029", "\ufeff",
	`{"version":1}`, `orders\.(eu|us)`, `debug_.*|"x/y`, `\d+\s*\bx\b`, `[^"\\/]+`, "%2F", "a/b", "..", "fe80::1%eth0", strings.Repeat("ü", 300),
	"null", "-1", "1e5", "9223372036854775807",
}

// All that we write under a path that 0.8.2 knows can be read by its rules.
func TestRecordsAreReadBy082(t *testing.T) {
	const most = math.MaxInt32
	for _, name := range hostile {
		for _, c := range []struct {
			kind      string
			rec, want any
		}{
			{"broker", BrokerRecord{Version: 1, Host: name, Port: 65535, JMXPort: -1, Timestamp: "1796009568591"}, BrokerRecord{Host: name, Port: 65535}},
			{"topic", TopicRecord{Version: 1, Partitions: map[int32][]int32{0: {1, 2}, most: {most}}, Home: map[int32]int32{0: 1, most: most}, TopicID: name},
				TopicRecord{Partitions: map[int32][]int32{0: {1, 2}, most: {most}}}},
			{"state", PartitionState{Version: 1, Leader: -1, LeaderEpoch: most, ISR: []int32{1, most}, ControllerEpoch: most},
				PartitionState{Leader: -1, LeaderEpoch: most, ISR: []int32{1, most}, ControllerEpoch: most}},
			{"config", TopicConfig{Version: 1, Config: map[string]string{name: name, "retention.ms": "9223372036854775807"}},
				TopicConfig{Version: 1, Config: map[string]string{name: name, "retention.ms": "9223372036854775807"}}},
			{"consumer", ConsumerRecord{Version: 1, Subscription: map[string]int32{name: MaxStreams, "t": 1}, Pattern: PatternWhiteList, Timestamp: "1796009634961",
				Strategy: []string{name, "range"}}, ConsumerRecord{Subscription: map[string]int32{name: MaxStreams, "t": 1}, Pattern: PatternWhiteList}},
			{"consumer", ConsumerRecord{Version: 1, Subscription: map[string]int32{}, Pattern: PatternStatic, Timestamp: "1"},
				ConsumerRecord{Subscription: map[string]int32{}, Pattern: PatternStatic}},
			{"deletion", TopicDeletion{Version: 1, TopicID: name, KeepOffsets: true}, nil}, // its key is all that is looked at
		} {
			value, err := Encode(c.rec)
			if err != nil {
				t.Fatal(err)
			}
			if got, err := as082(c.kind, value); err != nil || !reflect.DeepEqual(got, c.want) {
				t.Errorf("%s: 0.8.2 reads %+v, %v; want %+v", value, got, err, c.want)
			}
		}
	}
}

// Offsets, counts and owners are plain text, and a key is one path element whatever the name.
func TestPlainRecordsAreReadBy082(t *testing.T) {
	for _, n := range []int64{0, 42, math.MaxInt32 + 1, math.MaxInt64} {
		if got, err := strconv.ParseInt(string(FormatOffset(n)), 10, 64); err != nil || got != n { // Java's toLong
			t.Errorf("offset %d is read as %d, %v", n, got, err)
		}
	}
	for _, name := range hostile {
		for _, key := range []string{Root("").Group(name).ID(name), Root("").Group(name).Owner(Partition{Topic: name, Home: 1, Number: 3})} {
			parts := strings.Split(key, "/")
			if n := map[string]int{"ids": 5, "owners": 6}[parts[3]]; len(parts) != n || slices.Contains(parts[1:], "") ||
				slices.Contains(parts, ".") || slices.Contains(parts, "..") || strings.ContainsFunc(key, func(r rune) bool { return r <= ' ' || r > '~' }) {
				t.Errorf("%q has the key %q", name, key)
			}
		}
	}
}

// Whatever text is in a subscription, 0.8.2 and we read the same.
func FuzzConsumer082(f *testing.F) {
	for i, s := range hostile {
		f.Add(s, hostile[(i+1)%len(hostile)], int32(i+1))
	}
	f.Fuzz(func(t *testing.T, topic, pattern string, streams int32) {
		if !utf8.ValidString(topic) || !utf8.ValidString(pattern) {
			return // a pattern is UTF-8, or it is refused when it is compiled
		}
		rec := ConsumerRecord{Version: 1, Subscription: map[string]int32{topic: streams}, Pattern: pattern, Timestamp: "1"}
		value, err := Encode(rec)
		if err != nil {
			t.Fatal(err)
		}
		theirs, err := as082("consumer", value)
		if err != nil {
			t.Fatalf("%s: %v", value, err)
		}
		if got := theirs.(ConsumerRecord); got.Pattern != pattern || !maps.Equal(got.Subscription, rec.Subscription) {
			t.Fatalf("%s: 0.8.2 reads %+v", value, got)
		}
		ours, err := ParseConsumer(KV{Key: "/consumers/g/ids/c", Value: value})
		if bad := pattern == "" || streams < 1 || streams > MaxStreams; bad != errors.Is(err, ErrRecord) || !bad && !reflect.DeepEqual(ours, rec) {
			t.Fatalf("%s: we read %+v, %v", value, ours, err)
		}
	})
}
