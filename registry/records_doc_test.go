package registry

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
)

// The page on the registry cannot rot: its examples are what we write, and its names
// are spelled as we spell them.
func TestRegistryPage(t *testing.T) {
	data, err := os.ReadFile("../docs/registry.md")
	if err != nil {
		t.Fatal(err)
	}
	page := string(data)
	kinds := map[string]int{}
	members := map[string]bool{}
	g := Root("").Group("shop")
	var owners []string
	for _, m := range regexp.MustCompile("(?ms)^```registry\n(\\S+)\n(.*?)\n```$").FindAllStringSubmatch(page, -1) {
		kv := KV{Key: m[1], Value: []byte(m[2])}
		kind, rec, err := parse("", kv)
		if err != nil {
			t.Errorf("%s %s: %v", kind, kv.Key, err)
			continue
		}
		kind, _, _ = strings.Cut(kind, " ")
		kinds[kind]++
		again := []byte(fmt.Sprint(rec))
		if !plain(rec) {
			if again, err = Encode(rec); err != nil {
				t.Fatal(err)
			}
			if kind != "deletion" && kind != "history" { // 0.8.2 does not look at those
				if _, err := as082(kind, kv.Value); err != nil {
					t.Errorf("%s: 0.8.2 cannot read it: %v", kv.Key, err)
				}
			}
		}
		if string(again) != m[2] {
			t.Errorf("%s: we would write\n%s\nthe page has\n%s", kv.Key, again, m[2])
		}
		if id, err := g.ParseID(kv.Key); err == nil {
			members[id] = true
		}
		if kind == "owner" || kind == "offset" {
			if p, err := g.ParsePartition(kv.Key); err != nil || p != (Partition{Topic: "orders", Home: 1, Number: 0}) {
				t.Errorf("%s is partition %v, %v", kv.Key, p, err)
			}
		}
		if kind == "owner" {
			owners = append(owners, m[2])
		}
		if !strings.Contains(page, "`"+pattern(kv.Key)+"`") {
			t.Errorf("%s is not in the table", pattern(kv.Key))
		}
	}
	for _, kind := range []string{"cluster", "producer", "broker", "topic", "count", "state", "config", "deletion", "consumer", "owner", "offset", "target", "history"} {
		if kinds[kind] == 0 {
			t.Errorf("no example of kind %s", kind)
		}
	}
	for _, owner := range owners {
		if !members[strings.TrimSuffix(owner, "-0")] {
			t.Errorf("owner %s is no member of the page's group", owner)
		}
	}
	names := regexp.MustCompile("(?m)^\\| `([^`]+)` \\| `([^`]+)` \\|$").FindAllStringSubmatch(page, -1)
	if len(names) < 7 {
		t.Fatalf("only %d names", len(names))
	}
	for _, m := range names {
		if element, err := EscapeName(m[1]); err != nil || element != m[2] {
			t.Errorf("%q becomes %q, %v; the page has %q", m[1], element, err, m[2])
		}
	}
}

// pattern is how the page's table spells a key.
func pattern(key string) string {
	p := strings.Split(key, "/")
	switch {
	case p[1] == "brokers" && p[2] == "ids":
		p[3] = "<id>"
	case p[1] == "brokers" && len(p) == 5:
		p[3], p[4] = "<topic>", "<id>"
	case p[1] == "brokers" && len(p) == 7:
		p[3], p[5] = "<topic>", "<p>"
	case p[1] == "brokers", p[1] == "config", p[1] == "admin":
		p[3] = "<topic>"
	case p[1] == "consumers" && p[3] == "ids":
		p[2], p[4] = "<group>", "<consumer>"
	case p[1] == "consumers" && p[3] == "target":
		p[2] = "<group>"
	case p[1] == "consumers" && p[3] == "history":
		p[2], p[4] = "<group>", "<entry>"
	case p[1] == "consumers":
		p[2], p[4], p[5] = "<group>", "<topic>", "<home>-<p>"
	}
	return strings.Join(p, "/")
}
