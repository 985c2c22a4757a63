package rebalance

// CauseKind is what a Cause is first of all about, from a set that labels of metrics
// can be made of.
type CauseKind string

// Kinds of a Cause, in the order in which it tells of them.
const (
	CauseStrategy     CauseKind = "strategy_changed"
	CauseLeft         CauseKind = "member_left"
	CauseJoined       CauseKind = "member_joined"
	CauseSubscription CauseKind = "subscription_changed"
	CauseTopics       CauseKind = "topics_changed"
	CauseTarget       CauseKind = "target_changed"
)

// CauseKinds are all of them.
func CauseKinds() []CauseKind {
	return []CauseKind{CauseStrategy, CauseLeft, CauseJoined, CauseSubscription, CauseTopics, CauseTarget}
}

// KindOfCause is the kind of Cause(before, after); empty if that is.
func KindOfCause(before, after Snapshot) CauseKind {
	was, is := Agree(before.Members), Agree(after.Members)
	left, joined, other := memberChanges(before.Members, after.Members)
	switch {
	case was != is && len(before.Members) > 0 && len(after.Members) > 0:
		return CauseStrategy
	case len(left) > 0:
		return CauseLeft
	case len(joined) > 0:
		return CauseJoined
	case len(other) > 0:
		return CauseSubscription
	case len(topicsCause(before, after)) > 0:
		return CauseTopics
	case (&before).record() != (&after).record() && is == StrategySticky:
		return CauseTarget
	}
	return ""
}
