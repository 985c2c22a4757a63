package rebalance

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"unicode/utf8"
)

// javaOrder compares as String.compareTo does: by 16-bit units, here spelt out as
// bytes without the help of the library.
func javaOrder(a, b string) int {
	units := func(s string) (out []byte) {
		for _, r := range s {
			if r < 0x10000 {
				out = append(out, byte(r>>8), byte(r))
				continue
			}
			high, low := 0xd800+(r-0x10000)>>10, 0xdc00+(r-0x10000)&0x3ff
			out = append(out, byte(high>>8), byte(high), byte(low>>8), byte(low))
		}
		return out
	}
	return bytes.Compare(units(a), units(b))
}

func TestUTF16Order(t *testing.T) {
	// In increasing order.
	list := []string{"", "-0", "A", "a", "a-0", "a-1", "a\x7f", "a\u0080", "aé", "b", "b\ud7ff", "b\U00010000", "b\U00010000a", "b\U00010001",
		"b\U0010ffff", "b\ue000", "b\uffee", "b\ufffd\x00", "b\uffff", "é", "\U0001f600", "\ue000"}
	for i, a := range list {
		for j, b := range list {
			want := min(max(i-j, -1), 1)
			if got := compareUTF16(a, b); got != want {
				t.Errorf("%q and %q: %d, want %d", a, b, got, want)
			}
		}
	}
}

// The order is total, also over what is no text, for consumers must agree on it
// whatever stands in the registry; for text it is Java's.
func TestUTF16OrderIsTotal(t *testing.T) {
	pieces := []string{"", "a", "-", "\x7f", "\u0080", "é", "\ud7ff", "\ue000", "\ufffd", "\uffff", "\U00010000", "\U0010ffff",
		"\x80", "\xc3", "\xed\xa0\x80", "\xf0\x90\x80", "\xff", "\xc0\x80"}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 3))
	next := func() string {
		s := ""
		for range r.IntN(4) {
			s += pieces[r.IntN(len(pieces))]
		}
		return s
	}
	for range 200_000 {
		a, b, c := next(), next(), next()
		ab, bc, ac := compareUTF16(a, b), compareUTF16(b, c), compareUTF16(a, c)
		switch {
		case ab != -compareUTF16(b, a):
			t.Fatalf("%q and %q: %d, the other way about %d", a, b, ab, compareUTF16(b, a))
		case (ab == 0) != (a == b):
			t.Fatalf("%q and %q: %d", a, b, ab)
		case ab <= 0 && bc <= 0 && ac > 0:
			t.Fatalf("%q, %q, %q: %d, %d, but %d", a, b, c, ab, bc, ac)
		case utf8.ValidString(a) && utf8.ValidString(b) && ab != javaOrder(a, b):
			t.Fatalf("%q and %q: %d, Java's is %d", a, b, ab, javaOrder(a, b))
		}
	}
}
