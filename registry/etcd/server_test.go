package etcd

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// Every wrong combination of options is one line that names the flag and says what to do.
func TestServerRefuses(t *testing.T) {
	good := freePorts(t, t.TempDir())
	_, port, err := net.SplitHostPort(strings.TrimPrefix(good.ListenPeer, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	peer := good.ListenPeer
	for name, c := range map[string]struct {
		set  func(o *ServerOptions)
		says []string
	}{
		"no URL":                  {func(o *ServerOptions) { o.ListenClient = "" }, []string{"--etcd-listen-client", "want a URL"}},
		"no scheme":               {func(o *ServerOptions) { o.ListenClient = "127.0.0.1:2379" }, []string{"--etcd-listen-client", "want a URL"}},
		"no port":                 {func(o *ServerOptions) { o.ListenClient = "http://127.0.0.1" }, []string{"--etcd-listen-client", "want a URL"}},
		"a path":                  {func(o *ServerOptions) { o.ListenClient = "http://127.0.0.1:2379/x" }, []string{"--etcd-listen-client", "want a URL"}},
		"a name to listen on":     {func(o *ServerOptions) { o.ListenClient = "http://node-a:2379" }, []string{"--etcd-listen-client", "http://0.0.0.0:2379", "--etcd-advertise-client"}},
		"open, wildcard":          {func(o *ServerOptions) { o.ListenClient = "http://0.0.0.0:2379" }, []string{"--etcd-listen-client", "https", "--insecure"}},
		"open, address":           {func(o *ServerOptions) { o.ListenClient = "http://10.0.0.1:2379" }, []string{"--etcd-listen-client", "--insecure"}},
		"open, peer":              {func(o *ServerOptions) { o.ListenPeer = "http://[::]:2379" }, []string{"--etcd-listen-peer", "--insecure"}},
		"https without files":     {func(o *ServerOptions) { o.ListenClient = "https://127.0.0.1:2379" }, []string{"--etcd-listen-client", "https needs", "missing"}},
		"https without authority": {func(o *ServerOptions) { o.ListenPeer, o.Cert, o.Key = "https://127.0.0.1:2380", "c", "k" }, []string{"--etcd-listen-peer", "--etcd-cacert is missing"}},
		"files without https":     {func(o *ServerOptions) { o.Cert, o.Key = "c", "k" }, []string{"--etcd-cert", "have no effect"}},
		"not in the cluster":      {func(o *ServerOptions) { o.InitialCluster = "other=http://127.0.0.1:1" }, []string{"no entry for this member, test", "--etcd-name"}},
		"entry without name":      {func(o *ServerOptions) { o.InitialCluster = "http://127.0.0.1:1" }, []string{"--etcd-initial-cluster", "want NAME=URL"}},
		"entry without port":      {func(o *ServerOptions) { o.InitialCluster = "test=http://a" }, []string{"--etcd-initial-cluster", "entry test", "want a URL"}},
		"name twice":              {func(o *ServerOptions) { o.InitialCluster = "test=http://a:1,test=http://b:1" }, []string{"--etcd-initial-cluster", "twice"}},
		"address twice":           {func(o *ServerOptions) { o.InitialCluster = "test=http://a:1,b=http://a:1" }, []string{"--etcd-initial-cluster", "twice"}},
		"wildcard entry":          {func(o *ServerOptions) { o.InitialCluster = "test=http://0.0.0.0:" + port }, []string{"--etcd-initial-cluster", "no other member can connect"}},
		"entry of other scheme":   {func(o *ServerOptions) { o.InitialCluster = "test=https://127.0.0.1:" + port }, []string{"--etcd-initial-cluster", "--etcd-listen-peer", "both"}},
		"unknown state":           {func(o *ServerOptions) { o.InitialClusterState = "old" }, []string{"--etcd-initial-cluster-state", "new or existing"}},
		"existing but alone":      {func(o *ServerOptions) { o.InitialClusterState = "existing" }, []string{"--etcd-initial-cluster-state", "--etcd-initial-cluster"}},
		"advertised wildcard":     {func(o *ServerOptions) { o.AdvertiseClient = "http://0.0.0.0:1" }, []string{"--etcd-advertise-client", "no client can connect"}},
		"advertised scheme":       {func(o *ServerOptions) { o.AdvertiseClient = "https://a:1" }, []string{"--etcd-advertise-client", "--etcd-listen-client", "both"}},
		"advertised no URL":       {func(o *ServerOptions) { o.AdvertiseClient = "a:1" }, []string{"--etcd-advertise-client", "want a URL"}},
		"address in use":          {func(o *ServerOptions) { o.ListenClient = open(t).Client().Endpoints()[0] }, []string{"in use", "--etcd-listen-client", "--etcd-external"}},
		"files that are not there": {func(o *ServerOptions) {
			o.ListenClient, o.CACert, o.Cert, o.Key = strings.Replace(o.ListenClient, "http", "https", 1), "/none/ca", "/none/c", "/none/k"
		}, []string{"/none/c"}},
	} {
		o := good
		o.ListenPeer = peer
		c.set(&o)
		server, err := StartServer(t.Context(), o)
		if err == nil {
			server.Close()
			t.Errorf("%s: started", name)
			continue
		}
		t.Logf("%s: %v", name, err)
		for _, text := range c.says {
			if !strings.Contains(err.Error(), text) {
				t.Errorf("%s: the error does not say %q: %v", name, text, err)
			}
		}
		if strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: more than a line: %v", name, err)
		}
	}
}

// What a member tells others about where it is.
func TestServerAdvertises(t *testing.T) {
	for name, c := range map[string]struct{ listen, advertise, cluster, client, endpoint string }{
		"alone":             {"http://127.0.0.1:1", "", "", "http://127.0.0.1:1", "http://127.0.0.1:1"},
		"alone, wildcard":   {"http://0.0.0.0:1", "", "", "http://127.0.0.1:1", "http://127.0.0.1:1"},
		"cluster, wildcard": {"http://0.0.0.0:1", "", "test=http://node-a:2,b=http://node-b:2", "http://node-a:1", "http://127.0.0.1:1"},
		"cluster, told":     {"http://[::]:1", "http://x:9", "test=http://node-a:2,b=http://node-b:2", "http://x:9", "http://[::1]:1"},
		"TLS":               {"https://0.0.0.0:1", "", "test=http://node-a:2", "https://node-a:1", "https://node-a:1"},
	} {
		o := ServerOptions{Name: "test", ListenClient: c.listen, ListenPeer: "http://0.0.0.0:2", AdvertiseClient: c.advertise,
			InitialCluster: c.cluster, Insecure: true}
		if strings.HasPrefix(c.listen, "https:") {
			o.CACert, o.Cert, o.Key = certificates(t)
		}
		cfg, err := serverConfig(o)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got := cfg.AdvertiseClientUrls[0].String(); got != c.client {
			t.Errorf("%s: tells clients %s, want %s", name, got, c.client)
		}
		if got := ownEndpoint(cfg); got != c.endpoint {
			t.Errorf("%s: goes to itself at %s, want %s", name, got, c.endpoint)
		}
	}
}

// lockedBuffer is a log that can be read while it is written.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// A member whose quorum is not there waits, says so, and stops when told to.
func TestServerWaitsForItsQuorum(t *testing.T) {
	t.Parallel()
	o := freePorts(t, t.TempDir())
	o.InitialCluster = "test=" + o.ListenPeer + ",b=" + deadEndpoint() + ",c=" + deadEndpoint()
	var log lockedBuffer
	o.Logger = slog.New(slog.NewTextHandler(&log, nil))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	failed := make(chan error, 1)
	go func() {
		_, err := StartServer(ctx, o)
		failed <- err
	}()
	for deadline := time.Now().Add(longEnough); !strings.Contains(log.String(), "waiting for most members"); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("says nothing: %s", log.String())
		}
	}
	cancel()
	select {
	case err := <-failed:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("error %v", err)
		}
	case <-time.After(longEnough):
		t.Fatal("does not stop")
	}
}

