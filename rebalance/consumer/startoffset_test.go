package consumer

import "testing"

// A committed offset stands if the log has it or ends with it; one before the
// log's start or beyond its end gives way to the reset policy.
func TestStartOffset(t *testing.T) {
	const first, last = 40, 100
	for _, c := range []struct {
		committed, smallest, largest int64
		kept                         bool
	}{
		{0, first, last, false},
		{39, first, last, false},
		{40, 40, 40, true},
		{70, 70, 70, true},
		{100, 100, 100, true},
		{101, first, last, false},
	} {
		for r, want := range map[Reset]int64{Smallest: c.smallest, Largest: c.largest} {
			if from, kept := startOffset(c.committed, first, last, r); from != want || kept != c.kept {
				t.Errorf("committed %d, %s: %d %v, want %d %v", c.committed, r, from, kept, want, c.kept)
			}
		}
	}
}
