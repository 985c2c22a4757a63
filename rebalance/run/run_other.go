//go:build !linux

package run

import (
	"errors"
	"time"

	"github.com/muster-io/muster/registry"
)

// errPlatform: process groups, subreapers and the clock that runs through suspend
// are there elsewhere only in part.
var errPlatform = errors.New("muster run needs Linux")

// Watchdog is the second process's main function.
func Watchdog(func(registry.LeaseID) error) error { return errPlatform }

type keeper struct {
	reports chan report
	ended   chan struct{}
}

func startKeeper(*Config) (*keeper, error) { return nil, errPlatform }

func (*keeper) send(command) {}
func (*keeper) kill()        {}
func (*keeper) close() error { return nil }

func sweep() error { return errPlatform }

var processStart = time.Now()

func boottime() time.Duration { return time.Since(processStart) }
