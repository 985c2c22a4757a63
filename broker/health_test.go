package broker

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-io/muster/internal/monitor"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

// twinDaemon is a daemon on the twin in memory, without ports: its loops run until
// the test stops them.
func twinDaemon(t *testing.T, st registry.Store) *Daemon {
	t.Helper()
	d := &Daemon{log: slog.New(slog.DiscardHandler), failed: make(chan error, 1), advertise: address{"localhost", 9092}}
	d.cfg = Config{ID: 1, Root: registry.Root("/"), SessionTimeout: registry.DefaultTTL}
	d.members, d.topics, d.producers = newMembership(d), newTopics(d), &producers{d: d}
	d.metrics = newMetrics(d)
	d.ctx, d.cancel = context.WithCancel(context.Background())
	d.store = registry.Measured(st, d.metrics.storeCall)
	var err error
	if d.dir, err = openDataDir(t.TempDir(), 1); err == nil {
		err = d.members.join(t.Context(), 0)
	}
	if err == nil {
		err = d.loadTopics(t.Context(), t.Context())
	}
	t.Cleanup(func() {
		if err := errors.Join(d.Close(), d.members.leave(), d.dir.close()); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	d.work.Go(func() { d.members.run(d.ctx) })
	d.serving.Store(true)
	d.phase.enter(stepServing)
	return d
}

// failing is the names of the checks that do not hold.
func failing(_ bool, checks []Check) (names string) {
	for _, c := range checks {
		if !c.OK {
			names += c.Name + ","
		}
	}
	return names
}

// The loops show that they live though nothing happens, and are missed when they
// do not come round.
func TestHealthIsThatTheLoopsTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := twinDaemon(t, memory.New())
		time.Sleep(10 * time.Minute)
		if got := failing(d.Healthy()) + failing(d.Ready()); got != "" {
			t.Errorf("after ten quiet minutes these fail: %s", got)
		}
		d.cancel()
		d.work.Wait()
		time.Sleep(stuckAfter - 2*beatEvery)
		if got := failing(d.Healthy()); got != "" {
			t.Errorf("these fail too soon: %s", got)
		}
		time.Sleep(2 * beatEvery)
		if got := failing(d.Healthy()); got != "loop membership,loop topics," {
			t.Errorf("with both loops dead these fail: %s", got)
		}
	})
}

// A record that somebody deletes is put back; one that somebody else has put in its
// place is left alone, and the daemon is not ready; a lease that is revoked is noticed
// before the next renewal would tell.
func TestTheRecordIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := memory.New()
		d := twinDaemon(t, st)
		key := d.cfg.Root.Broker(d.cfg.ID)
		do := func(ops ...registry.Op) {
			t.Helper()
			if _, err := st.Txn(t.Context(), registry.Txn{Then: ops}); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		back := func() registry.LeaseID {
			t.Helper()
			time.Sleep(beatEvery + 10*time.Millisecond)
			kv, _, err := registry.GetKey(t.Context(), st, key)
			if err != nil || kv == nil || kv.Lease == 0 {
				t.Fatalf("the record is %+v (%v)", kv, err)
			}
			if got := failing(d.Ready()); got != "" {
				t.Errorf("with the record back these fail: %s", got)
			}
			return kv.Lease
		}
		first := d.members.lease()
		time.Sleep(time.Minute + 300*time.Millisecond) // between two beats and renewals
		do(registry.Delete(key))
		fresh := back()
		const other = `{"version":1,"host":"other","port":9092,"jmx_port":-1,"timestamp":"1"}`
		do(registry.Put(key, []byte(other), 0))
		if got := failing(d.Ready()); got != "session,registration," {
			t.Errorf("at once these fail: %s", got)
		}
		time.Sleep(10 * time.Second)
		if got := failing(d.Ready()); got != "session,registration," {
			t.Errorf("these fail: %s", got)
		}
		if kv, _, err := registry.GetKey(t.Context(), st, key); err != nil || string(kv.Value) != other {
			t.Errorf("the record is %+v (%v)", kv, err)
		}
		if n := counted(t, d.metrics.registrations.WithLabelValues(outcomeHeld)); n != 1 {
			t.Errorf("%v attempts counted in ten seconds, want 1 and a watch", n)
		}
		do(registry.Delete(key))
		lease := back()
		if err := st.Revoke(t.Context(), lease); err != nil {
			t.Fatal(err)
		}
		if again := back(); again == lease || fresh == first {
			t.Error("the record is back under a lease that is gone")
		}
	})
}

