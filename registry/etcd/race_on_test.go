//go:build race

package etcd

// raced tells that the race detector makes everything ten times slower.
const raced = true
