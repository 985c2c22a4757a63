package etcd

import (
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// bootClock runs on while the machine is suspended, as the leases in etcd do.
//
// It is looked at for each record, and reading the clock itself is a system call,
// while Go's own two clocks are read in memory. So it is read anew only when they
// cannot stand for it: every millisecond, and whenever wall time and monotonic time
// have moved apart, as a suspend makes them (and a step of the wall clock).
type bootClock struct{ last atomic.Pointer[clockReading] }

func (c *bootClock) now() time.Duration {
	now := time.Now()
	if r := c.last.Load(); r != nil {
		mono := now.Sub(r.at)
		wall := time.Duration(now.UnixNano() - r.at.UnixNano())
		if mono < maxReadingAge && (wall-mono).Abs() < maxApart {
			return r.boot + mono
		}
	}
	r := &clockReading{at: now, boot: readBootTime()}
	c.last.Store(r)
	return r.boot
}

const (
	maxReadingAge = time.Millisecond
	// maxApart is more than two readings differ by slewing, and less than anybody
	// can suspend a machine for.
	maxApart = 10 * time.Millisecond
)

// clockReading is the clock at one moment of Go's clocks. The moment is before the
// reading, so that what is derived from it is never late by more than the reading took.
type clockReading struct {
	at   time.Time
	boot time.Duration
}

func readBootTime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		// The clock is in every kernel that Go runs on; without it no deadline holds.
		panic("CLOCK_BOOTTIME: " + err.Error())
	}
	return time.Duration(ts.Nano())
}
