package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/muster-io/muster/registry"
)

// Looking at the tree: paths are shown as they can be given again, escapes
// included; ephemeral keys are marked; long lists are counted.
func TestRegistryLooks(t *testing.T) {
	st := openLive(t)
	root, err := registry.ParseRoot("/looks")
	if err != nil {
		t.Fatal(err)
	}
	session := keptAlive(t, st)
	odd := root.Group("a b/€\n")
	plant(t, st, odd.ID("c:1"), `{"version":1}`, session.Lease())
	for n := range int32(5) {
		plant(t, st, odd.Offset(registry.Partition{Topic: "t", Home: 1, Number: n}), fmt.Sprint(n), 0)
	}
	plant(t, st, root.Topic("t"), "bad\x1b[31m", 0)
	plant(t, st, "/looks2/x", "not ours", 0)
	cmd := func(args ...string) (int, string, string) {
		return ask(t, "", append(append([]string{"registry"}, args...), "--registry-root", "/looks")...)
	}
	const group = "/consumers/a%20b%2F%E2%82%AC%0A"
	status, out, _ := cmd("tree", "--limit", "2")
	want := `brokers/
  topics/
    t = "bad\x1b[31m"
consumers/
  a%20b%2F%E2%82%AC%0A/
    ids/
      c:1 = {"version":1}  (lease ` + registry.LeaseText(session.Lease()) + `)
    offsets/
      t/
        1-0 = 0
        1-1 = 1
        … and 3 more keys
`
	if status != 0 || out != want {
		t.Errorf("tree: status %d\n%s\nwant\n%s", status, out, want)
	}
	if _, out, _ = cmd("tree", "--limit", "0", group+"/offsets"); strings.Count(out, "\n") != 9 || strings.Contains(out, "more") {
		t.Errorf("tree of a path:\n%s", out)
	}
	_, out, _ = cmd("tree", "-o", "json", group)
	nodes := parse[[]map[string]any](t, out)
	if len(nodes) != 6 || nodes[0]["lease"] != registry.LeaseText(session.Lease()) || nodes[1]["lease"] != nil || nodes[1]["value"] != "0" {
		t.Errorf("%v", nodes)
	}
	if status, out, _ = cmd("ls", group); status != 0 || out != "ids/\noffsets/\n" {
		t.Errorf("ls: %s", out)
	}
	_, out, _ = cmd("ls", "--long", "-o", "json", group)
	if got := fmt.Sprint(parse[[]entry](t, out)[1].Keys); got != "5" {
		t.Errorf("ls --long: %s", out)
	}
	_, out, _ = cmd("get", group+"/ids/c:1", "-o", "json")
	if n := parse[map[string]any](t, out); fmt.Sprint(n["value"]) != "map[version:1]" || n["create_revision"] != n["mod_revision"] || n["lease"] == nil {
		t.Errorf("get: %s", out)
	}
	if _, out, _ = cmd("get", "/brokers/topics/t"); out != `"bad\x1b[31m"`+"\n" {
		t.Errorf("get: %q", out)
	}
	for _, args := range []string{"get /nosuch", "tree /nosuch", "ls /nosuch", "ls /consum"} {
		if status, _, stderr := cmd(strings.Fields(args)...); status != 1 || !strings.Contains(stderr, "no key /") {
			t.Errorf("%s: status %d, %s", args, status, stderr)
		}
	}
}
