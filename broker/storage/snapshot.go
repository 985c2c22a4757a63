package storage

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"path/filepath"
)

// A snapshot of the producers holds what the batches below the offset in its
// name have made of the table:
//
//	magic u32, version u8, CRC u32 (Castagnoli, of all that follows), offset i64, count u32,
//	then each producer, the one silent for the longest time first:
//	id i64, epoch i16, seen i64, number of batches u8,
//	then each batch: first sequence i32, last sequence i32, base offset i64, timestamp i64
//
// It saves walking over the whole log at open, and is never the only truth: one
// that is missing or damaged is replaced by an older one and a longer walk.
const (
	snapshotMagic    = 0x4d535052 // "MSPR"
	snapshotVersion  = 0
	snapshotHeader   = 4 + 1 + 4
	snapshotFixed    = snapshotHeader + 8 + 4
	snapshotProducer = 8 + 2 + 8 + 1
	snapshotBatch    = 4 + 4 + 8 + 8
	keptSnapshots    = 2 // the newest, and one to fall back on
	snapshotCRCAt    = 5
)

func (p *producers) encode(offset int64) []byte {
	b := make([]byte, 0, snapshotFixed+len(p.byID)*(snapshotProducer+snapshotBatch))
	b = binary.BigEndian.AppendUint32(b, snapshotMagic)
	b = append(b, snapshotVersion)
	b = binary.BigEndian.AppendUint32(b, 0)
	b = binary.BigEndian.AppendUint64(b, uint64(offset))
	b = binary.BigEndian.AppendUint32(b, uint32(len(p.byID)))
	for known := p.idle.newer; known != &p.idle; known = known.newer {
		b = binary.BigEndian.AppendUint64(b, uint64(known.id))
		b = binary.BigEndian.AppendUint16(b, uint16(known.epoch))
		b = binary.BigEndian.AppendUint64(b, uint64(known.seen))
		b = append(b, byte(known.n))
		for _, batch := range known.batches[:known.n] {
			b = binary.BigEndian.AppendUint32(b, uint32(batch.firstSequence))
			b = binary.BigEndian.AppendUint32(b, uint32(batch.lastSequence))
			b = binary.BigEndian.AppendUint64(b, uint64(batch.base))
			b = binary.BigEndian.AppendUint64(b, uint64(batch.timestamp))
		}
	}
	binary.BigEndian.PutUint32(b[snapshotCRCAt:], crc32.Checksum(b[snapshotHeader:], castagnoli()))
	return b
}

func decodeProducers(b []byte, offset int64, limit int) (*producers, error) {
	switch {
	case len(b) < snapshotFixed || binary.BigEndian.Uint32(b) != snapshotMagic:
		return nil, errors.New("it is no snapshot of producers")
	case b[4] != snapshotVersion:
		return nil, fmt.Errorf("version %d is not known", b[4])
	case crc32.Checksum(b[snapshotHeader:], castagnoli()) != binary.BigEndian.Uint32(b[snapshotCRCAt:]):
		return nil, errors.New("its CRC does not match")
	case int64(binary.BigEndian.Uint64(b[snapshotHeader:])) != offset:
		return nil, errors.New("its offset is not the one in its name")
	}
	count := binary.BigEndian.Uint32(b[snapshotHeader+8:])
	b = b[snapshotFixed:]
	p := newProducers(limit)
	for range count {
		known, rest, ok := decodeProducer(b)
		if !ok {
			return nil, errors.New("it is cut off")
		}
		b = rest
		p.add(known)
	}
	if len(b) != 0 || len(p.byID) != min(int(count), limit) {
		return nil, errors.New("it does not hold what its count says")
	}
	return p, nil
}

func decodeProducer(b []byte) (*producer, []byte, bool) {
	if len(b) < snapshotProducer {
		return nil, nil, false
	}
	known := &producer{
		id:    int64(binary.BigEndian.Uint64(b)),
		epoch: int16(binary.BigEndian.Uint16(b[8:])),
		seen:  int64(binary.BigEndian.Uint64(b[10:])),
		n:     int(b[18]),
	}
	b = b[snapshotProducer:]
	if known.n < 1 || known.n > keptBatches || len(b) < known.n*snapshotBatch {
		return nil, nil, false
	}
	for i := range known.n {
		known.batches[i] = producedBatch{
			firstSequence: int32(binary.BigEndian.Uint32(b)),
			lastSequence:  int32(binary.BigEndian.Uint32(b[4:])),
			base:          int64(binary.BigEndian.Uint64(b[8:])),
			timestamp:     int64(binary.BigEndian.Uint64(b[16:])),
		}
		b = b[snapshotBatch:]
	}
	return known, b, true
}

// writeSnapshot stores the table at an offset, and removes snapshots that are no
// longer needed to fall back on.
func writeSnapshot(fs FS, dir string, p *producers, offset int64) error {
	name := filepath.Base(fileName(dir, offset, producersSuffix))
	if err := writeSmallFile(fs, dir, name, p.encode(offset)); err != nil {
		return err
	}
	offsets, err := listOffsets(fs, dir, producersSuffix)
	if err != nil {
		return err
	}
	for len(offsets) > keptSnapshots {
		if err := removeIfThere(fs, fileName(dir, offsets[0], producersSuffix)); err != nil {
			return fmt.Errorf("remove an old snapshot of producers: %w", err)
		}
		offsets = offsets[1:]
	}
	return nil
}

// listOffsets returns the offsets of the files with a suffix, in order.
func listOffsets(fs FS, dir, suffix string) ([]int64, error) {
	names, err := fs.ReadDir(dir) // sorted, and the numbers are padded
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", dir, err)
	}
	var offsets []int64
	for _, name := range names {
		if offset, ok := offsetOf(name, suffix); ok {
			offsets = append(offsets, offset)
		}
	}
	return offsets, nil
}
