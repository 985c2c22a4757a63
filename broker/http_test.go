package broker_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/broker"
	"github.com/muster-io/muster/internal/freeport"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/etcd"
)

func withHTTP(t *testing.T, change ...func(*broker.Config)) broker.Config {
	cfg := config(t, t.TempDir())
	cfg.HTTP = "127.0.0.1:0"
	for _, c := range change {
		c(&cfg)
	}
	return cfg
}

// get reads a page; status 0 if nobody answers.
func get(t *testing.T, address, path, accept string) (status int, body string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+path, nil)
	must(t, err)
	req.Header.Set("Accept", accept)
	req.Close = true
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer res.Body.Close()
	data, err := io.ReadAll(res.Body)
	must(t, err)
	return res.StatusCode, string(data)
}

// probed waits until a probe answers with a status and says something.
func probed(t *testing.T, address, path string, status int, says string) {
	t.Helper()
	eventually(t, func() string {
		if got, body := get(t, address, path, ""); got != status || !strings.Contains(body, says) {
			return fmt.Sprintf("%s: %d %q, want %d with %q", path, got, body, status, says)
		}
		return ""
	})
}

// sample reads one value; NaN is no value that we have, so ok is enough.
func sample(t *testing.T, address, series string) (value float64, ok bool) {
	t.Helper()
	status, body := get(t, address, "/metrics", "")
	if status != http.StatusOK {
		t.Fatalf("/metrics: %d %s", status, body)
	}
	for line := range strings.Lines(body) {
		if rest, found := strings.CutPrefix(line, series+" "); found {
			value, err := strconv.ParseFloat(strings.TrimSpace(rest), 64)
			must(t, err)
			return value, true
		}
	}
	return 0, false
}

// showing waits until a daemon shows all of these values at once.
func showing(t *testing.T, address string, want map[string]float64) {
	t.Helper()
	eventually(t, func() string {
		for series, value := range want {
			if got, ok := sample(t, address, series); got != value || !ok {
				return fmt.Sprintf("%s is %v, want %v", series, got, value)
			}
		}
		return ""
	})
}

func TestProbes(t *testing.T) {
	d := start(t, withHTTP(t))
	at := d.HTTPAddress()
	for path, want := range map[string]string{
		"/":                "muster broker 1: /metrics /healthz /readyz\n",
		"/healthz":         "healthy\n",
		"/readyz":          "ready\n",
		"/readyz?verbose":  "ready\nok     phase: serving\nok     session: ",
		"/healthz?verbose": "healthy\nok     phase: serving\nok     loop membership: ",
	} {
		if status, body := get(t, at, path, ""); status != http.StatusOK || !strings.HasPrefix(body, want) {
			t.Errorf("%s: %d %q", path, status, body)
		}
	}
	var answer struct {
		Ready  bool
		Checks []broker.Check
	}
	_, body := get(t, at, "/readyz", "application/json")
	must(t, json.Unmarshal([]byte(body), &answer))
	var names []string
	for _, c := range answer.Checks {
		names = append(names, c.Name)
		if !c.OK || c.Reason == "" {
			t.Errorf("%+v", c)
		}
	}
	if want := []string{"phase", "session", "registration", "view", "listener"}; !answer.Ready || !slices.Equal(names, want) {
		t.Errorf("%s", body)
	}
	res, err := http.Post("http://"+at+"/readyz", "text/plain", nil)
	must(t, err)
	must(t, res.Body.Close())
	if res.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("POST: %s", res.Status)
	}
	if _, body := get(t, at, "/metrics", ""); !strings.Contains(body, "\netcd_server_has_leader 1\n") {
		t.Error("metrics of the embedded etcd are missing")
	}
	plain := start(t, withHTTP(t, func(c *broker.Config) {
		c.HTTP, c.ID, c.Etcd.Endpoints = "", 2, d.EtcdEndpoints()
	}))
	if got := plain.HTTPAddress(); got != "" {
		t.Errorf("serves at %s without being asked", got)
	}
	if got := startError(t, withHTTP(t, func(c *broker.Config) { c.HTTP = at })); got != at+" is in use: stop what listens there, or choose another --http" {
		t.Error(got)
	}
	if got := startError(t, withHTTP(t, func(c *broker.Config) { c.HTTP = "nowhere:port" })); !strings.Contains(got, "--http") {
		t.Error(got)
	}
}

