package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// transferLimit bounds one transfer of all records.
const transferLimit = 3 * time.Minute

// separator stands between key and value of a line.
const separator = ":"

// input is a file of keyed lines.
type input struct {
	path    string
	records int
	values  int64 // bytes of all values, each with a newline: what consume prints
	payload int64 // bytes of all keys and values
}

// words of which the values are made. Text compresses: noise would not, and one
// line over and over would too well.
var words = strings.Fields("partition owner lease broker consumer group offset record topic watch commit claim release session fence " +
	"revision member share range slice stream deliver segment append sync batch recover truncate header index epoch leader")

// makeInput writes lines of about 100 bytes, the same at every call.
func (b *bench) makeInput(records int) (in input, err error) {
	in = input{path: filepath.Join(b.dir, fmt.Sprintf("lines-%d", records)), records: records}
	f, err := os.Create(in.path)
	if err != nil {
		return in, err
	}
	defer f.Close()
	random := rand.New(rand.NewPCG(1, 2))
	w := bufio.NewWriterSize(f, 1<<20)
	var value []byte
	for i := range records {
		key := fmt.Sprintf("key-%05d", random.IntN(100_000))
		value = fmt.Appendf(value[:0], "%d", i)
		for len(value) < 82 {
			value = append(append(value, ' '), words[random.IntN(len(words))]...)
		}
		in.values += int64(len(value)) + 1
		in.payload += int64(len(key) + len(value))
		fmt.Fprintf(w, "%s%s%s\n", key, separator, value)
	}
	return in, w.Flush()
}

// fill makes a topic with records in it.
func (d *daemon) fill(ctx context.Context, topic string, records int) error {
	if err := d.createTopic(ctx, topic, partitions); err != nil {
		return err
	}
	return d.produce(ctx, topic, records)
}

func (d *daemon) produce(ctx context.Context, topic string, records int) error {
	in, err := d.b.makeInput(records)
	if err != nil {
		return err
	}
	_, err = d.feed(ctx, in, d.kcat(topic)...)
	return err
}

func (d *daemon) kcat(topic string, more ...string) []string {
	return append([]string{"kcat", "-P", "-b", d.kafka, "-t", topic, "-K", separator}, more...)
}

