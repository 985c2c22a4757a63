//go:build linux

package deploy

import (
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// nodes is a set of daemons that form one cluster, as a client sees it.
type nodes struct {
	// tool returns a command line that runs muster with these arguments where it
	// reaches the registry and the brokers.
	tool func(args ...string) []string
	ids  []int // broker ids
}

const (
	toolLimit = patience
	workLimit = patience
)

// work makes a topic with two partitions a broker, sees them spread, writes lines
// and reads them back.
func work(t *testing.T, n *nodes) {
	t.Helper()
	const topic = "orders"
	run(t, toolLimit, n.tool("topics", "create", topic, "--partitions", fmt.Sprint(2*len(n.ids)))...)
	var d struct {
		Partitions []struct {
			Leader int `json:"leader"`
		} `json:"partitions"`
	}
	fields(t, run(t, toolLimit, n.tool("topics", "describe", topic, "-o", "json")...), &d)
	led := map[int]int{}
	for _, p := range d.Partitions {
		led[p.Leader]++
	}
	for _, id := range n.ids {
		if led[id] != 2 {
			t.Fatalf("partitions led by each broker: %v, want 2 for each of %v", led, n.ids)
		}
	}

	var lines []string
	for i := range 300 {
		lines = append(lines, fmt.Sprintf("key-%d|line %d", i%50, i))
	}
	argv := n.tool("produce", "--topic", topic, "-K", "|")
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
	p := start(t, "produce", cmd)
	until(t, workLimit, "all lines are acknowledged", p.ended)
	if !cmd.ProcessState.Success() {
		t.Fatalf("produce: %s: %s", cmd.ProcessState, tail(p.stderr.String()))
	}

	argv = n.tool("consume", "--group", "shop", "--topic", topic, "--from-beginning", "--format", `%k|%s\n`)
	c := start(t, "consume", exec.Command(argv[0], argv[1:]...))
	until(t, workLimit, "all lines are consumed", func() bool { return strings.Count(c.stdout.String(), "\n") >= len(lines) }, c)
	got := strings.Split(strings.TrimSpace(c.stdout.String()), "\n")
	slices.Sort(got)
	slices.Sort(lines)
	if !slices.Equal(got, lines) {
		t.Errorf("consumed other lines than were produced, first %q and %q", got[0], lines[0])
	}
	c.stop(workLimit)
}

// brokers waits until the registry shows exactly these.
func (n *nodes) brokers(t *testing.T, ids ...int) {
	t.Helper()
	var got []int
	until(t, workLimit, fmt.Sprintf("brokers %v are registered", ids), func() bool {
		argv := n.tool("registry", "ls", "/brokers/ids", "-o", "json")
		out, err := exec.Command(argv[0], argv[1:]...).Output()
		if err != nil {
			return false
		}
		var list []string
		fields(t, string(out), &list)
		got = nil
		for _, name := range list {
			id, err := strconv.Atoi(name)
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, id)
		}
		slices.Sort(got)
		return slices.Equal(got, ids)
	})
}

// stopAll sends SIGTERM to all at once, as an engine does, and requires good ends.
func stopAll(t *testing.T, all []*process) {
	t.Helper()
	for _, p := range all {
		if err := syscall.Kill(p.cmd.Process.Pid, syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range all {
		until(t, patience, p.name+" has ended after SIGTERM", p.ended)
		if status := p.cmd.ProcessState.ExitCode(); status != 0 {
			t.Errorf("%s ended with status %d after SIGTERM, want 0", p.name, status)
		}
	}
}
