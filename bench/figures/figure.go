package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
)

// figure is one thing that was measured several times.
type figure struct {
	Section string    `json:"section"`
	Name    string    `json:"name"`
	Unit    string    `json:"unit"`
	Target  *float64  `json:"target"`        // at most; null if none was set
	Kafka   *float64  `json:"kafka_0_8_2_2"` // what the real 0.8.2.2 took; null if it was not measured
	Median  float64   `json:"median"`
	Min     float64   `json:"min"`
	Max     float64   `json:"max"`
	Runs    []float64 `json:"runs"` // in order
}

// figure finds the figure of that name, or begins it.
func (b *bench) figure(section, name, unit string) *figure {
	for _, f := range b.figures {
		if f.Section == section && f.Name == name {
			return f
		}
	}
	f := &figure{Section: section, Name: name, Unit: unit}
	b.figures = append(b.figures, f)
	return f
}

func (f *figure) target(most float64) *figure {
	f.Target = &most
	return f
}

func (f *figure) kafka(took float64) *figure {
	f.Kafka = &took
	return f
}

func (f *figure) add(v float64) {
	f.Runs = append(f.Runs, v)
	sorted := slices.Sorted(slices.Values(f.Runs))
	n := len(sorted)
	f.Min, f.Max = sorted[0], sorted[n-1]
	f.Median = (sorted[(n-1)/2] + sorted[n/2]) / 2
}

func (f *figure) addTime(d time.Duration) { f.add(d.Seconds()) }

// verdict judges by the median; a target that only some runs missed is said to be
// missed at times.
func (f *figure) verdict() string {
	switch {
	case f.Target == nil:
		return ""
	case f.Median > *f.Target:
		return "missed"
	case f.Max > *f.Target:
		return "missed at times"
	}
	return "met"
}

// environment is what the figures depend on besides the program.
type environment struct {
	Time       time.Time `json:"time"`
	CPUs       int       `json:"cpus"`
	CPU        string    `json:"cpu"`
	Kernel     string    `json:"kernel"`
	Go         string    `json:"go"`
	Kcat       string    `json:"kcat"`
	Etcdctl    string    `json:"etcdctl"`
	LoadBefore string    `json:"load_before"` // of other work: the figures are worth less the more there is
	LoadAfter  string    `json:"load_after"`
}

func describeEnvironment() environment {
	return environment{
		Time:       time.Now().UTC().Truncate(time.Second),
		CPUs:       runtime.NumCPU(),
		CPU:        lineAfter(readText("/proc/cpuinfo"), "model name", ":"),
		Kernel:     strings.TrimSpace(readText("/proc/sys/kernel/osrelease")),
		Go:         runtime.Version(),
		Kcat:       firstWord(lineAfter(output("kcat", "-V"), "Version", " ")),
		Etcdctl:    lineAfter(output("etcdctl", "version"), "etcdctl version", ":"),
		LoadBefore: loadAverage(),
	}
}

func readText(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return "" // a description that is missing is not worth failing for
	}
	return string(b)
}

func output(name string, args ...string) string {
	cmd := exec.Command(name, args...)
	cmd.Env = childEnv()
	b, _ := cmd.CombinedOutput() // likewise
	return string(b)
}

// lineAfter returns what follows a name and a separator in the first line that
// begins with them.
func lineAfter(text, name, separator string) string {
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			_, value, _ := strings.Cut(rest, separator)
			return strings.TrimSpace(value)
		}
	}
	return ""
}

func firstWord(text string) string {
	word, _, _ := strings.Cut(text, " ")
	return word
}

func loadAverage() string {
	fields := strings.Fields(readText("/proc/loadavg"))
	return strings.Join(fields[:min(3, len(fields))], " ")
}

func printJSON(w io.Writer, env environment, figures []*figure, growth []*series) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(struct {
		Environment environment `json:"environment"`
		Figures     []*figure   `json:"figures"`
		Series      []*series   `json:"series"`
	}{env, figures, growth})
}

func printTable(w io.Writer, env environment, figures []*figure, growth []*series) error {
	fmt.Fprintf(w, "%s, %d CPUs (%s), Linux %s, %s, kcat %s, etcdctl %s\nload average before: %s, after: %s\n\n", env.Time.Format(time.RFC3339),
		env.CPUs, env.CPU, env.Kernel, env.Go, env.Kcat, env.Etcdctl, env.LoadBefore, env.LoadAfter)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	if len(figures) > 0 {
		fmt.Fprintln(t, "SECTION\tFIGURE\tUNIT\tMEDIAN\tMIN\tMAX\tRUNS\tTARGET\t0.8.2.2\t")
	}
	for _, f := range figures {
		target, kafka := "-", "-"
		if f.Target != nil {
			target = number(*f.Target) + " " + f.verdict()
		}
		if f.Kafka != nil {
			kafka = number(*f.Kafka)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s\t\n", f.Section, f.Name, f.Unit, number(f.Median), number(f.Min), number(f.Max),
			len(f.Runs), target, kafka)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	return printSeries(w, growth)
}

// printSeries prints a column for each number of members.
func printSeries(w io.Writer, growth []*series) error {
	if len(growth) == 0 {
		return nil
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprint(t, "\nSECTION\tCHANGE\tUNIT\t")
	for _, n := range growthMembers {
		fmt.Fprintf(t, "%d MEMBERS\t", n)
	}
	fmt.Fprintln(t, "EXPONENT\tTARGET\t")
	for _, s := range growth {
		fmt.Fprintf(t, "%s\t%s\t%s\t", s.Section, s.Name, s.Unit)
		for _, n := range growthMembers {
			value := "-"
			if i := slices.Index(s.Members, n); i >= 0 {
				value = number(s.Values[i])
			}
			fmt.Fprintf(t, "%s\t", value)
		}
		fmt.Fprintf(t, "%s\t%s\t\n", number(s.Exponent), s.verdict())
	}
	return t.Flush()
}

// number keeps three decimals of what is small and none of what is large.
func number(v float64) string {
	decimals := 3
	switch {
	case v >= 1000:
		decimals = 0
	case v >= 10:
		decimals = 1
	}
	return strconv.FormatFloat(v, 'f', decimals, 64)
}
