package vigil

import (
	"bufio"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/muster-io/muster/registry"
)

// PathVariable is the environment variable that names the socket file of a daemon
// where ClientOptions.Path is empty.
const PathVariable = "MUSTER_LOCAL_SOCKET"

// ClientOptions say where a daemon may be.
type ClientOptions struct {
	ClusterID string
	// Path is the socket file of a daemon. If it is not empty, no other socket is tried:
	// an abstract one can be made by anybody on the host, a file where only the daemon
	// may write cannot. Empty means the value of PathVariable.
	Path string
	// Listener, which may be nil, is told when a session comes to be watched, and when it
	// is not watched any more. It is called on the client's goroutine and must be quick.
	Listener func(ClientEvent)
	Logger   *slog.Logger // nil discards
}

// ClientEvent tells that the state of a session has changed.
type ClientEvent struct {
	Lease   registry.LeaseID
	Watched bool
	Broker  int32  // that watches
	Reason  string // why it is not watched
}

// Client asks a daemon on this host, if there is one, to watch this process. It is
// best effort: no method waits or fails, and where nobody watches, the lease alone
// decides. It is safe for concurrent use.
type Client struct {
	o       ClientOptions
	log     *slog.Logger
	cancel  context.CancelFunc
	work    sync.WaitGroup
	changed chan struct{} // something below has

	mu       sync.Mutex
	brokers  []int32
	sessions map[registry.LeaseID]wish
}

// wish is a session that is to be watched.
type wish struct {
	key    string
	secret Secret
}

const (
	dialLimit  = time.Second
	greetLimit = 10 * time.Second
	// Daemons are looked for again after a pause that doubles between these bounds,
	// and at once when the list of brokers changes.
	minAskPause = 50 * time.Millisecond
	maxAskPause = 5 * time.Second
	// refusedPause is the pause before a session that was refused is named again.
	refusedPause = 2 * time.Second
)

// Ask returns a client that has nothing to be watched yet. Close it.
func Ask(o ClientOptions) *Client {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Path == "" {
		o.Path = os.Getenv(PathVariable)
	}
	c := &Client{o: o, log: o.Logger.With("part", "vigil"), changed: make(chan struct{}, 1), sessions: map[registry.LeaseID]wish{}}
	ctx, cancel := context.WithCancel(context.Background())
	c.cancel = cancel
	if supported {
		c.work.Go(func() { c.run(ctx) })
	}
	return c
}

// Brokers says which brokers there are, of which one may be on this host: to be called
// whenever that changes.
func (c *Client) Brokers(ids []int32) {
	c.change(func() bool {
		if slices.Equal(c.brokers, ids) {
			return false
		}
		c.brokers = slices.Clone(ids)
		return true
	})
}

// Add asks for a session to be watched: if this process ends before Remove, its lease
// is revoked. key is a registration that stands under the lease, with s.Notice() in its
// field notice.
func (c *Client) Add(lease registry.LeaseID, key string, s Secret) {
	c.change(func() bool { c.sessions[lease] = wish{key, s}; return true })
}

// Remove is to be called before a session ends in order; nothing is lost if not.
func (c *Client) Remove(lease registry.LeaseID) {
	c.change(func() bool { delete(c.sessions, lease); return true })
}

// Close takes all sessions back, and ends the client.
func (c *Client) Close() {
	c.cancel()
	c.work.Wait()
}

func (c *Client) change(f func() bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !f() {
		return
	}
	select {
	case c.changed <- struct{}{}:
	default:
	}
}

// wanted is how things stand: what is to be watched, and where.
func (c *Client) wanted() (sessions map[registry.LeaseID]wish, sockets []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	sessions = make(map[registry.LeaseID]wish, len(c.sessions))
	for lease, w := range c.sessions {
		sessions[lease] = w
	}
	if c.o.Path != "" {
		return sessions, []string{c.o.Path}
	}
	for _, id := range c.brokers {
		sockets = append(sockets, SocketName(c.o.ClusterID, id))
	}
	return sessions, sockets
}

