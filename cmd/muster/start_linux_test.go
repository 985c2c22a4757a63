package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

// What stays until it is told to stop may be told so while it starts: that is no failure.
func TestStopWhileStarting(t *testing.T) {
	g := newRunGroup(t)
	for _, args := range [][]string{
		{"run", "--group", "g", "--topic", "shards", "--", "sleep", "100"},
		{"consume", "--group", "c", "--topic", "nothing.yet"},
		{"groups", "watch", "g"},
		{"registry", "watch"},
	} {
		for delay := 8 * time.Millisecond; delay < 200*time.Millisecond; delay += delay / 8 {
			ctx, cancel := context.WithTimeout(t.Context(), runPatience)
			cmd := exec.CommandContext(ctx, "/proc/self/exe", args...)
			// A program with the race detector sleeps for a second before it ends.
			cmd.Env = append(os.Environ(), asMuster+"=1", "JOURNAL="+g.journal, "MUSTER_ETCD_ENDPOINTS="+g.st.Endpoint, "GORACE=atexit_sleep_ms=1")
			var stderr bytes.Buffer
			cmd.Stdout, cmd.Stderr = &stderr, &stderr
			cmd.WaitDelay = runPatience
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(delay) // the moment of the signal is what is varied
			_ = cmd.Process.Signal(syscall.SIGTERM)
			err := cmd.Wait()
			cancel()
			if exit, ok := errors.AsType[*exec.ExitError](err); ok {
				if s := exit.Sys().(syscall.WaitStatus); s.Signaled() && s.Signal() == syscall.SIGTERM && stderr.Len() == 0 {
					continue // it had not come to ask for signals
				}
			}
			if err != nil {
				t.Errorf("%s, after %s: %v; %s", args[0], delay, err, stderr.String())
			}
		}
	}
}
