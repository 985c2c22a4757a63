package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/rebalance/consumer"
	"github.com/muster-io/muster/registry"
)

// stage is a root of its own on the live registry, with a group that a test sets up
// key by key.
type stage struct {
	t     *testing.T
	st    registry.Store
	root  registry.Root
	paths registry.GroupPaths
	lease registry.LeaseID // that all members share
}

func newStage(t *testing.T, path string) *stage {
	t.Helper()
	st := openLive(t)
	root, err := registry.ParseRoot(path)
	if err != nil {
		t.Fatal(err)
	}
	clearAfter(t, st, root.Prefix())
	return &stage{t, st, root, root.Group("g"), keptAlive(t, st).Lease()}
}

// clearAfter takes away what a test leaves behind, so that it can be run again.
func clearAfter(t *testing.T, st registry.Store, prefix string) {
	t.Cleanup(func() {
		op := registry.Op{Kind: registry.OpDelete, Key: prefix, Prefix: true}
		if _, err := st.Txn(context.Background(), registry.Txn{Then: []registry.Op{op}}); err != nil {
			t.Error(err)
		}
	})
}

func (s *stage) topic(name string, partitions int) {
	var list []string
	for p := range partitions {
		list = append(list, fmt.Sprintf(`"%d":[1]`, p))
	}
	plant(s.t, s.st, s.root.Topic(name), `{"version":1,"partitions":{`+strings.Join(list, ",")+`}}`, 0)
}

func (s *stage) member(id, strategy, subscription string) {
	plant(s.t, s.st, s.paths.ID(id), fmt.Sprintf(`{"version":1,"subscription":%s,"pattern":"static","timestamp":"%d","strategy":[%q]}`,
		subscription, time.Now().Add(-90*time.Second).UnixMilli(), strategy), s.lease)
}

func (s *stage) partition(topic string, number int32) registry.Partition {
	return registry.Partition{Topic: topic, Home: 1, Number: number}
}

func (s *stage) own(id, topic string, numbers ...int32) {
	for _, n := range numbers {
		plant(s.t, s.st, s.paths.Owner(s.partition(topic, n)), rebalance.ThreadID(id, 0), s.lease)
	}
}

func (s *stage) disown(topic string, number int32) {
	s.t.Helper()
	if _, err := s.st.Txn(s.t.Context(), registry.Txn{Then: []registry.Op{registry.Delete(s.paths.Owner(s.partition(topic, number)))}}); err != nil {
		s.t.Fatal(err)
	}
}

// moved is a transaction by which a member claims or releases, with its entry of the
// history.
func (s *stage) moved(action, id, topic string, at time.Time, reason string, numbers ...int32) {
	s.t.Helper()
	rec := registry.HistoryRecord{Version: 1, Time: fmt.Sprint(at.UnixMilli()), Member: id, Action: action,
		Partitions: map[string][]string{}, Reason: reason, Strategy: "range", Snapshot: 1}
	var txn registry.Txn
	for _, n := range numbers {
		p := s.partition(topic, n)
		rec.Partitions[topic] = append(rec.Partitions[topic], p.Name())
		op := registry.Delete(s.paths.Owner(p))
		if action == registry.ActionClaimed {
			op = registry.Put(s.paths.Owner(p), []byte(rebalance.ThreadID(id, 0)), s.lease)
		}
		txn.Then = append(txn.Then, op)
	}
	value, err := registry.Encode(rec)
	if err != nil {
		s.t.Fatal(err)
	}
	txn.Then = append(txn.Then, registry.Put(s.paths.HistoryEntry(at.UnixMilli(), id, uint64(numbers[0])), value, 0))
	if _, err := s.st.Txn(s.t.Context(), txn); err != nil {
		s.t.Fatal(err)
	}
}

func (s *stage) claimed(id, topic string, at time.Time, reason string, numbers ...int32) {
	s.t.Helper()
	s.moved(registry.ActionClaimed, id, topic, at, reason, numbers...)
}

func (s *stage) released(id, topic string, at time.Time, reason string, numbers ...int32) {
	s.t.Helper()
	s.moved(registry.ActionReleased, id, topic, at, reason, numbers...)
}

