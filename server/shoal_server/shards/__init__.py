"""Shards: the state machine, its consistency mode, arenas and the lock around them."""
