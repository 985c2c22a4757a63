package broker

import "testing"

// Field case 05: a host:port is never split at the first colon.
func TestParseAddress(t *testing.T) {
	for text, want := range map[string]struct {
		host string
		port int32
	}{
		"[fd00:10::2]:9093": {"fd00:10::2", 9093},
		"fd00:10::2":        {"fd00:10::2", 9092},
		"fe80::1%eth0":      {"fe80::1%eth0", 9092},
		"node-a:9093":       {"node-a", 9093},
		"node-a":            {"node-a", 9092},
		"[::1]":             {"::1", 9092},
		"127.0.0.1:0":       {"127.0.0.1", 0},
		// Unbracketed with something like a port: all of it is the host.
		"1::2:9093": {"1::2:9093", 9092},
	} {
		host, port, err := ParseAddress(text)
		if err != nil || host != want.host || port != want.port {
			t.Errorf("%q: %q %d %v, want %q %d", text, host, port, err, want.host, want.port)
		}
		if err == nil && port != 0 {
			again, n, err := ParseAddress(JoinAddress(host, port))
			if err != nil || again != host || n != port {
				t.Errorf("%q joined: %q %d %v", text, again, n, err)
			}
		}
	}
	for _, text := range []string{"", ":9092", "a:b", "a:99999", "[::1", "[node]:1", "a:1:2", "[::1]9092", "a b", "x:-1", "http://a:1"} {
		if host, port, err := ParseAddress(text); err == nil {
			t.Errorf("%q was read as %q %d", text, host, port)
		}
	}
}