func (s *stage) groups(args ...string) (status int, stdout, stderr string) {
	s.t.Helper()
	return ask(s.t, "", append(append([]string{"groups"}, args...), "--registry-root", string(s.root))...)
}

// Field case 08 (b): of 38 members 16 own a partition each, and 22 own none. All of
// them are healthy.
func TestCase08(t *testing.T) {
	s := newStage(t, "/groups-case08")
	s.topic("t", 16)
	for i := range 38 {
		id := fmt.Sprintf("c%02d", i)
		s.member(id, "range", `{"t":1}`)
		if i < 16 {
			s.own(id, "t", int32(i))
		}
	}
	status, out, stderr := s.groups("describe", "g")
	if status != 0 || stderr != "" {
		t.Fatal(status, stderr)
	}
	if first, _, _ := strings.Cut(out, "\n"); first != "group g, 38 members, strategy range, stable" {
		t.Error(first)
	}
	if strings.Contains(out, "ownerless") || strings.Contains(out, "moving") {
		t.Error(out)
	}
	status, out, _ = s.groups("describe", "g", "-o", "json")
	d := parse[struct {
		State   string
		Members []struct{ Owns, Due int }
	}](t, out)
	idle := 0
	for _, m := range d.Members {
		if m.Owns == 0 && m.Due == 0 {
			idle++
		}
	}
	if status != 0 || d.State != "stable" || idle != 22 {
		t.Errorf("state %s, %d idle", d.State, idle)
	}
	if status, out, stderr := s.groups("verify", "g"); status != 0 || out != "Rebalance operation successful !\n" || stderr != "" {
		t.Error(status, out, stderr)
	}
}

// What is printed has the words of what 0.8.2.2 printed, in testdata: scripts look for
// them. (There it printed the reasons of a group that was in order.)
func TestVerifySpeaksAs082(t *testing.T) {
	data, err := os.ReadFile("testdata/verify-0.8.2.2.json")
	if err != nil {
		t.Fatal(err)
	}
	facts := map[string]struct{ Name, Stdout, Stderr string }{}
	for _, f := range parse[[]struct{ Name, Stdout, Stderr string }](t, string(data)) {
		facts[f.Name[strings.LastIndex(f.Name, ": ")+2:]] = f
	}
	s := newStage(t, "/groups-verify-082")
	s.paths = s.root.Group("gm")
	s.topic("fa", 4)
	plant(t, s.st, s.paths.Offset(s.partition("fa", 0)), "4", 0)
	if _, out, _ := s.groups("verify", "gm"); out != facts["no members"].Stdout || out == "" {
		t.Errorf("without members: %q, 0.8.2.2 %q", out, facts["no members"].Stdout)
	}
	var ours []string
	look := func() {
		t.Helper()
		_, out, stderr := s.groups("verify", "gm")
		if out != facts["healthy group"].Stdout {
			t.Errorf("%q, 0.8.2.2 %q", out, facts["healthy group"].Stdout)
		}
		ours = append(ours, strings.Split(stderr, "\n")...)
	}
	s.member("gm_c0", "range", `{"fa":1}`)
	s.own("gm_c0", "fa", 3)
	look()
	for n := range int32(2) {
		plant(t, s.st, s.paths.Owner(s.partition("fa", n)), "gm_c1-0", s.lease)
	}
	look()
	theirs := regexp.MustCompile(`(?m) ERROR (.*) \(kafka\.tools`).FindAllStringSubmatch(facts["healthy group"].Stderr, -1)
	if len(theirs) != 5 {
		t.Errorf("%d lines of 0.8.2.2", len(theirs))
	}
	for _, m := range theirs {
		if !slices.Contains(ours, m[1]) {
			t.Errorf("0.8.2.2 said %q; we say\n%s", m[1], strings.Join(ours, "\n"))
		}
	}
}