// feed runs a producer on the file, and returns how long that took from its start
// to its end: by then every record is acknowledged.
func (d *daemon) feed(ctx context.Context, in input, args ...string) (time.Duration, error) {
	f, err := os.Open(in.path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	p, err := d.b.start(spec{name: "producer", args: args, stdin: f})
	if err != nil {
		return 0, err
	}
	defer p.kill()
	if err := p.wait(ctx, transferLimit); err != nil {
		return 0, err
	}
	return time.Since(p.started), nil
}

// measureThroughput writes and reads the same records again and again, each time
// in a topic of its own.
func (b *bench) measureThroughput(ctx context.Context) error {
	in, err := b.makeInput(b.records)
	if err != nil {
		return err
	}
	p, err := freePorts()
	if err != nil {
		return err
	}
	d, err := b.startDaemon(ctx, filepath.Join(b.dir, "throughput"), p)
	if err != nil {
		return err
	}
	defer d.kill()
	for i := range b.runs {
		plain, lz4, own := fmt.Sprintf("plain-%d", i), fmt.Sprintf("lz4-%d", i), fmt.Sprintf("own-%d", i)
		producers := []struct {
			name, topic string
			args        []string
		}{
			{"kcat produces", plain, d.kcat(plain)},
			{"kcat -z lz4 produces", lz4, d.kcat(lz4, "-z", "lz4")},
			{"muster produce", own, d.client("produce", "--topic", own, "--key-separator", separator)},
		}
		for _, producer := range producers {
			if err := d.createTopic(ctx, producer.topic, partitions); err != nil {
				return err
			}
			took, err := d.feed(ctx, in, producer.args...)
			if err != nil {
				return err
			}
			b.addRate(producer.name, in, took)
			if err := d.expectStored(ctx, producer.topic, int64(in.records)); err != nil {
				return err
			}
		}
		for _, to := range []string{"/dev/null", filepath.Join(b.dir, "consumed")} {
			if err := d.measureConsume(ctx, in, plain, to); err != nil {
				return err
			}
		}
	}
	for _, field := range []string{"VmRSS", "RssAnon", "VmHWM"} {
		mib, err := d.memory(field)
		if err != nil {
			return err
		}
		b.figure("throughput", "daemon after all that, "+field, "MiB").add(mib)
	}
	return d.stop(ctx)
}

func (b *bench) addRate(name string, in input, took time.Duration) {
	b.figure("throughput", name, "records/s").add(float64(in.records) / took.Seconds())
	b.figure("throughput", name+" (payload)", "MB/s").add(float64(in.payload) / 1e6 / took.Seconds())
}

// measureConsume has one consumer read a topic from its beginning, and takes the
// time from its start to its last write.
func (d *daemon) measureConsume(ctx context.Context, in input, topic, to string) error {
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	defer out.Close()
	name, progress := "consume to a file", func(*process) (int64, error) {
		info, err := out.Stat()
		if err != nil {
			return 0, err
		}
		return info.Size(), nil
	}
	if to == os.DevNull {
		name, progress = "consume to /dev/null", (*process).written
	}
	group := strings.ReplaceAll(name, " ", "-") + "-" + topic
	group = strings.ReplaceAll(group, "/", "-")
	c, err := d.b.start(spec{
		name:   "consume",
		args:   d.client("consume", "--group", group, "--topic", topic, "--from-beginning", "--format", `%s\n`),
		stdout: out,
	})
	if err != nil {
		return err
	}
	defer c.kill()
	// What goes to sockets counts as written, too, where there is no file to look at:
	// some ten thousand bytes of a hundred million, so that the last records may still
	// be on their way when the time is taken.
	err = until(ctx, time.Millisecond, transferLimit, "read all records", func() (bool, error) {
		if err := c.alive(); err != nil {
			return false, err
		}
		n, err := progress(c)
		return n >= in.values, err
	})
	took := time.Since(c.started)
	if err != nil {
		return c.explain(err)
	}
	d.b.addRate(name, in, took)
	mib, err := c.memory("VmHWM")
	if err != nil {
		return err
	}
	d.b.figure("throughput", "consumer's memory at most (VmHWM)", "MiB").add(mib)
	if err := d.expectCommitted(ctx, group, int64(in.records)); err != nil {
		return err
	}
	return c.stop(ctx)
}

// expectStored makes sure that the producer's records are all there.
func (d *daemon) expectStored(ctx context.Context, topic string, records int64) error {
	args := []string{"kcat", "-Q", "-b", d.kafka}
	for n := range partitions {
		args = append(args, "-t", fmt.Sprintf("%s:%d:-1", topic, n))
	}
	text, err := d.b.capture(ctx, "kcat-offsets", args...)
	if err != nil {
		return err
	}
	var sum int64
	for line := range strings.Lines(text) { // orders [3] offset 1234
		fields := strings.Fields(line)
		n, err := strconv.ParseInt(fields[len(fields)-1], 10, 64)
		if err != nil {
			return fmt.Errorf("kcat -Q: %q does not end with an offset", line)
		}
		sum += n
	}
	if sum != records {
		return fmt.Errorf("topic %s has %d records of %d", topic, sum, records)
	}
	return nil
}

// expectCommitted makes sure that what was measured is the whole: the consumer
// commits as many records as were produced. It does so every second.
func (d *daemon) expectCommitted(ctx context.Context, group string, records int64) error {
	var sum int64
	err := until(ctx, 200*time.Millisecond, startLimit, "commit all records", func() (bool, error) {
		var err error
		sum, err = d.committed(ctx, group)
		return sum == records, err
	})
	if err != nil {
		return fmt.Errorf("group %s has consumed %d records of %d: %w", group, sum, records, err)
	}
	return nil
}

func (d *daemon) committed(ctx context.Context, group string) (sum int64, err error) {
	text, err := d.b.capture(ctx, "groups-describe", d.client("groups", "describe", group, "-o", "json")...)
	if err != nil {
		return 0, err
	}
	var described struct {
		Partitions []struct {
			Offset *int64 `json:"offset"`
		} `json:"partitions"`
	}
	if err := json.Unmarshal([]byte(text), &described); err != nil {
		return 0, fmt.Errorf("groups describe %s: %w", group, err)
	}
	for _, row := range described.Partitions {
		if row.Offset != nil {
			sum += *row.Offset
		}
	}
	return sum, nil
}
