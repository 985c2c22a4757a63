package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/muster-io/muster/broker"
	"github.com/muster-io/muster/registry"
)

func serverCommand() *cli.Command {
	flags := []cli.Flag{
		&cli.StringFlag{Name: "config", EnvVars: env("config"), Usage: "`FILE` with lines name=value; flags and environment win"},
		&cli.IntFlag{Name: "broker-id", EnvVars: env("broker-id"), Value: 1, Usage: "id of this broker, unique in the cluster"},
		&cli.StringFlag{Name: "data-dir", EnvVars: env("data-dir"), Value: "muster-data", Usage: "directory for everything that lasts"},
		&cli.StringFlag{Name: "listen", EnvVars: env("listen"), Value: "127.0.0.1:9092", Usage: "`HOST:PORT` for Kafka clients"},
		&cli.StringFlag{Name: "advertise", EnvVars: env("advertise"), Usage: "`HOST:PORT` that clients are told; required if --listen is a wildcard"},
		&cli.StringFlag{Name: "http", EnvVars: env("http"), Usage: "`HOST:PORT` of /metrics, /healthz and /readyz (default: not served)"},
		&cli.StringFlag{Name: "local-socket", EnvVars: env("local-socket"), Usage: "socket `FILE` by which consumers in containers of this host are watched"},
		&cli.StringFlag{Name: "etcd-listen-client", EnvVars: env("etcd-listen-client"), Value: defaultEndpoint, Usage: "`URL` of the embedded etcd for clients"},
		&cli.StringFlag{Name: "etcd-listen-peer", EnvVars: env("etcd-listen-peer"), Value: "http://127.0.0.1:2380", Usage: "`URL` of the embedded etcd for its peers"},
		&cli.StringFlag{Name: "etcd-name", EnvVars: env("etcd-name"), Usage: "name of the embedded etcd (default: muster-<broker id>)"},
		&cli.StringFlag{Name: "etcd-advertise-client", EnvVars: env("etcd-advertise-client"), Usage: "`URL` by which clients elsewhere reach the embedded etcd (default: where it listens)"},
		&cli.StringFlag{Name: "etcd-initial-cluster", EnvVars: env("etcd-initial-cluster"), Usage: "`NAME=URL,…` of the peers of all embedded etcds, this one included, if more than this one"},
		&cli.StringFlag{Name: "etcd-initial-cluster-state", EnvVars: env("etcd-initial-cluster-state"), Value: "new", Usage: "existing for an embedded etcd that joins a cluster to which it was added"},
		&cli.StringFlag{Name: "etcd-external", EnvVars: env("etcd-external"), Usage: "`URL,…` of an existing etcd to use in place of the embedded one"},
		&cli.BoolFlag{Name: "insecure", EnvVars: env("insecure"), Usage: "allow the embedded etcd without TLS, and so without authentication, on addresses other than loopback"},
		&cli.DurationFlag{Name: "session-timeout", EnvVars: env("session-timeout"), Value: registry.DefaultTTL, Usage: "after it a silent daemon loses its registration"},
		&cli.BoolFlag{Name: "auto-create-topics", EnvVars: env("auto-create-topics"), Value: true, Usage: "create topics that a client asks for"},
		&cli.IntFlag{Name: "num-partitions", EnvVars: env("num-partitions"), Value: 1, Usage: "partitions of a topic that is created so"},
		&cli.Int64Flag{Name: "segment-bytes", EnvVars: env("segment-bytes"), Value: 1 << 30, Usage: "size at which a new log segment begins"},
	}
	return &cli.Command{
		Name:   "server",
		Usage:  "run the daemon of this node",
		Flags:  append(flags, registryFlags("")...),
		Before: readConfigFile,
		Action: server,
		// Whatever keeps a daemon from starting is one failure to its supervisor.
		OnUsageError: func(c *cli.Context, err error, _ bool) error {
			return fmt.Errorf("%w; see: %s --help", err, c.Command.HelpName)
		},
	}
}

