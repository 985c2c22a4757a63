package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
)

// ErrInternalTopic refuses the deletion of a topic that holds Kafka's own state.
var ErrInternalTopic = errors.New("an internal topic cannot be deleted")

// TopicDeletion is the value of /admin/delete_topics/<topic>, for example
//
//	{"version":1,"topic_id":"5f8a…","keep_offsets":false}
//
// It says that the topic is to be deleted, or that its deletion is under way. 0.8.2
// writes an empty value, and so may a person: a daemon then deletes the topic.
type TopicDeletion struct {
	Version     int32  `json:"version"`
	TopicID     string `json:"topic_id"`
	KeepOffsets bool   `json:"keep_offsets"`
}

// ParseDeletion reads the marker of a deletion and the topic off its key.
func (r Root) ParseDeletion(kv KV) (topic string, rec TopicDeletion, err error) {
	p := r.Locate(kv.Key)
	switch topic = p.Topic; {
	case p.Problem != nil:
		return "", rec, p.Problem
	case p.Kind != KindDeletion || topic == "":
		return "", rec, fmt.Errorf("deletion key %s: %w: it names no topic", kv.Key, ErrRecord)
	}
	if text := bytes.TrimSpace(kv.Value); len(text) == 0 || string(text) == `""` {
		return topic, rec, nil
	}
	return topic, rec, decode(kv, &rec)
}

// DeleteOptions say what a deletion spares.
type DeleteOptions struct {
	// KeepOffsets leaves the offsets of all groups. A topic created later under the
	// same name is then read from there.
	KeepOffsets bool
}

// Deletion is what a deletion took away. Where somebody else was at the same
// deletion, it is only what this one did of it.
type Deletion struct {
	Topic      string
	TopicID    string // "" if it had none
	Partitions int
	Groups     int // that had owner keys or offsets of the topic
	Owners     int64
	Offsets    int64
	// OffsetsKept tells that they were left in place.
	OffsetsKept bool
	// Resumed tells that the deletion had been begun before, by another call.
	Resumed bool
}

// DeleteTopic deletes a topic with its owner keys, its offsets in all groups
// (unless they are kept), its states, counts and settings. What daemons have of it
// on disk they remove when they see it gone.
//
// One transaction deletes the record and leaves a marker; from then on nobody can
// claim a partition of it, nor create a topic of that name. Then the owner keys go,
// so that no commit can follow, then the offsets, and last the rest together with
// the marker. Every step is conditional on the marker, so that one which comes late
// cannot hit a topic created since. After a failure at any point the call can be
// repeated; a daemon finishes what was left. A topic that is neither there nor
// being deleted is ErrNoTopic.
func DeleteTopic(ctx context.Context, st Store, root Root, topic string, o DeleteOptions) (Deletion, error) {
	w := &deletion{st: st, root: root}
	d, err := deleteTopic(ctx, w, topic, o)
	switch {
	case err != nil && w.marked:
		return d, fmt.Errorf("delete topic %s: the record is gone, the rest is not yet: %w (a daemon goes on with it; or call again)", clip([]byte(topic)), err)
	case err != nil:
		return d, fmt.Errorf("delete topic %s: %w", clip([]byte(topic)), err)
	}
	return d, nil
}

// FinishDeletion does what the marker of a topic asks for, as DeleteTopic does; it
// is ErrNoTopic if there is none. It deletes the record, too, if that is there: a
// marker that 0.8.2 or a person wrote is only a wish.
func FinishDeletion(ctx context.Context, st Store, root Root, topic string) (Deletion, error) {
	d, err := deleteTopic(ctx, &deletion{st: st, root: root, marked: true}, topic, DeleteOptions{})
	if err != nil {
		return d, fmt.Errorf("finish the deletion of topic %s: %w", clip([]byte(topic)), err)
	}
	return d, nil
}

func deleteTopic(ctx context.Context, w *deletion, topic string, o DeleteOptions) (Deletion, error) {
	if InternalTopic(topic) {
		return Deletion{}, ErrInternalTopic
	}
	if topic == "" {
		return Deletion{}, ErrTopicName
	}
	w.Topic = topic
	if err := w.begin(ctx, o); err != nil {
		return w.Deletion, err
	}
	for w.marked = true; ; {
		done, err := w.finish(ctx)
		if done || err != nil {
			return w.Deletion, err
		}
		// Somebody wrote the record again by hand. If the marker is gone by now,
		// another has finished, and the topic is a new one.
		if err := w.begin(ctx, o); errors.Is(err, ErrNoTopic) {
			return w.Deletion, nil
		} else if err != nil {
			return w.Deletion, err
		}
	}
}

// deletion is one on its way.
type deletion struct {
	st     Store
	root   Root
	marked bool  // only what is marked is deleted
	marker int64 // create-revision of the marker
	Deletion
}

