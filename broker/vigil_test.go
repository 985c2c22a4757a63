//go:build linux

package broker_test

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/muster-io/muster/broker"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/vigil"
)

// asker, if set, makes this test program a consumer's process that asks to be watched:
// cluster id, socket file or nothing, lease, key. The secret comes on the standard input,
// and with its end the process ends.
const asker = "MUSTER_BROKER_TEST_ASKER"

func init() {
	words := strings.Split(os.Getenv(asker), " ")
	if len(words) != 4 {
		return
	}
	lease, err := strconv.ParseInt(words[2], 16, 64)
	if err != nil {
		panic(err)
	}
	var s vigil.Secret
	if _, err := io.ReadFull(os.Stdin, s[:]); err != nil {
		panic(err)
	}
	c := vigil.Ask(vigil.ClientOptions{ClusterID: words[0], Path: words[1], Listener: func(e vigil.ClientEvent) { fmt.Println(e.Watched, e.Broker) }})
	c.Brokers([]int32{0, 1, 2})
	c.Add(registry.LeaseID(lease), words[3], s)
	_, _ = io.Copy(io.Discard, os.Stdin)
	os.Exit(0)
}

// A consumer on the host of a daemon that is killed is gone from the registry long
// before its lease, with the abstract socket and with the file, and the daemon counts it.
func TestConsumerThatIsKilled(t *testing.T) {
	path := filepath.Join(t.TempDir(), "local")
	root, err := registry.ParseRoot("/kc")
	must(t, err)
	d := start(t, withHTTP(t, func(c *broker.Config) { c.Root, c.LocalSocket = root, path }))
	at, st := d.HTTPAddress(), openStore(t, d)
	cluster := string(keys(t, st, "/kc/cluster/")["/kc/cluster/id"].Value)
	if got := startError(t, withHTTP(t, func(c *broker.Config) {
		c.ID, c.Etcd.Endpoints, c.Root, c.LocalSocket = 2, d.EtcdEndpoints(), root, path
	})); !strings.Contains(got, path) || !strings.Contains(got, "(--local-socket)") {
		t.Error(got)
	}
	for n, socket := range []string{"", path} {
		lease, err := st.Grant(t.Context(), registry.MaxTTL)
		must(t, err)
		secret := vigil.NewSecret()
		key := root.Group("shop").ID("node:" + strconv.Itoa(n))
		value, err := registry.Encode(registry.ConsumerRecord{Version: 1, Subscription: map[string]int32{"t": 1},
			Pattern: registry.PatternStatic, Timestamp: "1", Notice: secret.Notice()})
		must(t, err)
		_, err = st.Txn(t.Context(), registry.Txn{Then: []registry.Op{registry.Put(key, value, lease.ID)}})
		must(t, err)
		c := exec.Command(os.Args[0])
		c.Env = append(os.Environ(), asker+"="+strings.Join([]string{cluster, socket, registry.LeaseText(lease.ID), key}, " "))
		in, err := c.StdinPipe()
		must(t, err)
		out, err := c.StdoutPipe()
		must(t, err)
		must(t, c.Start())
		_, err = in.Write(secret[:])
		must(t, err)
		line, err := bufio.NewReader(out).ReadString('\n')
		if line != "true 1\n" {
			t.Fatalf("the consumer says %q, %v", line, err)
		}
		for _, series := range []string{"muster_vigil_processes", "muster_vigil_sessions"} {
			if got, ok := sample(t, at, series); got != 1 || !ok {
				t.Errorf("%s is %v", series, got)
			}
		}
		must(t, c.Process.Kill())
		eventually(t, func() string {
			if _, stands := keys(t, st, key)[key]; stands {
				return "the registration stands"
			}
			return ""
		})
		_ = c.Wait() // killed
		eventually(t, func() string {
			for series, want := range map[string]float64{
				`muster_vigil_revocations_total{result="revoked"}`:    float64(n + 1),
				`muster_vigil_revocation_duration_seconds_count`:      float64(n + 1),
				`muster_vigil_refusals_total{reason="proof"}`:         0,
				`muster_store_calls_total{call="revoke",result="ok"}`: float64(n + 1),
				"muster_vigil_sessions":                               0,
				"muster_vigil_processes":                              0,
			} {
				if got, ok := sample(t, at, series); got != want || !ok {
					return fmt.Sprintf("%s is %v, want %v", series, got, want)
				}
			}
			return ""
		})
	}
}
