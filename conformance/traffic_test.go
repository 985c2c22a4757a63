package conformance

import (
	"fmt"
	"hash/crc32"
	"maps"
	"regexp"
	"strconv"
	"sync"
	"testing"
	"time"
)

// traffic is what producers were told is stored and what consumers printed, as it
// happens, compared record by record: each acknowledgement belongs to one line, since
// a producer sends the lines of a partition in order, and each place in a log holds
// one line.
type traffic struct {
	t     *testing.T
	lines []line
	parts int
	stop  chan struct{}
	work  sync.WaitGroup

	mu        sync.Mutex
	acked     []map[int64]int // partition -> offset -> line
	unplaced  []int           // lines acknowledged without saying where
	printed   []map[int64]int
	outputs   map[string][]record
	repeats   int
	silences  map[string]*silence // of producers and consumers, by name
	producers []string
	complaint error
}

// silence is the longest time without anything, of all and of each partition.
type silence struct {
	last    time.Time
	longest time.Duration
	byPart  []silence
}

func (s *silence) mark(at time.Time) {
	s.longest, s.last = max(s.longest, at.Sub(s.last)), at
}

func newTraffic(t *testing.T, lines []line, parts int) *traffic {
	tr := &traffic{t: t, lines: lines, parts: parts, stop: make(chan struct{}), outputs: map[string][]record{}, silences: map[string]*silence{}}
	for range parts {
		tr.acked, tr.printed = append(tr.acked, map[int64]int{}), append(tr.printed, map[int64]int{})
	}
	return tr
}

// fail keeps the first thing that is wrong; the caller holds mu.
func (tr *traffic) fail(format string, args ...any) {
	if tr.complaint == nil {
		tr.complaint = fmt.Errorf(format, args...)
	}
}

func (tr *traffic) newSilence(name string) *silence {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	s := &silence{last: time.Now(), byPart: make([]silence, tr.parts)}
	for p := range s.byPart {
		s.byPart[p].last = s.last
	}
	tr.silences[name] = s
	return s
}

func (tr *traffic) follow(path string, f func(string, time.Time)) {
	tr.work.Go(func() {
		if err := follow(path, tr.stop, f); err != nil {
			tr.mu.Lock()
			tr.fail("%w", err)
			tr.mu.Unlock()
		}
	})
}

// end stops following once everything written by now has been read.
func (tr *traffic) end() {
	close(tr.stop)
	tr.work.Wait()
}

var deliveredText = regexp.MustCompile(`^% Message delivered to partition (\d+) \(offset (-?\d+)\)`)

// telling makes kcat tell of each acknowledgement. It also makes it look for a broker
// that was away each second; it would leave it alone for up to ten.
var telling = []string{"-v", "-v", "-X", "reconnect.backoff.max.ms=1000"}

// producer follows a kcat that was started with telling and is given these lines, which
// begin with number from. It spreads keys as librdkafka does, by their CRC-32.
func (tr *traffic) producer(name string, p *process, from, to int) {
	silence := tr.newSilence(name)
	tr.producers = append(tr.producers, name)
	queued := make([][]int, tr.parts)
	for n := from; n < to; n++ {
		part := int(crc32.ChecksumIEEE([]byte(tr.lines[n].key)) % uint32(tr.parts))
		queued[part] = append(queued[part], n)
	}
	tr.follow(p.stderr, func(text string, at time.Time) {
		m := deliveredText.FindStringSubmatch(text)
		if m == nil {
			return
		}
		part, err1 := strconv.Atoi(m[1])
		offset, err2 := strconv.ParseInt(m[2], 10, 64)
		tr.mu.Lock()
		defer tr.mu.Unlock()
		if err1 != nil || err2 != nil || part >= tr.parts || len(queued[part]) == 0 {
			tr.fail("%s: %q acknowledges what was not sent", name, text)
			return
		}
		silence.mark(at)
		silence.byPart[part].mark(at)
		n := queued[part][0]
		queued[part] = queued[part][1:]
		if offset < 0 { // one sent again, whose first answer was lost
			tr.unplaced = append(tr.unplaced, n)
			return
		}
		if other, taken := tr.acked[part][offset]; taken {
			tr.fail("%s: partition %d offset %d was acknowledged for line %d, now for %d", name, part, offset, other, n)
		}
		tr.acked[part][offset] = n
	})
}

// consumer follows what a consumer prints.
func (tr *traffic) consumer(name string, p *process) {
	silence := tr.newSilence(name)
	tr.follow(p.stdout, func(text string, at time.Time) {
		r, err := readRecord([]byte(text), tr.lines)
		tr.mu.Lock()
		defer tr.mu.Unlock()
		if err != nil || r.partition >= tr.parts {
			tr.fail("output of %s: %q: %v", name, text, err)
			return
		}
		silence.mark(at)
		silence.byPart[r.partition].mark(at)
		if other, there := tr.printed[r.partition][r.offset]; !there {
			tr.printed[r.partition][r.offset] = r.line
		} else if tr.repeats++; other != r.line {
			tr.fail("%s: partition %d offset %d is line %d, and was printed as line %d before", name, r.partition, r.offset, r.line, other)
		}
		tr.outputs[name] = append(tr.outputs[name], r)
	})
}

// flows tells whether each producer was told since a moment that something is stored,
// in every partition.
func (tr *traffic) flows(since time.Time) bool {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	for _, name := range tr.producers {
		for _, part := range tr.silences[name].byPart {
			if !part.last.After(since) {
				return false
			}
		}
	}
	return true
}

// goals are the acknowledgements so far, by partition.
func (tr *traffic) goals() []map[int64]int {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	var list []map[int64]int
	for _, acked := range tr.acked {
		list = append(list, maps.Clone(acked))
	}
	return list
}

// missing returns how many of the acknowledged records have not been printed; a
// place that was printed with another line fails the test.
func (tr *traffic) missing(goals []map[int64]int) int {
	tr.t.Helper()
	tr.mu.Lock()
	defer tr.mu.Unlock()
	if tr.complaint != nil {
		tr.t.Fatal(tr.complaint)
	}
	n := 0
	for p, acked := range goals {
		for offset, want := range acked {
			if got, ok := tr.printed[p][offset]; !ok {
				n++
			} else if got != want {
				tr.t.Fatalf("partition %d offset %d was acknowledged for line %d and holds line %d", p, offset, want, got)
			}
		}
	}
	return n
}

// unprinted returns how many lines have not been printed.
func (tr *traffic) unprinted(lines []int) int {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	seen := map[int]bool{}
	for _, printed := range tr.printed {
		for _, n := range printed {
			seen[n] = true
		}
	}
	missing := 0
	for _, n := range lines {
		if !seen[n] {
			missing++
		}
	}
	return missing
}

// snapshot copies what each consumer has printed.
func (tr *traffic) snapshot() (outputs map[string][]record, repeats int) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	outputs = map[string][]record{}
	for name, list := range tr.outputs {
		outputs[name] = append([]record(nil), list...)
	}
	return outputs, tr.repeats
}

// rest begins to measure silences anew.
func (tr *traffic) rest() {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	now := time.Now()
	for _, s := range tr.silences {
		s.last, s.longest = now, 0
		for p := range s.byPart {
			s.byPart[p] = silence{last: now}
		}
	}
}

// longest tells the longest silence of a producer or consumer: of all that it does,
// and of one among the partitions asked for. A partition of which there is nothing
// to say since rest is not counted.
func (tr *traffic) longest(name string, parts []int) (all, part time.Duration) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	s := tr.silences[name]
	for _, p := range parts {
		part = max(part, s.byPart[p].longest)
	}
	return s.longest, part
}
