//go:build linux

package deploy

import (
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"
	"time"
)

// mostExposure is the largest score of `systemd-analyze security` that we accept, of
// 10. What is left of it is that the daemon talks to the network.
const mostExposure = 2.0

// TestUnit lets systemd itself judge the unit, on a machine where it is installed. That
// it runs there, three times, is for the page to show.
func TestUnit(t *testing.T) {
	n := newNetwork(t, netip.MustParsePrefix("10.90.5.0/24"))
	m := n.boot("node1", n.address(11), n.address(11)+" node1\n", t.TempDir())
	m.up()
	for path, file := range map[string]string{
		"/etc/systemd/system/muster.service": "muster.service",
		"/etc/sysusers.d/muster.conf":        "muster.sysusers",
	} {
		data, err := os.ReadFile(filepath.Join("systemd", file))
		if err != nil {
			t.Fatal(err)
		}
		m.exec(t, "mkdir", "-p", filepath.Dir(path))
		m.put(t, path, data)
	}
	m.exec(t, "systemd-sysusers")
	// verify asks only that the program is there and can be run.
	m.exec(t, "ln", "-s", "/bin/true", "/usr/local/bin/muster")
	if out := m.exec(t, "systemd-analyze", "verify", "--man=no", "/etc/systemd/system/muster.service"); out != "" {
		t.Errorf("systemd-analyze verify: %s", out)
	}
	out := m.exec(t, "systemd-analyze", "security", "--offline=yes", "--no-pager", "/etc/systemd/system/muster.service")
	found := regexp.MustCompile(`Overall exposure level for muster.service: ([0-9.]+) (\S+)`).FindStringSubmatch(out)
	if found == nil {
		t.Fatalf("systemd-analyze security: %s", out)
	}
	score, err := strconv.ParseFloat(found[1], 64)
	if err != nil || score > mostExposure {
		t.Errorf("exposure %s, want at most %.1f\n%s", found[1], mostExposure, out)
	}
	t.Logf("exposure %s of 10, %s", found[1], found[2])
}

// exec runs a command on the machine to its end; it must succeed.
func (m *machine) exec(t *testing.T, argv ...string) string {
	t.Helper()
	cmd := m.command(argv...)
	return run(t, time.Minute, append([]string{"env"}, append(cmd.Env, cmd.Args...)...)...)
}
