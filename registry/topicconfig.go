package registry

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
)

// ErrTopicConfig refuses a setting of a topic: its name is not known, or its value
// is not of its type.
var ErrTopicConfig = errors.New("invalid topic setting")

// topicSetting is what is known of one of Kafka's topic settings.
type topicSetting struct {
	check    func(value string) error
	honoured bool // by the daemon, today
}

// topicSettings are the settings that Kafka knows for topics, from 0.8 to 4.
var topicSettings = map[string]topicSetting{
	"cleanup.policy":            {check: listOf("compact", "delete")},
	"compression.gzip.level":    {check: integer(-1, 9)},
	"compression.lz4.level":     {check: integer(1, 17)},
	"compression.type":          {check: oneOf("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer")},
	"compression.zstd.level":    {check: integer(-131072, 22)},
	"delete.retention.ms":       {check: integer(0, math.MaxInt64)},
	"file.delete.delay.ms":      {check: integer(0, math.MaxInt64)},
	"flush.messages":            {check: integer(1, math.MaxInt64)},
	"flush.ms":                  {check: integer(0, math.MaxInt64)},
	"index.interval.bytes":      {check: integer(0, math.MaxInt32), honoured: true},
	"local.retention.bytes":     {check: integer(-2, math.MaxInt64)},
	"local.retention.ms":        {check: integer(-2, math.MaxInt64)},
	"max.compaction.lag.ms":     {check: integer(1, math.MaxInt64)},
	"max.message.bytes":         {check: integer(0, math.MaxInt32), honoured: true},
	"message.timestamp.type":    {check: oneOf("CreateTime", "LogAppendTime")},
	"min.cleanable.dirty.ratio": {check: ratio},
	"min.compaction.lag.ms":     {check: integer(0, math.MaxInt64)},
	"min.insync.replicas":       {check: integer(1, math.MaxInt32)},
	"preallocate":               {check: oneOf("true", "false")},
	"remote.log.copy.disable":   {check: oneOf("true", "false")},
	"remote.storage.enable":     {check: oneOf("true", "false")},
	"retention.bytes":           {check: integer(-1, math.MaxInt64)},
	"retention.ms":              {check: integer(-1, math.MaxInt64)},
	"segment.bytes":             {check: integer(14, math.MaxInt32), honoured: true},
	"segment.index.bytes":       {check: integer(4, math.MaxInt32)},
	"segment.jitter.ms":         {check: integer(0, math.MaxInt64)},
	"segment.ms":                {check: integer(1, math.MaxInt64)},

	"follower.replication.throttled.replicas": {check: anything},
	"leader.replication.throttled.replicas":   {check: anything},
	"message.downconversion.enable":           {check: oneOf("true", "false")},
	"message.format.version":                  {check: anything},
	"message.timestamp.after.max.ms":          {check: integer(0, math.MaxInt64)},
	"message.timestamp.before.max.ms":         {check: integer(0, math.MaxInt64)},
	"message.timestamp.difference.max.ms":     {check: integer(0, math.MaxInt64)},
	"remote.log.delete.on.disable":            {check: oneOf("true", "false")},
	"unclean.leader.election.enable":          {check: oneOf("true", "false")},
}

// ValidateTopicConfig refuses settings that Kafka does not know for topics, and
// values that are not of their type, by name.
func ValidateTopicConfig(config map[string]string) error {
	for _, name := range slices.Sorted(maps.Keys(config)) {
		setting, known := topicSettings[name]
		if !known {
			return fmt.Errorf("%w %q: no such setting", ErrTopicConfig, name)
		}
		if err := setting.check(config[name]); err != nil {
			return fmt.Errorf("%w %s=%q: %w", ErrTopicConfig, name, clip([]byte(config[name])), err)
		}
	}
	return nil
}

func anything(string) error { return nil }

func integer(least, most int64) func(string) error {
	return func(value string) error {
		n, err := strconv.ParseInt(value, 10, 64)
		if err != nil || n < least || n > most {
			return fmt.Errorf("want a number from %d to %d", least, most)
		}
		return nil
	}
}

func ratio(value string) error {
	f, err := strconv.ParseFloat(value, 64)
	if err != nil || !(f >= 0 && f <= 1) {
		return errors.New("want a number from 0 to 1")
	}
	return nil
}

func oneOf(values ...string) func(string) error {
	return func(value string) error {
		if !slices.Contains(values, value) {
			return fmt.Errorf("want %s", strings.Join(values, " or "))
		}
		return nil
	}
}

func listOf(values ...string) func(string) error {
	one := oneOf(values...)
	return func(value string) error {
		for part := range strings.SplitSeq(value, ",") {
			if err := one(strings.TrimSpace(part)); err != nil {
				return fmt.Errorf("%w, or both with a comma", err)
			}
		}
		return nil
	}
}
