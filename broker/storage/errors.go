package storage

import (
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kerr"
)

// Errors of an open log.
var (
	// ErrClosed is returned by every call after Close.
	ErrClosed = errors.New("the log is closed")

	// ErrDiskFull is wrapped by the error of an append that found no room. What it
	// had written was taken back, so the log goes on: room may come again.
	ErrDiskFull = errors.New("no room on the disk")
)

// BatchError says why a batch from outside was not stored. It unwraps to the
// Kafka error that its sender is to be told.
type BatchError struct {
	Kafka    *kerr.Error
	Position int // of the batch in what was sent
	Reason   string
}

func (e *BatchError) Error() string {
	return fmt.Sprintf("record batch at byte %d refused: %s (%s)", e.Position, e.Reason, e.Kafka.Message)
}

func (e *BatchError) Unwrap() error { return e.Kafka }

func refuse(code *kerr.Error, format string, args ...any) *BatchError {
	return &BatchError{Kafka: code, Reason: fmt.Sprintf(format, args...)}
}

// CorruptionError says where a log is damaged in a way that must not be repaired
// by cutting it, because records that were acknowledged would go.
type CorruptionError struct {
	Dir      string
	Segment  int64 // base offset of the segment
	Position int64 // byte in the segment's log file
	Offset   int64 // the offset expected there
	Reason   string
}

func (e *CorruptionError) Error() string {
	return fmt.Sprintf("log %s is damaged: segment %020d, position %d, offset %d: %s",
		e.Dir, e.Segment, e.Position, e.Offset, e.Reason)
}

// FailedError is the sticky error of a log whose disk failed: it can be read,
// below its durable offset, but takes nothing more until it is opened again.
type FailedError struct {
	Dir string
	Op  string
	Err error
}

func (e *FailedError) Error() string {
	return fmt.Sprintf("log %s takes no more appends since %s failed: %v", e.Dir, e.Op, e.Err)
}

func (e *FailedError) Unwrap() error { return e.Err }

// IdentityError says that a directory does not belong to the topic that it was
// opened for: the topic was deleted and another one made under its name.
type IdentityError struct {
	Dir    string
	Want   TopicID
	Have   TopicID // zero if Reason says why it is not known
	Reason string
}

func (e *IdentityError) Error() string {
	if e.Reason != "" {
		return fmt.Sprintf("log %s: cannot tell whether it belongs to topic id %s: %s", e.Dir, e.Want, e.Reason)
	}
	return fmt.Sprintf("log %s belongs to topic id %s, not to %s: move the directory away if its topic was deleted",
		e.Dir, e.Have, e.Want)
}
