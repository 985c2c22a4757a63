package conformance

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// place is a partition.
type place struct {
	topic     string
	partition int
}

func (p place) String() string { return fmt.Sprintf("%s/%d", p.topic, p.partition) }

// stored is a record, by where it stands.
type stored struct {
	place
	offset int64
	value  string
}

// span is what one did under one token.
type span struct {
	by          *actor
	first, last int64 // times, in ns
	from, next  int64 // offsets delivered, without a gap: from this one to before that one; -1: none
}

// observation is what the processes have said so far.
type observation struct {
	read      map[*process]int64 // how far
	spans     map[place]map[int64]*span
	delivered map[stored]bool
	lines     int
	acked     map[*producer]map[stored]bool
}

func newObservation() *observation {
	return &observation{read: map[*process]int64{}, spans: map[place]map[int64]*span{}, delivered: map[stored]bool{}, acked: map[*producer]map[stored]bool{}}
}

// news gives the words of each whole line that a process has written since it was asked last.
func (o *observation) news(p *process, f func(words []string) error) error {
	file, err := os.Open(p.stdout)
	if err != nil {
		return err
	}
	defer file.Close()
	if _, err := file.Seek(o.read[p], io.SeekStart); err != nil {
		return err
	}
	data, err := io.ReadAll(file)
	if err != nil {
		return err
	}
	data = data[:bytes.LastIndexByte(data, '\n')+1]
	o.read[p] += int64(len(data))
	for text := range bytes.Lines(data) {
		if err := f(strings.Fields(string(text))); err != nil {
			return fmt.Errorf("%s printed %q: %w", p.name, text, err)
		}
		o.lines++
	}
	return nil
}

func numbers(words []string) (list []int64, err error) {
	for _, w := range words {
		n, err := strconv.ParseInt(w, 10, 64)
		if err != nil {
			return nil, err
		}
		list = append(list, n)
	}
	return list, nil
}

// member takes what a member says: delivered or working, topic, partition, token, time,
// and of a record offset and value.
func (o *observation) member(a *actor) error {
	return o.news(a.process, func(words []string) error {
		if len(words) == 0 || len(words) != map[string]int{"delivered": 7, "working": 5}[words[0]] {
			return fmt.Errorf("not a line of a member")
		}
		n, err := numbers(words[2:min(6, len(words))])
		if err != nil {
			return err
		}
		where, token, at := place{words[1], int(n[0])}, n[1], n[2]
		if o.spans[where] == nil {
			o.spans[where] = map[int64]*span{}
		}
		s := o.spans[where][token]
		if s == nil {
			s = &span{by: a, first: at, last: at, from: -1, next: -1}
			o.spans[where][token] = s
		}
		if s.by != a {
			return fmt.Errorf("the token was %s's", s.by.id)
		}
		s.first, s.last = min(s.first, at), max(s.last, at)
		if words[0] == "working" {
			return nil
		}
		if s.from < 0 {
			s.from, s.next = n[3], n[3]
		}
		if n[3] != s.next {
			return fmt.Errorf("the next record of this token is that of offset %d", s.next)
		}
		s.next++
		o.delivered[stored{where, n[3], words[6]}] = true
		return nil
	})
}

func (o *observation) producer(p *producer) error {
	if o.acked[p] == nil {
		o.acked[p] = map[stored]bool{}
	}
	return o.news(p.process, func(words []string) error {
		if len(words) != 5 || words[0] != "acknowledged" {
			return fmt.Errorf("not a line of a producer")
		}
		n, err := numbers(words[2:4])
		if err != nil {
			return err
		}
		o.acked[p][stored{place{words[1], int(n[0])}, n[1], words[4]}] = true
		return nil
	})
}

// acknowledged is everything that was told to be stored, and is there still.
func (s *script) acknowledged() map[stored]bool {
	s.t.Helper()
	all := map[stored]bool{}
	for _, p := range s.producers {
		if err := s.seen.producer(p); err != nil {
			s.t.Fatal(err)
		}
		if !p.over {
			maps.Copy(all, s.seen.acked[p])
		}
	}
	return all
}

func (s *script) listen() {
	s.t.Helper()
	for _, a := range s.members {
		if err := s.seen.member(a); err != nil {
			s.t.Fatal(err)
		}
	}
}

