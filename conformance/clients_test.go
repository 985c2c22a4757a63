package conformance

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// sortedLines returns the lines of an output, in order of their text.
func sortedLines(data []byte) []string {
	list := strings.Split(strings.TrimSuffix(string(data), "\n"), "\n")
	slices.Sort(list)
	return list
}

// TestKcat: what kcat writes with any codec, plain or idempotent, kcat and our own
// consumer read back, byte for byte.
func TestKcat(t *testing.T) {
	need(t, "kcat", "etcdctl")
	c := newCluster(newSandbox(t))
	c.startDaemon()
	lines := realText(t, 3_000)
	var want []string
	for _, l := range lines {
		want = append(want, l.key+" "+l.value)
	}
	want = slices.Concat(want, want)
	slices.Sort(want)
	for _, codec := range []string{"none", "gzip", "snappy", "lz4", "zstd"} {
		c.tool("topics", "create", codec, "--partitions", "3")
		for _, idempotent := range []string{"false", "true"} {
			c.feed(input(lines), "kcat", "-m", "60", "-P", "-b", c.kafka, "-t", codec, "-K", keyDelimiter, "-z", codec,
				"-X", "acks=all", "-X", "enable.idempotence="+idempotent)
		}
		got := sortedLines(c.run("kcat", "-m", "60", "-C", "-b", c.kafka, "-t", codec, "-o", "beginning", "-e", "-q", "-f", `%k %s\n`))
		if !slices.Equal(got, want) {
			t.Errorf("%s: kcat read %d lines that differ from the %d written", codec, len(got), len(want))
		}
		p := c.start("consumer", nil, nil, c.muster, "consume", "--etcd-endpoints", c.etcd, "--group", "g", "--topic", codec,
			"--from-beginning", "--format", `%k %s\n`)
		c.reads(p, want)
	}
}

// reads waits until a consumer has printed as many lines as wanted, ends it, and
// compares them.
func (c *cluster) reads(p *process, want []string) {
	c.t.Helper()
	until(c.t, patience, fmt.Sprintf("%s prints %d lines", p.name, len(want)), func() bool {
		data, err := os.ReadFile(p.stdout)
		return err == nil && bytes.Count(data, []byte("\n")) >= len(want)
	})
	p.signal(syscall.SIGTERM)
	p.exits(0, patience)
	data, err := os.ReadFile(p.stdout)
	if err != nil {
		c.t.Fatal(err)
	}
	if got := sortedLines(data); !slices.Equal(got, want) {
		c.t.Errorf("%s: %q printed %d lines that differ from the %d wanted", p.name, p.cmd.Args, len(got), len(want))
	}
}

// TestUnknownTopic: a consumer waits for a topic that is not there. Created later
// by its first producer, it belongs to the group from its first record on, though
// the consumer was told to begin with what comes.
func TestUnknownTopic(t *testing.T) {
	need(t, "kcat", "etcdctl")
	c := newCluster(newSandbox(t))
	c.startDaemon("--num-partitions", "4")
	p := c.start("consumer", nil, nil, c.muster, "consume", "--etcd-endpoints", c.etcd, "--group", "g", "--topic", "later", "--format", `%k %s\n`)
	h := c.watch()
	h.until(patience, "the consumer is registered", func(tr tree) bool { return len(tr.members("g")) == 1 })
	if topics := c.readTree().under("/brokers/topics/"); len(topics) != 0 {
		t.Fatalf("topics before the first producer: %v", topics)
	}
	lines := realText(t, 2_000)
	var want []string
	for _, l := range lines {
		want = append(want, l.key+" "+l.value)
	}
	slices.Sort(want)
	c.feed(input(lines), "kcat", "-m", "60", "-P", "-b", c.kafka, "-t", "later", "-K", keyDelimiter)
	h.until(patience, "the consumer owns the new partitions", func(tr tree) bool { return len(tr.owners("g", "later")) == 4 })
	c.reads(p, want)
}

// TestProduceAndConsume: our own producer and kcat's consumer.
func TestProduceAndConsume(t *testing.T) {
	need(t, "kcat")
	c := newCluster(newSandbox(t))
	c.startDaemon()
	lines := realText(t, 1_000)
	var in bytes.Buffer
	var want []string
	for _, l := range lines {
		in.WriteString(l.value + "\n")
		want = append(want, l.value)
	}
	c.tool("topics", "create", "ours", "--partitions", "2")
	c.feed(in.Bytes(), c.muster, "produce", "--etcd-endpoints", c.etcd, "--topic", "ours")
	got := sortedLines(c.run("kcat", "-m", "60", "-C", "-b", c.kafka, "-t", "ours", "-o", "beginning", "-e", "-q"))
	if !slices.Equal(got, want) { // its numbers put it in order already
		t.Errorf("kcat read %d lines that differ from the %d written", len(got), len(want))
	}
}
