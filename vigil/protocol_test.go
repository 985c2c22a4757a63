//go:build linux

package vigil

import (
	"bufio"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/muster-io/muster/registry"
)

// raw speaks with a server line by line. It is this process, which does not end.
type raw struct {
	t testing.TB
	net.Conn
	r *bufio.Reader
	g greeting
}

func (f *fixture) dial(t testing.TB) *raw {
	t.Helper()
	c, err := net.Dial("unix", SocketName(f.id, 1))
	must(t, err)
	t.Cleanup(func() { c.Close() })
	return &raw{t: t, Conn: c, r: bufio.NewReader(c)}
}

// greeted is dial, and reads the greeting.
func (f *fixture) greeted(t testing.TB) *raw {
	t.Helper()
	c := f.dial(t)
	c.read(&c.g)
	return c
}

func (c *raw) read(into any) {
	c.t.Helper()
	must(c.t, c.SetReadDeadline(time.Now().Add(patience)))
	line, err := c.r.ReadBytes('\n')
	must(c.t, err)
	must(c.t, json.Unmarshal(line, into))
}

func (c *raw) say(m message) {
	c.t.Helper()
	line, err := encodeLine(m)
	must(c.t, err)
	_, err = c.Write(line)
	must(c.t, err)
}

// add asks for a session, and tells whether it is watched.
func (c *raw) add(lease registry.LeaseID, key string, s Secret) bool {
	c.t.Helper()
	c.say(message{Op: opAdd, Lease: registry.LeaseText(lease), Key: key, Secret: hex.EncodeToString(s[:])})
	var a answer
	c.read(&a)
	if a.Watched != (a.Reason == "") || a.Lease != registry.LeaseText(lease) {
		c.t.Errorf("answer %+v", a)
	}
	return a.Watched
}

// ended waits until the server has ended the connection.
func (c *raw) ended() {
	c.t.Helper()
	must(c.t, c.SetReadDeadline(time.Now().Add(patience)))
	if _, err := io.Copy(io.Discard, c.r); err != nil && !errors.Is(err, syscall.ECONNRESET) {
		c.t.Fatalf("the connection is open: %v", err)
	}
}

// Nobody has the lease of another revoked, with what the registry shows to all or
// with what is his own.
func TestProof(t *testing.T) {
	f := newFixture(t)
	s := f.serve()
	mine, lease := f.registered("mine")
	other, otherLease := f.registered("other")
	forged := func(key string) string {
		value, err := registry.Encode(registry.ConsumerRecord{Version: 1, Subscription: map[string]int32{"t": 1},
			Pattern: registry.PatternStatic, Timestamp: "1", Notice: mine.secret.Notice()})
		must(t, err)
		_, err = f.st.Txn(t.Context(), registry.Txn{Then: []registry.Op{registry.Put(key, value, otherLease)}})
		must(t, err)
		return key
	}
	var shown Secret // what the registry shows of the other's secret
	notice, err := hex.DecodeString(other.secret.Notice())
	must(t, err)
	copy(shown[:], notice)
	silent := key("silent") // a consumer that wants nothing of this
	_, err = f.st.Txn(t.Context(), registry.Txn{Then: []registry.Op{registry.Put(silent,
		[]byte(`{"version":1,"subscription":{"t":1},"pattern":"static","timestamp":"1"}`), otherLease)}})
	must(t, err)
	c := f.greeted(t)
	for name, a := range map[string]struct {
		lease  registry.LeaseID
		key    string
		secret Secret
	}{
		"wrong secret":                 {otherLease, other.key, NewSecret()},
		"the other's hash for secret":  {otherLease, other.key, shown},
		"my secret, the other's key":   {otherLease, other.key, mine.secret},
		"my key, the other's lease":    {otherLease, mine.key, mine.secret},
		"the other's key, my lease":    {lease, other.key, other.secret},
		"a key that is not there":      {otherLease, key("none"), mine.secret},
		"a registration without one":   {otherLease, silent, Secret{}},
		"no registration, but like it": {otherLease, forged("/consumers/g/offsets/t/1-0"), mine.secret},
		"another key of the group":     {otherLease, forged("/consumers/g/owners/mine"), mine.secret},
		"below a registration":         {otherLease, forged(key("mine") + "/x"), mine.secret},
		"another tree":                 {otherLease, forged("/elsewhere/g/ids/mine"), mine.secret},
		"a broker":                     {otherLease, forged("/brokers/ids/9"), mine.secret},
	} {
		if before := f.countRefused(RefusedProof); c.add(a.lease, a.key, a.secret) || f.countRefused(RefusedProof) != before+1 {
			t.Errorf("%s: it is watched", name)
		}
	}
	if !c.add(lease, mine.key, mine.secret) || !c.add(otherLease, other.key, other.secret) {
		t.Error("who knows the secret is refused")
	}
	if n := s.Sessions(); n != 2 {
		t.Errorf("%d sessions", n)
	}
	if text := fmt.Sprintf("%v %#v %s %x %+v", mine.secret, mine.secret, mine.secret, mine.secret.Notice(), mine); strings.Contains(text, hex.EncodeToString(mine.secret[:])) {
		t.Error("a secret prints itself")
	}
}

