package rebalance

import (
	"strings"
	"unicode/utf8"
)

// compareUTF16 orders strings by their UTF-16 code units, as the JVM does, whose
// consumers may sit in the same group. It differs from the order of the bytes
// only where one string has a character beyond U+FFFF and the other one from
// U+E000 on.
func compareUTF16(a, b string) int {
	i := 0
	for i < len(a) && i < len(b) && a[i] == b[i] {
		i++
	}
	// Back to the start of the character that differs.
	for i > 0 && i < len(a) && !utf8.RuneStart(a[i]) {
		i--
	}
	ra, _ := utf8.DecodeRuneInString(a[i:])
	rb, _ := utf8.DecodeRuneInString(b[i:])
	if ra >= 0xE000 && rb >= 0xE000 && (ra > 0xFFFF) != (rb > 0xFFFF) && ra != utf8.RuneError && rb != utf8.RuneError {
		if ra > 0xFFFF {
			return -1
		}
		return 1
	}
	return strings.Compare(a, b)
}
