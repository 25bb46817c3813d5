"""Calls on shards: by gRPC and by lanes."""
