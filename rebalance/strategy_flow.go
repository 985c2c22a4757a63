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
// the cheapest if and only if no cycle of changes makes it cheaper: so begin with what is
// kept, pour the rest where least is, and follow such cycles until there is none.
// (The balance is that of an optimal semi-matching: Harvey, Ladner, Lovász, Tamir, 2003.)
//
// A search for cycles takes a few passes over the threads of all classes, about as many
// as the chains of moves are long. So groups of thousands of members that each
// subscribe to something else are slow to balance; that is the price of moving no
// partition without need.
type flow struct {
	st      *sticky
	classes []int
	edges   []edge // those from classes, each followed by those of its member; then those to the sink
	nodes   []node // classes, in order; members and threads; the sink is the last
	loads   []int32
}

// node is on the cheapest way that was found so far; a label says how cheap.
type node struct {
	label int64
	by    int32 // the edge by which the way comes: 1+edge, or -1-edge against its direction; 0 is none
	seen  int32
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
	f.loads = make([]int32, len(f.nodes)) // node of a thread -> its edge to the sink
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

func (f *flow) load(thread *edge) *edge { return &f.edges[f.loads[thread.to]] }

// begin keeps what can be kept, and pours the rest, of classes with the fewest threads first.
func (f *flow) begin() {
	type way struct{ member, thread *edge }
	ways := make([][]way, len(f.classes))
	rest := make([]int32, len(f.classes))
	for i, k := range f.classes {
		rest[i] = int32(f.st.classes[k].size)
	}
	put := func(i int, w way, n int32) {
		w.member.has += n
		w.thread.has += n
		f.load(w.thread).has += n
		rest[i] -= n
	}
	f.units(func(i int, member, thread *edge, u *unit) {
		ways[i] = append(ways[i], way{member, thread})
		put(i, way{member, thread}, u.had)
	})
	order := make([]int, len(f.classes))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Or(cmp.Compare(len(ways[a]), len(ways[b])), cmp.Compare(a, b)) })
	for _, i := range order {
		list := ways[i]
		slices.SortStableFunc(list, func(a, b way) int { return cmp.Compare(f.load(a.thread).has, f.load(b.thread).has) })
		// The level rises over more and more threads.
		for w := 1; rest[i] > 0; {
			level := f.load(list[0].thread).has
			for w < len(list) && f.load(list[w].thread).has == level {
				w++
			}
			rise := rest[i] / int32(w)
			if w < len(list) {
				rise = min(rise, f.load(list[w].thread).has-level)
			}
			if rise == 0 {
				for j := range rest[i] {
					put(i, list[j], 1)
				}
				break
			}
			for _, x := range list[:w] {
				put(i, x, rise)
			}
		}
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
