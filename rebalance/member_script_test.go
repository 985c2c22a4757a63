package rebalance_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

var rewrite = flag.Bool("rewrite", false, "write what the scripts give into them")

// The scripts of testdata/member say what one member, c, of a group does about its
// topic t. A line that begins with > is an event, or time that passes; what follows
// it is what the member does, in order. Partitions are named by their numbers.
//
//	> registered 5                   at that revision
//	> snapshot 10 registered 5 partitions 2 members c:1 d:2
//	                                 consumer and number of streams; d:1:2 has 2 of a
//	                                 topic u, which is not there; +20 is a crowd
//	... partitions 2 created 8 members ...
//	                                 the revision at which t's record was created
//	> answered 1 at 20 mine 18       to the first claim, an outcome for each partition:
//	                                 mine TOKEN, held TOKEN, held TOKEN/THREAD, other
//	                                 TOKEN (mine, but naming another thread); then
//	                                 perhaps stale, unknown
//	> seen 0 at 21 mine 18           or held 18, or deleted: news of an owner key
//	> released 2                     the release of that number; or: release 2 failed
//	> drained 0 18, fenced 0 18, leaving, lost, tick
//	> at 1s                          the clock, which else stands still but for a
//	                                 second before each snapshot after the first
//	> quick                          the next snapshot comes without that second
func TestMemberScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/member/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal("no scripts", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := playScript(t, string(text))
			if got == string(text) {
				return
			}
			if *rewrite {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			t.Errorf("%s does not hold, got:\n%s", file, got)
		})
	}
}

// playScript runs the events of a script and returns it with what they give.
func playScript(t *testing.T, text string) string {
	var out strings.Builder
	m := rebalance.NewMember("c")
	var now, wake time.Duration
	var proposed rebalance.Propose
	first := true
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		input, isInput := strings.CutPrefix(line, "> ")
		if !isInput {
			if line == "" || line[0] == '#' {
				fmt.Fprintln(&out, line)
			}
			continue
		}
		fmt.Fprintln(&out, line)
		if input == "quick" {
			first = true
			continue
		}
		if at, ok := strings.CutPrefix(input, "at "); ok {
			d, err := time.ParseDuration(at)
			if err != nil || d < now {
				t.Fatalf("%s: %v", line, err)
			}
			now = d
			continue
		}
		e := parseEvent(t, input)
		if s, ok := e.(rebalance.Snapshot); ok && s.Target != nil && s.Target.Assignment == nil {
			written := *proposed.Target
			written.Record = s.Target.Record
			s.Target = &written
			e = s
		}
		if _, ok := e.(rebalance.Snapshot); ok {
			if !first {
				now += time.Second
			}
			first = false
		}
		actions := m.Step(now, e)
		for _, a := range actions {
			if a, ok := a.(rebalance.Propose); ok {
				proposed = a
			}
			fmt.Fprintln(&out, spell(a))
		}
		at, ok := m.Wake()
		switch {
		case !ok && wake != 0:
			fmt.Fprintln(&out, "no pause any more")
		case ok && at != wake:
			fmt.Fprintln(&out, "pause until", at)
		case len(actions) == 0:
			fmt.Fprintln(&out, "nothing")
		}
		wake = at
	}
	return out.String()
}

// words of one event.
type words struct {
	t    *testing.T
	line string
	list []string
}

func (w *words) next() string {
	if len(w.list) == 0 {
		return ""
	}
	word := w.list[0]
	w.list = w.list[1:]
	return word
}

func (w *words) number() int64 {
	w.t.Helper()
	n, err := strconv.ParseInt(w.next(), 10, 64)
	if err != nil {
		w.t.Fatalf("%s: %v", w.line, err)
	}
	return n
}

func (w *words) must(word string) {
	w.t.Helper()
	if got := w.next(); got != word {
		w.t.Fatalf("%s: %q in place of %q", w.line, got, word)
	}
}

// token reads a token, and perhaps the thread that has it.
func (w *words) token() (token int64, thread string) {
	w.t.Helper()
	word, thread, _ := strings.Cut(w.next(), "/")
	token, err := strconv.ParseInt(word, 10, 64)
	if err != nil {
		w.t.Fatalf("%s: %v", w.line, err)
	}
	return token, thread
}

