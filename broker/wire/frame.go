package wire

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kmsg"
)

// Limits of a frame, checked before anything is allocated for it.
const (
	// MaxProduceFrame is Kafka's own default for any request
	// (socket.request.max.bytes). Only a Produce request carries data.
	MaxProduceFrame = 100 << 20

	// MaxFrame is for every other key: names and numbers. A Fetch of 100,000
	// partitions still fits.
	MaxFrame = 4 << 20

	// maxProduceEntries bounds the topics and partitions of one Produce request,
	// because kmsg makes 64 bytes out of an empty topic's 2: a frame of 100 MiB
	// could ask for 3 GiB. A producer with its default of 1 MiB a request cannot
	// name more than some 15,000.
	maxProduceEntries = 100_000

	// maxHeaderTags bounds the tagged fields of a request header and of each struct
	// of a Produce request. Kafka itself has never had more than four in a struct.
	maxHeaderTags = 64

	// bigFrame is where decoding a frame can take so much memory (some 30 times its
	// size, if made to hurt) that the server decodes such frames one at a time.
	// Clients of ordinary size stay below it.
	bigFrame = 64 << 10
)

const (
	keyProduce     = 0
	keyApiVersions = 18

	// minFrame is the shortest request there is: key, version, correlation id.
	minFrame = 2 + 2 + 4

	// unknown stands for a key or version that could not be read.
	unknown = -1
)

// Why a frame was refused. They reach the log inside a *FrameError.
var (
	ErrFrameSize   = errors.New("frame size out of bounds")
	ErrFrameCut    = errors.New("frame incomplete")
	ErrHeader      = errors.New("malformed request header")
	ErrBody        = errors.New("malformed request body")
	ErrUnsupported = errors.New("key or version not served")
)

// FrameError says which request was refused, as far as that could be read.
type FrameError struct {
	Key, Version int16 // -1 if unknown
	ClientID     string
	Err          error
}

func (e *FrameError) Error() string {
	return fmt.Sprintf("request key %d version %d: %v", e.Key, e.Version, e.Err)
}

func (e *FrameError) Unwrap() error { return e.Err }

// header is a request header, of version 1 or 2.
type header struct {
	key, version  int16
	correlationID int32
	clientID      string // "" for null
}

// checkSize refuses a frame by its size prefix alone, before its key is known.
func checkSize(size int32) error {
	if size >= minFrame && size <= MaxProduceFrame {
		return nil
	}
	why := ""
	switch uint32(size) >> 24 {
	case 0x16:
		why = ": the client seems to speak TLS"
	case 'G', 'P', 'H', 'O', 'D': // GET, POST/PUT, HEAD, OPTIONS, DELETE
		why = ": the client seems to speak HTTP"
	}
	return fmt.Errorf("%w: %d bytes%s", ErrFrameSize, size, why)
}

// checkKeySize refuses a frame that is too large for its key.
func checkKeySize(key int16, size int32) error {
	if key != keyProduce && size > MaxFrame {
		return fmt.Errorf("%w: %d bytes, at most %d for this key", ErrFrameSize, size, MaxFrame)
	}
	return nil
}

// readHeader parses a frame up to the client id, which every version of every
// request that we can serve has in the same form. rest is what follows.
func readHeader(frame []byte) (h header, rest []byte, err error) {
	h.key, h.version = unknown, unknown
	if len(frame) < minFrame {
		return h, nil, fmt.Errorf("%w: %d bytes", ErrHeader, len(frame))
	}
	h.key = int16(binary.BigEndian.Uint16(frame))
	h.version = int16(binary.BigEndian.Uint16(frame[2:]))
	h.correlationID = int32(binary.BigEndian.Uint32(frame[4:]))
	rest = frame[minFrame:]
	if len(rest) < 2 {
		return h, nil, fmt.Errorf("%w: no client id", ErrHeader)
	}
	n := int(int16(binary.BigEndian.Uint16(rest)))
	rest = rest[2:]
	switch {
	case n == -1:
	case n < 0 || n > len(rest):
		return h, nil, fmt.Errorf("%w: client id of %d bytes in %d", ErrHeader, n, len(rest))
	default:
		h.clientID, rest = string(rest[:n]), rest[n:]
	}
	return h, rest, nil
}

// decode parses a whole frame against the table. The request's byte slices point
// into frame. The error is always a *FrameError.
//
// Bytes after the body are accepted, as Kafka does: clients have been seen to send
// some.
func (t *table) decode(frame []byte) (header, kmsg.Request, error) {
	h, rest, err := readHeader(frame)
	if err != nil {
		return h, nil, h.refuse(err)
	}
	e, err := t.lookup(h.key, h.version)
	if err != nil {
		return h, nil, h.refuse(err)
	}
	req := kmsg.RequestForKey(h.key)
	req.SetVersion(h.version)
	if req.IsFlexible() {
		if rest, err = skipTags(rest); err != nil {
			return h, nil, h.refuse(fmt.Errorf("%w: %w", ErrHeader, err))
		}
	}
	if e.precheck != nil {
		if err := e.precheck(h.version, rest); err != nil {
			return h, nil, h.refuse(fmt.Errorf("%w: %w", ErrBody, err))
		}
	}
	if err := req.ReadFrom(rest); err != nil {
		return h, nil, h.refuse(fmt.Errorf("%w: %w", ErrBody, err))
	}
	return h, req, nil
}

func (h header) refuse(err error) error {
	return &FrameError{Key: h.key, Version: h.version, ClientID: h.clientID, Err: err}
}

// appendResponse appends the whole frame of a response to dst.
func appendResponse(dst []byte, correlationID int32, resp kmsg.Response) []byte {
	start := len(dst)
	dst = append(dst, 0, 0, 0, 0)
	dst = binary.BigEndian.AppendUint32(dst, uint32(correlationID))
	// The header of an ApiVersions response never has tagged fields: the client
	// reads it before it knows what the server understands.
	if resp.IsFlexible() && resp.Key() != keyApiVersions {
		dst = append(dst, 0)
	}
	dst = resp.AppendTo(dst)
	binary.BigEndian.PutUint32(dst[start:], uint32(len(dst)-start-4))
	return dst
}
