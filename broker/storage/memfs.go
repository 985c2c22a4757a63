package storage

import (
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
)

// MemFS is a file system in memory that knows what a crash would leave of it. It
// keeps, beside the present contents of each file and directory, those of the last
// Sync and SyncDir. It is for tests.
type MemFS struct {
	mu   sync.Mutex
	dirs map[string]*memDir
}

// memDir holds the names in a directory. Directories themselves are durable once
// made, as MkdirAll promises.
type memDir struct {
	now, synced map[string]*memNode
}

type memNode struct {
	now, synced []byte
	dirtyFrom   int // what lies before is the same in both
}

// NewMemFS returns an empty file system.
func NewMemFS() *MemFS { return &MemFS{dirs: map[string]*memDir{}} }

func (m *MemFS) node(op, name string) (*memDir, *memNode, string, error) {
	dir, base := filepath.Split(filepath.Clean(name))
	d := m.dirs[filepath.Clean(dir)]
	if d == nil || d.now[base] == nil {
		return d, nil, base, &fs.PathError{Op: op, Path: name, Err: fs.ErrNotExist}
	}
	return d, d.now[base], base, nil
}

// Create implements FS.
func (m *MemFS) Create(name string) (File, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d, n, base, err := m.node("create", name)
	if d == nil {
		return nil, err
	}
	if n == nil {
		n = &memNode{}
		d.now[base] = n
	}
	n.truncate(0)
	return &memFile{fs: m, node: n, name: name}, nil
}

// Open implements FS.
func (m *MemFS) Open(name string) (File, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, n, _, err := m.node("open", name)
	if err != nil {
		return nil, err
	}
	return &memFile{fs: m, node: n, name: name}, nil
}

// ReadDir implements FS.
func (m *MemFS) ReadDir(name string) ([]string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d := m.dirs[filepath.Clean(name)]
	if d == nil {
		return nil, &fs.PathError{Op: "readdir", Path: name, Err: fs.ErrNotExist}
	}
	return slices.Sorted(maps.Keys(d.now)), nil
}

// Size implements FS.
func (m *MemFS) Size(name string) (int64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, n, _, err := m.node("stat", name)
	if err != nil {
		return 0, err
	}
	return int64(len(n.now)), nil
}

// Rename implements FS. Both names must be in one directory.
func (m *MemFS) Rename(oldName, newName string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	d, n, base, err := m.node("rename", oldName)
	if err != nil {
		return err
	}
	if filepath.Dir(oldName) != filepath.Dir(newName) {
		return &fs.PathError{Op: "rename", Path: newName, Err: fs.ErrInvalid}
	}
	delete(d.now, base)
	d.now[filepath.Base(newName)] = n
	return nil
}

// Remove implements FS.
func (m *MemFS) Remove(name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	d, _, base, err := m.node("remove", name)
	if err != nil {
		return err
	}
	delete(d.now, base)
	return nil
}

// MkdirAll implements FS.
func (m *MemFS) MkdirAll(name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for name = filepath.Clean(name); m.dirs[name] == nil; name = filepath.Dir(name) {
		m.dirs[name] = &memDir{now: map[string]*memNode{}, synced: map[string]*memNode{}}
	}
	return nil
}

// SyncDir implements FS.
func (m *MemFS) SyncDir(name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	d := m.dirs[filepath.Clean(name)]
	if d == nil {
		return &fs.PathError{Op: "sync", Path: name, Err: fs.ErrNotExist}
	}
	d.synced = maps.Clone(d.now)
	return nil
}

