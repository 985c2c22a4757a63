package registry_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/muster-io/muster/registry"
)

// Whatever brokers come and go between additions: what was placed stays, nothing
// goes to a broker that is not there, and no two partitions that are placed in a
// row, the seam included, share a broker if there are two. While the brokers stay
// the same their counts differ by one at most.
func TestPlacement(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	for range 2000 {
		topic := string(rune('a'+r.IntN(26))) + string(rune('a'+r.IntN(26)))
		brokers := randomBrokers(r)
		placed := map[int32][]int32{}
		same := true // the brokers have been the same all the time
		for step := range 1 + r.IntN(4) {
			if step > 0 && r.IntN(2) == 0 {
				brokers, same = randomBrokers(r), false
			}
			from := int32(len(placed))
			total := from + int32(1+r.IntN(40))
			more := registry.PlaceMore(topic, placed, total, brokers)
			if len(more) != int(total-from) {
				t.Fatalf("%d partitions placed, want %d to %d", len(more), from, total)
			}
			for p := from; p < total; p++ {
				if len(more[p]) != 1 || !slices.Contains(brokers, more[p][0]) {
					t.Fatalf("partition %d is on %v, live are %v", p, more[p], brokers)
				}
				placed[p] = more[p]
				if p > 0 && len(brokers) > 1 && placed[p-1][0] == more[p][0] {
					t.Fatalf("partitions %d and %d are both on %v of %v", p-1, p, more[p], brokers)
				}
			}
			if least, most := counts(placed, brokers); same && most-least > 1 {
				t.Fatalf("%d to %d partitions on a broker of %v: %v", least, most, brokers, placed)
			}
		}
		again := registry.Place(topic, int32(len(placed)), shuffled(r, brokers))
		least, most := counts(again, brokers)
		if most-least > 1 {
			t.Fatalf("a new topic has %d to %d partitions on a broker of %v", least, most, brokers)
		}
	}
}

func randomBrokers(r *rand.Rand) []int32 {
	ids := make([]int32, 1+r.IntN(7))
	for i := range ids {
		ids[i] = int32(i*3 + r.IntN(3))
	}
	return shuffled(r, ids)
}

func shuffled(r *rand.Rand, ids []int32) []int32 {
	ids = slices.Clone(ids)
	r.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	return ids
}

func counts(placed map[int32][]int32, brokers []int32) (least, most int) {
	load := map[int32]int{}
	for _, replicas := range placed {
		load[replicas[0]]++
	}
	least = len(placed)
	for _, b := range brokers {
		least, most = min(least, load[b]), max(most, load[b])
	}
	return least, most
}

// Topics of one partition spread too.
func TestPlacementBeginsElsewhereForEachTopic(t *testing.T) {
	load := map[int32]int{}
	for i := range 300 {
		load[registry.Place("topic-"+string(rune('a'+i%26))+string(rune('a'+i/26)), 1, []int32{1, 2, 3})[0][0]]++
	}
	for _, b := range []int32{1, 2, 3} {
		if load[b] < 60 {
			t.Errorf("broker %d has %d of 300 topics", b, load[b])
		}
	}
}
