package rebalance

import (
	"cmp"
	"slices"
	"strings"
	"unicode/utf16"
)

// compareUTF16 orders strings by their UTF-16 code units, as the JVM does, whose
// consumers may sit in the same group. It differs from the order of the bytes
// only where characters beyond U+FFFF meet such from U+E000 on.
func compareUTF16(a, b string) int {
	if ascii(a) && ascii(b) {
		return strings.Compare(a, b)
	}
	// Bytes that are no text all become U+FFFD; then the bytes decide.
	return cmp.Or(slices.Compare(utf16.Encode([]rune(a)), utf16.Encode([]rune(b))), strings.Compare(a, b))
}

func ascii(s string) bool {
	for i := range len(s) {
		if s[i] >= 0x80 {
			return false
		}
	}
	return true
}
