package vigil

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

const supported = true

// process is a process that is watched. It holds a file until it is closed.
type process struct {
	pid  int32 // as this process sees it; 0 if it cannot, since it is in another namespace
	uid  uint32
	file *os.File
	// closed tells wait why it failed: a raw connection whose file was closed meanwhile
	// says so with an error that is not os.ErrClosed.
	closed atomic.Bool
}

// peerProcess is the process that connected c. Its pidfd comes from the kernel, or
// with a kernel before 6.5 is opened by number. That number may be another's by then:
// who calls must see afterwards that the peer has not gone.
func peerProcess(c *net.UnixConn) (*process, error) { return findPeer(c, peerPidfd) }

// peerProcessByNumber is peerProcess as an older kernel has it.
func peerProcessByNumber(c *net.UnixConn) (*process, error) {
	return findPeer(c, func(int) (int, error) { return -1, unix.ENOPROTOOPT })
}

func peerPidfd(socket int) (int, error) {
	return unix.GetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_PEERPIDFD)
}

func openPid(pid int) (int, error) { return unix.PidfdOpen(pid, 0) }

func findPeer(c *net.UnixConn, pidfd func(socket int) (int, error)) (*process, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("find the peer of a socket: %w", err)
	}
	var p *process
	controlled := raw.Control(func(fd uintptr) {
		var cred *unix.Ucred
		if cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err != nil {
			return
		}
		var peer int
		peer, err = pidfd(int(fd))
		if errors.Is(err, unix.ENOPROTOOPT) {
			if cred.Pid <= 0 {
				err = errors.New("it is in another pid namespace, which needs Linux 6.5")
				return
			}
			peer, err = openPid(int(cred.Pid))
		}
		if err != nil {
			return
		}
		unix.CloseOnExec(peer)
		if err = unix.SetNonblock(peer, true); err != nil { // for Go to poll it
			_ = unix.Close(peer)
			return
		}
		p = &process{pid: cred.Pid, uid: cred.Uid, file: os.NewFile(uintptr(peer), "pidfd")}
	})
	if err = errors.Join(controlled, err); err != nil {
		return nil, fmt.Errorf("find the peer of a socket: %w", err)
	}
	return p, nil
}

// wait returns true when the process has ended, all of its threads; false if the
// process was closed before, or an error says why it cannot be waited for.
func (p *process) wait() (ended bool, err error) {
	raw, err := p.file.SyscallConn()
	if err != nil && p.closed.Load() {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("wait for process %d: %w", p.pid, err)
	}
	err = raw.Read(func(fd uintptr) bool {
		ended = readable(int(fd))
		return ended
	})
	if err != nil && !p.closed.Load() {
		return false, fmt.Errorf("wait for process %d: %w", p.pid, err)
	}
	return ended, nil
}

func readable(fd int) bool {
	for {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		return err == nil && n == 1 && fds[0].Revents&unix.POLLIN != 0
	}
}

// close makes wait return.
func (p *process) close() {
	p.closed.Store(true)
	_ = p.file.Close()
}

// lockDir keeps other daemons from looking at the sockets of a directory, until
// unlock.
func lockDir(dir string) (unlock func(), err error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX)
		if err == nil {
			return func() { _ = f.Close() }, nil
		}
		if !errors.Is(err, unix.EINTR) {
			_ = f.Close()
			return nil, fmt.Errorf("lock %s: %w", dir, err)
		}
	}
}
