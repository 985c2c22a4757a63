// Package inspect looks at a registry from outside and says what it sees: whether
// something in it is wrong, who did what, which brokers there are. It changes
// nothing, save for the repairs that it is told to make.
//
//	tree.go      the keys at one revision, read as records
//	check.go     what is wrong with them (check_topics.go, check_groups.go)
//	finding.go   what each finding means, and what to do
//	confirm.go   which suspicions are still true at a second look
//	repair.go    what can be repaired without harm
//	doctor.go    the driver of all that: it reads, asks the brokers, waits
//	narrate.go   changes as sentences; follow.go brings the changes
//	brokers.go   the brokers, and whether they answer
//
// Check, Confirm and Narrator are functions of what was read; only the drivers
// talk to the store and the brokers.
package inspect