// missing says what has not been delivered, if anything.
func (s *script) missing(want map[stored]bool) string {
	s.t.Helper()
	s.listen()
	n := 0
	var one stored
	for r := range want {
		if !s.seen.delivered[r] {
			n, one = n+1, r
		}
	}
	if n == 0 {
		return ""
	}
	return fmt.Sprintf("%d of %d records, such as %v offset %d: %s", n, len(want), one.place, one.offset, one.value)
}

// claim is one ownership as the registry's history tells it.
type claim struct {
	place
	owner   string // consumer id
	lease   int64
	token   int64
	from    int64 // committed when it began; 0 if nothing was
	to      int64 // committed last
	ended   int64 // revision; 0 while it lasts
	endedAt time.Time
	how     ending
}

type ending string

const (
	released     ending = "released"
	sessionEnded ending = "ended with its session"
	leaseRevoked ending = "ended with its lease, which somebody revoked"
	keyDeleted   ending = "ended by somebody who deleted the owner key"
	topicDeleted ending = "ended with its topic"
)

// pulled tells whether somebody took the partition away without a word to its owner,
// who learns of it when others may own already. What it writes under its token is refused.
func (c *claim) pulled() bool { return c.how == leaseRevoked || c.how == keyDeleted }

func (c *claim) String() string {
	return fmt.Sprintf("%v of %s, token %d: committed %d to %d, until %d: %s", c.place, c.owner, c.token, c.from, c.to, c.ended, c.how)
}

// annals follow the changes of the group, and hold them against its rules.
type annals struct {
	harm      harm
	members   map[string]int64 // id -> lease
	open      map[place]*claim
	committed map[place]int64
	deletions map[string]bool // topics that are being deleted
	claims    map[place]map[int64]*claim
}

// harm is what somebody has taken away from under members.
type harm struct {
	touched map[string]bool // owner keys that were deleted
	revoked map[int64]bool  // leases
}

// chronicle reads the history up to now.
func (s *script) chronicle() (*annals, error) { return readAnnals(s.history.all(), s.harm) }

func readAnnals(changes []change, h harm) (*annals, error) {
	a := &annals{harm: h, members: map[string]int64{}, open: map[place]*claim{}, committed: map[place]int64{}, deletions: map[string]bool{},
		claims: map[place]map[int64]*claim{}}
	for len(changes) > 0 {
		n := slices.IndexFunc(changes, func(c change) bool { return c.ModRevision != changes[0].ModRevision })
		if n < 0 {
			n = len(changes)
		}
		if err := a.revision(changes[:n]); err != nil {
			return nil, fmt.Errorf("revision %d: %w", changes[0].ModRevision, err)
		}
		changes = changes[n:]
	}
	return a, nil
}

const groupBase = "/consumers/" + scriptGroup

// under reads the partition that the key of an owner or an offset names.
func under(key, prefix string) (place, bool) {
	rest, ok := strings.CutPrefix(key, groupBase+prefix)
	topic, name, ok2 := strings.Cut(rest, "/")
	n, ok3 := partitionNumber(name)
	return place{topic, n}, ok && ok2 && ok3
}

// entry is what the group's own history says of a revision.
type entry struct{ member, action, reason string }

// revision takes the changes of one transaction.
func (a *annals) revision(changes []change) error {
	before := maps.Clone(a.members)
	gone := map[string]bool{}
	told := map[place]entry{}
	for _, c := range changes {
		if id, ok := strings.CutPrefix(c.key, groupBase+"/ids/"); ok {
			if gone[id] = c.deleted; c.deleted {
				delete(a.members, id)
			} else {
				a.members[id] = c.Lease
			}
		}
		if topic, ok := strings.CutPrefix(c.key, "/admin/delete_topics/"); ok {
			a.deletions[topic] = !c.deleted
		}
		if strings.HasPrefix(c.key, groupBase+"/history/") && !c.deleted {
			var rec struct {
				Member, Action, Reason string
				Partitions             map[string][]string
			}
			if err := json.Unmarshal(c.Value, &rec); err != nil || rec.Reason == "" {
				return fmt.Errorf("%s = %s: %v", c.key, c.Value, err)
			}
			for topic, names := range rec.Partitions {
				for _, name := range names {
					n, _ := partitionNumber(name)
					told[place{topic, n}] = entry{rec.Member, rec.Action, rec.Reason}
				}
			}
		}
	}
	for _, c := range changes {
		if where, ok := under(c.key, "/offsets/"); ok {
			if err := a.offset(c, where); err != nil {
				return err
			}
		}
	}
	for _, c := range changes {
		where, ok := under(c.key, "/owners/")
		if !ok {
			continue
		}
		if !c.deleted {
			if err := a.claimed(c, where, told[where]); err != nil {
				return err
			}
			continue
		}
		o := a.open[where]
		if o == nil {
			return fmt.Errorf("%s was deleted twice", c.key)
		}
		delete(a.open, where)
		o.ended, o.endedAt = c.ModRevision, c.at
		lease, registered := before[o.owner]
		switch {
		case told[where] != entry{}:
			if e := told[where]; e.action != "released" || e.member != o.owner {
				return fmt.Errorf("%v is over, and its history says: %v", o, e)
			}
			o.how = released
		case a.deletions[where.topic]:
			o.how = topicDeleted
		case a.harm.revoked[o.lease] && (gone[o.owner] || !registered || lease != o.lease):
			o.how = leaseRevoked
		case gone[o.owner] || !registered || lease != o.lease:
			o.how = sessionEnded
		case a.harm.touched[c.key]:
			o.how = keyDeleted
		default:
			return fmt.Errorf("%v is over, and nothing says why", o)
		}
	}
	return nil
}

