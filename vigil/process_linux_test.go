package vigil

import (
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
)

// Who is watched no more, as after every orderly leave, is no trouble to be told of.
func TestWaitEndsWithClose(t *testing.T) {
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	peer, err := net.DialUnix("unix", nil, ln.Addr().(*net.UnixAddr))
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	c, err := ln.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, early := range []bool{false, true} {
		p, err := peerProcess(c)
		if err != nil {
			t.Fatal(err)
		}
		if int(p.pid) != os.Getpid() {
			t.Fatalf("the peer is %d, want %d", p.pid, os.Getpid())
		}
		if early {
			p.close()
		}
		done := make(chan error, 1)
		go func() {
			ended, err := p.wait()
			if ended {
				t.Error("this process is told to have ended")
			}
			done <- err
		}()
		if !early {
			waits := func() bool {
				b := make([]byte, 1<<20)
				return strings.Contains(string(b[:runtime.Stack(b, true)]), "(*rawConn).Read")
			}
			for end := time.Now().Add(20 * time.Second); !waits(); time.Sleep(time.Millisecond) {
				if time.Now().After(end) {
					t.Fatal("it does not wait")
				}
			}
			p.close()
		}
		if err := <-done; err != nil {
			t.Errorf("closed early %v: %v", early, err)
		}
	}
}
