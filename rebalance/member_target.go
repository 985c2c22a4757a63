package rebalance

import "time"

// Under sticky all members follow one record, the target, and any of them may
// write it. So that a change costs one proposal and not one of each member, the
// member with the lowest id proposes at once, and each other only if by its turn
// nobody has.
const (
	firstTurn = 50 * time.Millisecond
	nextTurn  = 25 * time.Millisecond
	lastTurn  = 2 * time.Second
)

// turn is how long a member waits for those with lower ids.
func turn(rank int) time.Duration {
	if rank == 0 {
		return 0
	}
	return min(firstTurn+time.Duration(rank-1)*nextTurn, lastTurn)
}

// record is the mod-revision of a snapshot's target record, readable or not; 0 if
// there is none.
func (s *Snapshot) record() int64 {
	if s.Target != nil {
		return s.Target.Record
	}
	return s.TargetRecord
}

// expectTarget sets the time at which this member is to propose a target. As long
// as the record stays the same, so does the time: a record that changes shows that
// somebody is at work, even if it is outdated again.
func (m *Member) expectTarget(now time.Duration) {
	if !m.outdated || m.proposal != nil {
		return
	}
	rank := 0
	for _, x := range m.snapshot.Members {
		if x.ID < m.id {
			rank++
		}
	}
	at := now + turn(rank)
	if record := m.snapshot.record(); !m.expecting || at < m.proposeAt || record != m.awaited {
		m.expecting, m.proposeAt, m.awaited = true, at, record
	}
}

// propose sends the next target when it is this member's turn.
func (m *Member) propose(now time.Duration) []Action {
	if !m.expecting || now < m.proposeAt || m.proposal != nil {
		return nil
	}
	m.expecting = false
	if m.considered != m.snapshot {
		return nil // what was put off comes, and with it another time
	}
	target := NextTarget(*m.snapshot)
	value, err := target.Encode()
	if err != nil {
		// No other member could write it either; another snapshot may make it fit.
		return m.refuse(err.Error())
	}
	m.number++
	m.proposal = &Propose{Number: m.number, Target: target, Value: value, Replace: m.snapshot.record(),
		Registration: *m.registration, Snapshot: m.snapshot.Revision}
	return append(m.refuse(""), *m.proposal)
}

func (m *Member) proposeAnswered(now time.Duration, e ProposeAnswered) []Action {
	p := m.proposal
	if p == nil || p.Number != e.Number {
		return nil
	}
	m.proposal = nil
	if e.Stale || e.Unknown {
		m.expectTarget(now)
		if m.expecting && m.snapshot.Revision == p.Snapshot {
			// From the same snapshot it would be refused again, or fail again.
			m.proposeAt = max(m.proposeAt, now+m.retrying)
			m.retrying = min(2*m.retrying, maxRetryPause)
		}
		return nil
	}
	m.retrying = minRetryPause
	if m.snapshot.Revision >= e.Revision {
		m.expectTarget(now)
		return nil // it shows the record, or what came after
	}
	written := *p.Target
	written.Record = e.Revision
	m.adopted = &written
	s := *m.snapshot
	s.Target, s.TargetRecord = m.adopted, e.Revision
	put := m.storm.divideAt != 0
	m.snapshot = &s
	if put {
		return nil // the snapshot has changed since, and that is still to be looked at
	}
	return m.divide(now)
}
