package rebalance

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// javaRegexp translates a regular expression of java.util.regex to one that
// package regexp2 matches alike against the names of topics, which are ASCII without
// control characters; linear tells that package regexp does so too, in linear time. An
// expression that Java refuses is refused, and so is one that is not sure to mean the
// same: what versions of Java take differently, or what only new ones have.
//
// Every class becomes a plain set of characters, and every flag is applied here, so
// that nothing is left on which the engines differ.
func javaRegexp(regex string) (translated string, linear bool, err error) {
	if len(regex) > maxRegexp {
		return "", false, fmt.Errorf("longer than %d bytes", maxRegexp)
	}
	p := &javaParser{in: javaUnquote([]rune(regex)), names: map[string]int{}, linear: true}
	translated, err = p.alternatives()
	if err == nil && p.pos < len(p.in) {
		err = errors.New("unmatched closing ')'")
	}
	return translated, p.linear, err
}

// A pattern is a line that a person wrote. The bounds keep one that nobody did from
// costing every member of a group memory without end.
const (
	maxRegexp  = 10_000
	maxNesting = 250
)

// javaParser goes through an expression from left to right, as Java's parser does.
type javaParser struct {
	in  []rune
	pos int

	ignoreCase  bool
	unicodeCase bool
	depth       int
	behind      int  // look-behinds around here
	unsure      int  // look-behinds and negative look-aheads around here
	linear      bool // nothing so far that needs backtracking
	conditions  int  // met so far: places, looks around, references, possessive parts
	groups      []captured
	names       map[string]int
}

// captured is what is known of a capturing group.
type captured struct {
	closed bool
	// unsure: it may be passed by, or be gone through again. Java does not always
	// forget what it captured on a way that was then given up.
	unsure bool
}

// doubt makes the groups from one on unsure.
func (p *javaParser) doubt(from int) {
	for i := range p.groups[from:] {
		p.groups[from+i].unsure = true
	}
}

// peek is the next character, or end.
func (p *javaParser) peek() rune { return p.at(0) }

const end rune = -1

func (p *javaParser) at(ahead int) rune {
	if p.pos+ahead < len(p.in) {
		return p.in[p.pos+ahead]
	}
	return end
}

func (p *javaParser) next() rune {
	c := p.peek()
	p.pos++
	return c
}

func (p *javaParser) accept(text string) bool {
	for i, c := range []rune(text) {
		if p.at(i) != c {
			return false
		}
	}
	p.pos += len(text)
	return true
}

// alternatives goes up to the parenthesis that closes it, or to the end.
func (p *javaParser) alternatives() (string, error) {
	if p.depth++; p.depth > maxNesting {
		return "", fmt.Errorf("nested deeper than %d", maxNesting)
	}
	defer func() { p.depth-- }()
	var list []string
	groups := len(p.groups)
	for {
		s, err := p.sequence()
		if err != nil {
			return "", err
		}
		list = append(list, s)
		more := p.accept("|")
		if len(list) > 1 || more {
			p.doubt(groups)
		}
		if !more {
			return strings.Join(list, "|"), nil
		}
	}
}

func (p *javaParser) sequence() (string, error) {
	var b strings.Builder
	for {
		var atom string
		var err error
		single, conditions, groups := true, p.conditions, len(p.groups)
		switch c := p.peek(); c {
		case end, '|', ')':
			return b.String(), nil
		case '*', '+', '?':
			return "", fmt.Errorf("dangling meta character '%c'", c)
		case '(':
			var flags bool
			if atom, flags, err = p.group(); flags && err == nil {
				continue // flags cannot be repeated
			}
			single = false
		case '[':
			p.pos++
			var s charSet
			s, err = p.class()
			atom = s.regex()
		case '\\':
			p.pos++
			atom, single, err = p.escape()
		case '^':
			p.pos++
			p.conditions++
			atom = `\A` // also with the flag m: no name has a second line
		case '$':
			p.pos++
			p.conditions++
			atom = `\z`
		case '.':
			p.pos++
			atom = charSet{}.not().regex()
		case '{': // Java repeats the empty text before it
		default:
			p.pos++
			var s charSet
			s, err = p.literal(c)
			atom = s.regex()
		}
		if err == nil {
			was := p.pos
			if atom, err = p.repeated(atom, single, p.conditions > conditions); p.pos > was {
				p.doubt(groups)
			}
		}
		if err != nil {
			return "", err
		}
		b.WriteString(atom)
	}
}

