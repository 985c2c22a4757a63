package storage

import (
	"encoding/base64"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
)

// TopicID is the UUID of a topic. Its text is Kafka's: base64 for URLs, no padding.
type TopicID [16]byte

func (id TopicID) String() string { return base64.RawURLEncoding.EncodeToString(id[:]) }

// ParseTopicID reads the text of an id.
func ParseTopicID(text string) (TopicID, error) {
	var id TopicID
	b, err := base64.RawURLEncoding.DecodeString(text)
	if err == nil && len(b) != len(id) {
		err = fmt.Errorf("it has %d bytes", len(b))
	}
	if err != nil {
		return id, fmt.Errorf("topic id %q: %w", text, err)
	}
	copy(id[:], b)
	return id, nil
}

// EnsureIdentity makes dir the directory of a partition of the topic, or checks
// that it is: the error is then an *IdentityError. It comes before Open, so that a
// directory with a log in it always says whose it is.
func EnsureIdentity(fs FS, dir string, id TopicID) error {
	if err := fs.MkdirAll(dir); err != nil {
		return fmt.Errorf("make log directory %s: %w", dir, err)
	}
	data, err := readSmallFile(fs, dir, idName)
	if errors.Is(err, ErrNotExist) {
		segments, err := listOffsets(fs, dir, logSuffix)
		if err != nil {
			return err
		}
		if len(segments) > 0 {
			return &IdentityError{Dir: dir, Want: id, Reason: idName + " is missing, and there are segments"}
		}
		return writeSmallFile(fs, dir, idName, []byte("version: 0\ntopic_id: "+id.String()+"\n"))
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", filepath.Join(dir, idName), err)
	}
	have, err := parseIdentity(string(data))
	if err != nil {
		return &IdentityError{Dir: dir, Want: id, Reason: fmt.Sprintf("%s: %v", idName, err)}
	}
	if have != id {
		return &IdentityError{Dir: dir, Want: id, Have: have}
	}
	return nil
}

// ReadIdentity tells whose directory it is. One that says nothing is ErrNotExist.
func ReadIdentity(fs FS, dir string) (TopicID, error) {
	data, err := readSmallFile(fs, dir, idName)
	if err != nil {
		return TopicID{}, fmt.Errorf("read %s: %w", filepath.Join(dir, idName), err)
	}
	id, err := parseIdentity(string(data))
	if err != nil {
		return TopicID{}, fmt.Errorf("read %s: %w", filepath.Join(dir, idName), err)
	}
	return id, nil
}

func parseIdentity(text string) (TopicID, error) {
	version, rest, _ := strings.Cut(text, "\n")
	if version != "version: 0" {
		return TopicID{}, fmt.Errorf("first line %q is not known", version)
	}
	value, ok := strings.CutPrefix(strings.TrimSpace(rest), "topic_id: ")
	if !ok {
		return TopicID{}, errors.New("there is no topic_id")
	}
	return ParseTopicID(value)
}
