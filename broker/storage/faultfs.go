package storage

// Op names what is done to a file system, for FaultFS.
type Op string

// The operations of FS and File.
const (
	OpCreate   Op = "create"
	OpOpen     Op = "open"
	OpReadDir  Op = "readdir"
	OpSize     Op = "size"
	OpRename   Op = "rename" // by its new name
	OpRemove   Op = "remove"
	OpMkdir    Op = "mkdir"
	OpSyncDir  Op = "syncdir"
	OpRead     Op = "read"
	OpWrite    Op = "write"
	OpSync     Op = "sync"
	OpTruncate Op = "truncate"
)

// FaultFS asks before every operation whether it shall fail. It is for tests.
type FaultFS struct {
	FS
	// Before may count, block, or return the error that the operation shall have
	// instead of being done. It is called without a lock, by many goroutines.
	Before func(op Op, name string) error
}

// ShortWrite makes a write put down only so many bytes before it fails.
type ShortWrite struct {
	Bytes int
	Err   error
}

func (e *ShortWrite) Error() string { return e.Err.Error() }

func (e *ShortWrite) Unwrap() error { return e.Err }

func (f *FaultFS) wrap(file File, name string, err error) (File, error) {
	if err != nil {
		return nil, err
	}
	return &faultFile{File: file, fs: f, name: name}, nil
}

// Create implements FS.
func (f *FaultFS) Create(name string) (File, error) {
	if err := f.Before(OpCreate, name); err != nil {
		return nil, err
	}
	file, err := f.FS.Create(name)
	return f.wrap(file, name, err)
}

// Open implements FS.
func (f *FaultFS) Open(name string) (File, error) {
	if err := f.Before(OpOpen, name); err != nil {
		return nil, err
	}
	file, err := f.FS.Open(name)
	return f.wrap(file, name, err)
}

// ReadDir implements FS.
func (f *FaultFS) ReadDir(name string) ([]string, error) {
	if err := f.Before(OpReadDir, name); err != nil {
		return nil, err
	}
	return f.FS.ReadDir(name)
}

// Size implements FS.
func (f *FaultFS) Size(name string) (int64, error) {
	if err := f.Before(OpSize, name); err != nil {
		return 0, err
	}
	return f.FS.Size(name)
}

// Rename implements FS.
func (f *FaultFS) Rename(oldName, newName string) error {
	if err := f.Before(OpRename, newName); err != nil {
		return err
	}
	return f.FS.Rename(oldName, newName)
}

// Remove implements FS.
func (f *FaultFS) Remove(name string) error {
	if err := f.Before(OpRemove, name); err != nil {
		return err
	}
	return f.FS.Remove(name)
}

// MkdirAll implements FS.
func (f *FaultFS) MkdirAll(name string) error {
	if err := f.Before(OpMkdir, name); err != nil {
		return err
	}
	return f.FS.MkdirAll(name)
}

// SyncDir implements FS.
func (f *FaultFS) SyncDir(name string) error {
	if err := f.Before(OpSyncDir, name); err != nil {
		return err
	}
	return f.FS.SyncDir(name)
}

type faultFile struct {
	File
	fs   *FaultFS
	name string
}

func (f *faultFile) ReadAt(b []byte, at int64) (int, error) {
	if err := f.fs.Before(OpRead, f.name); err != nil {
		return 0, err
	}
	return f.File.ReadAt(b, at)
}

func (f *faultFile) WriteAt(b []byte, at int64) (int, error) {
	err := f.fs.Before(OpWrite, f.name)
	if short, ok := err.(*ShortWrite); ok {
		n, writeErr := f.File.WriteAt(b[:min(short.Bytes, len(b))], at)
		if writeErr != nil {
			return n, writeErr
		}
		return n, short
	}
	if err != nil {
		return 0, err
	}
	return f.File.WriteAt(b, at)
}

func (f *faultFile) Sync() error {
	if err := f.fs.Before(OpSync, f.name); err != nil {
		return err
	}
	return f.File.Sync()
}

func (f *faultFile) Truncate(size int64) error {
	if err := f.fs.Before(OpTruncate, f.name); err != nil {
		return err
	}
	return f.File.Truncate(size)
}
