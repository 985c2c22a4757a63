//go:build !race

package etcd

const raced = false
