package inspect_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-io/muster/inspect"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

const root registry.Root = "/kc"

// world is a registry with one broker, one topic, one group, all well.
type world struct {
	t              *testing.T
	st             *memory.Store
	broker, member registry.LeaseID
	answers        map[int32]string
	starts, ends   map[registry.Partition]int64
}

const memberID = "node-a:0b0c"

func newWorld(t *testing.T) *world {
	w := &world{t: t, st: memory.New(), answers: map[int32]string{1: ""},
		starts: map[registry.Partition]int64{}, ends: map[registry.Partition]int64{}}
	w.broker, w.member = w.grant(), w.grant()
	w.put("/cluster/id", "abc", 0)
	w.put("/producer_ids/next", "1000", 0)
	w.put("/brokers/ids/1", `{"version":1,"host":"127.0.0.1","port":9092,"jmx_port":-1,"timestamp":"1"}`, w.broker)
	if _, err := registry.CreateTopic(t.Context(), w.st, root, registry.TopicSpec{Name: "orders", Partitions: 2, ReplicationFactor: 1}, []int32{1}); err != nil {
		t.Fatal(err)
	}
	w.put("/brokers/topics/orders/1", "2", w.broker)
	w.put("/config/groups/shop", `{"version":1,"config":{}}`, 0)
	w.put("/consumers/shop/ids/"+memberID, `{"version":1,"subscription":{"orders":1},"pattern":"static","timestamp":"1","strategy":["range"]}`, w.member)
	for p := range 2 {
		w.put(fmt.Sprintf("/consumers/shop/owners/orders/1-%d", p), memberID+"-0", w.member)
		w.put(fmt.Sprintf("/consumers/shop/offsets/orders/1-%d", p), "5", 0)
		w.starts[registry.Partition{Topic: "orders", Home: 1, Number: int32(p)}] = 0
		w.ends[registry.Partition{Topic: "orders", Home: 1, Number: int32(p)}] = 5
	}
	return w
}

// shards makes a topic without a log, owned by a member that subscribes to it.
func (w *world) shards() {
	w.t.Helper()
	if _, err := registry.CreateTopic(w.t.Context(), w.st, root, registry.TopicSpec{Name: "shards", Partitions: 1, NoLog: true}, nil); err != nil {
		w.t.Fatal(err)
	}
	lease := w.grant()
	w.put("/consumers/run/ids/node-b:1", `{"version":1,"subscription":{"shards":1},"pattern":"static","timestamp":"1","strategy":["range"]}`, lease)
	w.put("/consumers/run/owners/shards/0-0", "node-b:1-0", lease)
}

// grant makes a lease that somebody keeps alive.
func (w *world) grant() registry.LeaseID {
	w.t.Helper()
	l, err := w.st.Grant(w.t.Context(), 1000*time.Hour)
	if err != nil {
		w.t.Fatal(err)
	}
	return l.ID
}

func (w *world) put(path, value string, lease registry.LeaseID) {
	w.t.Helper()
	w.txn(registry.Put(root.Key(path), []byte(value), lease))
}

func (w *world) del(path string) { w.t.Helper(); w.txn(registry.Delete(root.Key(path))) }

