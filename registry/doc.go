// Package registry is "who is here, and who owns what" on etcd: the tree in which
// brokers and consumers announce themselves, and the few primitives that it takes,
// which any program can use for its own keys.
//
// A [Store] is the key-value store underneath: package registry/etcd opens a real
// one, package registry/memory is a twin in memory and in virtual time, and package
// registry/registrytest starts an etcd for a test in one line.
//
// A [Session] is one lease, renewed until Close or loss. It has a deadline of its
// own, earlier than the store's: the process knows that it is dead before anybody
// else can have been given what it held. Look at [Session.Alive] before acting in
// its name. Loss is final: what comes after is another session.
//
// [Announce] keeps one key in the registry as long as the process lives. After a
// loss it revokes the old lease, takes a new one, and registers again under the same
// key. A key that another live process holds is an error that names the holder
// ([HeldError]). [Register] is the single step for those who keep sessions
// themselves.
//
// A [View] is a live copy of what stands under some prefixes, always as it was at
// one revision of the store: a decision over several prefixes never mixes an old
// state of one with a new state of another. After a gap it delivers the difference,
// deletions included. Snapshots cost nothing to take, however big the view is.
//
// [Own] makes a key this process's alone: it waits until the key is free and creates
// it. Owning is known to end with the session, but no process can know at every
// moment whether it still owns: a stopped one wakes up and goes on where it was. So
// each ownership has a fencing token, the revision at which its key was created,
// which grows from owner to owner. Writes to the same store carry
// [Ownership.Fence] as a condition; other systems can be given the token, and
// refuse a smaller one than they have seen.
//
// What programs and logs should know is told as events: [SessionEvent],
// [AnnounceEvent], [ViewEvent]. They print themselves.
//
// # The tree of brokers and consumers
//
// [Root] and [Group] name its paths, and the record types what stands there, each
// with an example. [Claim] and [Release] take and give up owner keys of many
// partitions under one guard.
package registry
