package etcd

import (
	"context"
	"fmt"
	"io"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// script is a stream that brings what it is given.
type script struct {
	grpc.ClientStream
	left []*pb.WatchResponse
}

func (s *script) RecvMsg(m any) error {
	if len(s.left) == 0 {
		return io.EOF
	}
	proto.Merge(m.(*pb.WatchResponse), s.left[0])
	s.left = s.left[1:]
	return nil
}

// What was said of a stream before a watch was created is not said of that watch.
func TestProgressFromBeforeAWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		at := func(rev, id int64) *pb.WatchResponse {
			return &pb.WatchResponse{Header: &pb.ResponseHeader{Revision: rev}, WatchId: id}
		}
		created, event := at(10, 3), at(10, 3)
		created.Created, event.Events = true, []*mvccpb.Event{{}}
		s := &progressStream{ClientStream: &script{left: []*pb.WatchResponse{
			at(9, clientv3.InvalidWatchID), created, at(9, clientv3.InvalidWatchID), at(10, clientv3.InvalidWatchID),
			at(10, 2), event, at(10, clientv3.InvalidWatchID), at(11, clientv3.InvalidWatchID),
			at(10, clientv3.InvalidWatchID),
		}}}
		var got []string
		for range 5 {
			var r pb.WatchResponse
			if err := s.RecvMsg(&r); err != nil {
				t.Fatal(err)
			}
			got = append(got, fmt.Sprintf("%d/%d/%v/%d", r.Header.Revision, r.WatchId, r.Created, len(r.Events)))
		}
		if want := "[9/-1/false/0 10/3/true/0 10/2/false/0 10/3/false/1 11/-1/false/0]"; fmt.Sprint(got) != want {
			t.Errorf("received %v, want %s", got, want)
		}
		time.Sleep(progressSettles)
		var r pb.WatchResponse
		if err := s.RecvMsg(&r); err != nil || r.Header.Revision != 10 {
			t.Errorf("later: %v, error %v", &r, err)
		}
	})
}

// A watch that is opened while others ask for progress is told of none before its
// events.
func TestProgressWhileWatchesAreOpened(t *testing.T) {
	t.Parallel()
	st := openOwn(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	var work sync.WaitGroup
	defer work.Wait()
	defer cancel()
	other := st.Watch(ctx, "/progress-other/", 1)
	work.Go(func() {
		for range other {
		}
	})
	work.Go(func() {
		for ctx.Err() == nil {
			st.RequestProgress(ctx)
			time.Sleep(100 * time.Microsecond)
		}
	})
	var openers sync.WaitGroup
	for i := range 20 {
		openers.Go(func() {
			for n := range 15 {
				prefix := fmt.Sprintf("/progress/%d-%d/", i, n)
				first := put(t, st, prefix+"a", "1")
				last := put(t, st, prefix+"b", "1")
				watching, stop := context.WithCancel(ctx)
				changes := st.Watch(watching, prefix, first)
				for seen := int64(0); seen < last; {
					r, ok := <-changes
					if !ok || r.Err != nil {
						t.Errorf("the watch ended: %v", r.Err)
						break
					}
					if r.Progress && r.Revision >= last {
						t.Errorf("progress %d, and the events %d and %d have not come", r.Revision, first, last)
						break
					}
					for _, e := range r.Events {
						seen = e.ModRevision
					}
				}
				stop()
			}
		})
	}
	openers.Wait()
}
