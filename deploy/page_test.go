//go:build linux

package deploy

import (
	"bufio"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The page marks what is run: the fence "```sh run" is for the reader's own machine,
// "```sh run on=node1" for that machine, "on=each" for all three, one after the other.
// A block "```text output" after it is what it prints: spaces count as one, "…" stands
// for anything within a line, or alone for any number of lines.

const (
	page = "docs/deployment.md"
	// blockLimit bounds a block; an election and a lease are in it.
	blockLimit = 3 * time.Minute
)

var machineNames = []string{"node1", "node2", "node3"}

// chapter is a part of the page, from one heading of the second level to the next.
type chapter struct {
	title  string
	blocks []*block
}

type block struct {
	line   int
	info   string // what follows "sh "
	text   string
	output string // "" if the page does not say
	check  bool   // it does
}

func (b *block) runs() bool { return b.info == "run" || strings.HasPrefix(b.info, "run on=") }

// readPage finds the chapters of a page and their blocks.
func readPage(text string) ([]*chapter, error) {
	list := []*chapter{{title: "introduction"}}
	var open *block
	var fence string
	for i, line := range strings.Split(text, "\n") {
		at := list[len(list)-1]
		switch {
		case open != nil && line == "```":
			if fence == "text output" {
				if len(at.blocks) == 0 || !at.blocks[len(at.blocks)-1].runs() || at.blocks[len(at.blocks)-1].check {
					return nil, fmt.Errorf("line %d: output of nothing", open.line)
				}
				before := at.blocks[len(at.blocks)-1]
				before.output, before.check = open.text, true
			} else if info, ok := strings.CutPrefix(fence, "sh "); ok {
				if open.info = info; !open.runs() {
					return nil, fmt.Errorf("line %d: %q is not understood", open.line, fence)
				}
				at.blocks = append(at.blocks, open)
			}
			open = nil
		case open != nil:
			open.text += line + "\n"
		case strings.HasPrefix(line, "```"):
			fence, open = line[3:], &block{line: i + 1}
		case strings.HasPrefix(line, "## "):
			list = append(list, &chapter{title: line[3:]})
		}
	}
	if open != nil {
		return nil, fmt.Errorf("line %d: the block does not end", open.line)
	}
	return list, nil
}

// onPage returns the chapters of docs/deployment.md.
func onPage(t *testing.T) []*chapter {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(in.Repo, page))
	if err != nil {
		t.Fatal(err)
	}
	chapters, err := readPage(string(text))
	if err != nil {
		t.Fatalf("%s: %v", page, err)
	}
	return chapters
}

// TestPage runs the page from top to bottom, as a reader with a fresh checkout would.
func TestPage(t *testing.T) {
	need(t, "ip", "kcat", "openssl", "curl", "etcdctl", "/lib/systemd/systemd")
	checkout := overlay(t, in.Repo)
	bin := t.TempDir()
	if err := os.Symlink(in.Etcd, filepath.Join(bin, "etcd")); err != nil {
		t.Fatal(err)
	}
	run(t, time.Minute, "cp", "testdata/scp", bin)
	for _, c := range onPage(t) {
		any := false
		for _, b := range c.blocks {
			any = any || b.runs()
		}
		if !any {
			continue
		}
		ok := t.Run(c.title, func(t *testing.T) { c.run(t, checkout, bin) })
		if !ok && c.title == "Build" {
			t.FailNow()
		}
	}
}

