//go:build linux

package vigil

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/etcd"
)

// The tests kill real processes: this program, started again with childVariable.
const childVariable = "MUSTER_VIGIL_CHILD"

// childConfig is what a child is to do.
type childConfig struct {
	Endpoint, Cluster, Path string
	Brokers                 []int32
	ID                      string // of its consumers, of which each has a number appended
	Sessions                int
	Leaderless              bool // its first thread ends, the others go on
}

func init() {
	if os.Getenv(childVariable) != "" {
		runtime.LockOSThread() // main is then on the first thread
	}
}

func TestMain(m *testing.M) {
	text := os.Getenv(childVariable)
	if text == "" {
		os.Exit(m.Run())
	}
	var cfg childConfig
	if err := json.Unmarshal([]byte(text), &cfg); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	done := make(chan error)
	go func() { done <- cfg.run() }()
	if cfg.Leaderless {
		syscall.Syscall(syscall.SYS_EXIT, 0, 0, 0) // of this thread alone
	}
	if err := <-done; err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(0)
}

// run registers consumers, has them watched, and obeys lines of the standard input
// until that ends.
func (c childConfig) run() error {
	if c.Sessions < 0 { // it only connects
		_, err := net.Dial("unix", c.Path)
		return err
	}
	ctx := context.Background()
	st, err := etcd.Open(ctx, etcd.Options{Endpoints: []string{c.Endpoint}})
	if err != nil {
		return err
	}
	defer st.Close()
	var mu sync.Mutex
	watched := map[registry.LeaseID]bool{}
	client := Ask(ClientOptions{ClusterID: c.Cluster, Path: c.Path, Listener: func(e ClientEvent) {
		mu.Lock()
		defer mu.Unlock()
		if was := len(watched); e.Watched {
			if watched[e.Lease] = true; len(watched) == c.Sessions && was < c.Sessions {
				fmt.Println("watched by", e.Broker)
			}
		} else {
			delete(watched, e.Lease)
		}
	}})
	defer client.Close()
	client.Brokers(c.Brokers)
	var leases []registry.LeaseID
	for n := range c.Sessions {
		lease, err := st.Grant(ctx, lasting)
		if err != nil {
			return err
		}
		leases = append(leases, lease.ID)
		secret := NewSecret()
		key := registry.Root("").Group("g").ID(fmt.Sprintf("%s%d", c.ID, n))
		if err := putRegistration(ctx, st, key, lease.ID, secret); err != nil {
			return err
		}
		client.Add(lease.ID, key, secret)
	}
	for c.Leaderless {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/stat", os.Getpid()))
		if err != nil {
			return err
		}
		if strings.Contains(string(stat), ") Z ") {
			fmt.Println("leaderless")
			break
		}
	}
	commands := bufio.NewScanner(os.Stdin)
	for commands.Scan() {
		switch commands.Text() {
		case "remove":
			client.Remove(leases[0])
		case "close":
			client.Close()
		case "exit":
			os.Exit(0)
		}
	}
	return commands.Err()
}

func putRegistration(ctx context.Context, st registry.Store, key string, lease registry.LeaseID, s Secret) error {
	value, err := registry.Encode(registry.ConsumerRecord{Version: 1, Subscription: map[string]int32{"t": 1}, Pattern: registry.PatternStatic,
		Timestamp: "1", Notice: s.Notice()})
	if err != nil {
		return err
	}
	_, err = st.Txn(ctx, registry.Txn{Then: []registry.Op{registry.Put(key, value, lease)}})
	return err
}

// child is a consumer's process.
type child struct {
	t     testing.TB
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines chan string
}

func startChild(t testing.TB, cfg childConfig) *child {
	t.Helper()
	if cfg.Sessions == 0 {
		cfg.Sessions = 1
	}
	text, err := json.Marshal(cfg)
	must(t, err)
	c := &child{t: t, cmd: exec.Command(os.Args[0]), lines: make(chan string, 16)}
	c.cmd.Env = append(os.Environ(), childVariable+"="+string(text))
	c.cmd.Stderr = os.Stderr
	c.in, err = c.cmd.StdinPipe()
	must(t, err)
	out, err := c.cmd.StdoutPipe()
	must(t, err)
	must(t, c.cmd.Start())
	var reading sync.WaitGroup
	reading.Go(func() {
		defer close(c.lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			c.lines <- s.Text()
		}
	})
	t.Cleanup(func() {
		_ = c.cmd.Process.Kill()
		reading.Wait()
		_ = c.cmd.Wait()
	})
	return c
}

// says waits for a line.
func (c *child) says(want string) {
	c.t.Helper()
	for {
		select {
		case line, ok := <-c.lines:
			if !ok {
				c.t.Fatalf("the child has ended before it said %q", want)
			}
			if line == want {
				return
			}
			if line != "leaderless" && !strings.HasPrefix(line, "watched by ") {
				c.t.Fatalf("the child says %q", line)
			}
		case <-deadline(c.t):
			c.t.Fatalf("the child does not say %q", want)
		}
	}
}

func (c *child) tell(command string) {
	c.t.Helper()
	_, err := io.WriteString(c.in, command+"\n")
	must(c.t, err)
}

func (c *child) signal(s syscall.Signal) {
	c.t.Helper()
	must(c.t, c.cmd.Process.Signal(s))
}
