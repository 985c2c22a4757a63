package broker

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/muster-io/muster/registry"
)

// dataDir is the daemon's directory, held under a lock as long as the daemon
// lives. Its identity file remembers whose it is and which lease the daemon last
// registered under: whoever holds the lock is the only one who may revoke it.
//
//	lock          flock
//	muster.json   identity
//	etcd/         the embedded server
//	logs/         a directory for each partition; see logDirs, also for
//	stray/        logs of no topic in the registry
//	deleting/     logs of deleted topics
type dataDir struct {
	path string
	lock *os.File
	id   identity
	// fresh until the first daemon has come up here. A start that is refused must not
	// make the directory its own: the next one may be told to take another broker id.
	fresh bool
}

// identity is the content of muster.json.
type identity struct {
	Version   int    `json:"version"`
	BrokerID  int32  `json:"broker_id"`
	ClusterID string `json:"cluster_id,omitempty"`
	Lease     string `json:"lease,omitempty"` // hexadecimal
}

// dataVersion is the newest layout of the directory that this program knows.
const dataVersion = 1

func openDataDir(path string, brokerID int32) (*dataDir, error) {
	if err := os.MkdirAll(path, 0o750); err != nil {
		return nil, fmt.Errorf("data directory %s cannot be made: %w: choose another --data-dir", path, cause(err))
	}
	lock, err := os.OpenFile(filepath.Join(path, "lock"), os.O_RDWR|os.O_CREATE, 0o640)
	if err != nil {
		return nil, fmt.Errorf("data directory %s cannot be written: %w: choose another --data-dir", path, cause(err))
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		lock.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("data directory %s is in use by another daemon: stop it, or choose another --data-dir", path)
		}
		return nil, fmt.Errorf("lock data directory %s: %w", path, err)
	}
	d := &dataDir{path: path, lock: lock, id: identity{Version: dataVersion, BrokerID: brokerID}}
	if err := d.load(brokerID); err != nil {
		lock.Close()
		return nil, err
	}
	return d, nil
}

// cause strips what an *os.PathError repeats.
func cause(err error) error {
	if pathErr, ok := errors.AsType[*os.PathError](err); ok {
		return pathErr.Err
	}
	return err
}

func (d *dataDir) file() string { return filepath.Join(d.path, "muster.json") }

func (d *dataDir) load(brokerID int32) error {
	data, err := os.ReadFile(d.file())
	if errors.Is(err, os.ErrNotExist) {
		d.fresh = true
		return d.save()
	}
	if err != nil {
		return fmt.Errorf("read data directory: %w", err)
	}
	var id identity
	if err := json.Unmarshal(data, &id); err != nil {
		return fmt.Errorf("%s cannot be read: %w", d.file(), err)
	}
	if id.Version > dataVersion {
		return fmt.Errorf("data directory %s has version %d and this program knows up to %d: use a newer one", d.path, id.Version, dataVersion)
	}
	if id.BrokerID != brokerID {
		return fmt.Errorf("data directory %s belongs to broker %d: start with --broker-id %d, or choose another --data-dir", d.path, id.BrokerID, id.BrokerID)
	}
	d.id = id
	return nil
}

// save writes the identity so that a crash leaves the old one or the new one.
func (d *dataDir) save() error {
	data, err := json.Marshal(d.id)
	if err != nil {
		return fmt.Errorf("save data directory: %w", err)
	}
	part := d.file() + ".part"
	if err := writeSynced(part, append(data, '\n')); err != nil {
		return fmt.Errorf("save data directory: %w", err)
	}
	if err := os.Rename(part, d.file()); err != nil {
		return fmt.Errorf("save data directory: %w", err)
	}
	return syncDir(d.path)
}

func writeSynced(path string, data []byte) (err error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o640)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if _, err := f.Write(data); err != nil {
		return err
	}
	return f.Sync()
}

func syncDir(path string) (err error) {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	return f.Sync()
}

// setCluster remembers the cluster that the data belongs to, and refuses another.
func (d *dataDir) setCluster(id string) error {
	switch d.id.ClusterID {
	case id:
		return nil
	case "":
		d.id.ClusterID = id
		return d.save()
	}
	return fmt.Errorf("data directory %s belongs to cluster %s, the registry is that of cluster %s: choose another --data-dir, or the right etcd",
		d.path, d.id.ClusterID, id)
}

// formerLease is the lease of the last run, 0 if there is none.
func (d *dataDir) formerLease() registry.LeaseID {
	n, err := strconv.ParseUint(d.id.Lease, 16, 64)
	if err != nil {
		return 0
	}
	return registry.LeaseID(n)
}

// setLease remembers a lease before anything is registered under it.
func (d *dataDir) setLease(id registry.LeaseID) error {
	d.id.Lease = strings.TrimPrefix(registry.LeaseText(id), "-")
	return d.save()
}

func (d *dataDir) etcd() string { return filepath.Join(d.path, "etcd") }

// keep makes the directory this broker's for good.
func (d *dataDir) keep() { d.fresh = false }

// close lets the lock go.
func (d *dataDir) close() error {
	var err error
	if d.fresh {
		err = os.Remove(d.file())
	}
	return errors.Join(err, d.lock.Close())
}