// The line that 0.8.2's tool wrote on stdout and its reasons on stderr, but true.
func TestVerify(t *testing.T) {
	s := newStage(t, "/groups-verify")
	s.topic("fa", 2)
	plant(t, s.st, s.paths.Offset(s.partition("fa", 0)), "4", 0)
	if status, out, stderr := s.groups("verify", "g"); status != 0 || out != "Rebalance operation successful !\n" || stderr != "group g has no members\n" {
		t.Error(status, out, stderr)
	}
	s.member("gm_c1", "range", `{"fa":1}`)
	s.own("gm_c1", "fa", 0)
	plant(t, s.st, s.paths.Owner(s.partition("fa", 1)), "gm_c2-0", s.lease)
	const notes = "Owner gm_c2-0 for partition [fa,1] is not a valid member of consumer group g\nmuster: group g is not in order, for 1 reasons\n"
	if status, out, stderr := s.groups("verify", "g"); status != 1 || out != "Rebalance operation failed !\n" || stderr != notes {
		t.Error(status, out, stderr)
	}
	status, out, _ := s.groups("verify", "g", "-o", "json", "--wait", "4s")
	if v := parse[struct {
		Right   bool
		Reasons []string
	}](t, out); status != 1 || v.Right || len(v.Reasons) != 1 {
		t.Error(status, out)
	}
	done := make(chan string, 1)
	go func() {
		status, out, stderr := s.groups("verify", "g", "--wait", "30s")
		done <- fmt.Sprint(status, " ", out, stderr)
	}()
	s.disown("fa", 1)
	s.own("gm_c1", "fa", 1)
	if got := <-done; got != "0 Rebalance operation successful !\n" {
		t.Error(got)
	}
	if status, _, stderr := s.groups("verify", "nosuch"); status != 1 || !strings.Contains(stderr, "group not found: nosuch") {
		t.Error(status, stderr)
	}
	if status, _, stderr := s.groups("verify", "nosuch", "--wait", "4s"); status != 1 || !strings.Contains(stderr, "Consumer group nosuch has no members") {
		t.Error(status, stderr)
	}
}

// What roundrobin refuses is said with why, by every tool.
func TestRefusedGroup(t *testing.T) {
	s := newStage(t, "/groups-refused")
	s.topic("t", 2)
	s.topic("u", 1)
	s.member("a", "roundrobin", `{"t":1}`)
	s.own("a", "t", 0, 1)
	s.member("b", "roundrobin", `{"t":1,"u":1}`)
	_, out, _ := s.groups("describe", "g")
	for _, want := range []string{"strategy roundrobin, refused\n", "refused: roundrobin needs",
		"ownerless: u/0: the group cannot be divided; no owner before is known\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	if status, _, stderr := s.groups("verify", "g"); status != 1 || !strings.Contains(stderr, "Consumer group g cannot be divided: roundrobin needs") {
		t.Error(status, stderr)
	}
	if status, out, _ := s.groups("plan", "g"); status != 0 || !strings.HasPrefix(out, "group g, strategy roundrobin: refused, nothing would move: roundrobin needs") {
		t.Error(status, out)
	}
	if status, out, _ := s.groups("plan", "g", "--without", "b"); status != 0 || !strings.HasPrefix(out, "group g, strategy roundrobin: 0 of 2 partitions would move\n") {
		t.Error(status, out)
	}
}

