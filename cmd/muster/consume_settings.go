package main

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/muster-io/muster/rebalance/consumer"
)

// consumerSettings takes Kafka's consumer settings by name.
type consumerSettings struct {
	cfg     *consumer.Config
	streams int32
	// as Kafka has them; what follows from several of them is known in the end
	maxRetries, backoff, chunks *int
}

// Kafka's defaults of settings of which one alone says only half.
const (
	defaultMaxRetries = 4
	defaultBackoff    = 2000 // ms
)

// apply takes a list of NAME=VALUE.
func (s *consumerSettings) apply(list []string) error {
	for _, setting := range list {
		name, value, ok := strings.Cut(setting, "=")
		if !ok {
			return wrongUse("--set %q: want NAME=VALUE", setting)
		}
		take, known := consumerSetting[name]
		if !known {
			return wrongUse("--set %s: unknown setting; known are %s", setting, strings.Join(slices.Sorted(maps.Keys(consumerSetting)), ", "))
		}
		if err := take(s, value); err != nil {
			return wrongUse("--set %s: %w", setting, err)
		}
	}
	s.conclude()
	return nil
}

// conclude sets what follows from several settings together.
func (s *consumerSettings) conclude() {
	if s.maxRetries != nil || s.backoff != nil {
		// There is no giving up. It is complained of as often as 0.8 would have given up.
		retries, backoff := given(s.maxRetries, defaultMaxRetries), given(s.backoff, defaultBackoff)
		s.cfg.ComplaintPause = time.Duration(max(retries, 1)) * time.Duration(backoff) * time.Millisecond
	}
	if s.chunks != nil {
		fetch := s.cfg.FetchBytes
		if fetch == 0 {
			fetch = consumer.DefaultFetchBytes
		}
		s.cfg.MaxBufferedBytes = *s.chunks * fetch
	}
}

func given(v *int, otherwise int) int {
	if v == nil {
		return otherwise
	}
	return *v
}

// consumerSetting has what each setting does.
var consumerSetting = map[string]func(s *consumerSettings, value string) error{
	"consumer.id":                   func(s *consumerSettings, v string) error { s.cfg.ID = v; return nil },
	"auto.offset.reset":             func(s *consumerSettings, v string) error { s.cfg.Reset = consumer.Reset(v); return nil },
	"partition.assignment.strategy": func(s *consumerSettings, v string) error { s.cfg.Strategies = list(v); return nil },
	"zookeeper.session.timeout.ms":  func(s *consumerSettings, v string) error { return milliseconds(&s.cfg.SessionTimeout, v) },
	"auto.commit.interval.ms":       func(s *consumerSettings, v string) error { return milliseconds(&s.cfg.CommitInterval, v) },
	"auto.commit.enable":            func(s *consumerSettings, v string) error { return opposite(&s.cfg.ManualCommit, v) },
	"exclude.internal.topics":       func(s *consumerSettings, v string) error { return opposite(&s.cfg.IncludeInternal, v) },
	"rebalance.max.retries":         func(s *consumerSettings, v string) error { return number(&s.maxRetries, v, 0, 1<<20) },
	"rebalance.backoff.ms":          func(s *consumerSettings, v string) error { return number(&s.backoff, v, 1, 1<<30) },
	"queued.max.message.chunks":     func(s *consumerSettings, v string) error { return number(&s.chunks, v, 1, 1<<10) },
	"fetch.message.max.bytes": func(s *consumerSettings, v string) error {
		var n *int
		if err := number(&n, v, 1, 1<<30); err != nil {
			return err
		}
		s.cfg.FetchBytes = *n
		return nil
	},
	"num.streams": func(s *consumerSettings, v string) error {
		var n *int
		if err := number(&n, v, 1, 1<<20); err != nil {
			return err
		}
		s.streams = int32(*n)
		return nil
	},
	"offsets.storage": func(_ *consumerSettings, v string) error {
		if v != "registry" && v != "zookeeper" {
			return wrongUse("only registry (alias zookeeper) is there so far")
		}
		return nil
	},
}

// list takes a list with commas apart.
func list(text string) []string {
	return strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ' ' })
}

func milliseconds(d *time.Duration, value string) error {
	n, err := strconv.ParseInt(value, 10, 32)
	if err != nil || n <= 0 {
		return wrongUse("want a number of milliseconds above 0")
	}
	*d = time.Duration(n) * time.Millisecond
	return nil
}

// opposite sets v to what the value does not say.
func opposite(v *bool, value string) error {
	switch value {
	case "true":
		*v = false
	case "false":
		*v = true
	default:
		return wrongUse("want true or false")
	}
	return nil
}

func number(v **int, value string, least, most int) error {
	n, err := strconv.Atoi(value)
	if err != nil || n < least || n > most {
		return fmt.Errorf("want a number from %d to %d", least, most)
	}
	*v = &n
	return nil
}
