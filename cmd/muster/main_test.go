package main

import (
	"bytes"
	"context"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/muster-io/muster/rebalance/consumer"
	"github.com/muster-io/muster/registry"
)

func call(t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, errOut bytes.Buffer
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	status = run(ctx, append([]string{"muster"}, args...), strings.NewReader(""), &out, &errOut)
	return status, out.String(), errOut.String()
}

// Flags may stand before or after the arguments.
func TestFlagsFirst(t *testing.T) {
	commands := newApp(nil, nil, nil).Commands
	for in, want := range map[string]string{
		"muster topics create orders --partitions 6":           "muster topics create --partitions 6 orders",
		"muster topics create --partitions 6 orders":           "muster topics create --partitions 6 orders",
		"muster topics create orders --partitions=6 -o json":   "muster topics create --partitions=6 -o json orders",
		"muster groups describe g -o json --registry-root /kc": "muster groups describe -o json --registry-root /kc g",
		"muster consume --group g --topic t --from-beginning":  "muster consume --group g --topic t --from-beginning",
		"muster consume --from-beginning x --group g":          "muster consume --from-beginning --group g x",
		"muster registry get -- --odd":                         "muster registry get -- --odd",
		"muster registry ls consumers --help":                  "muster registry ls --help consumers",
		"muster":                                               "muster",
	} {
		if got := strings.Join(flagsFirst(commands, strings.Fields(in)), " "); got != want {
			t.Errorf("%s\n got  %s\n want %s", in, got, want)
		}
	}
}

// Wrong use is status 2 with one line that says what is wrong; a daemon that
// cannot start is status 1.
func TestExitStatus(t *testing.T) {
	for _, c := range []struct {
		args   string
		status int
		says   string
	}{
		{"nosuch", 2, `no command "nosuch"`},
		{"topics nosuch", 2, `no command "nosuch"`},
		{"topics create", 2, "want one argument, the topic's name"},
		{"topics create a b", 2, "want one argument"},
		{"topics create a --partitions 0", 2, "--partitions 0: want 1 to 20000"},
		{"topics create a --partitions x", 2, "partitions"},
		{"topics create a --replication-factor 3", 2, "replication factor above 1"},
		{"topics list --nosuch", 2, "nosuch"},
		{"topics list -o yaml", 2, `--output "yaml": want table or json`},
		{"topics list --etcd-endpoints http://127.0.0.1:1", 1, "no etcd at http://127.0.0.1:1"},
		{"consume --topic t", 2, "--group is required"},
		{"produce", 2, "--topic is required"},
		{"consume --group g --topic t --format %q", 2, "unknown token %q"},
		{"consume --group g --topic t --set fetch.size=1", 2, "unknown setting"},
		{"consume --group g --topic t --set auto.commit.interval.ms=x", 2, "number of milliseconds"},
		{"consume --group g", 2, "want either --topic"},
		{"consume --group g --topic t --include t", 2, "want either --topic"},
		{"consume --group g --exclude t --streams 0", 2, "--streams"},
		{"consume --group g --topic t --set auto.commit.enable=no", 2, "true or false"},
		{"consume --group g --topic t --set num.streams=0", 2, "want a number from 1"},
		{"consume --group g --include a( --etcd-endpoints http://127.0.0.1:1", 2, "invalid topic filter"},
		{"consume --group g --topic t --strategy best --etcd-endpoints http://127.0.0.1:1", 2, `"best": want range`},
		{"consume --group g --topic t --set auto.offset.reset=first --etcd-endpoints http://127.0.0.1:1", 2, `"first": want largest`},
		{"run --group g --topic t --strategy best --etcd-endpoints http://127.0.0.1:1 -- true", 2, `"best": want range`},
		{"run --group g --topic t --on-exit wait --etcd-endpoints http://127.0.0.1:1 -- true", 2, `on exit "wait"`},
		{"groups describe g --registry-root kc", 2, "--registry-root"},
		{"groups list --log-level loud", 2, "--log-level"},
		{"server --nosuch", 1, "nosuch"},
		{"server --broker-id x", 1, "broker-id"},
		{"server --listen nowhere:port", 1, "--listen"},
		{"server surplus", 1, `unexpected argument "surplus"`},
		{"server --config /nonexistent", 1, "--config"},
	} {
		status, _, stderr := call(t, strings.Fields(c.args)...)
		if status != c.status || !strings.Contains(stderr, c.says) {
			t.Errorf("%s: status %d, want %d; stderr %q, want %q", c.args, status, c.status, stderr, c.says)
		}
		if strings.Count(strings.TrimRight(stderr, "\n"), "\n") > 0 {
			t.Errorf("%s: more than a line: %q", c.args, stderr)
		}
	}
}

func TestFormat(t *testing.T) {
	r := &consumer.Record{Partition: registry.Partition{Topic: "orders", Home: 1, Number: 3}, Offset: 42,
		Timestamp: time.UnixMilli(1796009568591), Key: []byte("k"), Value: []byte("v%s")}
	for text, want := range map[string]string{
		`%s\n`:                      "v%s\n",
		`%t %p %o %k %s %T\t%%\\\n`: "orders 3 42 k v%s 1796009568591\t%\\\n",
		`plain`:                     "plain",
		``:                          "",
	} {
		f, err := parseFormat(text)
		if err != nil {
			t.Errorf("%q: %v", text, err)
			continue
		}
		if got := string(f.print(nil, r)); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
	f, err := parseFormat("%N")
	if err != nil {
		t.Fatal(err)
	}
	before := time.Now().UnixNano()
	if n, err := strconv.ParseInt(string(f.print(nil, r)), 10, 64); err != nil || n < before || n > time.Now().UnixNano() {
		t.Errorf("%%N printed %d after %d: %v", n, before, err)
	}
	for _, text := range []string{"%", `\`, "%x", `\q`} {
		if _, err := parseFormat(text); err == nil {
			t.Errorf("%q was accepted", text)
		}
	}
}

// The tables can be split at blanks into as many fields as the header has.
func TestRowsHaveAllFields(t *testing.T) {
	var b bytes.Buffer
	row(&b, "", "x", 5)
	if got := strings.Fields(b.String()); len(got) != 3 || got[0] != "-" {
		t.Errorf("%q", b.String())
	}
}

func write(t *testing.T, file, content string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestConfigFile(t *testing.T) {
	file := t.TempDir() + "/muster.conf"
	for content, says := range map[string]string{
		"broker.id=-4\n":                    "--broker-id -4",
		"# nothing\n\nnum_partitions = 0\n": "--num-partitions 0",
		"broker.id=1\nnosuch=1\n":           `line 2: unknown setting "nosuch"`,
		"broker.id\n":                       `line 1: unknown setting "broker.id"`,
		"broker-id=x\n":                     "line 1: broker-id",
	} {
		write(t, file, content)
		if status, _, stderr := call(t, "server", "--config", file); status != 1 || !strings.Contains(stderr, says) {
			t.Errorf("%q: status %d, %q", content, status, stderr)
		}
	}
	// The command line wins over the file.
	write(t, file, "broker.id=-4\n")
	if _, _, stderr := call(t, "server", "--config", file, "--broker-id", "-5"); !strings.Contains(stderr, "--broker-id -5") {
		t.Error(stderr)
	}
	t.Setenv("MUSTER_BROKER_ID", "-6")
	if _, _, stderr := call(t, "server", "--config", file); !strings.Contains(stderr, "--broker-id -6") {
		t.Error(stderr)
	}
}
