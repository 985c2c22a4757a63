package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

var rewrite = flag.Bool("rewrite", false, "write the outputs of docs/groups.md anew")

// scene is what happens before a command of the page is run.
type scene struct {
	setUp   func(p *pageStage)
	command string
}

// pageStage is the group that the page is about.
type pageStage struct {
	*stage
	begin time.Time
}

func (p *pageStage) at(seconds int) time.Time {
	return p.begin.Add(time.Duration(seconds) * time.Second)
}

const nodeA, nodeB, nodeC = "node-a:1f0c", "node-b:77d2", "node-c:e391"

// pageScenes are in the order of the page.
var pageScenes = []scene{
	{func(p *pageStage) {
		for i, id := range []string{nodeA, nodeB} {
			p.member(id, "range", `{"orders":1}`)
			first := int32(3 * i)
			p.claimed(id, "orders", p.at(i), "joined", first, first+1, first+2)
			for n := range int32(3) {
				plant(p.t, p.st, p.paths.Offset(p.partition("orders", first+n)), fmt.Sprint(5-n), 0)
			}
		}
	}, "describe billing"},
	{func(p *pageStage) {
		p.member(nodeC, "range", `{"orders":1}`)
		p.released(nodeA, "orders", p.at(60), "member "+nodeC+" joined", 2)
	}, "describe billing"},
	{func(*pageStage) {}, "verify billing"},
	{func(p *pageStage) {
		p.claimed(nodeB, "orders", p.at(61), "member "+nodeC+" joined", 2)
		p.released(nodeB, "orders", p.at(120), "member "+nodeC+" joined", 4, 5)
		p.claimed(nodeC, "orders", p.at(121), "joined", 4, 5)
	}, "plan billing --without node-c"},
	{func(*pageStage) {}, "plan billing --strategy sticky"},
	{func(p *pageStage) {
		// As at the end of its session: everything goes at once.
		txn := registry.Txn{Then: []registry.Op{registry.Delete(p.paths.ID(nodeC)),
			registry.Delete(p.paths.Owner(p.partition("orders", 4))), registry.Delete(p.paths.Owner(p.partition("orders", 5)))}}
		if _, err := p.st.Txn(p.t.Context(), txn); err != nil {
			p.t.Fatal(err)
		}
		p.claimed(nodeB, "orders", p.at(200), "member "+nodeC+" left", 4, 5)
		p.released(nodeB, "orders", p.at(200), "member "+nodeC+" left", 2)
		p.claimed(nodeA, "orders", p.at(200), "member "+nodeC+" left", 2)
	}, "history billing"},
}

// fleeting is what differs from run to run.
var fleeting = regexp.MustCompile(`\d{4}-\d\d-\d\dT\S+ +\d+|- +\d+ +(node)|\b\d+m\d\ds\b|\b\d+(\.\d+)? ?m?s\b|\d\d:\d\d:\d\d\.\d+ rev=\d+|\(lease [0-9a-f]+\)|TIME +REVISION`)

func settled(text string) string {
	text = fleeting.ReplaceAllString(text, "#$2")
	return regexp.MustCompile(` +`).ReplaceAllString(text, " ")
}