// repeated reads the quantifier of an atom, if it has one. single: the atom is one
// character, or a place between two. conditional: it has conditions in it.
func (p *javaParser) repeated(atom string, single, conditional bool) (string, error) {
	var quantifier string
	unbounded := false
	switch c := p.peek(); c {
	case '?', '*', '+':
		p.pos++
		quantifier, unbounded = string(c), c != '?'
	case '{':
		p.pos++
		digits := p.span(isDigit)
		n, err := strconv.ParseInt(digits, 10, 32)
		switch {
		case digits == "":
			return "", errors.New("illegal repetition")
		case err != nil:
			return "", errors.New("illegal repetition range")
		case !p.accept("}"):
			return "", errors.New("unclosed counted closure")
		}
		if n > 1 && !single && conditional {
			// To Java a round that matches the empty text is the last one.
			return "", fmt.Errorf("{%d} of a group with conditions, such as ^ or look-aheads, is not supported", n)
		}
		quantifier = "{" + strconv.FormatInt(n, 10) + "}"
		// What Java's look-behind makes of a repeated group depends on the group.
		unbounded = !single && p.behind > 0
	default:
		return atom, nil
	}
	if unbounded && p.behind > 0 {
		return "", errors.New("look-behind group does not have an obvious maximum length")
	}
	atom = "(?:" + atom + ")"
	switch {
	case p.accept("?"):
		return atom + quantifier + "?", nil
	case p.accept("+"):
		return p.atomic("(?>" + atom + ")" + quantifier) // to Java each round is final too
	}
	return atom + quantifier, nil
}

func (p *javaParser) atomic(atom string) (string, error) {
	if p.behind > 0 { // matched backwards by one engine, forwards by the other
		return "", errors.New("possessive quantifiers and independent groups are not supported in a look-behind")
	}
	p.linear = false
	p.conditions++
	return "(?>" + atom + ")", nil
}

// group reads what begins with a parenthesis. flags: it only sets flags, for the rest
// of the group around it.
func (p *javaParser) group() (atom string, flags bool, err error) {
	p.pos++
	caseWas, unicodeWas := p.ignoreCase, p.unicodeCase
	before, after, capture := "(?:", ")", -1
	switch {
	case !p.accept("?"):
		before, capture = "(", len(p.groups)
	case p.accept(":"):
	case p.accept(">"):
		before = ""
		if before, err = p.atomic(""); err != nil {
			return "", false, err
		}
		before = strings.TrimSuffix(before, ")")
	case p.accept("="):
		before, p.linear = "(?=", false
		p.conditions++
	case p.accept("!"):
		before, p.linear = "(?!", false
		p.conditions++
		p.unsure++
		defer func() { p.unsure-- }()
	case p.accept("<="), p.accept("<!"):
		before, p.linear = "(?<"+string(p.at(-1)), false
		p.conditions++
		p.behind++
		p.unsure++
		defer func() { p.behind--; p.unsure-- }()
	case p.accept("<"):
		name, err := p.groupName()
		if err != nil {
			return "", false, err
		}
		if _, twice := p.names[name]; twice {
			return "", false, fmt.Errorf("named capturing group <%s> is already defined", name)
		}
		before, capture = "(", len(p.groups)
		p.names[name] = capture
	default:
		if err := p.flags(); err != nil {
			return "", false, err
		}
		if p.accept(")") {
			return "", true, nil
		}
		if !p.accept(":") {
			return "", false, errors.New("unknown inline modifier or group type")
		}
	}
	if capture >= 0 {
		p.groups = append(p.groups, captured{unsure: p.unsure > 0})
	}
	inner, err := p.alternatives()
	if err != nil {
		return "", false, err
	}
	if !p.accept(")") {
		return "", false, errors.New("unclosed group")
	}
	if capture >= 0 {
		p.groups[capture].closed = true
	}
	p.ignoreCase, p.unicodeCase = caseWas, unicodeWas
	return before + inner + after, false, nil
}

