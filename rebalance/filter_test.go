package rebalance_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/registry"
)

// refusedByUs are filters of the table that Java 17 takes and we refuse, each for a
// reason that its error gives.
var refusedByUs = map[string]string{
	// Java of the time of 0.8.2 took these for something else, or refused them.
	"[a-c&&]": "&&", "[&&a]": "&&", "[a&&&b]": "&&", "[a-z&&[ab]c]": "&&", "[^a&&b]": "negated class", "[^[a]b]": "negated class",
	`\b{g}a`: "versions of Java differ", `\X`: "unsupported escape", `(?i)\p{Lower}`: "versions of Java differ",
	".*(?<=a*)b": "look-behind", ".*(?<=(?:ab){2})": "look-behind",
	// References that no name can fulfil, or by a way that Java gave up.
	`\1(a)`: "does not end before", `(a\1)`: "does not end before", `(a)\2`: "does not end before", `\141`: "does not end before",
	`(?:abc)\1`: "does not end before", `(?!(a)).\1`: "negative look-ahead", `(a)|b\1`: "alternative", `(?:(a)|b)*\1`: "alternative",
	`(?:(a)|b)+\1`: "alternative", `(a)?b\1`: "repetition", `(a)?\1b`: "repetition", `((a)|(b))+\3`: "alternative",
	`(?<n>a)|\k<n>b`: "alternative", `a(?<n>x)?\k<n>|.b`: "repetition",
	// To Java an empty round ends a repetition before its count is full.
	"(^|a){2}": "conditions", "(?:[^-a-]|^++){2}+": "conditions", `(?:\bab){2}`: "conditions", "(?:b?+a??){2}b": "conditions",
	"(?x)a": "flag x", "(?c)a": "flag c", `(?iu)\u212a`: "flags i and u",
}

// A filter chooses what the same filter chose in a consumer of 0.8.2, or is refused.
func TestFiltersMatchAsInJava(t *testing.T) {
	data, err := os.ReadFile("testdata/filter/java.json")
	if err != nil {
		t.Fatal(err)
	}
	var table struct {
		Names   []string
		Answers []struct {
			Filter  string
			Matches []string
		}
	}
	if err := json.Unmarshal(data, &table); err != nil {
		t.Fatal(err)
	}
	if len(table.Answers) < 300 || len(table.Names) < 40 {
		t.Fatalf("%d filters, %d names", len(table.Answers), len(table.Names))
	}
	for _, row := range table.Answers {
		white, err := rebalance.ParseFilter(registry.PatternWhiteList, row.Filter, false)
		why := refusedByUs[row.Filter]
		if refused := row.Matches == nil || why != ""; refused != (err != nil) {
			t.Errorf("%q: error %v, Java matches %v", row.Filter, err, row.Matches)
		}
		if err != nil {
			if !errors.Is(err, rebalance.ErrFilter) || !strings.Contains(err.Error(), " is an invalid regex: ") || !strings.Contains(err.Error(), why) {
				t.Errorf("%q: error %v, want it to say %q", row.Filter, err, why)
			}
			continue
		}
		black, err := rebalance.ParseFilter(registry.PatternBlackList, row.Filter, false)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range table.Names {
			want := slices.Contains(row.Matches, name)
			if got, err := white.Allows(name); err != nil || got != want {
				t.Errorf("white list %q allows %s: %v, %v; Java says %v", row.Filter, name, got, err, want)
			}
			if got, err := black.Allows(name); err != nil || got == want {
				t.Errorf("black list %q allows %s: %v, %v; Java matches it: %v", row.Filter, name, got, err, want)
			}
		}
	}
}

