// Package vigil lets a death be noticed at once: a daemon watches the consumers on
// its host, and when the process of one is gone, it revokes the lease of its session.
// What the dead consumer owned is free within milliseconds then, not when the lease
// has run out. Where no daemon is near, the lease alone decides.
//
//	process_linux.go  who is at the other end of a socket, and when it is gone
//	message.go        what the two say to each other
//	secret.go         how a consumer proves that a lease is its own
//	server.go         the daemon's side: sockets, limits
//	watch.go          one process and the sessions that it has named
//	revoke.go         what is done when it is gone
//	client.go         the consumer's side
//
// A consumer connects to a unix socket and names the lease, the key of its
// registration, and a secret of which that registration holds the SHA-256: so nobody
// can have the lease of somebody else revoked. Which process it is, the daemon takes
// from the kernel, as a pidfd, which stays with that process though its number may
// come to be another's. It tells of the end of the whole process, its last thread; a
// process that is stopped has not ended, and nothing is done to it.
//
// The process that connects is the one whose end ends the session. It must be the one
// that does the work: if a child of it goes on when it is gone, the lease is revoked
// and somebody else begins, while the child still works.
//
// Only Linux can do it. Elsewhere a Client does nothing.
package vigil
