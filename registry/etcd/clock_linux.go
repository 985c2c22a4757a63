package etcd

import (
	"time"

	"golang.org/x/sys/unix"
)

// bootTime runs on while the machine is suspended, as the leases in etcd do.
func bootTime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		// The clock is in every kernel that Go runs on; without it no deadline holds.
		panic("CLOCK_BOOTTIME: " + err.Error())
	}
	return time.Duration(ts.Nano())
}
