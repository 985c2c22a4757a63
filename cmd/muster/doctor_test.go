package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/muster-io/muster/inspect"
	"github.com/muster-io/muster/rebalance/groups"
	"github.com/muster-io/muster/registry"
)

// settle is for a test that changes nothing while the doctor looks. The leases of what
// it suspects are waited for as well.
const settle = "500ms"

// faultyTTL is of leases that the doctor waits for: short, and longer than a busy machine
// stands still.
const faultyTTL = 8 * time.Second

// Ten faults in the registry of a daemon that runs: each is found, those that can
// be repaired are, and when the others are undone by hand nothing is found.
func TestDoctorFindsTenFaults(t *testing.T) {
	st := openLive(t)
	var root registry.Root
	if status, out, _ := ask(t, "", "registry", "doctor"); status != 0 || !strings.HasPrefix(out, "healthy: ") {
		t.Fatalf("a fresh daemon: status %d, %s", status, out)
	}
	if status, _, stderr := ask(t, "", "topics", "create", "repaired", "--partitions", "4"); status != 0 {
		t.Fatal(stderr)
	}
	awaitTopic(t, st, root, "repaired", 4)
	alive, ghost, other := keptAliveFor(t, st, faultyTTL), keptAliveFor(t, st, faultyTTL), keptAliveFor(t, st, faultyTTL)
	g := root.Group("shop")
	p := func(n int32) registry.Partition { return registry.Partition{Topic: "repaired", Home: 1, Number: n} }
	gone := registry.Partition{Topic: "gone", Home: 1}
	record := `{"version":1,"subscription":{"repaired":1},"pattern":"static","timestamp":"1","strategy":["range"]}`
	plant(t, st, g.ID("c1"), record, alive.Lease())
	for _, o := range []struct {
		n     int32
		owner string
		lease registry.LeaseID
	}{{0, "c1-0", alive.Lease()}, {1, "ghost-host-9", ghost.Lease()}, {2, "c1-0", 0}} {
		plant(t, st, g.Owner(p(o.n)), o.owner, o.lease)
	}
	const silent = `{"version":1,"host":"127.0.0.1","port":1,"jmx_port":-1,"timestamp":"1"}`
	faults := []struct {
		code, key string
		repaired  bool
	}{
		{"owner-without-member", g.Owner(p(1)), true}, // planted above, as are the next and the last
		{"owner-without-lease", g.Owner(p(2)), true},
		{"partition-unowned", g.Owner(p(3)), false},
		{"member-without-lease", g.ID("dead"), true},
		{"unreadable-record", root.Topic("odd"), false},
		{"offset-past-log-end", g.Offset(p(0)), false},
		{"offset-below-zero", g.Offset(p(1)), true},
		{"partition-state-missing", root.PartitionState("repaired", 3), true},
		{"broker-silent", root.Broker(7), false},
		{"state-unknown-leader", root.PartitionState("repaired", 2), true},
		{"offset-of-deleted-topic", g.Offset(gone), true},
		{"owner-of-deleted-topic", g.Owner(gone), true},
	}
	plant(t, st, g.ID("dead"), record, 0)
	plant(t, st, root.Topic("odd"), "not a record", 0)
	plant(t, st, g.Offset(p(0)), "17", 0)
	plant(t, st, g.Offset(p(1)), "-1", 0)
	del(t, st, root.PartitionState("repaired", 3))
	plant(t, st, root.Broker(7), silent, other.Lease())
	plant(t, st, root.PartitionState("repaired", 2), `{"version":1,"leader":9,"leader_epoch":0,"isr":[1]}`, 0)
	plant(t, st, g.Offset(gone), "3", 0)
	plant(t, st, g.Owner(gone), "c1-0", alive.Lease())

	var want, left, codes []string
	for _, f := range faults {
		want = append(want, f.code+" "+f.key)
		if f.repaired {
			codes = append(codes, "--only", f.code)
		} else {
			left = append(left, f.code+" "+f.key)
		}
	}
	left = append(left, "partition-unowned "+g.Owner(p(1))) // nobody is there to claim what was repaired
	slices.Sort(want)
	slices.Sort(left)
	examine := func(stdin string, args ...string) (int, []string, inspect.Report, string) {
		status, out, stderr := ask(t, stdin, append([]string{"registry", "doctor", "-o", "json", "--settle", settle}, args...)...)
		r := parse[inspect.Report](t, out)
		var found []string
		for _, f := range r.Findings {
			found = append(found, string(f.Code)+" "+f.Key)
		}
		slices.Sort(found)
		return status, found, r, stderr
	}
	pastEnd := "offset-past-log-end " + g.Offset(p(0))
	// look examines again where the only thing that is missed is what a daemon was asked for
	// that has not answered in time.
	look := func(stdin string, args ...string) (status int, found []string, r inspect.Report, stderr string) {
		for range 3 {
			status, found, r, stderr = examine(stdin, args...)
			if slices.Contains(found, pastEnd) || len(r.Findings) == 0 {
				break
			}
			t.Log("examining again: the daemon has not told where its log ends")
		}
		return status, found, r, stderr
	}
	// A no leaves everything as it is.
	_, revision, err := registry.GetKey(t.Context(), st, root.ClusterID())
	if err != nil {
		t.Fatal(err)
	}
	status, found, _, stderr := look("no\n", "--fix")
	if status != 1 || !slices.Equal(found, want) {
		t.Fatalf("status %d, found\n%s\nwant\n%s", status, strings.Join(found, "\n"), strings.Join(want, "\n"))
	}
	if _, now, _ := registry.GetKey(t.Context(), st, root.ClusterID()); now != revision ||
		!strings.Contains(stderr, "nothing was repaired") || !strings.Contains(stderr, "delete it") {
		t.Errorf("revision %d was %d\n%s", now, revision, stderr)
	}
	// What would lose a position is left alone unless it is named.
	_, _, r, _ := examine("", "--fix", "--yes")
	for _, f := range r.Findings {
		if f.Repaired != (f.Repair != nil && f.Repair.Loses == "") {
			t.Errorf("%s %s: repaired %t", f.Code, f.Key, f.Repaired)
		}
	}
	status, out, stderr := ask(t, "", append([]string{"registry", "doctor", "--fix", "--yes", "--settle", settle}, codes...)...)
	if status != 1 || !strings.Contains(out, "what to do: ") {
		t.Errorf("status %d\n%s\n%s", status, out, stderr)
	}
	status, found, _, _ = look("")
	if status != 1 || !slices.Equal(found, left) {
		t.Errorf("status %d, after the repairs\n%s\nwant\n%s", status, strings.Join(found, "\n"), strings.Join(left, "\n"))
	}
	for _, key := range []string{root.Topic("odd"), g.Offset(p(0)), root.Broker(7), g.ID("c1")} {
		del(t, st, key)
	}
	for n := range int32(4) {
		del(t, st, g.Owner(p(n)))
	}
	if status, found, r, _ := examine(""); status != 0 || !r.Healthy {
		t.Errorf("all undone: status %d, %s", status, strings.Join(found, "\n"))
	}
	if status, _, stderr := ask(t, "", "groups", "list"); status != 0 {
		t.Error(stderr)
	}
}