func (w *world) txn(op registry.Op) {
	w.t.Helper()
	if _, err := w.st.Txn(w.t.Context(), registry.Txn{Then: []registry.Op{op}}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) doctor() *inspect.Doctor {
	return &inspect.Doctor{Store: w.st, Root: root, Ask: func(context.Context, inspect.Questions) inspect.Probes {
		return inspect.Probes{Answers: w.answers, Starts: w.starts, Ends: w.ends}
	}}
}

func (w *world) examine(d *inspect.Doctor) *inspect.Report {
	w.t.Helper()
	r, err := d.Examine(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	return r
}

// found lists findings as "code key".
func found(r *inspect.Report) []string {
	var list []string
	for _, f := range r.Findings {
		list = append(list, string(f.Code)+" "+f.Key)
	}
	return list
}

// fault is something planted, what is to be found of it, and what of that is left
// after all repairs that lose nothing, and after those that do.
type fault struct {
	name  string
	plant func(w *world)
	want  []string
	left  []string
}

func faults() []fault {
	const owner0, owner1 = "/consumers/shop/owners/orders/1-0", "/consumers/shop/owners/orders/1-1"
	const state0 = "/brokers/topics/orders/partitions/0/state"
	one := func(s string) []string { return []string{s} }
	always := func(name string, plant func(w *world), want string) fault {
		return fault{name, plant, one(want), one(want)}
	}
	gone := func(name string, plant func(w *world), want string) fault { return fault{name, plant, one(want), nil} }
	return []fault{
		{"nothing", func(*world) {}, nil, nil},
		{"topic without a log", func(w *world) { w.shards() }, nil, nil},
		gone("state of a topic without a log", func(w *world) {
			w.shards()
			w.put("/brokers/topics/shards/partitions/0/state", `{"controller_epoch":1,"leader":1,"version":1,"leader_epoch":0,"isr":[1]}`, 0)
		}, "partition-state-surplus /brokers/topics/shards/partitions/0/state"),
		{"owner without member", func(w *world) { w.put(owner0, "ghost-host-9", w.grant()) },
			one("owner-without-member " + owner0), one("partition-unowned " + owner0)},
		gone("owner of a live member without lease", func(w *world) { w.put(owner0, memberID+"-0", 0) }, "owner-without-lease "+owner0),
		{"owner of nobody without lease", func(w *world) { w.put(owner0, "ghost-0", 0) },
			one("owner-without-lease " + owner0), one("partition-unowned " + owner0)},
		always("owner under another lease", func(w *world) { w.put(owner0, memberID+"-0", w.grant()) }, "owner-under-other-lease "+owner0),
		gone("member without lease", func(w *world) {
			w.put("/consumers/shop/ids/old", `{"version":1,"subscription":{"orders":1},"pattern":"static","timestamp":"1"}`, 0)
		}, "member-without-lease /consumers/shop/ids/old"),
		always("broker without lease that answers", func(w *world) {
			w.put("/brokers/ids/2", `{"version":1,"host":"h","port":1,"timestamp":"1"}`, 0)
			w.answers[2] = ""
		}, "broker-without-lease /brokers/ids/2"),
		gone("broker without lease that is silent", func(w *world) {
			w.put("/brokers/ids/2", `{"version":1,"host":"h","port":1,"timestamp":"1"}`, 0)
			w.answers[2] = "connection refused"
		}, "broker-without-lease /brokers/ids/2"),
		always("silent broker", func(w *world) { w.answers[1] = "timeout" }, "broker-silent /brokers/ids/1"),
		always("unreadable broker", func(w *world) { w.put("/brokers/ids/2", `{"host":"x"}`, w.broker) }, "unreadable-record /brokers/ids/2"),
		always("unreadable topic", func(w *world) { w.put("/brokers/topics/t", `{"version":1}`, 0) }, "unreadable-record /brokers/topics/t"),
		always("unreadable state", func(w *world) { w.put(state0, `{}`, 0) }, "unreadable-record "+state0),
		always("unreadable count", func(w *world) { w.put("/brokers/topics/orders/7", `many`, w.broker) }, "unreadable-record /brokers/topics/orders/7"),
		always("unreadable settings", func(w *world) { w.put("/config/topics/orders", `[]`, 0) }, "unreadable-record /config/topics/orders"),
		always("unreadable group settings", func(w *world) { w.put("/config/groups/g", `x`, 0) }, "unreadable-record /config/groups/g"),
		always("unreadable member", func(w *world) { w.put("/consumers/shop/ids/z", `x`, w.member) }, "unreadable-record /consumers/shop/ids/z"),
		always("unreadable offset", func(w *world) { w.put("/consumers/shop/offsets/orders/1-1", "five", 0) },
			"unreadable-record /consumers/shop/offsets/orders/1-1"),
		always("unreadable target", func(w *world) { w.put("/consumers/shop/target", `{"version":1}`, 0) }, "unreadable-record /consumers/shop/target"),
		always("unreadable history", func(w *world) { w.put("/consumers/shop/history/1", `{"version":1}`, 0) }, "unreadable-record /consumers/shop/history/1"),
		gone("target under a lease", func(w *world) {
			w.put("/consumers/shop/target", `{"version":1,"revision":3,"strategy":"sticky","members":["a"],"streams":[1],"topics":{"orders":{"created":1,"homes":[1],"owners":[0]}}}`, w.member)
		}, "record-under-lease /consumers/shop/target"),
		gone("history under a lease", func(w *world) {
			w.put("/consumers/shop/history/1", `{"version":1,"timestamp":"1","member":"c","action":"claimed","partitions":{"orders":["1-0"]},"reason":"joined"}`, w.member)
		}, "record-under-lease /consumers/shop/history/1"),
		gone("offset under a lease", func(w *world) { w.put("/consumers/shop/offsets/orders/1-1", "5", w.member) },
			"record-under-lease /consumers/shop/offsets/orders/1-1"),
		always("below the target", func(w *world) { w.put("/consumers/shop/target/1", "x", 0) }, "unknown-key /consumers/shop/target/1"),
		always("empty cluster id", func(w *world) { w.put("/cluster/id", "", 0) }, "unreadable-record /cluster/id"),
		always("odd group name", func(w *world) { w.put("/consumers/a b/offsets/orders/1-1", "5", 0) },
			"unreadable-name /consumers/a b/offsets/orders/1-1"),
		always("odd topic name", func(w *world) { w.put("/brokers/topics/%41", "{}", 0) }, "unreadable-name /brokers/topics/%41"),
		always("odd broker id", func(w *world) { w.put("/brokers/ids/01", "{}", 0) }, "unreadable-name /brokers/ids/01"),
		always("odd partition", func(w *world) { w.put("/consumers/shop/offsets/orders/3", "1", 0) },
			"unreadable-name /consumers/shop/offsets/orders/3"),
		always("unknown key", func(w *world) { w.put("/brokers/seqid", "1", 0) }, "unknown-key /brokers/seqid"),
		gone("offset below 0", func(w *world) { w.put("/consumers/shop/offsets/orders/1-1", "-1", 0) },
			"offset-below-zero /consumers/shop/offsets/orders/1-1"),
		always("offset past the end", func(w *world) { w.put("/consumers/shop/offsets/orders/1-1", "6", 0) },
			"offset-past-log-end /consumers/shop/offsets/orders/1-1"),
		always("offset before the start", func(w *world) {
			w.starts[registry.Partition{Topic: "orders", Home: 1}] = 6
			w.ends[registry.Partition{Topic: "orders", Home: 1}] = 9
		},
			"offset-before-log-start /consumers/shop/offsets/orders/1-0"),
		{"unknown end", func(w *world) { clear(w.ends); clear(w.starts); w.put("/consumers/shop/offsets/orders/1-1", "600", 0) }, nil, nil},
		gone("offset of another home", func(w *world) { w.put("/consumers/shop/offsets/orders/2-1", "6", 0) },
			"offset-of-unknown-partition /consumers/shop/offsets/orders/2-1"),
		gone("owner of another home", func(w *world) { w.put("/consumers/shop/owners/orders/2-1", memberID+"-0", w.member) },
			"owner-of-unknown-partition /consumers/shop/owners/orders/2-1"),
		gone("missing state", func(w *world) { w.del(state0) }, "partition-state-missing "+state0),
		gone("surplus state", func(w *world) {
			w.put("/brokers/topics/orders/partitions/2/state", `{"version":1,"leader":1,"leader_epoch":0,"isr":[1]}`, 0)
		}, "partition-state-surplus /brokers/topics/orders/partitions/2/state"),
		gone("wrong count", func(w *world) { w.put("/brokers/topics/orders/1", "3", w.broker) }, "partition-count-mismatch /brokers/topics/orders/1"),
		always("no count", func(w *world) { w.del("/brokers/topics/orders/1") }, "partition-count-missing /brokers/topics/orders/1"),
		gone("count of nobody", func(w *world) { w.put("/brokers/topics/orders/9", "1", 0) }, "partition-count-without-lease /brokers/topics/orders/9"),
		gone("unknown leader", func(w *world) { w.put(state0, `{"version":1,"leader":5,"leader_epoch":3,"isr":[1]}`, 0) },
			"state-unknown-leader "+state0),
		gone("unknown in sync", func(w *world) { w.put(state0, `{"version":1,"leader":1,"leader_epoch":3,"isr":[1,5]}`, 0) },
			"state-unknown-isr "+state0),
		always("no leader", func(w *world) { w.put(state0, `{"version":1,"leader":-1,"leader_epoch":3,"isr":[]}`, 0) },
			"partition-without-leader "+state0),
		always("leader away", func(w *world) { w.st.Expire(w.broker) }, "leader-not-alive /brokers/ids/1"),
		gone("owner of a deleted topic", func(w *world) { w.put("/consumers/shop/owners/gone/1-0", memberID+"-0", w.member) },
			"owner-of-deleted-topic /consumers/shop/owners/gone/1-0"),
		gone("offset of a deleted topic", func(w *world) { w.put("/consumers/shop/offsets/gone/1-0", "7", 0) },
			"offset-of-deleted-topic /consumers/shop/offsets/gone/1-0"),
		{"rest of a deleted topic", func(w *world) {
			w.put("/config/topics/gone", `{"version":1,"config":{}}`, 0)
			w.put("/brokers/topics/gone/partitions/0/state", `{"version":1,"leader":1,"isr":[1]}`, 0)
		}, []string{"rest-of-deleted-topic /brokers/topics/gone/partitions/0/state", "rest-of-deleted-topic /config/topics/gone"}, nil},
		always("deletion at a standstill", func(w *world) {
			w.put("/admin/delete_topics/gone", `{"version":1}`, 0)
			w.put("/consumers/shop/offsets/gone/1-0", "7", 0)
		}, "deletion-unfinished /admin/delete_topics/gone"),
		always("unowned", func(w *world) { w.del(owner1) }, "partition-unowned "+owner1),
	}
}

func TestEachFaultIsFoundAndRepaired(t *testing.T) {
	for _, f := range faults() {
		t.Run(f.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				f.plant(w)
				d := w.doctor()
				r := w.examine(d)
				if got := found(r); !slices.Equal(got, f.want) {
					t.Fatalf("found %q, want %q", got, f.want)
				}
				if r.Unsettled != 0 {
					t.Errorf("%d unsettled though nothing moves", r.Unsettled)
				}
				var codes []inspect.Code
				for _, x := range r.Findings {
					codes = append(codes, x.Code)
					if x.Means == "" || x.Do == "" || x.What == "" || x.Severity == "" {
						t.Errorf("nothing is said of %+v", x)
					}
				}
				if errs := d.Repair(t.Context(), r, inspect.Repairable(r.Findings, codes)); len(errs) > 0 {
					t.Fatal(errs)
				}
				if after := found(w.examine(d)); !slices.Equal(after, f.left) {
					t.Errorf("after the repair %q, want %q", after, f.left)
				}
			})
		})
	}
}

