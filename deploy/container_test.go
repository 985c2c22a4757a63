//go:build linux

package deploy

import (
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/linter"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
	"github.com/moby/patternmatcher"
	"github.com/moby/patternmatcher/ignorefile"
)

const containerfile = "deploy/container/Containerfile"

// image is a Containerfile, read: what its last stage says, and the build stage's
// commands.
type image struct {
	build      []string // RUN lines of the build stage that need no network
	base       string
	copies     []copied
	user       string
	env        map[string]string
	volumes    []string
	ports      []string
	health     []string
	stop       string
	entrypoint []string
	cmd        []string
}

// copied is a file or directory that the last stage takes from the build stage.
type copied struct{ from, to, owner string }

// readContainerfile reads the file with BuildKit's own parser.
func readContainerfile(name string) (*image, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	ast, err := parser.Parse(f)
	if err != nil {
		return nil, err
	}
	if len(ast.Warnings) > 0 {
		return nil, fmt.Errorf("%s: %v", name, ast.Warnings)
	}
	var warnings []string
	lint := linter.New(&linter.Config{Warn: func(rule, _, _, msg string, _ []parser.Range) { warnings = append(warnings, rule+": "+msg) }})
	stages, _, err := instructions.Parse(ast.AST, lint)
	if err != nil {
		return nil, err
	}
	if len(warnings) > 0 {
		return nil, fmt.Errorf("%s: %s", name, strings.Join(warnings, "; "))
	}
	if len(stages) != 2 {
		return nil, fmt.Errorf("%s: %d stages, want build and image", name, len(stages))
	}
	im := &image{base: stages[1].BaseName, env: map[string]string{}}
	for _, c := range stages[0].Commands {
		if r, ok := c.(*instructions.RunCommand); ok {
			if line := strings.Join(r.CmdLine, " "); line != "go mod download" {
				im.build = append(im.build, line)
			}
		}
	}
	for _, c := range stages[1].Commands {
		switch c := c.(type) {
		case *instructions.CopyCommand:
			if c.From != stages[0].Name || len(c.SourcePaths) != 1 {
				return nil, fmt.Errorf("%s: COPY of %v from %q is not understood here", name, c.SourcePaths, c.From)
			}
			im.copies = append(im.copies, copied{c.SourcePaths[0], c.DestPath, c.Chown})
		case *instructions.UserCommand:
			im.user = c.User
		case *instructions.EnvCommand:
			for _, kv := range c.Env {
				im.env[kv.Key] = kv.Value
			}
		case *instructions.VolumeCommand:
			im.volumes = append(im.volumes, c.Volumes...)
		case *instructions.ExposeCommand:
			im.ports = append(im.ports, c.Ports...)
		case *instructions.StopSignalCommand:
			im.stop = c.Signal
		case *instructions.HealthCheckCommand:
			im.health = c.Health.Test
		case *instructions.EntrypointCommand:
			if c.PrependShell {
				return nil, fmt.Errorf("%s: ENTRYPOINT needs a shell, and there is none", name)
			}
			im.entrypoint = c.CmdLine
		case *instructions.CmdCommand:
			if c.PrependShell {
				return nil, fmt.Errorf("%s: CMD needs a shell, and there is none", name)
			}
			im.cmd = c.CmdLine
		default:
			return nil, fmt.Errorf("%s: %s is not understood here", name, c.Name())
		}
	}
	return im, nil
}

// copyContext copies what the image's build is given: the repository without what
// Containerfile.dockerignore leaves out.
func copyContext(repo, to string) error {
	f, err := os.Open(filepath.Join(repo, containerfile+".dockerignore"))
	if err != nil {
		return err
	}
	defer f.Close()
	patterns, err := ignorefile.ReadAll(f)
	if err != nil {
		return err
	}
	ignored, err := patternmatcher.New(patterns)
	if err != nil {
		return err
	}
	return filepath.WalkDir(repo, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(repo, name)
		if err != nil || rel == "." {
			return err
		}
		if rel == ".git" && d.IsDir() {
			return fs.SkipDir
		}
		out, err := ignored.MatchesOrParentMatches(filepath.ToSlash(rel))
		if err != nil || out || d.IsDir() {
			return err
		}
		data, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		target := filepath.Join(to, rel)
		return errors.Join(os.MkdirAll(filepath.Dir(target), 0o755), os.WriteFile(target, data, 0o644))
	})
}

// unpack makes the image's root directory.
func (im *image) unpack(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	for dir := root; dir != in.Dir && dir != "/" && strings.HasPrefix(dir, os.TempDir()+"/"); dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range im.copies {
		to := filepath.Join(root, c.to)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			t.Fatal(err)
		}
		run(t, time.Minute, "cp", "-a", filepath.Join(in.Dir, c.from), to)
		owner := c.owner
		if owner == "" {
			owner = "0:0"
		}
		run(t, time.Minute, "chown", "-R", owner, to)
	}
	return root
}

