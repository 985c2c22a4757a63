//go:build linux

package deploy

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// settle makes the host of the tests out of fresh namespaces.
func settle() error {
	mounts := []struct {
		source, target, kind string
		flags                uintptr
	}{
		{"none", "/", "", syscall.MS_REC | syscall.MS_PRIVATE},
		{"proc", "/proc", "proc", 0},
		{"tmpfs", "/run", "tmpfs", 0},
	}
	for _, m := range mounts {
		if err := syscall.Mount(m.source, m.target, m.kind, m.flags, ""); err != nil {
			return fmt.Errorf("mount %s: %w", m.target, err)
		}
	}
	out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) && os.Getenv("CI") != "true" {
		return nil // need says so
	}
	if err != nil {
		return fmt.Errorf("ip link set lo up: %w %s", err, out)
	}
	return nil
}

// network is a bridge between this host and its nodes.
type network struct {
	t      *testing.T
	name   string
	prefix netip.Prefix
	nodes  int
}

// newNetwork gives the host the first address of the prefix.
func newNetwork(t *testing.T, prefix netip.Prefix) *network {
	t.Helper()
	need(t, "ip")
	n := &network{t: t, prefix: prefix.Masked()}
	a := n.prefix.Addr().As4()
	n.name = fmt.Sprintf("br%08x", binary.BigEndian.Uint32(a[:]))
	n.ip("link", "add", n.name, "type", "bridge")
	t.Cleanup(func() { n.ip("link", "del", n.name) })
	n.ip("addr", "add", n.address(1)+fmt.Sprintf("/%d", prefix.Bits()), "dev", n.name)
	n.ip("link", "set", n.name, "up")
	return n
}

// address is the i-th of the network.
func (n *network) address(i int) string {
	a := n.prefix.Addr()
	for range i {
		a = a.Next()
	}
	return a.String()
}