func (a *annals) offset(c change, where place) error {
	if c.deleted {
		delete(a.committed, where)
		return nil
	}
	offset, err := strconv.ParseInt(string(c.Value), 10, 64)
	o := a.open[where]
	switch {
	case err != nil || c.Lease != 0:
		return fmt.Errorf("%s = %q under lease %x", c.key, c.Value, c.Lease)
	case o == nil:
		return fmt.Errorf("%s = %d was committed while nobody owned the partition", c.key, offset)
	case offset < a.committed[where]:
		return fmt.Errorf("%s = %d was committed by %s after %d", c.key, offset, o.owner, a.committed[where])
	}
	a.committed[where], o.to = offset, offset
	return nil
}

func (a *annals) claimed(c change, where place, e entry) error {
	thread := string(c.Value)
	dash := strings.LastIndexByte(thread, '-')
	id := thread[:max(dash, 0)]
	lease, registered := a.members[id]
	switch {
	case a.open[where] != nil || c.CreateRevision != c.ModRevision:
		return fmt.Errorf("%s = %s was written over: %v", c.key, thread, a.open[where])
	case !registered || c.Lease == 0 || lease != c.Lease:
		return fmt.Errorf("%s = %s under lease %x, registered %v under %x", c.key, thread, c.Lease, registered, lease)
	case e.action != "claimed" || e.member != id:
		return fmt.Errorf("%s was claimed by %s, and its history says: %v", c.key, thread, e)
	}
	o := &claim{place: where, owner: id, lease: lease, token: c.ModRevision, from: a.committed[where], to: a.committed[where]}
	a.open[where] = o
	if a.claims[where] == nil {
		a.claims[where] = map[int64]*claim{}
	}
	a.claims[where][o.token] = o
	return nil
}

// judge holds what the members said against what the registry allowed them.
func (s *script) judge() {
	s.t.Helper()
	s.caughtUp(s.history)
	then, err := s.chronicle()
	if err != nil {
		s.t.Fatalf("the history of the registry: %v", err)
	}
	s.listen()
	s.caughtUp(s.history)
	now, err := s.chronicle()
	if err != nil {
		s.t.Fatalf("the history of the registry: %v", err)
	}
	at := time.Now() // once: between two looks the machine may stand
	if apart := at.Round(0).Sub(s.began.Round(0)) - at.Sub(s.began); apart.Abs() > 50*time.Millisecond+at.Sub(s.began)/1000 {
		s.t.Fatalf("the clock of this machine was set while the test ran, by %v: it cannot judge", apart)
	}
	for _, text := range violations(then, now, s.seen.spans) {
		s.t.Error(text)
	}
	if s.t.Failed() {
		s.t.FailNow()
	}
}