// lockedBuffer is a log that can be read while it is written.
type lockedBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// The log says that the page is open to the network, and where the start went.
func TestStartIsLogged(t *testing.T) {
	var log lockedBuffer
	d := start(t, withHTTP(t, func(c *broker.Config) {
		c.HTTP, c.Logger = "0.0.0.0:0", slog.New(slog.NewTextHandler(&log, nil))
	}))
	for _, want := range []string{"to the network", "msg=ready", " took=", " etcd=", " topics="} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("the log does not say %q: %s", want, log.String())
		}
	}
	_, port, err := net.SplitHostPort(d.HTTPAddress())
	must(t, err)
	if s, ok := sample(t, "127.0.0.1:"+port, `muster_start_seconds{step="etcd"}`); s <= 0 || !ok {
		t.Errorf("the start of etcd took %v s", s)
	}
}

// A lease revoked by hand is made up for at once; a daemon whose record another has
// taken is not ready until that is gone. Neither is a reason to restart it.
func TestReadinessFollowsTheRegistration(t *testing.T) {
	d := start(t, withHTTP(t))
	at, st := d.HTTPAddress(), openStore(t, d)
	if n, ok := sample(t, at, `muster_sessions_lost_total{reason="lease_gone"}`); n != 0 || !ok {
		t.Errorf("%v losses before the first", n)
	}
	must(t, st.Revoke(t.Context(), keys(t, st, "/brokers/ids/")["/brokers/ids/1"].Lease))
	eventually(t, func() string {
		if n, _ := sample(t, at, `muster_registrations_total{outcome="registered"}`); n != 2 {
			return fmt.Sprintf("registered %v times", n)
		}
		return ""
	})
	probed(t, at, "/readyz", http.StatusOK, "ready")
	const other = `{"version":1,"host":"other","port":9092,"jmx_port":-1,"timestamp":"1"}`
	write := func(op registry.Op) {
		t.Helper()
		_, err := st.Txn(t.Context(), registry.Txn{Then: []registry.Op{op}})
		must(t, err)
	}
	write(registry.Put("/brokers/ids/1", []byte(other), 0))
	probed(t, at, "/readyz", http.StatusServiceUnavailable, "not ready: ")
	if n, _ := sample(t, at, "muster_ready"); n != 0 {
		t.Error("muster_ready is", n)
	}
	probed(t, at, "/healthz", http.StatusOK, "healthy")
	eventually(t, func() string {
		if n, _ := sample(t, at, `muster_registrations_total{outcome="held"}`); n != 1 {
			return fmt.Sprintf("%v times held by another", n)
		}
		return ""
	})
	write(registry.Delete("/brokers/ids/1"))
	probed(t, at, "/readyz", http.StatusOK, "ready")
	showing(t, at, map[string]float64{ // a registration is counted a moment after it stands
		`muster_sessions_lost_total{reason="lease_gone"}`:        1,
		`muster_sessions_lost_total{reason="abandoned"}`:         1,
		`muster_registrations_total{outcome="registered"}`:       3,
		`muster_session_ttl_seconds`:                             sessionTimeout.Seconds(),
		`muster_ready`:                                           1,
		`muster_store_calls_total{call="grant",result="ok"}`:     3,
		`muster_sessions_lost_total{reason="deadline"}`:          0,
		`muster_registrations_total{outcome="held"}`:             1,
		`muster_store_calls_total{call="watch",result="ok"}`:     0,
		`muster_brokers`:                                         1,
		`muster_store_call_duration_seconds_count{call="grant"}`: 3,
	})
	if n, _ := sample(t, at, "muster_session_remaining_seconds"); n <= 0 || n > sessionTimeout.Seconds() {
		t.Errorf("session has %v s left", n)
	}
}

// Without etcd the daemon is not ready, within the deadline of its session, but as
// healthy as before; while it stops it says that.
func TestReadinessWithoutEtcd(t *testing.T) {
	outer := start(t, config(t, t.TempDir()))
	d := start(t, withHTTP(t, func(c *broker.Config) {
		c.ID, c.Etcd, c.SessionTimeout = 2, etcd.Options{Endpoints: outer.EtcdEndpoints()}, 12*time.Second
	}))
	at := d.HTTPAddress()
	if _, body := get(t, at, "/metrics", ""); strings.Contains(body, "\netcd_") {
		t.Error("shows metrics of an etcd that is not its own")
	}
	probed(t, at, "/readyz", http.StatusOK, "ready")
	must(t, outer.Close())
	gone := time.Now()
	probed(t, at, "/readyz", http.StatusServiceUnavailable, "not ready: ")
	if took := time.Since(gone); took > 12*time.Second {
		t.Errorf("not ready only after %s", took)
	}
	probed(t, at, "/readyz", http.StatusServiceUnavailable, "session: lost")
	if status, body := get(t, at, "/healthz", ""); status != http.StatusOK {
		t.Errorf("/healthz: %d %s", status, body)
	}
	eventually(t, func() string {
		if n, _ := sample(t, at, `muster_registrations_total{outcome="failed"}`); n == 0 {
			return "no failed registration"
		}
		return ""
	})
	closed := make(chan error, 1)
	go func() { closed <- d.Close() }() // it tries in vain to take its keys along
	eventually(t, func() string {       // one after the other, for it does not try for long
		if status, body := get(t, at, "/readyz", ""); status != http.StatusServiceUnavailable || !strings.Contains(body, "not ready: phase: stopping") {
			return fmt.Sprintf("/readyz: %d %s", status, body)
		}
		if status, body := get(t, at, "/healthz", ""); status != http.StatusOK {
			return fmt.Sprintf("/healthz: %d %s", status, body)
		}
		return ""
	})
	<-closed
	if status, body := get(t, at, "/readyz", ""); status != 0 {
		t.Errorf("still answers: %d %s", status, body)
	}
}

