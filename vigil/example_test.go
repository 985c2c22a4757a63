package vigil_test

import (
	"context"
	"fmt"
	"log"

	"github.com/muster-io/muster/registry"
	"github.com/muster-io/muster/registry/registrytest"
	"github.com/muster-io/muster/vigil"
)

// A consumer draws a secret for each registration, and names the session after it has
// registered.
func Example() {
	ctx := context.Background()
	st, err := registrytest.Open(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer st.Close()
	const clusterID = "Zc0wk7bXT_m3kWq1s0Nn4g" // the value of registry.Root.ClusterID
	group := registry.Root("").Group("shop")

	client := vigil.Ask(vigil.ClientOptions{ClusterID: clusterID})
	defer client.Close()
	client.Brokers([]int32{1, 2, 3}) // and again whenever /brokers/ids changes

	session, err := registry.OpenSession(ctx, st, registry.SessionOptions{})
	if err != nil {
		log.Fatal(err)
	}
	secret := vigil.NewSecret()
	value, err := registry.Encode(registry.ConsumerRecord{Version: 1, Subscription: map[string]int32{"orders": 1},
		Pattern: registry.PatternStatic, Timestamp: "1796009631365", Notice: secret.Notice()})
	if err != nil {
		log.Fatal(err)
	}
	reg, err := registry.Register(ctx, st, session, group.ID("node-b:1"), value)
	if err != nil {
		log.Fatal(err)
	}
	client.Add(session.Lease(), reg.Key, secret)

	// … until it leaves:
	client.Remove(session.Lease())
	fmt.Println(session.Close(ctx))
	// Output: <nil>
}
