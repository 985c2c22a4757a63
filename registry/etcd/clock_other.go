//go:build !linux

package etcd

import "time"

// bootTime is wall time where no clock is known to run through suspend. It can
// step; a step forward ends sessions early, one backward is as long as it is.
func bootTime() time.Duration { return time.Duration(time.Now().UnixNano()) }
