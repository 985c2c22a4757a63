package simulation

import "github.com/muster-io/muster/rebalance/internal/guards"

// guard is one of the conditions and habits that safety or convergence rests on.
type guard int

const (
	none guard = iota
	createIfAbsent
	ownRegistration
	noNewRegistration
	topicIncarnation
	releaseCompare
	recomputeStale
	ownDeadline
	deliveryCheck
	commitFence
	previousRevision
	offsetsAfterClaim
	drainFirst
	lastCommit
	watchFromClaim
	claimDoubt
	releaseDoubt
	reregister
	rewatch
	claimTarget
	targetCompare
	targetNewest
	targetRegistration
	machineRecompute
	machineRegistration
	machineOutlived
	machineToken
	machineWatchFrom
	machineDoubt
	machineTarget
	machineRefusal
	keepFlowing
	commitFinished
	leaveInOrder
	numGuards
)

var guardNames = [numGuards]string{
	none:              "none",
	createIfAbsent:    "an owner key is created only if it is absent",
	ownRegistration:   "a claim requires the member's own registration",
	noNewRegistration: "a claim requires that nobody registered since its snapshot",
	topicIncarnation:  "a claim requires the topic of its snapshot",
	releaseCompare:    "a release compares the token",
	recomputeStale:    "a stale claim is computed anew",
	ownDeadline:       "a session ends before its lease does",
	deliveryCheck:     "the session is looked at just before each hand-over",
	commitFence:       "a commit compares the token",
	previousRevision:  "a commit compares the offset's revision",
	offsetsAfterClaim: "offsets are read after the claim",
	drainFirst:        "a partition is released only when its handler has finished",
	lastCommit:        "a partition is released only when what was finished is committed",
	watchFromClaim:    "an owner key is watched from the claim's revision on",
	claimDoubt:        "a claim whose answer was lost may have taken effect",
	releaseDoubt:      "a release whose answer was lost may have had no effect",
	reregister:        "a registration that was deleted is renewed",
	rewatch:           "an owner key is read when its watch broke",

	claimTarget:        "a claim under sticky requires the target that it follows",
	targetCompare:      "a target replaces only the one that it was made from",
	targetNewest:       "a target requires that nobody registered since its snapshot",
	targetRegistration: "a target requires the member's own registration",

	machineRecompute:    "machine: what a stale claim asked for is computed anew",
	machineRegistration: "machine: only a snapshot with the own registration counts",
	machineOutlived:     "machine: what is held of a former topic is given up",
	machineToken:        "machine: news of an ownership are about that one only",
	machineWatchFrom:    "machine: an owner key is watched from its claim on",
	machineDoubt:        "machine: a claim whose answer was lost is in doubt",
	machineRefusal:      "machine: nothing is claimed in a group that cannot be divided",
	keepFlowing:         "what does not move is not touched",
	commitFinished:      "a commit covers what was finished, not what was handed over",
	leaveInOrder:        "a member that leaves takes its registration away",
	machineTarget:       "machine: a claim names the target that it follows",
}

func (g guard) String() string { return guardNames[g] }

// inMachine is what the member machine leaves out.
func (g guard) inMachine() guards.Off {
	return guards.Off{
		Recompute:    g == machineRecompute,
		Registration: g == machineRegistration,
		Outlived:     g == machineOutlived,
		Token:        g == machineToken,
		WatchFrom:    g == machineWatchFrom,
		Doubt:        g == machineDoubt,
		Target:       g == machineTarget,
		Refusal:      g == machineRefusal,
	}
}
