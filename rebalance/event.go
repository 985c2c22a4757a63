package rebalance

import (
	"github.com/muster-io/muster/registry"
)

// An Event is something that happened to a member: what goes into Member.Step.
type Event interface{ event() }

// Registered: the member has a session and stands in the registry. It comes
// again when the registration was deleted by somebody and renewed.
type Registered struct{ Registration registry.Registration }

// SessionLost: the session is over. Whatever the member owned is not its own any
// more, and nothing of it may be delivered or committed.
type SessionLost struct{}

// Snapshot: group and topics as they stood at one revision.
type Snapshot struct {
	Revision int64
	Topology Topology
	// Incarnations has the revision at which each topic's record was created. An owner
	// key that is older belongs to a deleted topic of the same name.
	Incarnations map[string]int64
	Members      []MemberInfo
	// Registered is the revision at which this member's registration was last
	// written, 0 if it is not there.
	Registered int64
	// Target is the group's target record; nil if there is none, or none that can be read.
	Target *Target
	// TargetRecord is the mod-revision of the record, readable or not; 0 if there is none.
	TargetRecord int64
}

// ClaimAnswered: the Claim action of that number was carried out. Outcomes has
// one entry for each partition of the action, in order, or fewer if Err ended it.
type ClaimAnswered struct {
	Number   uint64
	Revision int64 // of the last transaction
	Outcomes []ClaimOutcome
	Stale    bool // the guard did not hold; the remaining claims had no effect
	Unknown  bool // the reply was lost; the remaining claims may have taken effect
}

// ClaimOutcome is what became of one claim.
type ClaimOutcome struct {
	Mine   bool
	Token  int64  // create-revision of the owner key, whoever holds it
	Stream int32  // with Mine: the stream that the key names; -1 if it is none of the member's
	Holder string // without Mine: the thread that has it, for people
	// Revision at which it holds, where the claims took more than one transaction. A
	// key that was held in the first may be free before the last. 0 is that of the answer.
	Revision int64
}

// ProposeAnswered: the Propose action of that number was carried out.
type ProposeAnswered struct {
	Number   uint64
	Revision int64 // of the transaction; without Stale and Unknown the record's mod-revision
	Stale    bool  // its conditions did not hold; nothing was written
	Unknown  bool  // the reply was lost; it may have been written, or may yet be
}

// Drained: delivery of a revoked partition has stopped and what the application
// finished is committed, or the driver gave that up.
type Drained struct {
	Partition registry.Partition
	Token     int64
}

// ReleaseAnswered: the Release action of that number was carried out, or failed
// with an unknown outcome.
type ReleaseAnswered struct {
	Number uint64
	Failed bool
}

// OwnerSeen: the owner key of a watched partition, as of a revision.
type OwnerSeen struct {
	Partition registry.Partition
	Revision  int64
	Exists    bool
	Mine      bool // it stands under this member's lease
	Token     int64
	Owner     string // the thread that the key names, for people
}

// Fenced: a commit was refused because the owner key is not the one of Token.
type Fenced struct {
	Partition registry.Partition
	Token     int64
}

// Tick: the time that Member.Wake named has come.
type Tick struct{}

// Leaving: give up everything, in order, then leave.
type Leaving struct{}

func (Registered) event()      {}
func (SessionLost) event()     {}
func (Snapshot) event()        {}
func (ClaimAnswered) event()   {}
func (ProposeAnswered) event() {}
func (Drained) event()         {}
func (ReleaseAnswered) event() {}
func (OwnerSeen) event()       {}
func (Fenced) event()          {}
func (Tick) event()            {}
func (Leaving) event()         {}

// An Action is what the driver of a member must do: what comes out of Member.Step.
type Action interface{ action() }

// Claim: write owner keys, guarded by the registration, by the topics, and by what the
// share was computed from: the target record if Target is set, else the registrations of
// the snapshot; answer with ClaimAnswered.
type Claim struct {
	Number       uint64
	Registration registry.Registration
	Snapshot     int64
	Incarnations map[string]int64 // of topics, as in the snapshot
	Wants        []Want
	// Target is the mod-revision that the group's target record must still have; 0 if
	// the group does not follow one.
	Target int64
	Reason string // what made the partitions due, for people
}

// Propose: write the group's target record, if its mod-revision is Replace (0: if
// there is none), the registration is unchanged and nobody registered after
// Snapshot; answer with ProposeAnswered.
type Propose struct {
	Number       uint64
	Target       *Target
	Value        []byte // the target, encoded
	Replace      int64
	Registration registry.Registration
	Snapshot     int64
}

// Want is a partition that a member is due, and the stream that is to read it.
type Want struct {
	Partition registry.Partition
	Stream    int32
}

// Deliver: the partition is owned; begin to hand out its records.
type Deliver struct {
	Want
	Token int64
}

// Revoke: stop delivery, let the application finish the record in hand, commit;
// answer with Drained. Ownership lasts until then.
type Revoke struct {
	Partition registry.Partition
	Token     int64
}

// Lose: ownership is gone already, or worth nothing any more since the topic is
// another one; stop at once and commit nothing.
type Lose struct {
	Partition registry.Partition
	Token     int64
	Reason    string
}

// Release: delete owner keys that are still this member's; answer with ReleaseAnswered.
type Release struct {
	Number uint64
	Held   []Held
	Reason string // why they are given up, for people
}

// Held is an owner key of this member; Token 0 means whatever stands there under
// the member's lease.
type Held struct {
	Partition registry.Partition
	Token     int64
}

// Watch: report the owner key's changes after a revision as OwnerSeen, until Unwatch.
type Watch struct {
	Partition registry.Partition
	After     int64
}

// Unwatch ends a Watch.
type Unwatch struct{ Partition registry.Partition }

// Reregister: the registration is gone though the session lives; register again
// and say Registered.
type Reregister struct{}

// Rebalanced tells that a new share was computed; for logs and metrics.
type Rebalanced struct {
	Revision int64
	Strategy string
	Members  int
	Share    int
	Reason   string    // what is different from the snapshot before, for people
	Kind     CauseKind // of Reason
}

// Refused tells that the group cannot be divided, and why: the member keeps what
// it holds and claims nothing. It comes once for each reason, and with an empty
// Reason when that is over.
type Refused struct{ Reason string }

// Left: everything is released; delete the registration and end the session.
type Left struct{}

func (Claim) action()      {}
func (Propose) action()    {}
func (Refused) action()    {}
func (Deliver) action()    {}
func (Revoke) action()     {}
func (Lose) action()       {}
func (Release) action()    {}
func (Watch) action()      {}
func (Unwatch) action()    {}
func (Reregister) action() {}
func (Rebalanced) action() {}
func (Left) action()       {}
