package etcd

import (
	"context"
	"errors"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"
)

// conn is the connection to one member. What runs on it ends when the Store turns to
// another.
type conn struct {
	endpoint string
	client   *clientv3.Client
	leases   pb.LeaseClient
	ctx      context.Context // for streams: ends when the Store turns away
	leave    context.CancelFunc
	calls    context.Context // for calls: ends soon after that
	endCalls context.CancelFunc
	term     context.Context // likewise, and soon after the member has a new leader
	endTerm  context.CancelFunc
}

func (c *conn) newTerm() { c.term, c.endTerm = context.WithCancel(c.calls) }

// closeLimit is how long the etcd client may take to close. It waits for its streams,
// and has been seen to wait without end for a watch that ended together with one.
const closeLimit = 2 * time.Second

// close lets the connection go, at the latest after closeLimit: what the client then
// still waits for is a goroutine or two of its own, without a connection.
func (c *conn) close() {
	c.leave()
	c.endCalls()
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		c.client.Close()
	}()
	late := time.NewTimer(closeLimit)
	defer late.Stop()
	select {
	case <-closed:
	case <-late.C:
		c.client.ActiveConnection().Close()
	}
}

// bind ends a context also with another one.
func bind(ctx, with context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(with, cancel)
	return ctx, func() { stop(); cancel() }
}

const (
	// questionLimit bounds a question to a member: one that is only slow is to be
	// heard, while the others are asked. dialLimit bounds the way to one, where etcd
	// takes its time to check a password.
	questionLimit = 3 * time.Second
	dialLimit     = 3 * time.Second
	// doubtLimit is how long a call without a deadline waits while the member in use
	// is in doubt; one with a deadline waits until lastWord before it, but no longer
	// than patientLimit, which an election on a busy machine takes. It is then made
	// all the same, so that its error is that of the store.
	doubtLimit   = 1500 * time.Millisecond
	patientLimit = 5 * time.Second
	lastWord     = time.Second
	// electedLimit is how long the calls of before an election may take after it. What
	// a member has sent to a leader that is lost is not answered otherwise.
	electedLimit = 300 * time.Millisecond
	// renewedLimit is how long calls may take on a connection that was replaced though
	// its member answers.
	renewedLimit = 5 * time.Second
)

// conns holds the connection in use, and drives failover. Its goroutine alone opens
// and leaves connections.
type conns struct {
	dial   func(ctx context.Context, endpoint string) (*conn, error)
	log    *slog.Logger
	ctx    context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup
	events chan connEvent

	began time.Time

	renewing sync.Mutex // one at a time

	mu      sync.Mutex
	current *conn
	settled chan struct{} // closed when doubt ends, nil without doubt
	why     string        // with doubt
}

// connEvent is an answer, the loss of a connection, or a new one to the same member.
type connEvent struct {
	conn   *conn // that was asked, lost, or is new; nil if there is none
	answer *answer
	lost   bool
	former *conn         // in place of which conn is new
	taken  chan struct{} // if there, closed when the event has had its effect
}

// newConns takes over c, the member that gave the first answer.
func newConns(o Options, dial func(context.Context, string) (*conn, error), c *conn, first *answer) *conns {
	m := &conns{dial: dial, log: o.Logger, events: make(chan connEvent), current: c, began: time.Now()}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	f := newFailover(0, o.Endpoints, first)
	m.watch(c)
	m.work.Go(func() { m.run(f) })
	return m
}

func (m *conns) close() {
	m.cancel()
	m.work.Wait()
}

