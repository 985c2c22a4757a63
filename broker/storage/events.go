package storage

import (
	"fmt"
	"time"
)

// Listener is told what a log does beyond appending and reading. Every function
// may be nil. They are called on the log's own paths, with its locks held: they
// must be quick, and not call the log.
type Listener struct {
	Recovered        func(Recovery)
	SegmentRolled    func(SegmentRolled)
	Appended         func(Stored)
	Repaired         func(Repaired)
	Synced           func(Synced)
	AppendUndone     func(AppendUndone)
	BatchUndecodable func(BatchUndecodable)
	Failed           func(*FailedError)
}

// Recovery tells what was found when a log was opened.
type Recovery struct {
	Dir         string
	Clean       bool  // it had been closed properly: nothing had to be scanned
	Segment     int64 // base offset of the newest segment
	ValidOffset int64 // the offset after the last good batch
	BytesCut    int64 // after it; never acknowledged
	Reason      string
}

func (r Recovery) String() string {
	switch {
	case r.Clean:
		return fmt.Sprintf("%s: closed properly, ends at offset %d", r.Dir, r.ValidOffset)
	case r.BytesCut == 0:
		return fmt.Sprintf("%s: not closed properly, nothing lost, ends at offset %d", r.Dir, r.ValidOffset)
	}
	return fmt.Sprintf("%s: not closed properly, %d bytes cut from segment %d after offset %d: %s",
		r.Dir, r.BytesCut, r.Segment, r.ValidOffset, r.Reason)
}

// SegmentRolled tells that a segment is full and the next one begins.
type SegmentRolled struct {
	Dir       string
	Sealed    int64 // base offsets
	Active    int64
	SizeBytes int64 // of the sealed one
}

func (i SegmentRolled) String() string {
	return fmt.Sprintf("%s: segment %d sealed with %d bytes, segment %d begins", i.Dir, i.Sealed, i.SizeBytes, i.Active)
}

// Repaired tells that a file that can be made again was missing or damaged.
type Repaired struct {
	Dir    string
	What   string
	Reason string
}

func (i Repaired) String() string {
	return fmt.Sprintf("%s: %s made again: %s", i.Dir, i.What, i.Reason)
}

// Stored tells of batches that were appended; duplicates are not.
type Stored struct {
	Dir      string
	From, To int64
	Bytes    int
}

func (i Stored) String() string {
	return fmt.Sprintf("%s: %d bytes from offset %d to %d", i.Dir, i.Bytes, i.From, i.To)
}

// Synced tells how far one sync has moved the durable offset, and how long the
// disk took for it.
type Synced struct {
	Dir      string
	From, To int64
	Took     time.Duration
}

func (i Synced) String() string {
	return fmt.Sprintf("%s: durable from %d to %d in %s", i.Dir, i.From, i.To, i.Took)
}

// AppendUndone tells that an append found no room, and was taken back.
type AppendUndone struct {
	Dir    string
	Offset int64
	Err    error
}

func (i AppendUndone) String() string {
	return fmt.Sprintf("%s: append at offset %d taken back: %v", i.Dir, i.Offset, i.Err)
}

// BatchUndecodable tells that a look-up by time could not read the records of a
// compressed batch, and took the batch for its first record.
type BatchUndecodable struct {
	Dir    string
	Offset int64
	Err    error
}

func (i BatchUndecodable) String() string {
	return fmt.Sprintf("%s: records of the batch at offset %d cannot be read: %v", i.Dir, i.Offset, i.Err)
}

func tell[T any](f func(T), info T) {
	if f != nil {
		f(info)
	}
}