// overlay is a directory with the content of another, which stays as it is.
func overlay(t *testing.T, lower string) string {
	t.Helper()
	dir := t.TempDir()
	run(t, time.Minute, "mount", "-t", "tmpfs", "tmpfs", dir)
	t.Cleanup(func() { syscall.Unmount(dir, syscall.MNT_DETACH) })
	for _, d := range []string{"upper", "work", "top"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	top := filepath.Join(dir, "top")
	run(t, time.Minute, "mount", "-t", "overlay", "overlay", "-o",
		fmt.Sprintf("lowerdir=%s,upperdir=%s/upper,workdir=%s/work", lower, dir, dir), top)
	t.Cleanup(func() { syscall.Unmount(top, syscall.MNT_DETACH) })
	return top
}

// run runs the blocks of a chapter in order, each in the shell of its place.
func (c *chapter) run(t *testing.T, checkout, bin string) {
	machines := t.TempDir()
	env := append(cleanEnvironment(), "PATH="+bin+":"+os.Getenv("PATH"), "MACHINES="+machines)
	here := exec.Command("bash", filepath.Join(in.Repo, "deploy/testdata/shell.sh"))
	here.Dir, here.Env = checkout, env
	shells := map[string]*shell{"here": startShell(t, "here", here, nil)}
	for _, b := range c.blocks {
		places := []string{"here"}
		if _, on, ok := strings.Cut(b.info, "on="); ok {
			if places = []string{on}; on == "each" {
				places = machineNames
			}
			if len(shells) == 1 {
				script, err := os.ReadFile("testdata/shell.sh")
				if err != nil {
					t.Fatal(err)
				}
				for name, m := range bootAll(t, machines) {
					m.put(t, "/run/shell.sh", script)
					shells[name] = startShell(t, name, m.command("bash", "/run/shell.sh"), m)
				}
			}
		}
		for _, place := range places {
			s := shells[place]
			if s == nil {
				t.Fatalf("line %d: no place %q", b.line, place)
			}
			s.do(b)
		}
	}
	for _, s := range shells {
		s.end()
	}
}

// shell is a bash that runs blocks.
type shell struct {
	t      *testing.T
	place  string
	at     *machine // nil here
	p      *process
	blocks io.WriteCloser
	done   *bufio.Reader
	shown  int
}

func startShell(t *testing.T, place string, cmd *exec.Cmd, at *machine) *shell {
	t.Helper()
	s := &shell{t: t, place: place, at: at}
	doneR, doneW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	blocksR, blocksW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	// Descriptors 8 and 9, beyond the standard three.
	cmd.ExtraFiles = make([]*os.File, 7)
	cmd.ExtraFiles[8-3], cmd.ExtraFiles[9-3] = doneW, blocksR
	s.p = start(t, "shell at "+place, cmd)
	doneW.Close()
	blocksR.Close()
	s.blocks, s.done = blocksW, bufio.NewReader(doneR)
	t.Cleanup(func() { doneR.Close(); blocksW.Close() })
	return s
}

// do runs a block and compares what it prints.
func (s *shell) do(b *block) {
	s.t.Helper()
	began := time.Now()
	name := fmt.Sprintf("/run/page-line-%d.sh", b.line)
	if s.at != nil {
		s.at.put(s.t, name, []byte(b.text))
	} else {
		writeFile(s.t, name, b.text, 0o644)
	}
	if _, err := fmt.Fprintln(s.blocks, name); err != nil {
		s.t.Fatalf("line %d at %s: %v", b.line, s.place, err)
	}
	ended := make(chan error, 1)
	go func() {
		_, err := s.done.ReadString('\n')
		ended <- err
	}()
	select {
	case err := <-ended:
		out := s.output(err == nil)
		if err != nil {
			<-s.p.done
			s.t.Fatalf("%s line %d at %s failed with %s:\n%s--- it printed:\n%s%s", page, b.line, s.place, s.p.cmd.ProcessState, b.text, out, tail(s.p.stderr.String()))
		}
		if b.check && !matches(b.output, out) {
			s.t.Fatalf("%s line %d at %s:\n%s--- printed:\n%s--- want:\n%s", page, b.line, s.place, b.text, out, b.output)
		}
		s.t.Logf("line %d at %s: %.1f s", b.line, s.place, time.Since(began).Seconds())
	case <-time.After(blockLimit):
		s.t.Fatalf("%s line %d at %s has not ended after %s:\n%s--- it printed:\n%s%s", page, b.line, s.place, blockLimit, b.text, s.output(false), tail(s.p.stderr.String()))
	}
}

// output is what was printed since the last call, up to the end of a block if that
// has ended well: what it has printed may take a moment longer to come than its end.
func (s *shell) output(ended bool) string {
	const mark = "--- end of block\n"
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		out := s.p.stdout.String()[s.shown:]
		text, rest, ok := strings.Cut(out, mark)
		if ok || !ended || time.Now().After(end) {
			s.shown += len(out) - len(rest)
			return text
		}
	}
}

