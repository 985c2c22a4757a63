package memory_test

import (
	"testing"
	"testing/synctest"

	"github.com/muster-io/muster/registry/memory"
	"github.com/muster-io/muster/registry/storetest"
)

func TestContract(t *testing.T) {
	for _, c := range storetest.Cases() {
		t.Run(c.Name, func(t *testing.T) {
			prefix := storetest.Prefix(t)
			synctest.Test(t, func(t *testing.T) { c.Test(t, memory.New(), prefix) })
		})
	}
}
