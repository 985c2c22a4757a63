.PHONY: run test build

run:
	go run ./cmd/muster server

test:
	go test ./...

build:
	go build -trimpath -o bin/muster ./cmd/muster