func tp(n int64) registry.Partition { return registry.Partition{Topic: "t", Home: 1, Number: int32(n)} }

func parseEvent(t *testing.T, line string) rebalance.Event {
	t.Helper()
	w := &words{t, line, strings.Fields(line)}
	switch kind := w.next(); kind {
	case "registered":
		return rebalance.Registered{Registration: registry.Registration{Key: "/ids/c", Revision: w.number()}}
	case "lost":
		return rebalance.SessionLost{}
	case "leaving":
		return rebalance.Leaving{}
	case "tick":
		return rebalance.Tick{}
	case "snapshot":
		return parseSnapshot(w)
	case "answered":
		return parseAnswer(w)
	case "proposed":
		e := rebalance.ProposeAnswered{Number: uint64(w.number())}
		switch what := w.next(); what {
		case "at":
			e.Revision = w.number()
		default:
			e.Stale, e.Unknown = what == "stale", what == "unknown"
		}
		return e
	case "release":
		e := rebalance.ReleaseAnswered{Number: uint64(w.number()), Failed: true}
		w.must("failed")
		return e
	case "released":
		return rebalance.ReleaseAnswered{Number: uint64(w.number())}
	case "drained":
		return rebalance.Drained{Partition: tp(w.number()), Token: w.number()}
	case "fenced":
		return rebalance.Fenced{Partition: tp(w.number()), Token: w.number()}
	case "seen":
		e := rebalance.OwnerSeen{Partition: tp(w.number())}
		w.must("at")
		e.Revision = w.number()
		if what := w.next(); what != "deleted" {
			e.Exists, e.Mine = true, what == "mine"
			e.Token, e.Owner = w.token()
		}
		return e
	}
	t.Fatalf("unknown event %s", line)
	return nil
}

func parseSnapshot(w *words) rebalance.Event {
	s := rebalance.Snapshot{Revision: w.number()}
	w.must("registered")
	s.Registered = w.number()
	w.must("partitions")
	n := w.number()
	s.Topology = rebalance.Topology{}
	for i := range n {
		s.Topology["t"] = append(s.Topology["t"], tp(i))
	}
	strategy := "range"
	for {
		switch w.next() {
		case "created":
			s.Incarnations = map[string]int64{"t": w.number()}
		case "strategy":
			strategy = w.next()
		case "target":
			s.TargetRecord = w.number()
			switch w.next() {
			case "written":
				s.Target = &rebalance.Target{Record: s.TargetRecord}
			case "of":
				former := s
				former.Members = parseMembers(w, strategy, strings.Split(w.next(), ","))
				s.Target = rebalance.NextTarget(former)
				s.Target.Record = s.TargetRecord
			}
		case "members":
			s.Members = parseMembers(w, strategy, w.list)
			return s
		default:
			w.t.Fatalf("%s: want members", w.line)
		}
	}
}

func parseMembers(w *words, strategy string, list []string) (members []rebalance.MemberInfo) {
	for _, word := range list {
		m := rebalance.MemberInfo{Subscription: map[string]int32{}, Strategies: []string{strategy}}
		id, streams, _ := strings.Cut(word, ":")
		if crowd, found := strings.CutPrefix(word, "+"); found {
			n, err := strconv.Atoi(crowd)
			if err != nil {
				w.t.Fatalf("%s: %v", w.line, err)
			}
			m.Subscription["t"] = 1
			for i := range n {
				m.ID = fmt.Sprintf("m%02d", i)
				members = append(members, m)
			}
			continue
		}
		t, u, other := strings.Cut(streams, ":")
		n, err := strconv.Atoi(t)
		m.ID, m.Subscription["t"] = id, int32(n)
		if other && err == nil {
			n, err = strconv.Atoi(u)
			m.Subscription["u"] = int32(n)
		}
		if err != nil {
			w.t.Fatalf("%s: %v", w.line, err)
		}
		members = append(members, m)
	}
	return members
}

