package inspect

import "strings"

// Changes is what was written or deleted, from the first look on until after the
// second.
type Changes map[string]int64 // key -> revision of its last change

// after tells whether anything of a span changed after a revision. A change past
// the second look counts too: it may hide one before.
func (c Changes) after(revision int64, s span) bool {
	if !s.prefix {
		return c[s.key] > revision
	}
	for key, rev := range c {
		if rev > revision && strings.HasPrefix(key, s.key) {
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
		if f.suspicion && (!before[name{f.Code, f.Key}] || moved(f, changes, first.Revision)) {
			unsettled++
			continue
		}
		confirmed = append(confirmed, f)
	}
	return confirmed, unsettled
}

func moved(f Finding, changes Changes, after int64) bool {
	for _, s := range f.quiet {
		if changes.after(after, s) {
			return true
		}
	}
	return false
}
