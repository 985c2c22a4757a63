package registry_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/memory"
)

// between is a store in which something else happens right before a transaction, once.
type between struct {
	registry.Store
	before func(registry.Txn) bool
	do     func()
}

func (b *between) Txn(ctx context.Context, t registry.Txn) (registry.TxnResult, error) {
	if b.do != nil && b.before(t) {
		do := b.do
		b.do = nil
		do()
	}
	return b.Store.Txn(ctx, t)
}

func conditional(t registry.Txn) bool { return len(t.If) > 0 }

// last is the one that ends a deletion.
func last(t registry.Txn) bool {
	return len(t.Then) > 0 && t.Then[0].Kind == registry.OpDelete && strings.HasSuffix(t.Then[0].Key, "/brokers/topics/t/")
}

// states is one that writes only states, which did not fit the one before.
func states(t registry.Txn) bool {
	return conditional(t) && len(t.Then) > 0 && t.Then[0].Kind == registry.OpTxn
}

func do(t *testing.T, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: %v, want %v", what, err, want)
	}
}

func nothingOf(t *testing.T, st registry.Store, topic string) {
	t.Helper()
	for key := range everything(t, st) {
		if of(key, topic) || strings.Contains(key, "/"+topic+"/") || strings.HasSuffix(key, "/"+topic) {
			t.Errorf("%s is left", key)
		}
	}
}

const byHand = `{"version":1,"partitions":{"0":[3],"1":[2]},"home":{"0":1,"1":2},"topic_id":"5f8a21f0-0000-4000-8000-000000000001"}`

// A record that somebody changes while partitions are added is not written over.
func TestAddPartitionsToAChangedRecord(t *testing.T) {
	st := memory.New()
	create(t, st, "t", 2)
	b := &between{st, conditional, func() { put(t, st, root.Topic("t"), byHand) }}
	_, err := registry.AddPartitions(t.Context(), b, root, "t", 4, []int32{1, 2, 3})
	do(t, "add", err, nil)
	if rec := topicRecord(t, st, "t"); len(rec.Partitions) != 4 || rec.Partitions[0][0] != 3 || rec.Home[0] != 1 || !strings.Contains(byHand, rec.TopicID) {
		t.Errorf("%+v", rec)
	}
}

// Settings are not written beside a topic that is deleted meanwhile.
func TestAlterTopicThatGoes(t *testing.T) {
	st := memory.New()
	put(t, st, root.Topic("t"), byHand) // has no settings yet
	b := &between{st, conditional, func() {
		_, err := registry.DeleteTopic(t.Context(), st, root, "t", registry.DeleteOptions{})
		do(t, "delete", err, nil)
	}}
	_, err := registry.AlterTopicConfig(t.Context(), b, root, "t", map[string]string{"retention.ms": "1"}, nil)
	do(t, "alter", err, registry.ErrNoTopic)
	nothingOf(t, st, "t")
}

// The states that follow a creation are written only beside that very topic, and not
// over what somebody has written since.
func TestStatesThatFollow(t *testing.T) {
	st := memory.New()
	spec := registry.TopicSpec{Name: "t", Partitions: 300, ReplicationFactor: 1}
	b := &between{st, states, func() {
		_, err := registry.DeleteTopic(t.Context(), st, root, "t", registry.DeleteOptions{})
		do(t, "delete", err, nil)
	}}
	_, err := registry.CreateTopic(t.Context(), b, root, spec, []int32{1})
	do(t, "create", err, registry.ErrTopicDeleting)
	nothingOf(t, st, "t")
	moved := `{"controller_epoch":1,"leader":9,"version":1,"leader_epoch":7,"isr":[9]}`
	b = &between{st, states, func() { put(t, st, root.PartitionState("t", 290), moved) }}
	_, err = registry.CreateTopic(t.Context(), b, root, spec, []int32{1})
	do(t, "create", err, nil)
	if got := everything(t, st)[root.PartitionState("t", 290)]; got != moved {
		t.Errorf("state became %s", got)
	}
}

