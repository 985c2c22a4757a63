package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/muster-io/muster/rebalance/consumer"
	"github.com/muster-io/muster/registry"
)

// startWatch runs registry watch and returns its lines once it has begun, and
// what to call for its status when it has ended.
func startWatch(t *testing.T, ctx context.Context, args ...string) (lines <-chan string, ended func() int) {
	t.Helper()
	out, outWriter := io.Pipe()
	errOut, errWriter := io.Pipe()
	args = append([]string{"muster", "registry", "watch", "--etcd-endpoints", live.daemon.EtcdEndpoints()[0]}, args...)
	status := make(chan int, 1)
	go func() {
		status <- run(ctx, args, strings.NewReader(""), outWriter, errWriter)
		outWriter.Close()
		errWriter.Close()
	}()
	notices := bufio.NewScanner(errOut)
	if !notices.Scan() || !strings.HasPrefix(notices.Text(), "watching from revision ") {
		t.Fatalf("it begins with %q", notices.Text())
	}
	go func() {
		_, _ = io.Copy(io.Discard, errOut)
	}()
	ch := make(chan string, 100)
	go func() {
		defer close(ch)
		for s := bufio.NewScanner(out); s.Scan(); {
			ch <- s.Text()
		}
	}()
	return ch, func() int { return <-status }
}

// A consumer that comes and goes is told as it happens, in order, by who it is.
func TestWatch(t *testing.T) {
	st := openLive(t)
	var root registry.Root
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	if _, err := registry.CreateTopic(ctx, st, root, registry.TopicSpec{Name: "watched", Partitions: 2, ReplicationFactor: 1}, []int32{1}); err != nil {
		t.Fatal(err)
	}
	text, ended := startWatch(t, ctx, "--group", "watchers", "--count", "6")
	objects, endedToo := startWatch(t, ctx, "-o", "json", "--count", "4", "--topic", "watched", "/consumers/watchers")
	c, err := consumer.New(consumer.Config{Store: st, Group: "watchers", ID: "host-1:77", Topics: map[string]int32{"watched": 1}, SessionTimeout: registry.MaxTTL},
		func(context.Context, *consumer.Record) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	running, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- c.Run(running) }()
	var got []string
	for line := range text {
		_, rest, _ := strings.Cut(line, " rev=")
		_, rest, _ = strings.Cut(rest, " group=watchers ")
		rest, _, _ = strings.Cut(rest, " (lease")
		if got = append(got, rest); len(got) == 3 {
			stop()
		}
	}
	stop()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	want := `member=host-1:77 joined
topic=watched partition=1-0 claimed by host-1:77-0
topic=watched partition=1-1 claimed by host-1:77-0
topic=watched partition=1-0 released by host-1:77-0
topic=watched partition=1-1 released by host-1:77-0
member=host-1:77 left`
	slices.Sort(got[min(3, len(got)):max(min(3, len(got)), len(got)-1)]) // each partition is released when its handler is done
	if s := strings.Join(got, "\n"); s != want {
		t.Errorf("told\n%s\nwant\n%s", s, want)
	}
	n := 0
	for line := range objects {
		var o map[string]any
		if err := json.Unmarshal([]byte(line), &o); err != nil {
			t.Fatal(err)
		}
		kind := []string{"claimed", "released"}[n/2]
		if o["kind"] != kind || o["member"] != "host-1:77" || o["owner"] != "host-1:77-0" || o["topic"] != "watched" ||
			o["partition"] == nil || o["offset"] != nil || o["time"] == nil {
			t.Errorf("line %d: %s", n, line)
		}
		n++
	}
	if a, b := ended(), endedToo(); a != 0 || b != 0 || n != 4 {
		t.Errorf("statuses %d and %d, %d objects", a, b, n)
	}
}

// A signal ends the watch with status 0.
func TestWatchEndsOnSignal(t *testing.T) {
	openLive(t)
	ctx, cancel := context.WithCancel(t.Context())
	lines, ended := startWatch(t, ctx)
	cancel()
	for range lines {
	}
	if status := ended(); status != 0 {
		t.Error(status)
	}
}