// A connection that ends while the process lives takes nothing with it: at once after
// a bye, after a while without.
func TestConnectionEndsBeforeTheProcess(t *testing.T) {
	f := newFixture(t)
	s := f.serve(func(o *ServerOptions) { o.linger = 50 * time.Millisecond })
	a, lease := f.registered("a")
	for _, end := range []func(c *raw){
		func(c *raw) { c.say(message{Op: opBye}) },
		func(c *raw) { must(t, c.Close()) },
		func(c *raw) { _, _ = c.Write([]byte("nonsense\n")) },
	} {
		c := f.greeted(t)
		for range 2 { // twice is once
			if !c.add(lease, a.key, a.secret) || s.Sessions() != 1 {
				t.Fatal("it is not watched")
			}
		}
		end(c)
		eventually(t, func() string {
			if s.Sessions() != 0 || s.Connections() != 0 {
				return fmt.Sprintf("%d sessions of %d processes", s.Sessions(), s.Connections())
			}
			return ""
		})
	}
	if !f.stands("a") || len(f.results()) != 0 {
		t.Errorf("the registration stands: %v; %v", f.stands("a"), f.results())
	}
}

// What comes from outside is bounded.
func TestLimits(t *testing.T) {
	f := newFixture(t)
	s := f.serve(func(o *ServerOptions) { o.MaxConnections = 2 })
	a, lease := f.registered("a")
	watched := f.greeted(t)
	if !watched.add(lease, a.key, a.secret) {
		t.Fatal("it is not watched")
	}
	hello := func(c *raw) { c.read(&c.g) }
	long := strings.Repeat("x", maxMessage)
	for name, talk := range map[string]func(c *raw){
		"endless line":        func(c *raw) { hello(c); _, _ = c.Write([]byte(long + long)) },
		"endless line first":  func(c *raw) { _, _ = c.Write([]byte(long + long)) },
		"no json":             func(c *raw) { hello(c); _, _ = c.Write([]byte("GET / HTTP/1.1\r\n\r\n")) },
		"unknown op":          func(c *raw) { hello(c); c.say(message{Op: "kill"}) },
		"no lease":            func(c *raw) { hello(c); c.say(message{Op: opAdd, Key: "k", Secret: strings.Repeat("00", 32)}) },
		"no key":              func(c *raw) { hello(c); c.say(message{Op: opAdd, Lease: "1", Secret: strings.Repeat("00", 32)}) },
		"short secret":        func(c *raw) { hello(c); c.say(message{Op: opAdd, Lease: "1", Key: "k", Secret: "00"}) },
		"half a line":         func(c *raw) { hello(c); _, _ = c.Write([]byte(`{"op":`)); _ = c.Conn.(*net.UnixConn).CloseWrite() },
		"lease out of bounds": func(c *raw) { hello(c); c.say(message{Op: opRemove, Lease: "10000000000000000"}) },
	} {
		before := f.countRefused(RefusedMessage)
		c := f.dial(t)
		talk(c)
		c.ended()
		eventually(t, func() string {
			if n := f.countRefused(RefusedMessage); n != before+1 {
				return fmt.Sprintf("%s: refused %d times", name, n-before)
			}
			if n := s.Connections(); n != 1 {
				return fmt.Sprintf("%s: %d connections", name, n)
			}
			return ""
		})
	}
	second := f.greeted(t)
	b, leaseB := f.registered("b")
	if !second.add(leaseB, b.key, b.secret) {
		t.Error("there is room for a second")
	}
	third := f.dial(t)
	third.ended()
	if f.countRefused(RefusedLimit) != 1 {
		t.Error("a third is taken")
	}
}

