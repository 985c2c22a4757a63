package consumer_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"testing"
	"time"

	"github.com/muster-io/muster/rebalance/consumer"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/etcd"
)

// A process with this variable is a consumer until it is killed.
const (
	victimEndpoint = "MUSTER_TEST_VICTIM"
	victimTopic    = "MUSTER_TEST_TOPIC"
	victimGroup    = "MUSTER_TEST_GROUP"
)

func victim(endpoint string) {
	ctx := context.Background()
	st, err := etcd.Open(ctx, etcd.Options{Endpoints: []string{endpoint}})
	if err == nil {
		var c *consumer.Consumer
		c, err = consumer.New(consumer.Config{ID: "victim", Store: st, Group: os.Getenv(victimGroup), SessionTimeout: registry.MaxTTL,
			Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug})),
			Topics: map[string]int32{os.Getenv(victimTopic): 1}}, func(context.Context, *consumer.Record) error { return nil })
		if err == nil {
			err = c.Run(ctx)
		}
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// A consumer that is killed on the host of a daemon costs its group milliseconds, not
// the lease of a minute.
func TestDeathIsNoticedByTheDaemon(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("only Linux tells of the end of another process")
	}
	topic, group := name(t, "t"), name(t, "g")
	createTopic(t, topic, 2)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), victimEndpoint+"="+shared.daemon.EtcdEndpoints()[0], victimTopic+"="+topic, victimGroup+"="+group)
	var log logged
	cmd.Stderr = &log
	must(t, cmd.Start())
	killed := false
	kill := func() {
		if !killed {
			killed = true
			must(t, cmd.Process.Kill())
			_ = cmd.Wait() // killed
		}
	}
	t.Cleanup(kill)
	ownedAs(t, group, topic, "0:victim 1:victim")
	kv, _, err := registry.GetKey(t.Context(), shared.store, root.Group(group).ID("victim"))
	must(t, err)
	if rec, err := registry.ParseConsumer(*kv); err != nil || len(rec.Notice) != 64 {
		t.Fatalf("registered as %+v: %v", rec, err)
	}
	start(t, consumer.Config{ID: "heir", Group: group, Topics: map[string]int32{topic: 1}}, func(context.Context, *consumer.Record) error { return nil })
	ownedAs(t, group, topic, "0:heir 1:victim")
	eventually(t, func() string { // from a moment after its registration on
		if !log.says("a session is watched", "watched=true") {
			return "the victim is not watched"
		}
		return ""
	})
	began := time.Now()
	kill()
	ownedAs(t, group, topic, "0:heir 1:heir")
	took := time.Since(began)
	t.Logf("owned by the heir after %s", took.Round(time.Millisecond))
	// Its lease was renewed at most a third of its time before, and lasts as much again.
	if took > registry.MaxTTL/2 {
		t.Errorf("that took %s", took)
	}
}