func filter(t *testing.T, pattern, text string, excludeInternal bool) *rebalance.Filter {
	t.Helper()
	f, err := rebalance.ParseFilter(pattern, text, excludeInternal)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func allowed(t *testing.T, f *rebalance.Filter, topics ...string) (list []string) {
	t.Helper()
	for _, topic := range topics {
		yes, err := f.Allows(topic)
		if err != nil {
			t.Fatal(err)
		}
		if yes {
			list = append(list, topic)
		}
	}
	return list
}

func TestCase04FilterMatchesWholeNames(t *testing.T) {
	topics := []string{"DATA.BAD", "DATA.BADDD", "DATAxBA", "DATA.BAD.AAA", "MYDATA.BAD", "orders", "payments", "orders2", "__consumer_offsets"}
	for _, c := range []struct {
		pattern, text string
		want          []string
	}{
		{registry.PatternWhiteList, "DATA.BAD*", topics[:3]},
		{registry.PatternWhiteList, "orders,payments", topics[5:7]},
		{registry.PatternWhiteList, ".*", topics[:8]},
		{registry.PatternBlackList, "orders.*", []string{"DATA.BAD", "DATA.BADDD", "DATAxBA", "DATA.BAD.AAA", "MYDATA.BAD", "payments"}},
	} {
		if got := allowed(t, filter(t, c.pattern, c.text, true), topics...); !slices.Equal(got, c.want) {
			t.Errorf("%s %s allows %v, want %v", c.pattern, c.text, got, c.want)
		}
	}
	if _, err := rebalance.ParseFilter(registry.PatternWhiteList, "ord[", true); !errors.Is(err, rebalance.ErrFilter) || !strings.Contains(err.Error(), "ord[ is an invalid regex") {
		t.Errorf("ord[ is taken: %v", err)
	}
}

// The vectors of 0.8.2's own tests; internal topics are left out of both lists.
func TestInternalTopicsAreExcludedByEitherList(t *testing.T) {
	topics := []string{"white1", "white2", "black1", "__consumer_offsets", "__transaction_state", "__other"}
	for _, c := range []struct {
		pattern, text string
		exclude       bool
		want          []string
	}{
		{registry.PatternWhiteList, "white1,white2", true, topics[:2]},
		{registry.PatternWhiteList, ".+", true, []string{"white1", "white2", "black1", "__other"}},
		{registry.PatternWhiteList, ".+", false, topics},
		{registry.PatternWhiteList, "white_consumer-offset|__.*", true, []string{"__other"}},
		{registry.PatternBlackList, "black1", true, []string{"white1", "white2", "__other"}},
		{registry.PatternBlackList, "black1", false, []string{"white1", "white2", "__consumer_offsets", "__transaction_state", "__other"}},
	} {
		if got := allowed(t, filter(t, c.pattern, c.text, c.exclude), topics...); !slices.Equal(got, c.want) {
			t.Errorf("%s %s, exclude %v, allows %v, want %v", c.pattern, c.text, c.exclude, got, c.want)
		}
	}
}

// What is no topic's name is no topic: a black list does not choose it either.
func TestFiltersChooseNoInvalidNames(t *testing.T) {
	for _, f := range []*rebalance.Filter{filter(t, registry.PatternWhiteList, "(?s).*", false), filter(t, registry.PatternBlackList, "x", false)} {
		if got := allowed(t, f, "", ".", "a b", "grün", "a\nb", strings.Repeat("a", 250), "a"); !slices.Equal(got, []string{"a"}) {
			t.Errorf("%s allows %q", f.Text(), got)
		}
	}
}

// A filter stands in a registration as it was given, through JSON and back, whether
// the writer escapes the slash or not.
func TestFilterTextIsKeptByARegistration(t *testing.T) {
	for _, text := range []string{`a/b`, `\d+`, `debug_.*|"x/y`, "tab\there", "\u0085\u007f", ` " orders , payments " `} {
		value, err := registry.Encode(registry.ConsumerRecord{Version: 1, Subscription: map[string]int32{text: 1}, Pattern: registry.PatternWhiteList})
		if err != nil {
			t.Fatal(err)
		}
		for _, value := range []string{string(value), strings.ReplaceAll(string(value), "/", `\/`)} {
			rec, err := registry.ParseConsumer(registry.KV{Key: "/consumers/g/ids/c", Value: []byte(value)})
			if err != nil || rec.Subscription[text] != 1 {
				t.Errorf("%q is read back from %s as %v, %v", text, value, rec.Subscription, err)
			}
		}
		f, err := rebalance.ParseFilter(registry.PatternWhiteList, text, true)
		if err == nil && f.Text() != text {
			t.Errorf("filter %q has the text %q", text, f.Text())
		}
	}
}

// An expression that backtracks for years fails in time, and one that needs no
// backtracking is answered however it is written.
func TestFilterThatBacktracksWithoutEnd(t *testing.T) {
	name := strings.Repeat("a", registry.MaxTopicName)
	f := filter(t, registry.PatternWhiteList, `(?=x?)(a+)+b`, true)
	began := time.Now()
	_, err := f.Allows(name)
	took := time.Since(began)
	if err == nil || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "(a+)+b") {
		t.Errorf("error %v", err)
	}
	if took > 30*time.Second { // three attempts take less than a second, but for a machine that stands still
		t.Errorf("took %v", took)
	}
	for _, text := range []string{"(a+)+b", "(a|aa)*b", "(a*)*(a*)*b", "(.*)(.*)(.*)(.*)x", "(?:a?){200}b"} {
		if yes, err := filter(t, registry.PatternWhiteList, text, true).Allows(name); yes || err != nil {
			t.Errorf("%s: %v, %v", text, yes, err)
		}
	}
}

