module github.com/muster-io/muster/bench

go 1.26