// awaitTopic waits until the daemon serves all partitions of a topic and states how many.
func awaitTopic(t *testing.T, st registry.Store, root registry.Root, topic string, partitions int) {
	t.Helper()
	var list []registry.Partition
	for n := range int32(partitions) {
		list = append(list, registry.Partition{Topic: topic, Home: 1, Number: n})
	}
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		stated, _, err := registry.GetKey(t.Context(), st, root.TopicBroker(topic, 1))
		if err != nil {
			t.Fatal(err)
		}
		if stated != nil && string(stated.Value) == strconv.Itoa(partitions) && len(groups.AskBrokers(st, root)(t.Context(), list)) == partitions {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the daemon does not serve topic %s", topic)
		}
	}
}

func del(t *testing.T, st registry.Store, key string) {
	t.Helper()
	if _, err := st.Txn(t.Context(), registry.Txn{Then: []registry.Op{registry.Delete(key)}}); err != nil {
		t.Fatal(err)
	}
}

func TestDoctorUse(t *testing.T) {
	for _, args := range []string{"--yes", "--only unreadable-record", "--fix --only nosuch", "--settle 0s", "surplus", "-o yaml"} {
		if status, _, stderr := call(t, strings.Fields("registry doctor "+args)...); status != 2 {
			t.Errorf("%s: status %d, %s", args, status, stderr)
		}
	}
}

// Field case 53 at the command line.
func TestCase53(t *testing.T) {
	st := openLive(t)
	root, err := registry.ParseRoot("/case53")
	if err != nil {
		t.Fatal(err)
	}
	session := keptAlive(t, st)
	p := registry.Partition{Topic: "repaired", Home: 1}
	plant(t, st, root.Group("oldlive").ID("c1"), "{}", session.Lease())
	plant(t, st, root.Group("oldlive").Offset(p), "5", 0)
	var dead registry.Txn
	for n := range int32(900) {
		p.Number = n
		dead.Then = append(dead.Then, registry.Put(root.Group("olddead").Offset(p), []byte("5"), 0))
		if len(dead.Then) == registry.MaxTxnOps || n == 899 {
			if _, err := st.Txn(t.Context(), dead); err != nil {
				t.Fatal(err)
			}
			dead.Then = nil
		}
	}
	cmd := func(args ...string) (int, string, string) {
		return ask(t, "", append(args, "--registry-root", "/case53")...)
	}
	for _, c := range []struct {
		args   string
		status int
		says   string
	}{
		{"groups delete oldlive", 1, "group has registered members: c1"},
		{"groups delete nosuch", 1, "group not found: nosuch"},
		{"groups delete nosuch oldlive olddead", 1, "group not found: nosuch; delete group oldlive"},
		{"groups delete olddead", 1, "group not found: olddead"},
		{"groups describe olddead", 1, "group not found"},
		{"groups delete", 2, "want the groups' names"},
	} {
		if status, _, stderr := cmd(strings.Fields(c.args)...); status != c.status || !strings.Contains(stderr, c.says) {
			t.Errorf("%s: status %d, %s", c.args, status, stderr)
		}
	}
	_, out, _ := cmd("groups", "list", "-o", "json")
	list := parse[[]map[string]any](t, out)
	if got := fmt.Sprint(list); got != "[map[group:oldlive members:1 offsets:1 owned:0]]" {
		t.Error(got)
	}
}
