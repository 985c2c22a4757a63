package consumer

import (
	"errors"
	"fmt"
	"strings"

	"github.com/muster-io/muster/rebalance"
	"github.com/muster-io/muster/rebalance/membership"
	"github.com/muster-io/muster/registry"
)

// subscription is what is registered. A registration has one regular expression, of
// what to include or of what to exclude, as 0.8 has it.
func (c *Config) subscription() (membership.Subscription, error) {
	if c.Include == "" && c.Exclude == "" {
		return membership.Subscription{Topics: c.Topics}, nil
	}
	if len(c.Topics) > 0 {
		return membership.Subscription{}, errors.New("a consumer has either topics or expressions of what to include and exclude")
	}
	s := membership.Subscription{Pattern: registry.PatternWhiteList, Filter: c.Include, Streams: c.Streams, IncludeInternal: c.IncludeInternal}
	if s.Streams == 0 {
		s.Streams = 1
	}
	// Each on its own first: two halves of an error can look right together.
	for what, text := range map[string]string{"include": c.Include, "exclude": c.Exclude} {
		if text == "" {
			continue
		}
		if _, err := rebalance.ParseFilter(registry.PatternWhiteList, text, false); err != nil {
			return s, fmt.Errorf("%s: %w", what, err)
		}
	}
	switch {
	case c.Include == "":
		s.Pattern, s.Filter = registry.PatternBlackList, c.Exclude
	case c.Exclude != "":
		s.Filter = "(?!(?:" + bare(c.Exclude) + ")$)(?:" + bare(c.Include) + ")"
	}
	return s, nil
}

// bare takes off what a filter may have around it, and may not have inside.
func bare(text string) string { return strings.Trim(strings.TrimSpace(text), `"'`) }
