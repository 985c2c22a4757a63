// Package wire speaks Kafka's protocol on a socket: frames, headers, the version
// table, and the order of answers. What a request means is the handlers' business
// (package api); the codec is kmsg.
//
// A connection has two goroutines:
//
//	         ┌──────── reader ────────┐   pending    ┌───── writer ─────┐
//	socket → │ frame → decode → Handler │ → Answer … → │ Answer → encode  │ → socket
//	         └────────────────────────┘  (bounded)   └──────────────────┘
//
// The reader calls the Handler, which does the part of a request that must happen
// in the order of arrival (an append) and returns an Answer: the part that may
// wait (for an fsync, for more data). The writer runs the Answers one by one, in
// the same order, which is the order in which clients expect them. So the appends
// of pipelined produce requests are all in the log before the first is answered,
// and share an fsync; and the reader, which never waits for an Answer, notices at
// once when the client goes away, and cancels what the writer waits for.
//
// Invariants:
//   - nothing is allocated before the size that asks for it has been checked;
//   - a bad frame ends its own connection, with one line in the log, after the
//     requests before it have been answered;
//   - requests read but not answered are bounded in number and bytes; at the bound
//     the reader stops reading, and TCP makes the client wait.
package wire