// What is found once is not repaired if it has changed since.
func TestRepairsAreConditional(t *testing.T) {
	for _, f := range faults() {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			f.plant(w)
			d := w.doctor()
			r := w.examine(d)
			for i, x := range r.Findings {
				if x.Repair == nil {
					continue
				}
				key := root.Key(x.Key)
				kv, _, err := registry.GetKey(t.Context(), w.st, key)
				if err != nil {
					t.Fatal(err)
				}
				again := registry.KV{Value: []byte("appeared")}
				if kv != nil {
					again = *kv // the same value, written once more
				}
				w.txn(registry.Put(key, again.Value, again.Lease))
				before := w.st.Revision()
				if errs := d.Repair(t.Context(), r, []int{i}); len(errs) != 1 || !strings.Contains(errs[0].Error(), "changed") {
					t.Errorf("%s: %v", f.name, errs)
				}
				if w.st.Revision() != before || r.Findings[i].Repaired {
					t.Errorf("%s: something was repaired", f.name)
				}
			}
		})
	}
}

// A repair that loses something is made only if its code is named.
func TestWhatLosesIsAskedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.put("/consumers/shop/offsets/gone/1-0", "7", 0)
		r := w.examine(w.doctor())
		if got := inspect.Repairable(r.Findings, nil); len(got) != 0 {
			t.Error("a position would be lost unasked")
		}
		if got := inspect.Repairable(r.Findings, []inspect.Code{inspect.CodeOffsetOfDeletedTopic}); len(got) != 1 {
			t.Error("it is not repaired even if asked for")
		}
	})
}

