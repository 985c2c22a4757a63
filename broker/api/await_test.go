package api

import (
	"context"
	"testing"
	"time"
)

func TestAwaitAny(t *testing.T) {
	never := make(chan struct{})
	done := make(chan struct{})
	close(done)
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	for _, n := range []int{1, 2, maxSelect, maxSelect + 1, 3*maxSelect + 5} {
		waitless := make([]<-chan struct{}, n)
		for i := range waitless {
			waitless[i] = never
		}
		last := append(append([]<-chan struct{}(nil), waitless[:n-1]...), done)
		timer := make(chan time.Time, 1)
		timer <- time.Time{}
		for name, test := range map[string]struct {
			got, want woken
		}{
			"the last channel": {awaitAny(context.Background(), nil, never, last), wokenByChannel},
			"the timer":        {awaitAny(context.Background(), timer, never, waitless), wokenByTimer},
			"draining":         {awaitAny(context.Background(), nil, done, waitless), wokenByDraining},
			"the context":      {awaitAny(cancelled, nil, never, waitless), wokenByContext},
		} {
			if test.got != test.want {
				t.Errorf("%d channels, %s: %v, want %v", n, name, test.got, test.want)
			}
		}
	}
}

func TestNextOffsetRefusesWhatIsNoBatch(t *testing.T) {
	batch := make([]byte, batchHeader)
	batch[7], batch[batchLength+3], batch[batchLastDelta+3] = 10, batchHeader-batchPrefix, 4
	two := append(append([]byte(nil), batch...), batch...)
	two[batchHeader+7] = 15
	for name, test := range map[string]struct {
		records []byte
		want    int64
	}{
		"one":        {batch, 15},
		"two":        {two, 20},
		"nothing":    {nil, 0},
		"cut":        {two[:len(two)-1], 0},
		"negative":   {func() []byte { b := append([]byte(nil), batch...); b[batchLength] = 0xff; return b }(), 0},
		"length 0":   {make([]byte, 200), 0},
		"bytes more": {append(append([]byte(nil), batch...), 1, 2), 0},
	} {
		got, err := nextOffset(test.records)
		if (err != nil) != (test.want == 0) || got != test.want {
			t.Errorf("%s: %d, %v", name, got, err)
		}
	}
}
