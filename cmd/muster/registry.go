package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"github.com/urfave/cli/v2"

	"github.com/muster-io/muster/registry"
)

func registryCommand() *cli.Command {
	return &cli.Command{
		Name:  "registry",
		Usage: "look into the tree itself",
		Subcommands: []*cli.Command{
			{Name: "tree", Usage: "show all keys under a path, with the leases of those that have one", ArgsUsage: "[PATH]", Flags: clientFlags(
				&cli.IntFlag{Name: "limit", Value: treeLimit, Usage: "show so many keys that stand side by side, and count the rest; 0 shows all"},
				&cli.BoolFlag{Name: "revisions", Usage: "also the revisions at which each key was created and last written"},
			), Action: registryTree},
			{Name: "ls", Usage: "list what stands directly under a path", ArgsUsage: "[PATH]", Flags: clientFlags(
				&cli.BoolFlag{Name: "long", Aliases: []string{"l"}, Usage: "also leases, revisions, and how many keys are below"},
			), Action: registryLs},
			{Name: "get", Usage: "print the value of a key", ArgsUsage: "PATH", Flags: clientFlags(), Action: registryGet},
			watchCommand(),
			doctorCommand(),
			backupCommand(),
			restoreCommand(),
		},
	}
}

// node is a key as it is shown. Value is JSON if the key's value is, else text.
type node struct {
	Path     string  `json:"path"` // from the registry's root
	Value    any     `json:"value"`
	Lease    *string `json:"lease"` // of an ephemeral key
	Created  int64   `json:"create_revision"`
	Modified int64   `json:"mod_revision"`
}

func (cl *client) node(kv registry.KV) node {
	n := node{Path: strings.TrimPrefix(kv.Key, string(cl.root)), Created: kv.CreateRevision, Modified: kv.ModRevision}
	var v any
	if len(kv.Value) > 0 && kv.Value[0] == '{' && json.Unmarshal(kv.Value, &v) == nil {
		n.Value = json.RawMessage(kv.Value)
	} else {
		n.Value = printable(kv.Value)
	}
	if kv.Lease != 0 {
		text := registry.LeaseText(kv.Lease)
		n.Lease = &text
	}
	return n
}

// printable keeps foreign bytes from a terminal.
func printable(value []byte) string {
	text := string(value)
	if !utf8.ValidString(text) || strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return fmt.Sprintf("%q", text)
	}
	return text
}

func (n node) text() string {
	if raw, ok := n.Value.(json.RawMessage); ok {
		return printable(raw)
	}
	return fmt.Sprint(n.Value)
}

// path reads the optional argument of tree and ls: a path from the root, "/" by default.
func path(c *cli.Context) (string, error) {
	if !c.Args().Present() {
		return "/", nil
	}
	p, err := oneArgument(c, "a path")
	if err != nil {
		return "", err
	}
	return "/" + strings.Trim(p, "/"), nil
}

// treeLimit is how many keys side by side a person looks at.
const treeLimit = 100

// below lists the keys under a path, the path itself included. That there are none
// is an error, but for the root.
func (cl *client) below(ctx context.Context, path string) ([]registry.KV, error) {
	key := cl.root.Key(strings.TrimSuffix(path, "/"))
	kvs, revision, err := registry.List(ctx, cl.store, key+"/", 0)
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", path, err)
	}
	if path == "/" {
		return kvs, nil
	}
	res, err := cl.store.Range(ctx, registry.RangeRequest{Key: key, Revision: revision})
	if err != nil {
		return nil, fmt.Errorf("get %s: %w", path, err)
	}
	if kvs = append(res.KVs, kvs...); len(kvs) == 0 {
		return nil, noKey(path)
	}
	return kvs, nil
}

func noKey(path string) error {
	return fmt.Errorf("no key %s: see what is there with: muster registry ls", path)
}

func registryTree(c *cli.Context) error {
	at, err := path(c)
	if err != nil {
		return err
	}
	return withTool(c, func(ctx context.Context, cl *client) error {
		kvs, err := cl.below(ctx, at)
		if err != nil {
			return err
		}
		nodes := []node{}
		for _, kv := range kvs {
			nodes = append(nodes, cl.node(kv))
		}
		return show(c, nodes, func(w io.Writer) { printTree(w, nodes, c.Int("limit"), c.Bool("revisions")) })
	})
}

