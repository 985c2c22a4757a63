package rebalance

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/dlclark/regexp2"

	"github.com/muster-io/muster/registry"
)

// ErrFilter refuses a topic filter.
var ErrFilter = errors.New("invalid topic filter")

// matchTimeout bounds what one topic's name costs where the expression needs
// backtracking, which can be made to take years.
const matchTimeout = 100 * time.Millisecond

// A Filter chooses topics by their names, as registrations with a list pattern do:
// a white list allows the topics whose whole name its regular expression matches, a
// black list the others. It is safe for concurrent use.
type Filter struct {
	text            string
	regex           string // that the text stands for
	black           bool
	excludeInternal bool
	matches         func(topic string) (bool, error)
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
	var err error
	if f.matches, err = compileJava(f.regex); err != nil {
		return nil, fmt.Errorf("%w: %s is an invalid regex: %w", ErrFilter, f.regex, err)
	}
	return f, nil
}

// compileJava makes a matcher of whole names. Most expressions need no backtracking,
// and then none is done: their time is bounded by their length, and takes no clock.
func compileJava(regex string) (func(topic string) (bool, error), error) {
	translated, linear, err := javaRegexp(regex)
	if err != nil {
		return nil, err
	}
	translated = `\A(?:` + translated + `)\z`
	if linear {
		// It has bounds of its own, such as 1,000 repetitions.
		if re, err := regexp.Compile(translated); err == nil {
			return func(topic string) (bool, error) { return re.MatchString(topic), nil }, nil
		}
	}
	re, err := regexp2.Compile(translated, regexp2.None)
	if err != nil {
		return nil, err
	}
	// The timeout is kept by a goroutine of the package, which goes away a second after
	// the last match; so no such filter is for tests in virtual time.
	re.MatchTimeout = matchTimeout
	return repeated(re.MatchString), nil
}

// matchAttempts is how often a match is tried that takes too long.
const matchAttempts = 3

// repeated tries a match again that took too long: perhaps it was the process that
// stood still. The filter would subscribe to nothing from then on for this member,
// which would see another group than all others do.
func repeated(match func(topic string) (bool, error)) func(topic string) (bool, error) {
	return func(topic string) (matched bool, err error) {
		for range matchAttempts {
			if matched, err = match(topic); err == nil {
				break
			}
		}
		return matched, err
	}
}

// filterRegex is the regular expression that the text of a filter stands for.
func filterRegex(text string) string {
	text = strings.TrimFunc(text, func(r rune) bool { return r <= ' ' })
	text = strings.ReplaceAll(strings.ReplaceAll(text, ",", "|"), " ", "")
	return strings.Trim(text, `"'`)
}

// Text is the filter as it was given.
func (f *Filter) Text() string { return f.text }

// Allows tells whether the filter chooses the topic. What cannot be the name of a
// topic is not chosen. It fails if the expression takes too long to match.
func (f *Filter) Allows(topic string) (bool, error) {
	if f.excludeInternal && registry.InternalTopic(topic) || registry.ValidateTopicName(topic) != nil {
		return false, nil
	}
	matched, err := f.matches(topic)
	if err != nil {
		return false, fmt.Errorf("filter %s: topic %s: %w", f.regex, topic, err)
	}
	return matched != f.black, nil
}
