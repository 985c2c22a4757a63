package conformance

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"sync"
	"testing"
	"time"
)

// keyValue is a key as etcdctl prints it in JSON.
type keyValue struct {
	Key            []byte `json:"key"`
	Value          []byte `json:"value"`
	CreateRevision int64  `json:"create_revision"`
	ModRevision    int64  `json:"mod_revision"`
	Lease          int64  `json:"lease"`
}

// tree is the registry at one moment.
type tree map[string]keyValue

func (c *cluster) etcdctl(args ...string) []byte {
	c.t.Helper()
	return c.run(append([]string{"etcdctl", "--endpoints", c.etcd, "-w", "json"}, args...)...)
}

// readTree asks for all keys.
func (c *cluster) readTree() tree {
	c.t.Helper()
	var answer struct {
		KVs []keyValue `json:"kvs"`
	}
	if err := json.Unmarshal(c.etcdctl("get", "--prefix", ""), &answer); err != nil {
		c.t.Fatalf("etcdctl get: %v", err)
	}
	all := tree{}
	for _, kv := range answer.KVs {
		all[string(kv.Key)] = kv
	}
	return all
}

// revision is the registry's.
func (c *cluster) revision() int64 {
	c.t.Helper()
	var answer struct {
		Header struct {
			Revision int64 `json:"revision"`
		} `json:"header"`
	}
	if err := json.Unmarshal(c.etcdctl("get", "/"), &answer); err != nil || answer.Header.Revision == 0 {
		c.t.Fatalf("etcdctl get: %+v, %v", answer, err)
	}
	return answer.Header.Revision
}

// leases lists all leases.
func (c *cluster) leases() map[int64]bool {
	c.t.Helper()
	var answer struct {
		Leases []struct {
			ID int64 `json:"id"`
		} `json:"leases"`
	}
	if err := json.Unmarshal(c.etcdctl("lease", "list"), &answer); err != nil {
		c.t.Fatalf("etcdctl lease list: %v", err)
	}
	all := map[int64]bool{}
	for _, l := range answer.Leases {
		all[l.ID] = true
	}
	return all
}

// grantedTTL is the full life of a lease: etcd may give more than was asked for.
func (c *cluster) grantedTTL(lease int64) time.Duration {
	c.t.Helper()
	var answer struct {
		Granted int64 `json:"granted-ttl"`
	}
	if err := json.Unmarshal(c.etcdctl("lease", "timetolive", fmt.Sprintf("%x", lease)), &answer); err != nil {
		c.t.Fatalf("etcdctl lease timetolive: %v", err)
	}
	if answer.Granted <= 0 {
		c.t.Fatalf("lease %x has no life: %+v", lease, answer)
	}
	return time.Duration(answer.Granted) * time.Second
}

// change is one change of a key, with the time at which etcdctl told of it.
type change struct {
	keyValue
	key     string
	deleted bool
	at      time.Time
}

// history is the registry from its first revision on, as etcdctl watch tells it.
// The watch goes on by itself after a restart of the daemon.
type history struct {
	t     *testing.T
	c     *cluster
	p     *process
	ended chan struct{} // closed when the output of p is no longer read

	mu      sync.Mutex
	changes []change
	now     tree
	err     error
}

func (c *cluster) watch() *history {
	c.t.Helper()
	h := &history{t: c.t, c: c, now: tree{}}
	c.watchFrom(h, 1)
	return h
}

// watchAgain goes on with a history whose watch was ended, as one is without a quorum.
func (c *cluster) watchAgain(h *history) {
	c.t.Helper()
	h.p.kill()
	<-h.ended
	h.mu.Lock()
	h.err = nil
	next := int64(1)
	if n := len(h.changes); n > 0 {
		next = h.changes[n-1].ModRevision + 1
	}
	h.mu.Unlock()
	c.watchFrom(h, next)
}

func (c *cluster) watchFrom(h *history, revision int64) {
	c.t.Helper()
	r, w := io.Pipe()
	h.ended = make(chan struct{})
	go func() {
		defer close(h.ended)
		defer r.Close() // the process must not wait for a reader
		h.follow(r)
	}()
	h.p = c.start("etcdctl-watch", nil, w, "etcdctl", "--endpoints", c.etcd, "-w", "json", "watch", "--prefix", "", "--rev", fmt.Sprint(revision))
	go func() {
		<-h.p.done
		w.Close()
	}()
}

// errCanceled: the server has ended the watch, which it does when it has heard of no
// leader for a few seconds.
var errCanceled = errors.New("watch was canceled")

func (h *history) follow(r io.Reader) {
	for d := json.NewDecoder(r); ; {
		var answer struct {
			CompactRevision int64
			Canceled        bool
			Events          []struct {
				Type int      `json:"type"`
				KV   keyValue `json:"kv"`
			}
		}
		err := d.Decode(&answer)
		switch {
		case err != nil:
		case answer.CompactRevision != 0:
			err = fmt.Errorf("watch ended: %+v", answer)
		case answer.Canceled:
			err = errCanceled
		}
		h.mu.Lock()
		if h.err = err; err != nil {
			h.mu.Unlock()
			return
		}
		at := time.Now()
		for _, e := range answer.Events {
			ch := change{keyValue: e.KV, key: string(e.KV.Key), deleted: e.Type == 1, at: at}
			h.changes = append(h.changes, ch)
			if ch.deleted {
				delete(h.now, ch.key)
			} else {
				h.now[ch.key] = ch.keyValue
			}
		}
		h.mu.Unlock()
	}
}

// caughtUp waits until a watch has told all that was when it was called, and returns the
// revision of that.
func (c *cluster) caughtUp(h *history) int64 {
	c.t.Helper()
	revision := c.revision()
	until(c.t, patience, fmt.Sprintf("etcdctl watch has come to revision %d", revision), func() bool {
		h.snapshot()
		all := h.all()
		return len(all) > 0 && all[len(all)-1].ModRevision >= revision
	})
	return revision
}

func (h *history) snapshot() tree {
	h.t.Helper()
	h.mu.Lock()
	if errors.Is(h.err, errCanceled) {
		h.mu.Unlock()
		h.c.watchAgain(h)
		h.mu.Lock()
	}
	defer h.mu.Unlock()
	if h.err != nil {
		h.t.Fatalf("etcdctl watch: %v", h.err)
	}
	return maps.Clone(h.now)
}

func (h *history) all() []change {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.changes[:len(h.changes):len(h.changes)]
}

// until waits for the registry to be in a state.
func (h *history) until(limit time.Duration, what string, is func(tree) bool) {
	h.t.Helper()
	came := false
	defer func() {
		if !came {
			h.t.Logf("the registry then:\n%s", h.snapshot())
		}
	}()
	until(h.t, limit, what, func() bool { return is(h.snapshot()) })
	came = true
}