func TestFilterRefusesOtherPatterns(t *testing.T) {
	for _, pattern := range []string{registry.PatternStatic, "", "wildcard"} {
		if _, err := rebalance.ParseFilter(pattern, "a", true); !errors.Is(err, rebalance.ErrFilter) {
			t.Errorf("pattern %q: error %v", pattern, err)
		}
	}
}

// What a stranger registers costs a member neither its stack nor its memory.
func TestHugeFiltersAreRefused(t *testing.T) {
	for _, text := range []string{
		strings.Repeat("(", 9000), strings.Repeat("(", 9000) + "a" + strings.Repeat(")", 900), strings.Repeat("[a", 4000),
		strings.Repeat("(?:", 300) + strings.Repeat(")", 300), strings.Repeat("[", 300) + "a" + strings.Repeat("]", 300), strings.Repeat("a", 1<<20),
	} {
		if _, err := rebalance.ParseFilter(registry.PatternWhiteList, text, true); !errors.Is(err, rebalance.ErrFilter) {
			t.Errorf("%.20s… (%d bytes): error %v", text, len(text), err)
		}
	}
}

// Whatever text it is, a filter is refused or it answers.
func FuzzFilter(f *testing.F) {
	for _, text := range []string{`a(b|c)*\1[^d-e&&[f]]{2}+`, `(?<=a(?i:b))\Qx\E\p{L}`, `\x{61}\u0062\0143`, `(?<n>a)\k<n>`, "[", "(?", `\`} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		filter, err := rebalance.ParseFilter(registry.PatternWhiteList, text, true)
		if err != nil {
			if !errors.Is(err, rebalance.ErrFilter) {
				t.Fatal(err)
			}
			return
		}
		_, _ = filter.Allows("orders") // it may take too long
	})
}

// Internal topics are left out unless the registration says otherwise.
func TestRegistrationsExcludeInternalTopics(t *testing.T) {
	const form = `{"version":1,"subscription":{".*":1},"pattern":"white_list"%s}`
	for field, want := range map[string]bool{"": true, `,"exclude_internal_topics":true`: true, `,"exclude_internal_topics":false`: false} {
		rec, err := registry.ParseConsumer(registry.KV{Key: "/consumers/g/ids/c", Value: fmt.Appendf(nil, form, field)})
		if err != nil || rec.ExcludesInternal() != want {
			t.Errorf("with %q: %v, error %v", field, rec.ExcludesInternal(), err)
		}
	}
}
