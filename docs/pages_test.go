// Package docs holds the pages for users, and tests that hold the pages to the truth.
// What a page says of one package is tested there.
package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// rows returns the cells of a page's tables whose first cell matches, by that cell.
func rows(t *testing.T, page, first string) map[string][]string {
	t.Helper()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string][]string{}
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
		name := strings.TrimSpace(cells[0])
		if !strings.HasPrefix(line, "|") || !regexp.MustCompile(`^(?:`+first+`)$`).MatchString(name) {
			continue
		}
		if found[name] != nil {
			t.Errorf("%s: %s is there twice", page, name)
		}
		found[name] = cells
	}
	return found
}

var quoted = regexp.MustCompile("`([^`]+)`")

// named lists what a cell says about tests: each test with the packages named before it,
// which several tests may share. A package with something in parentheses after it is
// named for that.
func named(cell string) (tests map[string][]string, packages []string) {
	tests = map[string][]string{}
	var of []string
	begun := true // the packages of the next test
	for _, m := range quoted.FindAllStringSubmatchIndex(cell, -1) {
		name := cell[m[2]:m[3]]
		if strings.HasPrefix(name, "Test") {
			tests[name] = append(tests[name], of...)
			begun = true
			continue
		}
		if begun {
			of, begun = nil, false
		}
		of, packages = append(of, name), append(packages, name)
		if strings.HasPrefix(cell[m[1]:], " (") {
			of = nil
		}
	}
	return tests, packages
}

// testsOf lists the tests of a package, or fails if there is no such package.
func testsOf(t *testing.T, dir string) map[string]bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("..", filepath.FromSlash(dir), "*.go"))
	if err != nil || len(files) == 0 {
		t.Errorf("there is no package %s", dir)
		return nil
	}
	found := map[string]bool{}
	for _, file := range files {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && strings.HasPrefix(fn.Name.Name, "Test") && strings.HasSuffix(file, "_test.go") {
				found[fn.Name.Name] = true
			}
		}
	}
	return found
}

// Every test that the pages on failures name is there, and every row names one.
func TestTestsThatPagesName(t *testing.T) {
	known := map[string]map[string]bool{}
	for page, first := range map[string]string{"kafka-0.8.2.md": `F-\d\d`, "field-cases.md": `\d\d`} {
		list := rows(t, page, first)
		if len(list) < 10 {
			t.Errorf("%s: %d rows", page, len(list))
		}
		for name, cells := range list {
			if len(cells) != 4 {
				t.Errorf("%s: %s has %d cells", page, name, len(cells))
				continue
			}
			tests, packages := named(cells[3])
			if len(packages) == 0 {
				t.Errorf("%s: %s names no test", page, name)
			}
			for _, dir := range packages {
				if known[dir] == nil {
					known[dir] = testsOf(t, dir)
				}
			}
			for test, dirs := range tests {
				if len(dirs) == 0 {
					t.Errorf("%s: %s names %s of no package", page, name, test)
				}
				for _, dir := range dirs {
					if !known[dir][test] {
						t.Errorf("%s: %s names %s, which package %s has not", page, name, test, dir)
					}
				}
			}
		}
	}
}

// The flaws that consumers of 0.8.2 had are all there, each with a test.
func TestFlawsOf082(t *testing.T) {
	list := rows(t, "kafka-0.8.2.md", `F-\d\d`)
	for _, name := range strings.Fields("F-01 F-02 F-03 F-04 F-05 F-06 F-07 F-08 F-09 F-10 F-11 F-12 F-13 F-14 F-15 F-19 F-31 F-32 F-36 F-38 F-39 F-40") {
		cells := list[name]
		if cells == nil {
			t.Errorf("%s is missing", name)
			continue
		}
		if tests, _ := named(cells[3]); len(tests) == 0 {
			t.Errorf("%s names no test", name)
		}
	}
}

var (
	link    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading = regexp.MustCompile(`(?m)^#+ +(.+)$`)
	fence   = regexp.MustCompile("(?ms)^```.*?^```$")
)

// anchors are the names under which a page's headings can be linked to.
func anchors(text string) map[string]bool {
	found := map[string]bool{}
	for _, m := range heading.FindAllStringSubmatch(fence.ReplaceAllString(text, ""), -1) {
		name := regexp.MustCompile(`[^\p{L}\p{N} _-]`).ReplaceAllString(strings.ToLower(m[1]), "")
		found[strings.ReplaceAll(name, " ", "-")] = true
	}
	return found
}

// Links between the pages lead somewhere, and the README leads to all pages.
func TestLinks(t *testing.T) {
	pages, err := filepath.Glob("*.md")
	if err != nil {
		t.Fatal(err)
	}
	readme := filepath.Join("..", "README.md")
	linked := map[string]bool{}
	for _, page := range append([]string{readme}, pages...) {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range link.FindAllStringSubmatch(fence.ReplaceAllString(string(text), ""), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			file, anchor, _ := strings.Cut(m[1], "#")
			target := page
			if file != "" {
				target = filepath.Join(filepath.Dir(page), file)
			}
			if page == readme {
				linked[target] = true
			}
			there, err := os.Stat(target)
			switch {
			case err != nil:
				t.Errorf("%s links to %s, which is not there", page, m[1])
			case anchor != "" && !there.IsDir():
				of, err := os.ReadFile(target)
				if err != nil {
					t.Fatal(err)
				}
				if !anchors(string(of))[anchor] {
					t.Errorf("%s links to %s, and there is no such heading", page, m[1])
				}
			}
		}
	}
	for _, page := range pages {
		if !linked[filepath.Join("..", "docs", page)] {
			t.Errorf("README does not link to docs/%s", page)
		}
	}
}
