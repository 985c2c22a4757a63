package membership

import (
	"context"
	"sync"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/vigil"
)

// notices has the end of this process noticed by a daemon on its host. There is one
// for all members at a view, since it is a connection for the whole process.
type notices struct {
	mu     sync.Mutex
	client *vigil.Client // nil as long as nobody asked for it, or there is no cluster
}

// watcher returns the client, which is made for the first who asks; nil if there is
// no daemon that could watch. Best effort: without it the lease alone decides.
func (v *View) watcher(ctx context.Context, m *Membership) *vigil.Client {
	n := &v.notices
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.client != nil {
		return n.client
	}
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	kv, _, err := registry.GetKey(ctx, m.store, v.root.ClusterID())
	if err != nil || kv == nil {
		m.log.Debug("no daemon watches this process: the cluster has no id", "error", err)
		return nil
	}
	n.client = vigil.Ask(vigil.ClientOptions{ClusterID: string(kv.Value), Logger: m.log})
	return n.client
}

func (n *notices) close() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.client != nil {
		n.client.Close()
	}
}

// brokersKnown tells the client where daemons are.
func (m *Membership) brokersKnown(keys registry.Snapshot) {
	if m.vigil == nil {
		return
	}
	var ids []int32
	for kv := range keys.All(ViewBrokers) {
		if id, _, err := m.cfg.Root.ParseBroker(kv); err == nil {
			ids = append(ids, id)
		}
	}
	m.vigil.Brokers(ids)
}

// watchMe asks for a session that has just been registered to be watched.
func (m *Membership) watchMe(s *registry.Session, reg registry.Registration, secret vigil.Secret) {
	if m.vigil != nil {
		m.vigil.Add(s.Lease(), reg.Key, secret)
	}
}

// watchNoMore is called before a session is ended, and when it has.
func (m *Membership) watchNoMore(s *registry.Session) {
	if m.vigil != nil {
		m.vigil.Remove(s.Lease())
	}
}
