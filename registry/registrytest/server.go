// Package registrytest gives the tests of those who use package registry a real
// etcd in one line:
//
//	st := registrytest.Start(t)
//
// The server runs inside the test process on free loopback ports, with its data in
// a temporary directory, and is gone when the test ends. Tests in virtual time
// (testing/synctest) cannot use it: package registry/memory is for those.
package registrytest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/muster-io/muster/internal/freeport"
	"github.com/muster-io/muster/registry/etcd"
)

// Server is an etcd of its own with a Store opened on it, which it embeds: a Server
// is a registry.Store.
type Server struct {
	*etcd.Store
	// Endpoint is the URL of the server, for further stores and for other tools.
	Endpoint string

	options   etcd.ServerOptions
	addresses []string     // of options, to be given back
	server    *etcd.Server // nil while stopped
	dir       string       // to be removed in the end; empty if that is not ours to do
}

// startLimit bounds a start; a healthy one takes a second.
const startLimit = 30 * time.Second

// Start starts an etcd and opens a Store on it. Both end with the test or benchmark,
// which fails at once if they cannot be had.
func Start(t testing.TB) *Server {
	t.Helper()
	s, err := start(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close the test registry: %v", err)
		}
	})
	return s
}

// Open is Start where there is no test, as in an example or TestMain: the caller
// must Close what it returns. ctx bounds only the opening.
func Open(ctx context.Context) (*Server, error) {
	dir, err := os.MkdirTemp("", "muster-registrytest-")
	if err != nil {
		return nil, fmt.Errorf("directory for the test registry: %w", err)
	}
	s, err := start(ctx, dir)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	s.dir = dir
	return s, nil
}

func start(ctx context.Context, dir string) (*Server, error) {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	s := &Server{}
	if err := s.listen(ctx, dir); err != nil {
		s.releasePorts()
		return nil, fmt.Errorf("start the test registry: %w", err)
	}
	s.Endpoint = s.server.Endpoint
	var err error
	if s.Store, err = etcd.Open(ctx, etcd.Options{Endpoints: []string{s.Endpoint}}); err != nil {
		s.StopServer()
		s.releasePorts()
		return nil, fmt.Errorf("open the test registry: %w", err)
	}
	return s, nil
}

// listen starts etcd on two ports that are ours until releasePorts.
func (s *Server) listen(ctx context.Context, dir string) (err error) {
	for range 2 {
		address, err := freeport.Address()
		if err != nil {
			return err
		}
		s.addresses = append(s.addresses, address)
	}
	s.options = etcd.ServerOptions{Name: "test", Dir: dir, ListenClient: "http://" + s.addresses[0], ListenPeer: "http://" + s.addresses[1]}
	s.server, err = etcd.StartServer(ctx, s.options)
	return err
}

func (s *Server) releasePorts() {
	for _, address := range s.addresses {
		freeport.Release(address)
	}
	s.addresses = nil
}

// StopServer stops etcd and leaves its data, for tests of what happens then. The
// Store stays open, and works again after StartServer.
func (s *Server) StopServer() {
	if s.server != nil {
		s.server.Close()
		s.server = nil
	}
}

// StartServer starts etcd again after StopServer, with the same data and address.
// ctx bounds only the start.
func (s *Server) StartServer(ctx context.Context) error {
	if s.server != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	server, err := etcd.StartServer(ctx, s.options)
	if err != nil {
		return fmt.Errorf("start the test registry again: %w", err)
	}
	s.server = server
	return nil
}

// Close closes the Store, stops the server, and removes the data if Open made the
// directory.
func (s *Server) Close() error {
	err := s.Store.Close()
	s.StopServer()
	s.releasePorts()
	if s.dir != "" {
		err = errors.Join(err, os.RemoveAll(s.dir))
	}
	return err
}
