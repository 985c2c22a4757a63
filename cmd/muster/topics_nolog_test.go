package main

import (
	"strings"
	"testing"

	"github.com/muster-io/muster/registry/registrytest"
)

// Partitions that are only owned need an etcd and no daemon, in all of their life.
func TestTopicWithoutLog(t *testing.T) {
	endpoint := registrytest.Start(t).Endpoint
	for _, c := range []struct {
		args           string
		status         int
		stdout, stderr string // substrings
	}{
		{"topics create shards --partitions 2", 1, "", "--no-log"},
		{"topics create shards --no-log --config flush.ms=1", 2, "", "settings are about logs"},
		{"topics create shards --no-log --partitions 300", 0, "created topic shards with 300 partitions, no log\n", ""},
		{"topics create shards --no-log", 1, "", "topic exists already"},
		{"topics alter shards --partitions 301", 0, "topic shards now has 301 partitions, 1 more", ""},
		{"topics alter shards --config flush.ms=1", 1, "", "no log"},
		{"topics list", 0, " no\n", ""},
		{"topics list -o json", 0, `"no_log": true`, ""},
		{"topics describe shards", 0, "301 partitions, no log\n", ""},
		{"registry get /brokers/topics/shards", 0, `"no_log":true`, ""},
		{"registry doctor", 0, "", ""},
		{"topics delete shards", 0, "deleted topic shards: 301 partitions", ""},
		{"registry ls /brokers/topics", 1, "", "no key"},
		{"registry ls /config/topics", 1, "", "no key"},
		{"registry ls /admin/delete_topics", 1, "", "no key"},
	} {
		status, stdout, stderr := call(t, append(strings.Fields(c.args), "--etcd-endpoints", endpoint)...)
		if status != c.status || !strings.Contains(stdout, c.stdout) || !strings.Contains(stderr, c.stderr) {
			t.Errorf("%s: status %d, stdout %q, stderr %q", c.args, status, stdout, stderr)
		}
	}
}

func TestDescribeTopicWithoutLog(t *testing.T) {
	endpoint := registrytest.Start(t).Endpoint
	if status, _, stderr := call(t, "topics", "create", "shards", "--no-log", "--partitions", "2", "--etcd-endpoints", endpoint); status != 0 {
		t.Fatal(stderr)
	}
	var d topicDescription
	fromJSON(t, &d, "topics", "describe", "shards", "-o", "json", "--etcd-endpoints", endpoint)
	if !d.NoLog || len(d.Partitions) != 2 || d.Partitions[1].Partition != 1 || d.Partitions[1].Broker != 0 || d.Partitions[1].Leader != nil ||
		len(d.Partitions[1].Replicas) != 0 || len(d.BrokersDown) != 0 {
		t.Errorf("%+v", d)
	}
}
