//go:build linux

package deploy

import (
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

// pods are those of a StatefulSet, run as kubelet would run them.
type pods struct {
	t          *testing.T
	net        *network
	set        *appsv1.StatefulSet
	containers []*container
	all        []*process
}

// startPods starts all pods of the manifests at once, on addresses from .11 on. Names
// are those that the cluster's DNS would have; more of them may be given. A Secret or
// ConfigMap that a volume shows is a directory in files, by name.
func startPods(t *testing.T, n *network, m *manifests, files map[string]string, moreHosts string) *pods {
	t.Helper()
	p := &pods{t: t, net: n, set: m.sets[0]}
	spec := p.set.Spec.Template.Spec
	hosts := moreHosts
	for i := range *p.set.Spec.Replicas {
		hosts += fmt.Sprintf("%s %s.cluster.local %s\n", n.address(11+int(i)), podHost(p.set, i), podHost(p.set, i))
	}
	setHosts(t, hosts)
	for i := range *p.set.Spec.Replicas {
		c := &container{name: podName(p.set, i), address: n.address(11 + int(i)), image: ourImage(t), hosts: hosts,
			env: podEnv(t, m, p.set, i), args: spec.Containers[0].Args, mounts: map[string]string{},
			user: fmt.Sprintf("%d:%d", *spec.SecurityContext.RunAsUser, *spec.SecurityContext.RunAsGroup)}
		for _, v := range spec.Containers[0].VolumeMounts {
			c.mounts[p.volume(v.Name, files)] = v.MountPath
		}
		p.containers = append(p.containers, c)
		p.all = append(p.all, n.startContainer(c))
	}
	return p
}

// volume is a directory with the content and the modes that kubelet gives it.
func (p *pods) volume(name string, files map[string]string) string {
	p.t.Helper()
	spec := p.set.Spec.Template.Spec
	group := int(*spec.SecurityContext.FSGroup)
	dir := p.t.TempDir()
	source, mode := "", os.FileMode(0o644)
	for _, v := range spec.Volumes {
		switch {
		case v.Name != name:
		case v.Secret != nil:
			source, mode = v.Secret.SecretName, os.FileMode(*v.Secret.DefaultMode)
		case v.ConfigMap != nil:
			source = v.ConfigMap.Name
		}
	}
	if source != "" {
		from, ok := files[source]
		if !ok {
			p.t.Fatalf("volume %s shows %s, which nothing in the page makes", name, source)
		}
		run(p.t, time.Minute, "cp", "-r", from+"/.", dir)
		entries, err := os.ReadDir(dir)
		if err != nil {
			p.t.Fatal(err)
		}
		for _, e := range entries {
			file := filepath.Join(dir, e.Name())
			if err := os.Chmod(file, mode); err != nil {
				p.t.Fatal(err)
			}
		}
	}
	run(p.t, time.Minute, "chown", "-R", fmt.Sprintf("0:%d", group), dir)
	// A volume belongs to root, and the group of the pod may write it.
	if err := syscall.Chmod(dir, 0o2775); err != nil {
		p.t.Fatal(err)
	}
	return dir
}

// ready waits until the probes of a pod say what they must.
func (p *pods) ready(i int) {
	p.t.Helper()
	c := p.set.Spec.Template.Spec.Containers[0]
	ports := map[string]int32{}
	for _, port := range c.Ports {
		ports[port.Name] = port.ContainerPort
	}
	probe := func(probe *corev1.Probe) bool {
		get := probe.HTTPGet
		return answers(fmt.Sprintf("http://%s:%d%s", p.containers[i].address, ports[get.Port.StrVal], get.Path))
	}
	until(p.t, time.Duration(c.StartupProbe.FailureThreshold*c.StartupProbe.PeriodSeconds)*time.Second, p.containers[i].name+" is ready",
		func() bool { return probe(c.StartupProbe) && probe(c.ReadinessProbe) && probe(c.LivenessProbe) }, p.all[i])
}

// tool is kubectl exec POD -- muster ARGS.
func (p *pods) tool(i int) func(args ...string) []string {
	return func(args ...string) []string {
		return p.containers[i].command(append([]string{"/usr/bin/muster"}, args...)...).Args
	}
}

// exercise lets the pods work, loses one and takes it back, and stops all.
func (p *pods) exercise() {
	t := p.t
	t.Helper()
	for i := range p.all {
		p.ready(i)
	}
	first := &nodes{ids: []int{0, 1, 2}, tool: p.tool(0)}
	first.brokers(t, 0, 1, 2)
	work(t, first)
	p.all[0].kill()
	second := &nodes{ids: []int{0, 1, 2}, tool: p.tool(1)}
	second.brokers(t, 1, 2)
	run(t, toolLimit, second.tool("topics", "create", "meanwhile", "--partitions", "2")...)
	p.all[0] = p.net.startContainer(p.containers[0])
	p.ready(0)
	second.brokers(t, 0, 1, 2)
	stopAll(t, p.all)
}

// TestKubernetesEmbedded runs the three pods, with the certificates of the page.
func TestKubernetesEmbedded(t *testing.T) {
	need(t, "openssl")
	dir := runBlock(t, "Kubernetes", "openssl", nil)
	secret := filepath.Join(t.TempDir(), "muster-etcd")
	run(t, time.Minute, "mkdir", secret)
	for _, name := range []string{"ca.crt", "tls.crt", "tls.key"} {
		run(t, time.Minute, "cp", filepath.Join(dir, "tls-pods", name), secret)
	}
	n := newNetwork(t, netip.MustParsePrefix("10.90.3.0/24"))
	startPods(t, n, loadVariant(t, "embedded"), map[string]string{"muster-etcd": secret}, "").exercise()
}

// TestKubernetesExternal runs the three pods on a real etcd, with the role of the page.
func TestKubernetesExternal(t *testing.T) {
	need(t, "openssl", "etcdctl")
	m := loadVariant(t, "external")
	n := newNetwork(t, netip.MustParsePrefix("10.90.4.0/24"))
	// One member stands for the three that the file names.
	names := []string{"etcd-0.etcd.etcd.svc", "etcd-1.etcd.etcd.svc", "etcd-2.etcd.etcd.svc"}
	hosts := n.address(5) + " " + strings.Join(names, " ") + "\n"
	setHosts(t, hosts)
	tls := makeCertificate(t, names)
	url := "https://" + names[0] + ":2379"
	ns := n.attach(n.address(5))
	etcd := start(t, "etcd", exec.Command("ip", "netns", "exec", ns, in.Etcd, "--data-dir", t.TempDir(), "--listen-client-urls", "https://"+n.address(5)+":2379",
		"--advertise-client-urls", url, "--cert-file", tls+"/tls.crt", "--key-file", tls+"/tls.key",
		"--listen-peer-urls", "http://127.0.0.1:2380", "--log-level", "error"))
	env := map[string]string{"ETCDCTL_API": "3", "ETCDCTL_ENDPOINTS": url, "ETCDCTL_CACERT": tls + "/ca.crt"}
	until(t, patience, "etcd answers", func() bool {
		cmd := exec.Command("etcdctl", "endpoint", "health")
		cmd.Env = environment(env)
		return cmd.Run() == nil
	}, etcd)
	dir := runBlock(t, "An etcd that is there already", "role grant-permission", env)
	user := t.TempDir()
	run(t, time.Minute, "cp", filepath.Join(dir, "password"), user)
	ca := t.TempDir()
	run(t, time.Minute, "cp", tls+"/ca.crt", ca)
	startPods(t, n, m, map[string]string{"muster-etcd-ca": ca, "muster-etcd-user": user}, hosts).exercise()
}

// runBlock runs the one block of a chapter that has this text, in a directory of its
// own, which it returns.
func runBlock(t *testing.T, title, text string, env map[string]string) string {
	t.Helper()
	for _, c := range onPage(t) {
		for _, b := range c.blocks {
			if c.title != title || !b.runs() || !strings.Contains(b.text, text) {
				continue
			}
			dir := t.TempDir()
			cmd := exec.Command("bash", "-euo", "pipefail", "-c", b.text)
			cmd.Dir, cmd.Env = dir, environment(env)
			p := start(t, "block", cmd)
			until(t, blockLimit, "the block has ended", p.ended)
			if !cmd.ProcessState.Success() {
				t.Fatalf("%s line %d: %s\n%s%s", page, b.line, cmd.ProcessState, p.stdout.String(), p.stderr.String())
			}
			return dir
		}
	}
	t.Fatalf("%s: no block with %q in %q", page, text, title)
	return ""
}

func environment(more map[string]string) []string {
	env := cleanEnvironment()
	for name, value := range maps.All(more) {
		env = append(env, name+"="+value)
	}
	return env
}