// Data and flags that do not fit each other are refused, where etcd itself would
// ignore the flags.
func TestServerRefusesOtherData(t *testing.T) {
	o := freePorts(t, t.TempDir())
	start := func(o ServerOptions) error {
		server, err := StartServer(t.Context(), o)
		if err == nil {
			server.Close()
		}
		return err
	}
	if err := start(o); err != nil {
		t.Fatal(err)
	}
	refuses := func(what string, o ServerOptions, says ...string) {
		t.Helper()
		err := start(o)
		for _, text := range says {
			if err == nil || !strings.Contains(err.Error(), text) {
				t.Errorf("%s: want %q, got: %v", what, text, err)
			}
		}
		t.Logf("%s: %v", what, err)
	}
	other := o
	other.Name = "other"
	refuses("another name", other, o.Dir, "belong to member test", "--etcd-name test")
	grown := o
	grown.InitialCluster = "test=" + o.ListenPeer + ",b=http://127.0.0.1:1"
	refuses("one of several", grown, "cluster of one member", "member add")

	// Of one member by either, but at another address: said, and the data count.
	var log lockedBuffer
	moved := o
	moved.InitialCluster, moved.Logger = "test=http://127.0.0.1:1", slog.New(slog.NewTextHandler(&log, nil))
	if err := start(moved); err != nil || !strings.Contains(log.String(), "--etcd-initial-cluster is not what the data say") || !strings.Contains(log.String(), o.ListenPeer) {
		t.Errorf("another address: error %v, log %s", err, log.String())
	}

	record := memberRecord{Version: 1, Etcd: "3.99.0", Name: "test"}
	write := func() {
		data, err := json.Marshal(record)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(memberFile(o.Dir), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write()
	refuses("newer etcd", o, "3.99.0", "use a newer one")
	record = memberRecord{Version: 2, Etcd: "3.7.0", Name: "test"}
	write()
	refuses("newer layout", o, "version 2", "use a newer one")
	if err := os.Remove(memberFile(o.Dir)); err != nil {
		t.Fatal(err)
	}
	wals, err := filepath.Glob(filepath.Join(o.Dir, "member", "wal", "*.wal"))
	if err != nil || len(wals) == 0 {
		t.Fatal(wals, err)
	}
	data, err := os.ReadFile(wals[0])
	if err != nil {
		t.Fatal(err)
	}
	copy(data[64:], "damage damage damage damage")
	if err := os.WriteFile(wals[0], data, 0o600); err != nil {
		t.Fatal(err)
	}
	refuses("damaged write-ahead log", o, o.Dir, "start embedded etcd")
}

// certificates makes an authority and one certificate signed by it, for every use and
// for this machine, in files.
func certificates(t *testing.T) (ca, cert, key string) {
	t.Helper()
	dir := t.TempDir()
	write := func(name, kind string, der []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	create := func(template, parent *x509.Certificate, public *ecdsa.PublicKey, signer *ecdsa.PrivateKey) []byte {
		template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
		der, err := x509.CreateCertificate(rand.Reader, template, parent, public, signer)
		if err != nil {
			t.Fatal(err)
		}
		return der
	}
	newKey := func() *ecdsa.PrivateKey {
		k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	caKey, ownKey := newKey(), newKey()
	authority := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"}, IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	ca = write("ca.pem", "CERTIFICATE", create(authority, authority, &caKey.PublicKey, caKey))
	own := &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "muster"}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	cert = write("cert.pem", "CERTIFICATE", create(own, authority, &ownKey.PublicKey, caKey))
	der, err := x509.MarshalECPrivateKey(ownKey)
	if err != nil {
		t.Fatal(err)
	}
	return ca, cert, write("key.pem", "EC PRIVATE KEY", der)
}

// With https clients must show a certificate that the authority has signed, and find
// the server's own signed by it.
func TestServerTLS(t *testing.T) {
	t.Parallel()
	o := freePorts(t, t.TempDir())
	o.ListenClient, o.ListenPeer = strings.Replace(o.ListenClient, "http:", "https:", 1), strings.Replace(o.ListenPeer, "http:", "https:", 1)
	o.CACert, o.Cert, o.Key = certificates(t)
	server, err := StartServer(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	endpoints := []string{server.Endpoint}
	st, err := Open(t.Context(), Options{Endpoints: endpoints, CACert: o.CACert, Cert: o.Cert, Key: o.Key})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	put(t, st, "/tls", "1")
	otherCA, otherCert, otherKey := certificates(t)
	for name, c := range map[string]struct {
		bad  Options
		says string
	}{
		"no certificate":            {Options{Endpoints: endpoints, CACert: o.CACert}, "no etcd at"}, // the alert may come after the connection's end
		"certificate of others":     {Options{Endpoints: endpoints, CACert: o.CACert, Cert: otherCert, Key: otherKey}, "no etcd at"},
		"server's not to be proved": {Options{Endpoints: endpoints, CACert: otherCA, Cert: o.Cert, Key: o.Key}, "certificate signed by unknown authority"},
		"without TLS":               {Options{Endpoints: []string{strings.Replace(server.Endpoint, "https:", "http:", 1)}}, "no etcd at"},
	} {
		c.bad.DialTimeout = 8 * time.Second
		st, err := Open(t.Context(), c.bad)
		if err == nil {
			st.Close()
			t.Errorf("%s: opened", name)
		} else if !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: the error does not say %q: %v", name, c.says, err)
		}
		t.Logf("%s: %v", name, err)
	}
	// What the server says to that: the client above may have seen only that the
	// connection ended, when it wrote before it read.
	for says, c := range map[string]Options{"certificate required": {CACert: o.CACert}, "unknown certificate authority": {CACert: o.CACert, Cert: otherCert, Key: otherKey}} {
		if err := refusal(t, strings.TrimPrefix(server.Endpoint, "https://"), c); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("the server says %v, want %s", err, says)
		}
	}
}

// refusal connects and only reads.
func refusal(t *testing.T, address string, o Options) error {
	t.Helper()
	secrets, err := clientTLS(o)
	if err != nil {
		t.Fatal(err)
	}
	secrets.NextProtos = []string{"h2"}
	c, err := tls.Dial("tcp", address, secrets)
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetReadDeadline(time.Now().Add(longEnough))
	for buf := make([]byte, 1024); err == nil; {
		_, err = c.Read(buf)
	}
	return err
}

// History is kept to some length, and compactions are worth their while.
func TestCompactTo(t *testing.T) {
	c := compaction{keep: 1000, step: 100}
	for _, x := range []struct{ first, newest, want int64 }{
		{0, 1, 0},
		{1, 1000, 0},
		{1, 1100, 0},
		{1, 1101, 101},
		{1, 10_000, 9000},
		{9000, 10_000, 0},
		{9000, 10_100, 9100},
		{10_000, 10_000, 0}, // compacted by hand, to the newest
	} {
		if got := c.to(x.first, x.newest); got != x.want {
			t.Errorf("kept from %d, newest %d: %d, want %d", x.first, x.newest, got, x.want)
		}
	}
}