func parseAnswer(w *words) rebalance.Event {
	e := rebalance.ClaimAnswered{Number: uint64(w.number())}
	w.must("at")
	e.Revision = w.number()
	for what := w.next(); what != ""; what = w.next() {
		switch what {
		case "stale":
			e.Stale = true
		case "unknown":
			e.Unknown = true
		case "mine", "other", "held":
			o := rebalance.ClaimOutcome{Mine: what != "held"}
			o.Token, o.Holder = w.token()
			if what == "other" {
				o.Stream = -1
			}
			e.Outcomes = append(e.Outcomes, o)
		default:
			w.t.Fatalf("%s: unknown outcome %s", w.line, what)
		}
	}
	return e
}

// because spells a reason.
func because(reason string) string {
	if reason == "" {
		return ""
	}
	return " (" + reason + ")"
}

func spell(a rebalance.Action) string {
	switch a := a.(type) {
	case rebalance.Claim:
		text := fmt.Sprintf("claim %d under registration %d and snapshot %d", a.Number, a.Registration.Revision, a.Snapshot)
		if a.Target != 0 {
			text += fmt.Sprintf(" and target %d", a.Target)
		}
		text += ":"
		for _, w := range a.Wants {
			text += fmt.Sprintf(" %d for stream %d,", w.Partition.Number, w.Stream)
		}
		return strings.TrimSuffix(text, ",") + because(a.Reason)
	case rebalance.Propose:
		text := fmt.Sprintf("propose %d in place of %d under registration %d and snapshot %d:", a.Number, a.Replace, a.Registration.Revision, a.Snapshot)
		for p, thread := range a.Target.Assignment.All() {
			text += fmt.Sprintf(" %d to %s,", p.Number, thread)
		}
		return strings.TrimSuffix(text, ",")
	case rebalance.Refused:
		if a.Reason == "" {
			return "not refused any more"
		}
		return "refused" // the words are those of Assign
	case rebalance.Release:
		text := fmt.Sprintf("release %d:", a.Number)
		for _, h := range a.Held {
			text += fmt.Sprintf(" %d under %d,", h.Partition.Number, h.Token)
		}
		return strings.TrimSuffix(text, ",") + because(a.Reason)
	case rebalance.Deliver:
		return fmt.Sprintf("deliver %d to stream %d under %d", a.Partition.Number, a.Stream, a.Token)
	case rebalance.Revoke:
		return fmt.Sprintf("revoke %d under %d", a.Partition.Number, a.Token)
	case rebalance.Lose:
		return fmt.Sprintf("lose %d under %d: %s", a.Partition.Number, a.Token, a.Reason)
	case rebalance.Watch:
		return fmt.Sprintf("watch %d after %d", a.Partition.Number, a.After)
	case rebalance.Unwatch:
		return fmt.Sprintf("unwatch %d", a.Partition.Number)
	case rebalance.Reregister:
		return "register again"
	case rebalance.Rebalanced:
		return fmt.Sprintf("share at %d: %d partitions, %d members, %s", a.Revision, a.Share, a.Members, a.Strategy) + because(a.Reason)
	case rebalance.Left:
		return "left"
	}
	return fmt.Sprintf("%#v", a)
}

// Owned and Settled, for a member in each state of a partition.
func TestOwnedAndSettled(t *testing.T) {
	m := rebalance.NewMember("c")
	var now time.Duration
	for _, step := range []struct {
		event   string
		owned   string
		settled bool
	}{
		{"registered 5", "[]", false},
		{"snapshot 10 registered 5 partitions 1 members c:1", "[]", false},
		{"answered 1 at 20 mine 18", "[t/1-0]", true},
		{"snapshot 30 registered 5 partitions 1 members b:1 c:1", "[t/1-0]", false},
		{"drained 0 18", "[]", false},
		{"released 2", "[]", true},
		{"snapshot 40 registered 5 partitions 1 members c:1", "[]", false},
		{"answered 3 at 41 held 35", "[]", false},
		{"seen 0 at 42 deleted", "[]", false},
		{"answered 4 at 43 mine 43", "[t/1-0]", true},
		{"fenced 0 43", "[]", false},
		{"lost", "[]", false},
	} {
		now += time.Second
		m.Step(now, parseEvent(t, step.event))
		if got := fmt.Sprint(m.Owned()); got != step.owned || m.Settled() != step.settled {
			t.Errorf("after %q: owned %s, settled %v; %s", step.event, got, m.Settled(), m)
		}
	}
}
