package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
)

const (
	// targetExponent is what the requests of a change may grow with: a line has 1, and
	// all telling all has 2.
	targetExponent = 1.2

	growthPartitions = 1000 // in groups whose partitions stay as many
	growthEach       = 10   // for each member, in the others
	// growthOwn is up to how many members each has a connection and a view of its own.
	growthOwn   = 250
	growthHosts = 2
	// growthTTL keeps renewals out of what is counted.
	growthTTL = "60s"
)

var growthMembers = []int{10, 50, 100, 250, 500}

// series is what was counted of one change in groups of several sizes.
type series struct {
	Section  string          `json:"section"`
	Name     string          `json:"name"`
	Unit     string          `json:"unit"`
	Members  []int           `json:"members"`
	Values   []float64       `json:"values"` // medians
	Exponent float64         `json:"exponent"`
	Target   *float64        `json:"target"` // the exponent at most; null if none was set
	Runs     map[int]*figure `json:"-"`
}

func (b *bench) seriesOf(section, name, unit string) *series {
	for _, s := range b.series {
		if s.Section == section && s.Name == name {
			return s
		}
	}
	s := &series{Section: section, Name: name, Unit: unit, Runs: map[int]*figure{}}
	b.series = append(b.series, s)
	return s
}

func (s *series) add(members int, v float64) {
	f := s.Runs[members]
	if f == nil {
		f = &figure{}
		s.Runs[members] = f
		s.Members = append(s.Members, members)
	}
	f.add(v)
	s.Values = nil
	for _, n := range s.Members {
		s.Values = append(s.Values, s.Runs[n].Median)
	}
	s.Exponent = exponent(s.Members, s.Values)
}

// exponent is the slope of the values over the members, both as logarithms.
func exponent(members []int, values []float64) float64 {
	var n, x, y, xx, xy float64
	for i, v := range values {
		if v <= 0 {
			continue
		}
		lx, ly := math.Log(float64(members[i])), math.Log(v)
		n, x, y, xx, xy = n+1, x+lx, y+ly, xx+lx*lx, xy+lx*ly
	}
	if n < 2 {
		return 0
	}
	return (n*xy - x*y) / (n*xx - x*x)
}

func (s *series) verdict() string {
	switch {
	case s.Target == nil:
		return "-"
	case s.Exponent > *s.Target:
		return number(*s.Target) + " missed"
	}
	return number(*s.Target) + " met"
}

// measureGrowth counts what one change costs etcd, in groups of more and more members.
func (b *bench) measureGrowth(ctx context.Context) error {
	g, err := b.startGroups(ctx, "growth")
	if err != nil {
		return err
	}
	defer g.kill()
	var failed []error
	for _, members := range growthMembers {
		for _, strategy := range strategies {
			fixed, each := fmt.Sprintf("%d partitions", growthPartitions), fmt.Sprintf("%d for each", growthEach)
			var err error
			if members*growthEach == growthPartitions {
				err = g.growth(ctx, strategy, members, growthPartitions, fixed, each)
			} else {
				err = errors.Join(g.growth(ctx, strategy, members, growthPartitions, fixed), g.growth(ctx, strategy, members, members*growthEach, each))
			}
			if err != nil {
				failed = append(failed, fmt.Errorf("%s, %d members: %w", strategy, members, err))
			}
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
		}
	}
	return errors.Join(append(failed, g.stop(ctx))...)
}

// growth counts in one group, which is one of those that are named.
func (g *groupProbe) growth(ctx context.Context, strategy string, members, partitions int, names ...string) error {
	own, hosts := members <= growthOwn, growthHosts
	if !own {
		hosts = coldHosts
	}
	r, err := g.run(ctx, "costs", strategy, members, partitions, hosts, "-ttl", growthTTL, "-own="+strconv.FormatBool(own), "-runs", strconv.Itoa(g.b.changes))
	if err != nil {
		return err
	}
	for _, c := range r.Costs {
		if c.Change == "idle" {
			continue
		}
		for _, name := range names {
			s := g.b.seriesOf("growth", strategy+", "+name+", "+c.Change+": requests", "")
			most := targetExponent
			s.Target = &most
			s.add(members, c.Counted.Requests)
			if !own {
				continue // not each member is told of the change
			}
			add := func(what, unit string, v float64) {
				g.b.seriesOf("growth", strategy+", "+name+", "+c.Change+": "+what, unit).add(members, v)
			}
			add("messages on watches", "", c.Counted.WatchIn+c.Counted.WatchOut)
			add("to etcd", "kB", c.Counted.BytesIn/1e3)
			add("from etcd", "kB", c.Counted.BytesOut/1e3)
		}
	}
	return nil
}
