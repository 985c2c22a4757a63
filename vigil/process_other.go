//go:build !linux

package vigil

import (
	"errors"
	"net"
)

const supported = false

type process struct {
	pid int32
	uid uint32
}

func peerProcess(*net.UnixConn) (*process, error) { return nil, errors.ErrUnsupported }

func (p *process) wait() (bool, error) { return false, errors.ErrUnsupported }

func (p *process) close() {}

func lockDir(string) (func(), error) { return nil, errors.ErrUnsupported }
