package storage

import (
	"encoding/binary"
	"hash/crc32"
	"math"

	"github.com/twmb/franz-go/pkg/kerr"
)

// Where the fields of a record batch (magic 2) are. Big-endian throughout.
const (
	atLength          = 8 // of what follows this field
	atLeaderEpoch     = 12
	atMagic           = 16
	atCRC             = 17 // Castagnoli, from atAttributes to the end
	atAttributes      = 21
	atLastOffsetDelta = 23
	atFirstTimestamp  = 27
	atMaxTimestamp    = 35
	atProducerID      = 43
	atProducerEpoch   = 51
	atBaseSequence    = 53
	atNumRecords      = 57
	headerSize        = 61

	lengthPrefix = atLength + 4 // base offset and length: not counted by the length
	magicV2      = 2
)

// Bits of the attributes.
const (
	codecMask         = 0x07
	attrLogAppendTime = 1 << 3
	attrTransactional = 1 << 4
	attrControl       = 1 << 5
	attrKnown         = codecMask | attrLogAppendTime | attrTransactional | attrControl
)

// DefaultMaxBatchBytes is Kafka's default for max.message.bytes: 1 MiB of records and
// the 12 bytes that the length does not count.
const DefaultMaxBatchBytes = 1<<20 + lengthPrefix

// Header is the fixed part of a record batch.
type Header struct {
	BaseOffset      int64
	Length          int32 // as on disk: without the first 12 bytes
	LeaderEpoch     int32
	CRC             uint32
	Attributes      int16
	LastOffsetDelta int32
	FirstTimestamp  int64
	MaxTimestamp    int64
	ProducerID      int64 // -1 without idempotence
	ProducerEpoch   int16
	BaseSequence    int32
	NumRecords      int32
}

// Size is the length of the whole batch in bytes.
func (h *Header) Size() int64 { return int64(h.Length) + lengthPrefix }

// Next is the offset after the last record.
func (h *Header) Next() int64 { return h.BaseOffset + int64(h.LastOffsetDelta) + 1 }

func (h *Header) lastOffset() int64 { return h.BaseOffset + int64(h.LastOffsetDelta) }

func (h *Header) codec() int8 { return int8(h.Attributes & codecMask) }

func (h *Header) idempotent() bool { return h.ProducerID >= 0 }

func (h *Header) lastSequence() int32 { return addSequence(h.BaseSequence, h.LastOffsetDelta) }

// parseHeader reads a header and checks what must hold before any other field
// can be believed. The error is a *BatchError.
func parseHeader(b []byte) (Header, error) {
	if len(b) < headerSize {
		return Header{}, refuse(kerr.CorruptMessage, "%d bytes are less than a batch header", len(b))
	}
	if magic := int8(b[atMagic]); magic != magicV2 {
		return Header{}, refuse(kerr.CorruptMessage, "magic %d where %d is stored", magic, magicV2)
	}
	h := Header{
		BaseOffset:      int64(binary.BigEndian.Uint64(b)),
		Length:          int32(binary.BigEndian.Uint32(b[atLength:])),
		LeaderEpoch:     int32(binary.BigEndian.Uint32(b[atLeaderEpoch:])),
		CRC:             binary.BigEndian.Uint32(b[atCRC:]),
		Attributes:      int16(binary.BigEndian.Uint16(b[atAttributes:])),
		LastOffsetDelta: int32(binary.BigEndian.Uint32(b[atLastOffsetDelta:])),
		FirstTimestamp:  int64(binary.BigEndian.Uint64(b[atFirstTimestamp:])),
		MaxTimestamp:    int64(binary.BigEndian.Uint64(b[atMaxTimestamp:])),
		ProducerID:      int64(binary.BigEndian.Uint64(b[atProducerID:])),
		ProducerEpoch:   int16(binary.BigEndian.Uint16(b[atProducerEpoch:])),
		BaseSequence:    int32(binary.BigEndian.Uint32(b[atBaseSequence:])),
		NumRecords:      int32(binary.BigEndian.Uint32(b[atNumRecords:])),
	}
	if h.Length < headerSize-lengthPrefix {
		return Header{}, refuse(kerr.CorruptMessage, "length %d is less than a batch header", h.Length)
	}
	if h.LastOffsetDelta < 0 || h.LastOffsetDelta == math.MaxInt32 {
		return Header{}, refuse(kerr.InvalidRecord, "last offset delta %d", h.LastOffsetDelta)
	}
	return h, nil
}

// castagnoli returns the table that the CRC of batches uses; the hash package
// keeps it, so this is no more than a look-up.
func castagnoli() *crc32.Table { return crc32.MakeTable(crc32.Castagnoli) }

func batchCRC(batch []byte) uint32 { return crc32.Checksum(batch[atAttributes:], castagnoli()) }

