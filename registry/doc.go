// Package registry is the tree in which brokers and consumers announce
// themselves: its paths, its typed records, sessions that are one lease each,
// ephemeral registrations, owner keys that are claimed and released under a
// fence, and views that follow parts of the tree at consistent revisions.
//
// It runs on a Store. Package registry/etcd has the real one, package
// registry/memory a twin in memory for tests.
//
//	session  one lease, its own deadline     OpenSession, Session.Alive
//	key      ephemeral registration          Register
//	owner    claim and release               Claim, Release
//	view     prefixes at one revision        OpenView, View.Snapshot
package registry
