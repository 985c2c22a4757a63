package storage

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/snappy"
	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
)

// Codecs of records, as in the attributes of a batch.
const (
	CodecNone   = 0
	CodecGzip   = 1
	CodecSnappy = 2
	CodecLz4    = 3
	CodecZstd   = 4
)

// Decompressor returns the records of a batch, or an error when they are malformed
// or longer than maxBytes. It must not take more memory than a small multiple of
// maxBytes whatever src holds.
type Decompressor func(codec int8, src []byte, maxBytes int) ([]byte, error)

// maxDecompressed bounds what one batch may grow to in a look-up by time. Batches
// of the default size that compress a hundredfold still fit.
const maxDecompressed = 128 << 20

var errTooLong = errors.New("the records are longer than the limit")

// Decompress is the default Decompressor.
func Decompress(codec int8, src []byte, maxBytes int) ([]byte, error) {
	switch codec {
	case CodecGzip:
		r, err := gzip.NewReader(bytes.NewReader(src))
		if err != nil {
			return nil, fmt.Errorf("gzip: %w", err)
		}
		return readBounded(r, maxBytes)
	case CodecSnappy:
		return decompressSnappy(src, maxBytes)
	case CodecLz4:
		return readBounded(lz4.NewReader(bytes.NewReader(src)), maxBytes)
	case CodecZstd:
		r, err := zstd.NewReader(bytes.NewReader(src), zstd.WithDecoderConcurrency(1),
			zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxMemory(uint64(maxBytes)))
		if err != nil {
			return nil, fmt.Errorf("zstd: %w", err)
		}
		defer r.Close()
		return readBounded(r, maxBytes)
	}
	return nil, fmt.Errorf("codec %d cannot be decompressed", codec)
}

// The framing that Java producers put around snappy: a magic, two versions, then
// blocks behind their length.
const (
	xerialMagic  = "\x82SNAPPY\x00"
	xerialHeader = len(xerialMagic) + 8
)

func decompressSnappy(src []byte, maxBytes int) ([]byte, error) {
	if len(src) < xerialHeader || string(src[:len(xerialMagic)]) != xerialMagic {
		return appendSnappy(nil, src, maxBytes)
	}
	var out []byte
	for src = src[xerialHeader:]; len(src) > 0; {
		if len(src) < 4 {
			return nil, errors.New("snappy: the length of a block is cut off")
		}
		n := binary.BigEndian.Uint32(src)
		if src = src[4:]; uint64(n) > uint64(len(src)) {
			return nil, errors.New("snappy: a block is cut off")
		}
		var err error
		if out, err = appendSnappy(out, src[:n], maxBytes); err != nil {
			return nil, err
		}
		src = src[n:]
	}
	return out, nil
}

func appendSnappy(out, block []byte, maxBytes int) ([]byte, error) {
	n, err := snappy.DecodedLen(block)
	if err != nil {
		return nil, fmt.Errorf("snappy: %w", err)
	}
	if n > maxBytes-len(out) {
		return nil, errTooLong
	}
	decoded, err := snappy.Decode(nil, block)
	if err != nil {
		return nil, fmt.Errorf("snappy: %w", err)
	}
	return append(out, decoded...), nil
}

func readBounded(r io.Reader, maxBytes int) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, int64(maxBytes)+1))
	if err == nil && len(b) > maxBytes {
		err = errTooLong
	}
	if err != nil {
		return nil, err
	}
	return b, nil
}
