// Package conformance runs Muster as its users do: real processes, built with the
// race detector, and clients that are not ours, kcat and etcdctl.
//
//	endtoend_test.go  the main job, through every fault that it must survive
//	rolling_test.go   a cluster of three, each of them taken away in turn
//	script_test.go    random scripts of events for members of all kinds; script_observer_test.go judges, and script_faults_test.go it
//	start_test.go     how a daemon starts, refuses to start, and comes back
//	clients_test.go   stock producers and consumers
//	health_test.go    what a service manager and probes see of a daemon
//
// and what those stand on:
//
//	main_test.go      the binary, the tools, the reaper
//	process_test.go   processes: start, signal, freeze, logs
//	cluster_test.go   a daemon, its ports and tools
//	three_test.go     three daemons that form one cluster
//	etcdctl_test.go   the registry as etcdctl sees it, now and as it changed
//	tree_test.go      what the registry's layout says that it holds
//	lines_test.go     real text, and its way into kcat
//	traffic_test.go   what was acknowledged against what was printed, as it happens
//	output_test.go    what consumers printed, against what the registry allowed
package conformance

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
)

const reaperVariable = "MUSTER_CONFORMANCE_REAPER"

func TestMain(m *testing.M) {
	if os.Getenv(reaperVariable) != "" {
		reap(os.Stdin)
		return
	}
	status := m.Run()
	if builtIn != "" {
		os.RemoveAll(builtIn)
	}
	os.Exit(status)
}

// The reaper is a copy of this program that outlives it by a moment: told of each
// process that starts and ends, it kills what is left when its input closes. So
// nothing stays behind even when the test is killed, or ends in the panic of a
// timeout, in which no cleanup runs.
func reap(in io.Reader) {
	alive := map[int]bool{}
	for lines := bufio.NewScanner(in); lines.Scan(); {
		if pid, err := strconv.Atoi(lines.Text()); err == nil && pid != 0 {
			if alive[max(pid, -pid)] = pid > 0; pid < 0 {
				delete(alive, -pid)
			}
		}
	}
	for pid := range alive {
		syscall.Kill(-pid, syscall.SIGKILL)
	}
}

var reaper = sync.OnceValues(func() (io.Writer, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), reaperVariable+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for the test, not for the reaper
	pipe, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	return pipe, cmd.Start()
})

// tellReaper says that a process has started, or with its negative, that it is over.
func tellReaper(pid int) error {
	w, err := reaper()
	if err == nil {
		_, err = fmt.Fprintln(w, pid)
	}
	return err
}

var builtIn string // directory of the binary

// musterBinary builds the program with the race detector, once.
var musterBinary = sync.OnceValues(func() (string, error) {
	root, err := filepath.Abs("..")
	if err != nil {
		return "", err
	}
	if builtIn, err = os.MkdirTemp("", "muster-conformance-bin-"); err != nil {
		return "", err
	}
	path := filepath.Join(builtIn, "muster")
	cmd := exec.Command("go", "build", "-race", "-o", path, "github.com/muster-io/muster/cmd/muster")
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build -race: %w\n%s", err, out)
	}
	return path, nil
})

// need asks for the clients of others. In CI a missing one is a failure: a check
// that nobody runs protects nobody.
func need(t *testing.T, tools ...string) {
	t.Helper()
	packages := map[string]string{"kcat": "kcat", "etcdctl": "etcd-client"}
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
