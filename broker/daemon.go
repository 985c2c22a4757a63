// Package broker is the daemon: it puts the rooms below it together, starts them
// and stops them in order.
//
//	datadir.go     its directory, lock and identity
//	membership.go  its registration
//	catalog.go     what the registry says of brokers and topics
//	topics*.go     what clients are shown of it, the partitions it leads, its errands
//	logdirs.go     where their logs are, and where those of deleted topics go
//	openfiles.go   how many files each may have open
//	producers.go   producer ids
//	vigil.go       consumers on this host whose death it notices
//	daemon.go      start and stop
//	health.go      whether it lives, and whether it is of use
//	http.go        where that and the metrics are read
//	metrics*.go    what is counted
package broker

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/muster-io/muster/broker/api"
	"github.com/muster-io/muster/broker/wire"
	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/etcd"
	"github.com/muster-io/muster/vigil"
)

// Daemon is a running broker. Use Start, and Close it.
type Daemon struct {
	cfg       Config
	log       *slog.Logger
	dir       *dataDir
	listener  net.Listener
	advertise address
	server    *etcd.Server // nil with an external etcd
	store     registry.Store
	clusterID string
	view      *registry.View
	members   *membership
	topics    *topics
	producers *producers
	vigil     *vigil.Server
	wire      *wire.Server
	serving   atomic.Bool // the wire takes connections
	metrics   *metrics
	phase     phase
	http      net.Listener // nil without --http

	ctx     context.Context
	cancel  context.CancelFunc
	work    sync.WaitGroup
	failed  chan error
	failure atomic.Pointer[error] // the first that was sent there
	undo    []func() error        // what Start did, in order; Close goes backwards
}

const (
	// startLimit bounds what a start takes once etcd is there. The embedded etcd itself
	// is waited for as long as it takes: the other members may be started tomorrow.
	startLimit = 2 * time.Minute
	// drainLimit bounds what a stop waits for requests under way.
	drainLimit = 5 * time.Second
)

// Start brings a daemon up; when it returns, clients can connect. Every error
// says what to do about it.
func Start(ctx context.Context, cfg Config) (_ *Daemon, err error) {
	listen, advertise, err := cfg.check()
	if err != nil {
		return nil, err
	}
	d := &Daemon{cfg: cfg, log: cfg.Logger.With("broker", cfg.ID), failed: make(chan error, 1)}
	d.members, d.topics, d.producers = newMembership(d), newTopics(d), &producers{d: d}
	d.metrics = newMetrics(d)
	d.ctx, d.cancel = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
		}
	}()
	d.phase.enter(stepDataDir)
	if d.dir, err = openDataDir(cfg.DataDir, cfg.ID); err != nil {
		return nil, err
	}
	d.undo = append(d.undo, d.dir.close)
	d.phase.enter(stepListen)
	if err = d.serveHTTP(); err != nil {
		return nil, err
	}
	if err = d.listen(listen, advertise); err != nil {
		return nil, err
	}
	if err = d.openRegistry(ctx); err != nil {
		return nil, err
	}
	limited, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	d.phase.enter(stepIdentify)
	if err = d.identify(limited); err != nil {
		return nil, err
	}
	d.phase.enter(stepRegister)
	if err = d.members.join(limited, d.dir.formerLease()); err != nil {
		return nil, err
	}
	d.phase.enter(stepTopics)
	if err = d.loadTopics(ctx, limited); err != nil {
		return nil, errors.Join(err, d.members.leave())
	}
	d.undo = append(d.undo, d.members.leave) // last in, first out: its keys go before its logs close
	d.phase.enter(stepServe)
	if err = d.serveVigil(); err != nil {
		return nil, err
	}
	d.members.pulse.beat()
	d.work.Go(func() { d.members.run(d.ctx) })
	d.serve()
	d.phase.enter(stepServing)
	d.logReady()
	return d, nil
}

func (d *Daemon) listen(listen, advertise address) error {
	ln, err := Listen("--listen", listen.host, listen.port)
	if err != nil {
		return err
	}
	d.listener = ln
	d.advertise = advertise
	if advertise.port == 0 {
		d.advertise.port = int32(ln.Addr().(*net.TCPAddr).Port)
	}
	d.undo = append(d.undo, func() error {
		if err := ln.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			return fmt.Errorf("close listener: %w", err)
		}
		return nil
	})
	return nil
}

// openRegistry starts the embedded etcd, or finds the external one.
func (d *Daemon) openRegistry(ctx context.Context) error {
	o := d.cfg.Etcd
	o.Logger = d.log
	if len(o.Endpoints) == 0 {
		d.phase.enter(stepEtcd)
		server, err := etcd.StartServer(ctx, etcd.ServerOptions{Name: d.cfg.EtcdName, Dir: d.dir.etcd(),
			ListenClient: d.cfg.EtcdListenClient, ListenPeer: d.cfg.EtcdListenPeer, AdvertiseClient: d.cfg.EtcdAdvertiseClient,
			InitialCluster: d.cfg.EtcdInitialCluster, InitialClusterState: d.cfg.EtcdInitialClusterState,
			CACert: o.CACert, Cert: o.Cert, Key: o.Key, Insecure: d.cfg.Insecure, Logger: d.log})
		if err != nil {
			return err
		}
		d.server = server
		d.undo = append(d.undo, func() error { server.Close(); return nil })
		d.work.Go(func() {
			select {
			case err, failed := <-server.Err():
				if failed {
					d.fail(fmt.Errorf("embedded etcd failed: %w", err))
				}
			case <-d.ctx.Done():
			}
		})
		o.Endpoints = []string{server.Endpoint}
	}
	d.phase.enter(stepConnect)
	store, err := etcd.Open(ctx, o)
	if err != nil {
		return err
	}
	d.store = registry.Measured(store, d.metrics.storeCall)
	d.undo = append(d.undo, store.Close)
	return nil
}

