package rebalance

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/muster-io/muster/registry"
)

// Target is the assignment that a group with the strategy sticky follows, as its
// target record has it.
type Target struct {
	Record       int64 // mod-revision of the record; 0 for one not yet written
	Snapshot     int64 // revision of the snapshot that it was computed from
	Assignment   *Assignment
	Incarnations map[string]int64 // of the topics in it
	// Group stands for the members and what each subscribes to, as far as the topics
	// exist: when it differs, so do they.
	Group string
}

// MaxTarget bounds the encoded record in bytes. An etcd request may have 1.5 MiB, and the
// record is not alone in it.
const MaxTarget = 1 << 20

// ErrTargetTooLarge refuses a target that no record can hold. The group cannot be
// divided by sticky until it has fewer partitions or members, or shorter ids, or
// states another strategy first. It does not fall back to another strategy by
// itself: at the limit, each join and leave would then move nearly everything.
var ErrTargetTooLarge = errors.New("target is too large for its record")

// targetRecord is the value of /consumers/<group>/target, for example
//
//	{"version":1,"revision":812,"strategy":"sticky","group":"5d1f…","members":["a:1","b:2"],"streams":[1],
//	 "topics":{"orders":{"created":17,"homes":[1,2],"owners":[0,1,0,1]}}}
//
// Members and topics are spelled as in keys. Owners has a thread for each
// partition, by number: all streams of the first member are counted from 0, then
// those of the second, and so on; -1 is nobody. Numbers are there only if they are
// not 0, 1, 2 … Streams (of the members) and homes are cut to their first period:
// [1] is 1 for all.
type targetRecord struct {
	Version  int                    `json:"version"`
	Revision int64                  `json:"revision"`
	Strategy string                 `json:"strategy"`
	Group    string                 `json:"group"`
	Members  []string               `json:"members"`
	Streams  []int32                `json:"streams"`
	Topics   map[string]targetTopic `json:"topics"`
}

type targetTopic struct {
	Created int64   `json:"created"` // the topic's incarnation
	Homes   []int32 `json:"homes"`
	Numbers []int32 `json:"numbers,omitempty"`
	Owners  []int32 `json:"owners"`
}

// Encode returns the record of the target, or ErrTargetTooLarge.
func (t *Target) Encode() ([]byte, error) {
	a := t.Assignment
	rec := targetRecord{Version: 1, Revision: t.Snapshot, Strategy: a.Strategy, Group: t.Group, Topics: make(map[string]targetTopic, len(a.Topics))}
	rec.Members = make([]string, len(a.Members))
	streams := slices.Repeat([]int32{1}, len(a.Members))
	for i, id := range a.Members {
		name, err := registry.EscapeName(id)
		if err != nil {
			return nil, fmt.Errorf("encode target: member: %w", err)
		}
		rec.Members[i] = name
	}
	for _, share := range a.Topics {
		for _, owner := range share.Owners {
			if owner != Nobody {
				streams[owner.Member] = max(streams[owner.Member], owner.Stream+1)
			}
		}
	}
	first, threads := firstThreads(streams)
	if threads > maxThreads {
		return nil, fmt.Errorf("%w: it has %d threads, at most %d", ErrTargetTooLarge, threads, maxThreads)
	}
	rec.Streams = period(streams)
	for topic, share := range a.Topics {
		name, err := registry.EscapeName(topic)
		if err != nil {
			return nil, fmt.Errorf("encode target: topic: %w", err)
		}
		rec.Topics[name] = encodeTopic(share, t.Incarnations[topic], first)
	}
	value, err := registry.Encode(rec)
	if err == nil && len(value) > MaxTarget {
		err = fmt.Errorf("%w: %d bytes for %d members and %d topics, at most %d: let the members state another strategy first, such as range, or have shorter ids",
			ErrTargetTooLarge, len(value), len(a.Members), len(a.Topics), MaxTarget)
	}
	if err != nil {
		return nil, err
	}
	return value, nil
}

func encodeTopic(share TopicShare, created int64, first []int32) targetTopic {
	t := targetTopic{Created: created, Owners: make([]int32, len(share.Owners))}
	homes, numbers, dense := make([]int32, len(share.Owners)), make([]int32, len(share.Owners)), true
	for i, p := range share.Partitions {
		homes[i], numbers[i] = p.Home, p.Number
		dense = dense && int(p.Number) == i
		t.Owners[i] = -1
		if owner := share.Owners[i]; owner != Nobody {
			t.Owners[i] = first[owner.Member] + owner.Stream
		}
	}
	t.Homes = period(homes)
	if !dense {
		t.Numbers = numbers
	}
	return t
}

