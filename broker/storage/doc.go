// Package storage is the log of one partition on disk: record batches in
// segments with Kafka's file layout, sparse indexes by offset and by time, the
// state of idempotent producers, and recovery after a crash.
//
// What a caller may rely on:
//
//   - Append writes to the operating system and returns. One sync is shared by
//     all appends that came while the one before it ran. Durable is the offset
//     below which everything is synced; reads never go past it, so nobody sees
//     what a crash may take away.
//   - A segment is synced, its indexes too, and the directory, before the next
//     one takes its first byte. So only the newest segment can be torn.
//   - A sync that failed is never tried again: the pages may be gone while the
//     next sync says that all is well. The log stays readable and refuses appends.
//
// All disk access goes through FS, so that tests can hurt it on purpose: MemFS
// forgets what was not synced, FaultFS returns errors.
//
//	batches      header, checks on what comes from outside   batch.go, records.go
//	files        segments, indexes, small files              segment.go, index.go, files.go
//	log          open, append, sync, read, times             log.go, append.go, sync.go, read.go, times.go
//	recovery     what is left after a crash                  recovery.go
//	producers    sequence numbers                            producers.go, snapshot.go
package storage
