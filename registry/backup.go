package registry

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"
)

// A backup is text, one JSON object a line: a header, a line for each key, an end.
//
//	{"muster_backup":1,"root":"/kc/prod","revision":4711,"time":"2026-05-01T12:00:00Z","keys":2}
//	{"key":"/brokers/topics/orders","value":"{\"version\":1,…}"}
//	{"key":"/consumers/g/offsets/orders/1-0","value":"42"}
//	{"end":2,"sha256":"…"}
//
// Keys count from the root. What is not UTF-8 stands in key_base64 or value_base64.
// The hash is over all lines before the last one. Keys under a lease are left out:
// they say who is alive.

// BackupHeader is the first line of a backup.
type BackupHeader struct {
	Version  int       `json:"muster_backup"`
	Root     string    `json:"root"`
	Revision int64     `json:"revision"` // all keys are as of this one
	Time     time.Time `json:"time"`
	Keys     int       `json:"keys"`
}

const backupVersion = 1

type backupLine struct {
	Key         string `json:"key,omitempty"`
	KeyBase64   []byte `json:"key_base64,omitempty"`
	Value       string `json:"value,omitempty"`
	ValueBase64 []byte `json:"value_base64,omitempty"`
}

type backupEnd struct {
	Keys int    `json:"end"`
	Hash string `json:"sha256"`
}

// Errors of Backup and Restore that callers branch on.
var (
	// ErrBackup refuses a file that is damaged, cut off or of a newer version. Nothing
	// has been written.
	ErrBackup = errors.New("not a whole backup")
	// ErrNotEmpty refuses to restore where there are keys already.
	ErrNotEmpty = errors.New("registry is not empty")
)

// Backup writes the persistent keys under root, all at one revision, to w. It holds
// them in memory meanwhile. If history is compacted past that revision before all are
// read the error is ErrCompacted, and another try is likely to succeed.
func Backup(ctx context.Context, st Store, root Root, w io.Writer) (BackupHeader, error) {
	kvs, revision, err := List(ctx, st, root.Prefix(), 0)
	if err != nil {
		return BackupHeader{}, fmt.Errorf("back up %s: %w", root, err)
	}
	h := BackupHeader{Version: backupVersion, Root: root.String(), Revision: revision, Time: time.Now().UTC().Truncate(time.Second)}
	for _, kv := range kvs {
		if kv.Key == root.Restoring() {
			return BackupHeader{}, fmt.Errorf("back up %s: a restore has not been finished there: run it again first", root)
		}
		if kv.Lease == 0 {
			h.Keys++
		}
	}
	hash := sha256.New()
	buf := bufio.NewWriter(w)
	enc := json.NewEncoder(io.MultiWriter(buf, hash))
	enc.SetEscapeHTML(false)
	err = enc.Encode(h)
	for _, kv := range kvs {
		if kv.Lease == 0 && err == nil {
			err = enc.Encode(lineOf(strings.TrimPrefix(kv.Key, string(root)), kv.Value))
		}
	}
	if err == nil {
		err = json.NewEncoder(buf).Encode(backupEnd{Keys: h.Keys, Hash: hex.EncodeToString(hash.Sum(nil))})
	}
	if err := errors.Join(err, buf.Flush()); err != nil {
		return BackupHeader{}, fmt.Errorf("write backup: %w", err)
	}
	return h, nil
}

func lineOf(key string, value []byte) backupLine {
	var l backupLine
	if l.Key = key; !utf8.ValidString(key) {
		l.Key, l.KeyBase64 = "", []byte(key)
	}
	if l.Value = string(value); !utf8.Valid(value) {
		l.Value, l.ValueBase64 = "", value
	}
	return l
}

// backup is a whole one, as read.
type backup struct {
	BackupHeader
	hash   string
	keys   []string // from the root
	values map[string][]byte
}

// maxBackupLine is more than any value that etcd takes, and its key, make as text.
const maxBackupLine = 16 << 20

func readBackup(r io.Reader) (*backup, error) {
	fail := func(format string, args ...any) (*backup, error) {
		return nil, fmt.Errorf("%w: "+format, append([]any{ErrBackup}, args...)...)
	}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxBackupLine)
	b := &backup{values: map[string][]byte{}}
	hash := sha256.New()
	if !lines.Scan() {
		return fail("it has no first line: %v", lines.Err())
	}
	if err := json.Unmarshal(lines.Bytes(), &b.BackupHeader); err != nil || b.Version < 1 {
		return fail("its first line is not that of a backup")
	}
	if b.Version > backupVersion {
		return fail("it has version %d and this program knows up to %d: use a newer one", b.Version, backupVersion)
	}
	for n := 1; ; n++ {
		fmt.Fprintf(hash, "%s\n", lines.Bytes())
		if !lines.Scan() {
			if err := lines.Err(); err != nil {
				return fail("line %d: %w", n+1, err)
			}
			return fail("it is cut off after line %d; %d keys were to come", n, b.Keys)
		}
		if n > b.Keys {
			break
		}
		key, value, err := parseLine(lines.Bytes())
		if err != nil {
			return fail("line %d: %w", n+1, err)
		}
		if _, twice := b.values[key]; twice {
			return fail("line %d: key %q is there twice", n+1, key)
		}
		b.keys, b.values[key] = append(b.keys, key), value
	}
	var end backupEnd
	b.hash = hex.EncodeToString(hash.Sum(nil))
	switch err := strict(lines.Bytes(), &end); {
	case err != nil || end.Keys != b.Keys || end.Hash == "":
		return fail("its last line is not the end of %d keys", b.Keys)
	case end.Hash != b.hash:
		return fail("it was changed: its hash is %s, not %s", b.hash, end.Hash)
	case lines.Scan():
		return fail("something stands after its end")
	}
	return b, nil
}

