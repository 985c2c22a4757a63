package rebalance

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/dlclark/regexp2"

	"github.com/muster-io/muster/registry"
)

// ErrFilter refuses a topic filter.
var ErrFilter = errors.New("invalid topic filter")

// matchTimeout bounds what one topic's name costs: a pattern can be written so that
// it backtracks for years.
const matchTimeout = 100 * time.Millisecond

// A Filter chooses topics by their names, as registrations with a list pattern do:
// a white list allows the topics that its regular expression matches as a whole, a
// black list the others. It is safe for concurrent use.
type Filter struct {
	text            string
	regex           string // what was compiled
	black           bool
	excludeInternal bool
	match           *regexp2.Regexp
}

// ParseFilter reads the filter of a registration, whose pattern is
// registry.PatternWhiteList or PatternBlackList, and text its regular expression in
// the syntax of Java. A comma means "or"; blanks, and quotes at both ends, mean
// nothing. With excludeInternal it allows no internal topic (registry.InternalTopic),
// whatever the expression says. The error is ErrFilter.
func ParseFilter(pattern, text string, excludeInternal bool) (*Filter, error) {
	f := &Filter{text: text, regex: filterRegex(text), black: pattern == registry.PatternBlackList, excludeInternal: excludeInternal}
	if !f.black && pattern != registry.PatternWhiteList {
		return nil, fmt.Errorf("%w: pattern is %q, want %s or %s", ErrFilter, pattern, registry.PatternWhiteList, registry.PatternBlackList)
	}
	match, err := regexp2.Compile(`\A(?:`+f.regex+`)\z`, regexp2.None)
	if err != nil {
		return nil, fmt.Errorf("%w: %s is an invalid regex: %w", ErrFilter, f.regex, err)
	}
	match.MatchTimeout = matchTimeout
	f.match = match
	return f, nil
}

// filterRegex is the regular expression that the text of a filter stands for.
func filterRegex(text string) string {
	text = strings.TrimFunc(text, func(r rune) bool { return r <= ' ' })
	text = strings.ReplaceAll(strings.ReplaceAll(text, ",", "|"), " ", "")
	return strings.Trim(text, `"'`)
}

// Text is the filter as it was given.
func (f *Filter) Text() string { return f.text }

// Allows tells whether the filter chooses the topic. It fails if that takes too long
// to find out.
func (f *Filter) Allows(topic string) (bool, error) {
	if f.excludeInternal && registry.InternalTopic(topic) {
		return false, nil
	}
	matched, err := f.match.MatchString(topic)
	if err != nil {
		return false, fmt.Errorf("filter %s on topic %s: %w", f.regex, topic, err)
	}
	return matched != f.black, nil
}
