package etcd

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/storetest"
)

// holderVariable makes the test binary a process that holds partitions 0 to 3 of topic
// t: its options as JSON.
const holderVariable = "MUSTER_TEST_HOLDER"

type holderOptions struct {
	Endpoint, Root string
	TTL            time.Duration
}

// TestHolder is no test, but the life of such a process. It ends with its stdin.
func TestHolder(t *testing.T) {
	var o holderOptions
	if err := json.Unmarshal([]byte(os.Getenv(holderVariable)), &o); err != nil {
		return
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	if err := hold(ctx, o); err != nil {
		report("failed: %v", err)
	}
}

func report(format string, args ...any) { fmt.Printf("holder: "+format+"\n", args...) }

// hold holds until the session is over. Then it does all that a process does that has
// not understood what happened, and after that what it should do.
func hold(ctx context.Context, o holderOptions) error {
	st, err := Open(ctx, Options{Endpoints: []string{o.Endpoint}})
	if err != nil {
		return err
	}
	defer st.Close()
	g := registry.Root(o.Root).Group("g")
	s, reg, err := joinGroup(ctx, st, g, "a", o.TTL)
	if err != nil {
		return err
	}
	results, guard, err := claimFour(ctx, st, s, reg, g, "a")
	if err != nil {
		return err
	}
	var releases, byLease []registry.OwnerRelease
	for n, r := range results {
		if r.Holder != nil {
			return r.Holder
		}
		releases = append(releases, registry.OwnerRelease{Key: four(g)[n], Token: r.Token})
		byLease = append(byLease, registry.OwnerRelease{Key: four(g)[n]})
	}
	report("claimed")
	for s.Alive() {
		time.Sleep(2 * time.Millisecond)
	}
	report("lost: %v", s.Err())
	for _, r := range [][]registry.OwnerRelease{releases, byLease} {
		if _, err := registry.Release(ctx, st, s.Lease(), r, nil); err != nil {
			return err
		}
	}
	_, _, err = registry.Claim(ctx, st, s.Lease(), guard, claimsOf(g, "a"), nil)
	report("claimed again under the old guard: %v", err)
	_, err = registry.Register(ctx, st, s, reg.Key, []byte("a"))
	report("registered again in the old session: %v", err)
	if err := s.Close(ctx); err != nil {
		return err
	}
	again, reg, err := joinGroup(ctx, st, g, "a", 5*o.TTL)
	if err != nil {
		return err
	}
	defer again.Close(context.WithoutCancel(ctx))
	results, _, err = claimFour(ctx, st, again, reg, g, "a")
	if err != nil {
		return err
	}
	var holders []string
	for _, r := range results {
		if r.Holder == nil {
			holders = append(holders, "a")
			continue
		}
		holders = append(holders, string(r.Holder.KV.Value))
	}
	report("back, held by %s", strings.Join(holders, " "))
	<-ctx.Done()
	return nil
}

func four(g registry.GroupPaths) (keys []string) {
	for n := range int32(4) {
		keys = append(keys, g.Owner(registry.Partition{Topic: "t", Home: 1, Number: n}))
	}
	return keys
}

func claimsOf(g registry.GroupPaths, id string) (claims []registry.OwnerClaim) {
	for _, key := range four(g) {
		claims = append(claims, registry.OwnerClaim{Key: key, Value: []byte(id + "-0")})
	}
	return claims
}

func joinGroup(ctx context.Context, st registry.Store, g registry.GroupPaths, id string, ttl time.Duration) (*registry.Session, registry.Registration, error) {
	s, err := registry.OpenSession(ctx, st, registry.SessionOptions{TTL: ttl})
	if err != nil {
		return nil, registry.Registration{}, err
	}
	reg, err := registry.Register(ctx, st, s, g.ID(id), []byte(id))
	return s, reg, err
}

func claimFour(ctx context.Context, st registry.Store, s *registry.Session, reg registry.Registration, g registry.GroupPaths, id string) ([]registry.ClaimResult, registry.Guard, error) {
	_, rev, err := registry.List(ctx, st, g.IDs(), 0)
	if err != nil {
		return nil, registry.Guard{}, err
	}
	guard := registry.Guard{Registration: reg, IDs: g.IDs(), Snapshot: rev}
	results, _, err := registry.Claim(ctx, st, s.Lease(), guard, claimsOf(g, id), nil)
	return results, guard, err
}

// holder is such a process, seen from the test.
type holder struct {
	t     *testing.T
	cmd   *exec.Cmd
	lines chan string
}

func startHolder(t *testing.T, o holderOptions) *holder {
	t.Helper()
	data, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	h := &holder{t: t, cmd: exec.Command(os.Args[0], "-test.run=^TestHolder$"), lines: make(chan string, 100)}
	h.cmd.Env = append(os.Environ(), holderVariable+"="+string(data))
	h.cmd.Stderr = os.Stderr
	if _, err := h.cmd.StdinPipe(); err != nil { // closed by Wait, or with this process
		t.Fatal(err)
	}
	stdout, err := h.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := h.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(h.lines)
		for s := bufio.NewScanner(stdout); s.Scan(); {
			if line, ok := strings.CutPrefix(s.Text(), "holder: "); ok {
				h.lines <- line
			}
		}
	}()
	t.Cleanup(func() {
		h.cmd.Process.Kill()
		for range h.lines {
		}
		h.cmd.Wait()
	})
	return h
}

