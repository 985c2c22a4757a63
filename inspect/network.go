package inspect

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/rebalance/groups"
	"github.com/muster-io/muster/registry"
)

// answerLimit is how long a broker has to accept a connection and answer.
const answerLimit = 3 * time.Second

// askedAtOnce bounds how many brokers are asked at a time.
const askedAtOnce = 16

// Network puts the questions to the brokers themselves.
func Network(ctx context.Context, q Questions) Probes {
	p := Probes{Answers: map[int32]string{}}
	var mu sync.Mutex
	var work sync.WaitGroup
	slots := make(chan struct{}, askedAtOnce)
	alive := map[int32]registry.BrokerRecord{}
	for id, rec := range q.Brokers {
		slots <- struct{}{}
		work.Go(func() {
			defer func() { <-slots }()
			_, err := ask(ctx, rec)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				p.Answers[id] = err.Error()
				return
			}
			p.Answers[id] = ""
			alive[id] = rec
		})
	}
	work.Wait()
	p.Starts, p.Ends = groups.AskLogs(ctx, alive, q.Partitions)
	return p
}

// ask returns how many kinds of requests a broker supports, or why it does not answer.
func ask(ctx context.Context, rec registry.BrokerRecord) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, answerLimit)
	defer cancel()
	address := net.JoinHostPort(rec.Host, strconv.Itoa(int(rec.Port)))
	client, err := kgo.NewClient(kgo.SeedBrokers(address), kgo.RequestRetries(0), kgo.DialTimeout(answerLimit))
	if err != nil {
		return 0, err
	}
	defer client.Close()
	request := kmsg.NewPtrApiVersionsRequest()
	request.ClientSoftwareName, request.ClientSoftwareVersion = "muster", "0"
	response, err := client.SeedBrokers()[0].Request(ctx, request)
	if err != nil {
		return 0, err
	}
	versions, ok := response.(*kmsg.ApiVersionsResponse)
	if !ok {
		return 0, fmt.Errorf("unexpected answer %T", response)
	}
	return len(versions.ApiKeys), kerr.ErrorForCode(versions.ErrorCode)
}
