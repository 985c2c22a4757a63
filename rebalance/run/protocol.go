package run

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/muster-io/muster/registry"
)

// childVariable marks what descends from a child in its environment, so that it is
// known also when it has left its process group and lost its parents.
const childVariable = "MUSTER_CHILD"

// command is what the watchdog is told: a line of JSON with one or more of these.
type command struct {
	Start *startCommand `json:"start,omitempty"`
	Term  uint64        `json:"term,omitempty"`
	Kill  uint64        `json:"kill,omitempty"`
	// Until says until when each child may live, by the clock that runs through
	// suspend. What is not named keeps its time.
	Until map[uint64]time.Duration `json:"until,omitempty"`
	// Lease is what the partitions are owned under from now on; -1 is none. If the pipe
	// closes while there is one, it is revoked when all children are dead.
	Lease registry.LeaseID `json:"lease,omitempty"`
	// Number of a command that is to be answered, from 1.
	Number uint64 `json:"number,omitempty"`
}

// startCommand is to start a process. IDs begin at 1 and are never used twice.
type startCommand struct {
	ID     uint64        `json:"id"`
	Path   string        `json:"path"`
	Args   []string      `json:"args"` // with the program's name
	Env    []string      `json:"env"`
	Until  time.Duration `json:"until"`
	Prefix string        `json:"prefix,omitempty"` // of each line that it prints
}

// report is what the watchdog tells.
type report struct {
	Started *startedReport `json:"started,omitempty"`
	Failed  *failedReport  `json:"failed,omitempty"`
	Exited  *exitedReport  `json:"exited,omitempty"`
	Gone    uint64         `json:"gone,omitempty"` // nothing is left of that child
	Number  uint64         `json:"number,omitempty"`
}

type startedReport struct {
	ID  uint64 `json:"id"`
	PID int    `json:"pid"`
}

// failedReport: the child could not be started; nothing of it is there.
type failedReport struct {
	ID    uint64 `json:"id"`
	Error string `json:"error"`
	Late  bool   `json:"late,omitempty"`  // its time was over
	Fatal bool   `json:"fatal,omitempty"` // there is no such program, or it is none
}

// exitedReport: the process that was started has ended.
type exitedReport struct {
	ID uint64 `json:"id"`
	// Failure says how, for example "exit status 3"; "" is status 0.
	Failure string `json:"failure,omitempty"`
	Overdue bool   `json:"overdue,omitempty"` // its time was over, and it was killed
}

// lines writes JSON, a value a line, without ever keeping the caller waiting: the
// other end may be stopped.
type lines struct {
	mu     sync.Mutex
	queue  [][]byte
	queued chan struct{}
	closed bool
}

func newLines() *lines { return &lines{queued: make(chan struct{}, 1)} }

func (l *lines) send(v any) {
	line, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("encode %T: %v", v, err)) // our own types of plain fields
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queue = append(l.queue, append(line, '\n'))
	notify(l.queued)
}

// close ends run when all is written.
func (l *lines) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	notify(l.queued)
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// run writes until close, or until the other end is gone; then it closes w.
func (l *lines) run(w io.WriteCloser) {
	defer w.Close()
	for range l.queued {
		l.mu.Lock()
		queue, closed := l.queue, l.closed
		l.queue = nil
		l.mu.Unlock()
		for _, line := range queue {
			if _, err := w.Write(line); err != nil {
				return
			}
		}
		if closed {
			return
		}
	}
}

// readLines sends what comes, until the end, on a channel that it then closes.
func readLines[T any](r io.Reader, to chan<- T, stop <-chan struct{}) {
	defer close(to)
	b := bufio.NewReader(r)
	for {
		line, err := b.ReadBytes('\n')
		if err != nil {
			return
		}
		var v T
		if json.Unmarshal(line, &v) != nil {
			return // as good as the end: whoever writes such lines is not to be trusted with processes
		}
		select {
		case to <- v:
		case <-stop:
			return
		}
	}
}
