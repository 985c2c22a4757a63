package broker

import (
	"fmt"

	"github.com/muster-io/muster/vigil"
)

// serveVigil watches the consumers on this host, and revokes the lease of one whose
// process has ended.
func (d *Daemon) serveVigil() error {
	_, _, watched := shareOpenFiles(openFileLimit())
	s, err := vigil.Serve(vigil.ServerOptions{Store: d.store, Root: d.cfg.Root, ClusterID: d.clusterID, Broker: d.cfg.ID,
		Path: d.cfg.LocalSocket, MaxConnections: watched, Hooks: d.metrics.vigilHooks(), Logger: d.log})
	if err != nil {
		return fmt.Errorf("%w (--local-socket)", err)
	}
	d.vigil = s
	d.undo = append(d.undo, s.Close)
	return nil
}
