// Package simulation proves by random schedules what a consumer group promises. It
// holds tests only.
package simulation