// mumbling is a store that renews leases as ever, and may tell nothing else.
type mumbling struct {
	registry.Store
	silent atomic.Bool
}

func (m *mumbling) RequestProgress(ctx context.Context) error {
	if m.silent.Load() {
		return nil
	}
	return m.Store.RequestProgress(ctx)
}

func (m *mumbling) Range(ctx context.Context, r registry.RangeRequest) (registry.RangeResult, error) {
	if m.silent.Load() {
		return registry.RangeResult{}, errors.New("no answer")
	}
	return m.Store.Range(ctx, r)
}

// A daemon that lives, but sees nothing of the others any more, is of no use.
func TestReadinessAsksWhenTheRegistryWasHeardOf(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := &mumbling{Store: memory.New()}
		d := twinDaemon(t, st)
		time.Sleep(10*time.Second + 100*time.Millisecond) // between two requests for progress
		st.silent.Store(true)
		time.Sleep(registry.DefaultTTL / 4)
		if got := failing(d.Ready()); got != "" {
			t.Errorf("after a moment of silence these fail: %s", got)
		}
		time.Sleep(registry.DefaultTTL / 2)
		for range 10 {
			time.Sleep(registry.DefaultTTL)
			if got := failing(d.Ready()); got != "view," {
				t.Errorf("in silence these fail: %s", got)
			}
			if got := failing(d.Healthy()); got != "" {
				t.Errorf("in silence these are not healthy: %s", got)
			}
		}
		if n := counted(t, d.metrics.viewTroubles); n != 1 {
			t.Errorf("%v troubles counted", n)
		}
		st.silent.Store(false)
		time.Sleep(registry.DefaultTTL)
		if n := counted(t, d.metrics.viewRelists.WithLabelValues(relistWatch)); n != 1 {
			t.Errorf("%v times listed again", n)
		}
		if got := failing(d.Ready()); got != "" {
			t.Errorf("after the silence these fail: %s", got)
		}
	})
}

// What has failed for good is what a restart may help.
func TestHealthKnowsOfFailure(t *testing.T) {
	d := &Daemon{failed: make(chan error, 1)}
	d.phase.enter(stepEtcd)
	if got := failing(d.Healthy()); got != "" {
		t.Errorf("while starting these fail: %s", got)
	}
	d.fail(errors.New("embedded etcd failed"))
	d.fail(errors.New("and one more thing"))
	healthy, checks := d.Healthy()
	if want := "failure: embedded etcd failed"; healthy || monitor.Summary(checks) != want {
		t.Errorf("got %q, want %q", monitor.Summary(checks), want)
	}
}

// The steps of a start add up, and end when it does.
func TestPhaseMeasuresTheSteps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p phase
		p.enter(stepDataDir)
		time.Sleep(time.Second)
		p.enter(stepEtcd)
		time.Sleep(3 * time.Second)
		if c := p.check(); c.OK || c.Reason != "starting: etcd, for 3.0 s" {
			t.Errorf("%+v", c)
		}
		p.enter(stepServing)
		time.Sleep(time.Hour)
		if c := p.check(); !c.OK {
			t.Errorf("%+v", c)
		}
		p.enter(stepStopping)
		if c := p.check(); c.OK || c.Reason != "stopping" {
			t.Errorf("%+v", c)
		}
		steps := p.taken()
		if len(steps) != 2 || steps[0] != (startStep{stepDataDir, time.Second}) || steps[1] != (startStep{stepEtcd, 3 * time.Second}) {
			t.Errorf("%v", steps)
		}
	})
}