func TestPlan(t *testing.T) {
	s := newStage(t, "/groups-plan")
	s.topic("t", 4)
	for i, id := range []string{"host-1:7", "host-2:8"} {
		s.member(id, "range", `{"t":1}`)
		s.own(id, "t", int32(2*i), int32(2*i+1))
	}
	for args, want := range map[string]string{
		"g": "group g, strategy range: 0 of 4 partitions would move\nMEMBER    BEFORE  AFTER\nhost-1:7  2       2\nhost-2:8  2       2\n",
		"g --without host-1": `group g, strategy range: 2 of 4 partitions would move
TOPIC  PARTITION  BROKER  FROM        TO
t      0          1       host-1:7-0  host-2:8-0
t      1          1       host-1:7-0  host-2:8-0

MEMBER    BEFORE  AFTER
host-1:7  2       -
host-2:8  2       4
`,
		"g --add 2": `group g, strategy range: 2 of 4 partitions would move
TOPIC  PARTITION  BROKER  FROM        TO
t      1          1       host-1:7-0  host-2:8-0
t      2          1       host-2:8-0  new-1-0
t      3          1       host-2:8-0  new-2-0

MEMBER    BEFORE  AFTER
host-1:7  2       1
host-2:8  2       1
new-1     -       1
new-2     -       1
`,
	} {
		want = strings.Replace(want, "2 of 4 partitions would move\nTOPIC  PARTITION  BROKER  FROM        TO\nt      1 ", "3 of 4 partitions would move\nTOPIC  PARTITION  BROKER  FROM        TO\nt      1 ", 1)
		status, out, stderr := s.groups(append([]string{"plan"}, strings.Fields(args)...)...)
		if status != 0 || out != want || strings.Contains(args, "--add") != strings.Contains(stderr, "the order of ids decides") {
			t.Errorf("%s: status %d\n%s\nwant\n%s\n%s", args, status, out, want, stderr)
		}
	}
	for args, says := range map[string]string{
		"g --without host":  "more than one member begins with \"host\": host-1:7, host-2:8",
		"g --without x":     "no such member: \"x\"",
		"g --add -1":        "--add -1",
		"g --strategy best": "--strategy \"best\" is not known",
		"":                  "want one argument, the group's name",
	} {
		if status, _, stderr := s.groups(append([]string{"plan"}, strings.Fields(args)...)...); status != 2 || !strings.Contains(stderr, says) {
			t.Errorf("%s: status %d, %s", args, status, stderr)
		}
	}
}

func TestHistory(t *testing.T) {
	s := newStage(t, "/groups-history")
	s.topic("t", 2)
	s.member("a", "range", `{"t":1}`)
	at := time.Now().Add(-time.Hour)
	s.claimed("dead", "t", at, "joined", 1)
	s.disown("t", 1)
	s.claimed("a", "t", at.Add(time.Minute), "joined", 0)
	s.claimed("a", "t", at.Add(30*time.Minute), "member dead left", 1)
	lines := func(args ...string) []string {
		t.Helper()
		status, out, stderr := s.groups(append([]string{"history", "g"}, args...)...)
		if status != 0 || stderr != "" {
			t.Fatal(status, stderr)
		}
		var list []string
		for _, line := range strings.Split(strings.TrimSpace(out), "\n")[1:] {
			f := strings.Fields(line)
			list = append(list, strings.Join(f[2:], " "))
		}
		return list
	}
	const ended = "dead ended t/1 its session ended, or the owner key was deleted; nobody released it"
	for args, want := range map[string]string{
		"":                                       "dead claimed t/1 joined|a claimed t/0 joined|" + ended + "|a claimed t/1 member dead left",
		"--partition t/0":                        "a claimed t/0 joined",
		"--partition t/1-0":                      "a claimed t/0 joined",
		"--limit 1":                              "a claimed t/1 member dead left",
		"--since 40m":                            "a claimed t/1 member dead left",
		"--partition u":                          "",
		"--since 2020-01-01T00:00:00Z --limit 2": ended + "|a claimed t/1 member dead left",
	} {
		if got := strings.Join(lines(strings.Fields(args)...), "|"); got != want {
			t.Errorf("%s:\n%s\nwant\n%s", args, got, want)
		}
	}
	status, out, _ := s.groups("history", "g", "-o", "json", "--limit", "2")
	list := parse[[]map[string]any](t, out)
	if status != 0 || len(list) != 2 || list[0]["time"] != nil || list[0]["action"] != "ended" || list[1]["time"] == nil || list[1]["snapshot"] != 1.0 {
		t.Error(out)
	}
	_, out, _ = s.groups("describe", "g")
	if !strings.Contains(out, "30m") || !strings.Contains(out, "59m") {
		t.Errorf("it does not say for how long:\n%s", out)
	}
	for args, says := range map[string]string{"--limit 0": "--limit 0", "--since soon": "--since \"soon\"", "--partition t/x": "--partition"} {
		if status, _, stderr := s.groups(append([]string{"history", "g"}, strings.Fields(args)...)...); status != 2 || !strings.Contains(stderr, says) {
			t.Errorf("%s: status %d, %s", args, status, stderr)
		}
	}
}