func (n *network) ip(args ...string) {
	n.t.Helper()
	// A cleanup has no context of the test any more.
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		n.t.Errorf("ip %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// attach makes a network namespace with an address of this network, and returns its name.
func (n *network) attach(address string) string {
	n.t.Helper()
	n.nodes++
	ns := fmt.Sprintf("%s-%d", n.name, n.nodes)
	outer := fmt.Sprintf("v%s-%d", n.name[2:], n.nodes)
	n.ip("netns", "add", ns)
	n.t.Cleanup(func() { n.ip("netns", "del", ns) })
	n.ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", ns)
	// The namespace may outlive its name a little, and its link with it: a resolver
	// would still take this host for one that speaks IPv6 only.
	n.t.Cleanup(func() { n.ip("link", "del", outer) })
	n.ip("link", "set", outer, "master", n.name, "up")
	n.ip("-n", ns, "addr", "add", fmt.Sprintf("%s/%d", address, n.prefix.Bits()), "dev", "eth0")
	n.ip("-n", ns, "link", "set", "eth0", "up")
	n.ip("-n", ns, "link", "set", "lo", "up")
	n.ip("-n", ns, "route", "add", "default", "via", n.address(1))
	return ns
}

// container is what an engine is told to run.
type container struct {
	name, address string
	image         *image
	env           map[string]string // beyond the image's
	args          []string          // in place of the image's
	mounts        map[string]string // directory of the host to path in the container
	hosts         string            // /etc/hosts
	user          string            // in place of the image's

	ns, root string
}

// startContainer runs the program of an image as an engine would: in its own network
// at the address, at its own hostname, with the image's files only, read-only, as its user.
func (n *network) startContainer(c *container) *process {
	t := n.t
	t.Helper()
	need(t, "setpriv", "unshare", "chroot")
	if c.ns == "" {
		c.ns = n.attach(c.address)
		c.root = c.image.unpack(t)
		for _, dir := range []string{"proc", "etc"} {
			if err := os.MkdirAll(filepath.Join(c.root, dir), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		writeFile(t, filepath.Join(c.root, "etc/hosts"), "127.0.0.1 localhost\n"+c.hosts, 0o644)
		writeFile(t, filepath.Join(c.root, "etc/resolv.conf"), "nameserver 127.0.0.1\n", 0o644)
		for _, target := range c.mounts {
			if err := os.MkdirAll(filepath.Join(c.root, target), 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	args := c.args
	if args == nil {
		args = c.image.cmd
	}
	return start(t, c.name, c.command(append(append([]string{}, c.image.entrypoint...), args...)...))
}

// command is a program inside the container, beside what runs there.
func (c *container) command(argv ...string) *exec.Cmd {
	user := c.user
	if user == "" {
		user = c.image.user
	}
	words := []string{"netns", "exec", c.ns, "unshare", "--mount", "--uts", "sh", "testdata/container.sh", c.root, c.name, user}
	for source, target := range c.mounts {
		words = append(words, source+":"+target)
	}
	words = append(words, "--")
	env := map[string]string{}
	for _, more := range []map[string]string{c.image.env, {"HOSTNAME": c.name}, c.env} {
		for k, v := range more {
			env[k] = v
		}
	}
	for k, v := range env {
		words = append(words, k+"="+v)
	}
	words = append(words, "--")
	return exec.Command("ip", append(words, argv...)...)
}

// exec runs a program inside the container to its end; it must succeed.
func (c *container) exec(t *testing.T, limit time.Duration, argv ...string) string {
	t.Helper()
	cmd := c.command(argv...)
	return run(t, limit, cmd.Args...)
}

// volume is a directory as an engine makes it for a user.
func volume(t *testing.T, uid int) string {
	t.Helper()
	dir := t.TempDir()
	// The directories above are the test's; mounts are made by root.
	if err := errors.Join(os.Chown(dir, uid, uid), os.Chmod(dir, 0o755)); err != nil {
		t.Fatal(err)
	}
	return dir
}

// setHosts makes names known on this host until the test ends.
func setHosts(t *testing.T, hosts string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "hosts")
	writeFile(t, file, "127.0.0.1 localhost\n"+hosts, 0o644)
	if err := syscall.Mount(file, "/etc/hosts", "", syscall.MS_BIND, ""); err != nil {
		t.Fatalf("mount /etc/hosts: %v", err)
	}
	t.Cleanup(func() { syscall.Unmount("/etc/hosts", syscall.MNT_DETACH) })
}

// machine is a copy of this host with a systemd of its own.
type machine struct {
	t    *testing.T
	name string
	p    *process
	pid  string // of its first process
}

// boot starts a machine whose root has the directory as home.
func (n *network) boot(name, address, hosts, home string) *machine {
	t := n.t
	t.Helper()
	need(t, "/lib/systemd/systemd", "nsenter", "unshare")
	ns := n.attach(address)
	dir := t.TempDir()
	file := filepath.Join(dir, "hosts")
	writeFile(t, file, "127.0.0.1 localhost\n"+hosts, 0o644)
	root := filepath.Join(dir, "machine")
	if err := os.Mkdir(root, 0o755); err != nil {
		t.Fatal(err)
	}
	m := &machine{t: t, name: name}
	m.p = start(t, name, exec.Command("ip", "netns", "exec", ns, "unshare", "--mount", "--uts", "--ipc", "--cgroup", "--pid", "--fork",
		"--kill-child", "sh", "testdata/machine.sh", root, name, file, home))
	return m
}

// up waits until the machine takes commands.
func (m *machine) up() {
	m.t.Helper()
	until(m.t, patience, m.name+" is up", func() bool {
		pid := m.p.cmd.Process.Pid
		children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
		if m.pid = strings.TrimSpace(string(children)); err != nil || m.pid == "" {
			return false
		}
		return m.command("systemctl", "is-active", "-q", "boot.target").Run() == nil
	}, m.p)
	m.t.Cleanup(func() {
		if m.t.Failed() {
			out, err := m.command("journalctl", "--no-pager", "-u", "muster", "-n", "60").CombinedOutput()
			m.t.Logf("--- journal of %s (%v)\n%s", m.name, err, out)
		}
	})
}

// command is a program on the machine, run by root in its home.
func (m *machine) command(argv ...string) *exec.Cmd {
	cmd := exec.Command("nsenter", append([]string{"--target", m.pid, "--all", "env", "--chdir=/root"}, argv...)...)
	cmd.Env = append([]string{"HOME=/root", "LANG=C.UTF-8", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, etcdctlPatience...)
	return cmd
}

// put writes a file on the machine.
func (m *machine) put(t *testing.T, path string, data []byte) {
	t.Helper()
	cmd := m.command("sh", "-c", `cat >"$0"`, path)
	cmd.Stdin = strings.NewReader(string(data))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("write %s on %s: %v\n%s", path, m.name, err, out)
	}
}
