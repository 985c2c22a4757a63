package wire

import (
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"
)

// Hooks tell what the server does: metrics and tests hang on them. A nil function
// is not called. They are called on the connections' goroutines, so they must be
// quick and safe for concurrent use.
type Hooks struct {
	// OnConnect: a connection was accepted.
	OnConnect func(remote string)

	// OnDisconnect: a connection has ended, and its goroutines with it. err says why;
	// nil if the client closed it between two requests, or it was idle.
	OnDisconnect func(remote string, err error)

	// OnRefused: a connection was closed at once because there are MaxConnections.
	OnRefused func(remote string)

	// OnAnswer: an answer is about to be sent. Whether the hook takes it for a failure
	// is passed on to OnRequest; the answer itself is not, since it may be large, and
	// be gone while its bytes wait for the client.
	OnAnswer func(key int16, resp kmsg.Response) (failed bool)

	// OnRequest: a request was answered, or its connection ended first.
	OnRequest func(RequestInfo)
}

// RequestInfo describes a request when it is done.
type RequestInfo struct {
	Key, Version  int16
	ClientID      string
	Remote        string
	RequestBytes  int
	ResponseBytes int           // 0 if none was written
	Duration      time.Duration // since its last byte arrived
	Err           error         // why it was not answered
	Failed        bool          // the hook OnAnswer said so
}

func (i RequestInfo) String() string {
	return fmt.Sprintf("key=%d version=%d client_id=%q remote=%s in=%d out=%d duration=%s err=%v",
		i.Key, i.Version, i.ClientID, i.Remote, i.RequestBytes, i.ResponseBytes, i.Duration, i.Err)
}
