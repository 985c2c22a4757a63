package inspect

import "strings"

// Changes is what was written or deleted between two looks.
type Changes map[string]int64 // key -> revision of its last change

// within tells whether anything of a span changed after one revision, up to another.
func (c Changes) within(s span, after, upTo int64) bool {
	if !s.prefix {
		rev := c[s.key]
		return rev > after && rev <= upTo
	}
	for key, rev := range c {
		if rev > after && rev <= upTo && strings.HasPrefix(key, s.key) {
			return true
		}
	}
	return false
}

// Look is what Check found at a revision.
type Look struct {
	Revision int64
	Findings []Finding
}

// Confirm returns the findings of the second look without the suspicions that
// were not there at the first, or around which something moved in between: those
// are how a registry looks that changes. Their number is returned too.
func Confirm(first, second Look, changes Changes) (confirmed []Finding, unsettled int) {
	type name struct {
		code Code
		key  string
	}
	before := map[name]bool{}
	for _, f := range first.Findings {
		before[name{f.Code, f.Key}] = true
	}
	for _, f := range second.Findings {
		if f.suspicion && (!before[name{f.Code, f.Key}] || moved(f, changes, first.Revision, second.Revision)) {
			unsettled++
			continue
		}
		confirmed = append(confirmed, f)
	}
	return confirmed, unsettled
}

func moved(f Finding, changes Changes, after, upTo int64) bool {
	for _, s := range f.quiet {
		if changes.within(s, after, upTo) {
			return true
		}
	}
	return false
}
