package wire

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math"
	"testing"

	"github.com/twmb/franz-go/pkg/kmsg"
)

// servedKeys are those of package api; tests of this package answer them emptily.
var servedKeys = []int16{0, 1, 2, 3, 18, 22}

func empty(_ context.Context, r *Request) Answer { return Ready(r.Body.ResponseKind()) }

// everyVersion serves all that the codec knows of the served keys.
func everyVersion(o Options) *Server {
	s := New(o)
	for _, key := range servedKeys {
		s.Register(key, 0, kmsg.RequestForKey(key).MaxVersion(), empty)
	}
	return s
}

// frameOf is the frame of a request, without its size.
func frameOf(req kmsg.Request, version int16) []byte {
	req.SetVersion(version)
	return kmsg.NewRequestFormatter(kmsg.FormatterClientID("test")).AppendRequest(nil, req, 77)[4:]
}

// sample is a request with something in its arrays.
func sample(key int16) kmsg.Request {
	switch req := kmsg.RequestForKey(key).(type) {
	case *kmsg.ProduceRequest:
		req.Acks = -1
		topic := kmsg.NewProduceRequestTopic()
		topic.Topic = "orders"
		part := kmsg.NewProduceRequestTopicPartition()
		part.Records = []byte("records")
		topic.Partitions = append(topic.Partitions, part, part)
		req.Topics = append(req.Topics, topic, topic)
		return req
	case *kmsg.FetchRequest:
		topic := kmsg.NewFetchRequestTopic()
		topic.Topic = "orders"
		topic.Partitions = append(topic.Partitions, kmsg.NewFetchRequestTopicPartition())
		req.Topics = append(req.Topics, topic)
		return req
	case *kmsg.ListOffsetsRequest:
		topic := kmsg.NewListOffsetsRequestTopic()
		topic.Topic = "orders"
		topic.Partitions = append(topic.Partitions, kmsg.NewListOffsetsRequestTopicPartition())
		req.Topics = append(req.Topics, topic)
		return req
	case *kmsg.MetadataRequest:
		topic := kmsg.NewMetadataRequestTopic()
		topic.Topic = kmsg.StringPtr("orders")
		req.Topics = append(req.Topics, topic)
		return req
	default:
		return req
	}
}

func TestDecodeEveryKeyAndVersion(t *testing.T) {
	s := everyVersion(Options{})
	for _, key := range servedKeys {
		for version := int16(0); version <= kmsg.RequestForKey(key).MaxVersion(); version++ {
			frame := frameOf(sample(key), version)
			h, req, err := s.table.decode(frame)
			if err != nil {
				t.Errorf("key %d version %d: %v", key, version, err)
				continue
			}
			if h.clientID != "test" || h.correlationID != 77 || h.key != key || h.version != version {
				t.Errorf("key %d version %d: header %+v", key, version, h)
			}
			if again := frameOf(req, version); !bytes.Equal(again, frame) {
				t.Errorf("key %d version %d: decoded differently:\n%x\n%x", key, version, frame, again)
			}
			// Kafka takes what follows the body, too.
			if _, _, err := s.table.decode(append(frame, 1, 2, 3)); err != nil {
				t.Errorf("key %d version %d, trailing bytes: %v", key, version, err)
			}
			for cut := range frame {
				var refused *FrameError
				if _, _, err := s.table.decode(frame[:cut]); err != nil && !errors.As(err, &refused) {
					t.Errorf("key %d version %d, %d bytes: %v", key, version, cut, err)
				}
			}
		}
	}
}

func TestDecodeRefuses(t *testing.T) {
	s := New(Options{})
	s.Register(0, 3, 13, empty)
	s.Register(3, 0, 13, empty)
	head := func(key, version int16, rest ...byte) []byte {
		b := binary.BigEndian.AppendUint16(nil, uint16(key))
		b = binary.BigEndian.AppendUint16(b, uint16(version))
		return append(append(b, 0, 0, 0, 7), rest...)
	}
	for name, test := range map[string]struct {
		frame []byte
		want  error
	}{
		"nothing":                  {nil, ErrHeader},
		"no client id":             {head(3, 0), ErrHeader},
		"client id of -2 bytes":    {head(3, 0, 0xff, 0xfe), ErrHeader},
		"client id cut":            {head(3, 0, 0, 5, 'a'), ErrHeader},
		"no tags":                  {head(3, 9, 0, 0), ErrHeader},
		"tag cut":                  {head(3, 9, 0, 0, 1, 0, 9), ErrHeader},
		"too many tags":            {head(3, 9, 0, 0, 200, 1), ErrHeader},
		"varint without end":       {head(3, 9, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff), ErrHeader},
		"varint beyond 32 bits":    {head(3, 9, 0, 0, 0xff, 0xff, 0xff, 0xff, 0x7f), ErrHeader},
		"body cut":                 {head(3, 0, 0, 0, 0, 0, 0, 2, 0, 1, 'a'), ErrBody},
		"array larger than frame":  {head(3, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff), ErrBody},
		"key not served":           {head(11, 0, 0, 0), ErrUnsupported},
		"key that does not exist":  {head(200, 0, 0, 0), ErrUnsupported},
		"negative key":             {head(-1, 0, 0, 0), ErrUnsupported},
		"version too old":          {head(0, 2, 0, 0), ErrUnsupported},
		"version too new":          {head(3, 14, 0, 0), ErrUnsupported},
		"negative version":         {head(3, -1, 0, 0), ErrUnsupported},
		"produce with many topics": {manyTopics(), ErrBody},
	} {
		_, _, err := s.table.decode(test.frame)
		var refused *FrameError
		if !errors.Is(err, test.want) || !errors.As(err, &refused) {
			t.Errorf("%s: %v, want %v", name, err, test.want)
		}
	}
}