// expect waits for a line that begins so, and returns the rest of it.
func (h *holder) expect(d time.Duration, begin string) string {
	h.t.Helper()
	select {
	case line, ok := <-h.lines:
		rest, is := strings.CutPrefix(line, begin)
		if !ok || !is {
			h.t.Fatalf("the holder says %q, want %q", line, begin)
		}
		return strings.TrimSpace(rest)
	case <-time.After(d):
		h.t.Fatalf("the holder does not say %q within %s", begin, d)
	}
	return ""
}

func (h *holder) signal(s syscall.Signal) {
	h.t.Helper()
	if err := h.cmd.Process.Signal(s); err != nil {
		h.t.Fatal(err)
	}
	if s == syscall.SIGSTOP {
		awaitStopped(h.t, h.cmd.Process.Pid)
	}
}

// Field case 03, the part of the registry: a holder is stopped for three times the time
// to live. Awake again, it neither deletes nor overwrites what another one holds by then.
func TestFrozenHolder(t *testing.T) {
	t.Parallel()
	const ttl = registry.DefaultTTL // the holder is to live until it is stopped
	st := open(t)
	root := strings.TrimSuffix(storetest.Prefix(t), "/")
	g := registry.Root(root).Group("g")
	holder := startHolder(t, holderOptions{Endpoint: shared.server.Endpoint, Root: root, TTL: ttl})
	holder.expect(longEnough, "claimed")
	owners := newMirror(t, st, registry.ViewOptions{}, g.Owners(), g.IDs())
	if n := len(owners.keys()); n != 5 {
		t.Fatalf("%d keys, want 4 owners and a registration", n)
	}

	holder.signal(syscall.SIGSTOP)
	stopped := time.Now()
	s, reg, err := joinGroup(t.Context(), st, g, "b", 5*ttl)
	if err != nil {
		t.Fatal(err)
	}
	defer endSession(t, s)
	until(t, owners.view, longEnough, func(snap registry.Snapshot) bool { return len(snap.Under(0)) == 0 && len(snap.Under(1)) == 1 })
	t.Logf("its keys are gone %s after the stop, time to live %s", time.Since(stopped).Round(time.Millisecond), ttl)
	results, _, err := claimFour(t.Context(), st, s, reg, g, "b")
	if err != nil {
		t.Fatal(err)
	}
	_, mine, err := registry.List(t.Context(), st, g.Owners(), 0)
	if err != nil {
		t.Fatal(err)
	}
	owners.reaches(longEnough, mine)
	owners.take()
	time.Sleep(time.Until(stopped.Add(3 * ttl)))
	holder.signal(syscall.SIGCONT)
	awake := time.Now()

	holder.expect(longEnough, "lost: "+registry.ErrSessionExpired.Error())
	if text := holder.expect(longEnough, "claimed again under the old guard:"); !strings.Contains(text, registry.ErrStale.Error()) {
		t.Errorf("its late claim: %s", text)
	}
	if text := holder.expect(longEnough, "registered again in the old session:"); text == "<nil>" {
		t.Error("it registered in a session that is over")
	}
	holder.expect(longEnough, "back, held by b-0 b-0 b-0 b-0")
	t.Logf("registered again %s after it went on", time.Since(awake).Round(time.Millisecond))
	owners.reaches(longEnough, put(t, st, g.Owners()+"end", ""))
	var own int
	for _, e := range owners.take() {
		switch {
		case e.Key == g.ID("a") && !e.Deleted:
			own++
		case e.Key != g.Owners()+"end":
			t.Errorf("it changed %s: %+v", e.Key, e)
		}
	}
	if own != 1 {
		t.Errorf("it registered %d times", own)
	}
	for n, r := range results {
		if kv := owners.keys()[four(g)[n]]; r.Holder != nil || kv.CreateRevision != r.Token || kv.ModRevision != r.Token || kv.Lease != s.Lease() {
			t.Errorf("partition %d: claimed %+v, the key is %+v", n, r, kv)
		}
	}
}
