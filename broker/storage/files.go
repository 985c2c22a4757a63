package storage

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
)

// Names in the directory of a partition. Those of Kafka are in Kafka's format;
// ".producers" is ours, and not called ".snapshot" so that Kafka's tools do not take
// it for theirs.
const (
	logSuffix       = ".log"
	indexSuffix     = ".index"
	timeIndexSuffix = ".timeindex"
	producersSuffix = ".producers"
	tempSuffix      = ".tmp"

	cleanName  = "clean-close"
	epochsName = "leader-epoch-checkpoint"
	idName     = "partition.metadata"
)

// offsetDigits is how Kafka pads offsets in names: as wide as the largest int64, and one more.
const offsetDigits = 20

// maxSmallFile bounds the files that are read whole: anything larger is not ours.
// The largest is a snapshot of maxProducers producers, about 16 MB.
const maxSmallFile = 64 << 20

func fileName(dir string, offset int64, suffix string) string {
	return filepath.Join(dir, fmt.Sprintf("%0*d", offsetDigits, offset)+suffix)
}

// offsetOf returns the offset in a name such as 00000000000000000042.log.
func offsetOf(name, suffix string) (int64, bool) {
	digits, ok := strings.CutSuffix(name, suffix)
	if !ok || len(digits) != offsetDigits {
		return 0, false
	}
	offset, err := strconv.ParseInt(digits, 10, 64)
	return offset, err == nil && offset >= 0
}

// writeSmallFile replaces a file in one step: after a crash the old or the new
// contents are there, whole.
func writeSmallFile(fs FS, dir, name string, data []byte) error {
	target := filepath.Join(dir, name)
	if err := writeAll(fs, target+tempSuffix, data); err != nil {
		return fmt.Errorf("write %s: %w", target, err)
	}
	if err := fs.Rename(target+tempSuffix, target); err != nil {
		return fmt.Errorf("write %s: %w", target, err)
	}
	if err := fs.SyncDir(dir); err != nil {
		return fmt.Errorf("write %s: %w", target, err)
	}
	return nil
}

// writeAll creates a file with the given contents and syncs it, not its name.
func writeAll(fs FS, name string, data []byte) error {
	f, err := fs.Create(name)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(data, 0)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

func readSmallFile(fs FS, dir, name string) ([]byte, error) {
	f, err := fs.Open(filepath.Join(dir, name))
	if err != nil {
		return nil, err
	}
	size, err := f.Size()
	if err == nil && size > maxSmallFile {
		err = fmt.Errorf("%s has %d bytes, more than it can have", name, size)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	data := make([]byte, size)
	err = readFull(f, data, 0)
	return data, errors.Join(err, f.Close())
}

// readFull fills b from position at. A file that ends before is an error.
func readFull(f File, b []byte, at int64) error {
	n, err := f.ReadAt(b, at)
	if n == len(b) {
		return nil // io.EOF may come with the last byte
	}
	return fmt.Errorf("read %d bytes at %d, got %d: %w", len(b), at, n, err)
}

// removeIfThere removes a file that may be missing.
func removeIfThere(fs FS, name string) error {
	if err := fs.Remove(name); err != nil && !errors.Is(err, ErrNotExist) {
		return err
	}
	return nil
}