// splitBatches checks batches from outside, back to back in b, and returns their
// headers. It trusts nothing: no length is used before it was compared with
// what is there, and memory grows only with batches that were found.
func splitBatches(b []byte, maxBatchBytes int) ([]Header, error) {
	if len(b) == 0 {
		return nil, refuse(kerr.InvalidRecord, "no batch at all")
	}
	headers := make([]Header, 0, 1)
	for pos := 0; pos < len(b); {
		h, err := checkBatch(b[pos:], maxBatchBytes)
		if err != nil {
			err.Position = pos
			return nil, err
		}
		headers = append(headers, h)
		pos += int(h.Size())
	}
	return headers, nil
}

// checkBatch checks the batch at the start of b. The header's MaxTimestamp is the
// true one where the records could be read: see stamp.
func checkBatch(b []byte, maxBatchBytes int) (Header, *BatchError) {
	h, err := parseHeader(b)
	if err != nil {
		return h, err.(*BatchError)
	}
	if h.Size() > int64(maxBatchBytes) {
		return h, refuse(kerr.MessageTooLarge, "%d bytes, and max.message.bytes is %d", h.Size(), maxBatchBytes)
	}
	if h.Size() > int64(len(b)) {
		return h, refuse(kerr.CorruptMessage, "length says %d bytes, %d are there", h.Size(), len(b))
	}
	batch := b[:h.Size()]
	if crc := batchCRC(batch); crc != h.CRC {
		return h, refuse(kerr.CorruptMessage, "CRC is %08x, the header says %08x", crc, h.CRC)
	}
	if err := checkFields(&h); err != nil {
		return h, err
	}
	if h.codec() != CodecNone {
		// Compressed records are stored as they came. Decompressing all that
		// comes in would cost more than everything else that the broker does, and let a
		// small request blow up into gigabytes. A consumer that cannot decode them
		// reports it; the log itself needs only the header.
		if len(batch) == headerSize {
			return h, refuse(kerr.InvalidRecord, "%d compressed records in no bytes", h.NumRecords)
		}
		return h, nil
	}
	maxTimestamp, err2 := checkRecords(batch[headerSize:], &h)
	if err2 != nil {
		return h, err2
	}
	h.MaxTimestamp = maxTimestamp
	return h, nil
}

// checkFields checks the fields of a header from outside against each other.
func checkFields(h *Header) *BatchError {
	switch {
	case h.NumRecords <= 0 || h.NumRecords-1 != h.LastOffsetDelta:
		return refuse(kerr.InvalidRecord, "%d records, but the last offset delta is %d", h.NumRecords, h.LastOffsetDelta)
	case h.codec() > CodecZstd:
		return refuse(kerr.UnsupportedCompressionType, "compression codec %d is not known", h.codec())
	case h.Attributes&attrControl != 0:
		return refuse(kerr.InvalidRecord, "a producer cannot write control batches")
	case h.Attributes&attrTransactional != 0:
		return refuse(kerr.InvalidTxnState, "transactions are not supported")
	case h.Attributes&attrLogAppendTime != 0:
		return refuse(kerr.InvalidTimestamp, "log append time is the broker's to set")
	case h.Attributes&^attrKnown != 0:
		return refuse(kerr.InvalidRecord, "attributes %#x are not known", uint16(h.Attributes))
	case h.ProducerID < -1:
		return refuse(kerr.InvalidRecord, "producer id %d", h.ProducerID)
	case h.idempotent() && (h.ProducerEpoch < 0 || h.BaseSequence < 0):
		return refuse(kerr.InvalidRecord, "producer %d with epoch %d and sequence %d", h.ProducerID, h.ProducerEpoch, h.BaseSequence)
	}
	return nil
}

// stamp writes into a checked batch what only the log knows. Base offset and
// epoch lie outside the CRC. A maximal timestamp that its producer had wrong is put
// right, as Kafka does: look-ups by time depend on it.
func stamp(batch []byte, h *Header) {
	binary.BigEndian.PutUint64(batch, uint64(h.BaseOffset))
	binary.BigEndian.PutUint32(batch[atLeaderEpoch:], uint32(h.LeaderEpoch))
	if int64(binary.BigEndian.Uint64(batch[atMaxTimestamp:])) == h.MaxTimestamp {
		return
	}
	binary.BigEndian.PutUint64(batch[atMaxTimestamp:], uint64(h.MaxTimestamp))
	h.CRC = batchCRC(batch)
	binary.BigEndian.PutUint32(batch[atCRC:], h.CRC)
}

// checkStored checks a batch that was read back, whole, at the place where offset
// want is expected. It returns why the batch is bad, or "".
func checkStored(batch []byte, h *Header, want int64) string {
	if h.BaseOffset != want {
		return "its base offset does not follow the batch before it"
	}
	if batchCRC(batch) != h.CRC {
		return "its CRC does not match"
	}
	return ""
}
