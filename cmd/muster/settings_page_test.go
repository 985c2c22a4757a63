package main

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// settings082 are all of the high-level consumer of Kafka 0.8.2.
const settings082 = `group.id consumer.id zookeeper.connect zookeeper.session.timeout.ms zookeeper.connection.timeout.ms zookeeper.sync.time.ms
	auto.commit.enable auto.commit.interval.ms rebalance.max.retries rebalance.backoff.ms auto.offset.reset consumer.timeout.ms client.id
	exclude.internal.topics partition.assignment.strategy offsets.storage dual.commit.enabled offsets.channel.backoff.ms
	offsets.channel.socket.timeout.ms offsets.commit.max.retries fetch.message.max.bytes num.consumer.fetchers fetch.min.bytes
	fetch.wait.max.ms socket.timeout.ms socket.receive.buffer.bytes queued.max.message.chunks refresh.leader.backoff.ms`

// The page on 0.8.2 has every consumer setting of then, and says of each whether it is
// taken as muster consume does.
func TestSettingsPage(t *testing.T) {
	page, err := os.ReadFile("../../docs/kafka-0.8.2.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(page), "\n## Consumer settings\n")
	section, _, _ = strings.Cut(section, "\n## ")
	taken, refused, ok := strings.Cut(section, "\nRefused,")
	if !ok {
		t.Fatal("no such section")
	}
	names := func(text string) []string {
		var list []string
		for line := range strings.Lines(text) {
			if strings.HasPrefix(line, "| `") {
				cell, _, _ := strings.Cut(line[1:], "|")
				for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(cell, -1) {
					list = append(list, m[1])
				}
			}
		}
		slices.Sort(list)
		return list
	}
	if got, want := names(taken), slices.Sorted(maps.Keys(consumerSetting)); !slices.Equal(got, want) {
		t.Errorf("taken are\n%v\nthe page says\n%v", want, got)
	}
	for _, name := range names(refused) {
		if consumerSetting[name] != nil {
			t.Errorf("%s is taken, and the page says that it is refused", name)
		}
	}
	all := append(names(taken), names(refused)...)
	for _, name := range strings.Fields(settings082) {
		if !slices.Contains(all, name) {
			t.Errorf("%s is not on the page", name)
		}
	}
}