// violations says what members did that the registry did not allow them: then is how its
// history was before what they did was read, now how it was afterwards.
func violations(then, now *annals, all map[place]map[int64]*span) (list []string) {
	wrong := func(format string, args ...any) { list = append(list, fmt.Sprintf(format, args...)) }
	for where, spans := range all {
		var last *span
		var lastClaim *claim
		for _, token := range slices.Sorted(maps.Keys(spans)) {
			sp, cl := spans[token], now.claims[where][token]
			if cl == nil || cl.owner != sp.by.id {
				wrong("%s worked on %v under token %d, which is that of: %v", sp.by.id, where, token, cl)
				continue
			}
			if last != nil && sp.first <= last.last {
				wrong("two at once for %v: %v, and from then on %v", time.Duration(last.last-sp.first), lastClaim, cl)
			}
			if cl.pulled() {
				if late := time.Unix(0, sp.last).Sub(cl.endedAt); late > notice {
					wrong("%v went on for %v", cl, late)
				}
			} else if last == nil || sp.last > last.last {
				last, lastClaim = sp, cl
			}
			if sp.from >= 0 && sp.from != cl.from {
				wrong("%v began at offset %d", cl, sp.from)
			}
		}
	}
	// What is committed was said before, so it is in what was read after that.
	for where, claims := range then.claims {
		for token, cl := range claims {
			done := cl.from
			if sp := all[where][token]; sp != nil {
				done = max(done, sp.next)
			}
			if cl.to > done {
				wrong("%v: delivered to %d", cl, done)
			}
		}
	}
	return list
}

// judgeHistory wants every transfer in what muster groups history tells, with a reason.
func (s *script) judgeHistory() {
	s.t.Helper()
	var rows []struct {
		Revision   int64
		Action     string
		Member     string
		Partitions []place
		Reason     *string
	}
	if err := json.Unmarshal(s.tool("groups", "history", scriptGroup, "-o", "json"), &rows); err != nil {
		s.t.Fatalf("groups history: %v", err)
	}
	type transfer struct {
		place
		revision int64
		action   string
		member   string
	}
	told := map[transfer]bool{}
	for _, r := range rows {
		if r.Reason == nil || *r.Reason == "" {
			s.t.Errorf("groups history gives no reason: %+v", r)
		}
		for _, p := range r.Partitions {
			told[transfer{p, r.Revision, r.Action, r.Member}] = true
		}
	}
	a, err := s.chronicle()
	if err != nil {
		s.t.Fatal(err)
	}
	transfers := 0
	for where, claims := range a.claims {
		for _, c := range claims {
			transfers++
			if !told[transfer{where, c.token, "claimed", c.owner}] {
				s.t.Errorf("groups history does not tell of the claim of %v", c)
			}
			if c.how == released && !told[transfer{where, c.ended, "released", c.owner}] {
				s.t.Errorf("groups history does not tell of the release of %v", c)
			}
		}
	}
	if transfers == 0 {
		s.t.Error("nothing was ever owned")
	}
}

// UnmarshalJSON reads a partition of groups history.
func (p *place) UnmarshalJSON(data []byte) error {
	var name struct {
		Topic     string
		Partition int
	}
	err := json.Unmarshal(data, &name)
	*p = place{name.Topic, name.Partition}
	return err
}

// sums is what there was, for people.
func (s *script) sums() string {
	a, err := s.chronicle()
	if err != nil {
		return err.Error()
	}
	n := 0
	how := map[ending]int{}
	for _, claims := range a.claims {
		for _, c := range claims {
			n++
			how[c.how]++
		}
	}
	return fmt.Sprintf("%d members, %d ownerships %v, %d lines, %d records delivered", len(s.members), n, how, s.seen.lines, len(s.seen.delivered))
}

// enrolled is a member as it registered.
type enrolled struct {
	ID           string
	Pattern      string
	Subscription map[string]int
	Strategy     []string
}

// plain has a member say what it means: no strategies stand for one, and a filter for
// all topics that there are.
func (m *enrolled) plain(topics map[string]int) {
	if len(m.Strategy) == 0 {
		m.Strategy = []string{"range-numeric"}
	}
	if m.Pattern != "static" {
		streams := slices.Max(slices.Collect(maps.Values(m.Subscription)))
		m.Subscription = map[string]int{}
		for topic := range topics {
			m.Subscription[topic] = streams
		}
	}
}

// agreed is the strategy of members, which are in the order of their ids.
func agreed(members []enrolled) string {
	all := func(strategy string) bool {
		return !slices.ContainsFunc(members, func(m enrolled) bool { return !slices.Contains(m.Strategy, strategy) })
	}
	if i := slices.IndexFunc(members[0].Strategy, all); i >= 0 {
		return members[0].Strategy[i]
	}
	return "range-numeric"
}

// threads of a topic, sorted as text.
func threads(members []enrolled, topic string) (list []string) {
	for _, m := range members {
		for n := range m.Subscription[topic] {
			list = append(list, fmt.Sprintf("%s-%d", m.ID, n))
		}
	}
	slices.Sort(list)
	return list
}

