package conformance

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// record is one printed record; line is the number of its text.
type record struct {
	partition int
	offset    int64
	line      int
	stint     *stint // under which it was printed
}

// readOutput reads what a consumer printed with --format '%p %o %k %s\n' and
// compares each key and value, byte for byte, with what was produced.
func readOutput(path string, lines []line) ([]record, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var list []record
	for n := 1; len(data) > 0; n++ {
		text, rest, whole := bytes.Cut(data, []byte("\n"))
		data = rest
		r, err := readRecord(text, lines)
		if err == nil && !whole {
			err = fmt.Errorf("%q is not whole", text)
		}
		if err != nil {
			return nil, fmt.Errorf("%s line %d: %w", path, n, err)
		}
		list = append(list, r)
	}
	return list, nil
}

// readRecord reads one line of the output.
func readRecord(text []byte, lines []line) (record, error) {
	parts := bytes.SplitN(text, []byte(" "), 4)
	if len(parts) < 4 || len(parts[3]) < 6 {
		return record{}, fmt.Errorf("it is %q", text)
	}
	partition, err1 := strconv.Atoi(string(parts[0]))
	offset, err2 := strconv.ParseInt(string(parts[1]), 10, 64)
	number, err3 := strconv.Atoi(string(parts[3][:6]))
	if err1 != nil || err2 != nil || err3 != nil || number >= len(lines) {
		return record{}, fmt.Errorf("it is %q", text)
	}
	if want := lines[number]; want.key != string(parts[2]) || want.value != string(parts[3]) {
		return record{}, fmt.Errorf("it is %q, produced was %q %q", text, want.key, want.value)
	}
	return record{partition: partition, offset: offset, line: number}, nil
}

// ends returns, by partition, the offset after the last one printed.
func ends(list []record) map[int]int64 {
	next := map[int]int64{}
	for _, r := range list {
		next[r.partition] = r.offset + 1
	}
	return next
}

// stint is one ownership of a partition, as the registry's history tells it:
// from the claim of its key to the deletion.
type stint struct {
	owner     string // consumer id
	partition int
	lease     int64
	claimed   int64 // revision
	at        time.Time
	from      int64 // committed when it began, or first after; -1: never
	to        int64 // committed last
	ended     int64 // revision, 0 while it lasts
	endedAt   time.Time
	lost      bool // it ended with the owner's session; else it was given up in order

	printed int64 // the offset after the last one printed; from, if none was
}

func (s *stint) String() string {
	return fmt.Sprintf("partition %d of %s: revisions %d to %d, committed %d to %d, printed to %d, lost %v",
		s.partition, s.owner, s.claimed, s.ended, s.from, s.to, s.printed, s.lost)
}

// replay follows the changes of a group and checks the rules of ownership on the
// way: keys are claimed once and name a registered thread under its own lease;
// offsets are committed by an owner only, and never go back.
type replay struct {
	group, topic string
	members      map[string]int64 // id -> lease
	open         map[int]*stint
	committed    map[int]int64
	stints       []*stint
}

func replayGroup(group, topic string, changes []change) ([]*stint, error) {
	r := &replay{group: "/consumers/" + group, topic: topic, members: map[string]int64{}, open: map[int]*stint{}, committed: map[int]int64{}}
	for len(changes) > 0 {
		n := slices.IndexFunc(changes, func(c change) bool { return c.ModRevision != changes[0].ModRevision })
		if n < 0 {
			n = len(changes)
		}
		if err := r.revision(changes[:n]); err != nil {
			return nil, fmt.Errorf("revision %d: %w", changes[0].ModRevision, err)
		}
		changes = changes[n:]
	}
	return r.stints, nil
}

// revision takes the changes of one transaction. The end of a lease deletes the
// registration and the owner keys together, which no orderly stop does.
func (r *replay) revision(changes []change) error {
	gone := map[string]bool{}
	for _, c := range changes {
		if id, ok := strings.CutPrefix(c.key, r.group+"/ids/"); ok {
			if gone[id] = c.deleted; c.deleted {
				delete(r.members, id)
			} else {
				r.members[id] = c.Lease
			}
		}
	}
	for _, c := range changes {
		if name, ok := strings.CutPrefix(c.key, r.group+"/offsets/"+r.topic+"/"); ok {
			if err := r.offset(c, name); err != nil {
				return err
			}
		}
	}
	for _, c := range changes {
		if name, ok := strings.CutPrefix(c.key, r.group+"/owners/"+r.topic+"/"); ok {
			if err := r.owner(c, name, gone); err != nil {
				return err
			}
		}
	}
	return nil
}

func (r *replay) offset(c change, name string) error {
	p, ok := partitionNumber(name)
	offset, err := strconv.ParseInt(string(c.Value), 10, 64)
	switch s := r.open[p]; {
	case !ok || err != nil || c.deleted || c.Lease != 0:
		return fmt.Errorf("%s = %q, deleted %v, lease %x", c.key, c.Value, c.deleted, c.Lease)
	case s == nil:
		return fmt.Errorf("%s = %d committed while nobody owns the partition", c.key, offset)
	case offset < r.committed[p]:
		return fmt.Errorf("%s = %d committed by %s after %d", c.key, offset, s.owner, r.committed[p])
	case s.from < 0:
		s.from, s.to = offset, offset
	default:
		s.to = offset
	}
	r.committed[p] = offset
	return nil
}

