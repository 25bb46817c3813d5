"""The gRPC services of the coordinator."""