func strict(data []byte, to any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	return d.Decode(to)
}

func parseLine(data []byte) (key string, value []byte, err error) {
	var l backupLine
	if err := strict(data, &l); err != nil {
		return "", nil, fmt.Errorf("it is not a key: %w", err)
	}
	if key = l.Key; l.KeyBase64 != nil {
		key = string(l.KeyBase64)
	}
	if value = l.ValueBase64; value == nil {
		value = []byte(l.Value)
	}
	if !strings.HasPrefix(key, "/") {
		return "", nil, fmt.Errorf("key %q does not begin with a slash", key)
	}
	return key, value, nil
}

// Restore writes the keys of a backup under root, which may be another than theirs and
// must be empty of keys, those under leases included. The file is read and checked as a
// whole before anything is written.
//
// While it is under way a marker stands at Root.Restoring. After a crash halfway the
// same backup can be restored again, and only that: it goes on where it was.
//
// Create-revisions are new afterwards. They are what ownership is fenced by and what
// tells a topic from a later one of its name, so daemons and consumers must be stopped
// before, and started after it.
func Restore(ctx context.Context, st Store, root Root, r io.Reader) (BackupHeader, error) {
	b, err := readBackup(r)
	if err != nil {
		return BackupHeader{}, err
	}
	marker, err := beginRestore(ctx, st, root, b)
	if err != nil {
		return BackupHeader{}, fmt.Errorf("restore to %s: %w", root, err)
	}
	if marker.Key == "" {
		return b.BackupHeader, nil
	}
	if err := b.write(ctx, st, root, marker); err != nil {
		return BackupHeader{}, fmt.Errorf("restore to %s is not finished, run it again with the same file: %w", root, err)
	}
	return b.BackupHeader, nil
}

// beginRestore puts the marker, or finds that of an earlier try, and returns the
// condition that it stands: none if there is nothing left to do.
func beginRestore(ctx context.Context, st Store, root Root, b *backup) (Cond, error) {
	key := root.Restoring()
	res, err := st.Txn(ctx, Txn{
		// Holds if there is no key at all: one that exists was created at 1 or later.
		If:   []Cond{{Key: root.Prefix(), Prefix: true, Field: FieldCreateRevision, Relation: Less, Number: 1}},
		Then: []Op{Put(key, []byte(b.hash), 0)},
	})
	if err != nil {
		return Cond{}, err
	}
	if res.Succeeded {
		return CreatedAt(key, res.Revision), nil
	}
	kvs, _, err := List(ctx, st, root.Prefix(), 0)
	if err != nil {
		return Cond{}, err
	}
	var marker Cond
	var other string
	same := 0
	for _, kv := range kvs {
		value, ours := b.values[strings.TrimPrefix(kv.Key, string(root))]
		switch {
		case kv.Key == key && string(kv.Value) != b.hash:
			return Cond{}, fmt.Errorf("%w: another backup, with hash %s, was being restored: restore that one again, or delete everything under %s first", ErrNotEmpty, clip(kv.Value), root)
		case kv.Key == key:
			marker = CreatedAt(key, kv.CreateRevision)
		case ours && kv.Lease == 0 && bytes.Equal(value, kv.Value):
			same++
		case other == "":
			other = kv.Key
		}
	}
	switch {
	case other == "" && marker.Key != "":
		return marker, nil
	case other == "" && same == len(b.keys):
		return Cond{}, nil // an earlier try has done it all; its answer was lost
	}
	if other == "" && len(kvs) > 0 {
		other = kvs[0].Key
	}
	return Cond{}, fmt.Errorf("%w: it has %d keys, such as %s: stop what uses it, and delete them or choose another --registry-root",
		ErrNotEmpty, len(kvs), other)
}

// maxRestoreBytes of keys and values go into one transaction, unless a single one is
// larger: etcd takes requests of up to 1.5 MiB.
const maxRestoreBytes = 512 << 10

// write creates the keys that are not there yet, and then takes the marker away.
func (b *backup) write(ctx context.Context, st Store, root Root, marker Cond) error {
	var ops []Op
	size := 0
	flush := func(last ...Op) error {
		res, err := st.Txn(ctx, Txn{If: []Cond{marker}, Then: append(ops, last...)})
		if err == nil && !res.Succeeded {
			err = errors.New("somebody has taken its marker away, perhaps another restore")
		}
		ops, size = nil, 0
		return err
	}
	for _, k := range b.keys {
		key, value := root.Key(k), b.values[k]
		if n := len(key) + len(value); len(ops) == MaxNested || len(ops) > 0 && size+n > maxRestoreBytes {
			if err := flush(); err != nil {
				return err
			}
		}
		ops = append(ops, Nested(Txn{If: []Cond{Absent(key)}, Then: []Op{Put(key, value, 0)}}))
		size += len(key) + len(value)
	}
	return flush(Delete(marker.Key))
}
