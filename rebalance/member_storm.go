package rebalance

import "time"

// A change is acted on at once. When others follow fast, as when many members
// join, the snapshots between are passed over: what is claimed by them is stale
// before it arrives. The share is then computed at most once in a pause, which
// doubles as long as changes come; a calm of several pauses forgets it.
const (
	minStormPause = 5 * time.Millisecond
	stormCalm     = 4 // pauses
)

// longestPause bounds such a pause, and the one after claims that were stale. What
// they save grows with the members that would claim in vain: among a few, nothing
// is worth a delay.
func longestPause(members int) time.Duration {
	const each, most = 500 * time.Microsecond, 200 * time.Millisecond
	if longest := time.Duration(members) * each; longest >= minStormPause {
		return min(longest, most)
	}
	return 0
}

// storm limits how often the share is computed.
type storm struct {
	pause     time.Duration
	longest   time.Duration // that the pause may become
	changedAt time.Duration // the last change
	dividedAt time.Duration // when the share was last computed
	divideAt  time.Duration // when it is to be; 0 is never
}

// change notes a change of a group of so many members, and tells whether it is to
// be acted on at once.
func (s *storm) change(now time.Duration, members int) bool {
	s.longest = longestPause(members)
	if now-s.changedAt >= stormCalm*max(s.pause, minStormPause) {
		s.pause = 0
	}
	s.changedAt = now
	if s.divideAt != 0 {
		return false
	}
	if at := s.dividedAt + s.pause; s.pause != 0 && now < at {
		s.divideAt = at
		return false
	}
	s.dividedAt, s.pause = now, min(max(s.pause/2, minStormPause), s.longest)
	return true
}

// over tells whether the time has come for what was put off.
func (s *storm) over(now time.Duration) bool {
	if s.divideAt == 0 || now < s.divideAt {
		return false
	}
	s.divideAt, s.dividedAt = 0, now
	s.pause = min(2*s.pause, s.longest)
	return true
}