// A record that a person writes again while the topic is being deleted goes, too; a
// topic made after another has finished the deletion does not.
func TestRecordThatComesBackDuringDeletion(t *testing.T) {
	st := memory.New()
	create(t, st, "t", 2)
	b := &between{st, last, func() { put(t, st, root.Topic("t"), byHand) }}
	_, err := registry.DeleteTopic(t.Context(), b, root, "t", registry.DeleteOptions{})
	do(t, "delete", err, nil)
	nothingOf(t, st, "t")

	create(t, st, "t", 2)
	var want map[string]string
	b = &between{st, last, func() {
		_, err := registry.FinishDeletion(t.Context(), st, root, "t")
		do(t, "finish", err, nil)
		create(t, st, "t", 3)
		want = everything(t, st)
	}}
	_, err = registry.DeleteTopic(t.Context(), b, root, "t", registry.DeleteOptions{})
	do(t, "delete", err, nil)
	same(t, "after a deletion that came late", everything(t, st), want)
}

// Whoever asks first that the offsets be kept, or not, is obeyed.
func TestWhoSaysThatOffsetsAreKept(t *testing.T) {
	offset := root.Group("g").Offset(registry.Partition{Topic: "t", Home: 1})
	for _, c := range []struct {
		first string // the marker that comes in between, or was there before
		begun bool
		keep  bool // what DeleteTopic is told
		kept  bool
	}{
		{`{"version":1,"topic_id":"","keep_offsets":true}`, false, false, true},
		{`{"version":1,"topic_id":"","keep_offsets":false}`, true, true, false},
		{`{"version":1,"topic_id":"","keep_offsets":true}`, true, false, true},
	} {
		st := memory.New()
		create(t, st, "t", 1)
		put(t, st, offset, "5")
		b := &between{st, conditional, func() { put(t, st, root.DeletedTopic("t"), c.first) }}
		if c.begun {
			put(t, st, root.DeletedTopic("t"), c.first)
			txn(t, st, registry.Delete(root.Topic("t")))
			b.do = nil
		}
		d, err := registry.DeleteTopic(t.Context(), b, root, "t", registry.DeleteOptions{KeepOffsets: c.keep})
		do(t, "delete", err, nil)
		if _, there := everything(t, st)[offset]; there != c.kept || d.OffsetsKept != c.kept || d.Resumed != c.begun {
			t.Errorf("%+v: offset there: %v, %+v", c, there, d)
		}
	}
}

// No group is missed, however many keys the one before it has, and however its name
// begins.
func TestDeletionFindsAllGroups(t *testing.T) {
	st := memory.New()
	create(t, st, "t", 1)
	create(t, st, "u", 1)
	for i := range int32(450) {
		put(t, st, root.Group("a").Offset(registry.Partition{Topic: "u", Home: 1, Number: i}), "1")
	}
	groups := []string{"a", "a ", "a-", "a.b", "a0", "aa", "b"}
	for _, g := range groups {
		put(t, st, root.Group(g).Offset(registry.Partition{Topic: "t", Home: 1}), "1")
	}
	d, err := registry.DeleteTopic(t.Context(), st, root, "t", registry.DeleteOptions{})
	do(t, "delete", err, nil)
	if d.Groups != len(groups) || d.Offsets != int64(len(groups)) {
		t.Errorf("%+v", d)
	}
	nothingOf(t, st, "t")
}

// A broker that is new gets more of the partitions that are added; one that is named
// twice counts once.
func TestPlacementCatchesUp(t *testing.T) {
	placed := map[int32][]int32{}
	for p := range int32(6) {
		placed[p] = []int32{1 + p%2}
	}
	for _, c := range []struct {
		placed  map[int32][]int32
		total   int32
		brokers []int32
		want    map[int32]int
	}{
		{placed, 9, []int32{1, 2, 3}, map[int32]int{1: 1, 3: 2}},
		{nil, 4, []int32{2, 1, 1}, map[int32]int{1: 2, 2: 2}},
		{nil, 3, []int32{1, 1}, map[int32]int{1: 3}},
	} {
		got := map[int32]int{}
		for _, replicas := range registry.PlaceMore("t", c.placed, c.total, c.brokers) {
			got[replicas[0]]++
		}
		if fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("among %v: %v, want %v", c.brokers, got, c.want)
		}
	}
}
