// Package simulation proves by random schedules what a consumer group promises. It
// holds tests only.
//
// A schedule is 2 to 50 members in one goroutine and in virtual time: the real
// rebalance.Member, registry.Claim, Release, WriteTarget and offsets.Registry, on
// the twin in memory; only the driver is simulated. Members join, leave, crash, stand
// still, lose sessions; requests and answers are lost or late; watches lag and break;
// topics, partitions and brokers come and go; people delete keys. Then nothing goes
// wrong any more, and the group must become quiet. One seed decides everything.
//
// An observer judges what users see: records handed over, commits admitted, and who
// becomes an owner. After every step no two members deliver a partition, nothing
// acknowledged is lost, and no committed offset goes back. After quiet each partition
// has the owner that the strategy says, nothing is left of members that are gone,
// history tells it all, and a change moves what it must once and touches nothing else.
//
//	go test ./rebalance/simulation                                               some schedules, and all mutants
//	go test ./rebalance/simulation -run TestSchedules -schedules 5000 -race      what CI runs
//	go test ./rebalance/simulation -run TestSchedules -schedules 50000           and this
//	go test ./rebalance/simulation -run TestSchedules -schedules 1000000 -timeout 0
//	go test ./rebalance/simulation -run TestReplay -seed N -v                    one schedule, told step by step
//
// TestMutants leaves out one guard at a time, and something must notice. Of these
// guards only economy is at stake, for what they prevent is mended by the next
// snapshot (with -lenient nothing notices their loss): the member's own registration
// and the registrations since the snapshot, in a claim and in a target; that a stale
// claim is computed anew; the target in a claim; that a target replaces the one that
// it was made from. All others are for safety, or for a group to become quiet at all.
//
// Files: world_test.go, time and what the registry brings; link_test.go, what goes
// wrong between a member and the registry; process_test.go and delivery_test.go, the
// simulated driver; observer_test.go, the judge; schedule_test.go, what happens when.
package simulation
