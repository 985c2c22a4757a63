package inspect

import (
	"cmp"
	"slices"

	"github.com/muster-io/muster/registry"
)

// Severity says how bad a finding is.
type Severity string

const (
	Error   Severity = "error"   // somebody waits, or data is at stake
	Warning Severity = "warning" // nothing is lost yet
	Notice  Severity = "notice"  // worth knowing; a healthy registry may have it
)

// Code names a kind of finding. Codes do not change.
type Code string

const (
	CodeOwnerWithoutMember     Code = "owner-without-member"
	CodeOwnerWithoutLease      Code = "owner-without-lease"
	CodeOwnerOtherLease        Code = "owner-under-other-lease"
	CodeOwnerOfDeletedTopic    Code = "owner-of-deleted-topic"
	CodeOwnerUnknownPartition  Code = "owner-of-unknown-partition"
	CodeMemberWithoutLease     Code = "member-without-lease"
	CodePartitionUnowned       Code = "partition-unowned"
	CodeOffsetBelowZero        Code = "offset-below-zero"
	CodeOffsetPastEnd          Code = "offset-past-log-end"
	CodeOffsetBeforeStart      Code = "offset-before-log-start"
	CodeOffsetOfDeletedTopic   Code = "offset-of-deleted-topic"
	CodeOffsetUnknownPartition Code = "offset-of-unknown-partition"
	CodeBrokerWithoutLease     Code = "broker-without-lease"
	CodeBrokerSilent           Code = "broker-silent"
	CodeStateMissing           Code = "partition-state-missing"
	CodeStateSurplus           Code = "partition-state-surplus"
	CodeStateUnknownLeader     Code = "state-unknown-leader"
	CodeStateUnknownISR        Code = "state-unknown-isr"
	CodeNoLeader               Code = "partition-without-leader"
	CodeLeaderNotAlive         Code = "leader-not-alive"
	CodeCountMismatch          Code = "partition-count-mismatch"
	CodeCountMissing           Code = "partition-count-missing"
	CodeCountWithoutLease      Code = "partition-count-without-lease"
	CodeRestOfDeletedTopic     Code = "rest-of-deleted-topic"
	CodeDeletionUnfinished     Code = "deletion-unfinished"
	CodeRecordUnderLease       Code = "record-under-lease"
	CodeUnreadableRecord       Code = "unreadable-record"
	CodeUnreadableName         Code = "unreadable-name"
	CodeUnknownKey             Code = "unknown-key"
)

// Codes are all codes, in the order in which findings are shown.
func Codes() []Code {
	return []Code{
		CodeOwnerWithoutMember, CodeOwnerWithoutLease, CodeOwnerOtherLease, CodeOwnerOfDeletedTopic, CodeOwnerUnknownPartition,
		CodeMemberWithoutLease, CodePartitionUnowned, CodeOffsetBelowZero, CodeOffsetPastEnd, CodeBrokerWithoutLease,
		CodeBrokerSilent, CodeStateUnknownLeader, CodeStateUnknownISR, CodeUnreadableRecord, CodeUnreadableName,
		CodeNoLeader, CodeLeaderNotAlive, CodeStateMissing, CodeStateSurplus, CodeCountMismatch, CodeCountMissing,
		CodeCountWithoutLease, CodeRecordUnderLease, CodeOffsetOfDeletedTopic, CodeOffsetUnknownPartition, CodeRestOfDeletedTopic,
		CodeDeletionUnfinished, CodeOffsetBeforeStart, CodeUnknownKey,
	}
}

// Explanation is what there is to know of a Code.
type Explanation struct {
	Severity Severity
	Means    string
	Do       string
}