// A connection without a session has its time, whether it asks for one or not; those that
// are watched are not cut off for saying nothing.
func TestIdleConnectionsEnd(t *testing.T) {
	f := newFixture(t)
	s := f.serve(func(o *ServerOptions) { o.idle = 300 * time.Millisecond })
	a, lease := f.registered("a")
	// tries asks until an answer says that it is watched, or the connection ends.
	tries := func(c *raw, secret Secret) bool {
		line, err := encodeLine(message{Op: opAdd, Lease: registry.LeaseText(lease), Key: a.key, Secret: hex.EncodeToString(secret[:])})
		must(t, err)
		for end := time.Now().Add(patience); time.Now().Before(end); {
			if _, err := c.Write(line); err != nil {
				return false
			}
			said, err := c.r.ReadBytes('\n')
			var answer answer
			if err != nil || json.Unmarshal(said, &answer) == nil && answer.Watched {
				return err == nil
			}
		}
		t.Error("it may ask in vain for ever")
		return false
	}
	// watched takes more than one connection where this process is slow to ask.
	watched := func() *raw {
		for end := time.Now().Add(patience); time.Now().Before(end); {
			if c := f.greeted(t); tries(c, a.secret) {
				return c
			}
		}
		t.Fatal("it is not watched")
		return nil
	}
	stays := watched()
	eventually(t, func() string {
		if n := s.Connections(); n != 1 {
			return fmt.Sprintf("%d connections", n)
		}
		return ""
	})
	for name, talk := range map[string]func() *raw{
		"says nothing":     func() *raw { return f.dial(t) },
		"asks for nothing": func() *raw { return f.greeted(t) },
		"asks in vain":     func() *raw { c := f.greeted(t); tries(c, NewSecret()); return c },
		"takes back all it had": func() *raw {
			c := watched()
			c.say(message{Op: opRemove, Lease: registry.LeaseText(lease)})
			return c
		},
	} {
		before := f.countRefused(RefusedMessage)
		talk().ended()
		if f.countRefused(RefusedMessage) == before {
			t.Errorf("%s: not refused", name)
		}
		eventually(t, func() string {
			if n := s.Connections(); n != 1 {
				return fmt.Sprintf("%s: %d connections", name, n)
			}
			return ""
		})
	}
	if s.Sessions() != 1 || !stays.add(lease, a.key, a.secret) {
		t.Errorf("%d sessions", s.Sessions())
	}
}

// Of one process only so many sessions are watched.
func TestSessionsOfAProcessAreBounded(t *testing.T) {
	s := &Server{o: ServerOptions{}}
	w := &watch{s: s, sessions: map[registry.LeaseID]session{}}
	for n := range maxSessions {
		w.sessions[registry.LeaseID(n+1)] = session{}
	}
	if reason, err := w.add(session{lease: -1}); reason != RefusedLimit || !errors.Is(err, errTooMany) {
		t.Errorf("%s, %v", reason, err)
	}
}

// A process that dies while its proof is looked up is not forgotten.
func TestDeathDuringTheProof(t *testing.T) {
	f := newFixture(t)
	s := f.serve()
	a, lease := f.registered("a")
	w := &watch{s: s, p: &process{}, sessions: map[registry.LeaseID]session{}}
	w.end()
	if _, err := w.add(session{lease, a.key, a.secret.Notice()}); err != nil {
		t.Fatal(err)
	}
	f.gone("a")
	if s.Sessions() != 0 {
		t.Errorf("%d sessions", s.Sessions())
	}
}