// Something that looks wrong and changes before the second look is no finding.
func TestSuspicionsThatPass(t *testing.T) {
	for name, c := range map[string]struct {
		plant, pass func(w *world)
		unsettled   int
	}{
		"claimed meanwhile": {func(w *world) { w.del("/consumers/shop/owners/orders/1-1") },
			func(w *world) { w.put("/consumers/shop/owners/orders/1-1", memberID+"-0", w.member) }, 0},
		"claimed and released again": {func(w *world) { w.del("/consumers/shop/owners/orders/1-1") },
			func(w *world) {
				w.put("/consumers/shop/owners/orders/1-1", memberID+"-0", w.member)
				w.del("/consumers/shop/owners/orders/1-1")
			}, 1},
		"a member came": {func(w *world) { w.del("/consumers/shop/owners/orders/1-1") },
			func(w *world) {
				w.put("/consumers/shop/ids/z", `{"version":1,"subscription":{"orders":1},"pattern":"static","timestamp":"1","strategy":["range"]}`, w.member)
			}, 1},
		"states follow": {func(w *world) {
			w.del("/brokers/topics/orders/partitions/0/state")
			w.del("/brokers/topics/orders/partitions/1/state")
		},
			func(w *world) {
				w.put("/brokers/topics/orders/partitions/0/state", `{"version":1,"leader":1,"isr":[1]}`, 0)
			}, 1},
		"a deletion that goes on": {func(w *world) {
			w.put("/admin/delete_topics/gone", `{"version":1}`, 0)
			w.put("/consumers/shop/offsets/gone/1-0", "7", 0)
			w.put("/consumers/shop/offsets/gone/1-1", "7", 0)
		}, func(w *world) { w.del("/consumers/shop/offsets/gone/1-0") }, 1},
		"a broker that comes back": {func(w *world) { w.answers[1] = "refused" }, func(w *world) { w.answers[1] = "" }, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			c.plant(w)
			d := w.doctor()
			d.Waiting = func(int, time.Duration) { c.pass(w) }
			if r := w.examine(d); len(r.Findings) != 0 || r.Unsettled != c.unsettled {
				t.Errorf("%s: %v, %d unsettled", name, found(r), r.Unsettled)
			}
		})
	}
}

