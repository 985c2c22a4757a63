package rebalance

import (
	"errors"
	"testing"
)

// A match that took too long once or twice is no reason to give up a filter.
func TestMatchIsRepeated(t *testing.T) {
	slow := errors.New("too slow")
	for failures, want := range map[int]error{0: nil, 1: nil, 2: nil, 3: slow} {
		left := failures
		matched, err := repeated(func(string) (bool, error) {
			if left--; left >= 0 {
				return false, slow
			}
			return true, nil
		})("t")
		if !errors.Is(err, want) || matched != (want == nil) {
			t.Errorf("after %d failures: %v, %v", failures, matched, err)
		}
	}
}
