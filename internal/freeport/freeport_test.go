package freeport

import (
	"net"
	"strconv"
	"testing"
)

func TestAddress(t *testing.T) {
	seen := map[string]bool{}
	for range 50 {
		address, err := Address()
		if err != nil {
			t.Fatal(err)
		}
		if seen[address] {
			t.Fatalf("%s was handed out twice", address)
		}
		seen[address] = true
		for range 2 { // a server that starts again finds it free
			ln, err := net.Listen("tcp", address)
			if err != nil {
				t.Fatal(err)
			}
			_ = ln.Close()
		}
		_, text, _ := net.SplitHostPort(address)
		port, err := strconv.Atoi(text)
		if err != nil || port < lowest || port >= firstOutgoing() {
			t.Fatalf("%s may be given to an outgoing connection", address)
		}
	}
}
