// Package run does the work of a group member in child processes: one for each
// partition that is owned, whatever language it is written in. It is what the
// command muster run is made of, and is for a process of its own: it makes the
// process a subreaper, and takes what descends from it for its children.
//
// A child is started when its partition is owned, told to stop by SIGTERM when the
// partition is to be given up, and killed after a grace; only when nothing of it is
// left, the partition is given up. A child whose ownership is lost is killed.
//
// The children belong to a watchdog, a second process in a session of its own, so
// that they end in time also when the first one is stopped or killed: it is told
// until when each child may live, again and again as the lease is renewed, kills a
// child whose time is over, and all of them when the pipe closes over which it is
// told; then it revokes the lease, if that was not given up. When the watchdog dies
// its children do, and what has detached itself from them falls to the first process,
// which kills it and starts another watchdog.
//
// How it is made: child.go decides about one child; runner.go feeds it and is the
// membership.Work; keeper_linux.go is the first process's end of the watchdog,
// watchdog_linux.go the second process, protocol.go what they say to each other;
// processes_linux.go knows /proc.
package run
