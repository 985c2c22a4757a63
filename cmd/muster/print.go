package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/urfave/cli/v2"
)

// show prints facts as the user asked: as JSON as they are, or as a table.
func show(c *cli.Context, facts any, table func(w io.Writer)) error {
	if c.String("output") == outputJSON {
		enc := json.NewEncoder(c.App.Writer)
		enc.SetEscapeHTML(false)
		enc.SetIndent("", "  ")
		return enc.Encode(facts)
	}
	w := tabwriter.NewWriter(c.App.Writer, 0, 0, 2, ' ', 0)
	table(w)
	return w.Flush()
}

const (
	outputTable = "table"
	outputJSON  = "json"
)

// checkOutput is called before anything is done.
func checkOutput(c *cli.Context) error {
	if o := c.String("output"); o != outputTable && o != outputJSON {
		return wrongUse("--output %q: want table or json", o)
	}
	return nil
}

// row prints one line of a table.
func row(w io.Writer, cells ...any) {
	text := make([]string, len(cells))
	for i, cell := range cells {
		text[i] = fmt.Sprint(cell)
		if text[i] == "" {
			text[i] = "-" // an empty cell would be lost to whoever splits the row
		}
	}
	fmt.Fprintln(w, strings.Join(text, "\t"))
}

// or shows a value that may be unknown.
func or[T any](v *T, none string) string {
	if v == nil {
		return none
	}
	return fmt.Sprint(*v)
}
