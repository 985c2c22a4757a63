package api_test

import (
	"encoding/binary"
	"encoding/hex"
	"io"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/muster-io/muster/broker/api"
)

func TestApiVersionsEveryVersion(t *testing.T) {
	b := start(t, api.Options{})
	c := b.dial(t)
	for version := range int16(5) {
		req := kmsg.NewPtrApiVersionsRequest()
		req.Version, req.ClientSoftwareName, req.ClientSoftwareVersion = version, "raw-client", "1.0"
		resp := ask[*kmsg.ApiVersionsResponse](c, req)
		if resp.ErrorCode != 0 || len(resp.ApiKeys) != 6 {
			t.Fatalf("version %d: %+v", version, resp)
		}
		for i, want := range []struct{ key, min, max int16 }{
			{0, 0, 13}, {1, 4, 18}, {2, 1, 11}, {3, 0, 13}, {18, 0, 4}, {22, 0, 5},
		} {
			if got := resp.ApiKeys[i]; got.ApiKey != want.key || got.MinVersion != want.min || got.MaxVersion != want.max {
				t.Errorf("version %d: %+v, want %+v", version, got, want)
			}
		}
	}
}

// A real Kafka's answers, from golden/kafka-4.4/api-versions.json.
func TestApiVersionsAsRecordedFromKafka(t *testing.T) {
	for name, test := range map[string]struct {
		sent, answer string // answer: a prefix of it
	}{
		"version 99": {"00120063" + "00000007" + "0003726177" + "00", "00000007" + "0023" + "00000006"},
		"version 3, name empty": {"00120003" + "00000007" + "0003726177" + "00" + "01" + "02" + "31" + "00",
			"00000007" + "002a" + "01" + "00000000" + "00"},
		"version 3, name a blank": {"00120003" + "00000007" + "0003726177" + "00" + "0220" + "0231" + "00",
			"00000007" + "002a" + "01" + "00000000" + "00"},
	} {
		b := start(t, api.Options{})
		c := b.dial(t)
		frame, err := hex.DecodeString(test.sent)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.nc.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(frame))), frame...)); err != nil {
			t.Fatal(err)
		}
		_ = c.nc.SetReadDeadline(time.Now().Add(patience))
		var size [4]byte
		if _, err := io.ReadFull(c.nc, size[:]); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		answer := make([]byte, binary.BigEndian.Uint32(size[:]))
		if _, err := io.ReadFull(c.nc, answer); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got := hex.EncodeToString(answer[:min(len(answer), len(test.answer)/2)]); got != test.answer {
			t.Errorf("%s: %s, want %s", name, got, test.answer)
		}
		// The connection goes on.
		ask[*kmsg.ApiVersionsResponse](c, kmsg.NewPtrApiVersionsRequest())
	}
}
