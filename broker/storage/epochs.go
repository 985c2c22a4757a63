package storage

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// epochStart says at which offset a leader epoch begins.
type epochStart struct {
	epoch int32
	start int64
}

// epochs is the list of leader epochs of a log, in Kafka's checkpoint file
// (version, count, then "epoch start" a line). An epoch enters it, on disk, before
// its first batch enters the log.
type epochs []epochStart

const epochsVersion = "0"

func (e epochs) latest() int32 {
	if len(e) == 0 {
		return -1
	}
	return e[len(e)-1].epoch
}

// with returns the list with a new epoch. An epoch that began at the same offset
// and so has no records gives way.
func (e epochs) with(epoch int32, start int64) epochs {
	return append(e.before(start), epochStart{epoch, start})
}

// before returns a copy without the epochs that begin at end or later: what they
// would describe is not in the log.
func (e epochs) before(end int64) epochs {
	kept := make(epochs, 0, len(e)+1)
	for _, entry := range e {
		if entry.start < end {
			kept = append(kept, entry)
		}
	}
	return kept
}

func (e epochs) encode() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s\n%d\n", epochsVersion, len(e))
	for _, entry := range e {
		fmt.Fprintf(&b, "%d %d\n", entry.epoch, entry.start)
	}
	return b.Bytes()
}

func decodeEpochs(data []byte) (epochs, error) {
	lines := strings.Split(strings.TrimSuffix(string(data), "\n"), "\n")
	if len(lines) < 2 || lines[0] != epochsVersion {
		return nil, errors.New("its version is not known")
	}
	if lines[1] != strconv.Itoa(len(lines)-2) {
		return nil, fmt.Errorf("it counts %q entries and has %d", lines[1], len(lines)-2)
	}
	var list epochs
	for _, line := range lines[2:] {
		first, second, _ := strings.Cut(line, " ")
		epoch, err1 := strconv.ParseInt(first, 10, 32)
		start, err2 := strconv.ParseInt(second, 10, 64)
		if err1 != nil || err2 != nil {
			return nil, fmt.Errorf("line %q is malformed", line)
		}
		if n := len(list); n > 0 && (int32(epoch) <= list[n-1].epoch || start < list[n-1].start) {
			return nil, fmt.Errorf("line %q does not follow the one before it", line)
		}
		list = append(list, epochStart{int32(epoch), start})
	}
	return list, nil
}