// manyTopics is a small frame that kmsg would make a lot of memory of.
func manyTopics() []byte {
	req := kmsg.NewPtrProduceRequest()
	req.Topics = make([]kmsg.ProduceRequestTopic, maxProduceEntries+1)
	return frameOf(req, 9)
}

func TestProduceCountsAreBoundedBeforeTheyAreAllocated(t *testing.T) {
	s := everyVersion(Options{})
	frame := manyTopics()
	allocated := testing.Benchmark(func(b *testing.B) {
		for b.Loop() {
			_, _, _ = s.table.decode(frame)
		}
	}).AllocedBytesPerOp()
	if allocated > 100_000 {
		t.Errorf("%d bytes allocated to refuse a frame of %d", allocated, len(frame))
	}
}

func TestSizesOfFrames(t *testing.T) {
	for _, size := range []int32{math.MinInt32, -1, 0, minFrame - 1, MaxProduceFrame + 1, math.MaxInt32} {
		if err := checkSize(size); !errors.Is(err, ErrFrameSize) {
			t.Errorf("size %d: %v", size, err)
		}
	}
	if err := checkSize(MaxProduceFrame); err != nil {
		t.Error(err)
	}
	if err := checkKeySize(keyProduce, MaxProduceFrame); err != nil {
		t.Error(err)
	}
	if err := checkKeySize(1, MaxFrame); err != nil {
		t.Error(err)
	}
	if err := checkKeySize(1, MaxFrame+1); !errors.Is(err, ErrFrameSize) {
		t.Errorf("%v", err)
	}
}

func TestRegisterRefusesMistakes(t *testing.T) {
	for name, register := range map[string]func(*Server){
		"unknown key":         func(s *Server) { s.Register(999, 0, 1, empty) },
		"codec is older":      func(s *Server) { s.Register(3, 0, 99, empty) },
		"turned around":       func(s *Server) { s.Register(3, 5, 4, empty) },
		"no handler":          func(s *Server) { s.Register(3, 0, 1, nil) },
		"twice":               func(s *Server) { s.Register(3, 0, 1, empty); s.Register(3, 2, 3, empty) },
		"advertised too new":  func(s *Server) { s.Register(3, 0, 1, empty); s.Advertise(3, 1) },
		"advertised unserved": func(s *Server) { s.Advertise(3, 0) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			register(New(Options{}))
		}()
	}
}

// FuzzDecode feeds the decoder what a client could send. It must neither panic nor
// ask for memory out of proportion.
func FuzzDecode(f *testing.F) {
	s := everyVersion(Options{})
	for _, key := range servedKeys {
		for version := int16(0); version <= kmsg.RequestForKey(key).MaxVersion(); version++ {
			f.Add(frameOf(sample(key), version))
		}
	}
	f.Add(manyTopics()[:1000])
	f.Fuzz(func(t *testing.T, frame []byte) {
		h, req, err := s.table.decode(frame)
		if err != nil {
			var refused *FrameError
			if !errors.As(err, &refused) || refused.Key != h.key || err.Error() == "" {
				t.Fatalf("refused with %#v", err)
			}
			return
		}
		if req.Key() != h.key || req.GetVersion() != h.version {
			t.Fatalf("header %+v, body key %d version %d", h, req.Key(), req.GetVersion())
		}
		if s.table.entries[h.key].precheck != nil {
			if n := len(req.(*kmsg.ProduceRequest).Topics); n > maxProduceEntries {
				t.Fatalf("%d topics", n)
			}
		}
		appendResponse(nil, h.correlationID, req.ResponseKind())
	})
}