// Probes are answered before there is anything to serve.
func TestReadinessWhileStarting(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0") // takes connections, and says nothing
	must(t, err)
	defer silent.Close()
	cfg := withHTTP(t, func(c *broker.Config) {
		c.HTTP = freeport.Must()
		c.Etcd = etcd.Options{Endpoints: []string{"http://" + silent.Addr().String()}, DialTimeout: patience}
	})
	ctx, cancel := context.WithCancel(t.Context())
	started := make(chan error, 1)
	go func() {
		_, err := broker.Start(ctx, cfg)
		started <- err
	}()
	probed(t, cfg.HTTP, "/readyz", http.StatusServiceUnavailable, "not ready: phase: starting: connect, for ")
	if status, body := get(t, cfg.HTTP, "/healthz", ""); status != http.StatusOK {
		t.Errorf("/healthz: %d %s", status, body)
	}
	if n, ok := sample(t, cfg.HTTP, "muster_ready"); n != 0 || !ok {
		t.Errorf("muster_ready is %v", n)
	}
	cancel()
	if err := <-started; err == nil {
		t.Error("started without etcd")
	}
}

// documented reads the tables of docs/metrics.md: name -> type and labels.
func documented(t *testing.T) map[string]string {
	t.Helper()
	page, err := os.ReadFile("../docs/metrics.md")
	must(t, err)
	all := map[string]string{}
	row := regexp.MustCompile("(?m)^\\| `(muster_[a-z_]+)` \\| ([a-z]+) \\|([^|]*)\\|")
	for _, m := range row.FindAllStringSubmatch(string(page), -1) {
		if strings.HasPrefix(m[1], "muster_member_") {
			continue // of other processes: package membership looks after these
		}
		labels := strings.FieldsFunc(m[3], func(r rune) bool { return r == ',' || r == ' ' || r == '`' })
		if _, twice := all[m[1]]; twice {
			t.Errorf("%s stands twice on the page", m[1])
		}
		slices.Sort(labels)
		all[m[1]] = fmt.Sprint(m[2], labels)
	}
	return all
}

// exposed reads the same from what a daemon shows.
func exposed(page string) map[string]string {
	all := map[string]string{}
	label := regexp.MustCompile(`([a-z_]+)="`)
	for _, m := range regexp.MustCompile(`(?m)^# TYPE (muster_[a-z_]+) ([a-z]+)\n([^{ ]+)({[^}]*})?`).FindAllStringSubmatch(page, -1) {
		var labels []string
		for _, l := range label.FindAllStringSubmatch(m[4], -1) {
			if l[1] != "le" {
				labels = append(labels, l[1])
			}
		}
		slices.Sort(labels)
		all[m[1]] = fmt.Sprint(m[2], labels)
	}
	return all
}