// CrashClone returns what a machine that lost its power now might find: all that
// was synced, and a part of the rest that the seed chooses. Names come and go one by
// one, so a file that was renamed may be there under either name, both, or
// none; sectors of a file are written or not, in any order; its end is anywhere.
func (m *MemFS) CrashClone(seed uint64) *MemFS {
	m.mu.Lock()
	defer m.mu.Unlock()
	rng := rand.New(rand.NewPCG(seed, 0))
	clones := map[*memNode]*memNode{}
	after := NewMemFS()
	for _, dir := range slices.Sorted(maps.Keys(m.dirs)) {
		d := m.dirs[dir]
		names := maps.Clone(d.synced)
		maps.Copy(names, d.now)
		kept := map[string]*memNode{}
		for _, name := range slices.Sorted(maps.Keys(names)) {
			n := d.now[name]
			if n != d.synced[name] && rng.IntN(2) == 0 {
				n = d.synced[name]
			}
			if n == nil {
				continue
			}
			if clones[n] == nil {
				left := n.crash(rng)
				clones[n] = &memNode{now: left, synced: slices.Clone(left), dirtyFrom: len(left)}
			}
			kept[name] = clones[n]
		}
		after.dirs[dir] = &memDir{now: kept, synced: maps.Clone(kept)}
	}
	return after
}

const sectorSize = 512 // what a disk writes as a whole

// crash returns what is left of a file.
func (n *memNode) crash(rng *rand.Rand) []byte {
	switch rng.IntN(4) {
	case 0:
		return slices.Clone(n.synced)
	case 1:
		return slices.Clone(n.now)
	}
	shorter, longer := min(len(n.now), len(n.synced)), max(len(n.now), len(n.synced))
	left := make([]byte, shorter+rng.IntN(longer-shorter+1))
	for at := 0; at < len(left); at += sectorSize {
		from := n.synced
		if rng.IntN(2) == 0 {
			from = n.now
		}
		if at < len(from) {
			copy(left[at:min(at+sectorSize, len(left))], from[at:])
		}
	}
	return left
}

func (n *memNode) truncate(size int) {
	if size <= len(n.now) {
		n.now = n.now[:size]
	} else {
		n.now = append(n.now, make([]byte, size-len(n.now))...)
	}
	n.dirtyFrom = min(n.dirtyFrom, size)
}

type memFile struct {
	fs     *MemFS
	node   *memNode
	name   string
	closed bool
}

// enter locks the file system; the caller unlocks it.
func (f *memFile) enter(op string) error {
	f.fs.mu.Lock()
	if f.closed {
		return &fs.PathError{Op: op, Path: f.name, Err: fs.ErrClosed}
	}
	return nil
}

func (f *memFile) ReadAt(b []byte, at int64) (int, error) {
	defer f.fs.mu.Unlock()
	if err := f.enter("read"); err != nil {
		return 0, err
	}
	if at >= int64(len(f.node.now)) {
		return 0, io.EOF
	}
	n := copy(b, f.node.now[at:])
	if n < len(b) {
		return n, io.EOF
	}
	return n, nil
}

func (f *memFile) WriteAt(b []byte, at int64) (int, error) {
	defer f.fs.mu.Unlock()
	if err := f.enter("write"); err != nil {
		return 0, err
	}
	if at > int64(len(f.node.now)) {
		return 0, fmt.Errorf("write %s at %d: the file has %d bytes, a hole is not expected", f.name, at, len(f.node.now))
	}
	n := f.node
	n.dirtyFrom = min(n.dirtyFrom, int(at))
	covered := copy(n.now[at:], b)
	n.now = append(n.now, b[covered:]...)
	return len(b), nil
}

func (f *memFile) Sync() error {
	defer f.fs.mu.Unlock()
	if err := f.enter("sync"); err != nil {
		return err
	}
	n := f.node
	n.synced = append(n.synced[:n.dirtyFrom], n.now[n.dirtyFrom:]...)
	n.dirtyFrom = len(n.now)
	return nil
}

func (f *memFile) Truncate(size int64) error {
	defer f.fs.mu.Unlock()
	if err := f.enter("truncate"); err != nil {
		return err
	}
	f.node.truncate(int(size))
	return nil
}

func (f *memFile) Size() (int64, error) {
	defer f.fs.mu.Unlock()
	if err := f.enter("stat"); err != nil {
		return 0, err
	}
	return int64(len(f.node.now)), nil
}

func (f *memFile) Close() error {
	defer f.fs.mu.Unlock()
	if err := f.enter("close"); err != nil {
		return err
	}
	f.closed = true
	return nil
}