func (p *javaParser) groupName() (string, error) {
	name := p.span(func(c rune) bool { return isLetter(c) || isDigit(c) })
	if name == "" || !isLetter(rune(name[0])) {
		return "", errors.New("unknown look-behind group, or group name that begins with no letter")
	}
	if !p.accept(">") {
		return "", errors.New("named capturing group is missing trailing '>'")
	}
	return name, nil
}

// flags reads flags such as "i" or "i-s". Those for lines and dots change nothing
// where names have no line ends, and Unicode's classes are the same in ASCII.
func (p *javaParser) flags() error {
	for on := true; ; {
		switch c := p.peek(); c {
		case 'i':
			p.ignoreCase = on
		case 'u', 'U':
			p.unicodeCase = on
		case 'd', 'm', 's':
		case 'x', 'c':
			return fmt.Errorf("flag %c is not supported", c)
		case '-':
			if !on {
				return nil
			}
			on = false
		default:
			return nil
		}
		p.pos++
	}
}

// escape reads what follows a backslash outside of a class.
func (p *javaParser) escape() (atom string, single bool, err error) {
	switch c := p.peek(); c {
	case 'A', 'G':
		p.pos++
		p.conditions++
		return `\A`, true, nil
	case 'Z', 'z':
		p.pos++
		p.conditions++
		return `\z`, true, nil
	case 'b', 'B':
		p.pos++
		p.conditions++
		if c == 'b' && p.peek() == '{' {
			return "", false, errors.New(`\b{ is not supported: versions of Java differ`)
		}
		return `\` + string(c), true, nil
	case 'R':
		p.pos++
		return charSet{}.regex(), false, nil // no name has a line end
	case '1', '2', '3', '4', '5', '6', '7', '8', '9':
		p.pos++
		n := int(c - '0')
		for isDigit(p.peek()) && 10*n+int(p.peek()-'0') <= len(p.groups) {
			n = 10*n + int(p.next()-'0')
		}
		atom, err = p.reference(n - 1)
		return atom, false, err
	case 'k':
		p.pos++
		if !p.accept("<") {
			return "", false, errors.New(`\k is not followed by '<' for named capturing group`)
		}
		name, err := p.groupName()
		if err != nil {
			return "", false, err
		}
		n, there := p.names[name]
		if !there {
			return "", false, fmt.Errorf("named capturing group <%s> does not exist", name)
		}
		atom, err = p.reference(n)
		return atom, false, err
	}
	s, _, err := p.charEscape()
	return s.regex(), true, err
}

// reference matches what a group has captured. Nothing that is read differently by
// the engines, or by people, is taken: only a group that ends before.
func (p *javaParser) reference(group int) (string, error) {
	switch {
	case group >= len(p.groups) || !p.groups[group].closed:
		return "", fmt.Errorf(`\%d refers to a group that does not end before it`, group+1)
	case p.behind > 0:
		return "", errors.New("look-behind group does not have an obvious maximum length")
	case p.groups[group].unsure:
		return "", fmt.Errorf(`\%d refers into an alternative, a repetition, a look-behind or a negative look-ahead, which is not supported`, group+1)
	}
	p.linear = false
	p.conditions++
	if p.ignoreCase {
		return fmt.Sprintf(`(?i:\%d)`, group+1), nil
	}
	return fmt.Sprintf(`(?:\%d)`, group+1), nil
}

// charEscape reads an escape that stands for one of some characters. code is the
// character if there is only one, else -1.
func (p *javaParser) charEscape() (s charSet, code rune, err error) {
	fixed := func(code rune) (charSet, rune, error) {
		s, err := p.literal(code)
		return s, code, err
	}
	switch c := p.next(); c {
	case 'd', 's', 'w', 'h', 'v':
		return javaClasses[string(c)], -1, nil
	case 'D', 'S', 'W', 'H', 'V':
		return javaClasses[string(c+'a'-'A')].not(), -1, nil
	case 'p', 'P':
		s, err := p.property()
		if c == 'P' {
			s = s.not()
		}
		return s, -1, err
	case 'a':
		return fixed('\a')
	case 'e':
		return fixed(0x1b)
	case 'f':
		return fixed('\f')
	case 'n':
		return fixed('\n')
	case 'r':
		return fixed('\r')
	case 't':
		return fixed('\t')
	case 'c':
		if p.peek() == end {
			return s, 0, errors.New("illegal control escape sequence")
		}
		return fixed(p.next() ^ 64)
	case '0':
		n, digits := rune(0), 0
		for c := p.peek(); digits < 3 && c >= '0' && c <= '7' && 8*n+c-'0' <= 0377; c = p.peek() {
			n = 8*n + c - '0'
			digits++
			p.pos++
		}
		if digits == 0 {
			return s, 0, errors.New("illegal octal escape sequence")
		}
		return fixed(n)
	case 'x':
		if p.accept("{") {
			n, err := strconv.ParseUint(p.span(isHex), 16, 32)
			if err != nil || n > unicode.MaxRune || !p.accept("}") {
				return s, 0, errors.New("illegal hexadecimal escape sequence")
			}
			return fixed(rune(n))
		}
		n, err := p.hex(2)
		if err != nil {
			return s, 0, err
		}
		return fixed(n)
	case 'u':
		n, err := p.hex(4)
		if err != nil {
			return s, 0, err
		}
		return fixed(n)
	case end:
		return s, 0, errors.New("unescaped trailing backslash")
	default:
		if isLetter(c) || isDigit(c) {
			return s, 0, fmt.Errorf(`illegal or unsupported escape sequence \%c`, c)
		}
		return fixed(c)
	}
}

func (p *javaParser) hex(digits int) (rune, error) {
	var n rune
	for range digits {
		c := p.next()
		if !isHex(c) {
			return 0, errors.New("illegal hexadecimal or Unicode escape sequence")
		}
		d, _ := strconv.ParseInt(string(c), 16, 32)
		n = 16*n + rune(d)
	}
	return n, nil
}

// literal is one character, in both cases if case is ignored.
func (p *javaParser) literal(c rune) (charSet, error) { return p.charRange(c, c) }

// charRange is the characters from one to another.
func (p *javaParser) charRange(from, to rune) (s charSet, err error) {
	if to > unicode.MaxASCII && p.ignoreCase && p.unicodeCase {
		return s, errors.New("characters beyond ASCII are not supported with the flags i and u")
	}
	for c := from; c <= min(to, unicode.MaxASCII); c++ {
		s[c] = true
		if p.ignoreCase && isLetter(c) {
			s[c^0x20] = true
		}
	}
	return s, nil
}

// class reads a class up to its closing bracket.
func (p *javaParser) class() (s charSet, err error) {
	if p.depth++; p.depth > maxNesting {
		return s, fmt.Errorf("nested deeper than %d", maxNesting)
	}
	defer func() { p.depth-- }()
	negated := p.accept("^")
	for empty := true; ; empty = false {
		switch c := p.peek(); {
		case c == end:
			return s, errors.New("unclosed character class")
		case c == ']' && !empty:
			p.pos++
			if negated {
				s = s.not()
			}
			return s, nil
		case negated && (c == '[' || c == '&' && p.at(1) == '&'):
			return s, errors.New("a class, or &&, in a negated class is not supported: versions of Java differ")
		case c == '&' && p.at(1) == '&':
			if empty {
				return s, errors.New("bad class syntax: && without a left side")
			}
			return p.intersection(s)
		default:
			more, err := p.classItem()
			if err != nil {
				return s, err
			}
			s = s.or(more)
		}
	}
}

// intersection reads the rest of a class from its first && on. What follows each is
// either classes or single characters and ranges: mixed, Java forgets some.
func (p *javaParser) intersection(s charSet) (charSet, error) {
	for p.accept("&&") {
		var right charSet
		classes := p.peek() == '['
		empty := true
		for ; p.peek() != ']' && !(p.peek() == '&' && (empty || classes || p.at(1) == '&')); empty = false {
			if (p.peek() == '[') != classes {
				return s, errors.New("a class beside characters, right of &&, is not supported")
			}
			more, err := p.classItem()
			if err != nil {
				return s, err
			}
			right = right.or(more)
		}
		if empty {
			return s, errors.New("bad class syntax: && without a right side")
		}
		s = s.and(right)
	}
	if !p.accept("]") {
		return s, errors.New("bad class syntax: & after a class")
	}
	return s, nil
}

// classItem reads a class in a class, a range, or a character.
func (p *javaParser) classItem() (charSet, error) {
	if p.accept("[") {
		return p.class()
	}
	s, from, err := p.classChar()
	if err != nil || from < 0 || p.peek() != '-' || p.at(1) == ']' || p.at(1) == '[' || p.at(1) == end {
		return s, err
	}
	p.pos++
	_, to, err := p.classChar()
	if err != nil {
		return s, err
	}
	if to < from {
		return s, errors.New("illegal character range")
	}
	return p.charRange(from, to)
}

func (p *javaParser) classChar() (charSet, rune, error) {
	c := p.next()
	if c == '\\' {
		return p.charEscape()
	}
	if c == end {
		return charSet{}, 0, errors.New("unclosed character class")
	}
	s, err := p.literal(c)
	return s, c, err
}

// property reads the name of a class after \p.
func (p *javaParser) property() (charSet, error) {
	name := string(max(p.peek(), 0))
	if !p.accept("{") {
		p.pos++
	} else {
		name = p.span(func(c rune) bool { return c != '}' })
		if !p.accept("}") {
			return charSet{}, errors.New("unclosed character family")
		}
	}
	s, ok := javaClasses[name]
	if table := unicode.Categories[strings.TrimPrefix(name, "Is")]; !ok && table != nil && len(name) <= 4 {
		s, ok = charsThat(func(c rune) bool { return unicode.Is(table, c) }), true
	}
	if !ok {
		return s, fmt.Errorf("unknown or unsupported character property {%s}", name)
	}
	if p.ignoreCase && s != s.bothCases() {
		return s, fmt.Errorf("property {%s} with the flag i is not supported: versions of Java differ", name)
	}
	return s, nil
}

// span reads as long as the characters are of that kind.
func (p *javaParser) span(kind func(rune) bool) string {
	from := p.pos
	for p.peek() != end && kind(p.peek()) {
		p.pos++
	}
	return string(p.in[from:p.pos])
}

// javaUnquote replaces \Q…\E by escapes, as Java does before it parses.
func javaUnquote(in []rune) []rune {
	var out []rune
	for i := 0; i < len(in); {
		switch {
		case in[i] != '\\' || i+1 == len(in):
			out = append(out, in[i])
			i++
		case in[i+1] != 'Q':
			out = append(out, in[i], in[i+1])
			i += 2
		default:
			i += 2
			n := len(in) - i
			for k := i; k+1 < len(in); k++ {
				if in[k] == '\\' && in[k+1] == 'E' {
					n = k - i
					break
				}
			}
			for k, c := range in[i : i+n] {
				switch {
				case k == 0 && isDigit(c): // else it could belong to an escape before
					out = append(out, []rune(`\x3`)...)
				case c < 0x80 && !isLetter(c) && !isDigit(c):
					out = append(out, '\\')
				}
				out = append(out, c)
			}
			i = min(i+n+2, len(in))
		}
	}
	return out
}

// charSet is a set of ASCII characters.
type charSet [unicode.MaxASCII + 1]bool

func (s charSet) or(t charSet) charSet  { return charsThat(func(c rune) bool { return s[c] || t[c] }) }
func (s charSet) and(t charSet) charSet { return charsThat(func(c rune) bool { return s[c] && t[c] }) }
func (s charSet) not() charSet          { return charsThat(func(c rune) bool { return !s[c] }) }

func (s charSet) bothCases() charSet {
	return charsThat(func(c rune) bool { return s[c] || isLetter(c) && s[c^0x20] })
}

func charsThat(holds func(rune) bool) (s charSet) {
	for c := range s {
		s[c] = holds(rune(c))
	}
	return s
}

// regex is the set in a spelling that means the same to all engines.
func (s charSet) regex() string {
	var b strings.Builder
	single := slices.Index(s[:], true)
	n := 0
	for c := 0; c < len(s); c++ {
		if !s[c] {
			continue
		}
		from := c
		for c+1 < len(s) && s[c+1] {
			c++
		}
		n += c - from + 1
		fmt.Fprintf(&b, `\x%02x-\x%02x`, from, c)
	}
	switch {
	case n == 0:
		return `[^\x00-\x7f]`
	case n == 1 && (isLetter(rune(single)) || isDigit(rune(single))):
		return string(rune(single))
	case n == 1:
		return fmt.Sprintf(`\x%02x`, single)
	}
	return "[" + b.String() + "]"
}

func isLetter(c rune) bool { return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' }
func isDigit(c rune) bool  { return c >= '0' && c <= '9' }
func isHex(c rune) bool    { return isDigit(c) || c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F' }

// javaClasses are the classes of Java by name, as far as they are ASCII.
var javaClasses = func() map[string]charSet {
	lower := charsThat(func(c rune) bool { return c >= 'a' && c <= 'z' })
	upper := charsThat(func(c rune) bool { return c >= 'A' && c <= 'Z' })
	alpha := charsThat(isLetter)
	digit := charsThat(isDigit)
	alnum := alpha.or(digit)
	cntrl := charsThat(unicode.IsControl)
	graph := charsThat(func(c rune) bool { return c > ' ' && c < 0x7f })
	print := charsThat(func(c rune) bool { return c >= ' ' && c < 0x7f })
	space := charsThat(func(c rune) bool { return c == ' ' || c >= '\t' && c <= '\r' })
	blank := charsThat(func(c rune) bool { return c == ' ' || c == '\t' })
	white := space.or(charsThat(func(c rune) bool { return c >= 0x1c && c <= 0x1f }))
	all := charSet{}.not()
	word := alnum.or(charsThat(func(c rune) bool { return c == '_' }))
	return map[string]charSet{
		"d": digit, "s": space, "w": word, "h": blank,
		"v":     charsThat(func(c rune) bool { return c >= '\n' && c <= '\r' }),
		"Lower": lower, "Upper": upper, "ASCII": all, "Alpha": alpha, "Digit": digit, "Alnum": alnum, "Graph": graph, "Print": print,
		"Blank": blank, "Cntrl": cntrl, "XDigit": charsThat(isHex), "Space": space, "Punct": graph.and(alnum.not()),
		"javaLowerCase": lower, "javaUpperCase": upper, "javaAlphabetic": alpha, "javaLetter": alpha, "javaDigit": digit,
		"javaLetterOrDigit": alnum, "javaWhitespace": white,
		"javaISOControl": cntrl, "javaDefined": all, "javaTitleCase": {}, "javaIdeographic": {},
		"IsAlphabetic": alpha, "IsLetter": alpha, "IsLowercase": lower, "IsUppercase": upper, "IsDigit": digit, "IsLatin": alpha,
		"InBasicLatin": all, "InBasic_Latin": all, "InBASIC_LATIN": all, "all": all, "L1": all, "LC": alpha, "LD": alnum,
	}
}()
