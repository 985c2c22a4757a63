package rebalance

import (
	"cmp"
	"math"
	"slices"
)

// flow balances classes that have members in common, which is where members
// subscribe to different topics. It is a flow of partitions
//
//	class ──► member in the class ──► thread ──► sink
//
// at least cost. One more partition costs a thread the more, the more it has. Less
// than any of that costs one that comes to a member beyond what it had of the class;
// less than any of those, one that comes to a thread beyond what that had. A flow is
// the cheapest if and only if no cycle of changes makes it cheaper: so begin with
// what is kept, pour the rest where least is, and follow such cycles until there is
// none.
// (The balance is that of an optimal semi-matching: Harvey, Ladner, Lovász, Tamir, 2003.)
//
// A search for cycles takes a few passes over the threads of all classes, about as
// many as the chains of moves are long; BenchmarkStickyDifferent has figures.
type flow struct {
	st      *sticky
	classes []int
	edges   []edge  // those from classes, each followed by those of its member; then those to the sink
	nodes   []node  // classes, in order; members and threads; the sink is the last
	loads   []int32 // node of a thread -> its edge to the sink
}

// node is on the cheapest way that was found so far; a label says how cheap.
type node struct {
	label int64
	by    int32 // the edge by which the way comes: 1+edge, or -1-edge against its direction; 0 is none
	seen  int32 // by which walk along the ways
}

// edge carries partitions. Those beyond had cost over each; an edge to the sink
// costs by its distance from had, the average.
type edge struct {
	from, to  int32
	had, has  int32
	over      int64
	toTheSink bool
}

// Costs are compared as one number, in which the members of a whole chain of moves do
// not add up to a step in the balance, nor the streams to a member.
const (
	costStream  = 1
	costMember  = 1 << 18
	costBalance = 1 << 36
)

func newFlow(st *sticky, classes []int) *flow {
	f := &flow{st: st, classes: classes, nodes: make([]node, len(classes))}
	nodeOf := make(map[int32]int32) // thread -> node
	var threads []int32
	total := 0
	for from, k := range classes {
		c := &st.classes[k]
		total += c.size
		for _, p := range c.pairs {
			member := f.addNode()
			f.edges = append(f.edges, edge{from: int32(from), to: member, had: p.had, over: costMember})
			for _, u := range c.units[p.first:p.end] {
				at, found := nodeOf[u.thread]
				if !found {
					at = f.addNode()
					nodeOf[u.thread] = at
					threads = append(threads, at)
				}
				f.edges = append(f.edges, edge{from: member, to: at, had: u.had, over: costStream})
			}
		}
	}
	sink := f.addNode()
	f.loads = make([]int32, len(f.nodes))
	for _, at := range threads {
		f.loads[at] = int32(len(f.edges))
		f.edges = append(f.edges, edge{from: at, to: sink, had: int32(total / len(threads)), toTheSink: true})
	}
	f.begin()
	return f
}

func (f *flow) addNode() int32 {
	f.nodes = append(f.nodes, node{})
	return int32(len(f.nodes) - 1)
}

// units visits the edges to threads of each class, with the edge to their member.
func (f *flow) units(visit func(class int, member, thread *edge, u *unit)) {
	e := 0
	for i, k := range f.classes {
		c := &f.st.classes[k]
		for _, p := range c.pairs {
			member := &f.edges[e]
			e++
			for j := p.first; j < p.end; j++ {
				visit(i, member, &f.edges[e], &c.units[j])
				e++
			}
		}
	}
}

// begin keeps what can be kept, and pours the rest where least is, class by class,
// those with the fewest threads first. That is done over, as what was poured later
// may have made uneven what was poured before: it is soon nearly even.
func (f *flow) begin() {
	pours := make([]*pour, len(f.classes))
	for i, k := range f.classes {
		pours[i] = &pour{rest: int32(f.st.classes[k].size)}
	}
	f.units(func(i int, member, thread *edge, u *unit) {
		w := &way{member: member, thread: thread, load: &f.edges[f.loads[thread.to]]}
		w.put(u.had)
		pours[i].ways = append(pours[i].ways, w)
		pours[i].rest -= u.had
	})
	slices.SortStableFunc(pours, func(a, b *pour) int { return cmp.Compare(len(a.ways), len(b.ways)) })
	pours = slices.DeleteFunc(pours, func(p *pour) bool { return p.rest == 0 })
	const rounds = 16 // the rest is done more cheaply by cycles
	for last, round := int64(math.MaxInt64), 0; round < rounds; round++ {
		for _, p := range pours {
			p.again()
		}
		uneven := f.unevenness()
		if uneven >= last {
			break
		}
		last = uneven
	}
}

// unevenness is the sum of the squares of all loads, as distances from the average.
func (f *flow) unevenness() (sum int64) {
	for i := len(f.edges) - 1; i >= 0 && f.edges[i].toTheSink; i-- {
		d := int64(f.edges[i].has - f.edges[i].had)
		sum += d * d
	}
	return sum
}

