// Package freeport finds TCP ports for servers that tests start, and start again:
// ports that nobody else is given while the server is down.
package freeport

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
)

const (
	lowest   = 10_000 // below live the well-known servers
	attempts = 1_000
)

// given are the ports that this process has handed out, each kept by a UDP socket on
// the same number: who looks for a port, in this process or in another, is refused it.
var given struct {
	sync.Mutex
	locks map[int]*net.UDPConn
}

// Address returns a loopback address, host:port, that is free and stays so until
// Release or the end of this process, but for whoever listens there on purpose. The
// port is below those that the kernel gives to outgoing connections: among those, a
// client that dials a server which is down can be given that server's own port, and
// keep it from coming back.
func Address() (string, error) {
	given.Lock()
	defer given.Unlock()
	if given.locks == nil {
		given.locks = make(map[int]*net.UDPConn)
	}
	end := firstOutgoing()
	var last error
	for range attempts {
		port := lowest + rand.IntN(end-lowest)
		lock, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port})
		if err != nil {
			last = err
			continue
		}
		address := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
		ln, err := net.Listen("tcp", address)
		if err != nil {
			_ = lock.Close()
			last = err
			continue
		}
		_ = ln.Close()
		given.locks[port] = lock
		return address, nil
	}
	return "", fmt.Errorf("find a free port from %d to %d: %w", lowest, end-1, last)
}

// Release gives an address back that Address has returned.
func Release(address string) {
	_, text, _ := net.SplitHostPort(address)
	port, _ := strconv.Atoi(text)
	given.Lock()
	defer given.Unlock()
	if lock := given.locks[port]; lock != nil {
		_ = lock.Close()
		delete(given.locks, port)
	}
}

// Must is Address for callers that cannot go on without.
func Must() string {
	address, err := Address()
	if err != nil {
		panic(err)
	}
	return address
}

// firstOutgoing is the first port that the kernel gives to outgoing connections.
func firstOutgoing() int {
	const usual = 32_768
	data, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		return usual
	}
	fields := strings.Fields(string(data))
	if len(fields) == 0 {
		return usual
	}
	if first, err := strconv.Atoi(fields[0]); err == nil && first > lowest+1_000 {
		return first
	}
	return usual
}
