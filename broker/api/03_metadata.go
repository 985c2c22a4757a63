package api

import (
	"context"
	"errors"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/broker/wire"
)

// Metadata (key 3): the brokers, and who leads the partitions of which topics.
//
// A topic that does not exist is created if the request allows it and the daemon
// is set to; it is answered as it is then, or with LEADER_NOT_AVAILABLE while the
// registry does not show it yet, and the client asks again. Every topic has its own
// error; none fails the whole answer. A leader that is not alive is told as none,
// with LEADER_NOT_AVAILABLE; replicas on brokers that are not alive are offline.
//
// Not done: authorized operations are never told (there is no authorization), which
// the field's default says.
//
// Versions:
//
//	0    an empty list asks for all topics
//	1    null asks for all, an empty list for none; controller, rack, internal
//	2    cluster id
//	4    the request says whether topics may be created; before, they may
//	5    offline replicas
//	7    leader epoch
//	9    flexible
//	10   topic ids in the response
//	12   a topic may be named by its id alone; before, that is INVALID_REQUEST
//	13   an error for the whole response: we have none
const (
	metadataMin          = 0
	metadataMax          = 13
	metadataNullIsAll    = 1
	metadataAllowsCreate = 4
	metadataByID         = 12
)

// maxTopicName is Kafka's limit: a directory is named after topic and partition.
const maxTopicName = 249

func (h *handlers) registerMetadata(srv *wire.Server) {
	srv.Register(int16(kmsg.Metadata), metadataMin, metadataMax, h.metadata)
}

func (h *handlers) metadata(_ context.Context, r *wire.Request) wire.Answer {
	req := r.Body.(*kmsg.MetadataRequest)
	return func(ctx context.Context) (kmsg.Response, error) {
		failed, err := h.createMissing(ctx, req)
		if err != nil {
			return nil, err
		}
		resolve := h.resolver() // after the creation: it may show what was made
		resp := kmsg.NewPtrMetadataResponse()
		describeCluster(resp, &resolve.snap)
		if asksForAll(req) {
			for topic := range resolve.snap.Topics.All() {
				resp.Topics = append(resp.Topics, describeTopic(&topic, &resolve.snap))
			}
			return resp, nil
		}
		for i := range req.Topics {
			resp.Topics = append(resp.Topics, resolve.askedTopic(req.Version, &req.Topics[i], failed))
		}
		return resp, nil
	}
}

func asksForAll(req *kmsg.MetadataRequest) bool {
	if req.Version < metadataNullIsAll {
		return len(req.Topics) == 0
	}
	return req.Topics == nil
}

// createMissing creates the topics that the request names and that do not exist,
// if that is wanted. It returns the error code for each that is not there even so.
func (h *handlers) createMissing(ctx context.Context, req *kmsg.MetadataRequest) (map[string]int16, error) {
	if !h.opts.AutoCreateTopics || req.Version >= metadataAllowsCreate && !req.AllowAutoTopicCreation {
		return nil, nil
	}
	snap := h.cluster.Snapshot()
	failed := make(map[string]int16)
	wait, cancel := context.WithTimeout(ctx, registryWait)
	defer cancel()
	for i := range req.Topics {
		name := req.Topics[i].Topic
		if name == nil || uuid.UUID(req.Topics[i].TopicID) != uuid.Nil || !validTopic(*name) {
			continue
		}
		if _, exists := snap.Topics.Get(*name); exists {
			continue
		}
		if _, seen := failed[*name]; seen {
			continue
		}
		failed[*name] = kerr.LeaderNotAvailable.Code // if it is still missing afterwards
		if len(failed) > maxAutoCreate || wait.Err() != nil {
			continue
		}
		err := h.cluster.CreateTopic(wait, *name)
		if err != nil && ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if err != nil && !errors.Is(err, kerr.TopicAlreadyExists) && wait.Err() == nil {
			failed[*name] = h.code(err, "topic", *name, "request", "metadata")
		}
	}
	return failed, nil
}

func describeCluster(resp *kmsg.MetadataResponse, snap *Snapshot) {
	for _, b := range snap.Brokers {
		broker := kmsg.NewMetadataResponseBroker()
		broker.NodeID, broker.Host, broker.Port, broker.Rack = b.ID, b.Host, b.Port, rack(b)
		resp.Brokers = append(resp.Brokers, broker)
	}
	resp.ClusterID = &snap.ClusterID
	resp.ControllerID = snap.Controller
}

func rack(b Broker) *string {
	if b.Rack == "" {
		return nil
	}
	return &b.Rack
}

// askedTopic answers one entry of the request.
func (r *resolver) askedTopic(version int16, in *kmsg.MetadataRequestTopic, failed map[string]int16) kmsg.MetadataResponseTopic {
	id := uuid.UUID(in.TopicID)
	if version < metadataByID {
		if in.Topic == nil || id != uuid.Nil {
			return failedTopic(version, in, kerr.InvalidRequest.Code)
		}
	} else if id != uuid.Nil || in.Topic == nil {
		ref := r.byID(id)
		if ref.err != nil {
			return failedTopic(version, in, kerr.UnknownTopicID.Code)
		}
		topic, _ := r.snap.Topics.Get(ref.name)
		return describeTopic(&topic, &r.snap)
	}
	if topic, ok := r.snap.Topics.Get(*in.Topic); ok {
		return describeTopic(&topic, &r.snap)
	}
	if !validTopic(*in.Topic) {
		return failedTopic(version, in, kerr.InvalidTopicException.Code)
	}
	if code, ok := failed[*in.Topic]; ok {
		return failedTopic(version, in, code)
	}
	return failedTopic(version, in, kerr.UnknownTopicOrPartition.Code)
}

func failedTopic(version int16, in *kmsg.MetadataRequestTopic, code int16) kmsg.MetadataResponseTopic {
	out := kmsg.NewMetadataResponseTopic()
	out.ErrorCode, out.Topic, out.TopicID = code, in.Topic, in.TopicID
	if out.Topic == nil && version < metadataByID {
		out.Topic = new(string) // the field could not be null yet
	}
	return out
}

func describeTopic(t *Topic, snap *Snapshot) kmsg.MetadataResponseTopic {
	out := kmsg.NewMetadataResponseTopic()
	out.Topic, out.TopicID, out.IsInternal = &t.Name, t.ID, t.Internal
	out.Partitions = make([]kmsg.MetadataResponseTopicPartition, len(t.Partitions))
	for i := range t.Partitions {
		info, p := &t.Partitions[i], &out.Partitions[i]
		p.Default()
		p.Partition, p.LeaderEpoch = info.Number, info.LeaderEpoch
		p.Leader = info.Leader
		p.Replicas, p.ISR = info.Replicas, info.ISR
		if _, alive := snap.broker(info.Leader); !alive {
			p.Leader = -1
			p.ErrorCode = kerr.LeaderNotAvailable.Code
		}
		for _, id := range info.Replicas {
			if _, alive := snap.broker(id); !alive {
				p.OfflineReplicas = append(p.OfflineReplicas, id)
			}
		}
	}
	return out
}

// validTopic is Kafka's rule for new topics.
func validTopic(name string) bool {
	if name == "" || name == "." || name == ".." || len(name) > maxTopicName {
		return false
	}
	for i := range len(name) {
		if c := name[i]; !isAlphanumeric(c) && c != '.' && c != '_' && c != '-' {
			return false
		}
	}
	return true
}
