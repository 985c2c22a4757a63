package wire

import (
	"context"
	"fmt"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// A Handler is called by the connection's reader, in the order of arrival, and
// must do here what has to happen in that order. Until it returns the connection
// reads nothing, so whatever may wait belongs into the Answer. A nil Answer means
// that this request has no response (Produce with acks=0).
type Handler func(ctx context.Context, req *Request) Answer

// An Answer is the waiting part of a request. It is called once by the
// connection's writer, when all requests before it have been answered, or never,
// if the connection ends first. ctx ends when the client goes away or when the
// server must stop now. A nil response writes nothing. An error closes the
// connection with a line in the log.
//
// The response's version need not be set.
type Answer func(ctx context.Context) (kmsg.Response, error)

// Ready is the Answer of a request that has nothing to wait for.
func Ready(resp kmsg.Response) Answer {
	return func(context.Context) (kmsg.Response, error) { return resp, nil }
}

// Fail is the Answer that closes the connection.
func Fail(err error) Answer {
	return func(context.Context) (kmsg.Response, error) { return nil, err }
}

// VersionRange is one line of the version table.
type VersionRange struct {
	Key, Min, Max int16
}

// entry is how one key is served.
type entry struct {
	min, max   int16
	advertised int16 // the least version that ApiVersions names; at most min
	handler    Handler
	precheck   func(version int16, body []byte) error // before kmsg decodes; may be nil
}

// table is the one place that says what is served. It is written before Serve and
// only read afterwards, so it needs no lock.
type table struct {
	entries [kmsg.MaxKey + 1]entry // by key; a nil handler is a key that is not served
}

// Register lets h serve versions min to max of a key. It is for the start of the
// program, before Serve, and panics when the programmer got it wrong: the key is
// taken, or the codec does not know these versions.
func (s *Server) Register(key, min, max int16, h Handler) {
	req := kmsg.RequestForKey(key)
	switch {
	case req == nil:
		panic(fmt.Sprintf("wire: the codec does not know key %d", key))
	case h == nil || min < 0 || min > max || max > req.MaxVersion():
		panic(fmt.Sprintf("wire: key %d cannot serve %d to %d, the codec knows 0 to %d", key, min, max, req.MaxVersion()))
	case s.table.entries[key].handler != nil:
		panic(fmt.Sprintf("wire: key %d is registered twice", key))
	}
	e := entry{min: min, max: max, advertised: min, handler: h}
	if key == keyProduce {
		e.precheck = checkProduce
	}
	s.table.entries[key] = e
}

// Advertise makes ApiVersions name an older least version than the one served.
// It exists for one known client: see Produce in package api.
func (s *Server) Advertise(key, min int16) {
	e := &s.table.entries[key]
	if e.handler == nil || min < 0 || min > e.min {
		panic(fmt.Sprintf("wire: key %d cannot advertise version %d", key, min))
	}
	e.advertised = min
}

// Versions is the version table, by key, as ApiVersions is to tell it.
func (s *Server) Versions() []VersionRange { return s.table.versions() }

func (t *table) versions() []VersionRange {
	var all []VersionRange
	for key := range t.entries {
		if e := &t.entries[key]; e.handler != nil {
			all = append(all, VersionRange{Key: int16(key), Min: e.advertised, Max: e.max})
		}
	}
	return all
}

func (t *table) lookup(key, version int16) (*entry, error) {
	if key < 0 || int(key) >= len(t.entries) || t.entries[key].handler == nil {
		return nil, fmt.Errorf("%w: key %d", ErrUnsupported, key)
	}
	e := &t.entries[key]
	if version < e.min || version > e.max {
		return nil, fmt.Errorf("%w: key %d (%s) version %d, served are %d to %d",
			ErrUnsupported, key, kmsg.NameForKey(key), version, e.min, e.max)
	}
	return e, nil
}

// apiVersionsTooNew tells whether the header is of an ApiVersions request that is
// newer than we are. Its sender cannot know better yet, so it gets an answer.
func (t *table) apiVersionsTooNew(h header) bool {
	return h.key == keyApiVersions && h.version > t.entries[keyApiVersions].max &&
		t.entries[keyApiVersions].handler != nil
}

// downgrade answers an ApiVersions request that is too new: in version 0, which
// every client reads, with the error and the whole table, so that the client asks
// again in a version that we have. (Kafka names only key 18 here; clients look
// only for that one, or take the table as it is, and then need all of it.)
func (t *table) downgrade(context.Context, *Request) Answer {
	resp := kmsg.NewPtrApiVersionsResponse()
	resp.ErrorCode = kerr.UnsupportedVersion.Code
	for _, v := range t.versions() {
		k := kmsg.NewApiVersionsResponseApiKey()
		k.ApiKey, k.MinVersion, k.MaxVersion = v.Key, v.Min, v.Max
		resp.ApiKeys = append(resp.ApiKeys, k)
	}
	return Ready(resp)
}
