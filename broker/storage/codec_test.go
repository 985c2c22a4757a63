package storage_test

import (
	"bytes"
	"math"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/muster-io/muster/broker/storage"
)

// franz-go compresses, as its clients do; its bound of what may come out is ours.
func TestCodecs(t *testing.T) {
	for name, codec := range map[string]kgo.CompressionCodec{
		"gzip": kgo.GzipCompression(), "snappy": kgo.SnappyCompression(), "lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression(),
	} {
		t.Run(name, func(t *testing.T) {
			c, err := kgo.DefaultCompressor(codec)
			if err != nil {
				t.Fatal(err)
			}
			plain := bytes.Repeat([]byte("muster "), 100_000)
			packed, used := c.Compress(new(bytes.Buffer), plain)
			got, err := storage.Decompress(int8(used), packed, len(plain))
			if err != nil || !bytes.Equal(got, plain) {
				t.Fatalf("codec %d: %d bytes, %v", used, len(got), err)
			}
			if got, err := storage.Decompress(int8(used), packed, len(plain)-1); err == nil {
				t.Errorf("%d bytes in spite of the limit", len(got))
			}
			if got, err := storage.Decompress(int8(used), packed[:len(packed)/2], math.MaxInt32); err == nil && bytes.Equal(got, plain) {
				t.Error("half of it gave all")
			}
		})
	}
}