// ReadTarget reads the target record of a group.
func ReadTarget(kv registry.KV) (*Target, error) {
	t, err := readTarget(kv.Value)
	if err != nil {
		return nil, fmt.Errorf("target record %s: %w: %w", kv.Key, registry.ErrRecord, err)
	}
	t.Record = kv.ModRevision
	return t, nil
}

func readTarget(value []byte) (*Target, error) {
	var rec targetRecord
	if err := json.Unmarshal(value, &rec); err != nil {
		return nil, err
	}
	if rec.Version != 1 || rec.Strategy != StrategySticky {
		return nil, fmt.Errorf("version %d, strategy %q; want 1 and %s", rec.Version, rec.Strategy, StrategySticky)
	}
	a := &Assignment{Strategy: rec.Strategy, Members: make([]string, len(rec.Members)), Topics: make(map[string]TopicShare, len(rec.Topics))}
	for i, name := range rec.Members {
		id, err := registry.UnescapeName(name)
		if err != nil {
			return nil, fmt.Errorf("member: %w", err)
		}
		if i > 0 && id <= a.Members[i-1] {
			return nil, fmt.Errorf("member %q is out of order", id)
		}
		a.Members[i] = id
	}
	streams, err := repeat(rec.Streams, len(rec.Members), 1, registry.MaxStreams)
	if err != nil {
		return nil, fmt.Errorf("streams: %w", err)
	}
	var threads []Thread
	for i, n := range streams {
		if len(threads)+int(n) > maxThreads {
			return nil, fmt.Errorf("more than %d threads", maxThreads)
		}
		for stream := range n {
			threads = append(threads, Thread{int32(i), stream})
		}
	}
	t := &Target{Snapshot: rec.Revision, Assignment: a, Incarnations: make(map[string]int64, len(rec.Topics)), Group: rec.Group}
	for name, topic := range rec.Topics {
		id, err := registry.UnescapeName(name)
		if err == nil {
			a.Topics[id], err = topic.read(id, threads)
		}
		if err != nil {
			return nil, fmt.Errorf("topic %s: %w", name, err)
		}
		t.Incarnations[id] = topic.Created
	}
	return t, nil
}

// maxThreads bounds what a bad record of few bytes could make every member allocate.
const maxThreads = 4_000_000

func (t targetTopic) read(topic string, threads []Thread) (share TopicShare, err error) {
	homes, err := repeat(t.Homes, len(t.Owners), 0, math.MaxInt32)
	if err != nil {
		return share, fmt.Errorf("homes: %w", err)
	}
	if t.Numbers != nil && len(t.Numbers) != len(t.Owners) {
		return share, fmt.Errorf("%d numbers for %d owners", len(t.Numbers), len(t.Owners))
	}
	share = TopicShare{Partitions: make([]registry.Partition, len(t.Owners)), Owners: make([]Thread, len(t.Owners))}
	last := int32(-1)
	for i, owner := range t.Owners {
		number := int32(i)
		if t.Numbers != nil {
			number = t.Numbers[i]
		}
		if number <= last {
			return share, fmt.Errorf("partition %d is out of order", number)
		}
		last = number
		share.Partitions[i] = registry.Partition{Topic: topic, Home: homes[i], Number: number}
		switch {
		case owner == -1:
			share.Owners[i] = Nobody
		case owner < -1 || int(owner) >= len(threads):
			return share, fmt.Errorf("partition %d: no thread %d", number, owner)
		default:
			share.Owners[i] = threads[owner]
		}
	}
	return share, nil
}

// firstThreads counts threads: the number of each member's first one, and how many
// there are.
func firstThreads(streams []int32) (first []int32, n int) {
	first = make([]int32, len(streams))
	for i, s := range streams {
		first[i] = int32(n)
		n += int(s)
	}
	return first, n
}

// period returns the shortest beginning of the list that gives it when repeated, by
// the prefix function of Knuth, Morris and Pratt.
func period(list []int32) []int32 {
	border := make([]int, len(list))
	k := 0
	for i := 1; i < len(list); i++ {
		for k > 0 && list[i] != list[k] {
			k = border[k-1]
		}
		if list[i] == list[k] {
			k++
		}
		border[i] = k
	}
	return list[:len(list)-k]
}

// repeat is the inverse of period, for a list of n entries within bounds.
func repeat(list []int32, n int, least, most int32) ([]int32, error) {
	if len(list) > n || len(list) == 0 && n > 0 {
		return nil, fmt.Errorf("%d entries for %d", len(list), n)
	}
	whole := make([]int32, n)
	for i := range whole {
		v := list[i%len(list)]
		if v < least || v > most {
			return nil, fmt.Errorf("%d is not from %d to %d", v, least, most)
		}
		whole[i] = v
	}
	return whole, nil
}
