package broker

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/muster-io/muster/broker/storage"
)

// logDirs is where the logs of partitions lie, and where those go that nobody
// serves any more. A directory is renamed first and removed later, so that a crash
// leaves no half of one under a name that a partition is opened by.
//
//	logs/       <topic>-<number>
//	stray/      <topic>-<number>.<milliseconds>: of no topic in the registry; kept for a day
//	deleting/   <topic>-<number>.<nanoseconds>: of a topic that was deleted
type logDirs struct {
	path string
	log  *slog.Logger
	kick chan struct{} // something is to be removed
}

const (
	// strayKept is how long the log of a topic that the registry does not know is
	// kept: a registry restored from an old backup must not cost data at once.
	strayKept = 24 * time.Hour
	// sweepEvery is how often it is looked whether something has been kept that long.
	sweepEvery = time.Hour
)

func newLogDirs(path string, log *slog.Logger) *logDirs {
	return &logDirs{path: path, log: log, kick: make(chan struct{}, 1)}
}

func (d *logDirs) logs() string     { return filepath.Join(d.path, "logs") }
func (d *logDirs) stray() string    { return filepath.Join(d.path, "stray") }
func (d *logDirs) deleting() string { return filepath.Join(d.path, "deleting") }

func (d *logDirs) partition(topic string, number int32) string {
	return filepath.Join(d.logs(), topic+"-"+strconv.Itoa(int(number)))
}

// parseLogDir reads the name of a partition's directory.
func parseLogDir(name string) (topic string, number int32, ok bool) {
	at := strings.LastIndexByte(name, '-')
	if at < 1 {
		return "", 0, false
	}
	n, err := strconv.ParseInt(name[at+1:], 10, 32)
	if err != nil || n < 0 || strconv.FormatInt(n, 10) != name[at+1:] {
		return "", 0, false
	}
	return name[:at], int32(n), true
}

// setAside moves the directory of a partition out of the way, if it is there: to
// be removed at once, or to be kept for a day.
func (d *logDirs) setAside(topic string, number int32, keep bool) error {
	to, stamp := d.deleting(), time.Now().UnixNano()
	if keep {
		to, stamp = d.stray(), time.Now().UnixMilli()
	}
	from := d.partition(topic, number)
	if _, err := os.Stat(from); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	to = filepath.Join(to, fmt.Sprintf("%s.%d", filepath.Base(from), stamp))
	if err := d.move(from, to); err != nil {
		return fmt.Errorf("move %s aside: %w", from, err)
	}
	if keep {
		d.log.Warn("log of no topic in the registry was moved aside", "topic", topic, "partition", number, "to", to, "kept", strayKept)
	}
	d.wake()
	return nil
}

func (d *logDirs) wake() {
	select {
	case d.kick <- struct{}{}:
	default:
	}
}

// move renames a directory for good.
func (d *logDirs) move(from, to string) error {
	disk := storage.OS{}
	if err := disk.MkdirAll(filepath.Dir(to)); err != nil {
		return err
	}
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return errors.Join(disk.SyncDir(filepath.Dir(to)), disk.SyncDir(filepath.Dir(from)))
}

// settle puts in order what is on the disk when the daemon starts: logs of no topic
// in the registry go aside, and those that were put aside and are wanted again come
// back. It must run before logs are opened.
func (d *logDirs) settle(c *catalog) error {
	names, err := readNames(d.logs())
	if err != nil {
		return fmt.Errorf("look for logs: %w", err)
	}
	for _, name := range names {
		topic, number, ok := parseLogDir(name)
		if !ok {
			continue
		}
		id, err := storage.ReadIdentity(storage.OS{}, filepath.Join(d.logs(), name))
		if err != nil && !errors.Is(err, storage.ErrNotExist) {
			d.log.Warn("log cannot be told whose it is, and stays", "error", err)
			continue
		}
		if yes, unsure := c.belongs(topic, number, uuid.UUID(id)); yes || unsure {
			continue
		}
		if t := c.topics[topic]; err != nil && t != nil && t.record != nil {
			continue // a crash left it without a name, and nothing in it: opening it will tell
		}
		if err := d.setAside(topic, number, true); err != nil {
			return err
		}
	}
	return d.reclaim(c)
}

// reclaim brings back what was put aside and belongs to a topic by its id.
func (d *logDirs) reclaim(c *catalog) error {
	names, err := readNames(d.stray())
	if err != nil {
		return fmt.Errorf("look for stray logs: %w", err)
	}
	for _, name := range names {
		base, _, ok := strayName(name)
		topic, number, isLog := parseLogDir(base)
		if !ok || !isLog {
			continue
		}
		from := filepath.Join(d.stray(), name)
		id, err := storage.ReadIdentity(storage.OS{}, from)
		if err != nil {
			continue
		}
		if yes, _ := c.belongs(topic, number, uuid.UUID(id)); !yes {
			continue
		}
		if _, err := os.Stat(d.partition(topic, number)); !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := d.move(from, d.partition(topic, number)); err != nil {
			return fmt.Errorf("bring back %s: %w", from, err)
		}
		d.log.Info("log that had been moved aside is back: its topic is in the registry again", "topic", topic, "partition", number)
	}
	return nil
}

// strayName splits the name of a directory that was put aside.
func strayName(name string) (base string, since time.Time, ok bool) {
	at := strings.LastIndexByte(name, '.')
	if at < 1 {
		return "", time.Time{}, false
	}
	ms, err := strconv.ParseInt(name[at+1:], 10, 64)
	return name[:at], time.UnixMilli(ms), err == nil
}

func readNames(dir string) ([]string, error) {
	names, err := storage.OS{}.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return names, err
}

// run removes what is to go, until ctx ends.
func (d *logDirs) run(ctx context.Context) {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		d.sweep(ctx, time.Now())
		select {
		case <-ctx.Done():
			return
		case <-d.kick:
		case <-tick.C:
		}
	}
}

// sweep removes the logs of deleted topics, and those that were kept long enough.
func (d *logDirs) sweep(ctx context.Context, now time.Time) {
	remove := func(dir string, due func(name string) bool) {
		names, err := readNames(dir)
		if err != nil {
			d.log.Error("cannot look for logs to remove", "error", err)
		}
		for _, name := range names {
			if ctx.Err() != nil {
				return
			}
			if !due(name) {
				continue
			}
			if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
				d.log.Error("cannot remove a log, trying again later", "error", err)
			}
		}
	}
	remove(d.deleting(), func(string) bool { return true })
	remove(d.stray(), func(name string) bool {
		_, since, ok := strayName(name)
		due := ok && now.Sub(since) >= strayKept
		if due {
			d.log.Info("stray log is removed", "directory", name, "since", since)
		}
		return due
	})
}
