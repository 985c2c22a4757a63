package rebalance_test

import (
	"os"
	"regexp"
	"testing"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// The page on the registry shows a target record as we write it.
func TestTargetOnTheRegistryPage(t *testing.T) {
	page, err := os.ReadFile("../docs/registry.md")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile("(?m)^(/consumers/[a-z]+/target)\n(.*)$").FindSubmatch(page)
	if m == nil {
		t.Fatal("no example")
	}
	target, err := rebalance.ReadTarget(registry.KV{Key: string(m[1]), Value: m[2], ModRevision: 1})
	if err != nil {
		t.Fatal(err)
	}
	if again, err := target.Encode(); err != nil || string(again) != string(m[2]) {
		t.Errorf("we would write\n%s\nthe page has\n%s\nerror %v", again, m[2], err)
	}
}
