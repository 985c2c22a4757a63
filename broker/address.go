package broker

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"syscall"
)

// DefaultPort is Kafka's.
const DefaultPort = 9092

// ParseAddress reads "host:port" or "host", where the port is then DefaultPort.
// An IPv6 address has brackets if a port follows it; without brackets all of it
// is the host. The host is returned without brackets, as the protocol wants it.
func ParseAddress(text string) (host string, port int32, err error) {
	fail := func(why string) (string, int32, error) {
		return "", 0, fmt.Errorf("address %q: %s; want host:port, [IPv6]:port or a host alone", text, why)
	}
	rest := ""
	switch {
	case strings.HasPrefix(text, "["):
		var ok bool
		if host, rest, ok = strings.Cut(text[1:], "]"); !ok {
			return fail("the bracket is not closed")
		}
		if a, err := netip.ParseAddr(host); err != nil || !a.Is6() {
			return fail("no IPv6 address stands in the brackets")
		}
	case strings.Count(text, ":") > 1:
		if _, err := netip.ParseAddr(text); err != nil {
			return fail("not an IPv6 address")
		}
		host = text
	default:
		host = text
		if i := strings.IndexByte(text, ':'); i >= 0 {
			host, rest = text[:i], text[i:]
		}
	}
	if host == "" || strings.ContainsAny(host, " /,") {
		return fail("no host")
	}
	if rest == "" {
		return host, DefaultPort, nil
	}
	n, err := strconv.ParseUint(strings.TrimPrefix(rest, ":"), 10, 16)
	if err != nil || rest[0] != ':' {
		return fail("bad port")
	}
	return host, int32(n), nil
}

// JoinAddress is the inverse of ParseAddress.
func JoinAddress(host string, port int32) string {
	return net.JoinHostPort(host, strconv.Itoa(int(port)))
}

// Listen listens where a flag says.
func Listen(flag, host string, port int32) (net.Listener, error) {
	text := JoinAddress(host, port)
	ln, err := net.Listen("tcp", text)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("%s is in use: stop what listens there, or choose another %s", text, flag)
	}
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w: choose another %s", text, err, flag)
	}
	return ln, nil
}

// wildcard tells whether a host stands for every address of the machine, which
// no client can connect to.
func wildcard(host string) bool {
	a, err := netip.ParseAddr(host)
	return err == nil && a.IsUnspecified()
}