// The keys of a process that was killed look wrong until its lease has run out:
// the doctor waits for that.
func TestWaitsForALeaseToRunOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		l, err := w.st.Grant(t.Context(), 30*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		w.put("/consumers/shop/owners/orders/1-1", "killed-0", l.ID)
		d := w.doctor()
		var waited time.Duration
		d.Waiting = func(n int, wait time.Duration) {
			waited = wait
			time.AfterFunc(30*time.Second+time.Millisecond, func() {
				w.put("/consumers/shop/owners/orders/1-1", memberID+"-0", w.member)
			})
		}
		if r := w.examine(d); len(r.Findings) != 0 || waited < 30*time.Second {
			t.Errorf("%v after %s", found(r), waited)
		}
		if r := w.examine(d); !r.Healthy {
			t.Error(found(r))
		}
	})
}

// Questions names the partitions of topics that exist, and all brokers.
func TestQuestions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.put("/consumers/shop/offsets/gone/1-0", "7", 0)
		var asked inspect.Questions
		d := w.doctor()
		d.Ask = func(_ context.Context, q inspect.Questions) inspect.Probes { asked = q; return inspect.Probes{} }
		w.examine(d)
		if len(asked.Partitions) != 2 || len(asked.Brokers) != 1 || asked.Brokers[1].Port != 9092 {
			t.Errorf("%+v", asked)
		}
	})
}