// Explain returns what a code means and what to do about it.
func (c Code) Explain() Explanation {
	switch c {
	case CodeOwnerWithoutMember:
		return Explanation{Error, "an owner key names a consumer that is not registered, so no member may claim the partition",
			"repair it; the members claim the partition at once"}
	case CodeOwnerWithoutLease:
		return Explanation{Error, "an owner key is bound to no lease: it would outlive its owner, and nobody could take over",
			"repair it: the lease of the member that it names is given back to it, or it is deleted if it names none"}
	case CodeOwnerOtherLease:
		return Explanation{Error, "an owner key names a registered member, and is kept alive by another session than the member's: two processes may use one consumer id",
			"find the second process (muster registry get shows the lease) and stop it"}
	case CodeOwnerOfDeletedTopic:
		return Explanation{Error, "somebody owns a partition of a topic that does not exist",
			"repair it; if it comes back, a consumer does not know that the topic was deleted: restart it"}
	case CodeOwnerUnknownPartition:
		return Explanation{Error, "somebody owns a partition that the topic record does not have, under this home and number",
			"repair it; if it comes back, restart the consumer that the key names"}
	case CodeMemberWithoutLease:
		return Explanation{Error, "a registration is bound to no lease: members leave it out, since it would outlive its process",
			"repair it; a process that is alive registers again by itself"}
	case CodePartitionUnowned:
		return Explanation{Error, "a member is due this partition, has been for the whole time, and does not claim it: nobody reads it",
			"look at the log of the member that is named; if it hangs, restart it"}
	default:
		return c.explainOffset()
	}
}

func (c Code) explainOffset() Explanation {
	switch c {
	case CodeOffsetBelowZero:
		return Explanation{Error, "an offset below 0 is no position; the group cannot begin from it",
			"repair it: it is deleted, and the group begins as auto.offset.reset says"}
	case CodeOffsetPastEnd:
		return Explanation{Error, "the group has committed an offset past the end of the log: the log lost records, or the topic was deleted and created again",
			"decide where the group shall go on, stop its consumers, and set the offset"}
	case CodeOffsetBeforeStart:
		return Explanation{Notice, "records that the group has not read are gone by retention; it goes on as auto.offset.reset says",
			"nothing, if the group is not used any more; else let it read faster or keep records longer"}
	case CodeOffsetOfDeletedTopic:
		return Explanation{Warning, "an offset is left of a topic that does not exist: a new topic of that name would be read from there",
			"leave it if it was kept on purpose; else repair it, naming the code with --only"}
	case CodeOffsetUnknownPartition:
		return Explanation{Warning, "an offset stands under a partition that the topic record does not have, by number or home: nobody reads it",
			"leave it if the partition is to come; else repair it, naming the code with --only"}
	default:
		return c.explainBroker()
	}
}

func (c Code) explainBroker() Explanation {
	switch c {
	case CodeBrokerWithoutLease:
		return Explanation{Error, "a broker record is bound to no lease: clients are sent to it for ever, and its daemon cannot start again",
			"if its daemon runs, stop it; then repair it; then start the daemon"}
	case CodeBrokerSilent:
		return Explanation{Error, "a broker is registered, keeps its lease, and does not answer at the address of its record",
			"see whether the address can be reached from here (--advertise), and whether the daemon hangs"}
	case CodeStateUnknownLeader:
		return Explanation{Error, "the state of a partition names a leader that is none of its replicas: clients are sent to a broker without the data",
			"repair it, if the partition has one replica; else correct the state by hand"}
	case CodeStateUnknownISR:
		return Explanation{Error, "the state of a partition counts brokers as in sync that are none of its replicas",
			"repair it, if the partition has one replica; else correct the state by hand"}
	case CodeNoLeader:
		return Explanation{Warning, "the state of a partition says that it has no leader: it can be neither written nor read",
			"start the brokers of its replicas"}
	case CodeLeaderNotAlive:
		return Explanation{Warning, "a broker that leads partitions is not registered: they can be neither written nor read",
			"start its daemon"}
	default:
		return c.explainTopic()
	}
}

