"""Parameter server: hosts the shards of jobs and applies updates to them."""
