package broker

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/muster-io/muster/broker/api"
	"github.com/muster-io/muster/broker/partition"
	"github.com/muster-io/muster/broker/storage"
	"github.com/muster-io/muster/registry"
)

// openAtOnce is how many logs are opened or closed in parallel: recovery reads the
// disk, and more readers only make it seek.
const openAtOnce = 4

// openSlice is how many logs are opened before changes are looked at again.
const openSlice = 64

// localChanges is what is to be done about partitions of this daemon, in this order.
type localChanges struct {
	close []closing
	aside []settingAside
	open  []opening
}

type closing struct {
	tn   topicNumber
	l    local
	why  *kerr.Error
	drop bool // its log is not kept
}

// settingAside is about the directory of a partition that does not exist any more.
type settingAside struct {
	tn   topicNumber
	keep bool
}

type opening struct {
	tn    topicNumber
	spec  localSpec
	pause time.Duration // after the last attempt that failed
}

// plan compares what is open of a topic with what is wanted. before and topic are
// the topic as it was and is, empty where there is none.
func (t *topics) plan(before, topic api.Topic, condemned bool, todo *localChanges, name string) {
	settings := t.settings(name)
	existed := before.Name != "" && before.ID != uuid.Nil
	exists := topic.Name != ""
	same := exists && (before.ID == topic.ID || !existed)
	for _, info := range before.Partitions {
		tn := topicNumber{name, info.Number}
		_, still := topic.Partition(info.Number)
		gone := !same || exists && !still
		t.planOne(tn, topic, settings, fate{gone: gone, condemned: condemned}, todo)
		if gone && existed {
			todo.aside = append(todo.aside, settingAside{tn, !condemned})
		}
	}
	for _, info := range topic.Partitions {
		if _, seen := before.Partition(info.Number); !seen {
			t.planOne(topicNumber{name, info.Number}, topic, settings, fate{}, todo)
		}
	}
}

// fate is what became of a partition: whether it exists no more, and whether its
// topic was to be deleted.
type fate struct{ gone, condemned bool }

// planOne plans for one partition.
func (t *topics) planOne(tn topicNumber, topic api.Topic, settings logSettings, f fate, todo *localChanges) {
	info, there := topic.Partition(tn.number)
	want := localSpec{id: topic.ID, epoch: info.LeaderEpoch, settings: settings}
	wanted := there && info.Leader == t.d.cfg.ID && topic.ID != uuid.Nil
	l, have := t.open[tn] // only this goroutine changes it
	if have && (!wanted || l.spec != want) {
		why := kerr.NotLeaderForPartition
		if f.gone {
			why = kerr.UnknownTopicOrPartition
		}
		todo.close = append(todo.close, closing{tn, l, why, f.gone && f.condemned})
		delete(t.failing, tn)
		have = false
	}
	if !wanted || have && l.err == nil {
		return
	}
	if have && time.Now().Before(t.failing[tn]) || t.waiting[tn] {
		return
	}
	todo.open = append(todo.open, opening{tn, want, l.pause})
}

func (t *topics) settings(name string) logSettings {
	e := t.catalog.topics[name]
	if e == nil {
		return logSettings{}
	}
	s, err := e.settings()
	if err != nil {
		t.complain(fmt.Errorf("settings of topic %s: %w", name, err))
	}
	return s
}

// parallel runs f for 0 to n-1.
func parallel(n int, f func(i int)) {
	var wg sync.WaitGroup
	slots := make(chan struct{}, openAtOnce)
	for i := range n {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			f(i)
		})
	}
	wg.Wait()
}

func (t *topics) closeAll(todo localChanges) {
	for _, c := range todo.close {
		if c.l.partition != nil {
			t.logs--
		}
	}
	parallel(len(todo.close), func(i int) {
		t.pulse.beat()
		c := todo.close[i]
		if c.l.partition == nil {
			return
		}
		if err := c.l.partition.Retire(c.why, c.drop); err != nil {
			t.d.log.Error("partition was not closed cleanly", "topic", c.tn.topic, "partition", c.tn.number, "error", err)
		}
	})
	for _, a := range todo.aside {
		t.pulse.beat()
		if registry.ValidateTopicName(a.tn.topic) != nil {
			continue // it never had a directory
		}
		if err := t.dirs.setAside(a.tn.topic, a.tn.number, a.keep); err != nil {
			t.d.log.Error("log of a topic that is gone cannot be moved aside", "topic", a.tn.topic, "partition", a.tn.number, "error", err)
		}
	}
}

