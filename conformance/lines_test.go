package conformance

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// line is a record of the test's input.
type line struct{ key, value string }

// keyDelimiter separates key from value in kcat's input; no key has it.
const keyDelimiter = "|"

// realText returns n lines of what ships with Go: first of its API, then of its
// source, always the same. Each begins with its number, by which order and
// completeness are seen, and its key is the name of its file with a digit, so that
// keys repeat, at all distances, and all partitions get some of every stretch.
func realText(t *testing.T, n int) []line {
	t.Helper()
	out, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatalf("go env GOROOT: %v", err)
	}
	root := strings.TrimSpace(string(out))
	var lines []line
	add := func(pattern, dir string, limit int) {
		err := filepath.WalkDir(filepath.Join(root, dir), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || len(lines) >= limit {
				return nil // a distribution may leave directories out
			}
			if ok, _ := filepath.Match(pattern, d.Name()); !ok {
				return nil
			}
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			name, err := filepath.Rel(root, path)
			if err != nil {
				return err
			}
			for i, text := range strings.Split(string(data), "\n") {
				if len(lines) < limit && strings.TrimSpace(text) != "" {
					lines = append(lines, line{fmt.Sprintf("%s#%d", filepath.ToSlash(name), i%10), fmt.Sprintf("%06d %s", len(lines), text)})
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	add("*.txt", "api", n/5)
	add("*.go", "src", n)
	if len(lines) < n {
		t.Fatalf("GOROOT %s has only %d lines", root, len(lines))
	}
	return lines
}

// feeder gives lines to one producer, a kcat as a rule, at a pace that the test sets. So there is load
// when a fault needs it, and text left for the next one.
type feeder struct {
	t     *testing.T
	kcat  *process
	lines []line
	in    *os.File

	mu    sync.Mutex
	sent  int
	limit int  // lines to send for now
	rate  int  // lines a second
	last  bool // what is sent is all
	err   error
}

// unpaced is as fast as kcat takes it.
const unpaced = 1 << 30

// startFeeder starts a kcat, with more options.
func (c *cluster) startFeeder(topic string, lines []line, more ...string) *feeder {
	c.t.Helper()
	// Idempotent: what is sent again after a lost answer must not be stored again,
	// so that each line has one offset. That has to hold over a crash of the daemon.
	// -E: kcat would give up, not when a line is lost, but when no broker is there.
	return c.startProducer("kcat", lines, append([]string{"kcat", "-m", "60", "-P", "-E", "-b", c.kafka, "-t", topic, "-K", keyDelimiter,
		"-X", "acks=all", "-X", "enable.idempotence=true", "-X", "message.timeout.ms=120000"}, more...)...)
}

// startProducer starts a feeder of any program that takes keys and values on stdin.
func (c *cluster) startProducer(name string, lines []line, argv ...string) *feeder {
	c.t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		c.t.Fatal(err)
	}
	f := &feeder{t: c.t, lines: lines, in: w}
	f.kcat = c.start(name, r, nil, argv...)
	r.Close()
	go f.run()
	return f
}

func (f *feeder) run() {
	const tick = 5 * time.Millisecond
	// When kcat is killed the next write fails, and this ends.
	for ticker := time.NewTicker(tick); ; <-ticker.C {
		f.mu.Lock()
		if f.last {
			f.limit, f.lines = f.sent, f.lines[:f.sent]
		}
		n := min(f.limit-f.sent, max(1, int(int64(f.rate)*int64(tick)/int64(time.Second))))
		part := f.lines[f.sent : f.sent+n]
		finish := f.limit == len(f.lines) && n == 0
		f.mu.Unlock()
		if finish {
			f.in.Close()
			return
		}
		if n > 0 {
			if _, err := f.in.Write(input(part)); err != nil {
				f.mu.Lock()
				f.err = err
				f.mu.Unlock()
				f.in.Close()
				return
			}
			f.mu.Lock()
			f.sent += n
			f.mu.Unlock()
		}
	}
}

// input is how kcat is given lines.
func input(lines []line) []byte {
	var b bytes.Buffer
	for _, l := range lines {
		b.WriteString(l.key + keyDelimiter + l.value + "\n")
	}
	return b.Bytes()
}

// more lets n more lines go at a pace, and leaves at least keep for later.
func (f *feeder) more(n, perSecond, keep int) {
	f.t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.limit+n > len(f.lines)-keep {
		f.t.Fatalf("the text is used up: %d of %d lines", f.limit, len(f.lines))
	}
	f.limit += n
	f.rate = perSecond
}

// rest lets all go.
func (f *feeder) rest(perSecond int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.limit, f.rate = len(f.lines), perSecond
}

// end leaves it at what has been sent; it returns those lines when kcat has ended.
func (f *feeder) end(limit time.Duration) []line {
	f.t.Helper()
	f.mu.Lock()
	f.last = true
	f.mu.Unlock()
	f.kcat.exits(0, limit)
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lines
}

func (f *feeder) progress() (sent, limit int) {
	f.t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err != nil {
		f.t.Fatalf("kcat takes no more input: %v; it is %s: %s", f.err, f.kcat.state(), tail(f.kcat.stderr))
	}
	return f.sent, f.limit
}

// drained waits until kcat has been given all that was let go.
func (f *feeder) drained() {
	f.t.Helper()
	until(f.t, patience, "kcat takes its input", func() bool {
		sent, limit := f.progress()
		return sent == limit
	})
}
