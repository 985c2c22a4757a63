package main

import (
	"fmt"
	"strconv"
	"time"

	"github.com/muster-io/muster/rebalance/consumer"
)

// format prints records by a template with kcat's tokens: %t topic, %p partition,
// %o offset, %k key, %s value, %T timestamp in milliseconds, %% a percent sign,
// and the escapes \n, \t, \r, \0 and \\; and two of our own: %f the fencing token of
// the partition, %N the time in nanoseconds, taken before it is seen that the
// partition is owned.
type format []func(b []byte, r *consumer.Record) []byte

func parseFormat(text string) (format, error) {
	var f format
	for i := 0; i < len(text); i++ {
		c := text[i]
		if c != '%' && c != '\\' {
			f = append(f, literal(c))
			continue
		}
		if i++; i == len(text) {
			return nil, fmt.Errorf("format %q ends with %q", text, c)
		}
		token := text[i]
		var part func(b []byte, r *consumer.Record) []byte
		if c == '%' {
			part = field(token)
		} else if to, ok := map[byte]byte{'n': '\n', 't': '\t', 'r': '\r', '0': 0, '\\': '\\'}[token]; ok {
			part = literal(to)
		}
		if part == nil {
			return nil, fmt.Errorf("format %q: unknown token %c%c", text, c, token)
		}
		f = append(f, part)
	}
	return f, nil
}

func literal(c byte) func([]byte, *consumer.Record) []byte {
	return func(b []byte, _ *consumer.Record) []byte { return append(b, c) }
}

func field(token byte) func([]byte, *consumer.Record) []byte {
	switch token {
	case '%':
		return literal('%')
	case 't':
		return func(b []byte, r *consumer.Record) []byte { return append(b, r.Partition.Topic...) }
	case 'p':
		return func(b []byte, r *consumer.Record) []byte {
			return strconv.AppendInt(b, int64(r.Partition.Number), 10)
		}
	case 'o':
		return func(b []byte, r *consumer.Record) []byte { return strconv.AppendInt(b, r.Offset, 10) }
	case 'k':
		return func(b []byte, r *consumer.Record) []byte { return append(b, r.Key...) }
	case 's':
		return func(b []byte, r *consumer.Record) []byte { return append(b, r.Value...) }
	case 'T':
		return func(b []byte, r *consumer.Record) []byte {
			return strconv.AppendInt(b, r.Timestamp.UnixMilli(), 10)
		}
	case 'f':
		return func(b []byte, r *consumer.Record) []byte { return strconv.AppendInt(b, r.Token(), 10) }
	case 'N':
		return func(b []byte, _ *consumer.Record) []byte { return strconv.AppendInt(b, time.Now().UnixNano(), 10) }
	}
	return nil
}

// print appends one record.
func (f format) print(b []byte, r *consumer.Record) []byte {
	for _, part := range f {
		b = part(b, r)
	}
	return b
}