func server(c *cli.Context) error {
	cfg, err := serverConfig(c)
	if err != nil {
		return startError(err)
	}
	d, err := broker.Start(c.Context, cfg)
	if err != nil && c.Context.Err() != nil {
		cfg.Logger.Info("stopped while starting", "reason", err)
		return nil
	}
	if err != nil {
		return startError(err)
	}
	fmt.Fprintf(c.App.Writer, "ready broker=%d listen=%s etcd=%s\n", cfg.ID, d.Address(), strings.Join(d.EtcdEndpoints(), ","))
	stopping := notify(d, cfg.Logger)
	select {
	case <-c.Context.Done():
		cfg.Logger.Info("stopping")
	case err = <-d.Failed():
	}
	stopping()
	return errors.Join(err, d.Close())
}

// startError keeps the message to one line and the status to 1.
func startError(err error) error {
	return errors.New(strings.ReplaceAll(err.Error(), "\n", "; "))
}

func serverConfig(c *cli.Context) (broker.Config, error) {
	var cfg broker.Config
	if err := noArguments(c); err != nil {
		return cfg, err
	}
	log, err := logger(c)
	if err != nil {
		return cfg, err
	}
	root, err := registry.ParseRoot(c.String("registry-root"))
	if err != nil {
		return cfg, fmt.Errorf("--registry-root: %w", err)
	}
	options, err := etcdOptions(c, c.String("etcd-external"))
	if err != nil {
		return cfg, err
	}
	if n := c.Int("broker-id"); n < 0 || n > 1<<31-1 {
		return cfg, fmt.Errorf("--broker-id %d: want 0 to 2147483647", n)
	}
	if n := c.Int("num-partitions"); n < 1 || n > registry.MaxPartitions {
		return cfg, fmt.Errorf("--num-partitions %d: want 1 to %d", n, registry.MaxPartitions)
	}
	return broker.Config{
		ID:                      int32(c.Int("broker-id")),
		DataDir:                 c.String("data-dir"),
		Listen:                  c.String("listen"),
		Advertise:               c.String("advertise"),
		HTTP:                    c.String("http"),
		LocalSocket:             c.String("local-socket"),
		Etcd:                    options,
		EtcdListenClient:        c.String("etcd-listen-client"),
		EtcdListenPeer:          c.String("etcd-listen-peer"),
		EtcdAdvertiseClient:     c.String("etcd-advertise-client"),
		EtcdName:                c.String("etcd-name"),
		EtcdInitialCluster:      c.String("etcd-initial-cluster"),
		EtcdInitialClusterState: c.String("etcd-initial-cluster-state"),
		Insecure:                c.Bool("insecure"),
		Root:                    root,
		SessionTimeout:          c.Duration("session-timeout"),
		AutoCreateTopics:        c.Bool("auto-create-topics"),
		NumPartitions:           int32(c.Int("num-partitions")),
		SegmentBytes:            c.Int64("segment-bytes"),
		Logger:                  log,
	}, nil
}

// readConfigFile sets the flags that a file names and that neither the command
// line nor the environment has set. Dots and underscores in names count as
// dashes, so that Kafka's spelling works too: broker.id=1.
func readConfigFile(c *cli.Context) error {
	name := c.String("config")
	if name == "" {
		return nil
	}
	f, err := os.Open(name)
	if err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	defer f.Close()
	known := map[string]bool{}
	for _, flag := range c.Command.Flags {
		known[flag.Names()[0]] = true
	}
	lines := bufio.NewScanner(f)
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || line[0] == '#' {
			continue
		}
		key, value, ok := strings.Cut(line, "=")
		setting := strings.NewReplacer(".", "-", "_", "-").Replace(strings.TrimSpace(key))
		if !ok || !known[setting] || setting == "config" {
			return fmt.Errorf("%s line %d: unknown setting %q", name, n, strings.TrimSpace(key))
		}
		if c.IsSet(setting) {
			continue
		}
		if err := c.Set(setting, strings.TrimSpace(value)); err != nil {
			return fmt.Errorf("%s line %d: %s: %w", name, n, setting, err)
		}
	}
	return lines.Err()
}
