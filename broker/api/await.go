package api

import (
	"context"
	"reflect"
	"sync"
	"time"
)

// maxSelect bounds the channels of one reflect.Select, which panics above 65,536
// and is slow long before.
const maxSelect = 1024

// woken says what ended a wait.
type woken int

const (
	wokenByChannel woken = iota
	wokenByTimer
	wokenByDraining
	wokenByContext
)

// fixedCases come before the channels in a select.
const fixedCases = 3

// awaitAny waits until one of the channels is closed, or for one of the other
// reasons. It leaves no goroutine behind, whatever ends the wait: for most fetches
// it starts none.
func awaitAny(ctx context.Context, timer <-chan time.Time, draining <-chan struct{}, channels []<-chan struct{}) woken {
	if len(channels) == 1 {
		select {
		case <-timer:
			return wokenByTimer
		case <-draining:
			return wokenByDraining
		case <-ctx.Done():
			return wokenByContext
		case <-channels[0]:
			return wokenByChannel
		}
	}
	if len(channels) > maxSelect {
		var groups sync.WaitGroup
		stop := make(chan struct{})
		defer groups.Wait()
		defer close(stop)
		channels = gather(channels, stop, &groups)
	}
	cases := make([]reflect.SelectCase, fixedCases, fixedCases+len(channels))
	cases[0] = receive(timer)
	cases[1] = receive(draining)
	cases[2] = receive(ctx.Done())
	for _, c := range channels {
		cases = append(cases, receive(c))
	}
	switch chosen, _, _ := reflect.Select(cases); chosen {
	case 0:
		return wokenByTimer
	case 1:
		return wokenByDraining
	case 2:
		return wokenByContext
	}
	return wokenByChannel
}

// gather makes few channels out of many: one for each group, closed once one of
// the group is, or at stop.
func gather(channels []<-chan struct{}, stop <-chan struct{}, groups *sync.WaitGroup) []<-chan struct{} {
	var gathered []<-chan struct{}
	for len(channels) > 0 {
		group := channels[:min(len(channels), maxSelect)]
		channels = channels[len(group):]
		any := make(chan struct{})
		gathered = append(gathered, any)
		groups.Go(func() {
			defer close(any)
			cases := []reflect.SelectCase{receive(stop)}
			for _, c := range group {
				cases = append(cases, receive(c))
			}
			reflect.Select(cases)
		})
	}
	return gathered
}

func receive[T any](c <-chan T) reflect.SelectCase {
	return reflect.SelectCase{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(c)}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