func (c *Client) run(ctx context.Context) {
	last, pause := "", minAskPause
	for ctx.Err() == nil {
		sessions, sockets := c.wanted()
		if len(sessions) == 0 || len(sockets) == 0 {
			select {
			case <-c.changed:
			case <-ctx.Done():
			}
			continue
		}
		if i := slices.Index(sockets, last); i > 0 { // it was the one on this host
			sockets[0], sockets[i] = sockets[i], sockets[0]
		}
		for _, name := range sockets {
			conn, err := (&net.Dialer{Timeout: dialLimit}).DialContext(ctx, "unix", name)
			if err != nil {
				continue // most are on other hosts
			}
			last = name
			k := &asking{c: c, conn: conn, named: map[registry.LeaseID]wish{}, refused: map[registry.LeaseID]time.Time{}, watched: map[registry.LeaseID]bool{}}
			err = k.run(ctx)
			if err != nil {
				c.log.Debug("a daemon on this host does not watch any more", "socket", name, "error", err)
			}
			if k.served {
				pause = minAskPause
			}
			if k.served || err == nil {
				break
			}
		}
		if ctx.Err() != nil {
			return
		}
		timer := time.NewTimer(pause)
		select {
		case <-c.changed:
			pause = minAskPause
		case <-timer.C:
			pause = min(2*pause, maxAskPause)
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// asking is one connection to a daemon.
type asking struct {
	c       *Client
	conn    net.Conn
	broker  int32
	served  bool                           // it has watched something
	named   map[registry.LeaseID]wish      // what the daemon was asked for and not told to forget
	refused map[registry.LeaseID]time.Time // of these, until when its refusal is taken for an answer
	watched map[registry.LeaseID]bool
}

// run talks with the daemon until the connection ends, with an error, or there is
// nothing to be watched any more.
func (k *asking) run(ctx context.Context) (err error) {
	in := inbox{news: make(chan struct{}, 1)}
	var reading sync.WaitGroup
	defer func() {
		_ = k.conn.Close()
		reading.Wait()
		for lease := range k.watched {
			k.tell(ClientEvent{Lease: lease, Broker: k.broker, Reason: "the connection has ended"})
		}
	}()
	// Before it may be cut short: the later deadline is the one that counts.
	_ = k.conn.SetReadDeadline(time.Now().Add(greetLimit))
	stop := context.AfterFunc(ctx, func() { _ = k.conn.SetReadDeadline(time.Now()) })
	r := bufio.NewReaderSize(k.conn, maxMessage)
	err = k.greet(r)
	stop()
	if err != nil {
		return err
	}
	_ = k.conn.SetReadDeadline(time.Time{})
	reading.Go(func() { in.read(r) })
	retry := time.NewTimer(refusedPause)
	defer retry.Stop()
	for {
		sessions, _ := k.c.wanted()
		if len(sessions) == 0 {
			clear(k.watched) // taken back, which is nothing to be told
		}
		if len(sessions) == 0 || ctx.Err() != nil {
			return k.write(message{Op: opBye})
		}
		if err := k.name(sessions); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
		case <-k.c.changed:
		case <-in.news:
			answers, err := in.take()
			for _, a := range answers {
				k.answered(a)
			}
			if err != nil {
				return err
			}
		case <-retry.C:
			retry.Reset(refusedPause)
			for lease, until := range k.refused {
				if !time.Now().Before(until) {
					delete(k.refused, lease)
					delete(k.named, lease)
				}
			}
		}
	}
}

// greet reads who the daemon is.
func (k *asking) greet(r *bufio.Reader) error {
	line, err := readLine(r)
	if err != nil {
		return fmt.Errorf("read the greeting: %w", err)
	}
	var g greeting
	if err := json.Unmarshal(line, &g); err != nil {
		return fmt.Errorf("%w: %w", errMessage, err)
	}
	if g.Version != protocolVersion || g.Cluster != k.c.o.ClusterID {
		return errors.New("it is of another cluster, or speaks another version")
	}
	k.broker = g.Broker
	return nil
}

// inbox holds what the daemon has said. It is read whether or not we are about to
// write, since the daemon does not read on until its answers are taken.
type inbox struct {
	news chan struct{}

	mu      sync.Mutex
	answers []answer
	err     error // that ended the reading
}

func (in *inbox) read(r *bufio.Reader) {
	for ok := true; ok; {
		var a answer
		line, err := readLine(r)
		if err == nil {
			err = json.Unmarshal(line, &a)
		}
		ok = in.put(a, err)
	}
}

// put keeps an answer; false if it is the last that is taken.
func (in *inbox) put(a answer, err error) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	if err == nil && len(in.answers) >= maxSessions {
		err = fmt.Errorf("%w: more answers than sessions", errMessage)
	}
	if err == nil {
		in.answers = append(in.answers, a)
	}
	in.err = err
	select {
	case in.news <- struct{}{}:
	default:
	}
	return err == nil
}

func (in *inbox) take() ([]answer, error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	answers := in.answers
	in.answers = nil
	return answers, in.err
}

// name makes what the daemon was told the same as what is wanted.
func (k *asking) name(sessions map[registry.LeaseID]wish) error {
	for lease := range k.named {
		if _, still := sessions[lease]; still {
			continue
		}
		delete(k.named, lease)
		delete(k.refused, lease)
		delete(k.watched, lease)
		if err := k.write(message{Op: opRemove, Lease: registry.LeaseText(lease)}); err != nil {
			return err
		}
	}
	for lease, w := range sessions {
		if k.named[lease] == w {
			continue
		}
		k.named[lease] = w
		delete(k.refused, lease)
		err := k.write(message{Op: opAdd, Lease: registry.LeaseText(lease), Key: w.key, Secret: hex.EncodeToString(w.secret[:])})
		if errors.Is(err, errMessage) {
			k.tell(ClientEvent{Lease: lease, Broker: k.broker, Reason: err.Error()})
			continue // its key is too long, and will not grow shorter
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (k *asking) answered(a answer) {
	lease, err := parseLease(a.Lease)
	if _, asked := k.named[lease]; err != nil || !asked {
		return // it was removed meanwhile
	}
	if a.Watched {
		k.served = true
		k.watched[lease] = true
	} else {
		delete(k.watched, lease)
		k.refused[lease] = time.Now().Add(refusedPause)
	}
	k.tell(ClientEvent{Lease: lease, Watched: a.Watched, Broker: k.broker, Reason: a.Reason})
}

func (k *asking) tell(e ClientEvent) {
	k.c.log.Debug("a session is watched, or not", "lease", registry.LeaseText(e.Lease), "watched", e.Watched, "broker", e.Broker, "reason", e.Reason)
	if f := k.c.o.Listener; f != nil {
		f(e)
	}
}

func (k *asking) write(m message) error {
	line, err := encodeLine(m)
	if err != nil {
		return err
	}
	_ = k.conn.SetWriteDeadline(time.Now().Add(writeLimit))
	_, err = k.conn.Write(line)
	return err
}
