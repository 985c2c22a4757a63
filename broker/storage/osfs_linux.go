package storage

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// syncData makes the contents of a file durable. fdatasync also keeps the
// length, which is all of the metadata that the log needs; fsync would write the
// time of modification on top.
func syncData(f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var syncErr error
	err = raw.Control(func(fd uintptr) {
		for {
			syncErr = unix.Fdatasync(int(fd))
			if syncErr != unix.EINTR {
				return
			}
		}
	})
	if err = errors.Join(err, syncErr); err != nil {
		return &os.PathError{Op: "fdatasync", Path: f.Name(), Err: err}
	}
	return nil
}