func (d *Daemon) fail(err error) {
	d.failure.CompareAndSwap(nil, &err)
	select {
	case d.failed <- err:
	default:
	}
}

// identify finds the cluster's id, or gives the cluster one, which only a daemon does
// that belongs to none: elsewhere a registry without one has lost its keys.
func (d *Daemon) identify(ctx context.Context) error {
	key, restoring := d.cfg.Root.ClusterID(), d.cfg.Root.Restoring()
	id := uuid.New()
	fresh := base64.RawURLEncoding.EncodeToString(id[:])
	t := registry.Txn{If: []registry.Cond{registry.Absent(key), registry.Absent(restoring)}, Else: []registry.Op{registry.Get(key), registry.Get(restoring)}}
	if d.dir.id.ClusterID == "" {
		t.Then = []registry.Op{registry.Put(key, []byte(fresh), 0)}
	}
	res, err := d.store.Txn(ctx, t)
	switch {
	case err != nil:
		return fmt.Errorf("read the cluster id: %w", err)
	case res.Succeeded && len(t.Then) == 0:
		return fmt.Errorf("data directory %s belongs to cluster %s, the registry has no %s: choose another --data-dir, or the right etcd and --registry-root; if its keys are lost, restore them: muster registry restore",
			d.cfg.DataDir, d.dir.id.ClusterID, key)
	case res.Succeeded:
		d.clusterID = fresh
	case len(res.Items[1].KVs) > 0:
		return fmt.Errorf("a restore of the registry has not been finished (%s stands): run muster registry restore again, with the same file", restoring)
	default:
		d.clusterID = string(res.Items[0].KVs[0].Value)
	}
	return d.dir.setCluster(d.clusterID)
}

// trusted refuses a registry that has lost the keys of this daemon's cluster.
func (d *Daemon) trusted(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, registryCallLimit)
	defer cancel()
	key := d.cfg.Root.ClusterID()
	kv, _, err := registry.GetKey(ctx, d.store, key)
	switch {
	case err != nil:
		return fmt.Errorf("read the cluster id: %w", err)
	case kv == nil || string(kv.Value) != d.clusterID:
		return fmt.Errorf("%s is not that of this daemon's cluster any more: has the registry lost its keys?", key)
	}
	return nil
}

// loadTopics opens the partitions of this daemon and follows the registry from then on.
// The calls of the registry are bounded by limited, the rest by ctx.
func (d *Daemon) loadTopics(ctx, limited context.Context) error {
	view, err := registry.OpenView(limited, d.store, viewPrefixes(d.cfg.Root),
		registry.ViewOptions{Stall: d.cfg.SessionTimeout / 2, Listener: d.metrics.viewEvent, Logger: d.log}, d.topics.enqueue)
	if err != nil {
		return err
	}
	d.view = view
	d.undo = append(d.undo, d.topics.close, func() error { view.Close(); return nil })
	if err := d.topics.load(ctx); err != nil {
		return err
	}
	d.topics.pulse.beat()
	d.work.Go(func() { d.topics.follow(d.ctx, view.Trouble()) })
	if d.cfg.HTTP != "" { // else nobody could read what it counts
		d.work.Go(func() { d.metrics.groups.run(d.ctx, d.store, d.cfg.SessionTimeout/2, d.log) })
	}
	d.work.Go(func() { d.topics.errands.run(d.ctx) })
	d.work.Go(func() { d.topics.dirs.run(d.ctx) })
	return nil
}

func (d *Daemon) serve() {
	_, connections, _ := shareOpenFiles(openFileLimit())
	d.wire = wire.New(wire.Options{Logger: d.log, Hooks: d.metrics.wire.hooks(), MaxConnections: connections})
	api.Register(d.wire, d.topics, api.Options{Logger: d.log, AutoCreateTopics: d.cfg.AutoCreateTopics})
	d.serving.Store(true)
	d.work.Go(func() {
		defer d.serving.Store(false)
		if err := d.wire.Serve(d.ctx, d.listener); err != nil && d.ctx.Err() == nil {
			d.fail(fmt.Errorf("serve Kafka clients: %w", err))
		}
	})
	d.undo = append(d.undo, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), drainLimit)
		defer cancel()
		return d.wire.Shutdown(ctx)
	})
}

// Address is where clients connect: host and port as advertised.
func (d *Daemon) Address() string { return JoinAddress(d.advertise.host, d.advertise.port) }

// EtcdEndpoints is where the registry is.
func (d *Daemon) EtcdEndpoints() []string {
	if d.server != nil {
		return []string{d.server.Endpoint}
	}
	return d.cfg.Etcd.Endpoints
}

// Failed receives an error if the daemon cannot go on; Close it then.
func (d *Daemon) Failed() <-chan error { return d.failed }

// Close stops the daemon: it answers what is under way, takes its keys out of
// the registry, closes its logs, and only then its etcd.
func (d *Daemon) Close() error {
	d.phase.enter(stepStopping)
	var errs []error
	stop := func() {
		if n := len(d.undo); n > 0 {
			f := d.undo[n-1]
			d.undo = d.undo[:n-1]
			if err := f(); err != nil {
				errs = append(errs, err)
			}
		}
	}
	if d.wire != nil {
		stop() // requests under way still need everything else
	}
	d.cancel()
	d.work.Wait()
	for len(d.undo) > 0 {
		stop()
	}
	return errors.Join(errs...)
}
