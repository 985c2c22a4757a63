package api

import (
	"context"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/broker/wire"
)

// ApiVersions (key 18): the version table of the server, as it was registered.
//
// A request of a version that is too new never gets here: package wire answers it
// in version 0, because its body cannot be read. The response header has no tagged
// fields in any version.
//
// Versions:
//
//	0-2  empty request
//	3    flexible; name and version of the client's software, which must be proper
//	     (else INVALID_REQUEST and an empty table, as Kafka); features: we have none
//	4    features with a minimum of 0 may be listed
//	5    (not served) checks that the client has reached the node it meant
const (
	apiVersionsMin      = 0
	apiVersionsMax      = 4
	apiVersionsSoftware = 3
)

func (h *handlers) registerAPIVersions(srv *wire.Server) {
	srv.Register(int16(kmsg.ApiVersions), apiVersionsMin, apiVersionsMax, h.apiVersions)
}

func (h *handlers) apiVersions(_ context.Context, r *wire.Request) wire.Answer {
	req := r.Body.(*kmsg.ApiVersionsRequest)
	resp := kmsg.NewPtrApiVersionsResponse()
	if req.Version >= apiVersionsSoftware && (!validSoftware(req.ClientSoftwareName) || !validSoftware(req.ClientSoftwareVersion)) {
		resp.ErrorCode = kerr.InvalidRequest.Code
		return wire.Ready(resp)
	}
	for _, v := range h.versions() {
		k := kmsg.NewApiVersionsResponseApiKey()
		k.ApiKey, k.MinVersion, k.MaxVersion = v.Key, v.Min, v.Max
		resp.ApiKeys = append(resp.ApiKeys, k)
	}
	return wire.Ready(resp)
}

// validSoftware is Kafka's rule: [a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?
func validSoftware(s string) bool {
	for i := range len(s) {
		c := s[i]
		inner := i > 0 && i < len(s)-1
		if !isAlphanumeric(c) && (!inner || (c != '-' && c != '.')) {
			return false
		}
	}
	return s != ""
}

func isAlphanumeric(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9'
}
