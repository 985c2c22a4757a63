package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/urfave/cli/v2"

	"github.com/muster-io/muster/registry"
)

func backupCommand() *cli.Command {
	return &cli.Command{
		Name: "backup", Usage: "write the persistent keys, as of one moment, to a file",
		Flags: clientFlags(&cli.StringFlag{Name: "file", Value: "-", EnvVars: env("file"),
			Usage: "`FILE` to write, replaced when the backup is whole; - is stdout"}),
		Action: registryBackup,
	}
}

func restoreCommand() *cli.Command {
	return &cli.Command{
		Name: "restore", Usage: "write the keys of a backup to an empty registry, daemons and consumers being stopped", ArgsUsage: "FILE|-",
		Flags: clientFlags(), Action: registryRestore,
	}
}

// backupResult is what both commands say.
type backupResult struct {
	File     string `json:"file"`
	Root     string `json:"root"` // that the keys were read from
	Revision int64  `json:"revision"`
	Time     string `json:"time"`
	Keys     int    `json:"keys"`
}

func resultOf(file string, h registry.BackupHeader) backupResult {
	return backupResult{File: file, Root: h.Root, Revision: h.Revision, Time: h.Time.Format("2006-01-02T15:04:05Z07:00"), Keys: h.Keys}
}

func registryBackup(c *cli.Context) error {
	if err := errors.Join(noArguments(c), checkOutput(c)); err != nil {
		return err
	}
	return withClient(c, func(ctx context.Context, cl *client) error {
		file := c.String("file")
		if file == "-" {
			_, err := registry.Backup(ctx, cl.store, cl.root, c.App.Writer)
			return err
		}
		var h registry.BackupHeader
		err := replaceFile(file, func(w io.Writer) (err error) {
			h, err = registry.Backup(ctx, cl.store, cl.root, w)
			return err
		})
		if err != nil {
			return err
		}
		r := resultOf(file, h)
		return show(c, r, func(w io.Writer) {
			fmt.Fprintf(w, "backed up %d keys of %s as of revision %d to %s\n", r.Keys, r.Root, r.Revision, r.File)
		})
	})
}

// replaceFile writes a file that is there as a whole or not at all. Only its owner may
// read it.
func replaceFile(name string, write func(io.Writer) error) (err error) {
	f, err := os.CreateTemp(filepath.Dir(name), filepath.Base(name)+".part-*")
	if err != nil {
		return fmt.Errorf("--file: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	if err = write(f); err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), name)
}

func registryRestore(c *cli.Context) error {
	name, err := oneArgument(c, "a file, or - for stdin")
	if err != nil {
		return err
	}
	if err := checkOutput(c); err != nil {
		return err
	}
	in := c.App.Reader
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		defer f.Close()
		in = f
	}
	return withClient(c, func(ctx context.Context, cl *client) error {
		h, err := registry.Restore(ctx, cl.store, cl.root, in)
		if err != nil {
			return err
		}
		r := resultOf(name, h)
		return show(c, r, func(w io.Writer) {
			fmt.Fprintf(w, "restored %d keys to %s, those of %s as of revision %d, %s\n", r.Keys, cl.root, r.Root, r.Revision, r.Time)
		})
	})
}