// The page for users shows what the commands print.
func TestGroupsPage(t *testing.T) {
	const page = "../../docs/groups.md"
	st := openLive(t)
	p := &pageStage{&stage{t, st, "", registry.Root("").Group("billing"), keptAlive(t, st).Lease()}, time.Now().Add(-5 * time.Minute)}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	clearAfter(t, st, p.paths.Prefix())
	fillTopic(t, ctx, st)
	data, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	text := string(data)
	blocks := regexp.MustCompile("(?s)```console\n\\$ muster groups ([^\n]*)\n(.*?)```\n").FindAllStringSubmatchIndex(text, -1)
	if len(blocks) != len(pageScenes)+1 {
		t.Fatalf("the page has %d outputs, want %d", len(blocks), len(pageScenes)+1)
	}
	var b strings.Builder
	at := 0
	check := func(i int, command, printed string) {
		t.Helper()
		m := blocks[i]
		if got := text[m[2]:m[3]]; got != command {
			t.Fatalf("output %d is of %q, want %q", i, got, command)
		}
		if shown := text[m[4]:m[5]]; settled(shown) != settled(printed) && !*rewrite {
			t.Errorf("muster groups %s prints\n%s\nthe page shows\n%s\nrun go test ./cmd/muster -run GroupsPage -rewrite", command, printed, shown)
		}
		b.WriteString(text[at:m[4]] + printed)
		at = m[5]
	}
	for i, s := range pageScenes {
		s.setUp(p)
		check(i, s.command, p.asked(s.command, text[blocks[i][4]:blocks[i][5]]))
	}
	check(len(pageScenes), "watch billing --count 10", p.watched(ctx))
	b.WriteString(text[at:])
	if *rewrite {
		if err := os.WriteFile(page, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// asked is what a command prints. Brokers have 3 s to tell where their logs end: where they
// were busy with other things, they are asked again.
func (p *pageStage) asked(command, want string) (printed string) {
	p.t.Helper()
	for range 3 {
		_, out, stderr := ask(p.t, "", append([]string{"groups"}, strings.Fields(command)...)...)
		if printed = trimmed(stderr + out); settled(printed) == settled(want) {
			break
		}
	}
	return printed
}

// fillTopic makes the topic of the page, with five records in each partition. Another
// test of this process may have had one of that name.
func fillTopic(t *testing.T, ctx context.Context, st registry.Store) {
	t.Helper()
	remove := func(ctx context.Context) {
		if _, err := registry.DeleteTopic(ctx, st, "", "orders", registry.DeleteOptions{}); err != nil && !errors.Is(err, registry.ErrNoTopic) {
			t.Error(err)
		}
	}
	remove(ctx)
	if _, err := registry.CreateTopic(ctx, st, "", registry.TopicSpec{Name: "orders", Partitions: 6, ReplicationFactor: 1}, []int32{1}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { remove(context.Background()) })
	awaitTopic(t, st, "", "orders", 6) // a producer gives an unknown topic up after a second
	k, err := kgo.NewClient(kgo.SeedBrokers(live.daemon.Address()), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	for n := range int32(30) {
		if err := k.ProduceSync(ctx, &kgo.Record{Topic: "orders", Partition: n % 6, Value: []byte("x")}).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
}

// watched is what a watch prints while a member joins. A partition that has no owner for a
// second is told of besides: where the machine stood still for so long, it all happens again.
func (p *pageStage) watched(ctx context.Context) (text string) {
	for try := range 5 {
		if try > 0 {
			p.undo()
		}
		if text = p.watchedOnce(ctx); !strings.Contains(text, " ownerless for ") {
			break
		}
	}
	return text
}

// undo has the group be again as it was before what watchedOnce does to it.
func (p *pageStage) undo() {
	p.t.Helper()
	txn := registry.Txn{Then: []registry.Op{registry.Delete(p.paths.ID(nodeC))}}
	for n, id := range []string{2: nodeA, 4: nodeB, 5: nodeB} {
		if id != "" {
			txn.Then = append(txn.Then, registry.Put(p.paths.Owner(p.partition("orders", int32(n))), []byte(rebalance.ThreadID(id, 0)), p.lease))
		}
	}
	if _, err := p.st.Txn(p.t.Context(), txn); err != nil {
		p.t.Fatal(err)
	}
}

// watchedOnce does each step when the one before was told.
func (p *pageStage) watchedOnce(ctx context.Context) string {
	lines, _ := groupWatch(p.t, ctx, "billing", "--count", "10")
	var b strings.Builder
	told := func(n int) {
		for range n {
			b.WriteString(<-lines + "\n")
		}
	}
	told(1)
	p.member(nodeC, "range", `{"orders":1}`)
	told(2)
	why := "member " + nodeC + " joined"
	p.released(nodeA, "orders", time.Now(), why, 2)
	told(1)
	p.claimed(nodeB, "orders", time.Now(), why, 2)
	told(1)
	p.released(nodeB, "orders", time.Now(), why, 4, 5)
	told(2)
	p.claimed(nodeC, "orders", time.Now(), "joined", 4, 5)
	told(3)
	return b.String()
}

// trimmed is without blanks at the ends of lines, which a page would lose.
func trimmed(text string) string {
	return regexp.MustCompile(` +\n`).ReplaceAllString(text, "\n")
}