// openSome opens what waited to be opened, as far as it is still wanted: a slice of
// it, so that other changes need not wait for all of a large topic.
func (t *topics) openSome() {
	slice := t.line[:min(len(t.line), openSlice)]
	t.line = t.line[len(slice):]
	known := t.Snapshot().Topics
	var todo localChanges
	for _, tn := range slice {
		delete(t.waiting, tn)
		topic, _ := known.Get(tn.topic)
		t.planOne(tn, topic, t.settings(tn.topic), fate{}, &todo)
	}
	t.openAll(todo.open)
}

// wait puts partitions in line to be opened.
func (t *topics) wait(jobs []opening) {
	for _, j := range jobs {
		t.waiting[j.tn] = true
		t.line = append(t.line, j.tn)
	}
}

func (t *topics) openAll(jobs []opening) {
	room := t.maxLogs - t.logs
	if room < len(jobs) && time.Since(t.crowded) > silencePause {
		t.crowded = time.Now()
		t.d.log.Error("some partitions cannot be opened, trying again", "error", errOpenFiles, "limit", t.maxLogs)
	}
	parallel(len(jobs), func(i int) {
		t.pulse.beat()
		l := local{err: fmt.Errorf("%w: %w", kerr.KafkaStorageError, errOpenFiles)}
		if i < room {
			l = t.openOne(jobs[i])
		}
		l.spec = jobs[i].spec
		if l.err != nil {
			l.pause = min(max(2*jobs[i].pause, minOpenPause), maxOpenPause)
		}
		t.mu.Lock()
		t.open[jobs[i].tn] = l
		t.mu.Unlock()
	})
	for _, j := range jobs {
		delete(t.failing, j.tn)
		if l := t.open[j.tn]; l.err != nil {
			t.failing[j.tn] = time.Now().Add(l.pause)
		} else {
			t.logs++
		}
	}
}

func (t *topics) openOne(j opening) local {
	log := t.d.log.With("topic", j.tn.topic, "partition", j.tn.number)
	if err := registry.ValidateTopicName(j.tn.topic); err != nil {
		log.Error("partition cannot be opened", "error", err)
		return local{err: fmt.Errorf("%w: %w", kerr.InvalidTopicException, err)}
	}
	if err := t.dirs.reclaim(j.tn.topic, j.tn.number, j.spec.id); err != nil {
		log.Error("partition cannot be opened, trying again", "error", err)
		return local{err: fmt.Errorf("%w: %w", kerr.KafkaStorageError, err)}
	}
	p, recovery, err := t.openLog(j)
	if wrong, ok := errors.AsType[*storage.IdentityError](err); ok && wrong.Reason == "" {
		// The topic was deleted and made again while nobody looked.
		if err = t.dirs.setAside(j.tn.topic, j.tn.number, true); err == nil {
			p, recovery, err = t.openLog(j)
		}
	}
	if err != nil {
		log.Error("partition cannot be opened, trying again", "error", err)
		return local{err: fmt.Errorf("%w: %w", kerr.KafkaStorageError, err)}
	}
	if recovery.BytesCut > 0 {
		log.Warn("log was cut to its last whole batch", "bytes_cut", recovery.BytesCut, "end_offset", recovery.ValidOffset, "reason", recovery.Reason)
	} else if !recovery.Clean {
		log.Info("log recovered", "end_offset", recovery.ValidOffset)
	}
	if latest := p.LatestEpoch(); latest > j.spec.epoch {
		log.Error("leader epoch in the registry is older than the log's: nothing can be appended until the state of the partition is corrected",
			"leader_epoch", j.spec.epoch, "log_epoch", latest)
	}
	return local{partition: p}
}

func (t *topics) openLog(j opening) (*partition.Local, storage.Recovery, error) {
	log := t.d.log.With("topic", j.tn.topic, "partition", j.tn.number)
	segmentBytes := j.spec.settings.segmentBytes
	if segmentBytes == 0 {
		segmentBytes = t.d.cfg.SegmentBytes
	}
	return partition.OpenLocal(partition.LocalOptions{
		Dir:                t.dirs.partition(j.tn.topic, j.tn.number),
		TopicID:            storage.TopicID(j.spec.id),
		LeaderEpoch:        j.spec.epoch,
		SegmentBytes:       segmentBytes,
		IndexIntervalBytes: j.spec.settings.indexInterval,
		MaxBatchBytes:      int(j.spec.settings.maxBatch),
		Listener: t.d.metrics.listen(storage.Listener{
			Failed: func(e *storage.FailedError) { log.Error("partition failed and is read-only", "error", e) },
		}),
	})
}