// The page on metrics and a daemon at work agree, name by name.
func TestMetricsAreDocumented(t *testing.T) {
	d := start(t, withHTTP(t))
	k := newClient(t, d, kgo.AllowAutoTopicCreation(), kgo.DefaultProduceTopic("t"))
	must(t, k.ProduceSync(t.Context(), kgo.StringRecord("a")).FirstErr())
	askInVain(t, k)
	st := openStore(t, d)
	lease, err := st.Grant(t.Context(), registry.MaxTTL)
	must(t, err)
	_, err = st.Txn(t.Context(), registry.Txn{Then: []registry.Op{
		registry.Put(registry.Root("").Group("idle").Offset(registry.Partition{Topic: "t", Home: 1}), []byte("0"), 0),
		registry.Put(registry.Root("").Group("g").ID("c"),
			[]byte(`{"version":1,"subscription":{"t":1},"pattern":"static","timestamp":"1","strategy":["range"]}`), lease.ID)}})
	must(t, err)
	eventually(t, func() string {
		for series, want := range map[string]float64{`muster_group_members{group="g"}`: 1, `muster_group_partitions_ownerless{group="g"}`: 2} {
			if n, ok := sample(t, d.HTTPAddress(), series); n != want || !ok {
				return fmt.Sprintf("%s is %v, want %v", series, n, want)
			}
		}
		return ""
	})
	status, page := get(t, d.HTTPAddress(), "/metrics", "")
	if status != http.StatusOK {
		t.Fatal(page)
	}
	if strings.Contains(page, `group="idle"`) {
		t.Error("a group of which there are only offsets is shown")
	}
	docs, shown := documented(t), exposed(page)
	for name, what := range docs {
		if shown[name] != what {
			t.Errorf("documented: %s %s; shown: %q", name, what, shown[name])
		}
	}
	for name, what := range shown {
		if docs[name] == "" {
			t.Errorf("shown, but not documented: %s %s", name, what)
		}
	}
	text, err := os.ReadFile("../docs/metrics.md")
	must(t, err)
	for _, m := range regexp.MustCompile(`(?m)^muster_.*\b((?:step|call|result|reason|outcome)="([a-z_]+)")`).FindAllStringSubmatch(page, -1) {
		if !strings.Contains(string(text), "`"+m[2]+"`") {
			t.Errorf("%s is not documented", m[1])
		}
	}
}

// askInVain asks for a topic that is not there, which is answered with an error: whether
// there is one while a topic is made is a question of time.
func askInVain(t *testing.T, k *kgo.Client) {
	t.Helper()
	req := kmsg.NewPtrMetadataRequest()
	topic := kmsg.NewMetadataRequestTopic()
	topic.Topic = kmsg.StringPtr("none")
	req.Topics = append(req.Topics, topic)
	_, err := k.SeedBrokers()[0].Request(t.Context(), req)
	must(t, err)
}

// What clients do is counted by key, version and result.
func TestRequestsAreCounted(t *testing.T) {
	d := start(t, withHTTP(t))
	at := d.HTTPAddress()
	k := newClient(t, d, kgo.AllowAutoTopicCreation(), kgo.DefaultProduceTopic("t"), kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.ProducerBatchCompression(kgo.NoCompression()))
	for range 3 {
		must(t, k.ProduceSync(t.Context(), &kgo.Record{Partition: 1, Value: make([]byte, 1000)}).FirstErr())
	}
	bad, err := net.Dial("tcp", d.Address())
	must(t, err)
	_, err = bad.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
	must(t, err)
	_, _ = io.Copy(io.Discard, bad)
	must(t, bad.Close())
	askInVain(t, k)
	showing(t, at, map[string]float64{
		`muster_wire_frames_refused_total{reason="size"}`:                             1,
		`muster_log_appended_records_total`:                                           3,
		`muster_log_end_offset{partition="1",topic="t"}`:                              3,
		`muster_log_start_offset{partition="1",topic="t"}`:                            0,
		`muster_log_end_offset{partition="0",topic="t"}`:                              0,
		`muster_partitions_led`:                                                       2,
		`muster_partitions_open`:                                                      2,
		`muster_partitions_failed`:                                                    0,
		`muster_producer_id_blocks_total`:                                             1,
		`muster_wire_request_duration_seconds_count{api="Produce"}`:                   3,
		`muster_wire_errors_total{api="Metadata",error="UNKNOWN_TOPIC_OR_PARTITION"}`: 1,
	})
	for _, counted := range []string{ // an answer is counted a moment after it is sent
		`muster_wire_requests_total\{api="Produce",result="ok",version="\d+"\} 3\n`,
		`muster_wire_requests_total\{api="Metadata",result="error",version="\d+"\} [1-9]`,
	} {
		eventually(t, func() string {
			if _, page := get(t, at, "/metrics", ""); !regexp.MustCompile(counted).MatchString(page) {
				return "nothing is " + counted
			}
			return ""
		})
	}
	bytes, _ := sample(t, at, "muster_log_appended_bytes_total")
	if logged, _ := sample(t, at, `muster_log_size_bytes{partition="1",topic="t"}`); bytes < 3000 || bytes != logged {
		t.Errorf("%v bytes appended, %v in the log", bytes, logged)
	}
	eventually(t, func() string {
		if received, _ := sample(t, at, `muster_wire_received_bytes_total{api="Produce"}`); received <= bytes {
			return fmt.Sprintf("%v bytes received, %v appended", received, bytes)
		}
		return ""
	})
	k.Close()
	eventually(t, func() string {
		if n, ok := sample(t, at, "muster_wire_connections"); n != 0 || !ok {
			return fmt.Sprintf("%v connections after all have been closed", n)
		}
		return ""
	})
	if n, _ := sample(t, at, "muster_wire_connections_accepted_total"); n < 2 {
		t.Errorf("%v connections accepted", n)
	}
}
