package storage

import (
	"io"
	"io/fs"
)

// FS is the part of a file system that the log needs. Names are paths with
// slashes of the system. A missing file is reported as an error that is
// fs.ErrNotExist.
//
// The contract on durability is that of POSIX at its strictest: File.Sync keeps
// the contents of a file, SyncDir keeps the names in a directory, and neither
// does the work of the other.
type FS interface {
	// Create makes the file, or empties the one that is there.
	Create(name string) (File, error)
	// Open opens an existing file for reading and writing.
	Open(name string) (File, error)
	// ReadDir returns the names in a directory, sorted.
	ReadDir(name string) ([]string, error)
	// Size returns the length of a file.
	Size(name string) (int64, error)
	// Rename replaces newName if it is there.
	Rename(oldName, newName string) error
	Remove(name string) error
	// MkdirAll makes a directory and its missing parents, and keeps them: the
	// directories that received a new name are synced.
	MkdirAll(name string) error
	SyncDir(name string) error
}

// File is an open file. ReadAt and WriteAt may run at the same time.
type File interface {
	io.ReaderAt
	io.WriterAt
	Sync() error
	Truncate(size int64) error
	Size() (int64, error)
	Close() error
}

// ErrNotExist is what FS reports for a missing file.
var ErrNotExist = fs.ErrNotExist