// begin brings about that the record is gone and the marker there.
func (w *deletion) begin(ctx context.Context, o DeleteOptions) error {
	topicKey, markerKey := w.root.Topic(w.Topic), w.root.DeletedTopic(w.Topic)
	for {
		res, err := w.st.Txn(ctx, Txn{Then: []Op{Get(topicKey), Get(markerKey)}})
		if err != nil {
			return err
		}
		record, marker := res.Items[0].KVs, res.Items[1].KVs
		value := TopicDeletion{KeepOffsets: o.KeepOffsets}
		var modified int64
		if len(marker) > 0 {
			_, asked, err := w.root.ParseDeletion(marker[0])
			if err != nil {
				return err
			}
			value.KeepOffsets = value.KeepOffsets && len(record) > 0 || asked.KeepOffsets
			value.TopicID = asked.TopicID
			w.marker, modified = marker[0].CreateRevision, marker[0].ModRevision
		}
		w.Resumed = len(record) == 0
		w.OffsetsKept, w.TopicID = value.KeepOffsets, value.TopicID
		if len(marker) == 0 && (len(record) == 0 || w.marked) {
			return ErrNoTopic
		}
		if len(record) == 0 {
			return nil
		}
		value.Version = 1
		if _, rec, _, err := w.root.ParseTopic(record[0]); err == nil {
			value.TopicID, w.Partitions = rec.TopicID, len(rec.Partitions)
		}
		w.TopicID = value.TopicID
		text, err := Encode(value)
		if err != nil {
			return err
		}
		res, err = w.st.Txn(ctx, Txn{
			If:   []Cond{CreatedAt(topicKey, record[0].CreateRevision), ModifiedAt(markerKey, modified)},
			Then: []Op{Delete(topicKey), Put(markerKey, text, 0)},
		})
		if err != nil {
			return err
		}
		if res.Succeeded {
			if modified == 0 {
				w.marker = res.Revision
			}
			return nil
		}
	}
}

// finish deletes all but the record. It is not done if the record is there again.
func (w *deletion) finish(ctx context.Context) (done bool, err error) {
	keys, _, err := listKeys(ctx, w.st, w.root.Topic(w.Topic)+"/partitions/")
	if err != nil {
		return false, err
	}
	w.Partitions = max(w.Partitions, len(keys))
	groups, err := groupNames(ctx, w.st, w.root)
	if err != nil {
		return false, err
	}
	touched := make([]bool, len(groups))
	current, err := w.empty(ctx, groups, touched, &w.Owners, func(g GroupPaths) string { return g.TopicOwners(w.Topic) })
	if err == nil && current && !w.OffsetsKept {
		current, err = w.empty(ctx, groups, touched, &w.Offsets, func(g GroupPaths) string { return g.TopicOffsets(w.Topic) })
	}
	for _, t := range touched {
		if t {
			w.Groups++
		}
	}
	if err != nil || !current {
		return true, err
	}
	topicKey, markerKey := w.root.Topic(w.Topic), w.root.DeletedTopic(w.Topic)
	res, err := w.st.Txn(ctx, Txn{
		If: []Cond{CreatedAt(markerKey, w.marker), Absent(topicKey)},
		Then: []Op{
			{Kind: OpDelete, Key: topicKey + "/", Prefix: true},
			Delete(w.root.TopicConfig(w.Topic)),
			Delete(markerKey),
		},
		Else: []Op{Get(topicKey), Get(markerKey)},
	})
	if err != nil || res.Succeeded {
		return true, err
	}
	// Without the marker another has finished, and what is there is a new topic.
	markers := res.Items[1].KVs
	return len(markers) == 0 || markers[0].CreateRevision != w.marker, nil
}

// maxDeletes bounds the keys that one transaction deletes: it holds up all others.
const maxDeletes = 20_000

// empty deletes what stands under a prefix of each group. It is not current any
// more once somebody else has finished the deletion.
func (w *deletion) empty(ctx context.Context, groups []string, touched []bool, total *int64, prefix func(GroupPaths) string) (current bool, err error) {
	size := min(max(1, maxDeletes/max(w.Partitions, 1)), MaxNested)
	for from := 0; from < len(groups); from += size {
		t := Txn{If: []Cond{CreatedAt(w.root.DeletedTopic(w.Topic), w.marker)}}
		for _, g := range groups[from:min(from+size, len(groups))] {
			t.Then = append(t.Then, Op{Kind: OpDelete, Key: prefix(w.root.Group(g)), Prefix: true})
		}
		res, err := w.st.Txn(ctx, t)
		if err != nil {
			return false, err
		}
		if !res.Succeeded {
			return false, nil
		}
		for i, item := range res.Items {
			*total += item.Deleted
			touched[from+i] = touched[from+i] || item.Deleted > 0
		}
	}
	return true, nil
}

// groupPage is how many keys are read at a time to find groups: few, since of a
// large group only the first is needed.
const groupPage = 200

// groupNames finds all groups that have any key. It skips over what each has.
func groupNames(ctx context.Context, st Store, root Root) ([]string, error) {
	var names []string
	req := RangeRequest{Key: root.Groups(), Prefix: true, Limit: groupPage, KeysOnly: true}
	for {
		res, err := st.Range(ctx, req)
		if err != nil {
			return nil, fmt.Errorf("list groups: %w", err)
		}
		for _, kv := range res.KVs {
			req.After = kv.Key
			name := root.Locate(kv.Key).Group
			if name == "" {
				continue // no key of a group
			}
			if len(names) == 0 || names[len(names)-1] != name {
				names = append(names, name)
			}
			req.After = PrefixEnd(root.Group(name).Prefix())
		}
		if !res.More || len(res.KVs) == 0 {
			return names, nil
		}
	}
}