// end closes the shell, and requires that nothing it started is left.
func (s *shell) end() {
	s.t.Helper()
	s.blocks.Close()
	select {
	case <-s.p.done:
	case <-time.After(patience):
		s.t.Fatalf("the shell at %s does not end", s.place)
	}
	group := -s.p.cmd.Process.Pid
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		// What outlives its shell is a child of this process, the first of its host.
		syscall.Wait4(group, nil, syscall.WNOHANG, nil)
		if syscall.Kill(group, 0) != nil {
			return
		}
		if time.Now().After(end) {
			s.t.Errorf("the chapter leaves processes behind at %s:\n%s", s.place, run(s.t, time.Minute, "ps", "-o", "pid,args", "-A"))
			return
		}
	}
}

// matches compares output with what the page says.
func matches(want, got string) bool {
	var expr strings.Builder
	expr.WriteString(`^`)
	for line := range strings.Lines(want) {
		line = strings.TrimRight(line, "\n")
		if strings.TrimSpace(line) == "…" {
			expr.WriteString(`(?:[^\n]*\n)*`)
			continue
		}
		parts := strings.Split(strings.Join(strings.Fields(line), " "), "…")
		for i := range parts {
			parts[i] = regexp.QuoteMeta(parts[i])
		}
		expr.WriteString(strings.Join(parts, `[^\n]*`) + `\n`)
	}
	expr.WriteString(`$`)
	var flat strings.Builder
	for line := range strings.Lines(got) {
		flat.WriteString(strings.Join(strings.Fields(line), " ") + "\n")
	}
	return regexp.MustCompile(expr.String()).MatchString(flat.String())
}

func TestMatches(t *testing.T) {
	for _, c := range []struct {
		want, got string
		ok        bool
	}{
		{"a b\n", "a   b\n", true},
		{"a b\n", "a c\n", false},
		{"a\n", "a\nb\n", false},
		{"a\n…\n", "a\nb\nc\n", true},
		{"id …, 3\n", "id 17 x, 3\n", true},
		{"…\nb\n", "a\n", false},
		{"", "a\n", false},
	} {
		if got := matches(c.want, c.got); got != c.ok {
			t.Errorf("want %q, printed %q: %v", c.want, c.got, got)
		}
	}
}

func TestReadPage(t *testing.T) {
	const text = "## One\n```sh run\na\n```\n\n```text output\nx\n```\n```\nno\n```\n## Two\n```sh run on=each\nb\n```\n"
	list, err := readPage(text)
	if err != nil || len(list) != 3 || len(list[1].blocks) != 1 || len(list[2].blocks) != 1 {
		t.Fatalf("%v %v", list, err)
	}
	if b := list[1].blocks[0]; b.text != "a\n" || b.output != "x\n" || !b.check || b.line != 2 {
		t.Errorf("%+v", b)
	}
	for _, bad := range []string{"```sh run\na\n", "```text output\n```\n", "```sh ruin\n```\n"} {
		if _, err := readPage(bad); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

// bootAll starts the three machines of the page, with names that all know.
func bootAll(t *testing.T, homes string) map[string]*machine {
	t.Helper()
	n := newNetwork(t, netip.MustParsePrefix("10.90.2.0/24"))
	var hosts string
	for i, name := range machineNames {
		hosts += fmt.Sprintf("%s %s\n", n.address(11+i), name)
	}
	setHosts(t, hosts)
	all := map[string]*machine{}
	for i, name := range machineNames {
		home := filepath.Join(homes, name)
		if err := os.MkdirAll(home, 0o755); err != nil {
			t.Fatal(err)
		}
		all[name] = n.boot(name, n.address(11+i), hosts, home)
	}
	for _, m := range all {
		m.up()
	}
	return all
}
