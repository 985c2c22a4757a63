package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// group is the hosts of one group. Neighbours in the order of ids are in different ones.
type group struct {
	o       options
	hosts   []*hostProcess
	trouble chan error
	left    chan string
}

type hostProcess struct {
	cmd    *exec.Cmd
	in     io.WriteCloser
	exited chan struct{}
	err    error // of Wait
}

func memberID(n int) string { return fmt.Sprintf("m%04d", n) }

// startGroup returns when all hosts are ready; nobody has joined yet.
func startGroup(ctx context.Context, o options) (g *group, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	g = &group{o: o, trouble: make(chan error, 1), left: make(chan string, 1)}
	defer func() {
		if err != nil {
			g.kill()
		}
	}()
	ready := make(chan struct{}, o.hosts)
	for i := range o.hosts {
		args := []string{"-do", "host", "-etcd", o.etcd, "-group", o.group, "-topic", o.topic, "-strategy", o.strategy,
			"-ttl", o.ttl.String(), "-own=" + strconv.FormatBool(o.own)}
		if i == 0 && o.profile != "" {
			args = append(args, "-profile", o.profile)
		}
		cmd := exec.Command(self, args...)
		cmd.Stderr = os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		h := &hostProcess{cmd: cmd, exited: make(chan struct{})}
		if h.in, err = cmd.StdinPipe(); err != nil {
			return g, err
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			return g, err
		}
		if err := cmd.Start(); err != nil {
			return g, err
		}
		g.hosts = append(g.hosts, h)
		go func() {
			defer close(h.exited)
			g.listen(out, ready)
			h.err = cmd.Wait()
			g.fail(fmt.Errorf("a host has ended: %v", h.err))
		}()
	}
	for range o.hosts {
		select {
		case <-ready:
		case err := <-g.trouble:
			return g, err
		case <-time.After(o.limit):
			return g, fmt.Errorf("the hosts are not ready after %s", o.limit)
		case <-ctx.Done():
			return g, context.Cause(ctx)
		}
	}
	return g, nil
}

func (g *group) listen(out io.Reader, ready chan<- struct{}) {
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		word, id, _ := strings.Cut(lines.Text(), " ")
		switch word {
		case "ready":
			ready <- struct{}{}
		case "left":
			select {
			case g.left <- id:
			default: // nobody has asked
			}
		case "failed":
			g.fail(fmt.Errorf("member %s has failed", id))
		}
	}
}

// fail reports trouble; one report is enough.
func (g *group) fail(err error) {
	select {
	case g.trouble <- err:
	default:
	}
}

// tell has a member join or leave.
func (g *group) tell(verb string, n int) error {
	h := g.hosts[n%len(g.hosts)]
	if _, err := fmt.Fprintf(h.in, "%s %s\n", verb, memberID(n)); err != nil {
		return fmt.Errorf("%s %s: %w", verb, memberID(n), err)
	}
	return nil
}

// hasLeft waits for a member that was told to leave.
func (g *group) hasLeft(ctx context.Context) error {
	select {
	case <-g.left:
		return nil
	case err := <-g.trouble:
		return err
	case <-time.After(g.o.limit):
		return fmt.Errorf("a member has not left after %s", g.o.limit)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// stop ends the hosts.
func (g *group) stop() {
	for _, h := range g.hosts {
		h.in.Close()
	}
	deadline := time.After(10 * time.Second)
	for _, h := range g.hosts {
		select {
		case <-h.exited:
		case <-deadline:
			g.kill()
			return
		}
	}
}

func (g *group) kill() {
	for _, h := range g.hosts {
		_ = h.cmd.Process.Kill() // the only error is that it has ended
	}
	for _, h := range g.hosts {
		<-h.exited
	}
}

// cpu is what the hosts have used once they have ended.
func (g *group) cpu() (used time.Duration) {
	for _, h := range g.hosts {
		used += h.cmd.ProcessState.UserTime() + h.cmd.ProcessState.SystemTime()
	}
	return used
}