func TestBrokers(t *testing.T) {
	st := openLive(t)
	root, err := registry.ParseRoot("/brokers-test")
	if err != nil {
		t.Fatal(err)
	}
	_, rec, err := registry.Root("").ParseBroker(liveBroker(t, st))
	if err != nil {
		t.Fatal(err)
	}
	session := keptAlive(t, st)
	plant(t, st, root.Broker(1), fmt.Sprintf(`{"version":1,"host":%q,"port":%d,"jmx_port":-1,"timestamp":"1796009568591"}`, rec.Host, rec.Port), session.Lease())
	plant(t, st, root.Broker(2), `{"version":1,"host":"127.0.0.1","port":1,"jmx_port":-1,"timestamp":""}`, 0)
	plant(t, st, root.Broker(3), `{"host":"half"}`, 0)
	plant(t, st, root.Topic("t"), `{"version":1,"partitions":{"0":[1],"1":[2,1],"2":[1,2]}}`, 0)
	plant(t, st, root.PartitionState("t", 2), `{"version":1,"leader":2,"leader_epoch":1,"isr":[2]}`, 0)
	cmd := func(args ...string) (int, string, string) {
		return ask(t, "", append(append([]string{"brokers"}, args...), "--registry-root", "/brokers-test")...)
	}
	status, out, stderr := cmd("list", "-o", "json")
	list := parse[[]map[string]any](t, out)
	// The live one has 3 s for its answer, which on a busy machine may not be enough.
	for deadline := time.Now().Add(30 * time.Second); status == 0 && list[0]["answers"] == false && time.Now().Before(deadline); {
		status, out, stderr = cmd("list", "-o", "json")
		list = parse[[]map[string]any](t, out)
	}
	if status != 0 || len(list) != 2 || !strings.Contains(stderr, "/brokers/ids/3") {
		t.Fatalf("status %d, %s, %s", status, out, stderr)
	}
	for i, want := range []string{"1 true 1 3 1", "2 false 2 2 1"} {
		b := list[i]
		if got := fmt.Sprintf("%v %v %v %v %v", b["broker"], b["answers"], b["leads"], b["replicas"], b["topics"]); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	if list[0]["lease"] == nil || list[0]["lease_seconds"] == nil || list[0]["registered"] == nil || list[0]["trouble"] != nil {
		t.Errorf("%v", list[0])
	}
	if list[1]["lease"] != nil || list[1]["lease_seconds"] != nil || list[1]["registered"] != nil || list[1]["trouble"] == nil {
		t.Errorf("%v", list[1])
	}
	status, out, _ = cmd("describe", "2", "-o", "json")
	d := parse[struct {
		Partitions []struct{ Leads, Replicas []int32 }
	}](t, out)
	if got := fmt.Sprint(d.Partitions); status != 0 || got != "[{[1 2] [1 2]}]" {
		t.Error(got)
	}
	if status, out, _ = cmd("describe", "2"); status != 0 || !strings.Contains(out, "does not answer") || !strings.Contains(out, "1-2") {
		t.Error(out)
	}
	for args, want := range map[string]int{"describe 9": 1, "describe x": 2, "describe": 2, "list x": 2} {
		if status, _, _ := cmd(strings.Fields(args)...); status != want {
			t.Errorf("%s: status %d", args, status)
		}
	}
}

func liveBroker(t *testing.T, st registry.Store) registry.KV {
	t.Helper()
	kv, _, err := registry.GetKey(t.Context(), st, registry.Root("").Broker(1))
	if err != nil || kv == nil {
		t.Fatal("the live daemon is not registered: ", err)
	}
	return *kv
}

func TestRanges(t *testing.T) {
	for want, list := range map[string][]int32{"": nil, "3": {3}, "0-2,4,6-7": {0, 1, 2, 4, 6, 7}} {
		if got := ranges(list); got != want {
			t.Errorf("%v: %q", list, got)
		}
	}
}
