package etcd

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.etcd.io/etcd/api/v3/version"
	"go.etcd.io/etcd/server/v3/embed"
	"golang.org/x/mod/semver"
)

// memberRecord is the file beside etcd's own data that says whose they are: etcd
// itself looks at the flags that say so only while the directory is new, and ignores
// them from then on.
type memberRecord struct {
	Version int    `json:"version"`
	Etcd    string `json:"etcd"` // version that last ran on the data
	Name    string `json:"name"`
}

const memberVersion = 1

func memberFile(dir string) string { return filepath.Join(dir, "muster.json") }

// checkMemberDir refuses data of a newer etcd and of a member of another name.
func checkMemberDir(o ServerOptions) error {
	data, err := os.ReadFile(memberFile(o.Dir))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the etcd data: %w", err)
	}
	var r memberRecord
	if err := json.Unmarshal(data, &r); err != nil {
		return fmt.Errorf("%s cannot be read: %w", memberFile(o.Dir), err)
	}
	minor := func(v string) string { return semver.MajorMinor("v" + v) }
	switch {
	case r.Version > memberVersion:
		return fmt.Errorf("%s has version %d and this program knows up to %d: use a newer one", memberFile(o.Dir), r.Version, memberVersion)
	case semver.Compare(minor(r.Etcd), minor(version.Version)) > 0:
		return fmt.Errorf("the etcd data in %s are of version %s and this program has etcd %s: use a newer one", o.Dir, r.Etcd, version.Version)
	case r.Name != o.Name:
		return fmt.Errorf("the etcd data in %s belong to member %s: start with --etcd-name %s, or choose another --data-dir", o.Dir, r.Name, r.Name)
	}
	return nil
}

// saveMember remembers whose the data are, once the server runs on them.
func saveMember(o ServerOptions) error {
	data, err := json.Marshal(memberRecord{Version: memberVersion, Etcd: version.Version, Name: o.Name})
	if err != nil {
		return err
	}
	part := memberFile(o.Dir) + ".part"
	if err := os.WriteFile(part, append(data, '\n'), 0o600); err != nil {
		return fmt.Errorf("remember the etcd member: %w", err)
	}
	if err := os.Rename(part, memberFile(o.Dir)); err != nil {
		return fmt.Errorf("remember the etcd member: %w", err)
	}
	return nil
}

// checkMembers compares the flags with the cluster as the data know it. A member that
// is alone by its data and one of several by its flags would hold a registry of its
// own beside that of the others. Other differences are normal after members were added
// or replaced; then the data count, and differs says so.
func checkMembers(o ServerOptions, e *embed.Etcd) (differs string, err error) {
	var actual, urls []string
	for _, m := range e.Server.Cluster().Members() {
		name := m.Name
		if name == "" {
			name = "?" // it has not started yet
		}
		urls = append(urls, m.PeerURLs...)
		actual = append(actual, name+"="+strings.Join(m.PeerURLs, "+"))
	}
	slices.Sort(actual)
	var said []string
	if o.InitialCluster != "" {
		for entry := range strings.SplitSeq(o.InitialCluster, ",") {
			_, u, _ := strings.Cut(entry, "=")
			said = append(said, u)
		}
	}
	switch {
	case len(said) > 1 && len(actual) == 1:
		return "", fmt.Errorf("the etcd data in %s are those of a cluster of one member, and --etcd-initial-cluster names %d: leave the flag out, or choose an empty --data-dir, or make the cluster grow with etcdctl member add",
			o.Dir, len(said))
	case len(said) == 0 && len(actual) > 1:
		return "", fmt.Errorf("the etcd data in %s are those of one of the members %s: start with --etcd-initial-cluster", o.Dir, strings.Join(actual, ","))
	}
	slices.Sort(urls)
	slices.Sort(said)
	if len(said) > 0 && !slices.Equal(urls, said) {
		differs = strings.Join(actual, ",")
	}
	return differs, nil
}
