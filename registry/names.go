package registry

import (
	"errors"
	"fmt"
	"strings"
)

// ErrName refuses a name that no key can carry.
var ErrName = errors.New("name has a NUL byte")

// EscapeName turns any name into one path element, one to one: letters, digits
// and "._:-" stay, every other byte becomes %XX; so do the dots of "." and "..",
// and the empty name is "%". A NUL byte is refused.
func EscapeName(name string) (string, error) {
	switch name {
	case "":
		return "%", nil
	case ".":
		return "%2E", nil
	case "..":
		return "%2E%2E", nil
	}
	plain := true
	for i := 0; i < len(name); i++ {
		if name[i] == 0 {
			return "", fmt.Errorf("name %q: %w", name, ErrName)
		}
		plain = plain && plainByte(name[i])
	}
	if plain {
		return name, nil
	}
	var b strings.Builder
	for i := 0; i < len(name); i++ {
		if c := name[i]; plainByte(c) {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String(), nil
}

// UnescapeName is the inverse of EscapeName. It refuses text that EscapeName
// does not produce, so that no two keys can stand for one name.
func UnescapeName(element string) (string, error) {
	name, err := unescape(element)
	if err != nil {
		return "", err
	}
	if again, err := EscapeName(name); err != nil || again != element {
		return "", fmt.Errorf("path element %q is not an escaped name", element)
	}
	return name, nil
}

func unescape(element string) (string, error) {
	if element == "%" {
		return "", nil
	}
	var b strings.Builder
	for i := 0; i < len(element); i++ {
		if element[i] != '%' {
			b.WriteByte(element[i])
			continue
		}
		if i+2 >= len(element) {
			return "", fmt.Errorf("path element %q ends within an escape", element)
		}
		hi, lo := hexDigit(element[i+1]), hexDigit(element[i+2])
		if hi < 0 || lo < 0 {
			return "", fmt.Errorf("path element %q has a bad escape", element)
		}
		b.WriteByte(byte(hi<<4 | lo))
		i += 2
	}
	return b.String(), nil
}

func plainByte(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' ||
		c == '.' || c == '_' || c == ':' || c == '-'
}

func hexDigit(c byte) int {
	switch {
	case c >= '0' && c <= '9':
		return int(c - '0')
	case c >= 'A' && c <= 'F':
		return int(c-'A') + 10
	}
	return -1
}