func (r *replay) owner(c change, name string, gone map[string]bool) error {
	p, ok := partitionNumber(name)
	if !ok {
		return fmt.Errorf("owner key %s", c.key)
	}
	s := r.open[p]
	if c.deleted {
		if s == nil {
			return fmt.Errorf("%s deleted twice", c.key)
		}
		s.ended, s.endedAt, s.lost = c.ModRevision, c.at, gone[s.owner]
		delete(r.open, p)
		return nil
	}
	id, ok := strings.CutSuffix(string(c.Value), "-0")
	lease, registered := r.members[id]
	if s != nil || c.CreateRevision != c.ModRevision || !ok || !registered || c.Lease != lease {
		return fmt.Errorf("%s = %q under lease %x: held by %v, registered %v under %x, created at %d", c.key, c.Value, c.Lease, s,
			registered, lease, c.CreateRevision)
	}
	s = &stint{owner: id, partition: p, lease: lease, claimed: c.ModRevision, at: c.at, from: -1, to: -1}
	if committed, ok := r.committed[p]; ok {
		s.from, s.to = committed, committed
	}
	r.open[p] = s
	r.stints = append(r.stints, s)
	return nil
}

// explain finds for each printed record the stint under which it was printed.
// Each stint must have printed every offset from where it began, in order and
// without a gap, to what it committed last; and beyond that only if it was lost, or
// lasts.
func explain(owner string, records []record, stints []*stint) error {
	byPartition := map[int][]*record{}
	for i := range records {
		byPartition[records[i].partition] = append(byPartition[records[i].partition], &records[i])
	}
	mine := map[int][]*stint{}
	for _, s := range stints {
		if s.owner == owner {
			mine[s.partition] = append(mine[s.partition], s)
		}
	}
	for p, list := range byPartition {
		if mine[p] == nil {
			return fmt.Errorf("%s printed %d records of partition %d, which it never owned", owner, len(list), p)
		}
	}
	for p, list := range mine {
		if at := match(byPartition[p], list); at != "" {
			return fmt.Errorf("%s, partition %d: what it printed does not follow from what it owned: %s; owned: %v", owner, p, at, list)
		}
	}
	return nil
}

// match lays stints over records; it returns what does not fit, or nothing.
func match(records []*record, stints []*stint) string {
	if len(stints) == 0 {
		if len(records) > 0 {
			return fmt.Sprintf("offset %d printed under no ownership", records[0].offset)
		}
		return ""
	}
	s := stints[0]
	run := 0 // how far the records go on from where the stint began
	for run < len(records) && records[run].offset == s.from+int64(run) {
		run++
	}
	least := int(s.to - s.from)
	if run < least {
		return fmt.Sprintf("%d of the %d offsets from %d to %d printed", run, least, s.from, s.to)
	}
	if !s.lost && s.ended != 0 {
		run = least
	}
	// A lost stint may have printed more than it committed; how much, the next one
	// of the same process decides.
	var why string
	for n := run; n >= least; n-- {
		if why = match(records[n:], stints[1:]); why == "" {
			s.printed = s.from + int64(n)
			for _, r := range records[:n] {
				r.stint = s
			}
			return ""
		}
	}
	return why
}

// repeated counts the printings of each offset beyond the first, and requires that
// each lies in a tail that a lost stint printed and did not commit. It looks only
// at offsets, not at explain's result, but for the tails' limits.
func repeated(outputs map[string][]record, stints []*stint) (int, error) {
	type place struct {
		partition int
		offset    int64
	}
	seen := map[place][]string{}
	for name, list := range outputs {
		for _, r := range list {
			seen[place{r.partition, r.offset}] = append(seen[place{r.partition, r.offset}], name)
		}
	}
	n := 0
	for at, by := range seen {
		if len(by) == 1 {
			continue
		}
		n += len(by) - 1
		tails := 0
		for _, s := range stints {
			if s.lost && s.partition == at.partition && s.to <= at.offset && at.offset < s.printed {
				tails++
			}
		}
		if tails < len(by)-1 {
			return n, fmt.Errorf("partition %d offset %d was printed by %v, and lies in %d uncommitted tails", at.partition, at.offset, by, tails)
		}
	}
	return n, nil
}

// complete requires that all lines were printed, each from one place in the log,
// all of a key from one partition, and in the order in which they were produced.
func complete(outputs map[string][]record, lines []line) error {
	type place struct {
		partition int
		offset    int64
	}
	places := make([]place, len(lines))
	found := make([]bool, len(lines))
	for _, list := range outputs {
		for _, r := range list {
			here := place{r.partition, r.offset}
			if found[r.line] && places[r.line] != here {
				return fmt.Errorf("line %d is in the log twice: at %v and %v", r.line, places[r.line], here)
			}
			places[r.line], found[r.line] = here, true
		}
	}
	next := map[int]int64{}
	of := map[string]int{}
	for n, at := range places {
		if !found[n] {
			return fmt.Errorf("line %d was never printed: %q", n, lines[n].value)
		}
		if at.offset != next[at.partition] {
			return fmt.Errorf("line %d has offset %d in partition %d, want %d: not in the order of production", n, at.offset, at.partition, next[at.partition])
		}
		next[at.partition]++
		if p, ok := of[lines[n].key]; ok && p != at.partition {
			return fmt.Errorf("key %s is in partitions %d and %d", lines[n].key, p, at.partition)
		}
		of[lines[n].key] = at.partition
	}
	return nil
}