// groupWatch runs groups watch and returns its lines once it has begun.
func groupWatch(t *testing.T, ctx context.Context, args ...string) (lines <-chan string, ended func() int) {
	t.Helper()
	out, outWriter := io.Pipe()
	errOut, errWriter := io.Pipe()
	args = append([]string{"muster", "groups", "watch", "--etcd-endpoints", live.daemon.EtcdEndpoints()[0]}, args...)
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

// What members do is told in the words of registry watch, and what that makes of the
// group besides.
func TestWatchGroup(t *testing.T) {
	s := newStage(t, "/groups-watch")
	s.topic("t", 1)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	lines, ended := groupWatch(t, ctx, "g", "--registry-root", string(s.root))
	next := func(want string) {
		t.Helper()
		_, got, _ := strings.Cut(<-lines, " rev=")
		_, got, _ = strings.Cut(got, " group=g ")
		if lease := strings.Index(got, " (lease "); lease >= 0 {
			got = got[:lease] + got[lease+strings.Index(got[lease:], ")")+1:]
		}
		if got != want {
			t.Errorf("told\n%s\nwant\n%s", got, want)
		}
	}
	next("empty: 0 members, strategy none, 0 of 0 partitions owned")
	s.member("a", "range", `{"t":1}`)
	next("member=a joined: t, streams 1")
	next("rebalancing: member a joined")
	next("topic=t partitions=0 ownerless for 1 s: a-0 is due it and has not claimed it")
	s.claimed("a", "t", time.Now(), "joined", 0)
	next("topic=t partition=1-0 claimed by a-0: joined")
	if _, got, _ := strings.Cut(<-lines, " group=g topic=t partitions=0 owned again after "); got == "" {
		t.Error("it is not told that the partition is owned")
	}
	if _, got, _ := strings.Cut(<-lines, " group=g stable after "); !strings.HasSuffix(got, " s: 1 of 1 partitions changed owners") {
		t.Error(got)
	}
	cancel()
	for range lines {
	}
	if status := ended(); status != 0 {
		t.Error(status)
	}
}

// Real members leave a history that says why partitions moved, and a group that verifies.
func TestGroupOfConsumers(t *testing.T) {
	st := openLive(t)
	var root registry.Root
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	clearAfter(t, st, root.Group("real").Prefix())
	_, err := registry.CreateTopic(ctx, st, root, registry.TopicSpec{Name: "real", Partitions: 4, ReplicationFactor: 1}, []int32{1})
	if err != nil && !errors.Is(err, registry.ErrTopicExists) {
		t.Fatal(err)
	}
	start := func(id string) func() {
		c, err := consumer.New(consumer.Config{Store: st, Group: "real", ID: id, Topics: map[string]int32{"real": 1}, Strategies: []string{"sticky"},
			SessionTimeout: registry.MaxTTL},
			func(context.Context, *consumer.Record) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		running, stop := context.WithCancel(ctx)
		done := make(chan error, 1)
		go func() { done <- c.Run(running) }()
		return func() {
			t.Helper()
			stop()
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	}
	right := func() {
		t.Helper()
		if status, out, stderr := ask(t, "", "groups", "verify", "real", "--wait", "40s"); status != 0 {
			t.Fatal(out, stderr)
		}
	}
	stopA := start("a:1")
	right()
	stopB := start("b:2")
	for right(); ; right() {
		_, out, _ := ask(t, "", "groups", "describe", "real", "-o", "json")
		if d := parse[struct{ Members []any }](t, out); len(d.Members) == 2 {
			break
		}
	}
	right()
	stopA()
	right()
	stopB()
	status, out, stderr := ask(t, "", "groups", "history", "real")
	if status != 0 || stderr != "" {
		t.Fatal(stderr)
	}
	for _, want := range []string{`a:1 +claimed +real/0-3 +joined`, `a:1 +released +\S+ +member b:2 joined`, `b:2 +claimed +\S+ +`,
		`a:1 +released +\S+ +leaving`, `b:2 +claimed +\S+ +member a:1 left`, `b:2 +released +\S+ +leaving`} {
		if !regexp.MustCompile(want).MatchString(out) {
			t.Errorf("no %s in\n%s", want, out)
		}
	}
	if strings.Contains(out, " ended ") {
		t.Errorf("all of them released\n%s", out)
	}
}
