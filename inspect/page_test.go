package inspect_test

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/muster-io/muster/inspect"
)

var rewrite = flag.Bool("rewrite", false, "write the table of docs/doctor.md anew")

// The page for users has a row for each finding, in the words of the program.
func TestPageOfFindings(t *testing.T) {
	const page, begin, end = "../docs/doctor.md", "<!-- findings -->\n", "<!-- end of findings -->\n"
	data, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, ok := strings.Cut(string(data), begin)
	table, tail, okEnd := strings.Cut(rest, end)
	if !ok || !okEnd {
		t.Fatal("the page has no place for the table")
	}
	var b strings.Builder
	b.WriteString("| code | severity | what it means | what to do |\n| --- | --- | --- | --- |\n")
	seen := map[inspect.Code]bool{}
	for _, c := range inspect.Codes() {
		e := c.Explain()
		if seen[c] || c != inspect.CodeUnknownKey && e == inspect.CodeUnknownKey.Explain() {
			t.Errorf("%s is listed twice or not explained", c)
		}
		seen[c] = true
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", c, e.Severity, e.Means, e.Do)
	}
	if table == b.String() {
		return
	}
	if !*rewrite {
		t.Fatal("docs/doctor.md is not what the program says: run go test ./inspect -run PageOfFindings -rewrite")
	}
	if err := os.WriteFile(page, []byte(head+begin+b.String()+end+tail), 0o644); err != nil {
		t.Fatal(err)
	}
}
