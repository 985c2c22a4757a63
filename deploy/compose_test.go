//go:build linux

package deploy

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
)

// loadCompose reads compose.yaml as Compose itself does: against the schema, with
// merges and defaults.
func loadCompose(t *testing.T) *types.Project {
	t.Helper()
	options, err := cli.NewProjectOptions([]string{filepath.Join(in.Repo, "deploy/compose/compose.yaml")}, cli.WithoutEnvironmentResolution)
	if err != nil {
		t.Fatal(err)
	}
	p, err := options.LoadProject(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestComposeFile(t *testing.T) {
	p := loadCompose(t)
	subnet := netip.MustParsePrefix(p.Networks["muster"].Ipam.Config[0].Subnet)
	im := ourImage(t)
	used := map[string]string{}
	for name, s := range p.Services {
		if s.Build.Context != in.Repo {
			t.Errorf("%s is built in %s, want the top of the repository", name, s.Build.Context)
		}
		if s.Build.Dockerfile != containerfile {
			t.Errorf("%s is built from %s", name, s.Build.Dockerfile)
		}
		if !s.ReadOnly || !slices.Equal(s.CapDrop, []string{"ALL"}) || !slices.Equal(s.SecurityOpt, []string{"no-new-privileges:true"}) {
			t.Errorf("%s may do more than it needs", name)
		}
		if len(s.Ports) > 0 {
			// The etcds have no authentication: it is the network that keeps others out.
			t.Errorf("%s publishes ports", name)
		}
		if len(s.Volumes) != 1 || s.Volumes[0].Target != im.volumes[0] || p.Volumes[s.Volumes[0].Source].Name == "" {
			t.Errorf("%s has the volumes %v, want a named one at %s", name, s.Volumes, im.volumes[0])
			continue
		}
		address := s.Networks["muster"].Ipv4Address
		if a, err := netip.ParseAddr(address); err != nil || !subnet.Contains(a) {
			t.Errorf("%s has address %s, which is not in %s", name, address, subnet)
		}
		for _, own := range []string{s.Volumes[0].Source, address, *s.Environment["MUSTER_BROKER_ID"], *s.Environment["MUSTER_ADVERTISE"]} {
			if used[own] != "" {
				t.Errorf("%s and %s share %s", name, used[own], own)
			}
			used[own] = name
		}
		member := fmt.Sprintf("%s=http://%s:2380", *s.Environment["MUSTER_ETCD_NAME"], address)
		if !slices.Contains(strings.Split(*s.Environment["MUSTER_ETCD_INITIAL_CLUSTER"], ","), member) {
			t.Errorf("the initial cluster of %s has no %s", name, member)
		}
	}
	for name, s := range p.Services {
		want := []string{"CMD", "/usr/bin/muster", "brokers", "describe", *s.Environment["MUSTER_BROKER_ID"]}
		if s.HealthCheck == nil || !slices.Equal(s.HealthCheck.Test, want) {
			t.Errorf("%s is healthy by %v, want %v", name, s.HealthCheck, want)
		}
	}
	if len(p.Services) != 3 {
		t.Errorf("%d services, want 3", len(p.Services))
	}
}

// TestCompose brings the three services up as Compose would, on a bridge of the same
// addresses, and works with them from this host and from a container.
func TestCompose(t *testing.T) {
	p := loadCompose(t)
	im := ourImage(t)
	n := newNetwork(t, netip.MustParsePrefix(p.Networks["muster"].Ipam.Config[0].Subnet))
	var containers []*container
	var all []*process
	names := p.ServiceNames()
	for _, name := range names {
		s := p.Services[name]
		c := &container{name: s.Hostname, address: s.Networks["muster"].Ipv4Address, image: im, env: map[string]string{}, args: s.Command}
		for k, v := range s.Environment {
			c.env[k] = *v
		}
		c.mounts = map[string]string{volume(t, uidOf(t, im.user)): s.Volumes[0].Target}
		containers = append(containers, c)
		all = append(all, n.startContainer(c))
	}
	ready := func(i int) {
		t.Helper()
		until(t, patience, containers[i].name+" is ready", func() bool {
			return strings.HasPrefix(all[i].stdout.String(), "ready") && answers("http://"+containers[i].address+":8080/readyz")
		}, all[i])
	}
	for i := range all {
		ready(i)
		containers[i].exec(t, toolLimit, p.Services[names[i]].HealthCheck.Test[1:]...)
	}
	// A tool on the host, as the head of the file says.
	host := &nodes{ids: []int{1, 2, 3}, tool: func(args ...string) []string {
		return append([]string{"env", "MUSTER_ETCD_ENDPOINTS=http://" + containers[0].address + ":2379", in.Muster}, args...)
	}}
	host.brokers(t, 1, 2, 3)
	work(t, host)

	// One dies; the others go on, and it comes back to what it had.
	all[1].kill()
	host.brokers(t, 1, 3)
	run(t, toolLimit, host.tool("topics", "create", "meanwhile", "--partitions", "2")...)
	all[1] = n.startContainer(containers[1])
	ready(1)
	host.brokers(t, 1, 2, 3)
	again := &nodes{ids: []int{1, 2, 3}, tool: func(args ...string) []string {
		return containers[2].command(append([]string{"/usr/bin/muster"}, args...)...).Args
	}}
	again.brokers(t, 1, 2, 3)
	stopAll(t, all)
}

// uidOf is the number in USER.
func uidOf(t *testing.T, user string) int {
	t.Helper()
	text, _, _ := strings.Cut(user, ":")
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("user %q: %v", user, err)
	}
	return n
}