// use returns the connection to make a call on, with the context that a call on it
// must end with. While the member in use is in doubt it waits for a better one, but
// not for long.
func (m *conns) use(ctx context.Context) (*conn, context.Context) {
	c, term, settled := m.now()
	if settled == nil && c.down() {
		// What was lost a moment ago may not have been noticed yet.
		m.tellAndWait(connEvent{conn: c, lost: true})
		c, term, settled = m.now()
	}
	if settled == nil {
		return c, term
	}
	late := time.NewTimer(patience(ctx))
	defer late.Stop()
	select {
	case <-settled:
	case <-ctx.Done():
	case <-late.C:
	case <-m.ctx.Done():
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.current, m.current.term
}

func (m *conns) now() (c *conn, term context.Context, settled chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.current, m.current.term, m.settled
}

func (c *conn) down() bool { return c.client.ActiveConnection().GetState() != connectivity.Ready }

// patience is how long a call waits for doubt to end.
func patience(ctx context.Context) time.Duration {
	deadline, ok := ctx.Deadline()
	if !ok {
		return doubtLimit
	}
	return min(max(time.Until(deadline)-lastWord, doubtLimit), patientLimit)
}

// elected gives the calls under way a limit.
func (m *conns) elected() {
	m.mu.Lock()
	defer m.mu.Unlock()
	time.AfterFunc(electedLimit, m.current.endTerm)
	m.current.newTerm()
}

// left tells whether the Store has turned away from a connection, and to another.
func (m *conns) left(c *conn) bool { return c.ctx.Err() != nil && m.ctx.Err() == nil }

// doubt returns why no member is known that can serve; empty if one is.
func (m *conns) doubt() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.why
}

func (m *conns) tell(e connEvent) bool {
	select {
	case m.events <- e:
		return true
	case <-m.ctx.Done():
		return false
	}
}

// tellAndWait is tell, and waits until the event has had its effect.
func (m *conns) tellAndWait(e connEvent) bool {
	e.taken = make(chan struct{})
	if !m.tell(e) {
		return false
	}
	<-e.taken // run does not end between the two
	return true
}

// run drives the machine until close. spare holds the connections on which others
// are asked.
func (m *conns) run(f *failover) {
	spare := map[string]*conn{}
	defer func() {
		for _, c := range spare {
			c.close()
		}
		m.current.close()
	}()
	wake := time.NewTimer(0)
	defer wake.Stop()
	for {
		var in failoverInput
		var e connEvent
		select {
		case <-m.ctx.Done():
			return
		case <-wake.C:
		case e = <-m.events:
			switch {
			case e.former != nil:
				if e.former == m.current {
					m.turnTo(e.conn, renewedLimit)
				} else {
					m.work.Go(e.conn.close)
				}
				close(e.taken)
				continue
			case e.lost && e.conn == m.current:
				in.broken = e.conn.endpoint
			case e.answer != nil:
				if e.conn != nil && e.conn.ctx.Err() != nil && e.answer.endpoint == m.current.endpoint {
					// It was asked on a connection that was replaced meanwhile.
					m.work.Go(func() { m.ask(e.answer.endpoint, m.current) })
					continue
				}
				in.answer = e.answer
				switch {
				case e.conn == nil || e.conn == m.current:
				case e.conn.ctx.Err() != nil:
					in.answer.err = "connection closed"
				default:
					spare[e.conn.endpoint] = e.conn
				}
			}
		}
		act := f.step(time.Since(m.began), in)
		if c := spare[act.use]; c != nil {
			delete(spare, act.use)
			m.log.Info("turned to another etcd member", "from", m.current.endpoint, "to", c.endpoint, "reason", m.doubt())
			m.turnTo(c, 0)
		}
		if act.elected {
			m.elected()
		}
		m.show(f)
		if e.taken != nil {
			close(e.taken)
		}
		if !f.doubt {
			for _, c := range spare {
				m.work.Go(c.close)
			}
			clear(spare)
		}
		for _, endpoint := range act.ask {
			c := spare[endpoint]
			if endpoint == m.current.endpoint {
				c = m.current
			}
			m.work.Go(func() { m.ask(endpoint, c) })
		}
		wake.Reset(act.wake)
	}
}

