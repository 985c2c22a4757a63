package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/muster-io/muster/inspect"
)

// doctorLimit bounds an examination: two looks, and up to a minute between them.
const doctorLimit = 3 * time.Minute

func doctorCommand() *cli.Command {
	return &cli.Command{
		Name:  "doctor",
		Usage: "find what is wrong in the registry; the exit status is 1 if anything is",
		Flags: clientFlags(
			&cli.BoolFlag{Name: "fix", Usage: "repair what can be repaired without loss, after showing it and asking"},
			&cli.BoolFlag{Name: "yes", Usage: "with --fix: repair without asking"},
			&cli.StringSliceFlag{Name: "only", Usage: "with --fix: repair only findings of this `CODE`, also where something is lost; may be repeated"},
			&cli.DurationFlag{Name: "settle", Value: inspect.DefaultSettle, Usage: "how long something must look wrong without any change to count"},
		),
		Action: doctor,
	}
}

func doctor(c *cli.Context) error {
	only, err := doctorUse(c)
	if err != nil {
		return err
	}
	return withClient(c, func(ctx context.Context, cl *client) error {
		d := &inspect.Doctor{Store: cl.store, Root: cl.root, Ask: inspect.Network, Settle: c.Duration("settle"),
			Waiting: func(n int, wait time.Duration) {
				fmt.Fprintf(c.App.ErrWriter, "%d suspicions; looking again in %s\n", n, wait.Round(time.Second))
			}}
		limited, cancel := context.WithTimeout(ctx, doctorLimit)
		defer cancel()
		report, err := d.Examine(limited)
		if err != nil {
			return err
		}
		var failed []error
		if c.Bool("fix") {
			failed = repair(ctx, c, d, report, inspect.Repairable(report.Findings, only))
		}
		if err := show(c, report, func(w io.Writer) { printReport(w, report, c.Bool("fix")) }); err != nil {
			return err
		}
		return errors.Join(oneLine(failed), remaining(report))
	})
}

// doctorUse checks the flags and reads the codes of --only.
func doctorUse(c *cli.Context) ([]inspect.Code, error) {
	if err := errors.Join(noArguments(c), checkOutput(c)); err != nil {
		return nil, err
	}
	if c.Duration("settle") <= 0 {
		return nil, wrongUse("--settle %s: want more than 0", c.Duration("settle"))
	}
	if !c.Bool("fix") && (c.Bool("yes") || c.IsSet("only")) {
		return nil, wrongUse("--yes and --only go with --fix")
	}
	var only []inspect.Code
	for _, text := range c.StringSlice("only") {
		code := inspect.Code(text)
		if !slices.Contains(inspect.Codes(), code) {
			return nil, wrongUse("--only %q is no code of a finding", text)
		}
		only = append(only, code)
	}
	return only, nil
}

// remaining is the error of a registry in which something is still wrong.
func remaining(r *inspect.Report) error {
	if r.Healthy {
		return nil
	}
	n := 0
	for _, f := range r.Findings {
		if f.Severity != inspect.Notice && !f.Repaired {
			n++
		}
	}
	return fmt.Errorf("%d findings in the registry", n)
}

// repair shows on stderr what it is about to do, asks, and does it.
func repair(ctx context.Context, c *cli.Context, d *inspect.Doctor, r *inspect.Report, indexes []int) []error {
	if len(indexes) == 0 {
		return nil
	}
	w := tabwriter.NewWriter(c.App.ErrWriter, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "%d repairs:\n", len(indexes))
	for _, i := range indexes {
		f := r.Findings[i]
		action := f.Repair.Action
		if f.Repair.Loses != "" {
			action += "; loses " + f.Repair.Loses
		}
		row(w, f.Key, f.What, action)
	}
	if err := w.Flush(); err != nil {
		return []error{err}
	}
	if !c.Bool("yes") {
		fmt.Fprint(c.App.ErrWriter, "type yes to carry them out: ")
		if !saysYes(ctx, c.App.Reader) {
			fmt.Fprintln(c.App.ErrWriter)
			return []error{errors.New("nothing was repaired")}
		}
	}
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	return d.Repair(ctx, r, indexes)
}

// saysYes reads a line. A terminal that nobody types at does not hold up a signal:
// the read is then left to the end of the process.
func saysYes(ctx context.Context, from io.Reader) bool {
	line := make(chan string, 1)
	go func() {
		text, _ := bufio.NewReader(from).ReadString('\n')
		line <- strings.TrimSpace(text)
	}()
	select {
	case text := <-line:
		return text == "yes"
	case <-ctx.Done():
		return false
	}
}

func printReport(w io.Writer, r *inspect.Report, fixed bool) {
	if len(r.Findings) > 0 {
		row(w, "SEVERITY", "CODE", "KEY", "REPAIR", "WHAT")
	}
	repairable, byName := 0, 0
	for _, f := range r.Findings {
		state := "none"
		switch {
		case f.Repaired:
			state = "done"
		case f.Repair != nil && f.Repair.Loses != "":
			state = "--only"
			byName++
		case f.Repair != nil:
			state = "--fix"
			repairable++
		}
		row(w, f.Severity, f.Code, f.Key, state, printable([]byte(f.What)))
	}
	explained := map[inspect.Code]bool{}
	for _, f := range r.Findings {
		if !explained[f.Code] && !f.Repaired {
			explained[f.Code] = true
			fmt.Fprintf(w, "\n%s: %s.\nwhat to do: %s.\n", f.Code, f.Means, f.Do)
		}
	}
	if len(explained) > 0 {
		fmt.Fprintln(w)
	}
	if r.Unsettled > 0 {
		fmt.Fprintf(w, "%d things looked wrong while something around them changed; they are not counted\n", r.Unsettled)
	}
	word := "healthy"
	if !r.Healthy {
		word = "not healthy"
	}
	fmt.Fprintf(w, "%s: %d keys examined at revision %d, %d findings\n", word, r.Keys, r.Revision, len(r.Findings))
	if repairable > 0 && !fixed {
		fmt.Fprintf(w, "%d of them can be repaired without loss: muster registry doctor --fix\n", repairable)
	}
	if byName > 0 {
		fmt.Fprintf(w, "%d of them can be repaired with loss: muster registry doctor --fix --only CODE\n", byName)
	}
}