// pour is what is poured of a class.
type pour struct {
	ways []*way
	rest int32 // what is not kept
}

// way is that of a class to a thread.
type way struct {
	member, thread, load *edge
	poured               int32
}

func (w *way) put(n int32) {
	w.member.has += n
	w.thread.has += n
	w.load.has += n
}

// again takes back what was poured and pours it anew: the level rises over more and
// more threads.
func (p *pour) again() {
	for _, w := range p.ways {
		w.put(-w.poured)
		w.poured = 0
	}
	slices.SortStableFunc(p.ways, func(a, b *way) int { return cmp.Compare(a.load.has, b.load.has) })
	give := func(w *way, n int32) {
		w.put(n)
		w.poured += n
	}
	rest := p.rest
	for under := 1; rest > 0; {
		level := p.ways[0].load.has
		for under < len(p.ways) && p.ways[under].load.has == level {
			under++
		}
		rise := rest / int32(under)
		if under < len(p.ways) {
			rise = min(rise, p.ways[under].load.has-level)
		}
		if rise == 0 {
			for _, w := range p.ways[:rest] {
				give(w, 1)
			}
			return
		}
		for _, w := range p.ways[:under] {
			give(w, rise)
		}
		rest -= rise * int32(under)
	}
}

// run makes the flow the cheapest and tells the classes.
func (f *flow) run() {
	for f.search() {
		for n := range f.nodes {
			f.nodes[n].by, f.nodes[n].seen = 0, 0
		}
	}
	f.units(func(_ int, _, thread *edge, u *unit) { u.gets = thread.has })
}

// search is that of Bellman and Ford: it makes labels cheaper until none can be, or until
// the ways close to cycles, which it follows. Labels stay from search to search, being
// nearly right.
func (f *flow) search() (found bool) {
	for changed := true; changed; {
		changed = false
		// Edges are in the order of the flow, so that one pass goes all the way there, the
		// other all the way back.
		for i := range f.edges {
			e := &f.edges[i]
			if label := f.nodes[e.from].label + e.more(); label < f.nodes[e.to].label {
				f.nodes[e.to].label, f.nodes[e.to].by = label, int32(1+i)
				changed = true
			}
		}
		for i := len(f.edges) - 1; i >= 0; i-- {
			e := &f.edges[i]
			if e.has == 0 {
				continue
			}
			if label := f.nodes[e.to].label + e.less(); label < f.nodes[e.from].label {
				f.nodes[e.from].label, f.nodes[e.from].by = label, int32(-1-i)
				changed = true
			}
		}
		if changed && f.follow() {
			return true
		}
	}
	return false
}

// more is what one more partition costs, less what one less does.
func (e *edge) more() int64 {
	switch {
	case e.toTheSink:
		return costBalance * int64(2*(e.has-e.had)+1)
	case e.has < e.had:
		return 0
	}
	return e.over
}

func (e *edge) less() int64 {
	switch {
	case e.toTheSink:
		return -costBalance * int64(2*(e.has-e.had)-1)
	case e.has <= e.had:
		return 0
	}
	return -e.over
}

// follow finds the cycles that the ways have closed to, and moves along each what
// it has room for.
func (f *flow) follow() (found bool) {
	for i := range f.nodes {
		f.nodes[i].seen = 0
	}
	for start := range f.nodes {
		at := int32(start)
		mark := int32(start + 1)
		for f.nodes[at].seen == 0 && f.nodes[at].by != 0 {
			f.nodes[at].seen = mark
			at = f.before(at)
		}
		if f.nodes[at].by != 0 && f.nodes[at].seen == mark {
			f.move(at)
			found = true
		}
	}
	return found
}

// before is the node from which the way comes.
func (f *flow) before(at int32) int32 {
	if by := f.nodes[at].by; by > 0 {
		return f.edges[by-1].from
	} else {
		return f.edges[-1-by].to
	}
}

// move changes the flow along a cycle.
func (f *flow) move(cycle int32) {
	room := int32(math.MaxInt32)
	var up, down *edge // to the sink
	f.cycle(cycle, func(e *edge, sign int32) {
		switch {
		case e.toTheSink && sign > 0:
			up = e
		case e.toTheSink:
			down = e
		case sign > 0 && e.has < e.had:
			room = min(room, e.had-e.has)
		case sign < 0 && e.has > e.had:
			room = min(room, e.has-e.had)
		case sign < 0:
			room = min(room, e.has)
		}
	})
	if up != nil {
		room = min(room, max(1, (down.has-up.has)/2)) // until the loads are even
	}
	f.cycle(cycle, func(e *edge, sign int32) { e.has += sign * room })
}

func (f *flow) cycle(at int32, visit func(e *edge, sign int32)) {
	for start := at; ; {
		by := f.nodes[at].by
		if by > 0 {
			visit(&f.edges[by-1], 1)
		} else {
			visit(&f.edges[-1-by], -1)
		}
		if at = f.before(at); at == start {
			return
		}
	}
}
