package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/muster-io/muster/broker"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/etcd"
)

// env is the environment variable of a flag.
func env(flag string) []string {
	return []string{"MUSTER_" + strings.ToUpper(strings.NewReplacer("-", "_", ".", "_").Replace(flag))}
}

// The flags by which every client command finds the registry.
func registryFlags(endpoints string) []cli.Flag {
	flags := []cli.Flag{
		&cli.StringFlag{Name: "etcd-user", EnvVars: env("etcd-user"), Usage: "user name for etcd"},
		&cli.StringFlag{Name: "etcd-password-file", EnvVars: env("etcd-password-file"), Usage: "file with the password for etcd"},
		&cli.StringFlag{Name: "etcd-cacert", EnvVars: env("etcd-cacert"), Usage: "PEM file of the authority that signed etcd's certificate (and, for the embedded etcd, must have signed those of clients and peers)"},
		&cli.StringFlag{Name: "etcd-cert", EnvVars: env("etcd-cert"), Usage: "PEM file of the certificate shown to etcd (and of the embedded etcd itself)"},
		&cli.StringFlag{Name: "etcd-key", EnvVars: env("etcd-key"), Usage: "PEM file of the key of --etcd-cert"},
		&cli.StringFlag{Name: "registry-root", EnvVars: env("registry-root"), Value: "/", Usage: "path under which all keys stand"},
	}
	if endpoints != "" {
		flags = append([]cli.Flag{&cli.StringFlag{Name: "etcd-endpoints", EnvVars: env("etcd-endpoints"), Value: endpoints,
			Usage: "`URL,…` of etcd; one is enough, the other members are learned from it"}}, flags...)
	}
	return append(flags, logFlag())
}

func logFlag() cli.Flag {
	return &cli.StringFlag{Name: "log-level", EnvVars: env("log-level"), Value: "info", Usage: "debug, info, warn or error, on stderr"}
}

func outputFlag() cli.Flag {
	return &cli.StringFlag{Name: "output", Aliases: []string{"o"}, EnvVars: env("output"), Value: "table", Usage: "table or json"}
}

// clientFlags are those of a command that prints.
func clientFlags(more ...cli.Flag) []cli.Flag {
	return append(append(more, outputFlag()), registryFlags(defaultEndpoint)...)
}

const defaultEndpoint = "http://127.0.0.1:2379"

func logger(c *cli.Context) (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(c.String("log-level"))); err != nil {
		return nil, wrongUse("--log-level %q: want debug, info, warn or error", c.String("log-level"))
	}
	return slog.New(slog.NewTextHandler(c.App.ErrWriter, &slog.HandlerOptions{Level: level})), nil
}

func etcdOptions(c *cli.Context, endpoints string) (etcd.Options, error) {
	o := etcd.Options{User: c.String("etcd-user"), CACert: c.String("etcd-cacert"), Cert: c.String("etcd-cert"), Key: c.String("etcd-key")}
	for _, e := range strings.Split(endpoints, ",") {
		if e = strings.TrimSpace(e); e != "" {
			o.Endpoints = append(o.Endpoints, e)
		}
	}
	if file := c.String("etcd-password-file"); file != "" {
		data, err := os.ReadFile(file)
		if err != nil {
			return o, fmt.Errorf("--etcd-password-file: %w", err)
		}
		o.Password = strings.TrimRight(string(data), "\r\n")
	}
	return o, nil
}

// client is an open registry.
type client struct {
	store *etcd.Store
	root  registry.Root
	log   *slog.Logger
}

// callLimit bounds one call of a tool to the registry.
const callLimit = 10 * time.Second

// withClient opens the registry for f.
func withClient(c *cli.Context, f func(ctx context.Context, cl *client) error) error {
	log, err := logger(c)
	if err != nil {
		return err
	}
	root, err := registry.ParseRoot(c.String("registry-root"))
	if err != nil {
		return wrongUse("--registry-root: %w", err)
	}
	o, err := etcdOptions(c, c.String("etcd-endpoints"))
	if err != nil {
		return err
	}
	o.Logger = log
	store, err := etcd.Open(c.Context, o)
	if err != nil {
		return err
	}
	defer store.Close()
	return f(c.Context, &client{store: store, root: root, log: log})
}

// withTool is withClient for a command that asks and prints: bounded in time.
func withTool(c *cli.Context, f func(ctx context.Context, cl *client) error) error {
	if err := checkOutput(c); err != nil {
		return err
	}
	return withClient(c, func(ctx context.Context, cl *client) error {
		ctx, cancel := context.WithTimeout(ctx, callLimit)
		defer cancel()
		return f(ctx, cl)
	})
}

// warn prints what could not be read, beside what could.
func (cl *client) warn(bad []error) {
	for _, err := range bad {
		cl.log.Warn("record skipped", "error", err)
	}
}

// seeds are the addresses of the live brokers.
func (cl *client) seeds(ctx context.Context) ([]string, error) {
	brokers, bad, err := registry.LiveBrokers(ctx, cl.store, cl.root)
	if err != nil {
		return nil, err
	}
	cl.warn(bad)
	if len(brokers) == 0 {
		return nil, fmt.Errorf("%w: start one with: muster server", registry.ErrNoBroker)
	}
	var list []string
	for _, b := range brokers {
		list = append(list, broker.JoinAddress(b.Host, b.Port))
	}
	return list, nil
}
