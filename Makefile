.PHONY: run test build simulation

run:
	go run ./cmd/muster server

test:
	go test ./...

build:
	go build -trimpath -o bin/muster ./cmd/muster

# What CI runs of the simulation of consumer groups: see rebalance/simulation.
simulation:
	go test ./rebalance/simulation -run TestSchedules -schedules 5000 -race -timeout 60m
	go test ./rebalance/simulation -run TestSchedules -schedules 50000 -timeout 60m
