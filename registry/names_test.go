package registry

import (
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
)

func TestNamesBecomeKeysOneToOne(t *testing.T) {
	for _, c := range []struct{ name, element string }{
		{"", "%"},
		{"%", "%25"},
		{".", "%2E"},
		{"..", "%2E%2E"},
		{"...", "..."},
		{"%2E", "%252E"},
		{"orders", "orders"},
		{"Az09._:-", "Az09._:-"},
		{"a/b", "a%2Fb"},
		{"a b\n", "a%20b%0A"},
		{"grün", "gr%C3%BCn"},
		{"\xff\xfe", "%FF%FE"},
		{"node-b-2:5c975c69-a251-4a52-9a6f-779738190012", "node-b-2:5c975c69-a251-4a52-9a6f-779738190012"},
	} {
		got, err := EscapeName(c.name)
		if err != nil || got != c.element {
			t.Errorf("EscapeName(%q) = %q, %v; want %q", c.name, got, err, c.element)
		}
		if back, err := UnescapeName(c.element); err != nil || back != c.name {
			t.Errorf("UnescapeName(%q) = %q, %v; want %q", c.element, back, err, c.name)
		}
	}
	if _, err := EscapeName("a\x00b"); !errors.Is(err, ErrName) {
		t.Errorf("a NUL byte gave %v", err)
	}
	for _, element := range []string{"", ".", "..", "%%", "%2", "%2e", "%zz", "%41", "a%", "a/b", "a b", "%00", "%2E.", "ü"} {
		if name, err := UnescapeName(element); err == nil {
			t.Errorf("UnescapeName(%q) = %q; EscapeName makes no such element", element, name)
		}
	}
}

// Names that differ little are the likely ones to collide.
func TestEscapeNameHasNoCollisions(t *testing.T) {
	const seed = 1
	r := rand.New(rand.NewPCG(seed, seed))
	alphabet := []string{"%", "2", "E", "e", ".", "/", "a", "\xc3", "\xbc", "5"}
	names := map[string]string{}
	for range 200_000 {
		var b strings.Builder
		for range r.IntN(7) {
			b.WriteString(alphabet[r.IntN(len(alphabet))])
		}
		name := b.String()
		element, err := EscapeName(name)
		if err != nil {
			t.Fatal(err)
		}
		if other, taken := names[element]; taken && other != name {
			t.Fatalf("seed %d: %q and %q are both %q", seed, name, other, element)
		}
		names[element] = name
	}
}

func FuzzNames(f *testing.F) {
	for _, s := range []string{"", ".", "%", "%2E", "orders", "a/b", "\x00", "ü", "%2e"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		element, err := EscapeName(s)
		if strings.ContainsRune(s, 0) != (err != nil) {
			t.Fatalf("EscapeName(%q): %v", s, err)
		}
		if err == nil {
			if element == "" || element == "." || element == ".." || strings.ContainsAny(element, "/\x00 ") {
				t.Fatalf("EscapeName(%q) = %q is no path element", s, element)
			}
			if back, err := UnescapeName(element); err != nil || back != s {
				t.Fatalf("%q became %q and then %q, %v", s, element, back, err)
			}
		}
		if name, err := UnescapeName(s); err == nil {
			if again, err := EscapeName(name); err != nil || again != s {
				t.Fatalf("element %q is name %q, which is element %q, %v", s, name, again, err)
			}
		}
	})
}

func TestRoots(t *testing.T) {
	for text, want := range map[string]string{"/": "/brokers/ids/7", "/kc/prod": "/kc/prod/brokers/ids/7", "/kc/prod/": "/kc/prod/brokers/ids/7"} {
		r, err := ParseRoot(text)
		if err != nil || r.Broker(7) != want || !strings.HasPrefix(want, r.Prefix()) {
			t.Errorf("root %q: %q, %v; want %q", text, r.Broker(7), err, want)
		}
		if again, err := ParseRoot(r.String()); err != nil || again != r {
			t.Errorf("root %q prints as %q", text, r)
		}
	}
	for _, text := range []string{"", "kc", "/kc//prod", "/a\x00"} {
		if r, err := ParseRoot(text); err == nil {
			t.Errorf("root %q was read as %q", text, r)
		}
	}
}

func TestPartitionKeysRoundTrip(t *testing.T) {
	for _, topic := range []string{"orders", "a/b", "..", "grün", "1-3"} {
		g := Root("/kc").Group("owners/g")
		p := Partition{Topic: topic, Home: 12, Number: 2147483647}
		for _, key := range []string{g.Owner(p), g.Offset(p)} {
			if got, err := g.ParsePartition(key); err != nil || got != p {
				t.Errorf("%s was read as %v, %v; want %v", key, got, err, p)
			}
			if other, err := Root("/kc").Group("g").ParsePartition(key); err == nil {
				t.Errorf("another group reads %s as %v", key, other)
			}
		}
	}
	g := Root("").Group("g")
	for _, name := range []string{"3", "1-", "-3", "1-03", "1--3", "+1-3", "1-3-4", "1-2147483648", "", "1-3/x", "1 -3"} {
		if p, err := g.ParsePartition(g.Owners() + "orders/" + name); err == nil {
			t.Errorf("partition name %q was read as %v", name, p)
		}
	}
	for _, id := range []string{"host:1-2-3", "a/b", "", "ü"} {
		if got, err := g.ParseID(g.ID(id)); err != nil || got != id {
			t.Errorf("id %q came back as %q, %v", id, got, err)
		}
	}
	if id, err := g.ParseID(g.IDs() + "a/b"); err == nil {
		t.Errorf("a key below a registration was read as %q", id)
	}
}

func TestPrefixEnd(t *testing.T) {
	for prefix, want := range map[string]string{"/a/": "/a0", "a\xff": "b", "\xff\xff": "\x00", "": "\x00"} {
		if got := PrefixEnd(prefix); got != want {
			t.Errorf("PrefixEnd(%q) = %q, want %q", prefix, got, want)
		}
	}
}
