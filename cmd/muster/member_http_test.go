package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/muster-io/muster/internal/freeport"
	"github.com/muster-io/muster/rebalance/membership"
	"github.com/muster-io/muster/registry"
)

func page(t *testing.T, url string) (status int, body string) {
	t.Helper()
	res, err := http.Get(url)
	if err != nil {
		return 0, err.Error()
	}
	defer res.Body.Close()
	data, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, string(data)
}

type fakeMember struct {
	stands membership.Standing
	err    error
}

func (f *fakeMember) ID() string { return "m" }

func (f *fakeMember) Standing(ctx context.Context) (membership.Standing, error) {
	if f.err != nil {
		<-ctx.Done()
	}
	return f.stands, f.err
}

// Health is that the loop comes round; ready is who is registered, besides.
func TestProbesOfAMember(t *testing.T) {
	for _, c := range []struct {
		member         fakeMember
		health, ready  int
		healthy, about string
	}{
		{fakeMember{}, 200, 503, "healthy\n", "not ready: registration: there is none"},
		{fakeMember{stands: membership.Standing{Registered: true, Left: 5 * time.Second, Owned: 3}}, 200, 200, "healthy\n",
			"ok     registration: stands, 5.0 s of its session are left, 3 partitions owned"},
		{fakeMember{err: errors.New("it hangs")}, 503, 503, "not healthy: loop: has not come round", "not ready: loop: has not come round"},
	} {
		s := httptest.NewServer(memberPages(slog.New(slog.DiscardHandler), &c.member, membership.NewMetrics(), time.Millisecond))
		if status, body := page(t, s.URL+"/healthz"); status != c.health || !strings.HasPrefix(body, c.healthy) {
			t.Errorf("%+v: %d %s", c.member, status, body)
		}
		if status, body := page(t, s.URL+"/readyz?verbose"); status != c.ready || !strings.Contains(body, c.about) {
			t.Errorf("%+v: %d %s", c.member, status, body)
		}
		s.Close()
	}
}

// A consumer serves what it counts from its start to its end, and only if asked to.
func TestConsumerServesMetrics(t *testing.T) {
	st := openLive(t)
	clearAfter(t, st, registry.Root("").Group("measured").Prefix())
	if status, _, stderr := ask(t, "", "topics", "create", "measured", "--partitions", "2"); status != 0 {
		t.Fatal(stderr)
	}
	t.Cleanup(func() { ask(t, "", "topics", "delete", "measured") })
	at := freeport.Must()
	consume := func(ctx context.Context, http string) (status int, stderr string) {
		var out, errOut bytes.Buffer
		status = run(ctx, []string{"muster", "consume", "--group", "measured", "--topic", "measured", "--http", http,
			"--set", "zookeeper.session.timeout.ms=60000",
			"--etcd-endpoints", live.daemon.EtcdEndpoints()[0]}, strings.NewReader(""), &out, &errOut)
		return status, errOut.String()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	ended := make(chan int, 1)
	go func() {
		status, _ := consume(ctx, at)
		ended <- status
	}()
	for {
		status, body := page(t, "http://"+at+"/metrics")
		if status == 200 && strings.Contains(body, "\nmuster_member_partitions_owned{group=\"measured\"} 2\n") {
			for _, want := range []string{"\nmuster_member_claims_total{group=\"measured\",outcome=\"claimed\"} 2\n", "\ngo_goroutines ", "\nprocess_open_fds "} {
				if !strings.Contains(body, want) {
					t.Errorf("no %q", want)
				}
			}
			break
		}
		if ctx.Err() != nil {
			t.Fatal(status, body)
		}
		time.Sleep(20 * time.Millisecond)
	}
	for path, want := range map[string]string{"/healthz": "healthy\n", "/readyz": "ready\n"} {
		if status, body := page(t, "http://"+at+path); status != 200 || body != want {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
	if _, body := page(t, "http://"+at+"/"); !strings.HasPrefix(body, "muster member ") {
		t.Error(body)
	}
	if status, stderr := consume(ctx, at); status != 1 || !strings.Contains(stderr, at+" is in use") {
		t.Errorf("a second one at the same port: status %d, %s", status, stderr)
	}
	if status, stderr := consume(ctx, "nowhere:port"); status != 2 || !strings.Contains(stderr, "--http") {
		t.Errorf("no port: status %d, %s", status, stderr)
	}
	cancel()
	if status := <-ended; status != 0 {
		t.Error("exit status", status)
	}
	if status, body := page(t, "http://"+at+"/healthz"); status != 0 {
		t.Errorf("it still serves: %d %s", status, body)
	}
}
