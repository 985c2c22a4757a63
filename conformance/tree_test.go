package conformance

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// String lists the keys as a person reads them.
func (tr tree) String() string {
	var b strings.Builder
	for _, key := range slices.Sorted(maps.Keys(tr)) {
		fmt.Fprintf(&b, "%s = %s", key, tr[key].Value)
		if lease := tr[key].Lease; lease != 0 {
			fmt.Fprintf(&b, "  (lease %x)", lease)
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// under returns keys and values below a prefix, without it.
func (tr tree) under(prefix string) map[string]string {
	found := map[string]string{}
	for key, kv := range tr {
		if rest, ok := strings.CutPrefix(key, prefix); ok {
			found[rest] = string(kv.Value)
		}
	}
	return found
}

// members lists the registered consumers of a group.
func (tr tree) members(group string) []string {
	return slices.Sorted(maps.Keys(tr.under("/consumers/" + group + "/ids/")))
}

// owners tells which thread owns each partition.
func (tr tree) owners(group, topic string) map[int]string {
	owners := map[int]string{}
	for name, thread := range tr.under("/consumers/" + group + "/owners/" + topic + "/") {
		if n, ok := partitionNumber(name); ok {
			owners[n] = thread
		}
	}
	return owners
}

// offsets are the committed offsets.
func (tr tree) offsets(group, topic string) map[int]int64 {
	offsets := map[int]int64{}
	for name, text := range tr.under("/consumers/" + group + "/offsets/" + topic + "/") {
		n, ok := partitionNumber(name)
		if offset, err := strconv.ParseInt(text, 10, 64); ok && err == nil {
			offsets[n] = offset
		}
	}
	return offsets
}

// partitionNumber reads the name of a partition, whatever its home: where keys must
// name the right one, they are compared whole.
func partitionNumber(name string) (int, bool) {
	home, number, ok := strings.Cut(name, "-")
	_, err := strconv.Atoi(home)
	n, err2 := strconv.Atoi(number)
	return n, ok && err == nil && err2 == nil
}

// homes is where the partitions of a topic are at home: broker ids, by number.
type homes []int

// allOn is a topic whose partitions are all at home on one broker.
func allOn(broker, partitions int) homes { return slices.Repeat(homes{broker}, partitions) }

func (h homes) name(partition int) string { return fmt.Sprintf("%d-%d", h[partition], partition) }

// share is the documented rule, for consumers of one stream each: sort partitions so
// that those of a home are together, and threads as strings; give each P div T
// partitions and the first P mod T one more.
func share(h homes, consumers ...string) map[int]string {
	threads := make([]string, len(consumers))
	for i, id := range consumers {
		threads[i] = id + "-0"
	}
	slices.Sort(threads)
	sorted := make([]int, len(h))
	for p := range h {
		sorted[p] = p
	}
	slices.SortStableFunc(sorted, func(a, b int) int { return h[a] - h[b] })
	owners := map[int]string{}
	for i, thread := range threads {
		n := len(h) / len(threads)
		if i < len(h)%len(threads) {
			n++
		}
		for _, p := range sorted[:n] {
			owners[p] = thread
		}
		sorted = sorted[n:]
	}
	return owners
}

// shared tells whether exactly these consumers are registered and own the
// partitions by the rule.
func (tr tree) shared(group, topic string, h homes, consumers ...string) bool {
	return slices.Equal(tr.members(group), slices.Sorted(slices.Values(consumers))) &&
		maps.Equal(tr.owners(group, topic), share(h, consumers...))
}

// treeCheck compares the tree with the registry's layout, key by key. What it has seen
// it ticks off; what remains should not be there.
type treeCheck struct {
	t    *testing.T
	left tree
}

var (
	uuidText    = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
	clusterText = regexp.MustCompile(`^[A-Za-z0-9_-]{22}$`)
	sha256Text  = regexp.MustCompile(`^[0-9a-f]{64}$`)
	actionText  = regexp.MustCompile(`^(claimed|released)$`)
	anyText     = regexp.MustCompile(`.`)
	decimalText = regexp.MustCompile(`^(0|[1-9][0-9]*)$`)
)

// take returns a key that must be there, with a lease or without.
func (c *treeCheck) take(key string, ephemeral bool) keyValue {
	c.t.Helper()
	kv, ok := c.left[key]
	delete(c.left, key)
	switch {
	case !ok:
		c.t.Errorf("no key %s", key)
	case ephemeral != (kv.Lease != 0):
		c.t.Errorf("%s has lease %x; is it ephemeral: %v", key, kv.Lease, ephemeral)
	case ephemeral && kv.CreateRevision != kv.ModRevision && !strings.HasPrefix(key, "/brokers/topics/"):
		// A put under a lease drops the former one; and the create revision is a fence.
		c.t.Errorf("%s was written again after its creation", key)
	}
	return kv
}

// text takes a key whose value has a form.
func (c *treeCheck) text(key string, form *regexp.Regexp) {
	c.t.Helper()
	if kv := c.take(key, false); !form.Match(kv.Value) {
		c.t.Errorf("%s = %q, want the form %s", key, kv.Value, form)
	}
}

// record takes a key with JSON, and compares it field by field; nothing may be
// missing, and nothing else there. A want that is a func(any) bool decides itself.
func (c *treeCheck) record(key string, ephemeral bool, want map[string]any) keyValue {
	c.t.Helper()
	kv := c.take(key, ephemeral)
	var got map[string]any
	if err := json.Unmarshal(kv.Value, &got); err != nil {
		c.t.Errorf("%s = %q: %v", key, kv.Value, err)
		return kv
	}
	if !slices.Equal(slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(want))) {
		c.t.Errorf("%s = %s, want the fields %v", key, kv.Value, slices.Sorted(maps.Keys(want)))
	}
	for name, w := range want {
		is, ok := w.(func(any) bool)
		if ok && !is(got[name]) || !ok && !reflect.DeepEqual(got[name], w) {
			c.t.Errorf("%s = %s: field %s is not as it should be (%v)", key, kv.Value, name, w)
		}
	}
	return kv
}

// millis accepts a time of this test, as text.
func millis(v any) bool {
	text, _ := v.(string)
	n, err := strconv.ParseInt(text, 10, 64)
	return err == nil && time.Since(time.UnixMilli(n)).Abs() < time.Hour
}

func matches(form *regexp.Regexp) func(any) bool {
	return func(v any) bool {
		text, ok := v.(string)
		return ok && form.MatchString(text)
	}
}

func (c *treeCheck) cluster() {
	c.t.Helper()
	c.text("/cluster/id", clusterText)
	c.text("/producer_ids/next", decimalText)
}

func (c *treeCheck) broker(id int, address string) (lease int64) {
	c.t.Helper()
	host, port, _ := strings.Cut(address, ":")
	n, err := strconv.Atoi(port)
	if err != nil {
		c.t.Fatal(err)
	}
	return c.record("/brokers/ids/"+strconv.Itoa(id), true, map[string]any{"version": 1.0, "host": host, "port": float64(n),
		"jmx_port": -1.0, "timestamp": millis}).Lease
}

// topic checks the keys of a topic, given the leases of the brokers.
func (c *treeCheck) topic(name string, h homes, leases map[int]int64) {
	c.t.Helper()
	replicas, home := map[string]any{}, map[string]any{}
	counts := map[int]int{}
	for p, broker := range h {
		replicas[strconv.Itoa(p)] = []any{float64(broker)}
		home[strconv.Itoa(p)] = float64(broker)
		counts[broker]++
		c.record(fmt.Sprintf("/brokers/topics/%s/partitions/%d/state", name, p), false, map[string]any{"controller_epoch": 0.0,
			"leader": float64(broker), "version": 1.0, "leader_epoch": 0.0, "isr": []any{float64(broker)}})
	}
	c.record("/brokers/topics/"+name, false, map[string]any{"version": 1.0, "partitions": replicas, "home": home,
		"topic_id": matches(uuidText)})
	c.record("/config/topics/"+name, false, map[string]any{"version": 1.0, "config": map[string]any{}})
	for broker, n := range counts {
		count := c.take(fmt.Sprintf("/brokers/topics/%s/%d", name, broker), true)
		if string(count.Value) != strconv.Itoa(n) || count.Lease != leases[broker] {
			c.t.Errorf("%s = %q under lease %x, want %d under the broker's, %x", count.Key, count.Value, count.Lease, n, leases[broker])
		}
	}
}

// group checks the keys of a group that has committed all partitions.
func (c *treeCheck) group(group, topic string, h homes, consumers ...string) {
	c.t.Helper()
	base := "/consumers/" + group
	leases := map[string]int64{}
	for _, id := range consumers {
		leases[id+"-0"] = c.record(base+"/ids/"+id, true, map[string]any{"version": 1.0, "subscription": map[string]any{topic: 1.0},
			"pattern": "static", "timestamp": millis, "strategy": []any{"range"}, "notice": matches(sha256Text)}).Lease
	}
	for key := range c.left {
		if strings.HasPrefix(key, base+"/history/") {
			c.record(key, false, map[string]any{"version": 1.0, "timestamp": millis, "member": matches(anyText), "action": matches(actionText),
				"partitions": func(v any) bool { m, ok := v.(map[string]any); return ok && len(m) > 0 }, "reason": matches(anyText),
				"strategy": "range", "snapshot": matches(decimalText)})
		}
	}
	for p, thread := range share(h, consumers...) {
		kv := c.take(fmt.Sprintf("%s/owners/%s/%s", base, topic, h.name(p)), true)
		if string(kv.Value) != thread || kv.Lease != leases[thread] {
			c.t.Errorf("%s = %q under lease %x, want %s under its own, %x", kv.Key, kv.Value, kv.Lease, thread, leases[thread])
		}
	}
	for p := range h {
		c.text(fmt.Sprintf("%s/offsets/%s/%s", base, topic, h.name(p)), decimalText)
	}
}

func (c *treeCheck) nothingElse() {
	c.t.Helper()
	if len(c.left) > 0 {
		c.t.Errorf("keys that the layout does not have:\n%s", c.left)
	}
}

// homes reads where the partitions of a topic are at home.
func (tr tree) homes(t *testing.T, topic string) homes {
	t.Helper()
	var rec struct {
		Home map[string]int `json:"home"`
	}
	kv := tr["/brokers/topics/"+topic]
	if err := json.Unmarshal(kv.Value, &rec); err != nil {
		t.Fatalf("record of %s: %q: %v", topic, kv.Value, err)
	}
	h := make(homes, len(rec.Home))
	for p := range h {
		broker, ok := rec.Home[strconv.Itoa(p)]
		if !ok {
			t.Fatalf("record of %s: partition %d has no home: %q", topic, p, kv.Value)
		}
		h[p] = broker
	}
	return h
}