// ruled divides topics of one home as the documents have it: by range, or in turn in
// the order of the hashes of Java. For sticky, which follows what was before, it says nothing.
func ruled(strategy string, members []enrolled, topics map[string]int) map[place]string {
	due := map[place]string{}
	switch strategy {
	case "range", "range-numeric":
		for topic, n := range topics {
			list := threads(members, topic)
			p := 0
			for i, thread := range list {
				share := n / len(list)
				if i < n%len(list) {
					share++
				}
				for range share {
					due[place{topic, p}] = thread
					p++
				}
			}
		}
	case "roundrobin":
		var all []place
		for topic, n := range topics {
			for p := range n {
				all = append(all, place{topic, p})
			}
		}
		hash := func(p place) (h int32) {
			for _, c := range fmt.Sprintf("[%s,%d]", p.topic, p.partition) {
				h = 31*h + c
			}
			return h
		}
		slices.SortFunc(all, func(a, b place) int {
			return cmp.Or(cmp.Compare(hash(a), hash(b)), cmp.Compare(a.topic, b.topic), cmp.Compare(a.partition, b.partition))
		})
		list := threads(members, mainTopic)
		for i, p := range all {
			due[p] = list[i%len(list)]
		}
	default:
		return nil
	}
	return due
}

// wrong says what is not as the rule has it, if anything.
func wrong(members []enrolled, topics map[string]int, owners map[place]string) string {
	strategy := agreed(members)
	if due := ruled(strategy, members, topics); due != nil {
		if !maps.Equal(due, owners) {
			return fmt.Sprintf("owners by %s are %v, want %v", strategy, owners, due)
		}
		return ""
	}
	counts := map[string]int{}
	for _, thread := range threads(members, mainTopic) {
		counts[thread] = 0
	}
	for topic, n := range topics {
		for p := range n {
			thread := owners[place{topic, p}]
			if _, ok := counts[thread]; !ok {
				return fmt.Sprintf("the owner of %s/%d is %q", topic, p, thread)
			}
			counts[thread]++
		}
	}
	least, most := slices.Min(slices.Collect(maps.Values(counts))), slices.Max(slices.Collect(maps.Values(counts)))
	if most-least > 1 {
		return fmt.Sprintf("not balanced: %v", counts)
	}
	return ""
}

// standing says what is not right about the group in the registry: who is registered,
// and who owns what under which lease.
func standing(tr tree, ids []string, topics map[string]int) string {
	if got := tr.members(scriptGroup); !slices.Equal(got, ids) {
		return fmt.Sprintf("registered are %v, want %v", got, ids)
	}
	var members []enrolled
	for _, id := range ids {
		m := enrolled{ID: id}
		if err := json.Unmarshal(tr[groupBase+"/ids/"+id].Value, &m); err != nil {
			return err.Error()
		}
		m.ID = id
		m.plain(topics)
		members = append(members, m)
	}
	owners := map[place]string{}
	for key, kv := range tr {
		where, ok := under(key, "/owners/")
		if !ok {
			continue
		}
		thread := string(kv.Value)
		owners[where] = thread
		if id := thread[:strings.LastIndexByte(thread, '-')]; kv.Lease != tr[groupBase+"/ids/"+id].Lease {
			return fmt.Sprintf("%s = %s under lease %x", key, thread, kv.Lease)
		}
	}
	return wrong(members, topics, owners)
}

// described says what groups describe tells otherwise, if anything.
func (s *script) described(ids []string) string {
	s.t.Helper()
	var d struct {
		State      string
		Strategy   string
		Members    []enrolled
		Partitions []struct {
			Topic     string
			Partition int
			Owner     *string
			Due       *string
			Token     *int64
		}
	}
	if err := json.Unmarshal(s.tool("groups", "describe", scriptGroup, "-o", "json"), &d); err != nil {
		s.t.Fatalf("groups describe: %v", err)
	}
	for i := range d.Members {
		d.Members[i].plain(s.topics)
	}
	slices.SortFunc(d.Members, func(a, b enrolled) int { return cmp.Compare(a.ID, b.ID) })
	var got []string
	for _, m := range d.Members {
		got = append(got, m.ID)
	}
	owners := map[place]string{}
	for _, r := range d.Partitions {
		if r.Owner != nil {
			owners[place{r.Topic, r.Partition}] = *r.Owner
		}
	}
	if !slices.Equal(got, ids) || d.State != "stable" || d.Strategy != agreed(d.Members) {
		return fmt.Sprintf("groups describe: members %v, state %s, strategy %s; want %v, stable", got, d.State, d.Strategy, ids)
	}
	return wrong(d.Members, s.topics, owners)
}