// show lets callers see whether there is doubt.
func (m *conns) show(f *failover) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.why = f.why(); f.doubt == (m.settled != nil) {
		return
	}
	if f.doubt {
		m.settled = make(chan struct{})
		return
	}
	close(m.settled)
	m.settled = nil
}

// turnTo makes c the connection in use, and ends what runs on the former: streams at
// once, calls after linger.
func (m *conns) turnTo(c *conn, linger time.Duration) {
	m.mu.Lock()
	former := m.current
	m.current = c
	m.mu.Unlock()
	m.watch(c)
	former.leave()
	m.work.Go(func() {
		sleep(m.ctx, linger)
		former.close()
	})
}

// ask puts the question to a member, on a new connection if c is nil.
func (m *conns) ask(endpoint string, c *conn) {
	fresh := c == nil
	if fresh {
		ctx, cancel := context.WithTimeout(m.ctx, dialLimit)
		defer cancel()
		var err error
		if c, err = m.dial(ctx, endpoint); err != nil {
			m.tell(connEvent{answer: failedAnswer(endpoint, err)})
			return
		}
	}
	ctx, cancel := context.WithTimeout(m.ctx, questionLimit)
	defer cancel()
	a, err := c.ask(ctx)
	if err != nil {
		a = failedAnswer(endpoint, err)
	}
	if !m.tell(connEvent{answer: a, conn: c}) && fresh {
		c.close()
	}
}

func failedAnswer(endpoint string, err error) *answer {
	return &answer{endpoint: endpoint, err: reason(err), refused: refused(err)}
}

// ask puts the question whether the member can serve: to name the members of the
// cluster it must hear from its leader, and the leader from its quorum.
func (c *conn) ask(ctx context.Context) (*answer, error) {
	ctx, cancel := bind(ctx, c.ctx)
	defer cancel()
	res, err := c.client.MemberList(ctx)
	if err != nil {
		return nil, err
	}
	a := &answer{endpoint: c.endpoint, cluster: res.Header.ClusterId, member: res.Header.MemberId, term: res.Header.RaftTerm}
	for _, m := range res.Members {
		if m.Name != "" && !m.IsLearner { // without a name it has not started yet
			a.members = append(a.members, member{id: m.ID, endpoints: m.ClientURLs})
		}
	}
	return a, nil
}

// reason spells an error that a person reads beside the name of the endpoint.
func reason(err error) string {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) || status.Code(err) == codes.DeadlineExceeded || status.Code(err) == codes.Canceled {
		return "no answer"
	}
	text := err.Error()
	if s, ok := status.FromError(err); ok {
		text = s.Message()
	}
	// gRPC wraps what happened in how it came to know.
	text = strings.TrimPrefix(text, "connection error: desc = ")
	if inner, err := strconv.Unquote(text); err == nil {
		text = inner
	}
	return strings.TrimPrefix(text, "transport: ")
}

// watch reports when the connection is lost, as it is at once if the member's
// process ends.
func (m *conns) watch(c *conn) {
	m.work.Go(func() {
		cc := c.client.ActiveConnection()
		for cc.GetState() != connectivity.Shutdown {
			if !cc.WaitForStateChange(c.ctx, connectivity.Ready) {
				return
			}
			if s := cc.GetState(); s != connectivity.Ready {
				if !m.tell(connEvent{conn: c, lost: true}) || !cc.WaitForStateChange(c.ctx, s) {
					return
				}
			}
		}
	})
}

// renew replaces the connection by a new one to the same member, with a new token.
// It returns when that is done or has failed.
func (m *conns) renew(c *conn) {
	m.renewing.Lock()
	defer m.renewing.Unlock()
	if c.ctx.Err() != nil {
		return // somebody else has
	}
	ctx, cancel := context.WithTimeout(m.ctx, dialLimit)
	defer cancel()
	next, err := m.dial(ctx, c.endpoint)
	if err != nil {
		return // the next use of c says what is wrong
	}
	if !m.tellAndWait(connEvent{conn: next, former: c}) {
		next.close()
	}
}
