//go:build !linux

package storage

import "os"

// syncData makes the contents of a file durable. Where fsync does not reach the
// platter (macOS), Go's Sync asks for the stronger call.
func syncData(f *os.File) error { return f.Sync() }