func (c Code) explainTopic() Explanation {
	switch c {
	case CodeStateMissing:
		return Explanation{Warning, "a partition of the topic record has no state; it counts as led by its first replica",
			"repair it: that state is written"}
	case CodeStateSurplus:
		return Explanation{Warning, "a state is there for a partition that the topic record does not have",
			"repair it: the state is deleted"}
	case CodeCountMismatch:
		return Explanation{Warning, "the number of partitions that a broker states is not that of the topic record",
			"repair it: the number is corrected; if it comes back, restart the daemon"}
	case CodeCountMissing:
		return Explanation{Warning, "a broker that is alive does not state how many partitions of a topic it has",
			"look at its log; restart its daemon"}
	case CodeCountWithoutLease:
		return Explanation{Warning, "a broker's number of partitions is bound to no lease, and would outlive the broker",
			"repair it: it is deleted; restart the daemon, if the number is missed"}
	case CodeRestOfDeletedTopic:
		return Explanation{Warning, "settings, states or counts are left of a topic that does not exist, and would be taken over by a new one of that name",
			"repair it: they are deleted"}
	case CodeDeletionUnfinished:
		return Explanation{Warning, "the deletion of a topic was begun and does not go on; no topic of that name can be created",
			"start a daemon: it finishes what was left; or delete the topic once more"}
	case CodeRecordUnderLease:
		return Explanation{Warning, "a key that is to stay is bound to a lease: it goes when somebody's session ends, and backups leave it out",
			"repair it: it is written anew without a lease; see who writes it"}
	case CodeUnreadableRecord:
		return Explanation{Error, "a value cannot be read as what its key says; everybody goes on without it",
			"look at it with muster registry get, and correct or delete it with etcdctl"}
	case CodeUnreadableName:
		return Explanation{Error, "a key names something in a spelling that no name is written in; nobody reads it",
			"delete it with etcdctl, and see who writes it"}
	}
	return Explanation{Notice, "a key stands among Muster's that Muster does not know", "see who writes it"}
}

// Finding is one thing that is wrong. Nil fields are not part of it.
type Finding struct {
	Code      Code     `json:"code"`
	Severity  Severity `json:"severity"`
	Key       string   `json:"key"` // from the root
	Group     *string  `json:"group"`
	Member    *string  `json:"member"`
	Topic     *string  `json:"topic"`
	Partition *int32   `json:"partition"`
	Broker    *int32   `json:"broker"`
	What      string   `json:"what"`  // what was seen
	Means     string   `json:"means"` // what that means
	Do        string   `json:"do"`
	Repair    *Repair  `json:"repair"` // nil if none is safe
	Repaired  bool     `json:"repaired"`

	suspicion bool             // to be confirmed by a second look
	quiet     []span           // nothing of this may change between the looks
	lease     registry.LeaseID // that keeps the key alive: wait until it would have ended
}

// span is a key, or all keys that begin with it.
type span struct {
	key    string
	prefix bool
}

func newFinding(c Code, p registry.Location, what string) Finding {
	e := c.Explain()
	f := Finding{Code: c, Severity: e.Severity, Key: p.Path, What: what, Means: e.Means, Do: e.Do}
	if p.Group != "" {
		f.Group = &p.Group
	}
	if p.Member != "" {
		f.Member = &p.Member
	}
	if p.Topic != "" {
		f.Topic = &p.Topic
	}
	if p.Problem != nil {
		return f
	}
	switch p.Kind {
	case registry.KindBroker, registry.KindCount:
		f.Broker = &p.Broker
	case registry.KindState, registry.KindOwner, registry.KindOffset:
		f.Partition = &p.Partition.Number
	}
	return f
}

// inOrder sorts findings as they are shown: by severity, code and key.
func inOrder(list []Finding) {
	rank := map[Severity]int{Error: 0, Warning: 1, Notice: 2}
	codes := map[Code]int{}
	for i, c := range Codes() {
		codes[c] = i
	}
	slices.SortStableFunc(list, func(a, b Finding) int {
		return cmp.Or(cmp.Compare(rank[a.Severity], rank[b.Severity]), cmp.Compare(codes[a.Code], codes[b.Code]),
			cmp.Compare(a.Key, b.Key))
	})
}
