//go:build !linux

package etcd

import "time"

// bootClock is wall time where no clock is known to run through suspend. It can
// step; a step forward ends sessions early, one backward is as long as it is.
type bootClock struct{}

func (*bootClock) now() time.Duration { return time.Duration(time.Now().UnixNano()) }
