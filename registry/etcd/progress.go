package etcd

import (
	"context"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
)

// etcd tells all watches of a stream together how far they have come. It looks at
// those that there are, and its answer waits in a queue; the news that a watch was
// created waits in another, and may be sent before. The client then gives the answer
// to the new watch, too, which is told that it has come to a revision though the
// events up to there are still to come.
//
// An answer from before carries a revision that is not above the one under which the
// watch was created, and is behind it only for as long as a queue takes. What is like
// that is dropped; whoever asked asks again.

// progressSettles is how long an answer from before may be on its way after the news
// of a new watch. The queue is emptied at once, if the member is alive.
const progressSettles = 250 * time.Millisecond

// watchProgress is the interceptor that drops such answers, on streams that the client
// opens again by itself as well.
func watchProgress(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	stream, err := open(ctx, desc, cc, method, opts...)
	if err != nil || method != pb.Watch_Watch_FullMethodName {
		return stream, err
	}
	return &progressStream{ClientStream: stream}, nil
}

type progressStream struct {
	grpc.ClientStream
	created int64 // newest revision under which a watch was created
	at      time.Time
}

// RecvMsg implements grpc.ClientStream.
func (s *progressStream) RecvMsg(m any) error {
	for {
		if err := s.ClientStream.RecvMsg(m); err != nil {
			return err
		}
		r, ok := m.(*pb.WatchResponse)
		if !ok || r.Header == nil {
			return nil
		}
		if r.Created {
			s.created, s.at = max(s.created, r.Header.Revision), time.Now()
		}
		toAll := r.WatchId == clientv3.InvalidWatchID && !r.Created && !r.Canceled && len(r.Events) == 0
		if !toAll || r.Header.Revision > s.created || time.Since(s.at) >= progressSettles {
			return nil
		}
		r.Reset()
	}
}
