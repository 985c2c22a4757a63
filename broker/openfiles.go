package broker

import (
	"errors"
	"math"
	"syscall"

	"github.com/muster-io/muster/broker/wire"
	"github.com/muster-io/muster/vigil"
)

// errOpenFiles: the limit of open files leaves no room for one more log.
var errOpenFiles = errors.New("too many logs for the limit of open files of this process: raise it (ulimit -n, LimitNOFILE of systemd)")

// openFileLimit is how many files this process may have open. The runtime of Go has
// raised it as far as it may be.
func openFileLimit() int {
	var l syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l); err != nil {
		return math.MaxInt32
	}
	return int(min(uint64(l.Cur), math.MaxInt32))
}

// shareOpenFiles divides a limit: one half is for logs, each of which keeps a file
// open, at most a quarter for connections, and an eighth for processes that are
// watched, each of which takes two. The rest is etcd's, which ends the process when it
// cannot open a file.
func shareOpenFiles(limit int) (logs, connections, watched int) {
	return limit / 2, max(1, min(wire.DefaultMaxConnections, limit/4)), max(1, min(vigil.DefaultMaxConnections, limit/16))
}