// Where the process was found by its number, that may have come to be another's
// before it was opened: the stranger's end is not taken for the consumer's.
func TestNumberOfAnotherProcess(t *testing.T) {
	f := newFixture(t)
	a, lease := f.registered("a")
	stranger := exec.Command("sleep", "1000")
	must(t, stranger.Start())
	t.Cleanup(func() {
		_ = stranger.Process.Kill()
		_ = stranger.Wait()
	})
	asked, found := make(chan struct{}), make(chan struct{})
	s := f.serve(func(o *ServerOptions) {
		o.peer = func(c *net.UnixConn) (*process, error) {
			close(asked)
			// The consumer has gone, and what it left in the socket can still be read.
			<-found
			return findPeer(c, func(int) (int, error) { return openPid(stranger.Process.Pid) })
		}
	})
	c := f.dial(t)
	c.say(message{Op: opAdd, Lease: registry.LeaseText(lease), Key: a.key, Secret: hex.EncodeToString(a.secret[:])})
	must(t, c.Close())
	select {
	case <-asked: // or the stranger's end would come first, and show nothing
	case <-deadline(t):
		t.Fatal("nobody asks who it is")
	}
	close(found)
	eventually(t, func() string {
		if s.Connections() != 0 && s.Sessions() == 0 {
			return "still connected"
		}
		return ""
	})
	must(t, stranger.Process.Kill())
	_ = stranger.Wait()
	eventually(t, func() string {
		if s.Connections() != 0 {
			return "still connected"
		}
		return ""
	})
	must(t, s.Close())
	if !f.stands("a") || len(f.results()) != 0 {
		t.Errorf("the registration stands: %v; %v", f.stands("a"), f.results())
	}
}

// The pidfd of the kernel stays with the process that connected, also when another
// has its number: here a real one, for which the number is forced.
func TestNumberIsUsedAgain(t *testing.T) {
	const next = "/proc/sys/kernel/ns_last_pid"
	f, err := os.OpenFile(next, os.O_WRONLY, 0)
	if err != nil {
		t.Skipf("only root chooses the number of a process: %v", err)
	}
	defer f.Close()
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: "@" + t.Name() + strconv.Itoa(os.Getpid()), Net: "unix"})
	must(t, err)
	defer ln.Close()
	// It connects, and ends before it is looked for.
	c := exec.Command(os.Args[0], "-test.run=^$")
	c.Env = append(os.Environ(), childVariable+`={"Path":"`+ln.Addr().String()+`","Sessions":-1}`)
	must(t, c.Run())
	conn, err := ln.AcceptUnix()
	must(t, err)
	defer conn.Close()
	var again *exec.Cmd
	for range 100 { // others on this machine start processes too
		_, err := f.WriteAt([]byte(strconv.Itoa(c.Process.Pid-1)), 0)
		must(t, err)
		again = exec.Command("sleep", "1000")
		must(t, again.Start())
		defer again.Wait()
		defer again.Process.Kill()
		if again.Process.Pid == c.Process.Pid {
			break
		}
	}
	if again.Process.Pid != c.Process.Pid {
		t.Skip("the number was not to be had")
	}
	p, err := peerProcess(conn)
	if err == nil {
		// Linux 6.16 and later know it still: as one that has ended.
		ended, err := p.wait()
		if !ended {
			t.Errorf("a process that has ended is taken for another with its number: %v", err)
		}
		p.close()
	} else {
		t.Log(err)
	}
	// By the number it is the stranger, hence the look at the connection afterwards.
	if p, err = peerProcessByNumber(conn); err != nil {
		t.Fatal(err)
	}
	defer p.close()
	if readable(int(p.file.Fd())) {
		t.Error("the stranger was not found, so this test shows nothing")
	}
}

func FuzzMessage(f *testing.F) {
	for _, line := range []string{`{"op":"bye"}`, `{"op":"remove","lease":"7d"}`, `{"op":"remove","lease":"-1"}`,
		`{"op":"add","lease":"7d","key":"/consumers/g/ids/a","secret":"` + strings.Repeat("ab", 32) + `"}`, `{"op":"add"}`, `[]`, `null`, ``} {
		f.Add([]byte(line + "\n"))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r := bufio.NewReaderSize(strings.NewReader(string(data)), maxMessage)
		for {
			line, err := readLine(r)
			if err != nil {
				return
			}
			if len(line) > maxMessage {
				t.Fatalf("a line of %d bytes", len(line))
			}
			m, s, err := parseMessage(line)
			if err != nil {
				if !errors.Is(err, errMessage) {
					t.Fatal(err)
				}
				continue
			}
			switch m.Op {
			case opAdd:
				if s.lease == 0 || s.key == "" || len(s.notice) != 64 {
					t.Fatalf("%+v", s)
				}
			case opRemove:
				if s.lease == 0 {
					t.Fatal("no lease")
				}
			}
			again, err := encodeLine(m)
			if err != nil {
				continue // what had no escapes may need them
			}
			if m2, s2, err := parseMessage(again); m2 != m || s2 != s || err != nil {
				t.Fatalf("%+v %+v, then %+v %+v, %v", m, s, m2, s2, err)
			}
		}
	})
}
