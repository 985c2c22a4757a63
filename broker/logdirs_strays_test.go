package broker

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/muster-io/muster/broker/storage"
)

// Of what was put aside only that is removed later which did not come back, and nothing
// else is said. The log of another topic of the same name is not taken for it.
func TestStraysThatCameBack(t *testing.T) {
	var said bytes.Buffer
	d := newLogDirs(t.TempDir(), slog.New(slog.NewTextHandler(&said, nil)), nil)
	first, second := uuid.New(), uuid.New()
	make := func(id uuid.UUID) {
		t.Helper()
		if err := storage.EnsureIdentity(storage.OS{}, d.partition("t", 0), storage.TopicID(id)); err != nil {
			t.Fatal(err)
		}
	}
	is := func(want uuid.UUID) {
		t.Helper()
		got := d.topicID("t", 0)
		if want == uuid.Nil && got != "" || want != uuid.Nil && got != want.String() {
			t.Fatalf("the log is that of %q, want %s", got, want)
		}
	}
	aside := func() {
		t.Helper()
		if err := d.setAside("t", 0, true); err != nil {
			t.Fatal(err)
		}
		is(uuid.Nil)
	}
	back := func(id uuid.UUID) {
		t.Helper()
		if err := d.reclaim("t", 0, id); err != nil {
			t.Fatal(err)
		}
	}
	make(first)
	aside()
	make(second)
	back(first) // there is a log
	is(second)
	aside()
	back(uuid.New())
	is(uuid.Nil)
	back(second)
	is(second)
	if err := d.condemnStrays(time.Now().Add(strayKept - time.Minute)); err != nil || strings.Contains(said.String(), "is removed") {
		t.Fatalf("%v: %s", err, said.String())
	}
	if err := d.condemnStrays(time.Now().Add(strayKept + time.Minute)); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(said.String(), "stray log is removed"); n != 1 {
		t.Errorf("said %d times that a log is removed:\n%s", n, said.String())
	}
	is(second)
	aside()
	back(first)
	is(uuid.Nil)
	back(second)
	is(second)
}

// A registry that has lost its keys is no reason to remove anything for good.
func TestStraysOfAWipedRegistryStay(t *testing.T) {
	var trust error
	d := newLogDirs(t.TempDir(), slog.New(slog.DiscardHandler), func(context.Context) error { return trust })
	if err := storage.EnsureIdentity(storage.OS{}, d.partition("t", 0), storage.TopicID(uuid.New())); err != nil {
		t.Fatal(err)
	}
	if err := d.setAside("t", 0, true); err != nil {
		t.Fatal(err)
	}
	later := time.Now().Add(strayKept + time.Minute)
	for _, trust = range []error{errors.New("no cluster id"), nil} {
		d.sweep(t.Context(), later)
		names, err := readNames(d.stray())
		if err != nil || (len(names) == 1) != (trust != nil) {
			t.Errorf("with a registry that is trusted or not (%v) %d are left, error %v", trust, len(names), err)
		}
	}
}