// printTree prints each path element once, indented by its depth. Of keys that
// stand side by side it prints limit, and the number of the others.
func printTree(w io.Writer, nodes []node, limit int, revisions bool) {
	var last []string
	beside, hidden := 0, 0
	flush := func() {
		if hidden > 0 {
			fmt.Fprintf(w, "%s… and %d more keys\n", strings.Repeat("  ", len(last)-1), hidden)
		}
		beside, hidden = 0, 0
	}
	for _, n := range nodes {
		parts := strings.Split(strings.TrimPrefix(n.Path, "/"), "/")
		same := 0
		for same < len(parts)-1 && same < len(last) && parts[same] == last[same] {
			same++
		}
		if len(parts) != len(last) || same < len(parts)-1 {
			flush()
		}
		if beside++; limit > 0 && beside > limit {
			hidden++
			continue
		}
		for i := same; i < len(parts)-1; i++ {
			fmt.Fprintf(w, "%s%s/\n", strings.Repeat("  ", i), parts[i])
		}
		line := strings.Repeat("  ", len(parts)-1) + parts[len(parts)-1]
		if text := n.text(); text != "" {
			line += " = " + text
		}
		if n.Lease != nil {
			line += "  (lease " + *n.Lease + ")"
		}
		if revisions {
			line += fmt.Sprintf("  [%d %d]", n.Created, n.Modified)
		}
		fmt.Fprintln(w, line)
		last = parts
	}
	flush()
}

// entry is what stands directly under a path: a key, or the keys below a name, or both.
type entry struct {
	Name     string  `json:"name"` // ends with a slash if it stands for keys below
	Keys     int     `json:"keys"` // below; 0 for a key
	Lease    *string `json:"lease"`
	Modified int64   `json:"mod_revision"` // the newest
}

func registryLs(c *cli.Context) error {
	at, err := path(c)
	if err != nil {
		return err
	}
	return withTool(c, func(ctx context.Context, cl *client) error {
		kvs, err := cl.below(ctx, at)
		if err != nil {
			return err
		}
		entries := []entry{}
		for _, kv := range kvs {
			rest, ok := strings.CutPrefix(kv.Key, cl.root.Key(strings.TrimSuffix(at, "/"))+"/")
			if !ok {
				continue // the path itself
			}
			entries = appendEntry(entries, rest, cl.node(kv))
		}
		if c.Bool("long") {
			return show(c, entries, func(w io.Writer) {
				row(w, "NAME", "KEYS", "LEASE", "REV")
				for _, e := range entries {
					row(w, e.Name, e.Keys, or(e.Lease, "none"), e.Modified)
				}
			})
		}
		names := make([]string, len(entries))
		for i, e := range entries {
			names[i] = e.Name
		}
		return show(c, names, func(w io.Writer) {
			for _, name := range names {
				fmt.Fprintln(w, name)
			}
		})
	})
}

// appendEntry counts a key in, whose path from where ls looks is rest.
func appendEntry(entries []entry, rest string, n node) []entry {
	name, _, deeper := strings.Cut(rest, "/")
	if deeper {
		name += "/"
	}
	if len(entries) == 0 || entries[len(entries)-1].Name != name {
		entries = append(entries, entry{Name: name})
	}
	e := &entries[len(entries)-1]
	e.Modified = max(e.Modified, n.Modified)
	if deeper {
		e.Keys++
	} else {
		e.Lease = n.Lease
	}
	return entries
}

func registryGet(c *cli.Context) error {
	if c.Args().Len() != 1 {
		return wrongUse("want one argument, a path")
	}
	at, err := path(c)
	if err != nil {
		return err
	}
	return withTool(c, func(ctx context.Context, cl *client) error {
		kv, _, err := registry.GetKey(ctx, cl.store, cl.root.Key(at))
		if err != nil {
			return fmt.Errorf("get %s: %w", at, err)
		}
		if kv == nil {
			return noKey(at)
		}
		n := cl.node(*kv)
		return show(c, n, func(w io.Writer) { fmt.Fprintln(w, n.text()) })
	})
}
