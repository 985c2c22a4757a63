package vigil

import (
	"bufio"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/muster-io/muster/registry"
)

// Messages are lines of JSON. The daemon speaks first, with a greeting, once it has got
// hold of the process; the consumer may then add and remove sessions for as long as it
// likes. Each add is answered. A bye removes all.

// maxMessage bounds a line in both directions, and so the key of a registration.
const maxMessage = 4 << 10

// What a message asks for.
const (
	opAdd    = "add"
	opRemove = "remove"
	opBye    = "bye"
)

// message is what a consumer says.
type message struct {
	Op     string `json:"op"`
	Lease  string `json:"lease,omitempty"`  // of add and remove, in hex as etcdctl prints it
	Key    string `json:"key,omitempty"`    // of add: the registration
	Secret string `json:"secret,omitempty"` // of add, in hex
}

// greeting is the first line of a daemon.
type greeting struct {
	Version int    `json:"version"`
	Cluster string `json:"cluster"`
	Broker  int32  `json:"broker"`
}

// answer is what the daemon says to an add.
type answer struct {
	Lease   string `json:"lease"`
	Watched bool   `json:"watched"`
	Reason  string `json:"reason,omitempty"` // why it is not
}

const protocolVersion = 1

// errMessage marks a line that is no message. The connection ends with it.
var errMessage = errors.New("message cannot be read")

// session is what a consumer asks to be watched for.
type session struct {
	lease  registry.LeaseID
	key    string
	notice string // the hash of the secret that was shown
}

// SocketName is the abstract unix socket of a daemon.
func SocketName(clusterID string, broker int32) string {
	return "@muster-" + clusterID + "-" + strconv.Itoa(int(broker))
}

// readLine returns the next line, which is valid until the next call.
func readLine(r *bufio.Reader) ([]byte, error) {
	line, err := r.ReadSlice('\n')
	switch {
	case errors.Is(err, bufio.ErrBufferFull):
		return nil, fmt.Errorf("%w: longer than %d bytes", errMessage, maxMessage)
	case err == io.EOF && len(line) > 0:
		return nil, fmt.Errorf("%w: cut off", errMessage)
	}
	return line, err
}

// parseMessage reads a line of a consumer. What it returns is whole: a session
// with an add, a lease with a remove.
func parseMessage(line []byte) (m message, s session, err error) {
	if err := json.Unmarshal(line, &m); err != nil {
		return m, s, fmt.Errorf("%w: %w", errMessage, err)
	}
	switch m.Op {
	case opBye:
		return m, s, nil
	case opAdd, opRemove:
	default:
		return m, s, fmt.Errorf("%w: unknown op", errMessage)
	}
	if s.lease, err = parseLease(m.Lease); err != nil || m.Op == opRemove {
		return m, s, err
	}
	s.key = m.Key
	if s.key == "" {
		return m, s, fmt.Errorf("%w: no key", errMessage)
	}
	raw, err := hex.DecodeString(m.Secret)
	if err != nil || len(raw) != len(Secret{}) {
		return m, s, fmt.Errorf("%w: no secret", errMessage)
	}
	s.notice = Secret(raw).Notice()
	return m, s, nil
}

func parseLease(text string) (registry.LeaseID, error) {
	n, err := strconv.ParseUint(text, 16, 64)
	if err != nil || n == 0 || registry.LeaseText(registry.LeaseID(n)) != text {
		return 0, fmt.Errorf("%w: no lease", errMessage)
	}
	return registry.LeaseID(n), nil
}

// encodeLine is the inverse of readLine for any of the messages.
func encodeLine(m any) ([]byte, error) {
	line, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode a message: %w", err)
	}
	if line = append(line, '\n'); len(line) > maxMessage {
		return nil, fmt.Errorf("%w: longer than %d bytes", errMessage, maxMessage)
	}
	return line, nil
}
