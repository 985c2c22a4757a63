module github.com/muster-io/muster/conformance

go 1.26
