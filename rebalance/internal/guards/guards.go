// Package guards names the checks of the member machine that safety or
// convergence rests on, so that a simulation can leave one out and see that its
// loss is noticed. Nothing outside rebalance can reach it.
package guards

// Off says which checks a machine leaves out. The zero value leaves out none.
type Off struct {
	// Recompute: what a stale claim asked for is claimed again, from the newest snapshot.
	Recompute bool
	// Registration: nothing is divided by a snapshot that does not show the member's
	// registration as it wrote it; if that was deleted, the member registers again.
	Registration bool
	// Outlived: what is held of a topic that was deleted and made again is given up.
	Outlived bool
	// Token: Drained and Fenced count only for the ownership that they name.
	Token bool
	// WatchFrom: the watch of an owner key begins at the revision at which its own
	// claim was decided.
	WatchFrom bool
	// Doubt: a claim whose reply was lost may have been carried out, or may yet be.
	Doubt bool
	// Target: a claim under sticky is conditional on the target record that it follows.
	// Without it the partition is given up again once the new target is seen: only a
	// move too many, which neither safety nor convergence notices.
	Target bool
	// Refusal: nothing is claimed in a group that cannot be divided.
	Refusal bool
}
