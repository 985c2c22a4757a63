package registry_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/registrytest"
)

// Announce myself: a key that says where I am, for as long as I live.
func ExampleAnnounce() {
	ctx := context.Background()
	// In a program: etcd.Open(ctx, etcd.Options{Endpoints: …}).
	st, err := registrytest.Open(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer st.Close()

	options := registry.AnnounceOptions{
		Key:   "/services/mail/node-a",
		Value: []byte("node-a.example.com:25"),
		Listener: func(e registry.AnnounceEvent) {
			switch e.Kind {
			case registry.AnnounceRegistered:
				fmt.Println("registered", e.Registration.Key)
			case registry.AnnounceClosed:
				fmt.Println("gone")
			}
		},
	}
	mine, err := registry.Announce(ctx, st, options)
	if err != nil {
		log.Fatal(err)
	}

	// Nobody else can have the key meanwhile.
	_, err = registry.Announce(ctx, st, registry.AnnounceOptions{Key: options.Key, Value: []byte("impostor")})
	if held, ok := errors.AsType[*registry.HeldError](err); ok {
		fmt.Printf("held by %s\n", held.KV.Value)
	}

	if err := mine.Close(ctx); err != nil {
		log.Fatal(err)
	}
	// Output:
	// registered /services/mail/node-a
	// held by node-a.example.com:25
	// gone
}

// Watch who is here.
func ExampleOpenView() {
	ctx := context.Background()
	st, err := registrytest.Open(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer st.Close()
	a, err := registry.Announce(ctx, st, registry.AnnounceOptions{Key: "/services/mail/node-a", Value: []byte("node-a:25")})
	if err != nil {
		log.Fatal(err)
	}

	view, err := registry.OpenView(ctx, st, []string{"/services/mail/"}, registry.ViewOptions{}, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer view.Close()
	show := func() {
		<-view.Changed()
		fmt.Print("here:")
		for kv := range view.Snapshot().All(0) {
			fmt.Printf(" %s", kv.Value)
		}
		fmt.Println()
	}
	show()
	b, err := registry.Announce(ctx, st, registry.AnnounceOptions{Key: "/services/mail/node-b", Value: []byte("node-b:25")})
	if err != nil {
		log.Fatal(err)
	}
	show()
	if err := a.Close(ctx); err != nil {
		log.Fatal(err)
	}
	show()
	if err := b.Close(ctx); err != nil {
		log.Fatal(err)
	}
	// Output:
	// here: node-a:25
	// here: node-a:25 node-b:25
	// here: node-b:25
}

// Own a key exclusively, and fence what is written in its name.
func ExampleOwn() {
	ctx := context.Background()
	st, err := registrytest.Open(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer st.Close()
	session, err := registry.OpenSession(ctx, st, registry.SessionOptions{TTL: 6 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer session.Close(ctx)

	// report writes under the condition that the job is still owned by that owner.
	report := func(owner *registry.Ownership, text string) {
		res, err := st.Txn(ctx, registry.Txn{
			If:   []registry.Cond{owner.Fence()},
			Then: []registry.Op{registry.Put("/reports/nightly", []byte(text), 0)},
		})
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(text, res.Succeeded)
	}

	first, err := registry.Own(ctx, session, "/jobs/nightly", []byte("worker 1"))
	if err != nil {
		log.Fatal(err)
	}
	report(first, "worker 1 has begun")

	// Worker 1 gives up; worker 2, often in another process, takes over. What
	// worker 1 still sends is refused.
	if err := first.Release(ctx); err != nil {
		log.Fatal(err)
	}
	second, err := registry.Own(ctx, session, "/jobs/nightly", []byte("worker 2"))
	if err != nil {
		log.Fatal(err)
	}
	report(second, "worker 2 has begun")
	report(first, "worker 1 is done")
	fmt.Println("a newer token:", second.Token > first.Token)
	// Output:
	// worker 1 has begun true
	// worker 2 has begun true
	// worker 1 is done false
	// a newer token: true
}
