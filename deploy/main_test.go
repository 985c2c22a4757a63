//go:build linux

// Package deploy runs what this directory holds, and the commands of
// docs/deployment.md, as they stand: the very flags, paths, ports and environment.
//
//	main_test.go        the program, built as the image builds it; a host of our own
//	host_test.go        that host: networks, containers, machines with systemd
//	process_test.go     processes: start, wait, stop
//	work_test.go        what every set of three nodes has to do
//	container_test.go   Containerfile
//	compose_test.go     compose.yaml
//	kubernetes_test.go  the manifests, as types; kubernetes_run_test.go: as nodes
//	systemd_test.go     the unit
//	page_test.go        docs/deployment.md
//
// Nothing needs to be mapped, because the tests run in Linux namespaces: with
// processes, mounts and networks of their own. So they want root, and when the host
// ends everything in it ends.
package deploy

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
)

const insideVariable = "MUSTER_DEPLOY_INSIDE"

// prepared is what is made before the network is gone.
type prepared struct {
	Repo string // top of the repository
	Dir  string // temporary
	// Muster is built by the command of the Containerfile, from what the image's
	// build is given. Etcd is of the version that Muster has inside.
	Muster, Etcd string
}

var in prepared

func TestMain(m *testing.M) {
	if text := os.Getenv(insideVariable); text != "" {
		if err := json.Unmarshal([]byte(text), &in); err != nil {
			panic(err)
		}
		os.Unsetenv(insideVariable)
		if err := settle(); err != nil {
			fmt.Println("host of the tests:", err)
			os.Exit(1)
		}
		os.Exit(m.Run())
	}
	status, err := outside()
	if err != nil {
		fmt.Println(err)
	}
	os.Exit(status)
}

// outside prepares, and runs this program again in namespaces of its own.
func outside() (status int, err error) {
	if os.Getuid() != 0 {
		text := "these tests run in namespaces of their own, and need root for that"
		if os.Getenv("CI") == "true" {
			return 1, errors.New(text)
		}
		return 0, errors.New("skipped: " + text)
	}
	var p prepared
	if p.Dir, err = os.MkdirTemp("", "muster-deploy-"); err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(p.Dir)) }()
	if err := p.build(); err != nil {
		return 1, err
	}
	text, err := json.Marshal(p)
	if err != nil {
		return 1, err
	}
	// The kernel kills the host when the thread that started it ends.
	runtime.LockOSThread()
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.Env = append(cleanEnvironment(), insideVariable+"="+string(text))
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC,
		Pdeathsig:  syscall.SIGKILL,
	}
	if err := cmd.Run(); err != nil {
		if _, ended := errors.AsType[*exec.ExitError](err); !ended {
			return 1, fmt.Errorf("make namespaces: %w", err)
		}
	}
	return cmd.ProcessState.ExitCode(), nil
}

// etcdctlPatience has etcdctl wait longer for its answers than the five seconds that it
// would, which a busy machine may take.
var etcdctlPatience = []string{"ETCDCTL_DIAL_TIMEOUT=60s", "ETCDCTL_COMMAND_TIMEOUT=60s"}

// cleanEnvironment is this process's without settings of the programs under test.
func cleanEnvironment() []string {
	env := slices.Clone(etcdctlPatience)
	for _, e := range os.Environ() {
		if !strings.HasPrefix(e, "MUSTER_") && !strings.HasPrefix(e, "ETCD") {
			env = append(env, e)
		}
	}
	return env
}

func (p *prepared) build() (err error) {
	if p.Repo, err = filepath.Abs(".."); err != nil {
		return err
	}
	image, err := readContainerfile(filepath.Join(p.Repo, containerfile))
	if err != nil {
		return err
	}
	context, out := filepath.Join(p.Dir, "context"), filepath.Join(p.Dir, "out")
	if err := copyContext(p.Repo, context); err != nil {
		return fmt.Errorf("build context: %w", err)
	}
	for _, line := range image.build {
		// The only path of the build stage that is not in the context.
		cmd := exec.Command("sh", "-euc", strings.ReplaceAll(line, "/out/", out+"/"))
		cmd.Dir, cmd.Env = context, cleanEnvironment()
		if text, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("RUN %s: %w\n%s", line, err, text)
		}
	}
	p.Muster = filepath.Join(out, "muster")
	p.Etcd = filepath.Join(out, "etcd")
	if err := p.buildEtcd(); err != nil {
		return err
	}
	// Others than root go in: a container's user, a machine's daemon.
	return os.Chmod(p.Dir, 0o755)
}

// buildEtcd builds the etcd of the very version that Muster has inside, with the
// flags of the image: so nothing is compiled that was not compiled already. A copy of
// go.mod takes what only the command of etcd needs.
func (p *prepared) buildEtcd() error {
	modfile := filepath.Join(p.Dir, "etcd.mod")
	for from, to := range map[string]string{"go.mod": modfile, "go.sum": filepath.Join(p.Dir, "etcd.sum")} {
		data, err := os.ReadFile(filepath.Join(p.Repo, from))
		if err != nil {
			return err
		}
		if err := os.WriteFile(to, data, 0o644); err != nil {
			return err
		}
	}
	cmd := exec.Command("go", "build", "-modfile="+modfile, "-mod=mod", "-trimpath", "-ldflags=-s -w", "-o", p.Etcd, "go.etcd.io/etcd/server/v3")
	cmd.Dir, cmd.Env = p.Repo, append(cleanEnvironment(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build etcd: %w\n%s", err, text)
	}
	return nil
}

// need asks for a program of others. In CI a missing one is a failure: a check that
// nobody runs protects nobody.
func need(t *testing.T, tools ...string) {
	t.Helper()
	packages := map[string]string{"systemd-analyze": "systemd", "/lib/systemd/systemd": "systemd", "ip": "iproute2", "openssl": "openssl", "kcat": "kcat", "curl": "curl"}
	for _, tool := range tools {
		if _, err := exec.LookPath(tool); err == nil {
			continue
		}
		text := fmt.Sprintf("%s is not installed: apt-get install %s", tool, packages[tool])
		if os.Getenv("CI") == "true" {
			t.Fatal(text)
		}
		t.Skip(text)
	}
}
