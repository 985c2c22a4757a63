package conformance

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// The observer of the scripts finds each kind of fault: told of a history that is
// right and of one that is not in one point, it says which.
func TestObserverFindsFaults(t *testing.T) {
	const owner, offset = groupBase + "/owners/main/1-0", groupBase + "/offsets/main/1-0"
	began := time.Now()
	// a owns main/0 under token 3, commits 5, and hands over to b, whose token is 6.
	type told struct {
		changes []change
		spans   map[int64]*span
		harm    harm
	}
	put := func(revision int64, key, value string, lease int64) change {
		return change{keyValue: keyValue{Key: []byte(key), Value: []byte(value), CreateRevision: revision, ModRevision: revision, Lease: lease}, key: key, at: began}
	}
	del := func(revision int64, key string) change {
		return change{keyValue: keyValue{Key: []byte(key), ModRevision: revision}, key: key, deleted: true, at: began}
	}
	note := func(revision int64, member, action string) change {
		return put(revision, fmt.Sprintf("%s/history/%d", groupBase, revision),
			fmt.Sprintf(`{"member":%q,"action":%q,"reason":"so","partitions":{"main":["1-0"]}}`, member, action), 0)
	}
	a, b := &actor{id: "a"}, &actor{id: "b"}
	at := func(n int64) int64 { return began.UnixNano() + n }
	right := func() *told {
		return &told{
			changes: []change{put(1, groupBase+"/ids/a", "{}", 0xa), put(2, groupBase+"/ids/b", "{}", 0xb),
				put(3, owner, "a-0", 0xa), note(3, "a", "claimed"),
				put(4, offset, "5", 0),
				del(5, owner), note(5, "a", "released"),
				put(6, owner, "b-0", 0xb), note(6, "b", "claimed"),
				put(7, offset, "8", 0)},
			spans: map[int64]*span{3: {by: a, first: at(10), last: at(20), from: 0, next: 5}, 6: {by: b, first: at(30), last: at(40), from: 5, next: 8}},
			harm:  harm{map[string]bool{}, map[int64]bool{}},
		}
	}
	cut := func(list []change, from, to int) []change { return append(list[:from:from], list[to:]...) }
	for _, c := range []struct {
		says  string // "" if all is right
		spoil func(*told)
	}{
		{"", func(*told) {}},
		{"", func(w *told) { w.spans[3].next, w.spans[3].last = 7, at(29) }}, // printed and not committed
		{"two at once for 5ns", func(w *told) { w.spans[3].last = at(35) }},
		{"worked on main/0 under token 6", func(w *told) { w.spans[6].by = a }},
		{"worked on main/0 under token 9", func(w *told) { w.spans[9] = &span{by: b, first: at(50), last: at(50), from: -1, next: -1} }},
		{"began at offset 4", func(w *told) { w.spans[6].from = 4 }},
		{"began at offset 6", func(w *told) { w.spans[6].from = 6 }},
		{"delivered to 4", func(w *told) { w.spans[3].next = 4 }},
		{"delivered to 5", func(w *told) { delete(w.spans, 6) }},
		{"committed by b after 5", func(w *told) { w.changes[9].Value = []byte("4") }},
		{"while nobody owned", func(w *told) { w.changes = append(w.changes[:7], put(6, offset, "6", 0)) }},
		{"written over", func(w *told) { w.changes = cut(w.changes, 5, 7) }},
		{"registered false", func(w *told) { w.changes = cut(w.changes, 1, 2) }},
		{"under lease c", func(w *told) { w.changes[7].Lease = 0xc }},
		{"its history says", func(w *told) { w.changes = cut(w.changes, 8, 9) }},
		{"nothing says why", func(w *told) { w.changes = cut(w.changes, 6, 7) }},
		{"its history says", func(w *told) { w.changes[6] = note(5, "b", "released") }},
		{"", func(w *told) { w.changes[6] = del(5, groupBase+"/ids/a") }},
		{"", func(w *told) { // somebody deleted the key, and a has not noticed
			w.changes, w.spans[3].last = cut(w.changes, 6, 7), at(35)
			w.harm.touched[owner] = true
		}},
		{"went on for", func(w *told) {
			w.changes, w.spans[3].last = cut(w.changes, 6, 7), at(int64(notice)+1)
			w.harm.touched[owner] = true
		}},
	} {
		w := right()
		c.spoil(w)
		an, err := readAnnals(w.changes, w.harm)
		got := ""
		if err != nil {
			got = err.Error()
		} else {
			got = strings.Join(violations(an, an, map[place]map[int64]*span{{"main", 0}: w.spans}), "; ")
		}
		if (got == "") != (c.says == "") || !strings.Contains(got, c.says) {
			t.Errorf("it says %q, want %q", got, c.says)
		}
	}
}
