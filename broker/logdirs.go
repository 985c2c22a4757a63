package broker

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/muster-io/muster/broker/storage"
	"github.com/muster-io/muster/registry"
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
	// trusted tells whether the registry is that of the data, so that what it does not
	// know may be removed for good.
	trusted func(ctx context.Context) error

	mu     sync.Mutex
	strays map[string][]string // asideBase -> directories in stray/
}

const (
	// strayKept is how long the log of a topic that the registry does not know is
	// kept: a registry restored from an old backup must not cost data at once.
	strayKept = 24 * time.Hour
	// sweepEvery is how often it is looked whether something has been kept that long.
	sweepEvery = time.Hour
)

func newLogDirs(path string, log *slog.Logger, trusted func(ctx context.Context) error) *logDirs {
	return &logDirs{path: path, log: log, trusted: trusted, kick: make(chan struct{}, 1), strays: map[string][]string{}}
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

// maxFileName is what file systems allow, and maxStamp what a time takes of it.
const (
	maxFileName = 255
	maxStamp    = len(".1796009568591000000")
)

// asideBase is what the name of a directory begins with that was put aside: that of
// the partition's, with a topic's name cut off where the time would not fit behind
// it. Topics that look alike then differ by the id inside.
func asideBase(topic string, number int32) string {
	tail := "-" + strconv.Itoa(int(number))
	return topic[:min(len(topic), maxFileName-maxStamp-len(tail))] + tail
}

// freeName is a name that nothing has, with the stamp behind it or the next that is free.
func freeName(base string, stamp int64) string {
	for ; ; stamp++ {
		name := fmt.Sprintf("%s.%d", base, stamp)
		if _, err := os.Lstat(name); err != nil {
			return name
		}
	}
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
	base := asideBase(topic, number)
	to = freeName(filepath.Join(to, base), stamp)
	if err := d.move(from, to); err != nil {
		return fmt.Errorf("move %s aside: %w", from, err)
	}
	if keep {
		d.mu.Lock()
		d.strays[base] = append(d.strays[base], to)
		d.mu.Unlock()
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

// move renames a directory. A crash may undo it: whose log a directory has is told
// by its contents, and the next start puts it in order again.
func (d *logDirs) move(from, to string) error {
	if err := (storage.OS{}).MkdirAll(filepath.Dir(to)); err != nil {
		return err
	}
	return os.Rename(from, to)
}

// settle puts in order what is on the disk when the daemon starts: logs of no topic
// in the registry go aside. It must run before logs are opened.
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
	return d.findStrays()
}

// findStrays notes what earlier runs have put aside.
func (d *logDirs) findStrays() error {
	names, err := readNames(d.stray())
	if err != nil {
		return fmt.Errorf("look for stray logs: %w", err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	clear(d.strays)
	for _, name := range names {
		if base, _, ok := strayName(name); ok {
			d.strays[base] = append(d.strays[base], filepath.Join(d.stray(), name))
		}
	}
	return nil
}

// reclaim brings back the log of a partition that was put aside, by its topic's id:
// the registry did not know the topic for a while, and does again. A partition that
// has a directory is left alone.
func (d *logDirs) reclaim(topic string, number int32, id uuid.UUID) error {
	to := d.partition(topic, number)
	d.mu.Lock()
	defer d.mu.Unlock()
	base := asideBase(topic, number)
	for i, from := range d.strays[base] {
		have, err := storage.ReadIdentity(storage.OS{}, from)
		if err != nil || uuid.UUID(have) != id {
			continue // of another topic of that name, or removed by now
		}
		if _, err := os.Stat(to); !errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err := d.move(from, to); err != nil {
			return fmt.Errorf("bring back %s: %w", from, err)
		}
		d.strays[base] = slices.Delete(d.strays[base], i, i+1)
		d.log.Info("log that had been moved aside is back: its topic is in the registry again", "topic", topic, "partition", number)
		return nil
	}
	return nil
}

// topicID is the id of the topic that the log of a partition was made for; "" if there
// is no log, or it does not say.
func (d *logDirs) topicID(topic string, number int32) string {
	if registry.ValidateTopicName(topic) != nil {
		return ""
	}
	id, err := storage.ReadIdentity(storage.OS{}, d.partition(topic, number))
	if err != nil {
		return ""
	}
	return uuid.UUID(id).String()
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
	if err := d.removeStrays(ctx, now); err != nil {
		d.log.Error("stray logs cannot be removed, trying again later", "error", err)
	}
	names, err := readNames(d.deleting())
	if err != nil {
		d.log.Error("cannot look for logs to remove", "error", err)
	}
	for _, name := range names {
		if ctx.Err() != nil {
			return
		}
		if err := os.RemoveAll(filepath.Join(d.deleting(), name)); err != nil {
			d.log.Error("log cannot be removed, trying again later", "error", err)
		}
	}
}

// removeStrays gives up the logs that were kept long enough, unless the registry has
// lost its keys meanwhile: then it is the registry that is wrong.
func (d *logDirs) removeStrays(ctx context.Context, now time.Time) error {
	if !d.anyDue(now) {
		return nil
	}
	if err := d.trusted(ctx); err != nil {
		return err
	}
	return d.condemnStrays(now)
}

func due(stray string, now time.Time) bool {
	_, since, _ := strayName(filepath.Base(stray))
	return now.Sub(since) >= strayKept
}

func (d *logDirs) anyDue(now time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, dirs := range d.strays {
		if slices.ContainsFunc(dirs, func(dir string) bool { return due(dir, now) }) {
			return true
		}
	}
	return false
}

// condemnStrays moves what was kept long enough to where it is removed, so that
// reclaim never finds half of it.
func (d *logDirs) condemnStrays(now time.Time) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for base, dirs := range d.strays {
		for _, from := range slices.Clone(dirs) {
			if !due(from, now) {
				continue
			}
			if err := d.move(from, filepath.Join(d.deleting(), filepath.Base(from))); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
			d.strays[base] = slices.DeleteFunc(d.strays[base], func(dir string) bool { return dir == from })
			d.log.Info("stray log is removed", "directory", filepath.Base(from))
		}
	}
	return nil
}