func ourImage(t *testing.T) *image {
	t.Helper()
	im, err := readContainerfile(filepath.Join(in.Repo, containerfile))
	if err != nil {
		t.Fatal(err)
	}
	return im
}

func TestContainerfile(t *testing.T) {
	im := ourImage(t)
	if im.base != "scratch" {
		t.Errorf("base %q, want scratch", im.base)
	}
	uid, _, _ := strings.Cut(im.user, ":")
	if n, err := strconv.Atoi(uid); err != nil || n == 0 {
		// Kubernetes takes only a number for proof of runAsNonRoot.
		t.Errorf("USER %q: want a number other than 0", im.user)
	}
	if im.stop != "SIGTERM" {
		t.Errorf("STOPSIGNAL %q", im.stop)
	}
	data := im.env["MUSTER_DATA_DIR"]
	if !slices.Equal(im.volumes, []string{data}) {
		t.Errorf("VOLUME %v, want the data directory %q", im.volumes, data)
	}
	if !slices.ContainsFunc(im.copies, func(c copied) bool { return c.to == data && c.owner == im.user }) {
		t.Errorf("the image has no %s of %s: a new volume would belong to root", data, im.user)
	}
	if len(im.health) == 0 || im.health[0] != "CMD" {
		t.Errorf("HEALTHCHECK %v: want the exec form, there is no shell", im.health)
	}
	for _, name := range []string{"MUSTER_LISTEN", "MUSTER_HTTP"} {
		a, err := netip.ParseAddrPort(im.env[name])
		if err != nil || !slices.Contains(im.ports, fmt.Sprint(a.Port())) {
			t.Errorf("%s=%s, and EXPOSE has %v", name, im.env[name], im.ports)
		}
	}
}

// TestImageIsStatic: there is no loader and no C library in the image.
func TestImageIsStatic(t *testing.T) {
	f, err := elf.Open(in.Muster)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC {
			t.Errorf("%s in the program: it is not static", p.Type)
		}
	}
}

// TestBuildContext: the build is given each package that the program is made of, and
// not this directory.
func TestBuildContext(t *testing.T) {
	cmd := exec.Command("go", "list", "-deps", "-f", "{{if and .Module .Module.Main}}{{.Dir}}{{end}}", "./cmd/muster")
	cmd.Dir = in.Repo
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range strings.Fields(string(out)) {
		rel, err := filepath.Rel(in.Repo, dir)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(filepath.Join(in.Dir, "context", rel)); err != nil {
			t.Error(err)
		}
	}
	top, err := os.ReadDir(filepath.Join(in.Dir, "context"))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range top {
		if e.Name() == "deploy" || e.Name() == ".git" || e.Name() == "conformance" {
			t.Errorf("%s is sent to the build, which has no use for it", e.Name())
		}
	}
}

// TestContainer runs the image alone, with what one must say: where clients find it.
func TestContainer(t *testing.T) {
	n := newNetwork(t, netip.MustParsePrefix("10.90.1.0/24"))
	im := ourImage(t)
	c := &container{name: "alone", address: n.address(11), image: im, env: map[string]string{"MUSTER_ADVERTISE": n.address(11) + ":9092"}}
	uid := uidOf(t, im.user)
	c.mounts = map[string]string{volume(t, uid): im.volumes[0]}
	p := n.startContainer(c)
	until(t, patience, "ready", func() bool {
		return strings.HasPrefix(p.stdout.String(), "ready") && answers("http://"+n.address(11)+":8080/readyz")
	}, p)
	c.exec(t, toolLimit, im.health[1:]...)
	checkMetrics(t, "http://"+n.address(11)+":8080/metrics")
	work(t, &nodes{tool: func(args ...string) []string {
		return c.command(append([]string{path.Join("/", "usr/bin/muster")}, args...)...).Args
	}, ids: []int{1}})
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{fmt.Sprintf("Uid:\t%d\t%d\t", uid, uid), "NoNewPrivs:\t1", "CapEff:\t0000000000000000"} {
		if !strings.Contains(string(status), want) {
			t.Errorf("status of the process has no %q", want)
		}
	}
	p.stop(patience)
	if out, err := c.command(im.health[1:]...).CombinedOutput(); err == nil {
		t.Errorf("the health check passes on a daemon that has ended: %s", out)
	}
}

// checkMetrics: what the page tells to watch is there to be watched.
func checkMetrics(t *testing.T, url string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(in.Repo, page))
	if err != nil {
		t.Fatal(err)
	}
	names := regexp.MustCompile("`(?:muster|etcd)_[a-z_]+`").FindAllString(string(text), -1)
	if len(names) < 5 {
		t.Fatalf("the page names only the metrics %v", names)
	}
	res, err := client.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	served, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if name = strings.Trim(name, "`"); !strings.Contains(string(served), "\n# TYPE "+name+" ") {
			t.Errorf("no metric %s", name)
		}
	}
}

// fields reads a listing of a tool with -o json.
func fields(t *testing.T, text string, into any) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), into); err != nil {
		t.Fatalf("%v in: %s", err, text)
	}
}
